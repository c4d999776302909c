"""An owner's share of a room that clients fill. Pure.

A *room* is anything bounded that requests take a part of (basics.rooms lists them). An owner may hold SHARE
times what is left free, and no more. So the free part never runs out while owners take little at a time: one owner
alone can hold 7/8 of a room, two 7/15 each, and the next owner finds at least 1 / (1 + 7 x owners) of it free. What
an owner gives back is the others' at once. A reservation for each owner is not needed, and neither is their number.

Room for outputs is asked for when a request is submitted, and again as it generates (coordinator.tokens.token_log).

An owner is a user with a tenant (RequestFacts.turn_owner).

Rejected: equal shares of the whole (one owner could use half of a room that no other wants, or the room is overrun
when a second one comes); taking from the largest owner what it holds (tokens cannot be taken back).
"""

from __future__ import annotations

from typing import Final

from protocol.errors import CapacityError

#: How many times what is free an owner may hold. 7: an owner alone can use 7/8 of a room.
SHARE: Final = 7


def is_near(used: int, limit: int) -> bool:
    """Return whether an owner may be at its share of a room. Until then its holdings need not be counted."""
    return used >= SHARE * (limit - used)


def may_take(asked: int, *, held: int, used: int, limit: int) -> bool:
    """Return whether an owner that holds `held` of a room may take `asked` more of it."""
    free = limit - used
    return asked <= free and held + asked <= SHARE * free


def check_share(
    what: str, asked: int, *, held: int, used: int, limit: int, field: str, until: str = "have ended"
) -> None:
    """Raise CapacityError, with the arithmetic, unless an owner that holds `held` of a room may take `asked` more of
    it; all owners use `used` of its `limit`. `what`: its units. `field`: the setting that bounds it, or its name.
    `until`: what becomes of requests that give it back."""
    if may_take(asked, held=held, used=used, limit=limit):
        return
    free = limit - used
    if asked > free:
        more = f", and {asked} more do not fit in {limit}" if asked > 1 else ""
        raise CapacityError(
            f"{used} {what} already{more}", field=field, value=limit, remedy=f"retry when requests {until}"
        )
    raise CapacityError(
        f"{held} {what} are this owner's and {asked} would be added; of {limit}, {free} are free, and an owner may "
        f"have {SHARE} times as many",
        field=field,
        value=limit,
        remedy=f"retry when requests of yours {until}; others are served",
    )

"""How the end of a group is read from the ends of its ranks.

The end of one rank ends the group: the others see it and end with EXIT_PEER_LOST. So the rank to blame is the first
that ended otherwise, and not by a stop that was asked for (0). A rank that hangs is killed, and blamed for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from hisparse.cluster.children import exit_text
from protocol.errors import EXIT_PEER_LOST

#: Ranks end within 2 s of a peer's death; the rest is for the kernel, which frees their memory.
PEER_END_LIMIT_S: Final = 5.0


class RankEnd(NamedTuple):
    """A rank's worker name, exit status, negative for a signal, and the reason that it left."""

    name: str
    status: int
    reason: str = ""


def blamed(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank whose end ended the group; None: a stop was asked for, or all have lost a peer. In order of ending."""
    return next((end for end in ends if end.status not in (0, EXIT_PEER_LOST)), None)


def is_wanted(ends: Sequence[RankEnd]) -> bool:
    """Whether the group was asked to exit: a rank was, and none is to blame."""
    return blamed(ends) is None and any(end.status == 0 for end in ends)


def follow_limit_s(end: RankEnd, hung_limit_s: float) -> float:
    """How long the other ranks may go on after `end`.

    A rank that has lost a peer may have lost one that hangs and that others still wait for; after a stop that was asked
    for they finish what they hold.
    """
    if end.status == 0:
        return inf
    return hung_limit_s + PEER_END_LIMIT_S if end.status == EXIT_PEER_LOST else PEER_END_LIMIT_S


def end_text(group: str, ends: Sequence[RankEnd]) -> str:
    """ "group g0 ended: w1 killed by SIGKILL"."""
    first = blamed(ends)
    if first is not None:
        return f"group {group} ended: {first.name} {': '.join(filter(None, (exit_text(first.status), first.reason)))}"
    return f"group {group} ended: {'it was asked to' if is_wanted(ends) else 'each rank has lost a peer'}"

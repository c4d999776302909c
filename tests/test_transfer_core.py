"""The protocol of page transfer, under a network and processes that do their worst (tests/fakes/transfer_world.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from coordinator.errors import BadInput, WrongState
from tests.fakes.transfer_world import HOST_PAGES, LAYOUT, FakeTransferWorld
from worker.transfer.receiving import Receiving
from worker.transfer.sending import Sending

SEEDS = range(150)


def lives(seeds: Iterable[int], *, can_shut_out: bool) -> Counter[str]:
    """How the tickets of these seeds ended at the receiver. Fails where one never does."""
    ended: Counter[str] = Counter()
    for seed in seeds:
        world = FakeTransferWorld(seed, can_shut_out=can_shut_out)
        try:
            world.run(events=400)
            world.settle()
            assert world.receiver.open_tickets == 0
            assert [s.core.in_flight for s in world.senders.values() if s.is_alive] == [(0, 0)] * 2
            assert set(world.over) == set(world.tickets)
        except Exception as error:
            error.add_note(f"seed {seed}, {can_shut_out=}")
            raise
        ended.update(world.over.values())
    return ended


@pytest.mark.parametrize("can_shut_out", [True, False])
def test_no_write_lands_in_the_page_of_another_whatever_happens(can_shut_out: bool) -> None:
    """I2, SGLang #24578; and each ticket ends once at the receiver, arrived or revoked, with no more in flight than the
    window."""
    ended = lives(SEEDS, can_shut_out=can_shut_out)
    assert min(ended["arrived"], ended["revoked"]) > len(SEEDS)


def revoke_at_once(self: Any, ticket: int, reason: str, now: float) -> list[Any]:
    return [self._end(ticket)] if ticket in self._tickets else []


def take_exit_as_the_end_of_writes(self: Any, sender: str, *, proved: bool) -> list[Any]:
    return self.shut_out(sender) if sender in self._endpoints else []


def stop_at_once(self: Any, number: int, reason: str, now: float) -> list[Any]:
    ticket = self._tickets[number]
    for at, unit in ticket.units.items():
        if unit.posted or unit.written:
            self._leave_flight(ticket, at)
    return self._end(number, reason, clean=True)


def call_broken_clean(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, number, reason, clean: original(self, number, reason, clean=True)


def look_at_refused_attempts_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, check: Any, good: bool) -> list[Any]:
        actions: list[Any] = original(self, check, good)
        for ticket in self._tickets.values():
            ticket.refused.clear()
        return actions

    return checked


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("core", "method", "mutant", "can_shut_out"),
    [
        (Receiving, "revoke", revoke_at_once, False),
        (Receiving, "_cut_off", take_exit_as_the_end_of_writes, True),
        (Receiving, "checked", look_at_refused_attempts_again(Receiving.checked), False),
        (Sending, "_stop", stop_at_once, False),
        (Sending, "_end", call_broken_clean(Sending._end), True),
    ],
    ids=["revoke at once", "exit is enough", "refused attempts again", "stop at once", "broken is clean"],
)
def test_each_guard_against_late_writes_is_needed(
    core: type, method: str, mutant: Callable[..., Any], can_shut_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, method, mutant)
    with pytest.raises(AssertionError, match="I2"):
        lives(range(2_000), can_shut_out=can_shut_out)


# ---------------------------------------------------------------- refusals


def test_a_receiver_refuses_pages_that_it_has_not() -> None:
    core = Receiving(LAYOUT, HOST_PAGES, 1, can_shut_out=True)
    with pytest.raises(BadInput, match=f"not among the {HOST_PAGES}"):
        core.open(1, [0, HOST_PAGES])
    with pytest.raises(BadInput, match="twice"):
        core.open(1, [3, 3])
    core.open(1, [3])
    with pytest.raises(WrongState, match="it is open"):
        core.open(1, [4])

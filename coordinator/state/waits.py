"""Waits of a request in the eyes of an operator, and their lengths:

    queue     a place on a worker, whenever it may have one: QUEUED, PREFILLED, or RETRACTED and not held, until it is
              admitted
    retract   its worker to let go: RETRACTING, until the memory is back
    hand_over its rows to reach where they will be decoded: TRANSFERRING, until PREFILLED
    resume    its kept rows to be used: READY from waiting, until it runs

A wait that comes to nothing (aborted, held, its worker lost) is not told: its length says nothing about the next one.
Pure.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from basics.request_states import ACTIVE, WAITING, State


class WaitFor(Enum):
    QUEUE = "queue"
    RETRACT = "retract"
    HAND_OVER = "hand_over"
    RESUME = "resume"


class Waited(NamedTuple):
    what: WaitFor
    seconds: float


_FULFILLED: Final[dict[WaitFor, frozenset[State]]] = {
    WaitFor.QUEUE: ACTIVE - {State.RETRACTING, State.RELEASING},
    WaitFor.RETRACT: WAITING,
    WaitFor.HAND_OVER: frozenset({State.PREFILLED}),
    WaitFor.RESUME: frozenset({State.RUNNING}),
}


class Waits:
    """Waits of one request. `note` is told of its state after each event."""

    __slots__ = ("_since", "_state", "_what")

    def __init__(self, state: State, held: bool, now: float) -> None:
        self._state = state
        self._what = WaitFor.QUEUE if state in WAITING and not held else None
        self._since = now

    def note(self, state: State, held: bool, now: float) -> Waited | None:
        """The wait that ended with this event, if one did."""
        what = self._next(state, held)
        self._state = state
        if what is self._what:
            return None
        before, since = self._what, self._since
        self._what, self._since = what, now
        return Waited(before, now - since) if before is not None and state in _FULFILLED[before] else None

    def _next(self, state: State, held: bool) -> WaitFor | None:
        if state in WAITING:
            return None if held else WaitFor.QUEUE
        if state is State.RETRACTING:
            return WaitFor.RETRACT
        if state is State.TRANSFERRING:
            return WaitFor.HAND_OVER
        if state is State.READY and (self._state in WAITING or self._what is WaitFor.RESUME):
            return WaitFor.RESUME
        return None

"""Who writes which state: `Ownership` looks at the states of all actors after each step of a task or an actor.

    owner                  state                                              written in
    Scheduler              placement table, RequestState.*, request table     its own task
    Request                RequestState: life cycle, history                  its steps, in the Scheduler's task
    HostPool               Ledger                                             its steps, in the Scheduler's task
    Journal                JournalState; of live requests `JOURNALLED`        `append`, `accept`, `open_pool`, in any
                                                                              task

A state that has changed in another one's step is a violation. So is one of the journal's that has changed outside
its calls. Only one task runs at a time, so a step is to blame for what differs after it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import trio

from coordinator.actor import Actor
from coordinator.journal.journal import GroupCommit
from coordinator.journal.state import JournalState, RequestRecord
from coordinator.memory.ledger import GpuBudget, Holding, Ledger
from coordinator.scheduler.scheduler import Scheduler
from coordinator.state.placement_table import PlacementTable
from coordinator.state.poison import PoisonDetector
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import InboundTransfer, WorkerDrain, WorkerEntry
from coordinator.turn.request_table import RequestTable

Step: TypeAlias = Callable[[Actor[Any], list[Any]], Sequence[object]]

#: Objects that are part of a state; of others (ports, actors, settings) only which one it is.
STATES: Final = (
    PlacementTable,
    WorkerEntry,
    InboundTransfer,
    WorkerDrain,
    PoisonDetector,
    RequestTable,
    RequestState,
    Ledger,
    Holding,
    GpuBudget,
    JournalState,
    RequestRecord,
)
#: Counts of swap-ins and drafts are written as they arrive, by the task of the worker link, like tokens in the token
#: log.
#: The ledgers in the journal's state are the HostPools'; which ledger it is counts.
LEFT_OUT: Final = frozenset({"swaps", "drafts"})
#: Fields of a RequestState that steps of its Request write. The Scheduler writes the others, but for `kept_tokens`: the
#: step that ends a placement writes it, and the Scheduler when it hears of that.
STEPPED: Final = frozenset(
    {"state", "keep", "is_staged", "staging", "parked", "resize", "outcome", "verdict", "tail_text"}
    | {"retractions", "admissions", "prefix_tokens", "cause", "reason", "lines", "lines_dropped"}
)
JOURNALLED: Final = frozenset({"placed", "on_worker", "killed", "ended"})
PLACED: Final = frozenset(it.name for it in fields(RequestState)) - STEPPED - LEFT_OUT - JOURNALLED - {"kept_tokens"}


def image_of_request(request: RequestState, names: frozenset[str] = STEPPED | PLACED | {"kept_tokens"}) -> Any:
    """Return the fields `names` of a request, as values that compare."""
    return tuple((name, image_of(getattr(request, name))) for name in sorted(names))


def image_of_journal(state: JournalState) -> Any:
    """Return what the journal says, without what the owners of live requests and of ledgers write."""
    live = [it for it in state.requests.values() if isinstance(it, RequestState)]
    return image_of(state, foreign=(Ledger, RequestState)), [image_of_request(it, JOURNALLED) for it in live]


def image_of(value: object, *, foreign: tuple[type, ...] = (), _seen: set[int] | None = None) -> Any:
    """All that a state says, as values that compare; of `foreign` objects only which one it is."""
    seen = set() if _seen is None else _seen
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return tuple((image_of(key), image_of(it, foreign=foreign, _seen=seen)) for key, it in value.items())
    if isinstance(value, list | tuple | deque):
        return tuple(image_of(it, foreign=foreign, _seen=seen) for it in value)
    if isinstance(value, set | frozenset):
        return frozenset(image_of(it, foreign=foreign, _seen=seen) for it in value)
    if value is None or isinstance(value, str | bytes | int | float | enum.Enum | msgspec.Struct):
        return value
    return _image_of_object(value, foreign, seen)


def _image_of_object(value: object, foreign: tuple[type, ...], seen: set[int]) -> Any:
    if isinstance(value, RequestState) and RequestState not in foreign and id(value) not in seen:
        seen.add(id(value))
        return image_of_request(value, PLACED)
    if not isinstance(value, STATES) or isinstance(value, foreign) or id(value) in seen:
        return id(value)
    seen.add(id(value))
    names = [it.name for it in fields(value)] if is_dataclass(value) else sorted(vars(value))
    return tuple((name, image_of(getattr(value, name), foreign=foreign, _seen=seen)) for name in names)


class Watched:
    """One state, its owner's name, and what it said last. `changes`: how often it has changed."""

    def __init__(self, owner: str, what: str, take: Callable[[], Any]) -> None:
        self.owner, self.what, self._take = owner, what, take
        self.last = take()
        self.changes = 0

    def has_changed(self) -> bool:
        now = self._take()
        is_changed = bool(now != self.last)
        self.last = now
        self.changes += is_changed
        return is_changed


class Ownership(trio.abc.Instrument):
    """An instrument of a run in which `scheduler` and `journal` run. `violations` name the state and the writer."""

    def __init__(self, scheduler: Scheduler, journal: GroupCommit) -> None:
        self.violations: list[tuple[str, str]] = []
        self.watched: dict[int, Watched] = {}
        self._scheduler = scheduler
        table, requests, journal_state = scheduler._placement_table, scheduler._requests, journal.state
        self._watch(scheduler.name, "placement table", table, lambda: image_of(table))
        self._watch(scheduler.name, "request table", requests, lambda: image_of(requests, foreign=(RequestState,)))
        self._watch("", "journal state", journal_state, lambda: image_of_journal(journal_state))
        self._journal_state = self.watched[id(journal_state)]
        journal.append = self._within(journal.append)  # type: ignore[method-assign]
        journal.accept = self._within(journal.accept)  # type: ignore[method-assign]
        journal.open_pool = self._within(journal.open_pool)  # type: ignore[method-assign]

    def changes(self) -> dict[str, int]:
        """How often each kind of state has changed."""
        found: dict[str, int] = {}
        for it in self.watched.values():
            found[it.what] = found.get(it.what, 0) + it.changes
        return found

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        try:
            self._look(task.name)
        except Exception as error:  # an instrument that raises is dropped without a word
            self.violations.append((repr(error), task.name))

    def within_step(self, step: Step) -> Step:
        """`Actor._step`, of an actor that the Scheduler steps."""

        def checked(actor: Actor[Any], batch: list[Any]) -> Sequence[object]:
            self._look(self._scheduler.name)
            returned = step(actor, batch)
            self._look(actor.name)
            return returned

        return checked

    def _look(self, writer: str) -> None:
        for watched in self.watched.values():
            if watched.has_changed() and watched.owner != writer:
                self.violations.append((watched.what, writer))
        for request in self._scheduler._requests.by_index.values():
            look = partial(image_of_request, request.state, STEPPED)
            self._watch(request.name, "request state", request.state, look)
        for pool in self._scheduler._pools.values():
            self._watch(pool.name, "ledger", pool.ledger, partial(image_of, pool.ledger))

    def _watch(self, owner: str, what: str, state: object, take: Callable[[], Any]) -> None:
        if id(state) not in self.watched:
            self.watched[id(state)] = Watched(owner, what, take)

    def _within(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call in which the journal's state may change; what changed before it is another's doing."""

        def checked(*args: Any) -> Any:
            if self._journal_state.has_changed():
                self.violations.append((self._journal_state.what, "before append"))
            result = call(*args)
            self._journal_state.has_changed()
            return result

        return checked

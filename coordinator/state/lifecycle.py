"""The life cycle of one request as a transition table. Pure. Events in, actions out; `now` and token counts are
arguments.

    QUEUED → PREFILLING ──────────────► READY → RUNNING → RELEASING → FINISHED | ABORTED | FAILED
       ▲        │ direct: its worker      ▲        │
       │        │ will not decode it      │     RETRACTING
       │   TRANSFERRING → PREFILLED ──────┤        │
       └───── drop ───────────────────────┴─ RETRACTED ◄─ keep, or held

    QUEUED      waits for memory and holds none
    PREFILLING  admitted; prompt computed in passes and staged to host pages. The worker says only Staged, after
                both, since nothing is decided in between: there is no state for staging alone
    TRANSFERRING  prefilled by a worker that will not decode it: it leaves that worker, its rows are handed over
    PREFILLED   all rows of its prompt are where it will be decoded; waits for a worker to do it
    READY       rows are in host memory; index keys are being loaded or the batch is about to take it in
    RUNNING     decodes. Out of granted pages it waits in place (Parked, in the history)
    RETRACTING  Withdraw sent; the worker's Released is awaited
    RETRACTED   off its worker: *held* until an operator resumes it, or with rows *kept* in host pages, or both
    RELEASING   the outcome is decided; the worker's Released is awaited

Commands from the Scheduler and events from a worker cross each other, so the table says for each state what a late
one means: `SAME` does nothing. What is not in the table is a defect (ours: InternalError) or a broken worker
(IllegalEventError); the state is untouched either way. Whether an *operator* may ask for something is a narrower
question, answered by `coordinator.turn.commands` before any actor or worker is told anything.

Rejected: one state per combination of held and kept (they are orthogonal to waiting); a PARKED state (the worker
resumes by itself when a grant arrives, without a word, so the state would be stale).
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Final, TypeAlias

from basics.request_states import State


class EventKind(StrEnum):
    """Columns of the table."""

    STAGED = "staged"
    STARTED = "started"
    PARKED = "parked"
    RESIZED = "resized"
    ENDED = "ended"  # Finished or Faulted
    RELEASED = "released"
    ADMITTED = "admitted"
    GRANTED = "granted"  # more memory, another hot size
    RETRACT = "retract"
    RESUME = "resume"
    DEMOTED = "demoted"
    WAITS = "waits"  # why it is not admitted yet
    END = "end"  # abort, or the coordinator stops
    LOST = "lost"
    ADOPTED = "adopted"  # a coordinator that restarted has heard from its worker


BY_WORKER: Final = frozenset(
    {EventKind.STAGED, EventKind.STARTED, EventKind.PARKED, EventKind.RESIZED, EventKind.ENDED, EventKind.RELEASED}
)
OF_PLACEMENT: Final = BY_WORKER | {EventKind.LOST, EventKind.ADOPTED}


class Resolve(Enum):
    """Targets that depend on more than state and event."""

    SAME = "same"
    WAIT = "wait"  # RETRACTED when held or with rows kept (PREFILLED: by another worker for it), else QUEUED
    START = "start"  # READY with rows in host pages, or a short rest for decode steps, else PREFILLING
    HAND_ON = "hand_on"  # TRANSFERRING when its worker will not decode it, else READY
    OUTCOME = "outcome"


SAME, WAIT, START, HAND_ON, OUTCOME = Resolve.SAME, Resolve.WAIT, Resolve.START, Resolve.HAND_ON, Resolve.OUTCOME
Target: TypeAlias = State | Resolve

_ON_WORKER: Final[dict[EventKind, Target]] = {
    EventKind.PARKED: SAME,
    EventKind.RESIZED: SAME,
    EventKind.GRANTED: SAME,
    EventKind.RETRACT: State.RETRACTING,
    EventKind.RESUME: SAME,
    EventKind.ENDED: State.RELEASING,
    EventKind.END: State.RELEASING,
    EventKind.RELEASED: WAIT,
    EventKind.LOST: WAIT,
    EventKind.ADOPTED: SAME,
}
_LEAVING: Final[dict[EventKind, Target]] = {
    **_ON_WORKER,
    EventKind.STAGED: SAME,
    EventKind.STARTED: SAME,
    EventKind.RETRACT: SAME,
}
_WAITING: Final[dict[EventKind, Target]] = {
    EventKind.ADMITTED: START,
    EventKind.GRANTED: SAME,
    EventKind.RETRACT: WAIT,
    EventKind.RESUME: WAIT,
    EventKind.DEMOTED: WAIT,
    EventKind.WAITS: SAME,
    EventKind.END: OUTCOME,
}
_OVER: Final[dict[EventKind, Target]] = {
    EventKind.GRANTED: SAME,
    EventKind.RETRACT: SAME,
    EventKind.RESUME: SAME,
    EventKind.DEMOTED: SAME,
    EventKind.END: SAME,
}

TRANSITIONS: Final[dict[State, dict[EventKind, Target]]] = {
    State.QUEUED: _WAITING,
    State.PREFILLING: {**_ON_WORKER, EventKind.STAGED: HAND_ON},
    State.TRANSFERRING: _ON_WORKER,
    State.PREFILLED: _WAITING,
    State.READY: {**_ON_WORKER, EventKind.STARTED: State.RUNNING},
    State.RUNNING: {**_ON_WORKER, EventKind.STARTED: SAME},
    State.RETRACTING: _LEAVING,
    State.RETRACTED: _WAITING,
    State.RELEASING: {
        **_LEAVING,
        EventKind.ENDED: SAME,
        EventKind.END: SAME,
        EventKind.RELEASED: OUTCOME,
        EventKind.LOST: OUTCOME,
    },
    State.FINISHED: _OVER,
    State.ABORTED: _OVER,
    State.FAILED: _OVER,
}

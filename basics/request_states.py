"""States of a request, and kinds of its waits: what clients are told of both. Pure.

The transitions between states are the coordinator's (coordinator.state.lifecycle), and so are the reasons of waits
(coordinator.policy.pending).

    HELD        an operator holds it
    TRANSFER    its rows are on their way to where it will be decoded
    PAUSED      a transfer failed; the next attempt comes later
    NO_WORKER   no worker is connected, or none of the node where its kept rows are
    RECONNECT   every such worker is awaited after a restart of the coordinator
    DRAINING    every such worker drains
    GROUP       every such worker is a rank of a group that waits for other ranks
    ROLE        no worker that takes requests does its part
    TOO_LARGE   no worker that takes requests could hold it at its longest
    SUSPECT     a worker died with it, or with those it would join
    OUTPUT_ROOM the outputs of all requests leave no room for more of its own
    SEATS, HOST_PAGES, HOT_CHUNKS, INDEX_PAGES   the first of them that is short
    PREFIX      another request computes the beginning of its prompt
    BEHIND      a better-ranked request waits for the same workers
    TURN        nothing keeps it: the Scheduler's next turn will admit it
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

#: Deaths of its worker, without its coming further, at which a request is failed.
POISON_STRIKES: Final = 6


class State(StrEnum):
    QUEUED = "QUEUED"
    PREFILLING = "PREFILLING"
    TRANSFERRING = "TRANSFERRING"
    PREFILLED = "PREFILLED"
    READY = "READY"
    RUNNING = "RUNNING"
    RETRACTING = "RETRACTING"
    RETRACTED = "RETRACTED"
    RELEASING = "RELEASING"
    FINISHED = "FINISHED"
    ABORTED = "ABORTED"
    FAILED = "FAILED"


WAITING: Final = frozenset({State.QUEUED, State.PREFILLED, State.RETRACTED})
ACTIVE: Final = frozenset(
    {State.PREFILLING, State.TRANSFERRING, State.READY, State.RUNNING, State.RETRACTING, State.RELEASING}
)
#: An operator can hold a request here, and resume it.
RESUMABLE: Final = WAITING | {State.RETRACTING}
TERMINAL: Final = frozenset({State.FINISHED, State.ABORTED, State.FAILED})


#: The word for a request that is RETRACTED until an operator resumes it.
HELD: Final = "HELD"


def state_text(state: str, held: bool) -> str:
    """The state as people read it, in listings and refusals."""
    return HELD if held and state == State.RETRACTED else state


class PendingKind(StrEnum):
    HELD = "held"
    TRANSFER = "transfer"
    PAUSED = "paused"
    NO_WORKER = "no_worker"
    RECONNECT = "reconnect"
    DRAINING = "draining"
    GROUP = "group"
    ROLE = "role"
    TOO_LARGE = "too_large"
    SUSPECT = "suspect"
    OUTPUT_ROOM = "output_room"
    SEATS = "seats"
    HOST_PAGES = "host_pages"
    HOT_CHUNKS = "hot_chunks"
    INDEX_PAGES = "index_pages"
    PREFIX = "prefix"
    BEHIND = "behind"
    TURN = "turn"


#: Waits that no connected worker can end.
UNSERVED: Final = frozenset(
    {
        PendingKind.NO_WORKER,
        PendingKind.RECONNECT,
        PendingKind.DRAINING,
        PendingKind.GROUP,
        PendingKind.ROLE,
        PendingKind.TOO_LARGE,
    }
)

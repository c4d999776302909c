"""Entries of the placement table: requests, workers, and promises of memory between them, as policy sees them. Pure.

The phases of a request:

    WAITING    in `PlacementTable.waiting`, unless held
    STARTING   admitted; prefilling, staging or loading: its hot buffer cannot be resized yet
    RUNNING    in the decode batch
    LEAVING    asked to leave, or its end is decided; its memory is as good as free, but not yet
    CLOSING    told to end while it waited; its Closed is awaited
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from coordinator.journal.records import RequestFacts, RequestOrdered
from coordinator.memory.prefix_index import Chain, Match
from coordinator.scheduling.events import WorkerPort
from protocol.messages import (
    NO_HOT_BUFFER,
    NO_TOKEN,
    FirstToken,
    GroupMember,
    HotFloorRow,
    ModelInfo,
    Rank,
    WorkerCapacity,
)
from protocol.sizing import NO_HOT_SIZE, HotSize, Length, Memory
from protocol.units import PAGE_TOKENS


class EntryPhase(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    CLOSING = "closing"


ON_WORKER = frozenset({EntryPhase.STARTING, EntryPhase.RUNNING, EntryPhase.LEAVING})


@dataclass(slots=True, eq=False)
class RequestEntry:
    """One live request as policy sees it: where it is placed, and what operators ordered. What it has of its node's
    ledger (`pages`, `hot`) is a mirror that `PlacementTable.check_invariants` compares."""

    facts: RequestFacts
    ordered: RequestOrdered  # replaced, never changed: the journal and the Request refer to the same record
    generated: int = 0  # of the token log, read before each plan
    phase: EntryPhase = EntryPhase.WAITING
    displaced: bool = False  # policy took it off a worker
    thinned: bool = False  # policy took it off a worker so that the others there could rise to the hot floor
    strikes: int = 0  # deaths of its workers in a row, at `mark` generated tokens (coordinator.scheduling.poison)
    mark: int = -1
    # on a worker, or where its kept pages are
    placement: int = 0
    worker: str = ""
    node: str = ""
    pages: int = 0  # host pages held; index pages too while on a worker
    chain: Chain | None = None  # None: it reuses nothing, and nothing of it is reused
    matches: dict[str, Match] = field(default_factory=dict)  # by node, while it waits
    shared_pages: int = 0  # of its placement: written before, and with which its page list began
    follows: tuple[int, int, float] | None = None  # waiting: a leader's placement, its pages cached, since when
    goes_alone: bool = False  # it has followed for long enough (coordinator.scheduling.following)
    by_steps: bool = False  # the rest of its prompt, behind cached pages, goes through decode steps
    indexed: int = 0  # pages of its placement that the index was told of, from the first on
    hot: HotSize = NO_HOT_SIZE
    resizing: HotSize | None = None
    kept_tokens: int = 0
    first_token: FirstToken = NO_TOKEN  # of what is kept: drawn, and not said yet
    decoder: str = ""  # there for its prompt alone: the worker whose memory it was promised
    transfer_id: int = 0  # key in PlacementTable.transfers: the rows are on their way there, or have arrived
    transfers_failed: int = 0
    paused_until: float = 0.0  # waiting: after a failed transfer
    frees_pages: bool = False  # leaving: its host pages will be free
    lost: bool = False  # leaving: its worker is gone
    came_with: int = 0  # generated tokens when it was admitted
    stranded_at: float | None = None  # waiting: since when its kept pages are where no worker can take it
    reasons_told: frozenset[str] = frozenset()  # waiting: kinds of reasons that its history names already

    @property
    def request_index(self) -> int:
        return self.facts.request_index

    @property
    def rank(self) -> Rank:
        return self.facts.rank

    @property
    def length(self) -> Length:
        facts = self.facts
        return Length(facts.prompt_tokens, self.generated, facts.sampling.max_tokens)

    @property
    def own_pages(self) -> int:
        """Waiting: full pages that it keeps, where they do not hold all rows of its prompt."""
        return self.facts.part_of_prompt(self.kept_tokens) // PAGE_TOKENS

    @property
    def is_ending(self) -> bool:
        """Its end was ordered, so it will not wait again."""
        return bool(self.ordered.outcome)

    @property
    def prefills_only(self) -> bool:
        """Return whether it is on a worker that will not decode it."""
        return self.phase in ON_WORKER and self.hot.hot_slots == NO_HOT_BUFFER

    @property
    def chunks(self) -> int:
        """Chunks accounted for: while resizing, the larger of before and after."""
        return max(self.hot.hot_chunks, self.resizing.hot_chunks) if self.resizing else self.hot.hot_chunks

    @property
    def memory(self) -> Memory:
        on_worker = self.phase in ON_WORKER
        return Memory(self.pages, self.chunks, self.pages * on_worker, int(on_worker))


#: To sort by: best rank first.
RANK_OF: Final[Callable[[RequestEntry], Rank]] = attrgetter("facts.rank")


@dataclass(slots=True, eq=False)
class InboundTransfer:
    """Host pages of `node` that one epoch of `worker` lets rows be written into from another node, and those of the
    request behind them. `request_index` None: no request wants them any more; they wait for the worker's word.
    `arrived`: all rows are there, and the worker has let go."""

    placement: int
    request_index: int | None
    node: str
    worker: str
    epoch: int
    pages: int
    arrived: bool = False


@dataclass(slots=True)
class WorkerDrain:
    deadline: float
    handover: bool


@dataclass(slots=True, eq=False)
class WorkerEntry:
    """One live epoch. `ranks` are its requests that are not leaving, best first; `managed` those of them whose hot
    buffer is smaller than their context."""

    name: str
    node: str
    epoch: int
    capacity: WorkerCapacity
    model: ModelInfo
    port: WorkerPort
    drain: WorkerDrain | None = None
    awaited: bool = False  # known from the journal; its inventory is to come
    receiver: bytes = b""  # where it takes host pages of other nodes in; empty: nowhere
    pid: int = 0
    member: GroupMember | None = None  # as a rank of a group
    ranks_missing: tuple[int, ...] = ()  # of its group: what PlacementTable noted last (coordinator.scheduling.groups)
    shrunk_at: float = 0.0
    hot_floor: int | None = None  # slots of the smallest hot size that policy gives; None: any (hot_sizing.py)
    probe_slots: int | None = None  # a smaller hot size that one request is to have for a while
    probed: int = -1  # request index of that request
    hot_sizing: HotFloorRow | None = None  # what listings say of the floor
    sizes: WorkerCapacity = field(init=False)  # its capacity without where its pool lies: that of many workers
    ranks: list[Rank] = field(default_factory=list)
    leaving: dict[int, RequestEntry] = field(default_factory=dict)
    resizing: dict[int, RequestEntry] = field(default_factory=dict)
    managed: dict[int, RequestEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = replace(self.capacity, pool_path="", pool_id=0)

    @property
    def requests(self) -> int:
        return len(self.ranks) + len(self.leaving)

    @property
    def takes(self) -> bool:
        """Return whether it accepts admissions and growth of hot buffers: not draining, not awaited, its group
        complete."""
        return self.drain is None and not self.awaited and not self.ranks_missing

    @property
    def decodes(self) -> bool:
        return self.capacity.decodes

    def hands_to(self, other: WorkerEntry) -> bool:
        """Return whether what it prefills can come to be decoded there."""
        ours, theirs = self.capacity, other.capacity
        if self is other or self.node == other.node:
            return self is not other
        return ours.sends and theirs.receives and bool(other.receiver) and ours.page_bytes == theirs.page_bytes

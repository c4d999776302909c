"""Workers and transfers as entries of the placement table, and drains. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from coordinator.state.events import WorkerPort
from coordinator.state.request_state import RequestState
from protocol.messages import NO_HOT_BUFFER, GroupMember, HotFloorRow, ModelInfo, Rank, WorkerCapacity
from protocol.sizing import RESIDENT, HotSize, can_force, hot_sizes_for


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
    first_epoch: int = 0  # of its process; 0: unknown
    member: GroupMember | None = None  # as a rank of a group
    ranks_missing: tuple[int, ...] = ()  # of its group: what PlacementTable noted last (coordinator.state.groups)
    shrunk_at: float = 0.0
    hot_floor: int | None = None  # slots of the smallest hot size that policy gives; None: any (hot_sizing.py)
    probe_slots: int | None = None  # a smaller hot size that one request is to have for a while
    probed: int = -1  # request index of that request
    hot_sizing: HotFloorRow | None = None  # what listings say of the floor
    sizes: WorkerCapacity = field(init=False)  # its capacity without where its pool lies: that of many workers
    ranks: list[Rank] = field(default_factory=list)
    leaving: dict[int, RequestState] = field(default_factory=dict)
    resizing: dict[int, RequestState] = field(default_factory=dict)
    managed: dict[int, RequestState] = field(default_factory=dict)

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

    def pins(self, entry: RequestState) -> bool:
        """Return whether an operator's hot size holds: where the request could reach its longest with it here."""
        slots = entry.ordered.forced_slots
        return slots != NO_HOT_BUFFER and can_force(slots, entry.length, self.capacity)

    def given_sizes(self, pages: int) -> list[HotSize]:
        """Hot sizes that policy gives here to a request with `pages` pages: from the hot floor on, or all where not
        even an empty worker could hold it so."""
        hot_sizes, floor = hot_sizes_for(pages, self.capacity), self.hot_floor
        if floor is None:
            return hot_sizes
        given = [it for it in hot_sizes if it.hot_slots == RESIDENT or RESIDENT < floor <= it.hot_slots]
        return given if given[0].hot_chunks <= self.capacity.hot_chunks else hot_sizes

    def hands_to(self, other: WorkerEntry) -> bool:
        """Return whether what it prefills can come to be decoded there."""
        ours, theirs = self.capacity, other.capacity
        if self is other or self.node == other.node:
            return self is not other
        return ours.sends and theirs.receives and bool(other.receiver) and ours.page_bytes == theirs.page_bytes

"""Workers and transfers as entries of the placement table, drains, groups of workers, and checks of one that would join
as a rank. Pure.

The ranks of a group hold one copy of a model and step together (protocol.messages.GroupMember). A group is *complete*
while every rank from 0 to size - 1 of its latest incarnation is connected. A rank that the journal names and that has
not reconnected counts as missing. So does a rank of an earlier incarnation: it is *stale*, and its process is about to
end, since it cannot take part in a round of the ranks that replaced its peers.

The placement table notes the missing ranks of a group on each of its ranks (`WorkerEntry.ranks_missing`), which stops
all admission to them. The requests that run there are left alone: a rank that lost a peer ends by itself, and its
requests with it.

A rank that may not join is refused with a ConfigError. Its process ends: a new epoch of a stale rank would be as stale.

Rejected: admission to the ranks that are there (a rank without its peers computes nothing); retraction of the requests
on an incomplete group (no step boundary comes at which they could leave).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from msgspec.structs import replace

from basics.request_checks import check_name
from coordinator.state.events import WorkerPort
from coordinator.state.request_state import RequestState
from protocol.errors import ConfigError
from protocol.messages import (
    GROUP_SIZE_MAX,
    NO_HOT_BUFFER,
    GroupMember,
    HotFloorRow,
    ModelInfo,
    Rank,
    WorkerCapacity,
    WorkerHello,
)
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
    ranks_missing: tuple[int, ...] = ()  # of its group: what PlacementTable noted last (coordinator.state.worker_entry)
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


#: Largest incarnation of a group: nanoseconds of a clock fit.
GROUP_INCARNATION_MAX: Final = 2**63 - 1
#: Ranks named in one text; the rest are counted.
RANKS_NAMED_MAX: Final = 8


class GroupLife(NamedTuple):
    """One incarnation of one group: its ranks start together and end together."""

    group: str
    incarnation: int


def life_of(worker: WorkerEntry) -> GroupLife | None:
    """Return the life of a rank's group; None for a worker that holds the whole model."""
    member = worker.member
    return None if member is None else GroupLife(member.group, member.incarnation)


def ranks_of(group: str, workers: Iterable[WorkerEntry]) -> list[WorkerEntry]:
    """The ranks of `group` among `workers`, of any incarnation, in order of rank."""
    found = [(it.member.rank, it.name, it) for it in workers if it.member is not None and it.member.group == group]
    return [it for _, _, it in sorted(found, key=lambda entry: entry[:2])]


def missing_of(group: str, workers: Iterable[WorkerEntry]) -> dict[str, tuple[int, ...]]:
    """The ranks that each rank of `group` among `workers` lacks, by the name of the worker. Empty tuples: complete.

    A stale rank lacks all ranks.
    """
    members = [(it, it.member) for it in workers if it.member is not None and it.member.group == group]
    latest = max((member.incarnation for _, member in members), default=0)
    there = {member.rank for it, member in members if member.incarnation == latest and not it.awaited}
    missing: dict[str, tuple[int, ...]] = {}
    for worker, member in members:
        present = there if member.incarnation == latest else frozenset[int]()
        missing[worker.name] = tuple(rank for rank in range(member.size) if rank not in present)
    return missing


def check_member(hello: WorkerHello, workers: Iterable[WorkerEntry], latest: int) -> None:
    """Check that the worker of `hello` may join beside `workers`, the connected and the awaited ones.

    `latest` is the highest incarnation seen of its group, 0 for none. Raises BadInput for a name that cannot be and
    ConfigError for the rest; a worker ends on both.
    """
    others = [it for it in workers if it.name != hello.worker]
    if any(it.member is not None and it.member.group == hello.worker for it in others):
        raise ConfigError(
            "a group has this name",
            field="worker",
            value=hello.worker,
            remedy="choose another worker.name: workers and groups share one namespace",
        )
    member = hello.member
    if member is None:
        return
    check_name("group", member.group)
    _check_numbers(member)
    if member.group == hello.worker or any(it.name == member.group for it in others):
        raise ConfigError(
            "a worker has this name",
            field="group",
            value=member.group,
            remedy="choose another worker.group: workers and groups share one namespace",
        )
    if member.incarnation < latest:
        raise ConfigError(
            f"incarnation {latest} of group {member.group} has replaced it",
            field="incarnation",
            value=member.incarnation,
            remedy="end this process; a rank joins with the incarnation that its group draws at its next start",
        )
    _check_beside(member, others)


def _check_numbers(member: GroupMember) -> None:
    bounds = (
        ("group_size", member.size, 1, GROUP_SIZE_MAX),
        ("group_rank", member.rank, 0, member.size - 1),
        ("incarnation", member.incarnation, 1, GROUP_INCARNATION_MAX),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise ConfigError(
                f"must be {low} to {high} in group {member.group}",
                field=name,
                value=value,
                remedy="start all ranks with the same worker.group_size, and each with a group_rank below it",
            )


def _check_beside(member: GroupMember, others: Iterable[WorkerEntry]) -> None:
    """Against the other ranks of the same life."""
    for other in others:
        theirs = other.member
        if theirs is None or (theirs.group, theirs.incarnation) != (member.group, member.incarnation):
            continue
        if theirs.size != member.size:
            raise ConfigError(
                f"rank {theirs.rank} of group {member.group}, {other.name}, says {theirs.size}",
                field="group_size",
                value=member.size,
                remedy="start all ranks of the group with one worker.group_size",
            )
        if theirs.rank == member.rank:
            raise ConfigError(
                f"{other.name} is this rank of group {member.group}",
                field="group_rank",
                value=member.rank,
                remedy="give each rank of the group a worker.group_rank that no other has",
            )


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Say "rank 3" or "ranks 2, 3"; of many the first ones, and how many more."""
    named = ", ".join(map(str, ranks[:RANKS_NAMED_MAX]))
    more = f" and {len(ranks) - RANKS_NAMED_MAX} more" if len(ranks) > RANKS_NAMED_MAX else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {named}{more}"

"""Completeness of groups of workers, and checks of a worker that would join as a rank. Pure.

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
from typing import Final, NamedTuple

from basics.request_checks import check_name
from coordinator.state.worker_entry import WorkerEntry
from protocol.errors import ConfigError
from protocol.messages import GROUP_SIZE_MAX, GroupMember, WorkerHello

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
    for field, value, low, high in bounds:
        if not low <= value <= high:
            raise ConfigError(
                f"must be {low} to {high} in group {member.group}",
                field=field,
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

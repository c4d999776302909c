"""Bugs of groups, planted as those of tests.sim.mutants: in the coordinator, in the agreement, in the executor's model.

Seeds whose cluster has no group cannot show them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from coordinator.scheduler import worker_registry
from coordinator.state import placement_table
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import GroupLife, WorkerEntry, life_of
from coordinator.workers.worker_epoch import WorkerEpoch
from protocol import messages
from tests.sim.groups import RankRounds
from tests.sim.mutants import MUTANTS, Plan, plant
from worker.group.agreement import Agreement, Round

_OTHERS: Final = frozenset(MUTANTS)


# ---------------------------------------------------------------- the coordinator


@plant
def admit_to_an_incomplete_group() -> Plan:
    """A rank that is connected takes requests."""
    yield WorkerEntry, "takes", property(lambda self: self.drain is None and not self.awaited)


@plant
def count_ranks_of_earlier_lives() -> Plan:
    """A group is complete when each of its ranks is there, of whichever life."""

    def missing_of(group: str, workers: Iterable[WorkerEntry]) -> dict[str, tuple[int, ...]]:
        ranks = [(it, it.member) for it in workers if it.member is not None and it.member.group == group]
        there = {member.rank for it, member in ranks if not it.awaited}
        return {it.name: tuple(rank for rank in range(member.size) if rank not in there) for it, member in ranks}

    yield placement_table, "missing_of", missing_of


@plant
def let_a_stale_rank_join() -> Plan:
    """The coordinator does not look at what it knows of later lives."""
    original = worker_registry.check_member

    def check_member(hello: messages.WorkerHello, workers: Iterable[WorkerEntry], latest: int) -> None:
        original(hello, workers, 0)

    yield worker_registry, "check_member", check_member


@plant
def forget_the_requests_of_the_second_rank_that_dies() -> Plan:
    """The first death is the group's: what was lost with it is lost."""
    original = PlacementTable.lose
    over: set[GroupLife] = set()

    def lose(self: PlacementTable, worker: WorkerEntry) -> list[RequestState]:
        life = life_of(worker)
        if life is None or life not in over:
            over.update((life,) if life else ())
            return original(self, worker)
        del self.workers[worker.name]
        self._note_group(worker)
        return []

    yield PlacementTable, "lose", lose


@plant
def blame_a_rank_that_waits() -> Plan:
    """The beats of a decode loop that waits for another rank are no sign of life."""
    original = WorkerEpoch.heartbeat

    def heartbeat(self: WorkerEpoch, beat: messages.Heartbeat, now: float) -> None:
        turned_at = self._beat_at
        original(self, beat, now)
        if beat.awaits:
            self._beat_at = turned_at

    yield WorkerEpoch, "heartbeat", heartbeat


# ---------------------------------------------------------------- rounds


@plant
def step_without_a_rank_that_is_awaited() -> Plan:
    """A rank that has waited for a while goes on alone."""
    original = RankRounds.waits_for

    def waits_for(self: RankRounds, number: int) -> bool:
        return original(self, number) and not self.awaits

    yield RankRounds, "waits_for", waits_for


@plant
def run_prompt_rounds_without_bound() -> Plan:
    """Prompts first."""
    original = Agreement.launched

    def launched(self: Agreement, this: Round) -> None:
        original(self, this)
        self._units = 0

    yield Agreement, "launched", launched


@plant
def decide_rounds_by_the_wishes_of_this_rank() -> Plan:
    """What this rank wishes is at hand: why wait for the wishes of others?"""
    original = RankRounds.next

    def next_round(self: RankRounds, *, has_work: bool) -> Round | None:
        learned = self._agreement.learned
        self._agreement.learned = lambda wishes: learned([wishes[self.rank]])  # type: ignore[method-assign]
        try:
            return original(self, has_work=has_work)
        finally:
            del self._agreement.learned

    yield RankRounds, "next", next_round


GROUP_MUTANTS: Final[dict[str, Any]] = {name: plan for name, plan in MUTANTS.items() if name not in _OTHERS}
#: Of a decode loop, not of what goes wrong: these show without a fault.
SHOWN_CALM: Final = frozenset({"run_prompt_rounds_without_bound", "decide_rounds_by_the_wishes_of_this_rank"})

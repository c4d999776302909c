"""Groups of workers: who may join as a rank, when a group is complete, and what is placed on its ranks."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from basics.request_states import POISON_STRIKES, PendingKind
from coordinator.policy.decisions import AdmitDecision, Decision
from coordinator.state.poison import SUSPECT_STRIKES
from coordinator.state.worker_entry import WorkerDrain, WorkerEntry, check_member, missing_of, ranks_text
from protocol.errors import ConfigError, NotFound
from protocol.messages import GROUP_SIZE_MAX, GroupMember, WorkerHello
from tests.support.fakes.fake_cluster import MODEL, FakeCluster, FakePort, capacity
from tests.support.scheduler_rig import SchedulerRig, open_rig

SIZE = 4
PLENTY = {"seats": 8, "hot_chunks": 80, "index_pages": 160, "prompt_max_tokens": 2_048}


def member(rank: int, incarnation: int = 1, *, size: int = SIZE, group: str = "g0") -> GroupMember:
    return GroupMember(group, rank, size, incarnation)


def entry(name: str, of: GroupMember | None, *, awaited: bool = False) -> WorkerEntry:
    return WorkerEntry(name, "n0", 1, capacity(), MODEL, FakePort(), awaited=awaited, member=of)


def ranks(*numbers: int, incarnation: int = 1) -> list[WorkerEntry]:
    return [entry(f"w{rank}", member(rank, incarnation)) for rank in numbers]


def hello(name: str, of: GroupMember | None) -> WorkerHello:
    return WorkerHello(1, name, "n0", 1, 4711, 0, 0, 1, MODEL, capacity(), member=of)


class Groups(FakeCluster):
    """Groups of SIZE ranks on one node: rank r of g0 is the worker g0-r."""

    def __init__(self, *groups: str, host_pages: int = 400) -> None:
        super().__init__(1, ("n0",), host_pages)
        self.incarnations: dict[str, int] = {}
        for group in groups:
            self.start(group)

    def start(self, group: str, *numbers: int) -> None:
        """A new life of `group`, of which these ranks have come; of no numbers: all."""
        self.incarnations[group] = self.incarnations.get(group, 0) + 1
        self.come(group, *(numbers or range(SIZE)))

    def come(self, group: str, *numbers: int) -> None:
        for rank in numbers:
            of = member(rank, self.incarnations[group], group=group)
            self.add_worker(f"{group}-{rank}", "n0", member=of, **PLENTY)

    def end(self, group: str, first: int = 0) -> None:
        """One rank dies, and the others with it."""
        self.lose_worker(f"{group}-{first}", proved=True)
        for rank in set(range(SIZE)) - {first}:
            self.lose_worker(f"{group}-{rank}", proved=True)

    def on(self, name: str) -> list[int]:
        return sorted(it.request_index for it in self.dispatch.placement_table.on(name))


# ---------------------------------------------------------------- which ranks are missing


def test_group_without_its_last_rank_lacks_that_rank() -> None:
    assert missing_of("g0", ranks(0, 1, 2)) == {"w0": (3,), "w1": (3,), "w2": (3,)}
    assert set(missing_of("g0", ranks(0, 1, 2, 3)).values()) == {()}


def test_awaited_rank_counts_as_missing() -> None:
    workers = [*ranks(0, 1, 2), entry("w3", member(3), awaited=True)]
    assert set(missing_of("g0", workers).values()) == {(3,)}


def test_rank_of_an_earlier_incarnation_lacks_all_ranks_and_counts_for_none() -> None:
    workers = [*ranks(0, 1, 2, incarnation=2), entry("old", member(3, 1))]
    assert missing_of("g0", workers) == {"w0": (3,), "w1": (3,), "w2": (3,), "old": (0, 1, 2, 3)}
    whole = [*ranks(0, 1, 2, 3, incarnation=2), entry("old", member(3, 1))]
    assert missing_of("g0", whole)["w0"] == ()
    assert missing_of("g0", whole)["old"] == (0, 1, 2, 3)


def test_ranks_of_another_group_count_for_none() -> None:
    assert missing_of("g0", [*ranks(0, 1, 2), entry("x", member(3, group="g1"))])["w0"] == (3,)


def test_many_missing_ranks_are_counted_in_texts() -> None:
    assert ranks_text((3,)) == "rank 3"
    assert ranks_text((2, 3)) == "ranks 2, 3"
    assert ranks_text(tuple(range(10))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


# ---------------------------------------------------------------- who may join


REFUSED = {
    "rank below 0": ("w9", member(-1), "group_rank", "-1"),
    "rank past the last": ("w9", member(SIZE), "group_rank", str(SIZE)),
    "no ranks": ("w9", member(0, size=0), "group_size", "0"),
    "too many ranks": ("w9", member(0, size=GROUP_SIZE_MAX + 1), "group_size", str(GROUP_SIZE_MAX + 1)),
    "no incarnation": ("w9", member(3, 0), "incarnation", "0"),
    "stale incarnation": ("w9", member(3, 4), "incarnation", "4"),
    "another size": ("w9", member(3, 5, size=5), "group_size", "5"),
    "rank taken": ("w9", member(1, 5), "group_rank", "1"),
    "worker named as its group": ("g0", member(3, 5), "worker", "g0"),
    "worker named as another group": ("g0", None, "worker", "g0"),
    "group named as a worker": ("w9", member(0, group="w1"), "group", "w1"),
    "group named as its worker": ("g7", member(0, group="g7"), "group", "g7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rank_that_cannot_be_is_refused_by_name(case: str) -> None:
    name, of, field, value = REFUSED[case]
    latest = 5 if of is not None and of.group == "g0" else 0
    with pytest.raises(ConfigError) as refused:
        check_member(hello(name, of), ranks(0, 1, 2, incarnation=5), latest)
    assert refused.value.field == field
    assert str(refused.value.value) == value
    assert refused.value.remedy


def test_last_rank_and_the_first_of_a_new_life_may_join() -> None:
    there = ranks(0, 1, 2, incarnation=5)
    check_member(hello("w9", member(3, 5)), there, 5)
    check_member(hello("w9", member(1, 6, size=2)), there, 5)
    check_member(hello("w0", member(0, 5)), there, 5)  # its next epoch
    check_member(hello("w9", None), there, 0)


# ---------------------------------------------------------------- admission


def test_request_waits_for_the_last_rank_of_the_only_group() -> None:
    fake = Groups()
    fake.start("g0", 0, 1)
    fake.submit(0, 100, 60)
    fake.settle()
    reason = fake.pending.explain(fake.entry(0), fake.now)
    assert reason == (PendingKind.GROUP, "no worker takes requests: group g0 waits for ranks 2, 3")
    fake.come("g0", 2)
    assert not fake.settle()
    fake.come("g0", 3)
    assert [it.entry.request_index for it in fake.settle()] == [0]


def test_requests_resume_on_another_group_at_once() -> None:
    fake = Groups("g0", "g1")
    for request_index in range(8):
        fake.submit(request_index, 100, 900, full=True)
    for _ in range(4):
        fake.round()
    fake.end("g0")
    fake.come("g0", 0, 1, 2)  # the fourth is late
    for _ in range(4):
        fake.round()
    assert sum(len(fake.on(f"g1-{rank}")) for rank in range(SIZE)) == 8
    assert not any(fake.on(f"g0-{rank}") for rank in range(3))


def test_requests_stay_on_ranks_that_lost_a_peer_until_these_end() -> None:
    fake = Groups("g0")
    for request_index in range(SIZE):
        fake.submit(request_index, 100, 900, full=True)
    fake.round()
    fake.lose_worker("g0-3", proved=True)
    assert not [it for it in fake.settle(tick=True) if it.entry.worker]
    assert [len(fake.on(f"g0-{rank}")) for rank in range(3)] == [1, 1, 1]


def test_nothing_is_handed_over_to_a_rank_of_an_incomplete_group() -> None:
    fake = Groups("g0")
    fake.submit(0, 100, 900, full=True)
    for _ in range(4):
        fake.round()
    fake.start("g1", 0, 1, 2)
    for rank in range(SIZE):
        fake.drain_worker(f"g0-{rank}", WorkerDrain(1e9, handover=True))
    fake.settle()
    assert not fake.retracted
    fake.come("g1", 3)
    for _ in range(6):
        fake.round()
    assert fake.entry(0).worker.startswith("g1-")


def test_ranks_get_requests_evenly() -> None:
    """Where memory alone would choose, the second rank has the most chunks and would get all."""
    fake = FakeCluster(1, ("n0",), 400)
    for rank in range(SIZE):
        counts = PLENTY | {"hot_chunks": 80 + 400 * (rank == 1)}
        fake.add_worker(f"g0-{rank}", "n0", member=member(rank), **counts)
    for request_index in range(2 * SIZE):
        fake.submit(request_index, 100, 60)
    fake.settle()
    table = fake.dispatch.placement_table
    assert [len(list(table.on(f"g0-{rank}"))) for rank in range(SIZE)] == [2] * SIZE


# ---------------------------------------------------------------- poison


def test_death_of_a_group_is_one_strike_for_requests_of_all_its_ranks() -> None:
    fake = Groups("g0")
    for request_index in range(SIZE):
        fake.submit(request_index, 100, 900, full=True)
    fake.round()
    fake.lose_worker("g0-0", proved=True)
    assert [fake.entry(index).strikes for index in range(SIZE)] == [1] * SIZE
    for rank in range(1, SIZE):
        fake.lose_worker(f"g0-{rank}", proved=True)
    assert [fake.entry(index).strikes for index in range(SIZE)] == [1] * SIZE
    fake.start("g0")
    fake.settle()
    fake.end("g0", first=2)
    assert [fake.entry(index).strikes for index in range(SIZE)] == [2] * SIZE


def test_tokens_that_come_after_the_first_death_move_the_mark() -> None:
    fake = Groups("g0")
    fake.submit(0, 100, 900, full=True)
    for _ in range(4):
        fake.round()
    name = fake.entry(0).worker
    other = next(f"g0-{rank}" for rank in range(SIZE) if f"g0-{rank}" != name)
    fake.lose_worker(other, proved=True)
    before = fake.entry(0).mark
    fake.live[0].tokens.append(fake.live[0].tokens[-1])
    fake.lose_worker(name, proved=True)
    assert (fake.entry(0).strikes, fake.entry(0).mark) == (1, before + 1)


def test_rank_lost_in_silence_is_struck_when_a_peer_is_proved_dead() -> None:
    fake = Groups("g0")
    for request_index in range(SIZE):
        fake.submit(request_index, 100, 900, full=True)
    fake.round()
    fake.lose_worker("g0-0", proved=False)
    assert [fake.entry(index).strikes for index in range(SIZE)] == [0] * SIZE
    fake.lose_worker("g0-1", proved=True)
    fake.prove_exit(fake.zombies[0])
    assert [fake.entry(index).strikes for index in range(SIZE)] == [1] * SIZE


def test_rank_that_leaves_strikes_none_and_neither_do_its_peers() -> None:
    fake = Groups("g0")
    fake.submit(0, 100, 900, full=True)
    fake.round()
    name = fake.entry(0).worker
    leaver = next(f"g0-{rank}" for rank in range(SIZE) if f"g0-{rank}" != name)
    fake.lose_worker(leaver, proved=True, is_leaving=True)
    fake.lose_worker(name, proved=True)
    assert fake.entry(0).strikes == 0


def test_suspects_run_singly_in_a_whole_group() -> None:
    fake = Groups("g0")
    for request_index in range(SIZE):
        fake.submit(request_index, 100, 300, full=True)
    for _ in range(SUSPECT_STRIKES):
        fake.settle()
        fake.end("g0")
        fake.start("g0")
    for _ in range(40):
        fake.round()
        table = fake.dispatch.placement_table
        tried = [
            it
            for rank in range(SIZE)
            for it in table.on(f"g0-{rank}")
            if it in table.poison_detector and it.generated <= it.mark
        ]
        assert len(tried) <= 1
    assert not fake.dispatch.placement_table.poison_detector


@pytest.mark.parametrize("poison", [0, 5])
def test_poison_in_a_group_is_failed_alone(poison: int) -> None:
    fake = Groups("g0")
    for request_index in range(8):
        fake.submit(request_index, 100, 90, full=True)
    deaths = 0
    for _ in range(400):
        fake.round()
        if any(poison in fake.on(f"g0-{rank}") for rank in range(SIZE)):
            fake.end("g0", first=deaths % SIZE)
            fake.start("g0")
            deaths += 1
    states = {index: str(live.state.state) for index, live in fake.live.items()}
    assert states == {index: "FAILED" if index == poison else "FINISHED" for index in range(8)}
    assert deaths == POISON_STRIKES


# ---------------------------------------------------------------- drawn lives


class DrawnLives(Groups):
    """Groups whose ranks die, come late and come by halves. `dying[group]`: rounds until its other ranks end."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.absent: dict[str, list[int]] = {}
        self.dying: dict[str, int] = {}
        for group in ("g0", "g1"):
            self.begin(group)

    def begin(self, group: str) -> None:
        self.incarnations[group] = self.incarnations.get(group, 0) + 1
        self.absent[group] = self.rng.sample(range(SIZE), SIZE)

    def step(self, *, with_deaths: bool) -> None:
        for group in ("g0", "g1"):
            there = [f"{group}-{rank}" for rank in range(SIZE) if f"{group}-{rank}" in self.workers]
            if group in self.dying:
                self.dying[group] -= 1
                if self.dying[group] <= 0:
                    del self.dying[group]
                    lingering = self.rng.choice(["", "", *there])
                    for name in there:
                        if name != lingering:
                            self.lose_worker(name, proved=True)
                    self.begin(group)
            elif with_deaths and there and self.rng.random() < 0.08:
                self.lose_worker(self.rng.choice(there), proved=self.rng.random() < 0.7)
                self.dying[group] = self.rng.randint(0, 3)
            elif self.absent[group] and (not with_deaths or self.rng.random() < 0.7):
                self._come_or_end_straggler(group, self.absent[group].pop())
        for zombie in [zombie for zombie in self.zombies if self.rng.random() < 0.3]:
            self.prove_exit(zombie)
        self.round()

    def _come_or_end_straggler(self, group: str, rank: int) -> None:
        """A rank of the life before may still be there; it ends before its successor comes."""
        if f"{group}-{rank}" in self.workers:
            self.lose_worker(f"{group}-{rank}", proved=True)
        self.come(group, rank)

    def settle(self, *, tick: bool = False) -> list[Decision]:
        """No request is placed on a rank of a group that lacks one of its incarnation."""
        decisions = super().settle(tick=tick)
        for it in decisions:
            if isinstance(it, AdmitDecision):
                group = it.worker.name[:2]
                workers = self.dispatch.placement_table.workers.values()
                members = [worker.member for worker in workers if worker.member is not None]
                life = group, self.incarnations[group]
                there = [of.rank for of in members if (of.group, of.incarnation) == life]
                assert sorted(there) == list(range(SIZE)), f"{it.worker.name} beside ranks {there} alone"
        return decisions


@pytest.mark.parametrize("seed", range(40))
def test_requests_survive_drawn_lives_of_groups(seed: int) -> None:
    """I5: no request is placed on an incomplete group, none is forgotten with its rank, and all end."""
    fake = DrawnLives(seed)
    for request_index in range(12):
        fake.submit(request_index, fake.rng.randint(20, 200), fake.rng.randint(20, 200), full=True)
    for _ in range(60):
        fake.step(with_deaths=True)
    for _ in range(600):
        if not fake.unfinished():
            break
        fake.step(with_deaths=False)
    outcomes = {str(live.state.state) for live in fake.live.values()}
    assert outcomes == {"FINISHED"}
    for live in fake.live.values():
        assert len(live.endings) == 1
        assert len(live.tokens) == live.sampling.max_tokens


# ---------------------------------------------------------------- in the Scheduler


async def join(rig: SchedulerRig, rank: int, incarnation: int = 1, *, name: str = "") -> None:
    await rig.add_worker(name or f"w{rank}", member=member(rank, incarnation, size=2))


def test_stale_incarnation_is_refused_after_its_successor_has_left() -> None:
    async def scenario() -> None:
        async with open_rig() as rig:
            await join(rig, 0, 7)
            rig.lose_worker("w0", proved=True)
            with pytest.raises(ConfigError, match="incarnation 7 of group g0 has replaced it"):
                await join(rig, 1, 6)

    trio.run(scenario)


def test_rows_name_rank_group_and_missing_ranks() -> None:
    async def scenario() -> None:
        async with open_rig() as rig:
            await join(rig, 1)
            (row,) = rig.scheduler.worker_rows()
            assert (row.group, row.rank, row.ranks_missing) == ("g0", 1, (0,))
            await join(rig, 0)
            assert [row.ranks_missing for row in rig.scheduler.worker_rows()] == [(), ()]

    trio.run(scenario)


def test_drain_of_a_group_drains_its_ranks() -> None:
    async def scenario() -> None:
        async with open_rig() as rig:
            await join(rig, 0)
            await join(rig, 1)
            await rig.add_worker("alone")
            lines = await rig.scheduler.drain(("g0", "w1"), "test", handover=True, deadline_s=9.0)
            assert [line.split(":")[0] for line in lines] == ["w0", "w1"]
            states = {row.worker: row.state for row in rig.scheduler.worker_rows()}
            assert states == {"w0": "drained", "w1": "drained", "alone": "connected"}
            await rig.scheduler.undrain(("g0",), "test")
            assert {row.state for row in rig.scheduler.worker_rows()} == {"connected"}
            with pytest.raises(NotFound, match="no worker or group of this name"):
                await rig.scheduler.drain(("g1",), "test", handover=True, deadline_s=9.0)

    trio.run(scenario)


@pytest.mark.parametrize(("is_leaving", "strikes"), [(True, 0), (False, 1)])
def test_rank_that_leaves_strikes_none_in_the_scheduler(is_leaving: bool, strikes: int) -> None:
    async def scenario() -> None:
        async with open_rig() as rig:
            await join(rig, 0)
            await join(rig, 1)
            await rig.submit("r!", max_tokens=200)
            await trio.testing.wait_all_tasks_blocked()
            (placed,) = rig.scheduler._placement_table.entries.values()
            leaver = "w1" if placed.worker == "w0" else "w0"
            for name, leaves in ((leaver, is_leaving), (placed.worker, False)):
                rig.scheduler.worker_down(name, rig.links[name].worker.epoch, True, True, leaves)
            await trio.testing.wait_all_tasks_blocked()
            assert placed.strikes == strikes

    trio.run(scenario)

"""The poison limit: a request that kills its worker is failed with the reason, and no other request is."""

from __future__ import annotations

import pytest

from basics.request_states import POISON_STRIKES, TERMINAL
from coordinator.state.poison import SUSPECT_STRIKES
from tests.support.fakes.fake_cluster import FakeCluster
from tests.support.fakes.fake_worker import FakeWorker

DEATHS_MAX = 40


class Poisoned(FakeCluster):
    """`lethal[request_index]`: a worker dies that has it, with that many tokens. Workers are restarted at once."""

    def __init__(self, workers: int, lethal: dict[int, int], **counts: int) -> None:
        super().__init__(1, ("n0",), 400)
        self.lethal = lethal
        self.deaths: list[list[int]] = []
        self.counts = {"seats": 8, "hot_chunks": 80, "index_pages": 160, "prompt_max_tokens": 1_024} | counts
        for i in range(workers):
            self.add_worker(f"w{i}", "n0", **self.counts)

    def kills(self, worker: FakeWorker) -> bool:
        for run in worker.runs.values():
            request_index = run.admit.request_index
            if request_index in self.lethal and run.generated >= self.lethal[request_index] and run.phase != "leaving":
                return True
        return False

    def die(self, name: str) -> None:
        self.deaths.append([run.admit.request_index for run in self.workers[name].runs.values()])
        assert len(self.deaths) <= DEATHS_MAX, self.deaths
        self.lose_worker(name, proved=True)
        self.add_worker(name, "n0", **self.counts)

    def play(self, rounds: int = 2_000) -> None:
        for _ in range(rounds):
            self.round()
            for name in [name for name, worker in self.workers.items() if self.kills(worker)]:
                self.die(name)
            if all(live.state.state in TERMINAL for live in self.live.values()):
                return
        raise AssertionError({request_index: str(live.state.state) for request_index, live in self.live.items()})

    def outcomes(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for request_index, live in self.live.items():
            found.setdefault(str(live.state.state), []).append(request_index)
        return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("at_tokens", [0, 1, 30])
@pytest.mark.parametrize("poison", [0, 5, 11])
def test_poison_alone_is_failed_with_the_reason(workers: int, at_tokens: int, poison: int) -> None:
    """I5: from prefill on or later, as the oldest, in the middle or as the last, among more than fit."""
    fake = Poisoned(workers, {poison: at_tokens})
    for request_index in range(12):
        fake.submit(request_index, 100, 90, full=True)
    fake.play()
    outcomes = fake.outcomes()
    assert outcomes == {
        "FAILED": [poison],
        "FINISHED": [request_index for request_index in range(12) if request_index != poison],
    }
    assert len(fake.deaths) == POISON_STRIKES
    (ending,) = fake.live[poison].endings
    assert ending.reason.startswith(f"its worker died {POISON_STRIKES} times without its coming further")
    fake.check_nothing_leaked()


def test_two_poisons_among_ten_requests_are_found() -> None:
    fake = Poisoned(2, {3: 0, 7: 12})
    for request_index in range(12):
        fake.submit(request_index, 100, 90, full=True)
    fake.play()
    assert fake.outcomes()["FAILED"] == [3, 7]


def test_new_poison_spares_an_earlier_suspect() -> None:
    fake = Poisoned(1, {9: 0})
    fake.submit(0, 100, 200, full=True)
    fake.round()
    for _ in range(SUSPECT_STRIKES):
        fake.die("w0")
        fake.round()
    fake.submit(9, 100, 90, full=True)
    for request_index in range(1, 4):
        fake.submit(request_index, 100, 90, full=True)
    fake.play()
    assert fake.outcomes() == {"FAILED": [9], "FINISHED": [0, 1, 2, 3]}


def test_kills_with_progress_between_fail_no_request() -> None:
    """Twenty of them: an operator's, not a request's."""
    fake = Poisoned(2, {})
    for request_index in range(8):
        fake.submit(request_index, 100, 600, full=True)
    for kill in range(20):
        for _ in range(6):
            fake.round()
        fake.die(f"w{kill % 2}")
    fake.play()
    assert fake.outcomes() == {"FINISHED": list(range(8))}


def test_suspects_run_singly_beside_proven_requests() -> None:
    fake = Poisoned(1, {})
    for request_index in range(4):
        fake.submit(request_index, 100, 300, full=True)
    for _ in range(SUSPECT_STRIKES):
        fake.settle()
        fake.die("w0")
    fake.submit(4, 100, 300, full=True)
    seen: list[set[int]] = []
    for _ in range(60):
        fake.round()
        poison_detector = fake.dispatch.placement_table.poison_detector
        on = list(fake.dispatch.placement_table.on("w0"))
        tried = [entry for entry in on if entry in poison_detector and entry.generated <= entry.mark]
        assert len(tried) <= 1
        seen.append({entry.request_index for entry in on})
    assert seen[0] == {0}
    assert {0, 1, 2, 3, 4} in seen
    assert not fake.dispatch.placement_table.poison_detector


def test_cut_link_and_emptied_worker_are_no_strikes() -> None:
    fake = Poisoned(1, {})
    fake.submit(0, 100, 300, full=True)
    for _ in range(2 * POISON_STRIKES):
        fake.settle()
        worker = fake.dispatch.placement_table.workers["w0"]
        fake.lose_worker("w0", proved=False)
        fake.take(fake.dispatch.worker_exited(worker.name, worker.epoch, died=False))
        fake.zombies.clear()
        fake.add_worker("w0", "n0", **fake.counts)
    assert fake.entry(0).strikes == 0
    fake.play()
    assert fake.outcomes() == {"FINISHED": [0]}


def test_death_proved_after_a_request_ended_suspects_none() -> None:
    """Its slot may be another's by then."""
    fake = Poisoned(2, {})
    fake.submit(0, 100, 300, full=True)
    fake.round()
    for _ in range(SUSPECT_STRIKES - 1):
        fake.die(fake.entry(0).worker)
        fake.settle()
    fake.lose_worker(fake.entry(0).worker, proved=False)
    fake.take(fake.dispatch.end(fake.entry(0), "ABORTED", "client"))
    assert fake.outcomes() == {"ABORTED": [0]}
    fake.prove_exit(fake.zombies[0])
    assert not fake.dispatch.placement_table.poison_detector


def test_late_death_proof_spares_requests_with_progress() -> None:
    fake = Poisoned(2, {})
    fake.submit(0, 100, 900, full=True)
    fake.round()
    for _ in range(POISON_STRIKES + 1):
        name = fake.entry(0).worker
        fake.lose_worker(name, proved=False)
        fake.add_worker(name, "n0", **fake.counts)
        for _ in range(6):
            fake.round()
        fake.prove_exit(fake.zombies[0])
    assert fake.entry(0).strikes == 1
    assert not fake.dispatch.placement_table.poison_detector

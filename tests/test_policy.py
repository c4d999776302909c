"""Policy: stories told by hand, and a cluster that hypothesis drives into every state that it can reach.

Whatever has happened, once links deliver and workers make progress, every request that is not held ends: there is no
livelock. On the way: strict rank order, no victim of the top rank, no page in two hands (I1, I2), no leak.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.lifecycle import TERMINAL
from coordinator.roster import Drain
from tests.fakes.fake_cluster import FakeCluster

ROUNDS_MAX = 2_000


def run_to_end(cluster: FakeCluster) -> int:
    """Rounds until every request that is not held has ended."""
    for count in range(ROUNDS_MAX):
        if not cluster.unfinished():
            return count
        cluster.round()
    states = [(slot, cluster.live[slot].state.state) for slot in cluster.unfinished()]
    raise AssertionError(f"livelock: {states}")


class PolicyMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16), host_pages=st.integers(16, 32), two_nodes=st.booleans())
    def start(self, seed: int, host_pages: int, two_nodes: bool) -> None:
        self.cluster = FakeCluster(seed, ("n0", "n1") if two_nodes else ("n0",), host_pages)
        self.node_of = {"w0": "n0", "w1": "n1" if two_nodes else "n0"}
        self.cluster.add_worker("w0", "n0")
        self.cluster.add_worker("w1", self.node_of["w1"], seats=2, hot_chunks=10)
        self.next_slot = 0

    @rule(prompt=st.integers(1, 400), max_tokens=st.integers(1, 300), priority=st.integers(0, 2))
    def submit(self, prompt: int, max_tokens: int, priority: int) -> None:
        if self.next_slot < 12:
            self.cluster.submit(self.next_slot, prompt, max_tokens, priority)
            self.next_slot += 1

    @rule(data=st.data())
    def worker_advances(self, data: st.DataObject) -> None:
        runs = [(worker, a) for worker in self.cluster.workers.values() for a in worker.runs]
        if runs:
            worker, admission = data.draw(st.sampled_from(runs))
            worker.advance(admission)

    @rule(name=st.sampled_from(["w0", "w1"]), count=st.integers(1, 4))
    def commands_arrive(self, name: str, count: int) -> None:
        for _ in range(count):
            if name in self.cluster.workers:
                self.cluster.obey_next(name)

    @rule(name=st.sampled_from(["w0", "w1"]), count=st.integers(1, 4))
    def events_arrive(self, name: str, count: int) -> None:
        for _ in range(count):
            if name in self.cluster.workers:
                self.cluster.hear_next(name)

    @rule(rounds=st.integers(1, 4))
    def time_passes(self, rounds: int) -> None:
        for _ in range(rounds):
            self.cluster.round()

    @rule(tick=st.booleans())
    def scheduler_decides(self, tick: bool) -> None:
        self.cluster.settle(tick=tick)

    def some_request(self, data: st.DataObject) -> int | None:
        slots = [slot for slot, live in self.cluster.live.items() if live.state.state not in TERMINAL]
        return data.draw(st.sampled_from(slots)) if slots else None

    @rule(data=st.data(), keep=st.booleans(), hold=st.booleans())
    def operator_retracts(self, data: st.DataObject, keep: bool, hold: bool) -> None:
        slot = self.some_request(data)
        if slot is not None:
            heard = self.cluster.dispatch.retract(self.cluster.entry(slot), keep=keep, hold=hold, reason="operator")
            self.cluster.take(heard)

    @rule(data=st.data())
    def operator_resumes(self, data: st.DataObject) -> None:
        slot = self.some_request(data)
        if slot is not None:
            self.cluster.take(self.cluster.dispatch.resume(self.cluster.entry(slot), "operator"))

    @rule(data=st.data(), hot_slots=st.sampled_from([-1, 0, 128, 256]))
    def operator_forces_a_size(self, data: st.DataObject, hot_slots: int) -> None:
        slot = self.some_request(data)
        if slot is not None:
            self.cluster.dispatch.roster.force(self.cluster.entry(slot), hot_slots)

    @rule(data=st.data())
    def client_aborts(self, data: st.DataObject) -> None:
        slot = self.some_request(data)
        if slot is not None:
            self.cluster.take(self.cluster.dispatch.end(self.cluster.entry(slot), "ABORTED", "client"))

    @rule(name=st.sampled_from(["w0", "w1"]), proved=st.booleans())
    def worker_is_lost(self, name: str, proved: bool) -> None:
        if name in self.cluster.workers:
            self.cluster.lose_worker(name, proved=proved)

    @rule(name=st.sampled_from(["w0", "w1"]))
    def worker_returns(self, name: str) -> None:
        if name not in self.cluster.workers:
            self.cluster.add_worker(name, self.node_of[name])

    @precondition(lambda self: self.cluster.zombies)
    @rule(data=st.data())
    def exit_is_proved(self, data: st.DataObject) -> None:
        self.cluster.prove_exit(data.draw(st.sampled_from(self.cluster.zombies)))

    @precondition(lambda self: self.cluster.zombies)
    @rule(data=st.data())
    def zombie_works_on(self, data: st.DataObject) -> None:
        zombie = data.draw(st.sampled_from(self.cluster.zombies))
        if zombie.runs:
            zombie.advance(data.draw(st.sampled_from(sorted(zombie.runs))))

    @rule(name=st.sampled_from(["w0", "w1"]), handover=st.booleans(), seconds=st.integers(1, 9))
    def drain(self, name: str, handover: bool, seconds: int) -> None:
        if name in self.cluster.workers:
            self.cluster.drain_worker(name, Drain(self.cluster.now + seconds, handover))

    @rule(name=st.sampled_from(["w0", "w1"]))
    def undrain(self, name: str) -> None:
        if name in self.cluster.workers:
            self.cluster.drain_worker(name, None)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check_invariants()

    def teardown(self) -> None:
        """From wherever we are: workers are there and make progress, so all but the held end; then nothing is left."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        for zombie in list(cluster.zombies):
            for admission in list(zombie.runs):
                zombie.advance(admission)
            cluster.prove_exit(zombie)
        for name in ("w0", "w1"):
            if name not in cluster.workers:
                cluster.add_worker(name, self.node_of[name])
            cluster.drain_worker(name, None)
        held = {slot for slot, live in cluster.live.items() if live.state.held}
        before = len(cluster.retracted)
        run_to_end(cluster)
        assert len(cluster.retracted) - before <= 2 * len(cluster.live), "thrashing"
        still = {slot for slot, live in cluster.live.items() if live.state.state not in TERMINAL}
        assert still <= held, "only held requests are left"
        for slot in still:
            assert cluster.live[slot].state.held, "what an operator retracted stays held"
            cluster.take(cluster.dispatch.end(cluster.entry(slot), "ABORTED", "teardown"))
        cluster.check_invariants()
        cluster.check_nothing_leaked()


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

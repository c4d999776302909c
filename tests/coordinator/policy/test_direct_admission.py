"""Two workers for one request: paired at once or not at all, handed over without a copy, a token not said included."""

from __future__ import annotations

import msgspec
import pytest

from basics.request_states import State
from coordinator.memory.changes import Keep
from coordinator.policy import decisions
from coordinator.scheduler.validation import check_fits
from coordinator.state.worker_entry import WorkerDrain
from protocol.errors import CapacityError, Unavailable
from protocol.messages import AUTO, BOTH, DECODE, DIRECT, NO_HOT_BUFFER, NO_TOKEN, PREFILL, STAGED
from protocol.sizing import RESIDENT, Length
from tests.coordinator.policy.test_policy import is_running, run_to_end, run_until, state
from tests.support.fakes.coordinator import Life
from tests.support.fakes.fake_cluster import FakeCluster, capacity
from tests.support.history import first_parent_commits, in_turn
from tests.support.worker_rig import SETTINGS, Rig
from worker.device import sizing
from worker.loop.batch import Status
from worker.streams import make_streams


def pair(*, prefill: dict[str, int] | None = None, decode: dict[str, int] | None = None) -> FakeCluster:
    """p0 prefills, d0 decodes, on one node with plenty of what the test does not say."""
    plenty = {"seats": 20, "hot_chunks": 200, "index_pages": 200, "prompt_max_tokens": 12_800}
    fake = FakeCluster(1, host_pages=200)
    fake.add_worker("p0", "n0", PREFILL, **(plenty | (prefill or {})))
    fake.add_worker("d0", "n0", DECODE, **(plenty | (decode or {})))
    return fake


def admits(plan: list[decisions.Decision]) -> list[decisions.AdmitDecision]:
    return [decision for decision in plan if isinstance(decision, decisions.AdmitDecision)]


# ---------------------------------------------------------------- who goes where


def test_direct_request_is_prefilled_and_decoded_by_two_workers() -> None:
    fake = pair()
    fake.submit(0, 100, 300, full=True)
    (first,) = admits(fake.settle())
    assert (first.worker.name, first.decoder, first.hot_size.hot_slots) == ("p0", "d0", NO_HOT_BUFFER)
    assert first.memory.hot_chunks == 0
    pages = fake.entry(0).pages
    run_until(fake, lambda: is_running(fake, 0))
    assert fake.entry(0).worker == "d0"
    assert fake.entry(0).pages >= pages, "what was reserved for decoding stayed reserved"
    states = [line.state for line in fake.live[0].state.history()]
    assert states == ["QUEUED", "PREFILLING", "TRANSFERRING", "PREFILLED", "READY", "RUNNING"]
    run_to_end(fake)
    fake.check_nothing_leaked()


@pytest.mark.parametrize(
    ("roles", "prefill_mode", "first", "decoder"),
    [
        ((BOTH, BOTH), AUTO, BOTH, False),
        ((BOTH, BOTH), DIRECT, BOTH, True),
        ((PREFILL, BOTH), AUTO, PREFILL, True),
        ((PREFILL, BOTH), STAGED, BOTH, False),
        ((BOTH, DECODE), AUTO, BOTH, False),
        ((BOTH, DECODE), DIRECT, BOTH, True),
    ],
)
def test_prefill_mode_is_per_request(roles: tuple[str, str], prefill_mode: str, first: str, decoder: bool) -> None:
    fake = FakeCluster(1)
    for number, role in enumerate(roles):
        fake.add_worker(f"w{number}", "n0", role)
    fake.submit(0, 100, 100, prefill_mode=prefill_mode)
    (admit,) = admits(fake.settle())
    assert (admit.worker.capacity.role, bool(admit.decoder)) == (first, decoder)
    run_to_end(fake)


def test_both_prefill_modes_run_in_a_worker_at_once() -> None:
    fake = FakeCluster(1, host_pages=100)
    fake.add_worker("p0", "n0", PREFILL)
    fake.add_worker("w0", "n0")
    for request_index, prefill_mode in enumerate((DIRECT, STAGED)):
        fake.submit(request_index, 100, 500, prefill_mode=prefill_mode)
    run_until(fake, lambda: is_running(fake, 0, 1))
    assert {fake.entry(request_index).worker for request_index in (0, 1)} == {"w0"}


def test_direct_request_waits_for_two_workers_of_a_node() -> None:
    fake = FakeCluster(1, ("n0", "n1"))
    fake.add_worker("p0", "n0", PREFILL)
    fake.add_worker("d0", "n1", DECODE)
    fake.submit(0, 100, 100)
    assert admits(fake.settle()) == []
    fake.add_worker("d1", "n0", DECODE)
    run_to_end(fake)


def test_request_that_never_fits_is_refused_with_reason() -> None:
    small, large, length = capacity(DECODE, hot_chunks=2), capacity(DECODE), Length(300, 0, 100)
    first = ("p0", capacity(PREFILL, hot_chunks=1))
    check_fits(length, [first, ("d0", large)])
    with pytest.raises(CapacityError, match="hot chunks at the smallest hot size, d0 has 2"):
        check_fits(length, [first, ("d0", small)])
    with pytest.raises(CapacityError, match="needs 300 prompt tokens in a pass, p0 has 128"):
        check_fits(length, [("p0", capacity(PREFILL, prompt_max_tokens=128)), ("d0", large)], DIRECT)
    for prefill_mode, workers in ((STAGED, [first, ("d0", large)]), (DIRECT, [("w0", capacity())]), (AUTO, [first])):
        with pytest.raises(Unavailable, match=f"prefill_mode={prefill_mode}: no worker prefills"):
            check_fits(length, workers, prefill_mode)


# ---------------------------------------------------------------- all or nothing, and in order


@pytest.mark.parametrize("short", ["prefill", "decode"])
def test_no_memory_is_held_while_either_worker_is_full(short: str) -> None:
    """I7."""
    fake = pair(**{short: {"seats": 1}})
    fake.submit(0, 100, 2_000)
    if short == "decode":
        run_until(fake, lambda: is_running(fake, 0))
    else:
        fake.settle()
    fake.submit(1, 100, 100)
    assert admits(fake.settle()) == []
    assert fake.entry(1).waits
    assert fake.ledgers["n0"].holdings_count == 1


def test_promised_memory_is_kept_from_lower_ranks() -> None:
    fake = pair(decode={"seats": 1})
    fake.submit(0, 100, 100)
    (first,) = admits(fake.settle())
    fake.submit(1, 100, 100)
    fake.submit(2, 100, 100, priority=1)
    assert [it.entry.request_index for it in admits(fake.settle())] == [2], "only a better-ranked request comes between"
    assert fake.dispatch.placement_table.promised.keys() == {0, 2}
    run_to_end(fake)
    assert fake.dispatch.placement_table.promised == {}
    assert first.entry.request_index == 0


def test_higher_rank_preempts_on_the_decode_worker() -> None:
    fake = pair(decode={"seats": 1})
    fake.submit(0, 100, 5_000, full=True)
    run_until(fake, lambda: is_running(fake, 0))
    fake.submit(1, 100, 100, priority=1)
    run_until(fake, lambda: is_running(fake, 1))
    assert [(entry.request_index, cause) for entry, cause in fake.retracted] == [(0, decisions.Cause.GPU_MEMORY)]
    run_to_end(fake)


# ---------------------------------------------------------------- who is lost


def test_lost_prefill_worker_quarantines_prompt_pages() -> None:
    """I2: it may still write to every page that it was given."""
    fake = pair()
    fake.submit(0, 100, 100)
    fake.settle()
    pages = fake.entry(0).pages
    fake.lose_worker("p0", proved=False)
    assert state(fake, 0) is State.QUEUED
    assert fake.ledgers["n0"].count_pages().quarantined == pages
    fake.add_worker("p1", "n0", PREFILL)
    run_until(fake, lambda: is_running(fake, 0))
    fake.prove_exit(fake.zombies[0])
    run_to_end(fake)
    fake.check_nothing_leaked()


def test_reserve_pages_are_not_shared_with_an_unproved_process() -> None:
    """Full pages of durable rows are: 128 tokens are two."""
    fake = pair()
    fake.submit(0, 128, 100)
    fake.round()
    run_until(fake, lambda: state(fake, 0) is State.TRANSFERRING or state(fake, 0) is State.PREFILLED)
    if state(fake, 0) is State.TRANSFERRING:
        fake.lose_worker("p0", proved=False)
        assert fake.entry(0).pages == 2
    run_to_end(fake)


def test_lost_decode_worker_costs_no_prefill() -> None:
    fake = pair()
    fake.submit(0, 100, 500)
    fake.settle()
    fake.lose_worker("d0", proved=True)
    run_until(fake, lambda: state(fake, 0) is State.PREFILLED)
    fake.add_worker("d1", "n0", DECODE)
    run_until(fake, lambda: is_running(fake, 0))
    assert [line.event for line in fake.live[0].state.history()].count("staged") == 1


def test_draining_decode_worker_gets_no_promise() -> None:
    fake = pair()
    fake.drain_worker("d0", WorkerDrain(1e9, handover=False))
    fake.submit(0, 100, 100)
    assert admits(fake.settle()) == []


# ---------------------------------------------------------------- the workers


class TwoWorkers:
    """Two executors over one host pool, and a coordinator that hands one request from the first to the second."""

    def __init__(self, seed: int) -> None:
        self.first = Rig(make_streams("simulated", seed))
        self.second = Rig(make_streams("simulated", seed + 1), host=self.first.host)

    def prefill(self, prompt_tokens: int, max_tokens: int, number: int = 1, **sampling: object) -> Life:
        life = self.first.coordinator.create(number, prompt_tokens, max_tokens, **sampling)
        assert self.first.coordinator.admit(life, NO_HOT_BUFFER)
        self.first.run()
        self.first.check()
        assert life.durable == prompt_tokens
        return life

    def decode(self, life: Life, hot_slots: int) -> None:
        self.second.coordinator.adopt(self.first.coordinator)
        assert self.second.coordinator.admit(life, hot_slots)
        self.second.run()
        self.second.check_end()


PROMPTS = (1, 63, 64, 65, 100, 190, 320)
HOT_SLOTS = (RESIDENT, 64, 192)


@pytest.mark.parametrize(
    ("prompt", "hot_slots"),
    [(prompt, in_turn(HOT_SLOTS[place % 3 :] + HOT_SLOTS[: place % 3])) for place, prompt in enumerate(PROMPTS)],
)
def test_prefill_and_decode_workers_give_the_oracle_tokens(prompt: int, hot_slots: int) -> None:
    """The oracle's tokens, in an order of streams of this commit; and the second worker stages not a byte. Each prompt
    meets another hot size with each commit."""
    two = TwoWorkers(2 * (first_parent_commits() or 0))
    life = two.prefill(prompt, 70)
    two.decode(life, hot_slots)
    assert not two.second.wrong()
    assert (two.first.executor.counters.staged_bytes > 0, two.second.executor.counters.staged_bytes) == (True, 0)
    assert two.first.executor.counters.steps == 0


@pytest.mark.parametrize(("prompt", "is_loaded"), [(150, True), (192, True), (193, False)])
def test_a_prompt_that_fits_its_managed_buffer_is_preloaded(prompt: int, is_loaded: bool) -> None:
    """Its first steps find every row hot. A longer one begins with what its last token selected."""
    two = TwoWorkers(3)
    two.decode(two.prefill(prompt, 3), 192)
    g, counters = two.second.runner.geometry, two.second.executor.counters
    rows = (prompt if is_loaded else g.topk) * g.layers * g.row_bytes
    assert counters.preloaded_bytes == rows + prompt * g.groups * g.index_row_bytes
    assert (counters.swap.totals[1] == 0) == is_loaded
    assert not two.second.wrong()


def test_held_back_first_token_travels_with_the_rows() -> None:
    """A stop string may begin in it, so it is not published yet. Without prefill it could not be drawn again."""
    rig = Rig()
    lives = [rig.coordinator.create(number, 100, 20) for number in range(8)]
    outputs = [life.expected(rig.runner.geometry.group_of_layer) for life in lives]
    number = next(number for number, output in enumerate(outputs) if output[0] < 128 and output[1] < 128)
    first, second = outputs[number][:2]
    for stop, tokens in ((chr(first) + "\0", outputs[number]), (chr(first) + chr(second), [])):
        two = TwoWorkers(5)
        life = two.prefill(100, 20, number, stop=(stop,))
        assert (life.tokens, life.first_token) == ([], first)
        two.decode(life, 64)
        assert life.tokens == tokens


def test_end_at_first_token_needs_no_decode_worker() -> None:
    two = TwoWorkers(1)
    life = two.first.coordinator.create(1, 100, 1)
    assert two.first.coordinator.admit(life, NO_HOT_BUFFER)
    two.first.run()
    assert life.outcome == "length"
    two.first.check_end()


@pytest.mark.parametrize("status", [Status.PREFILLING, Status.STAGING])
def test_withdrawn_prompt_leaves_no_memory_behind(status: Status) -> None:
    rig = Rig(make_streams("simulated", 2))
    life = rig.coordinator.create(1, 100, 10)
    assert rig.coordinator.admit(life, NO_HOT_BUFFER)
    rig.run_until(lambda: any(it.status is status for it in rig.executor.held()))
    rig.coordinator.withdraw(life, "abort")
    rig.run()
    rig.check_end()


def test_prompts_of_one_slab_after_another_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slab has pages for one of them; the others are admitted, and wait for it."""
    monkeypatch.setattr(sizing, "PACKED_PAGES_MAX", 0)
    settings = msgspec.structs.replace(SETTINGS, context_max_tokens=136)
    rig = Rig(make_streams("simulated", 4), settings)
    assert rig.sizing.slab_pages == 3
    lives = [rig.coordinator.create(number, 128, 5) for number in range(4)]
    for life in lives:
        rig.run_until(lambda life=life: rig.coordinator.admit(life, NO_HOT_BUFFER))  # type: ignore[misc]
    rig.run()
    assert all(life.durable == 128 for life in lives)
    rig.check()


def test_rows_do_not_depend_on_the_prefill_worker() -> None:
    one, other = TwoWorkers(1), TwoWorkers(9)
    one_pages, other_pages = [two.first.host[two.prefill(100, 5).host_pages[:1]].clone() for two in (one, other)]
    assert one_pages.equal(other_pages)


def test_keeping_a_handed_over_prompt_keeps_its_reserve() -> None:
    fake = pair()
    fake.submit(0, 100, 300)
    fake.settle()
    entry = fake.entry(0)
    pages, placement = entry.pages, entry.placement
    assert pages > 2
    steps: list[object] = []
    take = fake.take
    fake.take = lambda heard: (steps.extend(it.change for it in heard.steps), take(heard))[1]  # type: ignore[method-assign, func-returns-value]
    run_until(fake, lambda: is_running(fake, 0))
    assert Keep(placement, pages) in steps
    assert entry.first_token == NO_TOKEN

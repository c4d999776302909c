"""One request's stay on a worker: how it ends, parks, leaves in every state, and what a bad one can do (nothing)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from protocol.arrays import pack_int32
from protocol.errors import InternalError
from protocol.logprobs import row_words
from protocol.messages import (
    Admit,
    Faulted,
    Finished,
    Grant,
    HeldToken,
    Parked,
    Released,
    Resize,
    Resized,
    Sampling,
    Staged,
    Started,
    Stop,
    Withdraw,
)
from tests.support.fakes.coordinator import Life, prompt_of
from tests.support.fakes.hash_runner import SHARED, FakeRunner, expected_tokens
from tests.support.fakes.pace import EvenPace
from tests.support.history import in_turn
from tests.support.limits import HANG_LIMIT_S
from tests.support.worker_rig import SETTINGS, Rig
from worker.loop.batch import Status
from worker.streams import make_streams

replace = msgspec.structs.replace


def oracle(number: int, prompt_tokens: int, count: int) -> list[int]:
    return expected_tokens(prompt_of(number, prompt_tokens), count, 0, SHARED)


def events_of(rig: Rig, kind: type) -> list[object]:
    return [event for event in rig.coordinator.events if isinstance(event, kind)]


# ---------------------------------------------------------------- ends


def test_request_lifecycle_in_events() -> None:
    rig = Rig()
    life = rig.coordinator.create(1, 40, 5)
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert [type(event) for event in rig.coordinator.events] == [Staged, Started, Finished, Released]
    finished = events_of(rig, Finished)[0]
    assert finished == Finished(1, "length", 5)
    assert events_of(rig, Released)[0] == Released(1, 40 + 5 - 1)
    rig.check_end()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("hot_slots", [0, 64])
def test_end_token_ends_the_output_and_discards_the_rest(hot_slots: int, lookahead: int) -> None:
    tokens = oracle(1, 90, 20)
    place = next(i for i in range(6, 20) if tokens[i] not in tokens[:i])
    settings = replace(SETTINGS, lookahead_steps=lookahead)
    rig = Rig(settings=settings, runner=FakeRunner(eos=(tokens[place],)))
    life = rig.coordinator.create(1, 90, 20, ignore_eos=False)
    assert rig.coordinator.admit(life, hot_slots)
    rig.run()
    assert (life.outcome, life.tokens) == ("eos", tokens[: place + 1])
    assert rig.executor.counters.surplus_tokens == lookahead
    assert events_of(rig, Released)[0].durable_tokens == 90 + place  # type: ignore[attr-defined]
    rig.check_end()


def test_an_end_token_can_be_ignored() -> None:
    tokens = oracle(1, 90, 12)
    rig = Rig(runner=FakeRunner(eos=(tokens[4],)))
    life = rig.coordinator.create(1, 90, 12)
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert life.tokens == tokens


def first_letter(tokens: list[int]) -> int:
    """Place of a letter that comes for the first time, between other complete characters; 0: there is none."""
    places = range(2, len(tokens) - 1)
    return next((it for it in places if tokens[it] not in tokens[:it] and is_text(tokens[it - 1 : it + 2])), 0)


def is_text(tokens: list[int]) -> bool:
    return all(32 <= token < 127 for token in tokens)


def test_stop_string_ends_the_output_before_it() -> None:
    tokens = oracle(1, 90, 200)
    place = first_letter(tokens)
    rig = Rig()
    life = rig.coordinator.create(1, 90, 200, stop=(chr(tokens[place]),))
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert life.outcome == "stop"
    assert life.tokens == tokens[:place]
    rig.check_end()


def test_held_stop_string_tokens_are_drawn_again_after_resume() -> None:
    tokens = oracle(1, 90, 200)
    place = first_letter(tokens)
    rig = Rig(settings=replace(SETTINGS, lookahead_steps=0))
    life = rig.coordinator.create(1, 90, 200, stop=(chr(tokens[place]) + " never",))
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) >= place)
    rig.turn()
    assert life.tokens == tokens[:place]
    rig.coordinator.withdraw(life, "keep")
    rig.run()
    assert life.tokens == tokens[:place]
    assert life.durable == 90 + place - 1
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert life.tokens == tokens
    rig.check_end()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("keep", ["keep", "drop"])
def test_rows_of_log_probabilities_are_those_of_an_undisturbed_run(keep: str, is_first: bool) -> None:
    """Retracted while a token is held back, the first one too, which no later placement draws again."""
    number = next(it for it in range(1, 99) if 32 <= oracle(it, 90, 1)[0] < 127 and first_letter(oracle(it, 90, 40)))
    tokens = oracle(number, 90, 40)
    place = 0 if is_first else first_letter(tokens)
    whole = Rig()
    undisturbed = whole.coordinator.create(number, 90, 40, logprobs=2)
    assert whole.coordinator.admit(undisturbed, 64)
    whole.run()
    words = row_words(2)
    assert [len(row) for row in undisturbed.rows] == [4 * words] * 40
    rig = Rig(settings=replace(SETTINGS, lookahead_steps=0))
    life = rig.coordinator.create(number, 90, 40, stop=(chr(tokens[place]) + " never",), logprobs=2)
    other = rig.coordinator.create(number + 1, 40, 12)
    assert rig.coordinator.admit(life, 64)
    assert rig.coordinator.admit(other, 64)
    rig.run_until(
        lambda: any(len(it.output.tokens) > place for it in rig.executor.held() if it.request_index == number)
    )
    rig.coordinator.withdraw(life, keep)
    rig.run()
    assert len(life.tokens) == place
    if keep == "keep" and not place:
        assert isinstance(life.first_token, HeldToken)
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert (life.tokens, life.rows) == (tokens, undisturbed.rows)
    assert (len(other.tokens), other.rows) == (12, [])
    rig.check_end()


@pytest.mark.parametrize("backend", ["inline", "simulated"])
def test_single_token_output_ends_with_prefill(backend: str) -> None:
    rig = Rig(make_streams(backend, 3))
    life = rig.coordinator.create(1, 40, 1)
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert life.tokens == oracle(1, 40, 1)
    assert not rig.wrong()
    rig.check_end()


def test_complete_output_ends_at_once() -> None:
    rig = Rig()
    tokens = oracle(1, 40, 4)
    life = rig.coordinator.create(1, 40, 4)
    life.tokens = tokens
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert [type(event) for event in rig.coordinator.events] == [Finished, Released]
    rig.check_end()


# ---------------------------------------------------------------- parking, resizing, leaving


@pytest.mark.parametrize("hot_slots", [0, 64])
def test_starving_request_parks_while_its_batch_continues(hot_slots: int) -> None:
    """Parked says what is durable, and the next Grant ends it."""
    rig = Rig(ahead_tokens=0)
    coordinator = rig.coordinator
    starved, other = coordinator.create(1, 60, 20), coordinator.create(2, 10, 40)
    grant, coordinator.grant = coordinator.grant, lambda life: None  # type: ignore[method-assign, assignment]
    assert coordinator.admit(starved, hot_slots)
    assert coordinator.admit(other, 64)
    rig.run_until(lambda: len(other.tokens) == 40)
    assert [type(event) for event in coordinator.events].count(Parked) == 1
    assert starved.tokens == oracle(1, 60, 5)  # rows 60..63 hold tokens 0..3, and row 63 drew token 4
    assert starved.durable == 64
    grant(starved)
    rig.run()
    assert not rig.wrong()
    rig.coordinator.check_nothing_leaked()


STATUSES = (Status.PREFILLING, Status.STAGING, Status.LOADING, Status.RUNNING, Status.PARKED)


def reach(rig: Rig, life: Life, status: Status) -> None:
    """Turn until `life` has `status` on the worker."""
    coordinator = rig.coordinator
    if status is Status.PARKED:
        coordinator.grant = lambda _: None  # type: ignore[method-assign, assignment]
    assert coordinator.admit(life, 64)
    if status is Status.LOADING:  # which may be over within a turn
        rig.run_until(lambda: life.here and len(life.tokens) >= 3 and has_status(rig, life, Status.RUNNING))
        coordinator.withdraw(life, "keep")
        rig.run_until(lambda: not life.placement)
        assert coordinator.admit(life, 0)
        rig.executor._apply_commands()
    rig.run_until(lambda: has_status(rig, life, status))


def has_status(rig: Rig, life: Life, status: Status) -> bool:
    return any(r.status is status and r.request_index == life.number for r in rig.executor.held())


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("seed", in_turn([(0, 1), (2, 3)]))
def test_request_leaves_in_every_state_without_effect_on_others(status: Status, seed: int) -> None:
    rig = Rig(make_streams("simulated", seed), ahead_tokens=0)
    coordinator = rig.coordinator
    other = coordinator.create(2, 70, 30)
    assert coordinator.admit(other, 64)
    rig.run_until(lambda: len(other.tokens) >= 2)
    life = coordinator.create(1, 100, 60)
    reach(rig, life, status)
    coordinator.withdraw(life, "abort")
    coordinator.__dict__.pop("grant", None)
    coordinator.grant(other)
    rig.run()
    assert life.outcome == "aborted"
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("status", [Status.PREFILLING, Status.STAGING, Status.RUNNING])
def test_worker_is_not_idle_while_a_request_may_move(status: Status) -> None:
    """SGLang #22577, #30674: staging counts, and so does a request that leaves, until it is released."""
    rig = Rig(make_streams("simulated", 1))
    life = rig.coordinator.create(1, 100, 60)
    reach(rig, life, status)
    assert not rig.executor.idle
    rig.coordinator.withdraw(life, "abort")
    rig.run()
    assert isinstance(rig.coordinator.events[-1], Released)
    rig.check_end()


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("seed", in_turn([(0, 1), (2, 3)]))
def test_buffer_is_resized_in_every_state(status: Status, seed: int) -> None:
    """SGLang #23239."""
    rig = Rig(make_streams("simulated", seed), ahead_tokens=0)
    coordinator = rig.coordinator
    other, life = coordinator.create(2, 70, 30), coordinator.create(1, 100, 60)
    assert coordinator.admit(other, 64)
    rig.run_until(lambda: len(other.tokens) >= 2)
    reach(rig, life, status)
    coordinator.__dict__.pop("grant", None)
    coordinator.grant(other)
    assert coordinator.resize(life, 128)
    coordinator.grant(life)
    rig.run()
    assert len(events_of(rig, Resized)) == 1
    assert not rig.wrong()
    rig.check_end()


def test_chunks_granted_during_a_resize_join_the_next_buffer() -> None:
    """Managed, loading; a resize to resident waits; the next page's chunk is granted for the resident buffer."""
    rig = Rig(make_streams("simulated", 1))
    coordinator = rig.coordinator
    other, life = coordinator.create(2, 70, 40), coordinator.create(1, 100, 60)
    assert coordinator.admit(other, 64)
    assert coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) >= 3)
    coordinator.withdraw(life, "keep")
    rig.run_until(lambda: not life.placement)
    assert coordinator.admit(life, 64)
    assert coordinator.resize(life, 0)
    life.tokens.extend([0] * 40)  # as if it were further: a grant of one page and one chunk
    coordinator.grant(life)
    del life.tokens[-40:]
    rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_no_row_is_durable_before_the_first_token() -> None:
    """Rows without prefill's token could never be continued."""
    rig = Rig(make_streams("simulated", 0))
    life = rig.coordinator.create(1, 100, 5)
    reach(rig, life, Status.STAGING)
    assert not life.tokens
    rig.coordinator.withdraw(life, "keep")
    rig.run()
    assert life.durable == 0
    rig.check_end()


# ---------------------------------------------------------------- faults


def admit_command(**changes: object) -> Admit:
    command = Admit(
        placement=77,
        request_index=9,
        request_id="bad",
        prompt=pack_int32(prompt_of(9, 40)),
        generated=b"",
        durable_tokens=0,
        sampling=Sampling(8, ignore_eos=True),
        host_pages=pack_int32([100]),
        index_pages=1,
        hot_slots=64,
        hot_chunks=2,
    )
    return replace(command, **changes)


BAD_ADMISSIONS = {
    "empty prompt": {"prompt": b""},
    "a token outside the vocabulary": {"prompt": pack_int32([1, 251])},
    "a negative token": {"prompt": pack_int32([1, -1])},
    "half a token": {"prompt": b"\0\0\0"},
    "longer than the context": {"sampling": Sampling(500)},
    "no output": {"sampling": Sampling(0)},
    "durable rows without tokens": {"durable_tokens": 40},
    "fewer durable rows than the prompt": {"durable_tokens": 10, "generated": pack_int32([1])},
    "too few host pages": {"host_pages": b"", "index_pages": 0},
    "a host page out of range": {"host_pages": pack_int32([10_000])},
    "a host page twice": {"host_pages": pack_int32([5, 5]), "index_pages": 2},
    "index pages that do not match": {"index_pages": 2},
    "no size class": {"hot_slots": 65},
    "chunks that do not match": {"hot_chunks": 7},
    "more chunks than there are": {
        "hot_slots": 0,
        "hot_chunks": 9_999,
        "durable_tokens": 40,
        "generated": pack_int32([1]),
    },
    "an empty stop string": {"sampling": Sampling(8, stop=("",))},
}


@pytest.mark.parametrize("changes", BAD_ADMISSIONS.values(), ids=BAD_ADMISSIONS)
def test_bad_placement_is_faulted_and_holds_nothing(changes: dict[str, object]) -> None:
    rig = Rig()
    life = rig.coordinator.create(1, 70, 10)
    assert rig.coordinator.admit(life, 64)
    rig.turn(3)
    faults: list[object] = []
    add_event = rig.coordinator.add_event
    rig.coordinator.add_event = lambda event: (  # type: ignore[method-assign]
        faults.append(event) if getattr(event, "placement", 0) == 77 else add_event(event)
    )
    rig.executor.submit(admit_command(**changes))
    rig.run()
    assert [type(event) for event in faults] == [Faulted, Released]
    assert faults[0].message  # type: ignore[attr-defined]
    assert not rig.wrong()
    rig.check_end()


def test_failed_prefill_ends_a_single_request() -> None:
    rig = Rig(runner=FakeRunner(poison=13))
    bad, good = rig.coordinator.create(1, 70, 10, seed=13), rig.coordinator.create(2, 70, 10)
    assert rig.coordinator.admit(bad, 64)
    assert rig.coordinator.admit(good, 64)
    rig.run()
    assert bad.outcome == "a poisoned prompt"
    assert good.tokens == oracle(2, 70, 10)
    rig.check_end()


BAD_GRANTS = {
    "a page it has": lambda life: Grant(life.placement, pack_int32(life.host_pages[:1]), 1, 0),
    "a page out of range": lambda life: Grant(life.placement, pack_int32([9_999]), 1, 0),
    "no index page": lambda life: Grant(life.placement, pack_int32([100]), 0, 0),
    "a chunk for a managed buffer": lambda life: Grant(life.placement, pack_int32([100]), 1, 1),
    "more pages than a context has": lambda life: Grant(life.placement, pack_int32(range(80, 100)), 20, 0),
}


@pytest.mark.parametrize("grant", BAD_GRANTS.values(), ids=BAD_GRANTS)
def test_impossible_grant_faults_a_single_request(grant: Callable[[Life], Grant]) -> None:
    rig = Rig(ahead_tokens=64)
    bad, good = rig.coordinator.create(1, 70, 20), rig.coordinator.create(2, 70, 10)
    assert rig.coordinator.admit(bad, 64)
    assert rig.coordinator.admit(good, 64)
    rig.turn(6)
    rig.executor.submit(grant(bad))
    rig.run()
    assert bad.outcome != "length"
    assert good.tokens == oracle(2, 70, 10)
    rig.check_end()


def test_commands_for_departed_placements_do_nothing() -> None:
    rig = Rig()
    for command in (Grant(5, pack_int32([1]), 1, 0), Resize(5, 64, 2), Withdraw(5), Stop(1.0)):
        rig.executor.submit(command)
    rig.run()
    assert not rig.coordinator.events
    rig.check_end()


def test_loop_error_is_not_contained() -> None:
    rig = Rig()
    life = rig.coordinator.create(1, 70, 20)
    assert rig.coordinator.admit(life, 64)
    rig.turn()
    rig.executor.submit(rig.coordinator._admit_command(life))  # the same admission twice: an invariant is broken
    with pytest.raises(InternalError, match="twice"):
        rig.turn()


# ---------------------------------------------------------------- the thread and its counters


def test_the_thread_serves_commands_and_stops() -> None:
    rig = Rig()
    thread = threading.Thread(target=rig.executor.run)
    thread.start()
    life = rig.coordinator.create(1, 70, 20)
    assert rig.coordinator.admit(life, 64)
    deadline = time.monotonic() + HANG_LIMIT_S
    while not rig.executor.idle or not life.outcome:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    beats = rig.executor.counters.beats
    while rig.executor.counters.beats <= beats + 1:
        assert time.monotonic() < deadline, "an idle loop goes on beating"
        time.sleep(0.002)
    rig.executor.stop()
    thread.join(HANG_LIMIT_S)
    assert not thread.is_alive()
    assert not rig.wrong()


def test_counters_match_events() -> None:
    """Twice on the same seat: what the first left there is not counted again. SGLang #26608."""
    rig = Rig(settings=replace(SETTINGS, seats=1))
    lives = [rig.coordinator.create(number, 100, 30) for number in range(2)]
    for life in lives:
        assert rig.coordinator.admit(life, 64)
        rig.run()
    counters, groups = rig.executor.counters, rig.runner.geometry.groups
    token_bytes = rig.runner.geometry.page_bytes // 64
    assert (counters.prompt_tokens, counters.tokens, counters.steps) == (200, 60, 58)
    assert (counters.admitted, counters.released, counters.faulted) == (2, 2, 0)
    assert all(life.hits + life.misses == 29 * 64 * groups for life in lives)
    hits, misses, swapped_bytes = counters.swap.totals
    assert (hits, misses) == (sum(life.hits for life in lives), sum(life.misses for life in lives))
    assert counters.staged_bytes == 200 * token_bytes
    assert counters.backed_up_bytes == 58 * token_bytes
    assert swapped_bytes == counters.swapped_bytes == 16 * (2 * counters.swap.misses[0] + counters.swap.misses[1])
    assert counters.step_us > 0


def test_steps_beside_a_prompt_are_told_apart() -> None:
    """Steps launched behind a unit are, and the one that is read behind its launch: the host had no time for it."""
    rig = Rig(pace=EvenPace(SETTINGS.pass_tokens))
    counters = rig.executor.counters
    assert rig.coordinator.admit(rig.coordinator.create(1, 100, 60), 64)
    while counters.steps < 20:
        rig.executor.turn()
    assert counters.alone_steps >= counters.steps - 1  # a unit goes ahead of the first one
    before = counters.steps - counters.alone_steps
    assert rig.coordinator.admit(rig.coordinator.create(2, 100, 20), 64)
    rig.run()
    beside = counters.steps - counters.alone_steps - before
    assert beside == 3 * -(-100 // SETTINGS.pass_tokens) + 1  # a unit for each of three layers of a pass
    assert 0 < counters.alone_s < counters.step_s.total
    assert counters.step_requests == 60 - 1 + 20 - 1
    assert counters.step_requests - counters.alone_requests >= beside


def test_counters_of_live_requests_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.loop.executor.COUNTERS_INTERVAL_S", 0.0)
    rig = Rig()
    life = rig.coordinator.create(1, 100, 10)
    assert rig.coordinator.admit(life, 64)
    rig.run()
    counts = rig.coordinator.counts
    assert len(counts) >= 8
    assert all(count.keys() == {1} for count in counts)
    assert counts[-1] == {1: (life.hits, life.misses)}, "the last one before it is released is final"

"""Decoding with drafts, right in any share of places: tokens are those of plain decoding, wherever a request is."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coordinator.scheduler.validation import _mismatch
from kernels.state import StepBatch
from protocol.errors import ConfigError
from protocol.messages import DRAFT_TOKENS_MAX, NO_LOGPROBS, Finished
from protocol.settings import DraftTokens
from tests.support.accepted_rows import NOTHING_DRAWN, accepted_rows
from tests.support.checkpoints import DRAFTING
from tests.support.drafting_rig import DraftRig, drafting_settings
from tests.support.fakes.coordinator import Life
from tests.support.fakes.drafting_runner import DraftingFakeRunner
from tests.support.fakes.hash_runner import ALTERNATING
from tests.support.history import in_turn
from tests.support.scheduler_rig import open_rig
from tests.support.worker_rig import Logits, Rig
from tests.worker.loop import test_model
from tests.worker.runners.test_drafting import pair_of
from worker.loop.decode import StepTokens
from worker.loop.drafting import DraftStep
from worker.runners import invariance
from worker.runners.base import DraftRows, StepOutputs
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner
from worker.streams import Streams, make_streams
from worker.streams.cuda import CudaStreams

REQUESTS = ((100, 24), (70, 30), (9, 16))


def decoded(rig: DraftRig, hot_slots: int) -> list[Life]:
    lives = [rig.coordinator.create(number, *sizes, seed=number) for number, sizes in enumerate(REQUESTS)]
    for life in lives:
        assert rig.coordinator.admit(life, hot_slots)
    rig.run()
    assert not rig.wrong()
    rig.check_end()
    return lives


@pytest.mark.parametrize(
    ("draft_tokens", "percent", "hot_slots", "lookahead"),
    [(1, 100, 0, 0), (1, 50, 64, 1), (2, 100, 128, 1), (2, 0, 64, 1), (3, 60, 0, 1), (4, 50, 128, 0), (4, 100, 64, 1)],
)
def test_tokens_are_those_of_plain_decoding(draft_tokens: int, percent: int, hot_slots: int, lookahead: int) -> None:
    rig = DraftRig(None, drafting_settings(draft_tokens, lookahead_steps=lookahead), percent)
    decoded(rig, hot_slots)
    counters = rig.executor.counters
    assert (counters.accepted_tokens == 0) == (percent == 0)
    if percent == 100 and hot_slots != 64:  # a buffer of top-k slots admits few drafts
        assert counters.accepted_tokens > 0.5 * counters.drafted_tokens
        assert counters.steps < 30 / draft_tokens**0.5


@pytest.mark.parametrize(("draft_tokens", "lookahead"), [(1, 1), (2, 0), (2, 1), (4, 1)])
def test_right_drafts_are_all_accepted(draft_tokens: int, lookahead: int) -> None:
    """Also behind a step of which all were: the next one's drafts had their rows in time."""
    rig = DraftRig(None, drafting_settings(draft_tokens, lookahead_steps=lookahead, device_mem="1MiB"), 100)
    life = rig.coordinator.create(0, 65, 61)
    assert rig.coordinator.admit(life, 0)
    rig.run()
    assert not rig.wrong()
    assert rig.executor.counters.steps <= 60 / (1 + draft_tokens) + 2 + lookahead
    assert rig.executor.counters.accepted.keys() == set(range(1, 1 + draft_tokens))
    rig.check_end()


@pytest.mark.parametrize(("draft_tokens", "lookahead"), [(2, 0), (2, 1), (4, 1)])
def test_requests_with_other_limits_of_drafts_share_steps(draft_tokens: int, lookahead: int) -> None:
    rig = DraftRig(None, drafting_settings(draft_tokens, lookahead_steps=lookahead, device_mem="1MiB"), 100)
    limits = 0, 1, 2, draft_tokens
    lives = [rig.coordinator.create(number, 65 + number, 40, draft_tokens=it) for number, it in enumerate(limits)]
    for life in lives:
        assert rig.coordinator.admit(life, 0)
    rig.run()
    assert not rig.wrong()
    rig.check_end()
    for placement, limit in enumerate(limits, 1):
        drafted, right = rig.coordinator.drafts.get(placement, (0, 0))
        assert bool(drafted) == bool(limit)
        assert 0 <= 39 * limit / (1 + limit) - right <= 2 * limit


@pytest.mark.parametrize(("limit", "lookahead"), [(0, 0), (1, 1), (2, 1), (3, 0)])
def test_right_drafts_are_all_accepted_up_to_the_limit_of_the_request(limit: int, lookahead: int) -> None:
    """Of a worker that drafts four. The drafts of the next step, too, have their rows."""
    rig = DraftRig(None, drafting_settings(4, lookahead_steps=lookahead, device_mem="1MiB"), 100)
    life = rig.coordinator.create(0, 65, 61, draft_tokens=limit)
    assert rig.coordinator.admit(life, 0)
    rig.run()
    assert not rig.wrong()
    counters = rig.executor.counters
    assert 60 / (1 + limit) <= counters.steps <= 60 / (1 + limit) + 2 + lookahead
    assert counters.drafted.keys() == set(range(1, 1 + limit))
    assert life.rows_wanted == 125
    rig.check_end()


@pytest.mark.parametrize(("draft_tokens", "turns"), [(2, 3), (2, 4), (4, 4)])
def test_rejected_rows_are_not_durable_where_known_tokens_are_decoded_again(draft_tokens: int, turns: int) -> None:
    """It leaves meanwhile, and most selections of known rows did not fit its buffer."""
    rig = DraftRig(None, drafting_settings(draft_tokens, lookahead_steps=1), 100)
    coordinator, life = rig.coordinator, rig.coordinator.create(0, 100, 60)
    assert coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) >= 30)
    for known in (101, None):
        coordinator.withdraw(life, "keep")
        rig.run_until(lambda: not life.placement)
        life.durable, life.warm_start = known or life.durable, b""
        assert coordinator.admit(life, 64)
        rig.turn(turns)
    rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_request_that_ends_before_the_draws_of_its_step_is_closed_behind_them() -> None:
    """Beside one with a grammar, whose draws come later: the draft layer writes its rows behind them."""
    plain = DraftRig(None, drafting_settings(2), 0)
    tokens = list(plain.tokens_of(plain.coordinator.create(3, 60, 20, seed=3)))
    place = next(i for i in range(6, 18) if tokens[i] not in tokens[:i])
    runner = DraftingFakeRunner(eos=(tokens[place],))
    rig = DraftRig(None, drafting_settings(2, lookahead_steps=1), 100, runner=runner)
    held = rig.coordinator.create(1, 40, 30, grammar=ALTERNATING)
    free = rig.coordinator.create(3, 60, 20, seed=3, ignore_eos=False)
    for life in (held, free):
        assert rig.coordinator.admit(life, 128)
    rig.run()
    assert free.outcome == "eos"
    assert not rig.executor.state.tripwires.any()
    rig.check_end()


@pytest.mark.parametrize("draft_tokens", [1, 2, 4])
def test_rows_that_hold_are_those_of_the_rule(draft_tokens: int) -> None:
    """On the device, for drawn steps: few tokens, so that drafts are often right."""
    chance = random.Random(draft_tokens)
    rig = DraftRig(None, drafting_settings(draft_tokens), None)
    bucket = rig.executor._decoder._buckets[-1]
    step, seats, rows = bucket.drafts, bucket.seats, 1 + draft_tokens
    assert step is not None
    step._given.seats.copy_(torch.arange(seats))
    for _ in range(300):
        real = chance.randint(1, seats)
        step._given.num_real.fill_(real)
        fed, drawn = ([[chance.randrange(3) for _ in range(seats)] for _ in range(rows)] for _ in "fd")
        known, admitted = ([chance.randint(1, rows) for _ in range(seats)] for _ in "ka")
        drawn[0] = [NOTHING_DRAWN if chance.random() < 0.1 else token for token in drawn[0]]
        depth = torch.arange(rows + 1).unsqueeze(1)
        step._known.copy_(torch.where(depth < torch.tensor(known), 1, -1))
        step.batch.inputs.copy_(torch.tensor(fed).flatten())
        step.batch.rejected.copy_((depth[:rows] >= torch.tensor(admitted)).flatten())
        bucket.outputs.tokens.copy_(torch.tensor(drawn).flatten())
        step._verify(bucket.outputs)
        expected = [
            accepted_rows([row[at] for row in fed], [row[at] for row in drawn], known[at], admitted[at])
            for at in range(real)
        ]
        assert step.counts[0].tolist() == expected + [0] * (seats - real)


async def test_workers_with_and_without_drafts_share_no_pool() -> None:
    """Nor can pages go from one to the other: those of a worker that drafts have the draft layer's rows too."""
    drafting = DraftRig(None, drafting_settings(2), 0).sizing.capacity
    plain = Rig().sizing.capacity
    assert (plain.page_bytes, plain.row_format) != (drafting.page_bytes, drafting.row_format)
    assert _mismatch("w0", drafting, "w1", plain)
    assert not _mismatch("w0", drafting, "w1", drafting)
    async with open_rig() as rig:
        link = await rig.add_worker("w0")
        alike = {"page_bytes": drafting.page_bytes, "row_format": drafting.row_format}
        other = msgspec.structs.replace(link.hello.capacity, **alike)
        hello = msgspec.structs.replace(link.hello, worker="w1", epoch=9, capacity=other)
        with pytest.raises(ConfigError, match="same host_mem, pool_dir, draft_tokens and model"):
            await rig.scheduler.worker_up(hello, link)


def a_day(rig: DraftRig) -> None:
    """Resident and managed buffers, resizes every way, keep and drop."""
    coordinator = rig.coordinator
    first, second, third = (
        coordinator.create(number, *sizes, seed=number) for number, sizes in enumerate(((100, 20), (70, 16), (90, 14)))
    )
    assert coordinator.admit(first, 128)
    assert coordinator.admit(second, 0)
    assert coordinator.admit(third, 128)
    rig.run_until(lambda: len(second.tokens) >= 3 and len(third.tokens) >= 2)
    for life, leaving in ((second, "keep"), (third, "drop")):
        if life.placement:
            coordinator.withdraw(life, leaving)
        rig.run_until(lambda life=life: not life.placement)  # type: ignore[misc]
        assert life.outcome or coordinator.admit(life, 64)
    for hot_slots in (0, 64):
        rig.turn(2)
        if first.placement:
            coordinator.resize(first, hot_slots)
    rig.run()
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize(("seed", "draft_tokens", "percent"), [(0, 1, 50), (1, 2, 100), (2, 3, 50), (3, 4, 80)])
@pytest.mark.parametrize("backend", ["inline", "simulated"])
def test_moves_and_orders_of_streams_change_no_token(backend: str, seed: int, draft_tokens: int, percent: int) -> None:
    settings = drafting_settings(draft_tokens, lookahead_steps=seed % 2)
    a_day(DraftRig(make_streams(backend, seed), settings, percent))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_end_token_inside_a_draft_ends_the_output(lookahead: int) -> None:
    plain = DraftRig(None, drafting_settings(2), 0)
    tokens = list(plain.tokens_of(plain.coordinator.create(1, 90, 20)))
    place = next(i for i in range(6, 20) if tokens[i] not in tokens[:i])
    runner = DraftingFakeRunner(eos=(tokens[place],))
    rig = DraftRig(None, drafting_settings(2, lookahead_steps=lookahead), 100, runner=runner)
    life = rig.coordinator.create(1, 90, 20, ignore_eos=False)
    assert rig.coordinator.admit(life, 128)
    rig.run()
    assert (life.outcome, life.tokens) == ("eos", tokens[: place + 1])
    assert [it.generated_tokens for it in rig.coordinator.events if isinstance(it, Finished)] == [place + 1]
    rig.check_end()
    assert place == 6
    assert rig.coordinator.drafts[1] == (4, 4), "of two steps: the first has none, one behind the last is no part of it"


def test_drafts_within_a_stop_string_are_not_in_the_output() -> None:
    plain = DraftRig(None, drafting_settings(2), 0)
    tokens = list(plain.tokens_of(plain.coordinator.create(1, 90, 20)))
    pairs = [tokens[place : place + 2] for place in range(19)]
    stop = next(place for place in range(3, 19) if max(pairs[place]) < 128 and pairs[place] not in pairs[:place])
    rig = DraftRig(None, drafting_settings(2), 100)
    life = rig.coordinator.create(1, 90, 20, stop=("".join(map(chr, pairs[stop])),))
    assert rig.coordinator.admit(life, 128)
    rig.run()
    (finished,) = (it for it in rig.coordinator.events if isinstance(it, Finished))
    assert (life.outcome, finished.generated_tokens) == ("stop", stop)
    assert stop == 3
    assert rig.coordinator.drafts[1] == (2, 1), "of two right drafts of the second step, one begins the stop string"
    rig.check_end()


def test_request_parks_once_its_pages_are_full_and_goes_on() -> None:
    rig = DraftRig(None, drafting_settings(3), 60, ahead_tokens=0)
    life = rig.coordinator.create(1, 60, 150)
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert not rig.wrong()
    assert rig.executor.counters.parked >= 2
    rig.check_end()


def test_requests_whose_draws_depend_on_each_other_take_one_row() -> None:
    rig = DraftRig(None, drafting_settings(2), 100)
    held = rig.coordinator.create(1, 40, 12, grammar=ALTERNATING)
    told = rig.coordinator.create(2, 50, 12, logprobs=1)
    free = rig.coordinator.create(3, 60, 20, seed=3)
    for life in (held, told, free):
        assert rig.coordinator.admit(life, 128)
    rig.run()
    assert not rig.wrong()
    assert 0 < rig.executor.counters.drafted_tokens <= 2 * 20
    rig.check_end()


MODEL_REQUESTS = ((150, 0.0), (70, 0.9))


def decode_model(rig: DraftRig, hot_slots: int) -> list[list[int]]:
    """Greedy and sampled."""
    for number, (prompt_tokens, temperature) in enumerate(MODEL_REQUESTS):
        life = rig.coordinator.create(number, prompt_tokens, 16, seed=number, temperature=temperature)
        assert rig.coordinator.admit(life, hot_slots)
    rig.run()
    rig.check_end()
    return [life.tokens for life in rig.coordinator.lives]


@pytest.mark.parametrize("family", DRAFTING)
def test_model_gives_the_tokens_of_plain_decoding(family: str) -> None:
    """With drafts right in some places, and with those that random weights give."""
    runner, sizes = pair_of(family).runner, {"pass_tokens": 256, "host_mem": "16MiB", "device_mem": "16MiB"}
    plain = decode_model(DraftRig(None, drafting_settings(0, **sizes), 0, runner=copy(runner)), 64)
    for percent, hot_slots in ((70, 128), (None, 64)):
        rig = DraftRig(
            None,
            drafting_settings(2, **sizes | {"pass_tokens": 64}),
            percent,
            runner=copy(runner),
            expected=lambda life: plain[life.number],
        )
        assert decode_model(rig, hot_slots) == plain
        assert rig.executor.counters.drafted_tokens
        assert rig.executor.counters.accepted_tokens or percent is None
    rig = DraftRig(
        None, drafting_settings("auto", **sizes), 70, runner=copy(runner), expected=lambda life: plain[life.number]
    )
    chosen = choose_at_random(rig, 1)
    assert decode_model(rig, 128) == plain
    assert len(set(chosen)) > 2


def write_predictable(path: Path, family: str) -> Path:
    """A checkpoint whose drafts are mostly right."""
    write_tiny_checkpoint(path, family, index_topk=test_model.TOPK, context_max_tokens=2_048, predictable=True)
    return path


@cache
def model_runner(path: Path, device: str, *, drafts: bool) -> TransformersRunner:
    return TransformersRunner.load(path, device=device, dtype="float32", draft_tokens=int(drafts))


def model_rig(path: Path, draft_tokens: int, streams: Streams | None = None, *, graphs: bool = True) -> DraftRig:
    """The settings of test_model.py but for deterministic mode. Drafts are the model's own."""
    runner = model_runner(path, "cuda" if isinstance(streams, CudaStreams) else "cpu", drafts=draft_tokens > 0)
    changes: dict[str, object] = {
        "deterministic": False,
        "tail_slots": 10,
        "draft_tokens": draft_tokens,
        "graphs": graphs,
    }
    settings = msgspec.structs.replace(test_model.SETTINGS, **changes)
    return DraftRig(streams, settings, None, runner=copy(runner), keep_logits=True)


def moved_about(
    path: Path,
    draft_tokens: int,
    streams: Streams | None = None,
    *,
    graphs: bool = True,
    logprobs: int = NO_LOGPROBS,
) -> DraftRig:
    """The requests of test_model.py, kept, dropped and resized meanwhile; the last asks for `logprobs`."""
    rig = model_rig(path, draft_tokens, streams, graphs=graphs)
    lives = test_model.create(rig)
    lives[-1].sampling = msgspec.structs.replace(lives[-1].sampling, logprobs=logprobs)
    test_model.move_about(rig, lives)
    return rig


def tokens_in_common(plain: DraftRig, other: DraftRig) -> int:
    """How many tokens both rigs give; where they part, the two best logits of `plain` are within rounding."""
    common = 0
    for life, mate in zip(plain.coordinator.lives, other.coordinator.lives, strict=True):
        assert len(life.tokens) == len(mate.tokens)
        pairs = zip(life.tokens, mate.tokens, strict=True)
        split = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        common += len(life.tokens) if split is None else split
        if split is not None:
            best = plain.logits[life.sampling.seed, len(life.prompt) + split].topk(2).values
            assert best[0] - best[1] < test_model.TIE_BOUND
    return common


class NoDeviceReads(TorchDispatchMode):
    """Refuses what would make a host wait for the device, or take a shape from data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            it is not None and it.dtype in (torch.bool, torch.uint8) for it in args[1]
        )
        assert not by_mask, name
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select"), name
        assert name != "copy_" or args[0].is_contiguous(), "a copy to the host goes through pageable memory"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_operations_of_a_step_read_nothing_on_the_host(draft_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a captured graph demands. What the runner and the kernels launch is held to it on a GPU."""
    monkeypatch.setattr("worker.loop.drafting.begin_step", lambda *_: None)
    rig = DraftRig(None, drafting_settings(draft_tokens), None)
    decoder = rig.executor._decoder
    bucket = decoder._buckets[0]  # fewer rows than results have room for
    assert bucket.drafts is not None
    with NoDeviceReads():
        bucket.drafts._begin()
        bucket.drafts._verify(bucket.outputs)
        bucket.drafts._keep_first()
        for number, further in enumerate(bucket.drafts._further, 1):
            bucket.drafts._begin_further(number, further)
            bucket.drafts._keep(number, further.tokens)
        decoder._results[0].download(bucket.outputs, rig.executor.state, bucket.drafts.counts)


def test_host_reads_are_refused_there() -> None:
    values = torch.arange(3)
    columns = torch.zeros(3, 2, dtype=torch.int64)[:, 0]
    for read in (values[0].item, values.nonzero, lambda: values[values > 0], lambda: columns.copy_(values)):
        with NoDeviceReads(), pytest.raises(AssertionError):
            read()


#: Another family than in tests/worker/group/test_drafts.py.
@pytest.mark.parametrize("family", [in_turn((*DRAFTING[1:], DRAFTING[0]))])
def test_deterministic_bits_are_those_of_a_request_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "TRIALS", 4)  # of the check at start, which others test
    pair, sizes = pair_of(family), {"deterministic_seats": DETERMINISTIC.seats, "draft_tokens": 2}
    runner = TransformersRunner(pair.model, pair.runner.info, pair.runner.geometry, **sizes)
    bits_are_those_of_a_request_alone(runner, partial(make_streams, "inline"), make_streams("simulated", 1))


DETERMINISTIC = drafting_settings(2, deterministic=True, host_mem="16MiB", device_mem="16MiB")


def bits_are_those_of_a_request_alone(
    runner: TransformersRunner, streams: Callable[[], Streams], beside_streams: Streams
) -> None:
    """Of DETERMINISTIC. Logits and tokens are those of a request alone whose drafts are wrong: in company, on other hot
    buffers, retracted with rows kept and dropped, where other drafts are right, and with limits of drafts."""
    settings, tokens, logits, depths = DETERMINISTIC, list[list[int]](), Logits(), list[int]()
    for number in range(3):
        rig = DraftRig(streams(), settings, 0, runner=copy(runner), keep_logits=True)
        tokens += decode_some(rig, [number], 128)
        logits |= rig.logits
        depths += rig.depths.values()

    def check(streams: Streams, **how: Any) -> DraftRig:
        expected = partial(_tokens_by_number, tokens)
        rig = DraftRig(streams, settings, 70, runner=copy(runner), expected=expected, keep_logits=True)
        assert decode_some(rig, [2, 0, 1], 64, **how) == [tokens[2], tokens[0], tokens[1]]
        drawn = logits.keys() & rig.logits.keys()
        assert len(drawn) >= sum(len(own) - 1 for own in tokens), "all but the first of each, which its prompt gives"
        assert [place for place in drawn if not torch.equal(logits[place], rig.logits[place])] == []
        return rig

    beside = check(beside_streams, moves=True)
    assert sum(depths) < sum(beside.depths.values())
    assert set(beside.depths.values()) == {0, 1, 2}
    check(streams(), limits={0: 0, 1: 1})


def _tokens_by_number(tokens: list[list[int]], life: Life) -> list[int]:
    return tokens[life.number]


def decode_some(
    rig: DraftRig, numbers: Sequence[int], hot_slots: int, *, moves: bool = False, limits: Mapping[int, int] = {}
) -> list[list[int]]:
    """The second request is sampled. With `moves` one is retracted twice, and resumed."""
    lives = [
        rig.coordinator.create(
            *(it, 150 - 40 * it, 16),
            seed=it,
            temperature=0.9 * (it == 1),
            draft_tokens=limits.get(it, DRAFT_TOKENS_MAX),
        )
        for it in numbers
    ]
    for life in lives:
        assert rig.coordinator.admit(life, hot_slots)
    for leaving, count in (("keep", 3), ("drop", 8)) if moves else ():
        rig.run_until(lambda count=count: len(lives[1].tokens) >= count)  # type: ignore[misc]
        rig.coordinator.withdraw(lives[1], leaving)
        rig.run_until(lambda: not lives[1].placement)
        assert rig.coordinator.admit(lives[1], 0)
    rig.run()
    rig.check_end()
    return [life.tokens for life in lives]


def accept_all_drafts(patch: pytest.MonkeyPatch) -> None:
    verify = DraftStep._verify

    def trusting(step: DraftStep, outputs: StepOutputs) -> None:
        fed, drawn = step.batch.inputs.view(step._rows, -1), outputs.tokens.view(step._rows, -1)
        fed[1:] = drawn[:-1]
        verify(step, outputs)

    patch.setattr(DraftStep, "_verify", trusting)


def accept_selections_that_did_not_fit(patch: pytest.MonkeyPatch) -> None:
    verify = DraftStep._verify

    def trusting(step: DraftStep, outputs: StepOutputs) -> None:
        step.batch.rejected.masked_fill_(step.batch.lengths > 0, 0)
        verify(step, outputs)

    patch.setattr(DraftStep, "_verify", trusting)


def forget_where_steps_begin(patch: pytest.MonkeyPatch) -> None:
    begin = DraftStep._begin

    def stale(step: DraftStep) -> None:
        begin(step)
        step.batch.lengths[: step._seats] -= (step.batch.lengths[: step._seats] > 105).int()

    patch.setattr(DraftStep, "_begin", stale)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("plant", "hot_slots"),
    [(accept_all_drafts, 128), (accept_selections_that_did_not_fit, 64), (forget_where_steps_begin, 128)],
)
def test_planted_bug_gives_wrong_tokens(
    plant: Callable[[pytest.MonkeyPatch], None], hot_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    rig = DraftRig(None, drafting_settings(2), 60)
    for number, sizes in enumerate(REQUESTS):
        assert rig.coordinator.admit(rig.coordinator.create(number, *sizes, seed=number), hot_slots)
    rig.run()
    assert rig.wrong()


# ---------------------------------------------------------------- a number that changes from step to step


def choose_at_random(rig: DraftRig, seed: int) -> list[int]:
    """Drawn numbers of drafts in place of those that pay; returned as they are chosen."""
    chance, chosen = random.Random(seed), list[int]()

    def choose(_: int) -> int:
        chosen.append(chance.choice((0, 0, 1, 2, 3, 4, 4)))
        return chosen[-1]

    assert rig.executor._lengths is not None
    rig.executor._lengths.choose = choose  # type: ignore[method-assign]
    return chosen


@pytest.mark.parametrize(
    ("percent", "hot_slots", "lookahead"), [(100, 0, 0), (100, 128, 1), (60, 64, 1), (0, 128, 1), (80, 0, 1)]
)
def test_tokens_are_those_of_plain_decoding_while_the_number_changes(
    percent: int, hot_slots: int, lookahead: int
) -> None:
    rig = DraftRig(None, drafting_settings("auto", lookahead_steps=lookahead, device_mem="1MiB"), percent)
    chosen = choose_at_random(rig, percent + lookahead)
    decoded(rig, hot_slots)
    assert len(set(chosen)) >= 4
    if percent == 100 and hot_slots != 64:
        assert rig.executor.counters.accepted_tokens > 10


@pytest.mark.parametrize("seed", range(3))
def test_moves_and_orders_of_streams_change_no_token_while_the_number_changes(seed: int) -> None:
    settings = drafting_settings("auto", lookahead_steps=seed % 2)
    rig = DraftRig(make_streams("simulated", seed), settings, 70)
    choose_at_random(rig, seed)
    a_day(rig)


def test_drafts_behind_steps_without_drafts_are_as_good() -> None:
    """Those steps write the draft layer's rows all the same, from the model's states: drafts are those of a worker that
    drafts in all steps."""
    always, at_times = draft_by_position(1), draft_by_position("auto")
    assert len(at_times) > 10
    assert all(always[place] == token for place, token in at_times.items())


def draft_by_position(draft_tokens: DraftTokens) -> dict[int, int]:
    """What the runner's own draft layer draws for each position. The number is 0 and 1 in turn, or 1."""
    rig, drawn = DraftRig(None, drafting_settings(draft_tokens, device_mem="1MiB"), None), dict[int, int]()
    if rig.executor._lengths is not None:
        numbers = cycle((0, 0, 1))
        rig.executor._lengths.choose = lambda _: next(numbers)  # type: ignore[method-assign]
    draw = rig.runner._draft  # type: ignore[attr-defined]

    def draw_and_keep(rows: int, batch: StepBatch, draft: DraftRows) -> None:
        draw(rows, batch, draft)
        first = int(batch.lengths[0])
        if first:
            drawn[first + 1] = int(draft.tokens[0])

    rig.runner._draft = draw_and_keep  # type: ignore[attr-defined]
    life = rig.coordinator.create(0, 65, 50)
    assert rig.coordinator.admit(life, 0)
    rig.run()
    assert not rig.wrong()
    return drawn


@pytest.mark.parametrize(("percent", "seconds"), [(100, 0.01), (0, 0.5)])
def test_number_is_the_one_that_pays(percent: int, seconds: float) -> None:
    """By a clock on which a step takes `seconds` longer for each draft."""
    rig = DraftRig(None, drafting_settings("auto", device_mem="1MiB", lookahead_steps=0), percent)
    executor, now = rig.executor, 0.0
    read = executor._decoder.read

    def read_and_wait() -> StepTokens:
        nonlocal now
        step = read()
        now += 1.0 + seconds * step.draft_tokens
        return step

    executor._decoder.read = read_and_wait  # type: ignore[method-assign]
    executor._clock, executor._read_at = lambda: now, now
    life = rig.coordinator.create(0, 33, 440)
    assert rig.coordinator.admit(life, 0)
    rig.run()
    assert not rig.wrong()
    assert executor.counters.draft_tokens == (4 if percent else 0)
    assert bool(executor.counters.draft_switches) == bool(percent)
    assert now < (440 * 0.6 if percent else 440 * 1.05)

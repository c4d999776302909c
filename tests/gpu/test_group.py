"""Rounds of a group on GPUs: NCCL's collectives inside captured graphs. One GPU has room for one rank."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
import torch

from protocol.errors import EXIT_PEER_LOST, ConfigError
from protocol.messages import NO_LOGPROBS
from protocol.settings import WorkerSettings
from tests.support.checkpoints import DRAFTING, LATENT
from tests.support.group_rig import LIMIT_S, Ask, Drawn, GroupRig, Requests, settings_of
from tests.support.thread_ranks import run_ranks_on_gpu
from tests.support.worker_rig import Rig
from tests.worker.group import test_splitting as splitting
from tests.worker.group.test_ranks import SETTINGS as RANKS
from tests.worker.group.test_ranks import TEXT, asks_of, spread, wrong
from tests.worker.loop.test_drafting import write_predictable
from tests.worker.loop.test_model import NEW_TOKENS, PROMPTS, SETTINGS
from worker.group.group import Group
from worker.runners.load import load_runner
from worker.runners.tiny import write_tiny_checkpoint
from worker.streams import make_streams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes no second rank on one")
#: Largest change of a step's logits, of order 5, that split passes may make in the median where rows are in FP8.
LOGITS_CHANGE = {"float32": 0.02, "bfloat16": 0.2}
DRAFTS = {"draft_tokens": 2, "tail_slots": 6}


@pytest.fixture(scope="module", params=LATENT)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(path, request.param, index_topk=32, context_max_tokens=2_048)
    return path


@pytest.fixture(scope="module", params=DRAFTING)
def predictable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts are mostly right."""
    return write_predictable(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    yield tmp_path
    torch.cuda.synchronize()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_over_nccl_draws_the_tokens_of_a_worker(
    dtype: str, graphs: bool, checkpoint: Path, directory: Path
) -> None:
    settings = msgspec.structs.replace(
        SETTINGS, device="cuda", stream_backend="cuda", dtype=dtype, graphs=graphs, deterministic=False
    )
    config = settings_of(checkpoint, directory, 1, 0, settings)
    alone, _ = decode(config.worker, None)
    group = Group.join(config, "one model")
    try:
        tokens, _ = decode(config.worker, group)
        assert tokens == alone
        assert group.control.progress.launched > NEW_TOKENS
    finally:
        group.leave()


@pytest.mark.parametrize(
    ("graphs", "deterministic"),
    [(True, False), (False, False), (True, True)],
    ids=["graphs", "no graphs", "deterministic"],
)
def test_a_rank_over_nccl_that_drafts_draws_the_tokens_of_a_worker(
    graphs: bool, deterministic: bool, predictable: Path, directory: Path
) -> None:
    """Exchanges of the draft layer are in the graphs too. One request asks for log-probabilities: its steps replay two
    graphs, with the draws between them. Skipped where the check at start refuses deterministic mode on this card."""
    changes: dict[str, object] = {"dtype": "float32", "graphs": graphs, "deterministic": deterministic}
    settings = msgspec.structs.replace(SETTINGS, device="cuda", stream_backend="cuda", **DRAFTS, **changes)
    config = settings_of(predictable, directory, 1, 0, settings)
    try:
        alone, accepted = decode(config.worker, None, logprobs=1)
    except ConfigError as refused:
        pytest.skip(f"refused: {refused}")
    group = Group.join(config, "one model")
    try:
        tokens, accepted_in_group = decode(config.worker, group, logprobs=1)
        assert tokens == alone
        assert min(accepted, accepted_in_group) > 0
    finally:
        group.leave()


@TWO_GPUS
@pytest.mark.timeout(150)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_two_ranks_over_nccl_draw_the_tokens_of_generate(graphs: bool, checkpoint: Path, directory: Path) -> None:
    """With resizes, and retractions with pages kept and dropped."""
    settings = msgspec.structs.replace(RANKS, device="cuda", stream_backend="cuda", graphs=graphs)
    asks = spread(asks_of(16, seed=7), 2)
    assert not wrong(checkpoint, asks, drawn_by(checkpoint, directory, asks, settings))


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_the_requests_of_both_ranks_get_the_same_tokens_from_one_worker(
    graphs: bool, checkpoint: Path, directory: Path
) -> None:
    """The requests of the test of two ranks, without NCCL: where both tests fail, the group is not to blame."""
    settings = msgspec.structs.replace(RANKS, device="cuda", stream_backend="cuda", graphs=graphs)
    asks = spread(asks_of(16, seed=7), 2)
    assert not wrong(checkpoint, asks, [drawn_alone(checkpoint, directory, own, settings) for own in asks])


@TWO_GPUS
@pytest.mark.timeout(150)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_two_ranks_over_nccl_that_draft_draw_the_tokens_of_generate(
    graphs: bool, predictable: Path, directory: Path
) -> None:
    """Steps that one rank replays as one graph meet steps of two graphs of the other, beside log-probabilities. One
    request is retracted, and the second rank has none for a while at the end."""
    settings = msgspec.structs.replace(RANKS, device="cuda", stream_backend="cuda", graphs=graphs, **DRAFTS)
    moved = [(4, "keep", 128), (9, "drop", 64)]
    asks = [
        [Ask(0, list(TEXT[:130]), 24, 128), Ask(1, list(TEXT[500:560]), 20, 0, moves=moved)],
        [Ask(2, list(TEXT[900:990]), 12, 64, logprobs=1)],
    ]
    drawn = drawn_by(predictable, directory, asks, settings)
    assert not wrong(predictable, asks, drawn)
    assert sum(rank.accepted for rank in drawn) > 5


@pytest.mark.timeout(150)
def test_two_ranks_on_one_gpu_split_the_prompts_of_one(checkpoint: Path) -> None:
    """Run ranks as threads with streams of their own; tokens are those of generate(), and of unsplit prompts."""
    asks, seen = [[], asks_of(10, seed=9)], []
    for split_tokens in (RANKS.split_tokens, 0):
        ran = run_ranks_on_gpu(checkpoint, asks, msgspec.structs.replace(RANKS, split_tokens=split_tokens))
        tokens = {str(number): ids for number, ids in ran.tokens.items()}
        seen.append([Drawn(tokens, {}, 0, 0, 0)])
        assert [rig.executor.counters.split_units > 20 for rig in ran.rigs] == [bool(split_tokens)] * 2
        assert [bool(rig.executor.counters.staged_bytes) for rig in ran.rigs] == [False, True]
        assert not wrong(checkpoint, [asks[1]], seen[-1])


@pytest.mark.timeout(150)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_on_one_gpu_split_prompts_of_rows_in_fp8(dtype: str, checkpoint: Path) -> None:
    """Logits differ by what sums of other shapes, rounded to `dtype` and to e4m3, differ by."""
    settings = msgspec.structs.replace(RANKS, dtype=dtype, kv_dtype="fp8")
    split, plain = (
        run_ranks_on_gpu(checkpoint, [[], splitting.asks()], msgspec.structs.replace(settings, split_tokens=tokens))
        for tokens in (RANKS.split_tokens, 0)
    )
    assert split.rigs[0].executor.counters.split_units > 20
    alike = {number: same_until(ids, plain.tokens[number]) for number, ids in split.tokens.items()}
    places = {
        (number, position)
        for number, position in split.logits.keys() & plain.logits.keys()
        if position <= len(splitting.asks()[number].prompt) + alike[number]
    }
    assert len(places) > 10
    changed = [float((split.logits[place] - plain.logits[place]).abs().max()) for place in places]
    assert median(changed) < LOGITS_CHANGE[dtype]


@pytest.mark.timeout(150)
def test_prompt_behind_a_shared_prefix_is_split_on_one_gpu(checkpoint: Path) -> None:
    splitting.split_behind_a_prefix(checkpoint, run_ranks_on_gpu)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("leave_all", [False, True], ids=["one of them", "all"])
def test_request_leaves_amid_a_split_pass_on_one_gpu(leave_all: bool, checkpoint: Path) -> None:
    splitting.leave_amid_a_split_pass(checkpoint, leave_all, run_ranks_on_gpu)


def same_until(ours: list[int], theirs: list[int]) -> int:
    """Count the tokens at the front that are the same."""
    return next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other), len(ours))


@TWO_GPUS
@pytest.mark.timeout(150)
def test_rank_over_nccl_that_is_killed_amid_a_split_pass_ends_its_group(checkpoint: Path, directory: Path) -> None:
    settings = msgspec.structs.replace(RANKS, device="cuda", stream_backend="cuda")
    rig = rig_on_two_gpus(checkpoint, directory, [[], splitting.asks()], settings, dies_in_split=0)
    try:
        assert rig.ranks[1].wait(LIMIT_S) == EXIT_PEER_LOST
    finally:
        rig.close()


@TWO_GPUS
@pytest.mark.timeout(150)
def test_two_ranks_over_nccl_split_the_prompts_of_one(checkpoint: Path, directory: Path) -> None:
    """Each rank has sums of other shapes than the whole pass; retractions, with pages kept and dropped."""
    settings = msgspec.structs.replace(RANKS, device="cuda", stream_backend="cuda")
    asks = [[], asks_of(10, seed=9)]
    drawn = drawn_by(checkpoint, directory, asks, settings)
    assert not wrong(checkpoint, asks, drawn)
    assert drawn[1].split_units > 20


def drawn_alone(checkpoint: Path, directory: Path, asks: list[Ask], settings: WorkerSettings) -> Drawn:
    """What a worker without a group drew, in this process."""
    settings = msgspec.structs.replace(settings, model=str(checkpoint))
    streams = make_streams(settings.stream_backend)
    try:
        rig = Rig(streams, settings, runner=load_runner(settings))
        requests = Requests(rig, directory, 0)
        for ask in asks:
            requests.add(ask)
        requests.run(0)
        rig.check_end()
    finally:
        streams.close()
    return Drawn({str(life.number): life.tokens for life, _ in requests.lives}, {}, 0, 0, 0)


def drawn_by(checkpoint: Path, directory: Path, asks: list[list[Ask]], settings: WorkerSettings) -> list[Drawn]:
    """What two ranks drew, a GPU each. Where they do not answer in time, each says on stderr where its threads are."""
    rig = rig_on_two_gpus(checkpoint, directory, asks, settings)
    try:
        return rig.drawn()
    except BaseException:
        for child in rig.ranks:
            child.send_signal(signal.SIGABRT)
        for child in rig.ranks:
            child.wait(5)
        raise
    finally:
        rig.close()


def rig_on_two_gpus(
    checkpoint: Path, directory: Path, asks: list[list[Ask]], settings: WorkerSettings, **kinds: Any
) -> GroupRig:
    environs = [{"CUDA_VISIBLE_DEVICES": str(rank), "PYTHONFAULTHANDLER": "1"} for rank in range(2)]
    return GroupRig(checkpoint, directory, asks, settings, environs=environs, **kinds)


def decode(
    settings: WorkerSettings, group: Group | None, *, logprobs: int = NO_LOGPROBS
) -> tuple[list[list[int]], int]:
    """Tokens by request, and how many drafts were right. The last request asks for `logprobs`."""
    runner = load_runner(settings, group.collectives if group else None)
    streams = make_streams("cuda")
    try:
        rig = Rig(streams, settings, runner=runner, group=group)
        lives = []
        for number, prompt in enumerate(PROMPTS):
            asked = logprobs if number == len(PROMPTS) - 1 else NO_LOGPROBS
            life = rig.coordinator.create(number, 1, NEW_TOKENS, seed=number, logprobs=asked)
            life.prompt = tuple(prompt)
            assert rig.coordinator.admit(life, 128)  # of 64 slots the first row of a step may take all
            lives.append(life)
        rig.run()
        rig.check_end()
    finally:
        streams.close()
    return [life.tokens for life in lives], rig.executor.counters.accepted_tokens

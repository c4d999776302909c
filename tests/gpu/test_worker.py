"""The executor on a GPU: graphs, streams and kernels show in no token, and no decode turn waits for the device."""

from __future__ import annotations

import random
import threading
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.delay import hold_back  # noqa: E402
from tests.gpu.syncs import no_syncs  # noqa: E402
from tests.support.checkpoints import LATENT  # noqa: E402
from tests.support.fakes.hash_runner import SEPARATE, SHARED, FakeRunner  # noqa: E402
from tests.support.worker_rig import SETTINGS, Logits, Rig  # noqa: E402
from tests.worker.loop import test_executor as cpu  # noqa: E402
from tests.worker.loop import test_fences as scenarios  # noqa: E402
from tests.worker.loop import test_model as model  # noqa: E402
from worker.loop.batch import Status  # noqa: E402
from worker.runners.tiny import write_tiny_checkpoint  # noqa: E402
from worker.streams import Streams, make_streams  # noqa: E402
from worker.streams.cuda import CudaStreams  # noqa: E402

replace = msgspec.structs.replace
EAGER = replace(SETTINGS, graphs=False)


def cuda() -> Streams:
    return make_streams("cuda")


def same(left: Logits, right: Logits) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[step], right[step]) for step in left)


@pytest.mark.parametrize("settings", [SETTINGS, EAGER, cpu.DETERMINISTIC], ids=["graphs", "no graphs", "deterministic"])
@pytest.mark.parametrize("sizes", [(0,) * 5, (64,) * 5, (0, 64, 128, 192, 64)], ids=str)
def test_tokens_and_logits_are_those_of_the_cpu(sizes: tuple[int, ...], settings: object) -> None:
    _, logits = cpu.run_mixed(sizes, settings, cuda())  # type: ignore[arg-type]
    assert same(logits, cpu.resident())


def test_graphs_that_another_thread_captures_between_steps_change_no_token(tmp_path: Path) -> None:
    """A standby that has taken over captures in the thread of its loop, which is not the one that has warmed up."""
    write_tiny_checkpoint(tmp_path, index_topk=model.TOPK, context_max_tokens=2_048)
    tokens, *_ = model.run(tmp_path, (128, 0, 64), cuda())
    streams: Streams = cuda()
    failed: list[BaseException] = []
    rig, lives = model.start(tmp_path, streams, graphs_later=True)

    def loop() -> None:
        try:
            streams.adopt_thread()
            for life, hot_slots in zip(lives, (128, 0, 64), strict=True):
                assert rig.coordinator.admit(life, hot_slots)
            rig.run()
        except BaseException as error:
            failed.append(error)

    before = rig.executor._decoder.uncaptured
    assert before >= 4
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert failed == []
    assert rig.executor._decoder.uncaptured < before
    assert [list(life.tokens) for life in lives] == tokens


@pytest.mark.parametrize("groups", [SHARED, SEPARATE], ids=["shared", "separate"])
def test_resizes_retractions_and_parking_change_no_token(groups: tuple[int, ...]) -> None:
    """The scenario of the fence tests: chunks of prompts, resizes every way, keep and drop, parking."""
    rig = scenarios.a_day(cuda, groups)  # type: ignore[arg-type]
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("seed", range(4))
def test_churn_over_50_requests(seed: int) -> None:
    settings = replace(SETTINGS, seats=50, host_mem="900KiB", device_mem="2MiB", hot_chunks_max=120, pass_tokens=256)
    runner, ahead_tokens = FakeRunner((SHARED, SEPARATE)[seed % 2]), (0, 8)[seed % 2]
    rig = Rig(cuda(), settings, runner=runner, ahead_tokens=ahead_tokens)
    chance = random.Random(seed)
    sizes = [(chance.randrange(1, 150), chance.randrange(1, 50)) for _ in range(50)]
    lives = [rig.coordinator.create(number, *sizes[number], seed=number) for number in range(50)]
    cpu.churn(rig, lives, seed, aborts=5)
    assert not rig.wrong()
    rig.check_end()
    assert rig.executor.counters.resized > 10
    assert rig.executor.counters.parked > 3 or ahead_tokens


@pytest.mark.parametrize("settings", [SETTINGS, EAGER], ids=["graphs", "no graphs"])
def test_no_turn_waits_for_the_device(settings: object) -> None:
    """Prompts, decode steps, a resize, a retraction and a resume: only fences are waited for, and those by polling."""
    rig = Rig(cuda(), settings)  # type: ignore[arg-type]
    coordinator = rig.coordinator
    lives = [coordinator.create(number, 70, 40, seed=number) for number in range(3)]
    with no_syncs():
        for life, hot_slots in zip(lives, (0, 64, 128), strict=True):
            assert coordinator.admit(life, hot_slots)
        rig.run_until(lambda: all(len(life.tokens) > 4 for life in lives))
        assert coordinator.resize(lives[2], 64)
        coordinator.withdraw(lives[1], "keep")
        rig.run_until(lambda: not lives[1].placement)
        assert coordinator.admit(lives[1], 0)
        rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_sync_probe_works() -> None:
    with no_syncs(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


def test_returning_context_delays_no_step() -> None:
    """Its rows are loaded beside the replays of the steps, not before them."""
    streams = make_streams("cuda")
    assert isinstance(streams, CudaStreams)
    rig = Rig(streams, runner=FakeRunner(SHARED))
    coordinator = rig.coordinator
    staying, returns = (coordinator.create(number, 100, 60, seed=number) for number in range(2))
    assert coordinator.admit(staying, 64)
    assert coordinator.admit(returns, 0)
    rig.run_until(lambda: len(staying.tokens) > 4 and len(returns.tokens) > 4)
    coordinator.withdraw(returns, "keep")
    rig.run_until(lambda: not returns.placement)
    hold_back(streams.load, 0.3)
    assert coordinator.admit(returns, 0)
    tokens = len(staying.tokens)
    rig.run_until(lambda: len(staying.tokens) >= tokens + 20)
    assert any(request.status is Status.LOADING for request in rig.executor.held())
    rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_waits_are_measured() -> None:
    rig = scenarios.a_batch(cuda)  # type: ignore[arg-type]
    waits = rig.executor.counters.fence_waits
    assert waits.samples["sampled"] > 10
    assert {"row_written", "backed_up"} & waits.samples.keys()


# ---------------------------------------------------------------- the real model classes


@pytest.fixture(scope="module", params=LATENT)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(path, request.param, index_topk=model.TOPK, context_max_tokens=2_048)
    return path


@cache
def resident(path: Path, dtype: str) -> tuple[list[list[int]], Logits]:
    """Graphs on, no replacement."""
    tokens, logits, _ = model.run(path, (0, 0, 0), cuda(), dtype=dtype)
    return tokens, logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("sizes", [(64, 64, 64), (256, 256, 256), (128, 0, 64)], ids=str)
def test_bits_do_not_depend_on_hot_sizes_or_graphs(
    checkpoint: Path, sizes: tuple[int, ...], graphs: bool, dtype: str
) -> None:
    settings = replace(model.SETTINGS, graphs=graphs)
    tokens, logits, misses = model.run(checkpoint, sizes, cuda(), settings, dtype)
    assert misses > 0
    assert tokens == resident(checkpoint, dtype)[0]
    assert same(logits, resident(checkpoint, dtype)[1])


def test_operators_change_no_bit(checkpoint: Path) -> None:
    tokens, logits = model.run_moved_about(checkpoint, cuda())
    assert tokens == resident(checkpoint, "float32")[0]
    assert all(torch.equal(values, resident(checkpoint, "float32")[1][step]) for step, values in logits.items())


def test_tokens_are_those_of_the_model_library(checkpoint: Path) -> None:
    assert model.library_agrees(checkpoint, resident(checkpoint, "float32")[0]) > 2 * model.NEW_TOKENS


def test_no_turn_of_the_model_waits_for_the_device(checkpoint: Path) -> None:
    rig, lives = model.start(checkpoint, cuda())
    with no_syncs():
        for life in lives:
            assert rig.coordinator.admit(life, 64)
        rig.run()
    assert [life.tokens for life in lives] == resident(checkpoint, "float32")[0]

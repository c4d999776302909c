"""Shared prefixes on a GPU: loaded on a stream of their own, computed behind, never written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.decode import make_pool  # noqa: E402
from benchmarks.prefix_gpu import PromptWorker  # noqa: E402
from protocol.messages import LOGPROBS_MAX  # noqa: E402
from tests.gpu.delay import hold_back  # noqa: E402
from tests.support.checkpoints import LATENT  # noqa: E402
from tests.support.worker_rig import Rig  # noqa: E402
from tests.worker.loop.test_model import start  # noqa: E402
from tests.worker.loop.test_prefix import PAGES, Pair  # noqa: E402
from worker.runners.synthetic import synthetic_config, synthetic_runner  # noqa: E402
from worker.runners.tiny import write_tiny_checkpoint  # noqa: E402
from worker.streams import make_streams  # noqa: E402
from worker.streams.cuda import CudaStream, CudaStreams  # noqa: E402

#: How late each load is: several steps.
DELAY_S = 0.02
#: Tokens of a long prefix, in whole pages.
LONG = 74_112


def late_loads(omit: tuple[str, ...] = ()) -> CudaStreams:
    streams = make_streams("cuda", omit=omit)
    assert isinstance(streams, CudaStreams)
    for stream in (streams.load, streams.refill):  # index keys, and rows
        assert isinstance(stream, CudaStream)
        hold_back(stream, DELAY_S)
    return streams


def shared(streams: CudaStreams, hot_slots: int) -> Pair:
    pair = Pair(streams, PAGES)
    assert pair.rig.coordinator.admit(pair.sharer, hot_slots)
    pair.rig.run()
    return pair


@pytest.mark.parametrize("hot_slots", [0, 64])
def test_a_late_prefix_changes_no_token(hot_slots: int) -> None:
    pair = shared(late_loads(), hot_slots)
    assert not pair.rig.wrong()
    pair.end()


@pytest.mark.mutation
@pytest.mark.parametrize("fence", ["index_loaded", "refilled"])
def test_a_prefix_that_is_not_waited_for_gives_wrong_tokens(fence: str) -> None:
    shared(late_loads(), 64)  # the first launch of a kernel loads it, and waits for the device
    assert shared(late_loads((fence,)), 64).rig.wrong()


@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_prefix_changes_no_bit(family: str, dtype: str, tmp_path: Path) -> None:
    """A prompt of 500 tokens in chunks of 128, 384 of them from another request's host pages."""
    write_tiny_checkpoint(tmp_path, family, index_topk=32, context_max_tokens=2_048)
    rig, lives = start(tmp_path, make_streams("cuda"), dtype=dtype)
    assert isinstance(rig, Rig)
    donor, life = lives[2], rig.coordinator.create(3, 1, lives[2].sampling.max_tokens, seed=lives[2].sampling.seed)
    assert rig.coordinator.admit(donor, 64)
    pages = donor.host_pages[:6]
    rig.run()
    logits = {step: values.clone() for step, values in rig.logits.items()}
    rig.logits.clear()
    for page in pages:
        rig.coordinator.host_pages.remove(page)
    life.prompt, life.shared = donor.prompt, tuple(pages)
    before = rig.host[pages].clone()
    assert rig.coordinator.admit(life, 64)
    rig.run()
    rig.coordinator.host_pages.extend(pages)
    rig.check_end()
    assert life.tokens == donor.tokens
    assert rig.logits.keys() == logits.keys()
    assert all(torch.equal(rig.logits[step], logits[step]) for step in logits)
    assert torch.equal(rig.host[pages], before)


@pytest.mark.parametrize("new", [256, 753])
def test_a_long_prompt_has_the_same_bits_each_time(new: int) -> None:
    """At real dimensions, computed whole and behind a restored prefix: whatever is late, a run repeats itself."""
    config = synthetic_config("deepseek-v3.2", 4)
    runner = synthetic_runner(config, kv_dtype="fp8")
    worker = PromptWorker(runner, make_pool(runner.geometry, config, 1), LONG + new, pass_tokens=8_192)
    try:
        for prefix, times in ((0, 2), (LONG, 6)):
            answers = [worker.answer(5, prefix, logprobs=LOGPROBS_MAX) for _ in range(times)]
            assert len({(answer.tokens, answer.logprobs) for answer in answers}) == 1
    finally:
        worker.close()

"""Warm starts on a GPU: the same misses, no wait for the device, rows that are there before they are read."""

from __future__ import annotations

import random

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.delay import hold_back  # noqa: E402
from tests.gpu.syncs import no_syncs  # noqa: E402
from tests.support.fakes.hash_runner import SEPARATE, SHARED, TOPK  # noqa: E402
from tests.worker.loop import test_warm_start as cpu  # noqa: E402
from worker.loop.batch import Status  # noqa: E402
from worker.streams import make_streams  # noqa: E402
from worker.streams.cuda import CudaStreams  # noqa: E402


def cuda(number: int) -> object:
    del number
    return make_streams("cuda")


@pytest.mark.parametrize("groups", [SHARED, SEPARATE], ids=["shared", "separate"])
def test_first_step_misses_only_changed_rows(groups: tuple[int, ...]) -> None:
    workers = cpu.Workers(groups, cuda)
    life = workers.prefill()
    cold = workers.first_step(life, b"")
    chosen = cpu.selected(cold)
    assert cpu.misses(cold) == [len(positions) for positions in chosen]
    for changed in (0, 1, TOPK - 1):
        others = [sorted(set(range(cpu.PROMPT)) - set(positions))[:changed] for positions in chosen]
        hint = cpu.packed_of([old[changed:] + new for old, new in zip(chosen, others, strict=True)])
        assert cpu.misses(workers.first_step(life, hint)) == [changed] * len(chosen)
    named = cpu.positions_of(life.warm_start, workers.first)
    assert cpu.misses(workers.first_step(life, life.warm_start)) == [
        len(set(old) - new) for old, new in zip(chosen, named, strict=True)
    ]


def test_tokens_do_not_depend_on_the_hint() -> None:
    workers = cpu.Workers(make=cuda)
    life = workers.prefill()
    for name, hint in (cpu.hints(random.Random(1)) | {"warm its own": life.warm_start}).items():
        assert workers.decode(life, hint).executor.counters.warm_starts == {name.split()[0]: 1}, name


def test_keeping_and_loading_do_not_wait_for_the_device() -> None:
    """A prompt that leaves its top-k, another worker that begins with it, and one that leaves again."""
    workers = cpu.Workers(make=cuda)
    with no_syncs():
        life = workers.prefill(tokens=40)
    rig = workers.decoder(life, life.warm_start)
    with no_syncs():
        rig.run_until(lambda: len(life.tokens) >= 8)
        rig.coordinator.withdraw(life, "keep")
        rig.run_until(lambda: not life.placement)
    assert life.warm_start
    assert rig.coordinator.admit(life, 128)
    rig.run()
    assert rig.executor.counters.warm_starts == {"warm": 2}
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("omit", [(), ("preloaded",)], ids=["waiting", "not waiting"])
def test_late_load_is_awaited(omit: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaStreams, "capture", lambda streams, launch: None)

    def late(number: int) -> CudaStreams:
        streams = make_streams("cuda", omit=omit)
        assert isinstance(streams, CudaStreams)
        hold_back(streams._by_name["load"], 0.02)
        return streams

    rig = cpu.beside_another(late)
    assert bool(rig.wrong()) == bool(omit)
    assert all(it.status is not Status.LOADING for it in rig.executor.held())
    torch.cuda.synchronize()

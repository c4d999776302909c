"""The fence scenarios of tests/worker/loop/test_fences.py on a GPU, with the producer of one fence held back.

A consumer that waits for the fence gives right tokens however late its producer is; one that does not gives wrong
tokens. A crash of the process is not played here, hence not `durable`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.delay import hold_back  # noqa: E402
from tests.support.worker_rig import Rig  # noqa: E402
from tests.worker.loop import test_fences as scenarios  # noqa: E402
from worker.runners import swapping  # noqa: E402
from worker.streams import FENCES, make_streams  # noqa: E402
from worker.streams.cuda import CudaStreams  # noqa: E402

#: How late each operation of the producer is: by default about a step, more where a mutant has longer to go wrong.
DELAY_S = 0.002
DELAYS_S = {"quiesced": 0.03} | dict.fromkeys(("staged", "slab_staged", "preloaded", "index_loaded", "refilled"), 0.02)
DELAYS_S |= dict.fromkeys(("inputs_consumed", "backed_up", "chunk_reclaimed"), 0.01)
#: What to hold back: the producer whose memory the scenario's consumer must not touch too early.
LATE = {name: next(iter(spec.producers)) for name, spec in FENCES.items()} | {"quiesced": "backup"}
PLAYED = [name for name in scenarios.SCENARIOS if name != "durable"]


def late(name: str, omit: tuple[str, ...]) -> Callable[[], CudaStreams]:
    def make() -> CudaStreams:
        streams = make_streams("cuda", omit=omit)
        assert isinstance(streams, CudaStreams)
        hold_back(streams._by_name[LATE[name]], DELAYS_S.get(name, DELAY_S))
        return streams

    return make


def play(name: str, omit: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Without graphs, inside which a fence is an edge that cannot be left out."""
    if name in scenarios.BESIDE:
        monkeypatch.setattr(swapping, "BESIDE_ROWS", 1)
    monkeypatch.setattr(CudaStreams, "capture", lambda streams, launch: None)
    return scenarios.SCENARIOS[name](late(name, omit))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLAYED)
def test_a_late_producer_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = play(name, (), monkeypatch)
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.mutation
@pytest.mark.parametrize("name", PLAYED)
def test_an_omitted_fence_gives_wrong_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play(name, (), monkeypatch)  # the first launch of a kernel loads it, and waits for the device
    assert play(name, (name,), monkeypatch).wrong()
    torch.cuda.synchronize()

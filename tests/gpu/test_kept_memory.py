"""A keeper's memory on a GPU is its weights alone, and free when it has ended.

The whole card is asked: the driver names no process that holds memory without a context. So nothing else may use it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hisparse.cluster.weights import start_weight_keeper
from protocol.config import keeper_path
from protocol.settings import ClusterSettings, Config, WorkerSettings
from tests import ROOT
from tests.gpu.test_kept_weights import load
from worker.keeper.messages import GPU_SEGMENT_BYTES
from worker.runners.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_memory_is_free_when_keeper_and_worker_have_ended(tmp_path: Path) -> None:
    checkpoint = tmp_path / "fp8"
    write_tiny_checkpoint(checkpoint, fp8=True, whole_blocks=True)
    code = (
        "import sys; from pathlib import Path; from tests.gpu.test_kept_weights import load;"
        "load(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    load(checkpoint, None)
    torch.cuda.empty_cache()
    config = Config(cluster=ClusterSettings(runtime_dir=str(tmp_path)), worker=WorkerSettings(name="w0"))
    before = torch.cuda.mem_get_info()[0]
    keeper = start_weight_keeper(config, tmp_path)
    try:
        command = [sys.executable, "-c", code, str(checkpoint), str(keeper_path(config))]
        subprocess.run(command, cwd=ROOT, check=True)
        held = before - torch.cuda.mem_get_info()[0]
        assert 0 < held <= 2 * GPU_SEGMENT_BYTES, "its weights and no context"
    finally:
        keeper.process.kill()
        keeper.process.wait()
        keeper.close()
    assert torch.cuda.mem_get_info()[0] == before

"""One prefills on one GPU, another decodes on another GPU of the host: outputs are those of workers that do both.

With a single GPU both are on that one: the processes, pools and copies are the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import trio

from hisparse.client.client import Client
from protocol.messages import AUTO, DIRECT
from protocol.settings import Config
from tests.support.cluster_rig import assert_nothing_leaked, crash_config, write_model
from tests.support.nodes_rig import Nodes, Spot, decode_all, mixed_prompts, running_nodes

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(240)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

FIRST, SECOND = "cuda:0", f"cuda:{torch.cuda.device_count() - 1}"
COPIED = "hisparse_worker_copied_bytes_total"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory of files that a GPU can register."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hisparse-test-") as directory:
        yield Path(directory)


@asynccontextmanager
async def started(model: Path, log_dir: Path, memory: Path, spots: list[Spot]) -> AsyncIterator[tuple[Nodes, Client]]:
    config = crash_config(model, log_dir, "48MiB")
    worker = msgspec.structs.replace(config.worker, device=FIRST, stream_backend="cuda", pool_dir=str(memory))
    patient = msgspec.structs.replace(config.coordinator, heartbeat_limit_s=20.0, prefix_reuse="off")
    config = Config(config.cluster, patient, worker, config.http)
    async with running_nodes(config, log_dir, spots) as (nodes, client):
        yield nodes, client


@pytest.fixture(scope="module")
def colocated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What a worker of each GPU says that does both."""

    async def run() -> list[list[int]]:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hisparse-test-") as directory:
            spots = [Spot("both", "a", device=device) for device in (FIRST, SECOND)]
            async with started(model, tmp_path_factory.mktemp("both"), Path(directory), spots) as (_, client):
                return await decode_all(client, mixed_prompts(), "both-")

    return trio.run(run)


@pytest.mark.parametrize("engine", ["", "shared"], ids=["one pool", "two pools"])
async def test_two_gpus_prefill_and_decode_with_the_oracle_tokens(
    engine: str, model: Path, colocated: list[list[int]], tmp_path: Path, memory: Path
) -> None:
    """I1, I2. `one pool`: a GPU stages into host pages that the other one reads. `two pools`: pages are copied from
    the pool of one node to that of the other. Where they are decoded, not a byte is staged."""
    spots = [Spot("prefill", "a", engine, FIRST), Spot("decode", "b" if engine else "a", engine, SECOND)]
    async with started(model, tmp_path, memory, spots) as (nodes, client):
        for placement in (AUTO, DIRECT):
            assert await decode_all(client, mixed_prompts(), f"{placement}-", placement) == colocated
        first, second = await nodes.samples("w0", COPIED, "purpose"), await nodes.samples("w1", COPIED, "purpose")
        moved = await nodes.samples("w1", "hisparse_transfer_pages_total", "end") if engine else {}
        await assert_nothing_leaked(client)
    assert first["stage"] > 0
    assert first["backup"] == first["preload"] == 0
    assert second["stage"] == 0
    assert second["preload"] > 0
    assert bool(engine) == bool(moved.get("receiver"))

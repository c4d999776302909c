"""What a standby prepares before the death of its worker, in this process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from protocol.settings import ClusterSettings, Config, CoordinatorSettings, WorkerSettings
from tests.support.checkpoints import tiny_checkpoint
from tests.support.keeper_rig import keeping
from worker import standby
from worker.loop import executor
from worker.loop.decode import Decoder
from worker.runners.load import load_runner

MEMORY = {"device_mem": "64MiB", "host_mem": "64MiB", "seats": 4, "context_max_tokens": 512}


def config_of(run_dir: Path, runtime_dir: Path) -> Config:
    model = tiny_checkpoint(run_dir, "glm-5", index_topk=32)
    worker = WorkerSettings(name="w0", model=str(model), stream_backend="inline", hot_size_classes=(64,), **MEMORY)  # type: ignore[arg-type]
    return Config(ClusterSettings(runtime_dir=str(runtime_dir)), CoordinatorSettings(), worker)


def test_weights_that_a_keeper_holds_are_mapped_ahead_and_no_others(run_dir: Path, tmp_path: Path) -> None:
    config = config_of(run_dir, tmp_path)
    assert standby._map_weights(config) is None, "there is no keeper"
    with keeping(tmp_path / "weights-w0.sock") as path:
        assert standby._map_weights(config) is None, "the keeper holds none"
        load_runner(config.worker, keeper=path)
        runner = standby._map_weights(config)
        assert runner is not None
        assert [*runner.weights_seconds] == ["keeper"]


def test_each_batch_size_runs_on_one_page_of_each_kind(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the device."""
    config, padded, memory = config_of(run_dir, tmp_path), list[int](), list[tuple[int, ...]]()
    run, allocate = Decoder._run_padding, executor.allocate_state

    def run_and_note(decoder: Decoder, bucket) -> None:  # type: ignore[no-untyped-def]
        padded.append(bucket.seats)
        run(decoder, bucket)

    def allocate_and_note(runner, settings, sizing, host):  # type: ignore[no-untyped-def]
        capacity = sizing.capacity
        memory.append((capacity.host_pages, capacity.index_pages, sizing.slab_pages, capacity.hot_chunks))
        return allocate(runner, settings, sizing, host)

    monkeypatch.setattr(Decoder, "_run_padding", run_and_note)
    monkeypatch.setattr(executor, "allocate_state", allocate_and_note)
    monkeypatch.setattr(executor, "_taken_by", lambda warm_up, _: warm_up() or 0)
    monkeypatch.setattr(standby, "cuda_device", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=0))
    assert standby._warm_up(config.worker, load_runner(config.worker))
    assert padded == [4, 2, 1]
    assert memory == [(1, 1, 1, 2)]

"""`hisparse up` keeps weights beside its workers: a killed one costs no loading, and outputs stay what they are."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.processes.test_up import LIMIT_S, Up, eventually, left_files, pid_of, running
from worker.runners.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(path, index_topk=64, context_max_tokens=4096, layers=2)
    return path


def output(up: Up) -> object:
    done = up.hisparse(
        "submit", "a long tale", "--max-tokens", "40", "--temperature", "0", "--ignore-eos", "-o", "json"
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["tokens"]


def keepers(up: Up) -> list[psutil.Process]:
    """Its keepers of weights, which are executed."""
    living = [it for it in psutil.Process(up.process.pid).children() if it.status() != psutil.STATUS_ZOMBIE]
    return [it for it in living if "hisparse.cluster.weights" in it.cmdline()]


def kill_worker(up: Up) -> None:
    """Kill the worker that runs now."""
    os.kill(pid_of(up, "w0"), signal.SIGKILL)


def test_a_killed_worker_maps_its_weights_and_a_killed_keeper_costs_one_loading(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as up:
        assert "weights loaded" in up.until("weights kept for later workers")
        expected = output(up)
        (keeper,) = keepers(up)
        assert up.ready["keepers"] == [{"worker": "w0", "pid": keeper.pid}]
        held = up.submit_endless()
        before = up.generated(held)
        kill_worker(up)
        said = up.until("weights attached")
        assert "read_only=True" in said
        assert "weights loaded" not in said
        eventually(lambda: up.generated(held) > before)
        assert output(up) == expected
        keeper.kill()
        assert "w0 goes on, and its next start loads weights once more" in up.until("w0-weights killed by SIGKILL")
        assert output(up) == expected, "of the worker that has mapped what its keeper had"
        kill_worker(up)
        up.until("weights kept for later workers")
        assert output(up) == expected
        kill_worker(up)
        up.until("weights attached")
        assert output(up) == expected
        pids = [pid_of(up, "coordinator"), pid_of(up, "w0"), *(it.pid for it in keepers(up))]
        assert len(pids) == 3
        up.process.send_signal(signal.SIGINT)
        up.until("draining for")
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(LIMIT_S) != 0
        assert [it for it in pids if psutil.pid_exists(it)] == []
        assert [it for it in left_files(tmp_path) if it.startswith("weights")] == []


def test_a_killed_up_takes_its_keepers_with_it(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as up:
        (keeper,) = keepers(up)
        os.kill(up.process.pid, signal.SIGKILL)
        keeper.wait(LIMIT_S)


def test_without_keepers_none_is_started(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, "--set", "worker.keeper=false") as up:
        assert up.ready["keepers"] == []
        assert keepers(up) == []
        assert "weights-w0.sock" not in left_files(tmp_path)

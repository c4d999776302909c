"""Unusable files end a real process at once: exit code 8, a line that names file and remedy, no traceback."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import zygote
from worker.runners.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

#: Importing torch takes most of it when the other cores are busy.
LIMIT_S = 240.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_tiny_checkpoint(path, index_topk=64, context_max_tokens=4096, layers=2)
    return path


def refusal(runtime_dir: Path, *args: str) -> str:
    """The last line on stderr of a process that refuses to start."""
    command = [sys.executable, "-m", "hisparse.cli", *args, "--runtime-dir", str(runtime_dir)]
    done = zygote.run(command, LIMIT_S)
    assert done.returncode == 8, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def nested_config(model: Path) -> str:
    (model / "config.json").write_text('{"a": ' * 100_000)
    return "config.json: is nested deeper than 32 levels (correct the file"


def absurd_layers(model: Path) -> str:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 10**9}))
    return "config.json: num_hidden_layers 1000000000 is not a whole number from 1 to 1024 (correct the file"


def truncated_weights(model: Path) -> str:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1_000])
    return "is beyond the end of the file, which has 1000 bytes (download or write the file again)"


@pytest.mark.parametrize("spoil", [nested_config, absurd_layers, truncated_weights])
def test_unusable_checkpoint_is_refused_by_up_and_worker(
    model: Path, tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    said = spoil(model)
    for command in (("up", "--model", str(model)), ("worker", "--model", str(model), "--device-mem", "32MiB")):
        line = refusal(tmp_path / "run", *command)
        assert f"worker.model={model}/" in line
        assert said in line


def test_incarnation_that_is_a_pipe_does_not_hang_the_coordinator(tmp_path: Path) -> None:
    runtime_dir = tmp_path / "run"
    runtime_dir.mkdir(mode=0o700)
    os.mkfifo(runtime_dir / "incarnation", 0o600)
    line = refusal(runtime_dir, "coordinator")
    assert f"cluster.runtime_dir={runtime_dir}/incarnation: " in line
    assert "is no regular file (make the directory writable, or remove the file)" in line

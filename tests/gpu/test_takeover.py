"""A standby takes over from a killed worker on one card, and no output changes (tests/processes/test_standby.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.processes.test_kept_weights import output
from tests.processes.test_up import eventually, running
from worker.runners.tiny import write_tiny_checkpoint

#: By hand, to try this file without a card: `TAKEOVER_DEVICE=cpu`.
DEVICE = os.environ.get("TAKEOVER_DEVICE", "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_a_standby_takes_over_twice_and_outputs_stay(tmp_path: Path) -> None:
    """The second one maps what the first has mapped. Graphs are captured in the thread of each loop, between steps."""
    write_tiny_checkpoint(tmp_path / "model", index_topk=64, context_max_tokens=4_096, layers=2)
    flags = {"standby": "1", "deterministic": "true", "dtype": "bfloat16"}
    settings = [it for name, value in flags.items() for it in ("--set", f"worker.{name}={value}")]
    with running(tmp_path / "model", tmp_path, "--device", DEVICE, *settings, start=subprocess.Popen) as up:
        up.until("standby of w0 is ready")
        expected, held = output(up), up.submit_endless()
        for _ in range(2):
            ready = json.loads((tmp_path / "ready.json").read_text())
            before = up.generated(held)
            os.kill(ready["workers"][0]["pid"], signal.SIGKILL)
            said = up.until("worker.link welcomed")
            assert "w0 killed by SIGKILL; its standby takes over in 0 s" in said
            assert "weights attached" in said
            assert "w0 exited with" not in said, said
            now = json.loads((tmp_path / "ready.json").read_text())
            assert now["workers"][0]["pid"] == ready["standbys"][0]["pid"]
            eventually(lambda before=before: up.generated(held) > before)  # type: ignore[misc]
            said = up.until("standby of w0 is ready")
            assert "w0 exited with" not in said, said
            if DEVICE != "cpu":
                assert "graphs captured" in said
            assert output(up) == expected

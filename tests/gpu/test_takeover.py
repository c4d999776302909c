"""A standby takes over from a killed worker on one card, and no output changes (tests/processes/test_standby.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from hisparse.client.client import Client, run_client
from tests.processes.test_kept_weights import output
from tests.processes.test_up import Up, running
from worker.runners.tiny import write_tiny_checkpoint

#: By hand, to try this file without a card: `TAKEOVER_DEVICE=cpu`.
DEVICE = os.environ.get("TAKEOVER_DEVICE", "cuda")
#: Two minutes of a GPU that decodes one stream of the tiny model.
MAX_TOKENS = 60_000
#: Tokens that a stream is to gain after its worker is killed.
MORE_TOKENS = 200

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]


def first_tokens(up: Up, name: str, count: int) -> list[int]:
    """Wait until request `name` has `count` tokens; returns those that it has."""

    async def read(client: Client) -> list[int]:
        found: list[int] = []
        async for tokens in await client.attach(name):
            found += tokens.tolist()
            if len(found) >= count:
                break
        return found

    return run_client(up.ready["client_endpoint"], read)


def test_a_standby_takes_over_twice_and_outputs_stay(tmp_path: Path) -> None:
    """The second one maps what the first has mapped. Graphs are captured in the thread of each loop, between steps.

    Each kill disturbs a stream of its own, so that none is long when an undisturbed one is compared with all of them.
    """
    write_tiny_checkpoint(tmp_path / "model", index_topk=64, context_max_tokens=2 * MAX_TOKENS, layers=2)
    flags = {"standby": "1", "deterministic": "true", "dtype": "bfloat16"}
    settings = [it for name, value in flags.items() for it in ("--set", f"worker.{name}={value}")]
    sizes = ("--host-mem", "256MiB", "--device-mem", "256MiB")
    with running(tmp_path / "model", tmp_path, "--device", DEVICE, *sizes, *settings, start=subprocess.Popen) as up:
        up.until("standby of w0 is ready")
        expected, disturbed = output(up), []
        for _ in range(2):
            held = up.submit_endless(MAX_TOKENS)
            ready = json.loads((tmp_path / "ready.json").read_text())
            before = up.generated(held)
            os.kill(ready["workers"][0]["pid"], signal.SIGKILL)
            said = up.until("worker.link welcomed")
            assert "w0 killed by SIGKILL; its standby takes over in 0 s" in said
            assert "weights attached" in said
            assert "w0 exited with" not in said, said
            now = json.loads((tmp_path / "ready.json").read_text())
            assert now["workers"][0]["pid"] == ready["standbys"][0]["pid"]
            disturbed.append(first_tokens(up, held, before + MORE_TOKENS))
            said = up.until("standby of w0 is ready")
            assert "w0 exited with" not in said, said
            if DEVICE != "cpu":
                assert "graphs captured" in said
            assert up.hisparse("abort", held).returncode == 0
            assert output(up) == expected
        quiet = first_tokens(up, up.submit_endless(MAX_TOKENS), max(map(len, disturbed)))
    for tokens in disturbed:
        assert quiet[: len(tokens)] == tokens

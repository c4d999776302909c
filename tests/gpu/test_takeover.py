"""A standby takes over from a killed worker on one card, and no output changes (tests/processes/test_standby.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import trio

from hisparse.client.client import Client, run_client
from tests.processes.test_kept_weights import output
from tests.processes.test_main_job_crashes import LIMIT_S, REQUESTS, decode_all, until_decoding
from tests.processes.test_standby import until_ready
from tests.processes.test_up import Up, running
from tests.support.cluster_rig import (
    again_until,
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    plant,
    prompts_of,
    until_all_connected,
    write_model,
)
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
        said = up.until("standby of w0 is ready")
        expected, disturbed = output(up), []
        for _ in range(2):
            assert f"has_weights=True is_warm={DEVICE != 'cpu'}" in said, said
            held = up.submit_endless(MAX_TOKENS)
            ready = json.loads((tmp_path / "ready.json").read_text())
            before = up.generated(held)
            os.kill(ready["workers"][0]["pid"], signal.SIGKILL)
            said = up.until("worker.link welcomed")
            assert "w0 killed by SIGKILL; its standby takes over in 0 s" in said
            assert "weights attached" not in said, "they were mapped before"
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


@pytest.mark.parametrize("defect", ["fault", "no-memory"])
async def test_a_standby_takes_over_from_a_worker_that_fails_amid_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    """I2, I5: an illegal address, a failed allocation; the device is as usable as before."""
    plant(monkeypatch, defect, trigger := tmp_path / "fails")
    config = crash_config(write_model(tmp_path / "model"), tmp_path, host_mem="64MiB")
    about = {"device": DEVICE, "dtype": "bfloat16", "stream_backend": "inline" if DEVICE == "cpu" else "cuda"}
    config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, standby=1, **about))
    prompts = prompts_of(21, REQUESTS)
    async with cluster_of_two(config, tmp_path, kept=True, roles=("both",)) as (cluster, client, said):
        quiet = await decode_all(client, prompts, "quiet-")
        for number in range(2):
            waiting, done = await until_ready(cluster, "w0"), trio.Event()

            async def disturb(prefix: str, waiting: int, done: trio.Event) -> None:
                await until_decoding(client, prefix, "w0", 4)
                trigger.touch()
                with trio.fail_after(LIMIT_S):
                    while cluster.workers["w0"].pid != waiting:  # noqa: ASYNC110
                        await trio.sleep(0.01)
                done.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(disturb, prefix := f"crashed-{number}-", waiting, done)
                await again_until(done, partial(decode_all, client, prompts), quiet, prefix)
            await until_all_connected(client, LIMIT_S)
        await assert_nothing_leaked(client)
    ends = [line for line in said if line.startswith("w0 ")]
    assert len(ends) == 2
    assert all(line.startswith("w0 exited with 70: ") and "its standby takes over in 0 s" in line for line in ends)

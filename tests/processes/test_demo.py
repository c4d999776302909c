"""The demo itself, at its smallest: real processes, real prompts, the model library as judge.

One run must pass. In the other a stranger overwrites one host row that decoding selects, in the pool file, from
outside: the comparison must notice, or it could never fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from hisparse.client.client import Client, open_client
from hisparse.demo.plan import cut_prompts, prompt_lengths
from hisparse.demo.setup import kv_shape, read_sources
from protocol.text import ByteTokenizer
from tests import ROOT
from tests.support import zygote
from tests.support.demo_victim import Victim, corrupt, find_victim
from tests.support.slow_demo import HELD_WHILE
from worker.runners.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(1_800)]

#: Ends a demo that hangs.
LIMIT_S = 800.0
REQUESTS = 2
NEW_TOKENS = 64
#: The request that is retracted has resumed by then, most likely.
LATE = NEW_TOKENS // 2
LENGTHS = (2_048, 2_200)
PROMPTS = [ROOT / "LICENSE", ROOT / "docs" / "architecture.md"]
OPTIONS = [
    "--json",
    *(argument for path in PROMPTS for argument in ("--prompts", str(path))),
    *("--requests", str(REQUESTS), "--new-tokens", str(NEW_TOKENS), "--prompt-tokens", f"{LENGTHS[0]}:{LENGTHS[1]}"),
]


def run_demo(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Its requests decode slowly until they are moved."""
    directory.chmod(0o700)
    command = [sys.executable, "-m", "tests.support.slow_demo", "demo", *OPTIONS, *arguments]
    return zygote.run([*command, "--work-dir", str(directory)], LIMIT_S)


def test_demo_passes_and_cleans_up(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--family", "deepseek-v3.2", "--streams", "simulated")
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"]) == (0, []), done.stderr
    assert report["verified_tokens"] + report["unverified_tokens"] == REQUESTS * NEW_TOKENS
    assert report["mismatched_tokens"] == 0
    assert report["distinct_tokens"] > 20
    assert min(report["hits"], report["misses"], report["retracted"], report["handed_over"]) > 0
    assert report["rows_swapped"] == report["misses"]  # two counters, kept apart; this family shares no index
    assert report["host_pages_after"] == report["host_pages_before"] == 0 < report["host_pages_peak"]
    assert report["hot_bytes"] <= report["full_kv_bytes"] / 8
    assert list(tmp_path.glob("*.pool")) == []
    assert "retracted from" in done.stderr


@pytest.mark.deep
def test_demo_of_conversations_reuses_within_owners(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--turns", "3")
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"]) == (0, []), done.stderr
    assert report["turns"] == 3
    rows = {row["request_id"]: row for row in report["per_request"]}
    assert sorted(rows) == [f"demo-0{request}.{turn}" for request in range(REQUESTS) for turn in (1, 2, 3)]
    for request, owner in ((0, ""), (1, "apart")):
        turns = [rows[f"demo-0{request}.{turn}"] for turn in (1, 2, 3)]
        assert {row["owner"] for row in turns} == {owner}
        assert [row["cached_tokens"] for row in turns] == [0] + [
            (row["prompt_tokens"] + NEW_TOKENS - 1) // 64 * 64 for row in turns[:-1]
        ]
    assert report["cached_tokens"] == sum(row["cached_tokens"] for row in rows.values())
    assert report["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows.values())


@pytest.mark.deep
def test_demo_serves_from_one_group(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--workers", "2", "--group-size", "2")
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"]) == (0, []), done.stderr
    assert (report["workers"], report["group_size"]) == (2, 2)
    assert "2 workers in groups of 2" in done.stderr


@pytest.mark.deep
def test_demo_serves_fp8_weights_exactly(tmp_path: Path) -> None:
    """The oracle decodes the weights by code of its own; scales and blocks are ragged."""
    options = ("--family", "glm-5", "--weights", "fp8", "--requests", "4")
    done = run_demo(tmp_path, *options)
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"]) == (0, []), done.stderr
    assert report["weights"] == "fp8"
    assert report["mismatched_tokens"] == 0 < report["verified_tokens"]
    assert min(report["hits"], report["misses"], report["retracted"], report["handed_over"]) > 0


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Victim]:
    """By request of the demo: its checkpoint and prompts are functions of its options."""
    path = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(path, "glm-5", index_topk=128)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    requests = cut_prompts(read_sources(PROMPTS), prompt_lengths(REQUESTS, *LENGTHS), ByteTokenizer().encode)
    return {request.request_id: find_victim(model, request.prompt, NEW_TOKENS, LATE) for request in requests}


@pytest.mark.deep
async def test_corrupted_row_is_reported(
    victims: dict[str, Victim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(victim.selected_by >= LATE // 3 for victim in victims.values())
    (held := tmp_path / "held").touch()
    monkeypatch.setenv(HELD_WHILE, str(held))
    results: list[subprocess.CompletedProcess[str]] = []

    async def demo() -> None:
        results.append(await trio.to_thread.run_sync(run_demo, tmp_path, "--family", "glm-5"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(demo)
        corrupted = await _corrupt_while_retracted(victims, tmp_path)
        held.unlink()
    report = json.loads(results[0].stdout)
    rows = {row["request_id"]: row for row in report["per_request"]}
    assert results[0].returncode == 1
    assert rows[corrupted]["mismatched"] > 0
    assert all(row["mismatched"] == 0 for name, row in rows.items() if name != corrupted)
    assert "differ from the model library's" in report["problems"][0]
    assert report["host_pages_after"] == report["host_pages_before"]


async def _corrupt_while_retracted(victims: dict[str, Victim], work_dir: Path) -> str:
    """Wait for the demo to retract a request: its hot buffer is gone, so that every row is read from the pool again."""
    with trio.fail_after(LIMIT_S):
        await _until_exists(trio.Path(work_dir) / "client.sock")
        async with open_client(f"ipc://{work_dir}/client.sock") as client:
            name = await _retracted(client)
            (pool,) = await client.pools()
            worker = (await client.workers())[0]
            _, row_bytes = kv_shape(work_dir / "model")
            found = corrupt(Path(worker.capacity.pool_path), victims[name], pool.page_bytes, row_bytes)
            row = (await client.request(name)).row
    assert (found, row.state) == (1, "RETRACTED")
    return name


async def _until_exists(path: trio.Path) -> None:
    while not await path.exists():  # noqa: ASYNC110 (what another process does sends no event)
        await trio.sleep(0.02)


async def _retracted(client: Client) -> str:
    while True:
        for row in (await client.requests()).rows:
            if row.state == "RETRACTED":
                return row.request_id
        await trio.sleep(0.02)

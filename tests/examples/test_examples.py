"""The programs of examples/ and of the documents, as users run them: against a cluster of `hisparse up`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hisparse
from tests import ROOT
from tests.house.test_api import blocks
from tests.processes.test_up import Up, running
from worker.runners.tiny import write_tiny_checkpoint

cluster_test = [pytest.mark.process, pytest.mark.timeout(900)]
OPENED = "hisparse.open_client()"
LIMIT_S = 120
REQUESTS = 3
#: Read from each request after it was handed over.
MORE_TOKENS = 20


def python(*args: str | Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environ
    )


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    model, runtime_dir = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("run")
    write_tiny_checkpoint(model, index_topk=64, context_max_tokens=4096, layers=2)
    with running(model, runtime_dir, "-n", "2") as it:
        yield it


def endpoint(up: Up, role: str) -> str:
    return f"ipc://{up.runtime_dir}/{role}.sock"


async def submit_endless(client: hisparse.Client) -> list[str]:
    """The ids of greedy requests of one prompt that all decode."""
    sampling = hisparse.Sampling(max_tokens=3_900, ignore_eos=True)
    streams = [await client.submit([7] * 100, sampling) for _ in range(REQUESTS)]
    for stream in streams:
        await anext(stream)
    return [stream.request_id for stream in streams]


async def rows_by_id(client: hisparse.Client) -> dict[str, hisparse.RequestRow]:
    return {row.request_id: row for row in (await client.requests()).rows}


async def first_tokens(client: hisparse.Client, names: list[str], count: int) -> list[list[int]]:
    """Of each request, which is then aborted."""
    outputs: list[list[int]] = []
    for name in names:
        output: list[int] = []
        stream = await client.attach(name)
        while len(output) < count:
            output += (await anext(stream)).tolist()
        outputs.append(output[:count])
    await client.abort(names)
    return outputs


class TestCluster:
    pytestmark = cluster_test

    def test_stream_completion(self, up: Up) -> None:
        program = ROOT / "examples" / "stream_completion.py"
        done = python(program, endpoint(up, "client"), "Once upon a time", "--max-tokens", "12")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].endswith(" FINISHED: 12 tokens")
        text = up.hisparse("submit", "Once upon a time", "--max-tokens", "12", "--temperature", "0").stdout
        assert done.stdout.startswith(text)

    def test_stream_completion_without_a_coordinator(self, tmp_path: Path) -> None:
        done = python(ROOT / "examples" / "stream_completion.py", f"ipc://{tmp_path}/client.sock", "Once")
        assert done.returncode == 1
        assert "Unavailable: endpoint=" in done.stderr.splitlines()[-1]

    def test_drain_worker_hands_requests_over(self, up: Up) -> None:
        """Each goes on at the other worker, with the tokens of a request that stayed where it was."""
        names = hisparse.run_client(endpoint(up, "client"), submit_endless)
        before = hisparse.run_client(endpoint(up, "client"), rows_by_id)
        moved = [name for name in names if before[name].worker == "w0"]
        assert 0 < len(moved) < len(names)
        done = python(ROOT / "examples" / "drain_worker.py", endpoint(up, "admin"), "w0", "--undrain")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[-1] == "w0: drained"
        assert {line.partition(":")[0] for line in lines[:-1]} == set(moved)
        after = hisparse.run_client(endpoint(up, "client"), rows_by_id)
        assert [(after[name].worker, after[name].retractions) for name in moved] == [("w1", 1)] * len(moved)
        count = max(row.generated_tokens for row in after.values()) + MORE_TOKENS
        first, *others = hisparse.run_client(endpoint(up, "client"), lambda it: first_tokens(it, names, count))
        assert others == [first] * len(others)

    @pytest.mark.parametrize("document", ["README.md", "docs/api.md"])
    def test_shown_programs_run(self, up: Up, tmp_path: Path, document: str) -> None:
        """Without an endpoint they reach the one of the settings: here it is named."""
        programs = [block for block in blocks(document) if OPENED in block]
        assert programs
        opened = f'hisparse.open_client("{endpoint(up, "client")}")'
        for program in programs:
            (tmp_path / "shown.py").write_text(program.replace(OPENED, opened))
            done = python(tmp_path / "shown.py")
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout


def test_swap_in() -> None:
    done = python(ROOT / "examples" / "swap_in.py", "--tokens", "1000", "--steps", "20")
    assert done.returncode == 0, done.stderr
    share, difference = done.stdout.splitlines()
    assert "% of 2560 rows were hot" in share
    assert float(difference.rpartition(" ")[2]) < 1e-4


def test_shown_kernels_run(tmp_path: Path) -> None:
    """With no more than the page says: nothing is imported before it."""
    (program,) = (block for block in blocks("docs/api.md") if "hs.swap_in" in block)
    (tmp_path / "shown.py").write_text(f"{program}\nassert output.isfinite().all() and not state.tripwires.any()\n")
    done = python(tmp_path / "shown.py")
    assert (done.returncode, done.stderr) == (0, "")

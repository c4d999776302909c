"""The benchmark of the whole service: workloads as data, figures from records, refusals, and a service on a CPU."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks.serve import measures, report
from benchmarks.serve.__main__ import main, parsed
from benchmarks.serve.measures import RECORD, STEP, UNIT, WRITTEN, Answer, Window, measured, percentile, spread
from benchmarks.serve.model import config_of, ranks_of, tokens_of, write_tokenizer
from benchmarks.serve.needs import GIB, Machine, Needs, TooLittleError, check, needs_of
from benchmarks.serve.worker import Overlapping
from benchmarks.serve.workloads import WORKLOADS, cells_of, entries, next_history
from kernels.state import StepBatch
from protocol.text import make_tokenizer
from protocol.tokenizer_files import read_tokenizer
from tests.support import zygote
from tests.support.limits import HANG_LIMIT_S

ROOT: Final = Path(__file__).parents[2]

# ---------------------------------------------------------------- workloads


def test_cells_are_those_of_the_published_workloads() -> None:
    names = [it.cell.name for it in cells_of(list(WORKLOADS))]
    assert names == [
        "8k1k-1",
        "8k1k-8",
        "8k1k-32",
        "agents-4",
        "agents-7",
        "agents-14",
        "32k8k-48",
        "mix-16",
        "32k1-2",
        "1k1-1",
        "128k1-1",
        "turns-64",
    ]
    asked = cells_of(["agents", "mix"], ["mix-16", "agents-14:45", "mix-16"])
    assert [(it.cell.name, it.window) for it in asked] == [("mix-16", None), ("agents-14", 45.0), ("mix-16", None)]
    with pytest.raises(ValueError, match=r"agents-8; choose from agents-4, agents-7, agents-14"):
        cells_of(["agents"], ["agents-8"])


def test_requests_enter_at_points_of_their_outputs_that_are_evenly_apart() -> None:
    cell = cells_of(["8k1k"], ["8k1k-8"])[0].cell
    found = list(entries(cell, Random(1)))
    assert [it.output for it in found] == [1_024 - 128 * number for number in range(8)]
    assert all(it.prompt + it.output == 8_192 + 1_024 for it in found), "what is generated is part of the context"


def test_sessions_enter_with_all_lengths() -> None:
    cell = cells_of(["agents"], ["agents-14"])[0].cell
    found = list(entries(cell, Random(1)))
    assert found[0].history == 75_000
    assert all(75_000 <= it.history < 100_000 and 4_000 <= it.prompt < 8_300 for it in found)
    assert len({it.history for it in found}) == 14
    longest = max(it.history + it.prompt + it.output for it in found)
    assert longest <= cell.workload.longest


def test_a_session_that_grows_too_long_begins_again_from_its_first_tokens() -> None:
    agents = WORKLOADS["agents"].shrunk(1_000)
    assert (agents.history, agents.fresh) == ((75, 100), (4, 8))
    grown = list(range(101))
    assert next_history(agents, grown[:100]) == grown[:100]
    assert next_history(agents, grown) == grown[:75]


def test_pool_of_a_cell_holds_every_client_at_its_longest() -> None:
    cell = cells_of(["32k8k"])[0].cell
    assert cell.pages >= 48 * (32_768 + 8_192) // 64
    config = config_of(0, tiny=False)
    needs = needs_of(config, [cell], kv_dtype="fp8", ranks=8, pass_tokens=8_192, pool_bytes_max=100 * GIB)
    assert needs.pages == needs.pages_wanted, "distinct rows for all"
    assert 88 * GIB < needs.pool_bytes < 100 * GIB


# ---------------------------------------------------------------- refusals


def needs(device: int = 100, pages: int = 10, wanted: int = 10) -> Needs:
    return Needs(device * GIB, pages, wanted, GIB)


@pytest.mark.parametrize(
    ("asked", "has", "said"),
    [
        (needs(), Machine((), 64 * GIB, 64 * GIB), "no GPU"),
        (needs(), Machine((99 * GIB,), 64 * GIB, 64 * GIB), "device memory: needs 100.0 GiB, has 99.0 GiB"),
        (needs(), Machine((139 * GIB,), 64 * GIB, 9 * GIB), "/dev/shm: needs 10.0 GiB, has 9.0 GiB"),
        (needs(), Machine((139 * GIB,), 17 * GIB, 64 * GIB), "host memory: needs 18.0 GiB, has 17.0 GiB"),
        (needs(wanted=12), Machine((139 * GIB,), 64 * GIB, 64 * GIB), r"10.0 GiB.*640 tokens.*need 12.0 GiB"),
    ],
)
def test_a_machine_with_too_little_is_refused_with_need_and_have(asked: Needs, has: Machine, said: str) -> None:
    with pytest.raises(TooLittleError, match=said):
        check(asked, has, "cuda")


def test_a_machine_that_suffices_is_taken() -> None:
    check(needs(), Machine((139 * GIB,), 64 * GIB, 64 * GIB), "cuda")
    check(needs(), Machine((), 18 * GIB, 0), "cpu")


def test_a_command_that_cannot_run_ends_before_any_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ["--out", str(tmp_path / "out.json")]
    with pytest.raises(SystemExit):
        parsed(["--workload", "9k9k"])
    assert "'8k1k', 'agents', '32k8k', 'mix'" in capsys.readouterr().err
    monkeypatch.setattr("benchmarks.serve.needs.gpu_bytes", list)
    assert main([*out, "--workload", "8k1k"]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert main([*out, "--device", "cpu", "--as", "all"]) == 2
    assert "rank-of-8" in capsys.readouterr().err
    assert main([*out, "--device", "cpu", "--host-gib", "1"]) == 2
    assert "host memory: needs 8.0 GiB, has 1.0 GiB" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_ranks_are_named() -> None:
    assert ranks_of("rank-of-16") == 16
    with pytest.raises(ValueError, match="rank-of-N"):
        ranks_of("rank-of-0")


# ---------------------------------------------------------------- figures

WINDOW: Final = Window(10.0, 20.0)
LAYERS: Final = 4


def records(*rows: tuple[int, int, float, float]) -> measures.Records:
    return np.array(list(rows), dtype=RECORD)


def answer(submitted: float, *arrivals: tuple[float, int], **others: Any) -> Answer:
    return Answer(1_000, submitted, others.pop("is_written", False), list(arrivals), **others)


def figures(answers: list[Answer], found: measures.Records, link_ms: float = 0.0) -> dict[str, Any]:
    return measured(answers, found, WINDOW, lambda rows: link_ms, layers=LAYERS, reused_tokens=500, asked_tokens=2_000)


def test_percentile_is_a_value_that_was_seen() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 99) == 4.0
    assert percentile([5.0], 1) == 5.0
    assert spread([1.0, 9.0], [98, 2]) == {"p50": 1.0, "p99": 9.0, "max": 9.0, "count": 100.0}
    assert spread([]) is None


def test_only_what_lies_in_the_window_counts() -> None:
    answers = [answer(5.0, (9.0, 3), (12.0, 5), (13.0, 6), (21.0, 9)), answer(11.0, (14.0, 1))]
    found = figures(answers, records((STEP, 2, 9.0, 1.0), (STEP, 2, 12.0, 0.5), *[(UNIT, 50, 15.0, 0.0)] * 2 * LAYERS))
    assert found["output_per_s"] == pytest.approx((2 + 1 + 1) / 10)
    assert found["computed_per_s"] == 10.0
    assert found["total_per_s"] == pytest.approx(0.4 + 10 + 50)
    assert found["prefix_hits"] == 0.25
    assert found["ttft_s"] == {"p50": 3.0, "p99": 3.0, "max": 3.0, "count": 1.0}
    assert found["gap_s"]["max"] == 1.0, "between two arrivals of the window"
    assert (found["steps"], found["step_rows"], found["worker_gap_s"]["count"]) == (1, 2, 2.0)


def test_written_contexts_have_no_time_to_first_token_and_are_told() -> None:
    found = figures([answer(11.0, (12.0, 1), is_written=True)], records((WRITTEN, 64, 12.0, 0.0)))
    assert found["ttft_s"] is None
    assert found["written_tokens"] == 64


def test_requests_that_got_no_token_are_told() -> None:
    found = figures([answer(4.0), answer(12.0, (25.0, 1))], records())
    assert (found["waiting"], found["waiting_longest_s"]) == (2, 16.0)


def test_long_prompts_are_apart_from_clients() -> None:
    found = figures([answer(11.0, (15.0, 1), is_long=True)], records())
    assert found["ttft_s"] is None
    assert found["long_ttft_s"]["p50"] == 4.0


def test_links_make_every_step_and_unit_longer() -> None:
    rows = ((STEP, 4, 11.0 + at, 0.5) for at in range(8))
    found = figures([answer(5.0, (11.0, 10))], records(*rows, *[(UNIT, 512, 12.0, 0.0)] * 2 * LAYERS), 250.0)
    assert found["stretch"] == pytest.approx(1 + 10 * 0.25 / 10)
    assert found["linked_output_per_s"] == pytest.approx(1.0 / 1.25)
    assert found["linked_worker_gap_s"]["p50"] == pytest.approx(0.75)


# ---------------------------------------------------------------- what the worker is given


def test_selections_overlap_as_stated_and_lie_in_the_context() -> None:
    k, of = 16, Overlapping(16, 0.75, "cpu")
    steps = []
    for length in range(200, 232):
        batch = StepBatch.allocate(3, 2)
        batch.seats.copy_(torch.tensor([1, 0, -1]))
        batch.lengths.copy_(torch.tensor([length, 20, 0]))
        chosen = torch.full((2, 3, k), -1, dtype=torch.int32)
        for group in range(2):
            of(group, batch, chosen[group])
        assert (chosen[:, 1:] == -1).all(), "short contexts and padding keep what the indexer selected"
        steps.append([set(chosen[group, 0].tolist()) for group in range(2)])
        assert all(len(it) == k and min(it) >= 0 and max(it) < length for it in steps[-1])
    shared = [len(a[group] & b[group]) for a, b in pairwise(steps) for group in range(2)]
    assert sorted(shared)[len(shared) // 2] == 12
    assert steps[0][0] != steps[0][1], "neighbouring groups select otherwise"


def test_every_token_is_text_that_can_be_read_back(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    file = read_tokenizer(tmp_path)
    detokenizer = make_tokenizer(file.kind, file.data).detokenizer()
    texts = [detokenizer.push([token]) for token in (0, 31, 299)]
    assert all(texts)
    assert tokens_of("".join(texts)) == [0, 31, 299]


# ---------------------------------------------------------------- processes


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(it) for task in tasks for it in task.read_text().split()]


def command(out: Path, *more: str) -> list[str]:
    fixed = ["--device", "cpu", "--layers", "4", "--out", str(out), "--settle", "0.3", "--host-gib", "9"]
    return [sys.executable, "-m", "benchmarks.serve", *fixed, *more]


@pytest.mark.process
@pytest.mark.deep
def test_a_service_on_a_cpu_runs_cells_that_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real processes, the tiny model: a window of each kind of cell, and a cell that its budget leaves no time for."""
    first, second, whole = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "whole.json"
    cells = ["--cells", "8k1k-8", "agents-4", "mix-16", "--window", "1.5", "--alone", "1", "--long", "30"]
    assert zygote.run(command(first, *cells), HANG_LIMIT_S).returncode == 0
    requests, agents, alone, beside = json.loads(first.read_text())["rows"]
    assert [it["cell"] for it in (requests, agents, alone, beside)] == ["8k1k-8", "agents-4", "mix-16", "mix-16"]
    assert (alone["phase"], beside["phase"]) == ("alone", "beside long prompts")
    for row in (requests, agents, alone, beside):
        assert row["written_tokens"] == 0, "what a window counts was computed"
        assert row["output_per_s"] > 0
        assert 0 < row["linked_output_per_s"] < row["output_per_s"]
        assert row["worker_gap_s"]["p50"] > 0
    assert agents["prefix_hits"] > 0.5, "histories were written as prefixes"
    assert beside["long_ttft_s"]["count"] >= 1

    late = ["--cells", "32k8k-48", "8k1k-8", "--budget-seconds", "1", "--no-prefix-reuse"]
    assert zygote.run(command(second, *late), HANG_LIMIT_S).returncode == 0
    files = ["--join", str(first), str(second), "--out", str(whole)]
    picture, csv = tmp_path / "serve.svg", tmp_path / "csv"
    assert main([*files, "--picture", str(picture), "--csv", str(csv)]) == 0
    said = capsys.readouterr().out
    assert "| 32k8k-48 | no prefix reuse | 1 | not run: the time was over |" in said
    assert "chats keep" in said
    assert [it["cell"] for it in json.loads(whole.read_text())["rows"]][:2] == ["8k1k-8", "8k1k-8"]
    ElementTree.fromstring(picture.read_text())
    assert "Output Token Throughput (tokens/sec)," in next(csv.glob("8k1k-8*")).read_text()


@pytest.mark.process
def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path / "out.json", "--workload", "8k1k"), cwd=ROOT) as process:
        began, children = time.monotonic(), list[int]()
        while len(children) < 2 and time.monotonic() - began < HANG_LIMIT_S and process.poll() is None:
            children = children_of(process.pid)
            time.sleep(0.05)
        assert len(children) >= 2, "coordinator and worker"
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_LIMIT_S) == 130
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]


# ---------------------------------------------------------------- joined results


def test_a_cell_that_one_result_has_run_is_not_missing_in_the_whole() -> None:
    row = {"workload": "8k1k", "cell": "8k1k-1", "clients": 1, "variant": "as is", "run": 0}
    late, ran = {"runs": [1], "rows": [row | {"not_run": "x"}] * 2}, {"runs": [2], "rows": [dict(row)]}
    assert [it["run"] for it in report.joined([late, ran])["rows"]] == [1]
    assert len(report.joined([late])["rows"]) == 1


# ---------------------------------------------------------------- the page

PAGE: Final = (ROOT / "docs" / "performance.md").read_text()
RESULT: Final = ROOT / "benchmarks" / "results" / "serve-H200.json"


def test_page_and_picture_show_the_result() -> None:
    found = json.loads(RESULT.read_text())
    assert report.tables(found).strip() in PAGE
    assert RESULT.with_suffix(".svg").read_text() == report.picture(found)


def test_each_flag_of_the_page_is_an_option() -> None:
    flags = set(re.findall(r"`(--[a-z][a-z-]+)", PAGE))
    assert len(flags) > 7
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        parsed(["--help"])
    assert [flag for flag in flags if not re.search(rf"{flag}\b", said.getvalue())] == []


def test_share_that_chats_keep_is_of_the_mix() -> None:
    """Cells of short prompts have phases of the same names."""
    rows = [
        {"workload": workload, "variant": "as is", "phase": phase, "output_per_s": rate}
        for workload, rates in (("mix", (400.0, 200.0)), ("1k1", (3.0, 2.0)))
        for phase, rate in zip(("alone", "beside long prompts"), rates, strict=True)
    ]
    assert report.kept(rows) == "Beside long prompts, chats keep 50.0% of their tokens/s (as is).\n"

"""The benchmark of the hot floor: what requests select, that the worker follows an overlap, a whole run on a CPU."""

from __future__ import annotations

import argparse
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import trio
from torch import Tensor

from benchmarks import hot_floor, hot_floor_report, report
from benchmarks.hot_floor import MODES, OVERLAP_POLL_S, OverlapFile, SeatSelections
from kernels.state import StepBatch
from protocol.errors import ConfigError
from protocol.settings import Config
from protocol.units import managed_chunks, pages_for
from tests.support.limits import HANG_LIMIT_S
from tests.worker.runners.test_synthetic import SMALL
from worker.device.sizing import Sizing, size_worker
from worker.runners.checkpoint import anonymous_info, geometry_of
from worker.runners.synthetic import synthetic_config

CONTEXT: Final = 128
OPTIONS: Final = (
    *("--device", "cpu", "--layers", "2", "--kv-dtype", "bfloat16", "--changes", json.dumps(SMALL)),
    *("--context", str(CONTEXT), "--output-tokens", "48", "--requests", "6", "--prompts", "2", "--seats", "4"),
    *("--resident", "2", "--hot-slots", "64", "--device-mem", "16MiB", "--host-mem", "8MiB", "--chunk-tokens", "64"),
    *("--phases", "0.875:0.3", "0.25:0.3", "--measure-seconds", "1", "--budget-seconds", str(HANG_LIMIT_S)),
)


# ---------------------------------------------------------------- selections


def selections(k: int = 16) -> SeatSelections:
    torch.manual_seed(0)
    return SeatSelections(2, seats=4, context=CONTEXT, k=k, device="cpu")


def selected(of: SeatSelections, seats: list[int], lengths: list[int], k: int = 16) -> Tensor:
    """int32[groups, rows, k] of one step."""
    batch = StepBatch.allocate(len(seats), 2)
    batch.seats.copy_(torch.tensor(seats))
    batch.lengths.copy_(torch.tensor(lengths))
    chosen = torch.full((2, len(seats), k), -1, dtype=torch.int32)
    for group in range(2):
        of(group, batch, chosen[group])
    return chosen


def test_rows_select_distinct_positions_of_the_prompt() -> None:
    of = selections()
    of.set_overlap(0.5)
    chosen = selected(of, [2, 0, -1, 3], [129, 1_000, 0, 131])
    assert ((chosen >= 0) & (chosen < CONTEXT)).all(), "rows of padding among them"
    assert all(len(set(row.tolist())) == 16 for row in chosen.flatten(0, 1))
    assert len({tuple(row.tolist()) for row in chosen.flatten(0, 1)}) == 8, "of each seat and group another"


@pytest.mark.parametrize("overlap", [1.0, 0.875, 0.5, 0.0])
def test_successive_selections_overlap_as_asked(overlap: float) -> None:
    of = selections()
    of.set_overlap(overlap)
    steps = [selected(of, [1], [length]) for length in range(150, 200)]
    for group in range(2):
        rows = [set(step[group, 0].tolist()) for step in steps]
        assert {len(a & b) for a, b in pairwise(rows)} == {round(overlap * 16)}


def test_overlap_changes_what_a_captured_step_reads() -> None:
    """A replay reads the same memory again: a new overlap is written into it, and no new tensor takes its place."""
    of = selections()
    place = of._fresh.data_ptr()
    of.set_overlap(1.0)
    still = [selected(of, [1], [length]) for length in (150, 151)]
    of.set_overlap(0.5)
    moved = [selected(of, [1], [length]) for length in (150, 151)]
    assert torch.equal(*still)
    assert not torch.equal(*moved)
    assert of._fresh.data_ptr() == place


def test_a_seat_selects_the_same_wherever_its_row_is() -> None:
    of = selections()
    of.set_overlap(0.75)
    wide, narrow = selected(of, [3, 1, 0, -1], [140, 150, 160, 0]), selected(of, [1, 3], [150, 140])
    assert torch.equal(wide[:, 1], narrow[:, 0])
    assert torch.equal(wide[:, 0], narrow[:, 1])


def test_worker_takes_an_overlap_once_and_looks_seldom(tmp_path: Path) -> None:
    now, taken, path = [0.0], [], tmp_path / "overlap"
    OverlapFile.write(path, 0.99)
    file = OverlapFile(path, taken.append, lambda: now[0])
    for _ in range(2):
        file.poll()
    OverlapFile.write(path, 0.8)
    file.poll()
    assert taken == [0.99]
    for _ in range(2):
        now[0] += OVERLAP_POLL_S
        file.poll()
    assert taken == [0.99, 0.8]


# ---------------------------------------------------------------- clusters


def sized(mode: str, directory: Path, arguments: tuple[str, ...] = ()) -> tuple[Config, Sizing]:
    options = hot_floor.parsed([*arguments])
    config = hot_floor.configured(options, mode, directory)
    model = synthetic_config(hot_floor.FAMILY, options.layers, **options.changes)
    geometry = geometry_of(model, options.kv_dtype)
    return config, size_worker(config.worker, geometry, anonymous_info(model, "m"))


def test_clusters_have_equal_memory_and_differ_in_policy(tmp_path: Path) -> None:
    """At the defaults, those of a GPU."""
    found = {mode: sized(mode, tmp_path) for mode in MODES}
    for counted in ("seats", "hot_chunks", "index_pages", "slab_pages", "host_pages"):
        assert len({getattr(sizing.capacity, counted) for _, sizing in found.values()}) == 1, counted
    has, options = found["auto"][1].capacity, hot_floor.parsed([])
    longest = pages_for(options.context + 1 + options.output_tokens + has.overshoot_tokens)
    assert has.hot_chunks // managed_chunks(options.hot_slots) >= options.seats, "full admission fills the seats"
    assert has.index_pages >= options.seats * longest
    assert has.slab_pages >= pages_for(options.context + 1)
    assert [config.coordinator.hot_floor for config, _ in found.values()] == ["auto", "smallest", "smallest"]
    (slots,) = found["resident"][0].worker.hot_size_classes
    assert managed_chunks(slots) > longest, "no context is managed"


def test_others_than_auto_measure_each_overlap_once() -> None:
    options = hot_floor.parsed(["--phases", "0.99:15", "0.80:30", "0.99:75", "--settle-seconds", "4"])
    asked = {mode: [(it.overlap, it.settle_s) for it in hot_floor.phases_of(options, mode)] for mode in MODES}
    assert asked["auto"] == [(0.99, 15), (0.8, 30), (0.99, 75)]
    assert asked["smallest"] == asked["resident"] == [(0.99, 4), (0.8, 4)]


def options_of(out: Path, *more: str) -> argparse.Namespace:
    return hot_floor.parsed([*OPTIONS, "--out", str(out), *more])


@pytest.mark.process
def test_a_cluster_decodes_through_its_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "hot-floor.json"
    found = trio.run(hot_floor.run, options_of(out, "--modes", "auto"))
    assert json.loads(out.read_text()) == found
    first, second = found["rows"]
    assert [(row["mode"], row["overlap"]) for row in (first, second)] == [("auto", 0.875), ("auto", 0.25)]
    assert all(row["tokens_per_s"] > 0 and row["step_ms"] > 0 for row in (first, second))
    assert all(1 < row["running"] <= 4 for row in (first, second))
    assert first["hit_rate"] > second["hit_rate"] + 0.2, "the worker's selections followed"
    assert {it["phase"] for it in found["timeline"]} == {0, 1}
    assert found["setting"]["seats"] == 4
    assert found["clusters"]["auto"]["start_s"] > 0
    assert capsys.readouterr().out.count("tok/s") == 2


@pytest.mark.process
def test_log_of_a_worker_that_ends_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(tmp_path / "out.json", "--modes", "auto", "--device-mem", "64KiB")
    with pytest.raises(ConfigError, match="w0"):
        trio.run(hot_floor.run, options)
    said = capsys.readouterr().err
    assert "end of the log of coordinator" in said
    assert re.search(r"end of the log of w0:.*worker\.device_mem=64KiB", said, re.DOTALL)


# ---------------------------------------------------------------- what is shown


def row(mode: str, phase: int, overlap: float, tokens: float, floor: int = 4096) -> dict[str, Any]:
    seen = {"running": 100.0, "step_ms": 7.0, "hit_rate": overlap if floor else None, "floor": floor}
    return {"mode": mode, "phase": phase, "overlap": overlap, "tokens_per_s": tokens} | seen


ROWS: Final = [
    row("auto", 0, 0.99, 990.0),
    row("auto", 1, 0.80, 485.0, floor=0),
    row("auto", 2, 0.90, 700.0),
    row("smallest", 0, 0.99, 1_000.0),
    row("smallest", 1, 0.80, 400.0),
    row("resident", 0, 0.99, 500.0, floor=0),
    row("resident", 1, 0.80, 500.0, floor=0),
]
TIMELINE: Final = [
    {"s": float(s), "phase": phase, "floor": floor}
    for s, phase, floor in (
        (0, 0, 4096),
        (9, 0, 4096),
        (10, 1, 4096),
        (14, 1, 0),
        (20, 1, 0),
        (21, 2, 0),
        (29, 2, 4096),
    )
]


def test_auto_is_compared_with_the_better_of_the_others() -> None:
    first, second = hot_floor_report.ratios(ROWS)
    assert (first["of_best"], first["of_resident"]) == (0.99, 1.98)
    assert (second["of_best"], second["of_resident"]) == (0.97, 0.97)
    assert "kept" in hot_floor_report.ratio_line(first)
    assert "below 0.98" in hot_floor_report.ratio_line(second)


def test_changes_are_told_from_the_begin_of_their_phase() -> None:
    assert [hot_floor_report.changed_after(TIMELINE, phase) for phase in range(4)] == [[], [4.0], [8.0], []]


def test_tables_say_what_was_kept() -> None:
    machine = dict.fromkeys(("command", "gpu", "driver_pcie", "torch", "python"), "x")
    setting = dict.fromkeys(("layers", "context", "output_tokens", "requests", "seats", "hot_chunks"), 8)
    setting |= {"index_pages": 8, "kv_bytes": 8, "kv_dtype": "fp8"}
    clusters = {"auto": {"retractions": {"throughput": 45, "gpu_memory": 3}}}
    result = {"machine": machine, "setting": setting, "clusters": clusters, "rows": ROWS, "timeline": TIMELINE}
    text = hot_floor_report.section(result)
    assert "In 1 of 2 phases at least 98% of the better; 45 requests were retracted for throughput." in text
    assert "| 0.80 | 485 | resident | 4 | 400 | 500 | **0.970** | 0.970 |" in text
    assert text.count("\n| auto |") == 3
    assert "| resident | 0.80 | 500 | 100.0 | 7.00 |  | resident |" in text


def test_a_section_without_results_is_left_out() -> None:
    section = report.Section("Nothing", "", {"no-such-result.json": hot_floor_report.section})
    assert not report.is_measured(section)
    assert [it.title for it in report.SECTIONS if "decode-H200.json" in it.parts and report.is_measured(it)]

"""What benchmarks.swap_in measures on, and that it does not time a kernel that is wrong: the reference runs here."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import swap_in as swap_in_benchmark
from benchmarks.swap_in import figures, select
from benchmarks.swap_in_cells import EXTRA, MISSES, PEERS
from benchmarks.swap_in_setup import STEPS, TOPK, Setup, build, check
from kernels.swap_in import swap_in

GRAPHS, FRESH, HOT, REQUESTS = 2, 20, 4096, 2


@lru_cache(maxsize=1)
def stepped(misses: int) -> tuple[Setup, tuple[int, int]]:
    """A setup after GRAPHS times STEPS steps, and what had been counted before. Copy before changing it."""
    torch.manual_seed(1)
    setup = build(torch.randint(0, 256, (1 << 24,), dtype=torch.uint8), 656, HOT, REQUESTS, "cpu")
    before = setup.counts()
    for _ in range(GRAPHS):
        setup.advance(misses)
        for step, (state, batch) in enumerate(setup.steps):
            swap_in(state, 0, setup.topk[step], batch, setup.out[step], setup.plans[step])
    return setup, before


@pytest.mark.parametrize("misses", [0, 410, FRESH])
def test_every_step_misses_the_count_asked_for(misses: int) -> None:
    setup, before = stepped(misses)
    check(setup, before, misses, GRAPHS * STEPS)
    with pytest.raises(SystemExit, match="counted misses, hits"):
        check(setup, before, misses + 1, GRAPHS * STEPS)
    with pytest.raises(SystemExit, match="counted misses, hits"):
        check(setup, before, misses, GRAPHS * STEPS + 1)


def oldest_loaded(setup: Setup) -> int:
    """The output that names the first row which these steps loaded."""
    return int((setup.shuffle == TOPK - GRAPHS * STEPS * FRESH).nonzero())


def swap_outputs(setup: Setup) -> None:
    setup.out[-1, 0, [0, 1]] = setup.out[-1, 0, [1, 0]]


def lose_an_output(setup: Setup) -> None:
    setup.out[-1, 0, 0] = -1


def damage_an_early_row(setup: Setup) -> None:
    setup.state.row_words[0][0, setup.out[-1, 1, oldest_loaded(setup)], -1] ^= 1


def move_a_copy(setup: Setup) -> None:
    setup.plans[-1].host_offset[1, FRESH - 1] ^= 1


def plan_twice(setup: Setup) -> None:
    for name in ("device_row", "host_page", "host_offset"):
        getattr(setup.plans[-1], name)[0, 0] = getattr(setup.plans[-1], name)[0, 1]


def plan_less_early(setup: Setup) -> None:
    setup.plans[0].count[1] -= 1


def trip(setup: Setup) -> None:
    setup.state.tripwires[0] += 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (swap_outputs, "2 outputs name a row that holds another token"),
        (lose_an_output, "1 outputs name a row that holds another token"),
        (damage_an_early_row, "batch row 1: bytes of 1 rows of 640 differ"),
        (move_a_copy, "does not copy what its step missed"),
        (plan_twice, "does not copy what its step missed"),
        (plan_less_early, "plans of .19, 20. copies, expected 20"),
        (trip, "tripwires .1, 0, 0, 0"),
    ],
)
def test_wrong_kernel_is_not_timed(damage: Callable[[Setup], None], said: str) -> None:
    setup, before = deepcopy(stepped(FRESH))
    damage(setup)
    with pytest.raises(SystemExit, match=said):
        check(setup, before, FRESH, GRAPHS * STEPS)


def test_figures_are_medians_of_all_replays() -> None:
    found = figures({"": [6.0, 1.0, 2.0], "overlapped_": [1.0], **OTHERS}, copied_bytes=55_600)
    assert {name: of for name, of in found.items() if not name.startswith("overlapped_")} == {
        **{"us": 2.0, "us_min": 1.0, "us_max": 6.0, "mean_us": 3.0, "copy_only_us": 3.0, "resolve_us": 3.0},
        **{"cold_us": 3.0, "null_us": 3.0, "floor_us": 4.0, "gb_per_s": 27.8},
    }
    assert found["overlapped_us"] == found["overlapped_us_max"] == 1.0


def test_next_run_continues_after_budget_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run measures one batch of cells and is out of budget: passes add up, and none is measured twice."""
    out, measured, now = tmp_path / "out.json", list[tuple[int, int]](), [0.0]

    def fake_measure(batch: int, misses: int, *_: object) -> dict[str, list[float]]:
        measured.append((batch, misses))
        now[0] += 10.0
        return {"": [float(len(measured))], "overlapped_": [1.0], **OTHERS}

    for name, fake in (
        ("build", lambda pool, row_bytes, hot, batch: FakeSetup(batch)),
        ("measure", lambda setup, *rest: fake_measure(setup.batch, *rest)),
        ("make_pool", lambda size: None),
        ("flush_time", lambda replays: 0.0),
        ("machine", dict),
    ):
        monkeypatch.setattr(swap_in_benchmark, name, fake)
    monkeypatch.setattr(swap_in_benchmark.time, "monotonic", lambda: now[0])
    arguments = "--passes 2 --budget-seconds 5 --ranks 4 --row-bytes 656 --hot 8192 --batch 1 16 --misses 0 20"
    monkeypatch.setattr(sys, "argv", ["swap_in", "--out", str(out), *arguments.split()])
    kept = []
    for _ in range(5):
        swap_in_benchmark.main()
        kept.append([(cell["passes"], "replays_us" in cell) for cell in json.loads(out.read_text())["rows"]])
    assert measured == [(1, 0), (1, 20), (16, 0), (16, 20)] * 2
    assert kept[:3] == [[(1, True)] * 2, [(1, True)] * 4, [(2, False)] * 2 + [(1, True)] * 2]
    assert kept[3] == kept[4] == [(2, False)] * 4
    cells = json.loads(out.read_text())["rows"]
    assert [(cell["us_min"], cell["us_max"]) for cell in cells] == [(1, 5), (2, 6), (3, 7), (4, 8)]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--passes", "3"])
    swap_in_benchmark.main()
    assert measured[8:] == [(1, 0), (1, 20)], "whose replays are no longer there: from the first pass on"
    after = json.loads(out.read_text())["rows"]
    assert [cell["passes"] for cell in after] == [1, 1, 2, 2]
    assert after[2:] == cells[2:], "none is lost"


def test_large_pool_adds_columns_to_cells_of_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, measured, sizes = tmp_path / "out.json", list[tuple[int, int]](), list[int]()

    def fake_measure(batch: int, misses: int, *_: object) -> dict[str, list[float]]:
        measured.append((batch, misses))
        return {"": [float(len(measured))], "overlapped_": [1.0], **OTHERS}

    for name, fake in (
        ("build", lambda pool, row_bytes, hot, batch: FakeSetup(batch)),
        ("measure", lambda setup, misses, ranks, replays, flush_us: fake_measure(setup.batch, misses)),
        ("make_pool", sizes.append),
        ("flush_time", lambda replays: 0.0),
        ("machine", lambda: {"gpu": str(len(sizes))}),
    ):
        monkeypatch.setattr(swap_in_benchmark, name, fake)
    arguments = [
        "swap_in",
        "--out",
        str(out),
        *["--passes", "1", "--ranks", "4", "--row-bytes", "656", "--hot", "8192"],
    ]
    monkeypatch.setattr(sys, "argv", [*arguments, "--large"])
    with pytest.raises(SystemExit):
        swap_in_benchmark.main()
    monkeypatch.setattr(sys, "argv", [*arguments, "--batch", "1", "--misses", "0", "20"])
    swap_in_benchmark.main()
    before = json.loads(out.read_text())
    for _ in range(2):
        monkeypatch.setattr(
            sys, "argv", [*arguments, "--batch", "1", "16", "--misses", "20", "--large", "--pool-gib=64"]
        )
        swap_in_benchmark.main()
    after = json.loads(out.read_text())
    assert measured == [(1, 0), (1, 20), (1, 20)], "what has its columns, or is no cell of the result, is left out"
    assert sizes == [1 << 30, 64 << 30, 64 << 30]
    assert after["rows"] == [before["rows"][0], before["rows"][1] | {"large_us": 3.0, "large_copy_only_us": 3.0}]
    assert after["machine"] == before["machine"]
    assert after["large"]["pool_gib"] == 64
    monkeypatch.setattr(sys, "argv", [*arguments, "--batch", "16", "--misses", "20"])
    swap_in_benchmark.main()
    again = json.loads(out.read_text())
    assert again["rows"][:2] == after["rows"]
    assert again["large"] == after["large"], "kept by later runs of other cells"


OTHERS = {name: [7.0, 1.0, 3.0] for name in ("copy_only", "resolve", "cold", "null")}


@dataclass
class FakeSetup:
    batch: int
    state: None = None
    topk: torch.Tensor = field(default_factory=lambda: torch.empty(1, 1, TOPK))


def options(**chosen: Any) -> Namespace:
    return Namespace(**{**dict.fromkeys(("row_bytes", "hot", "batch", "misses", "extra")), **chosen})


def test_filters_keep_cells_that_match_all() -> None:
    assert select(options()) == dict.fromkeys(PEERS, MISSES)
    assert select(options(extra=True)) == dict.fromkeys(EXTRA, MISSES)
    found = select(options(hot=[8192], batch=[1, 128], misses=[20, 0]))
    assert found == {(656, 8192, 1): (0, 20), (656, 8192, 128): (0, 20)}
    assert select(options(row_bytes=[1152], hot=[8192])) == select(options(misses=[3])) == {}

"""Steps with drafts on one rank: what is forced, what rows select, and what is computed from times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import decode, rank_drafts, rank_report
from benchmarks.rank import FAMILY, SynthesisedRanks
from benchmarks.rank_drafts import Setup, auto_over_plain, measure, plain_row, tokens_of
from benchmarks.rank_floor import Links
from kernels.state import StepBatch
from tests.worker.runners.test_synthetic import MIXED, SMALL
from worker.runners.synthetic import synthetic_runner
from worker.weights.synth import published_config

FRESH = 2


@pytest.fixture(scope="module")
def setup() -> Setup:
    config = type(published_config(FAMILY))(**SMALL | MIXED)
    config.num_nextn_predict_layers = 1
    torch.manual_seed(0)
    ranks = SynthesisedRanks.draw(config, 2, 16, "cpu")
    runner = synthetic_runner(config, device="cpu", dtype="bfloat16", collectives=ranks, rows_max=16, draft_tokens=1)
    pool = torch.zeros(64, runner.geometry.page_bytes, dtype=torch.uint8)
    return Setup(runner, ranks, config, pool, of=2, context=128, hot_slots=64, overlap=1 - FRESH / 16, device="cpu")


@pytest.fixture(scope="module")
def rows(setup: Setup) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "TAIL_SLOTS", rank_drafts.TAIL_SLOTS)
        patch.setattr(decode, "TOKENS_AHEAD", 1_000)
        patch.setattr(rank_drafts, "CHANCES", {1: (0.0, 1.0), 2: (0.5,)})
        patch.setattr(rank_drafts, "AUTO_MEASURED", (0.5,))
        return list(measure(setup, 2, 20, auto_steps=12))


def test_drafts_hold_as_often_as_they_are_forced_to(rows: list[dict[str, Any]]) -> None:
    """And each row of a request misses its share."""
    plain, none, one, two, auto = rows
    assert [row["mode"] for row in rows] == ["plain", "drafts", "drafts", "drafts", "auto"]
    assert [row["drafts"] for row in rows[:4]] == [0, 0, 1, 2]
    for row in (plain, none):
        assert row["chances"]["0.00"]["tokens_per_step"] == 1
        assert row["misses"] == pytest.approx(FRESH, abs=0.2)
    assert one["chances"]["0.00"]["tokens_per_step"] == 1
    assert one["chances"]["1.00"]["tokens_per_step"] == 2
    assert two["chances"]["0.50"]["tokens_per_step"] == pytest.approx(tokens_of(2, 0.5), abs=0.4)
    assert two["misses"] == pytest.approx(FRESH * tokens_of(2, 0.5), abs=0.8)
    assert 0 <= auto["drafts"] <= 4
    assert (plain["step_x1"], plain["chances"]["0.00"]["x1"]) == pytest.approx((1, 1))
    assert one["links_ms"] > plain["links_ms"]


def small(setup: Setup, pages: int, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """The same with a host pool of `pages`. A request of it takes 4."""
    monkeypatch.setattr(decode, "TOKENS_AHEAD", 128)
    return replace(setup, pool=setup.pool[:pages])


def test_requests_share_pages_of_a_pool_that_is_too_small(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them run, and the row says how much the pool has of what they want."""
    row, _ = plain_row(small(setup, 9, monkeypatch), 4, 4)
    assert row["distinct_gib"] / row["wanted_gib"] == pytest.approx(9 / 16)
    assert row["steps"] == 4


def test_a_pool_below_one_request_ends_the_benchmark(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"needs 4 host pages, and the pool has 3: raise --pool-gib"):
        plain_row(small(setup, 3, monkeypatch), 1, 4)


def test_a_fault_ends_the_benchmark_with_its_message(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "drawn_pages", lambda _held, requests, each: torch.zeros(requests, each).int())
    monkeypatch.setattr(decode, "TURNS_MAX", 100)
    with pytest.raises(SystemExit, match=r"a request faulted: host_pages=\[0, 0, 0, 0\]: must be distinct ids below 9"):
        plain_row(small(setup, 9, monkeypatch), 2, 4)


def test_no_request_has_a_page_twice() -> None:
    drawn = decode.drawn_pages(10, 7, 8)
    assert all(len(set(row)) == 8 for row in drawn.tolist())
    assert torch.equal(drawn.flatten().bincount(minlength=10).clamp(5, 6), drawn.flatten().bincount(minlength=10))


def test_rows_are_shown(rows: list[dict[str, Any]]) -> None:
    machine = {"command": "c", "gpu": "g", "driver_pcie": "d", "torch": "t"}
    setting = {"weights_bytes": {}, "layers": 4, "context": 128, "hot_slots": 64, "overlap": 0.9}
    listed = {"parts_ms": dict.fromkeys(rank_report.PARTS, 2.0)}
    rows = [row | (listed if number in (0, 2) else {}) for number, row in enumerate(rows)]
    auto = [{"batch": 2, "chance": 0.5, "x1": 1.25}]
    shown = rank_report.drafts({"machine": machine, "setting": setting, "rows": rows, "auto": auto})
    assert shown.count("\n| 2 ") == sum(len(row["chances"]) for row in rows) + 2 + 1
    assert "2.0 (1.00 ×)" in shown
    assert "1.250 ×" in shown
    assert "0 of 0 GiB" in shown
    assert all("batch   2" in rank_report.drafts_line(row) for row in rows)


def timed(drafts: int, seconds: float, mode: str = "drafts") -> dict[str, Any]:
    return {"batch": 4, "mode": mode, "drafts": drafts, "seconds": [seconds, seconds * 1.02], "links_ms": 0.0}


def test_auto_follows_measured_times() -> None:
    """Where drafts cost nothing it gives nearly as many tokens as four would; where none pays, nearly plain's."""
    cheap = [timed(0, 1.0, "plain"), *(timed(drafts, 1.0) for drafts in range(5))]
    dear = [timed(0, 1.0, "plain"), *(timed(drafts, 1.0 + drafts) for drafts in range(5))]
    assert auto_over_plain(cheap[:-1], 4, 0.9) is None, "four drafts were not measured"
    found = auto_over_plain(cheap, 4, 0.9)
    assert found is not None
    assert 0.9 * tokens_of(4, 0.9) < found <= 1.02 * tokens_of(4, 0.9)
    found = auto_over_plain(dear, 4, 0.5)
    assert found is not None
    assert 0.98 <= found <= 1.01


def test_links_count_each_launch_of_the_draft_layer(setup: Setup) -> None:
    links, plain = Links(setup.of), rank_drafts.links_ms(setup, 4, 0)
    assert plain == links.step_ms(setup.config, 4)
    each = links.step_ms(setup.config, 12) + links.mixture_ms(setup.config, 12) + links.mixture_ms(setup.config, 4)
    assert rank_drafts.links_ms(setup, 4, 2) == pytest.approx(each)


def test_rows_select_what_their_positions_do() -> None:
    selections = decode.Selections(3, requests=2, context=64, k=8, overlap=0.75, device="cpu")
    batch = StepBatch.allocate(4, 3, "cpu", seat_rows=2)
    batch.lengths.copy_(torch.tensor([10, 20, 11, 21]))
    chosen = torch.zeros(3, 4, 8, dtype=torch.int32)
    for group in range(3):
        selections(group, batch, chosen[group])
    for group in range(3):
        first, other, second, _ = (set(row.tolist()) for row in chosen[group])
        assert len(first & second) == 6
        assert len(first) == 8
        assert first != other
    batch.lengths.copy_(torch.tensor([11, 21, 12, 22]))
    selections(0, batch, again := torch.zeros(4, 8, dtype=torch.int32))
    assert torch.equal(again[:2], chosen[0, 2:]), "of any row at that position"

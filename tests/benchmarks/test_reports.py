"""Plots and tables that are made of results of benchmarks, and what RESULTS.md quotes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import ratios, report, swap_in_cells
from benchmarks.plots import Row, Series, marks
from benchmarks.swap_in_cells import OVERLAPPED, peers, verdict, verdicts
from benchmarks.tables import Column, micros, over, scaled, table

SVG = "{http://www.w3.org/2000/svg}"
ONE, OTHER = Series("ours <&>", "#000", "dot"), Series("theirs", "#f00", "ring")


def cell(us: float, misses: int = 20, row_bytes: int = 656) -> dict[str, Any]:
    return {
        "row_bytes": row_bytes,
        "hot_slots": 4096,
        "batch": 1,
        "misses": misses,
        "blocks": 16,
        **dict.fromkeys(("us", "us_min", "us_max"), us),
        **dict.fromkeys(("copy_only_us", "resolve_us", "null_us", "floor_us", "gb_per_s", "cold_us"), 1.0),
        **peers(row_bytes, 4096, 1, misses),
    }


def test_plot_marks_every_value_and_skips_missing_ones() -> None:
    rows = [Row("a & b", {"ours <&>": 1.5, "theirs": 700.0}), Row("c", {"ours <&>": 30.0})]
    root = ElementTree.fromstring(marks("title", "us", [ONE, OTHER], rows))
    dots = [float(c.attrib["cx"]) for c in root.findall(f"{SVG}circle") if float(c.attrib["cy"]) > 48]
    assert len(dots) == 3
    assert dots[0] < dots[2] < dots[1], "larger values lie further right"
    width = float(root.attrib["width"])
    assert all(0 < x < width for x in dots)
    assert "a & b" in [text.text for text in root.findall(f"{SVG}text")]


def test_axes_are_logarithmic() -> None:
    rows = [Row("", {"ours <&>": value}) for value in (1.0, 10.0, 100.0)]
    root = ElementTree.fromstring(marks("", "", [ONE], rows))
    x = [float(c.attrib["cx"]) for c in root.findall(f"{SVG}circle") if float(c.attrib["cy"]) > 48]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)


def both_ways(us: float, overlapped: float) -> dict[str, Any]:
    return {**cell(us), **dict.fromkeys((f"{OVERLAPPED}us{end}" for end in ("", "_min", "_max")), overlapped)}


@pytest.mark.parametrize(("us", "said"), [(5.6, "met"), (5.8, "over"), (17.0, "slower")])
def test_cell_names_the_target_that_was_missed(us: float, said: str) -> None:
    assert verdict(cell(us)) == said


@pytest.mark.parametrize(
    ("us", "overlapped", "said"),
    [
        (5.6, 5.0, "met"),
        (5.8, 5.6, "met*"),
        (17.0, 5.6, "met*"),
        (5.8, 5.8, "over"),
        (17.0, 5.8, "slower, over*"),
        (5.6, 5.8, "met, over*"),
        (17.0, 17.0, "slower"),
    ],
)
def test_star_marks_overlapped_launches(us: float, overlapped: float, said: str) -> None:
    row = both_ways(us, overlapped)
    assert verdicts(row) == said


def test_a_cell_without_peers_claims_nothing() -> None:
    assert verdict(cell(5.0, row_bytes=640)) == verdicts(cell(5.0, row_bytes=640)) == ""


def test_cell_holds_one_figure_its_spread_and_one_limit() -> None:
    row = {"rate": 0.5178, "low": 0.5, "high": 0.53, "plain": 0.55, "n": 12_345}
    assert Column("", "rate", ".2f").cell(row) == "0.52"
    assert Column("", "rate", ".2f", spread=("low", "high")).cell(row) == "0.52 (0.50–0.53)"
    assert Column("", scaled("rate", 1e3), ",.0f", limit=scaled("plain", 1e3)).cell(row) == "518 of 550"
    assert Column("", over("rate", "plain"), ".0%").cell(row) == "94%"
    assert Column("", "missing", ".2f", limit="plain").cell(row) == ""


def test_table_leaves_out_columns_without_figures() -> None:
    columns = Column("n", "n", ","), Column("never", "never"), Column("some", "some", ".1f", "ms")
    assert table(columns, [{"n": 1_000}, {"n": 0, "some": 0.0}]) == (
        "| n | some, ms |\n| --- | --- |\n| 1,000 |  |\n| 0 | 0.0 |\n"
    )


def test_mean_is_shown_where_median_differs() -> None:
    def cells(row: dict[str, float], way: str = "") -> list[str]:
        return [column.cell(row) for column in micros("", way)]

    row = {"us": 10.0, "us_min": 9.0, "us_max": 12.0}
    assert cells(row) == cells({**row, "mean_us": 10.4}) == ["10.0 (9.0–12.0)", ""]
    assert cells({**row, "mean_us": 10.6}) == ["10.0 (9.0–12.0)", "10.6"]
    assert cells({**row, "mean_us": 9.4}) == ["10.0 (9.0–12.0)", "9.4"]
    assert cells(row, OVERLAPPED) == ["", ""]


def swap_in_table(rows: list[dict[str, Any]]) -> str:
    machine = dict.fromkeys(("command", "gpu", "driver_pcie", "torch", "python"), "x")
    return report.part_text(report.SWAP_IN, {"machine": machine, "pool_gib": 1, "rows": rows})


def test_a_table_counts_every_cell_with_figures() -> None:
    text = swap_in_table([cell(5.6), cell(5.8), cell(17.0), cell(5.0, row_bytes=640)])
    counts = "1 meet both conditions, 1 are over the target only, 1 are slower than SGLang"
    assert f"Of 3 cells with figures to compare with, {counts}: launches that do not overlap." in text
    assert "Launches that overlap were not measured." in text
    assert text.count("\n| 656") + text.count("\n| 640") == 4


def test_table_labels_both_counts() -> None:
    text = swap_in_table([both_ways(5.8, 5.6), both_ways(5.8, 5.8), both_ways(17.0, 5.6)])
    assert "0 meet both conditions, 2 are over the target only, 1 are slower than SGLang: launches that do not" in text
    counts = "2 meet both conditions, 1 are over the target only, 0 are slower than SGLang"
    assert f"Of launches that overlap, each let begin while the one before is at work, {counts};" in text
    head, rule, first = text[text.index("| row, B") :].splitlines()[:3]
    assert head.count("|") == rule.count("|") == first.count("|")


def test_large_pool_has_columns_once_it_was_measured() -> None:
    cells = [{**cell(5.6), "large_us": 12.3, "large_copy_only_us": 11.4}, cell(5.8)]
    assert "| large pool |" not in swap_in_table([cell(5.6)])
    lines = swap_in_table(cells).split("| row, B")[1].splitlines()[:4]
    assert lines[2].endswith("| 12.3 | 11.4 | met |")
    assert lines[3].endswith("|  |  | over |")


def test_swap_in_is_drawn_both_ways_where_both_were_measured() -> None:
    assert "overlapped" not in swap_in_cells.plot([cell(5.6)])
    assert ">overlapped<" in swap_in_cells.plot([cell(5.6), both_ways(5.8, 5.6)])


def decode_row(mode: str, concurrency: int, tokens_per_s: float) -> dict[str, Any]:
    times = dict.fromkeys(("step_ms", "itl_p50_ms", "itl_p99_ms"), 5.0)
    what = {"context": 32_768, "mode": mode, "concurrency": concurrency, "overlap": 0.99}
    parts = dict.fromkeys(ratios.PARTS, 1.0)
    return {**what, **times, "tokens_per_s": tokens_per_s, "hit_rate": 0.99, "parts_ms": parts}


def test_decode_tables_compare_most_requests_per_mode() -> None:
    rows = [
        *(decode_row(mode, 1, 200.0) for mode in ("plain", "resident", "hisparse")),
        decode_row("resident", 16, 2_000.0),
        decode_row("hisparse", 48, 5_000.0),
        decode_row("uncopied", 48, 5_500.0),
    ]
    (found,) = ratios.ratios(rows)
    assert (found["context"], found["overlap"], found["ratio"], found["capacity"]) == (32_768, 0.99, 2.5, 3.0)
    assert (found["resident"]["concurrency"], found["ours"]["concurrency"]) == (16, 48)
    assert found["of_uncopied"] == pytest.approx(0.909, abs=0.001)
    one = {"context": 32_768, "plain": 200.0, "resident": 200.0, "ours": 200.0, "resident_of": 1.0, "ours_of": 1.0}
    assert list(ratios.alone(rows)) == [one]
    assert list(ratios.alone(rows[3:])) == []
    assert ElementTree.fromstring(ratios.plot(rows)).tag == f"{SVG}svg"


def test_ratio_needs_the_most_requests_that_fit() -> None:
    """An overlap that was measured with fewer requests than fit has no ratio."""
    fewer = {**decode_row("hisparse", 16, 2_000.0), "overlap": 0.93}
    rows = [decode_row("resident", 16, 2_000.0), decode_row("hisparse", 48, 5_000.0), fewer]
    assert [found["overlap"] for found in ratios.ratios(rows)] == [0.99]


def test_slab_takes_room_of_both_modes() -> None:
    setting = {"kv_budget_bytes": 1_000_000, "row_bytes": 10, "layers": 2}
    rows = [
        {"context": 6_400, "mode": "resident", "concurrency": 5, "kv_bytes": 1_000_000},
        {"context": 6_400, "mode": "hisparse", "concurrency": 20, "kv_bytes": 1_000_000},
    ]
    # 6,400 rows of 10 bytes in 2 layers: 128,000 bytes
    (found,) = ratios.beside_slab({"setting": setting, "rows": rows})
    assert found == {"context": 6_400, "slab_bytes": 128_000, "resident": 4, "ours": 17, "capacity": 4.25}
    assert list(ratios.beside_slab({"setting": setting, "rows": rows[:1]})) == []


def test_idle_time_of_a_step_is_what_its_kernels_leave() -> None:
    """Of the step as it was timed without a profiler, whose own time is in the steps that it watches."""
    row = decode_row("hisparse", 48, 5_000.0) | {"step_ms": 6.5}
    assert ratios.idle_ms(row) == 0.5, "without `busy`: the sum over kinds"
    row["parts_ms"] |= {"busy": 5.25, "idle": 9.0}
    assert ratios.idle_ms(row) == 1.25
    row["parts_ms"]["busy"] = 7.0
    assert ratios.idle_ms(row) == 0.0


def test_largest_of_few_steps_is_no_percentile() -> None:
    rows = [{**decode_row(mode, 16, 2_000.0), "itl_p99_ms": 6.0} for mode in ("resident", "hisparse", "uncopied")]
    few = table(report.BETWEEN_TOKENS.columns, report.BETWEEN_TOKENS.rows({"rows": rows}))
    assert "| 32,768 | 0.99 | hisparse | 16 | 5.00 | 6.00 | 40 |" in few
    assert "largest, ms | of steps" in few
    many = [{**row, "steps": 400} for row in rows]
    assert "p99, ms |\n" in table(report.BETWEEN_TOKENS.columns, report.BETWEEN_TOKENS.rows({"rows": many}))


def test_transfers_are_compared_with_the_limit_of_their_round() -> None:
    rounds = [
        {"memcpy": {"gbps": 8.0}, "tcp": {"gbps": tcp, "cpu_s_per_gb": 0.5}, "nixl": {"gbps": 1.0, "cpu_s_per_gb": 1.0}}
        for tcp in (1.0, 2.0, 4.0)
    ]
    machine = {"cores": 2, "load": [1.0, 1.0, 1.0]}
    result = {"rounds": rounds, "machine": machine, "pages": 3, "page_bytes": 7, "between": "loopback"}
    text = report.part_text(report.TRANSFER, result)
    assert "| nixl | 1.00 | 50% | tcp | 1.00 |" in text
    assert "| tcp | 2.00 |  |  | 0.50 |" in text


def test_worker_copies_are_compared_with_plain_copies() -> None:
    limits = {"cuda:0": {"to_host": 50.0, "to_device": 40.0}, "cuda:1": {"to_host": 40.0, "to_device": 50.0}}
    row = {"gb_per_s": {"stage": 25.0, "preload": 50.0, "receive": 7.0}}
    (found,) = report.first_tokens({"rows": [row], "plain_copies": limits})
    assert (found["stage_share"], found["preload_share"], found["receive"]) == (0.5, 1.0, 7.0)
    assert "receive_share" not in found


# ---------------------------------------------------------------- TABLES.md and RESULTS.md


def test_tables_are_up_to_date() -> None:
    assert report.TABLES.read_text() == report.text(), "run: python -m benchmarks.report"


def test_plots_are_up_to_date() -> None:
    for path, drawn in report.plots():
        assert path.read_text() == drawn, f"{path.name}: run: python -m benchmarks.report"


def test_every_result_has_a_table() -> None:
    shown = {name for section in report.SECTIONS for name in section.parts}
    in_pages = {"serve-H200.json"}  # docs/performance.md; test_serve.py compares the two
    assert shown | in_pages == {path.name for path in report.RESULTS.glob("*.json")}


def test_each_run_on_a_gpu_names_its_commit_and_card() -> None:
    found = report.result("gpu-runs.json")
    assert [
        row for row in found["rows"] if set(row) != {"what", "result", "commit", "card"} or not all(row.values())
    ] == []
    assert [row for row in found["not_run"] if not {"what"} <= set(row) <= {"what", "why"}] == []


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = report.result(name)["rows"]
    return rows


def find_cell(cells: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return next(it for it in cells if wanted.items() <= it.items())


def product_figures() -> Iterator[str]:
    """Rows of RESULTS.md on block-FP8 products."""
    rows = rows_of("block_fp8-H200.json")
    experts = {it["tokens"]: it for it in rows if it["part"] == "experts"}
    times, shares = ([experts[tokens][name] for tokens in (64, 128, 256, 512)] for name in ("us", "times_memory"))
    yield f"64 to 256 tokens of the group | {min(times):.0f} to {max(times[:3]):.0f} µs"
    yield f"experts, 512 tokens | {times[3]:.0f} µs"
    yield f"times the bytes at the copy rate | {min(shares):.2f} to {max(shares):.2f} | 1.25"
    o = {it["tokens"]: it["us"] for it in rows if it.get("name") == "o"}
    yield f"`o` of 7,168 × 16,384, 1 token | {o[1]:.1f} µs"
    yield f"`o`, 64 tokens | {o[64]:.1f} µs"
    yield f"`o`, 512 tokens | {o[512]:.0f} µs"
    large = [it for it in rows if it.get("name") in ("o", "mlp up", "mlp down")]
    for tokens, said in (
        ((1, 16), "up to 16 tokens"),
        *(((count,), f"the same, {count} tokens: missed") for count in (32, 64, 128, 256, 512)),
    ):
        shares = [it["times_floor"] for it in large if it["tokens"] in tokens]
        yield f"{said} | {min(shares):.2f} to {max(shares):.2f} | 1.25"
    shares = [it["w8a8_us"] / it["us"] for it in large if it["tokens"] >= 512]
    yield f"512 to 4,096 tokens | {min(shares):.1f} to {max(shares):.1f}"
    for name in ("q_a, wk, kv_a", "shared gate, up"):
        first = find_cell(rows, name=name, tokens=1)
        yield f"| {first['us']:.1f} µs | floor × {first['times_floor']:.1f} |"


def kernel_figures() -> Iterator[str]:
    """Rows of RESULTS.md on the other kernels."""
    cells = rows_of("swap_in-H200.json")
    yield f"figure, two runs | {sum(verdict(it) == 'met' for it in cells)} | {len(cells)}"
    yield f"launches that overlap | {sum(verdict(it, OVERLAPPED) == 'met' for it in cells)} | {len(cells)}"
    few = find_cell(cells, row_bytes=656, hot_slots=4096, batch=1, misses=20)
    many = find_cell(cells, row_bytes=656, hot_slots=4096, batch=128, misses=410)
    yield f"batch 1, 20 misses | {few['us']:.1f} µs | SGLang {few['sglang_us']:.1f} µs"
    yield f"batch 128, 410 misses | {many['us']:.0f} µs | SGLang {many['sglang_us']:.0f} µs"
    yield f"410 misses, of the link | {many['floor_us'] / many['us']:.0%}".replace("%", " %")
    for kind, name in (("bfloat16", "bfloat16"), ("fp8", "fp8")):
        index = find_cell(rows_of("index_topk-H200.json"), kind=kind, context=131_072, batch=64)
        yield f"131,072 tokens × 64, {name} | {index['us']:.0f} µs"
        yield f"of the copy rate | {100 * index['scores_share_of_floor']:.0f} %"
        attention = find_cell(rows_of("attention-H200.json"), kind=kind, phase="decode", batch=64)
        yield f"64 requests, {name} | {attention['us']:.1f} µs | products {100 * attention['share_of_floor']:.0f} %"
    yield from product_figures()


def decode_figures() -> Iterator[str]:
    """Rows of RESULTS.md on decode, one rank of eight and moving contexts."""
    found = {(it["context"], it["overlap"]): it for it in ratios.ratios(rows_of("decode-beside-H200.json"))}
    for context, overlap in product((32_768, 131_072), (0.99, 0.93, 0.87)):
        cell = found[context, overlap]
        named = f"{context // 1024}k, hits {100 * overlap:.0f} %"
        yield f"{named} | {cell['ratio']:.2f} ×"
        missed = ": missed" if overlap == 0.99 else ""
        yield f"{named}, of copies skipped{missed} | {100 * cell['of_uncopied']:.0f} %"
    yield f"a worker has a hot floor | {found[8_192, 0.8]['ratio']:.2f} ×"
    rows = rows_of("rank-H200.json")
    row = find_cell(rows, mode="hisparse", concurrency=64, overlap=0.99)
    yield f"hits 99 %, a step | {row['step_ms']:.1f} ms | floors {row['floor_ms']:.1f} ms"
    yield f"its links, computed | {row['link_ms']:.1f} ms"
    yield f"over its floors | {row['step_ms'] / row['floor_ms']:.2f} ×"
    yield f"hits 99 % | {row['rank_tokens_per_s']:,.0f} |"
    most, resident = (
        {it["overlap"]: it["rank_tokens_per_s"] for it in rows if it["concurrency"] == n} for n in (80, 21)
    )
    for overlap in (0.99, 0.93, 0.87):
        yield f"hits {100 * overlap:.0f} %, over 21 resident | {most[overlap] / max(resident.values()):.2f} ×"
    long = rows_of("resume-H200.json")[1]
    resumed, prefilled = (1e3 * long[name] for name in ("managed_resumed_s", "managed_first_token_s"))
    yield f"32k, 8 layers | {resumed:.1f} ms | prefill {prefilled:,.0f} ms"


def takeover_figures() -> Iterator[str]:
    """Rows of RESULTS.md on takeovers by a standby."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for machine in ("H200", "cpu"):
        for row in rows_of(f"takeover-{machine}.json"):
            cells.setdefault(f"{row['cell']}-{machine}", []).append(row)
    last, first = (sorted(row[name] for row in cells["standby-kill-H200"]) for name in ("last_ms", "first_ms"))
    assert len(last) == 2
    yield f"last stream, two kills | {last[0]:,.0f} to {last[1]:,.0f} ms | 2,000 ms"
    yield f"the same, first stream | {first[0]:,.0f} to {first[1]:,.0f} ms | 2,000 ms"
    (stop,) = cells["standby-stop-H200"]
    yield f"last stream, one stop | {stop['last_ms']:,.0f} ms"
    tiny, plain = (sorted(row["last_ms"] for row in cells[f"{name}-cpu"]) for name in ("standby-kill", "start-kill"))
    assert len(tiny) == 3
    took = f"last stream, three kills | {tiny[0]:,.0f} to {tiny[-1]:,.0f} ms"
    yield f"{took} | plain start {plain[0] / 1e3:.0f} to {plain[-1] / 1e3:.0f} s"


def results_page() -> str:
    return (report.PLACE / "RESULTS.md").read_text()


def test_verdicts_quote_their_results() -> None:
    said = [*kernel_figures(), *decode_figures(), *takeover_figures()]
    assert [it for it in said if it not in results_page()] == []


def test_cells_of_verdicts_are_short() -> None:
    """One figure and one limit a row; what needs more words is in NOTES.md."""
    rows = [re.sub(r"\]\([^)]*\)", "]", line) for line in results_page().splitlines() if line.startswith("| ")]
    assert len(rows) > 100
    for row in rows:
        what, figure, limit = (cell.strip() for cell in row.strip("|").split("|"))
        assert len(what) <= 110, row
        assert max(len(figure), len(limit)) <= 30, row


def test_restored_prefix_is_shown_with_its_ties() -> None:
    found = json.loads((report.RESULTS / "prefix-H200.json").read_text())
    counts = {"compared_tokens": 48, "mismatched_tokens": 0, "tied_tokens": 6, "tie_bound": 0.2}
    found["result"] |= counts | {"logprob_change_max": 0.0459, "same_passes_prefix_tokens": 73_728}
    found["result"] |= {"same_passes_compared_tokens": 48, "same_passes_mismatched_tokens": 1}
    text = report.part_text(report.RESTORED, found)
    assert "| tokens that differ from the whole prefill's | 0 of 48 |" in text
    assert "| tokens that follow a tie of less than 0.2 | 6 of 48 |" in text
    assert "| largest change of a log-probability | 0.046 |" in text
    assert re.search(r"\| tokens that differ behind 73,728 tokens, .* \| 1 of 48 \|", text)

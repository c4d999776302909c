"""What benchmarks write: plots that any browser can read, tables that say what is met and what is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import (
    decode_report,
    hot_floor_report,
    node_report,
    overlap_report,
    place_report,
    report,
    swap_in_report,
    transfer_report,
)
from benchmarks.plots import Row, Series, marks
from benchmarks.swap_in_cells import OVERLAPPED, peers, spread, verdict, verdicts

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
    assert swap_in_report.line(cell(us)).endswith(f"| {said} |\n")


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
    assert swap_in_report.line(row).endswith(f"| {said} |\n")


def test_a_cell_without_peers_claims_nothing() -> None:
    assert verdict(cell(5.0, row_bytes=640)) == verdicts(cell(5.0, row_bytes=640)) == ""


def test_mean_is_shown_where_median_differs() -> None:
    row = {"us": 10.0, "us_min": 9.0, "us_max": 12.0}
    assert spread(row) == spread({**row, "mean_us": 10.4}) == "10.0 (9.0–12.0)"
    assert spread({**row, "mean_us": 10.6}) == "10.0 (9.0–12.0), mean 10.6"
    assert spread({**row, "mean_us": 9.4}) == "10.0 (9.0–12.0), mean 9.4"
    assert spread(row, OVERLAPPED) == ""


def swap_in_table(rows: list[dict[str, Any]]) -> str:
    machine = dict.fromkeys(("command", "gpu", "driver_pcie", "torch", "python"), "x")
    return swap_in_report.section({"machine": machine, "pool_gib": 1, "rows": rows})


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
    head, rule, first = text[text.index("| row B") :].splitlines()[:3]
    assert head.count("|") == rule.count("|") == first.count("|")


def test_large_pool_has_columns_once_it_was_measured() -> None:
    machine = dict.fromkeys(("command", "gpu", "driver_pcie", "torch", "python"), "x")
    cells = [{**cell(5.6), "large_us": 12.3, "large_copy_only_us": 11.4}, cell(5.8)]
    result = {"machine": machine, "pool_gib": 1, "rows": cells}
    assert "large pool" not in swap_in_report.section(result)
    text = swap_in_report.section(result | {"large": {"machine": machine, "pool_gib": 64}})
    lines = text[text.index("| row B") :].splitlines()[:4]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].endswith("| 12.3 | 11.4 | met |")
    assert lines[3].endswith("| | | over |")
    assert "Large pool: 64 GiB" in text


def test_layouts_are_judged_by_large_pools_alone() -> None:
    rows = [
        {"pool_gib": pool, "layout": layout, "of_page": gain}
        for pool, layout, gain in ((1, "layer", 2.0), (12, "layer", 1.31), (12, "run", 2.0), (64, "layer", 1.29))
    ]
    assert place_report.verdict(rows).endswith("in 1 of 2 cells.")


def test_forms_of_a_step_are_compared_cell_by_cell() -> None:
    runs = {
        form: {
            "machine": dict.fromkeys(("command", "gpu", "driver_pcie", "torch", "python"), "x"),
            "setting": {"layers": 8},
            "rows": [{**decode_row("hisparse", 58, tokens), "step_ms": ms}, decode_row("uncopied", 58, 1000.0)],
        }
        for form, tokens, ms in (("in line", 900.0, 6.0), ("beside", 950.0, 5.7))
    }
    table = overlap_report.section({"runs": runs})
    assert "| 58 | 0.99 | 6.000 | 5.700 | -5.0% | 1.00 | 1.00 | 1.00 | 1.00 | 90.0% | 95.0% |" in table


def test_swap_in_is_drawn_both_ways_where_both_were_measured() -> None:
    assert "overlapped" not in swap_in_report.plot([cell(5.6)])
    assert ">overlapped<" in swap_in_report.plot([cell(5.6), both_ways(5.8, 5.6)])


def decode_row(mode: str, concurrency: int, tokens_per_s: float) -> dict[str, Any]:
    times = dict.fromkeys(("step_ms", "itl_p50_ms", "itl_p99_ms"), 5.0)
    what = {"context": 32_768, "mode": mode, "concurrency": concurrency, "overlap": 0.99}
    parts = dict.fromkeys(decode_report.PARTS, 1.0)
    return {**what, **times, "tokens_per_s": tokens_per_s, "hit_rate": 0.99, "parts_ms": parts}


def test_decode_tables_compare_most_requests_per_mode() -> None:
    rows = [
        *(decode_row(mode, 1, 200.0) for mode in ("plain", "resident", "hisparse")),
        decode_row("resident", 16, 2_000.0),
        decode_row("hisparse", 48, 5_000.0),
        decode_row("uncopied", 48, 5_500.0),
    ]
    row = decode_report.ratio(rows, 32_768, 0.99)
    assert row is not None
    assert row[:8] == ("32,768", "0.99", "16: 2,000 tok/s", "48: 5,000 tok/s", "**2.50**", "3.00", "0.990", "91%")
    assert decode_report.ratio(rows, 32_768, 0.80) is None
    assert decode_report.alone(rows, 32_768) == ("32,768", "200.0", "200.0", "1.00", "200.0", "1.00")
    assert decode_report.alone(rows, 8_192) is None
    assert ElementTree.fromstring(decode_report.plot(rows)).tag == f"{SVG}svg"


def test_slab_takes_room_of_both_modes() -> None:
    setting = {"kv_budget_bytes": 1_000_000, "row_bytes": 10, "layers": 2}
    rows = [
        {"context": 6_400, "mode": "resident", "concurrency": 5, "kv_bytes": 1_000_000},
        {"context": 6_400, "mode": "hisparse", "concurrency": 20, "kv_bytes": 1_000_000},
    ]
    # 6,400 rows of 10 bytes in 2 layers: 128,000 bytes
    told = decode_report.beside_slab({"setting": setting, "rows": rows}, 6_400)
    assert told == ("6,400", "0.00", "4", "17", "4.25")
    assert decode_report.beside_slab({"setting": setting, "rows": rows[:1]}, 6_400) is None


def test_idle_time_of_a_step_is_what_its_kernels_leave() -> None:
    """Of the step as it was timed without a profiler, whose own time is in the steps that it watches."""
    row = decode_row("hisparse", 48, 5_000.0) | {"step_ms": 6.5}
    assert decode_report.parts(row)[-1] == "0.50", "without `busy`: the sum over kinds"
    row["parts_ms"] |= {"busy": 5.25, "idle": 9.0}
    assert decode_report.parts(row)[-1] == "1.25"
    row["parts_ms"]["busy"] = 7.0
    assert decode_report.parts(row)[-1] == "0.00"


def test_largest_of_few_steps_is_no_percentile() -> None:
    row = {"itl_p50_ms": 5.0, "itl_p99_ms": 6.0}
    assert decode_report.between_tokens(row) == "5.00, most of 40 6.00"
    assert decode_report.between_tokens(row | {"steps": 400}) == "5.00, 6.00"


def test_transfers_are_compared_with_the_limit_of_their_round() -> None:
    rounds = [
        {"memcpy": {"gbps": 8.0}, "tcp": {"gbps": tcp, "cpu_s_per_gb": 0.5}, "nixl": {"gbps": 1.0, "cpu_s_per_gb": 1.0}}
        for tcp in (1.0, 2.0, 4.0)
    ]
    machine = {"cores": 2, "load": [1.0, 1.0, 1.0]}
    result = {"rounds": rounds, "machine": machine, "pages": 3, "page_bytes": 7, "between": "loopback"}
    text = transfer_report.transfer(result)
    assert "| nixl | 1.00 | 50% of tcp | 1.00 |" in text
    assert "| tcp | 2.00 |  | 0.50 |" in text


def test_worker_copies_are_compared_with_plain_copies() -> None:
    limits = {"cuda:0": {"to_host": 50.0, "to_device": 40.0}, "cuda:1": {"to_host": 40.0, "to_device": 50.0}}
    row = {"gb_per_s": {"stage": 25.0, "preload": 50.0, "receive": 7.0}}
    assert list(transfer_report.rates(row, limits)) == ["stage 25.0 (50%)", "preload 50.0 (100%)", "receive 7.0"]


def test_two_gpu_copies_are_compared_alone_and_at_once() -> None:
    rates = {"stage": 40.0, "load": 30.0, "stage + load": 60.0}
    rates |= {"plain_to_host": 50.0, "plain_to_device": 60.0, "plain_to_host + plain_to_device": 100.0}
    text = transfer_report.links({"gb_per_s": rates, "devices": ["x", "y"], "pages": 2, "page_bytes": 10**9})
    assert "x and y, one host pool, 2.0 GB of 2 pages" in text
    assert "| stage | 40.0 | 50.0 | 80% |\n| load | 30.0 | 60.0 | 50% |\n| stage + load | 60.0 | 100.0 | 60% |" in text


# ---------------------------------------------------------------- TABLES.md and RESULTS.md


def test_tables_are_up_to_date() -> None:
    assert report.TABLES.read_text() == report.text(), "run: python -m benchmarks.report"


def test_plots_are_up_to_date() -> None:
    for path, drawn in report.plots():
        assert path.read_text() == drawn, f"{path.name}: run: python -m benchmarks.report"


def test_every_result_has_a_table() -> None:
    shown = {name for section in report.SECTIONS if report.is_measured(section) for name in section.parts}
    assert shown == {path.name for path in report.RESULTS.glob("*.json")}


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = report.result(name)["rows"]
    return rows


def find_cell(cells: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return next(it for it in cells if wanted.items() <= it.items())


def product_figures() -> Iterator[str]:
    """What RESULTS.md says of block-FP8 products."""
    rows = rows_of("block_fp8-H200.json")
    experts = {it["tokens"]: it for it in rows if it["part"] == "experts"}
    times, shares = ([experts[tokens][name] for tokens in (64, 128, 256, 512)] for name in ("us", "times_memory"))
    yield f"64 to 256 tokens of the group: {min(times):.0f} to {max(times[:3]):.0f} µs, 512 tokens {times[3]:.0f}"
    yield f"experts {min(shares):.2f} to {max(shares):.2f} × the bytes"
    o = {it["tokens"]: it["us"] for it in rows if it.get("name") == "o"}
    yield f"1 token {o[1]:.1f} µs, 64 tokens {o[64]:.1f}, 512 tokens {o[512]:.0f}"
    large = [it for it in rows if it.get("name") in ("o", "mlp up", "mlp down")]
    for tokens, said in (
        ((1, 16), "up to 16 tokens"),
        *(((count,), f"at {count}") for count in (32, 64, 128, 256, 512)),
    ):
        shares = [it["times_floor"] for it in large if it["tokens"] in tokens]
        yield f"{min(shares):.2f} to {max(shares):.2f} {said}"
    shares = [it["w8a8_us"] / it["us"] for it in large if it["tokens"] >= 512]
    yield f"w8a8 takes {min(shares):.1f} to {max(shares):.1f} of the time"
    first, shared = (find_cell(rows, name=name, tokens=1) for name in ("q_a, wk, kv_a", "shared gate, up"))
    yield f"`q_a, wk, kv_a` in one launch {first['us']:.1f} µs, {first['times_floor']:.1f} ×"
    yield f"`shared gate, up` {shared['us']:.1f} µs, {shared['times_floor']:.1f} ×"


def verdict_figures() -> Iterator[str]:
    """What RESULTS.md says in words, from the results."""
    cells = rows_of("swap_in-H200.json")
    yield f"{sum(verdict(it) == 'met' for it in cells)} of {len(cells)} cells meet both"
    yield f"{sum(verdict(it, OVERLAPPED) == 'met' for it in cells)} when launches overlap"
    few = find_cell(cells, row_bytes=656, hot_slots=4096, batch=1, misses=20)
    many = find_cell(cells, row_bytes=656, hot_slots=4096, batch=128, misses=410)
    yield f"20 misses {few['us']:.1f} µs; batch 128, 410 misses {many['us']:.0f} µs"
    yield f"{many['floor_us'] / many['us']:.0%} at batch 128".replace("%", " %")
    rows = rows_of("decode-beside-H200.json")
    ratios, shares = [], []
    for context, overlap in (*product((32_768, 131_072), (0.99, 0.93, 0.87)), (8_192, 0.8)):
        line = decode_report.ratio(rows, context, overlap)
        assert line is not None
        ratios.append(line[4].strip("*"))
        shares.append(line[7].removesuffix("%"))
    yield "hits 99, 93 and 87 %: {}, {} and {} × everything resident at 32k, {}, {} and {} × at 128k".format(*ratios)
    yield "copies skipped: {}, {} and {} % of it at 32k, {}, {} and {} % at 128k".format(*shares)
    yield f"8k at 80 % hits: {ratios[-1]} ×"
    row = find_cell(rows_of("rank-H200.json"), mode="hisparse", concurrency=64, overlap=0.99)
    yield f"a step of {row['step_ms']:.1f} ms and {row['link_ms']:.1f} of links (computed)"
    yield f"{row['rank_tokens_per_s']:,.0f} tokens/s a GPU"
    most, resident = (
        {it["overlap"]: it["rank_tokens_per_s"] for it in rows_of("rank-H200.json") if it["concurrency"] == n}
        for n in (74, 20)
    )
    shares = [most[overlap] / max(resident.values()) for overlap in (0.99, 0.93, 0.87)]
    yield "74, {:.2f} × of it, at 93 and 87 % hits {:.2f} and {:.2f} ×".format(*shares)
    yield f"{row['floor_ms']:.1f} ms, {row['step_ms'] / row['floor_ms']:.2f} ×"
    floors = hot_floor_report.ratios(rows_of("hot-floor-H200.json"))
    yield "{:.3f}, {:.3f}, {:.3f} and {:.3f} of the better".format(*(it["of_best"] for it in floors))
    drafts = [find_cell(rows_of("rank-drafts-H200.json"), batch=16, drafts=n, mode="drafts") for n in (1, 2, 4)]
    yield "16 requests, 85 % of drafts right: 1, 2 and 4 drafts {:.2f}, {:.2f} and {:.2f} ×".format(
        *(it["chances"]["0.85"]["x1"] for it in drafts)
    )
    chosen = report.result("rank-drafts-H200.json")["auto"]
    yield f"{min(it['x1'] for it in chosen if it['chance'] >= 0.5):.2f} × at least"
    yield "{:.3f}, {:.3f} and {:.3f} ×".format(*(find_cell(chosen, batch=n, chance=0.0)["x1"] for n in (1, 16, 64)))
    long = rows_of("resume-H200.json")[1]
    yield f"32k: {1e3 * long['managed_resumed_s']:.1f} ms, prefill {1e3 * long['managed_first_token_s']:,.0f} ms"
    index = rows_of("index_topk-H200.json")
    yield f"131,072 tokens × 64: {index[11]['us']:.0f} µs bfloat16, {index[23]['us']:.0f} fp8"
    yield from product_figures()
    starts = report.result("warm_start-H200.json")["rows"]
    yield f"{starts['cold']['misses']:,} to {starts['warm']['misses']:,}"


def test_verdicts_quote_their_results() -> None:
    page = (report.PLACE / "RESULTS.md").read_text()
    assert [said for said in verdict_figures() if said not in page] == []


def test_verdicts_fit_one_page() -> None:
    assert len((report.PLACE / "RESULTS.md").read_text().splitlines()) < 80


def test_tokens_behind_a_restored_prefix_are_told_with_their_ties() -> None:
    found = json.loads((report.RESULTS / "prefix-H200.json").read_text())
    counts = {"compared_tokens": 48, "mismatched_tokens": 0, "tied_tokens": 6, "tie_bound": 0.2}
    found["result"] |= counts | {"logprob_change_max": 0.0459, "same_chunks_prefix_tokens": 73_728}
    found["result"] |= {"same_chunks_compared_tokens": 48, "same_chunks_mismatched_tokens": 1}
    told = node_report.prefix_restored(found)
    assert "Of 48 tokens 0 differ from those of the whole prefill, and 6 follow a tie of less than 0.2" in told
    assert "change by 0.046 at most. Behind 73,728 tokens" in told
    assert "1 of 48 differ in any bit." in told

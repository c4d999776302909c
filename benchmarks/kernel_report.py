"""Tables of index_topk, attention over rows and block-FP8 products, from results of their benchmarks. Pure."""

from __future__ import annotations

from typing import Any

from benchmarks.decode_report import table
from benchmarks.swap_in_cells import spread

Result = dict[str, Any]


def index_topk(result: Result) -> str:
    columns = ("keys", "context", "batch", "index_topk", "scores", "selection", "memory", "products", "share", "torch")
    return f"{_run(result)}\n\n{table(columns, map(_index_line, result['rows']))}"


def _index_line(row: Result) -> tuple[str, ...]:
    torch = f"{row['torch_us']:.0f} ({row['torch_topk_us']:.0f})" if "torch_us" in row else ""
    what = row["kind"], f"{row['context']:,}", str(row["batch"]), spread(row)
    parts = (f"{row[name]:.1f}" for name in ("scores_us", "select_us", "memory_us", "mma_us"))
    return *what, *parts, f"{row['scores_share_of_floor']:.0%}", torch


def attention(result: Result) -> str:
    columns = ("rows", "queries", "attend_rows", "memory", "products", "TFLOP/s", "share")
    return f"{_run(result)}\n\n{table(columns, map(_attention_line, result['rows']))}"


def _attention_line(row: Result) -> tuple[str, ...]:
    noun = "prompt tokens" if row["phase"] != "decode" else "request" if row["batch"] == 1 else "requests"
    floors = f"{row['memory_us']:.1f}", f"{row['mma_us']:,.1f}", f"{row['tflop_per_s']:.0f}"
    return row["kind"], f"{row['batch']:,} {noun}", spread(row), *floors, f"{row['share_of_floor']:.0%}"


def block_fp8(result: Result) -> str:
    experts = [_experts_line(row) for row in result["rows"] if row["part"] == "experts"]
    linears = [_linear_line(row) for row in result["rows"] if row["part"] == "linear"]
    of_experts = ("tokens", "assignments", "block_experts", "memory", "products", "x floor", "w8a8", "distance")
    of_linears = ("weight", "tokens", "block_linear", "memory", "products", "x floor")
    of_chunks = ("in the kernel", "by scratch", "bfloat16 weight", "w8a8", "distance")
    return f"{_run(result)}\n\n{table(of_experts, experts)}\n{table((*of_linears, *of_chunks), linears)}"


def _experts_line(row: Result) -> tuple[str, ...]:
    what = f"{row['tokens']:,}", f"{row['assignments']:,} of {row['experts']} experts", spread(row)
    return *what, *_floors(row), f"{row['w8a8_us']:.1f}", f"{row['distance']:.1%}"


def _linear_line(row: Result) -> tuple[str, ...]:
    what = f"{row['name']}, {row['n']:,} × {row['k']:,}", f"{row['tokens']:,}", spread(row)
    ways = (f"{row[name]:.1f}" if name in row else "" for name in ("kernel_us", "scratch_us", "plain_us", "w8a8_us"))
    return *what, *_floors(row), *ways, f"{row['distance']:.1%}" if "distance" in row else ""


def _floors(row: Result) -> tuple[str, ...]:
    return f"{row['memory_us']:.1f}", f"{row['mma_us']:,.1f}", f"{row['times_floor']:.2f}"


def draft_rows(result: Result) -> str:
    at, names = result["machine"], ("begin", "index", "hits", "swap", "attend")
    columns = ("requests", "rows each", "begin_step", "index_topk", "swap_in, hits", "swap_in, misses", "attend_rows")
    driver = at["driver_pcie"].split(",")[0]
    head = f"Command: `{at['command']}`. Machine: {at['gpu']}, driver {driver}, torch {at['torch']}."
    lines = (
        (str(row["batch"]), str(row["seat_rows"]), *(f"{row[f'{n}_us']:.1f} ({row[f'{n}_x1']:.2f} ×)" for n in names))
        for row in result["rows"]
    )
    return f"{head}\n\n{table(columns, lines)}"


def _run(result: Result) -> str:
    at = result["machine"]
    driver = at["driver_pcie"].splitlines()[0].split(",")[0]
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, driver {driver}, torch {at['torch']}, "
        f"Python {at['python']}; copy {at['copy_gb_per_s']:,.0f} GB/s, "
        f"bfloat16 product {at['mma_tflop_per_s']:.0f} TFLOP/s."
    )

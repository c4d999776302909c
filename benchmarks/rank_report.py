"""The tables of one rank of a group, from a result of its benchmark. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.decode_report import table

COLUMNS = (
    *("context", "mode", "requests", "hits", "step, ms", "links, ms", "floor, ms", "of floor", "tokens/s a GPU"),
    "host memory, distinct of wanted",
)


def section(result: Mapping[str, Any]) -> str:
    at, setting, rows = result["machine"], result["setting"], result["rows"]
    rates, weights = setting["rates"], sum(setting["weights_bytes"].values())
    measured = [f"{name}: {ms:.1f}" for row in rows[:1] for name, ms in row["parts_ms"].items()]
    floors = [f"{name} {ms:.1f}" for row in rows[:1] for name, ms in row["floor_parts_ms"].items()]
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, driver and PCIe {at['driver_pcie']}, torch {at['torch']}; "
        f"copy {rates['copy_bytes_per_us'] / 1e3:,.0f} GB/s, bfloat16 product "
        f"{rates['operations_per_us'] / 1e6:,.0f} TFLOP/s, one copy from the host "
        f"{rates['dma_bytes_per_us'] / 1e3:.1f} GB/s. {setting['layers']} layers, weights {weights / 1e9:.1f} GB, hot "
        f"buffers of {setting['hot_slots']} slots, {setting['kv_budget_bytes'] / 1e9:.1f} GB for KV.\n\n"
        f"{table(COLUMNS, map(_line, rows))}\n"
        f"Of the first row, ms of kernels: {', '.join(measured)}. Floors: {', '.join(floors)}.\n"
    )


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['context']:,}",
        row["mode"],
        str(row["concurrency"]),
        "" if row["hit_rate"] is None else f"{row['hit_rate']:.3f}",
        f"{row['step_ms']:.1f}",
        f"{row['link_ms']:.1f}",
        f"{row['floor_ms']:.1f}",
        f"{row['step_ms'] / row['floor_ms']:.2f}",
        f"{row['rank_tokens_per_s']:,.0f}",
        f"{row['distinct_gib']:.0f} of {row['wanted_gib']:.0f} GiB",
    )

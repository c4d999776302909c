"""Results of benchmarks.serve as a line, tables, a picture, and files in aiperf's form. Pure but for writing those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.decode_report import table
from benchmarks.plots import Row, Series, marks
from benchmarks.serve.measures import aiperf_csv
from benchmarks.serve.workloads import WORKLOADS

COLUMNS: Final = (
    *(
        "cell",
        "as",
        "window, s",
        "output tokens/s",
        "total tokens/s",
        "links",
        "TTFT p50, p99 (n), s",
        "waiting, longest s",
    ),
    *("gaps of clients p50, p99, ms", "gaps by the worker p50, p99, ms", "requests in a step", "swap-in hits"),
    *("prefix hits", "published"),
)
SERIES: Final = (Series("output tokens/s", "#1668b8", "dot"), Series("total tokens/s", "#c0392b", "ring"))
#: Logarithmic axes have no zero.
LEAST_SHOWN: Final = 0.1


def joined(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The runs and rows of all `results`, in their order. A cell that was not run is left out where another result has
    run it."""
    found: dict[str, Any] = {"runs": [], "rows": []}
    for result in results:
        first = len(found["runs"])
        found["runs"] += result["runs"]
        found["rows"] += [row | {"run": _moved(row["run"], first)} for row in result["rows"]]
    run = {(row["cell"], row["variant"]) for row in found["rows"] if "not_run" not in row}
    missing = set()
    kept = []
    for row in found["rows"]:
        key = row["cell"], row["variant"]
        if "not_run" in row and (key in run or key in missing):
            continue
        missing |= {key} if "not_run" in row else set()
        kept.append(row)
    order = {name: number for number, name in enumerate(WORKLOADS)}
    found["rows"] = sorted(kept, key=lambda row: (order[row["workload"]], row["variant"] != "as is", row["clients"]))
    return found


def line(row: Mapping[str, Any]) -> str:
    """A row for a terminal."""
    name = " ".join(filter(None, (row["cell"], row.get("phase", ""))))
    if "not_run" in row:
        return f"{name}: not run ({row['not_run']})"
    parts = (
        f"{row['output_per_s']:.0f} out, {row['total_per_s']:.0f} total tokens/s",
        f"{row['linked_output_per_s']:.0f}, {row['linked_total_per_s']:.0f} with links",
        f"TTFT {_seconds(row['ttft_s'])}",
        f"long {_seconds(row['long_ttft_s'])}" if row["long_ttft_s"] else "",
        f"{row['waiting']} wait (longest {row['waiting_longest_s']:.1f} s)",
        f"gaps {_ms(row['gap_s'])} ms, worker's {_ms(row['worker_gap_s'])} ms",
        f"{row['step_rows']:.1f} a step, {row['steps']} steps, {row['chunks']} chunks",
        f"computed {row['computed_per_s']:.0f}/s, reused {row['reused_per_s']:.0f}/s",
        f"swap hits {_share(row['swap_hits'])}, prefix hits {_share(row['prefix_hits'])}",
        f"entered {row['entered_s']:.1f} s, running {row['running']:.1f}, written in window {row['written_tokens']}",
    )
    return f"{name}: {'; '.join(filter(None, parts))}"


def tables(found: Mapping[str, Any]) -> str:
    """The runs and one table of all rows."""
    about = "".join(f"- {_run(number, run)}\n" for number, run in enumerate(found["runs"]))
    return f"{about}\n{table(COLUMNS, map(_line, found['rows']))}\n{kept(found['rows'])}"


def kept(rows: Iterable[Mapping[str, Any]]) -> str:
    """What clients of a mix keep beside long prompts."""
    said = []
    found = list(rows)
    for variant in dict.fromkeys(row["variant"] for row in found):
        phases = {row.get("phase"): row for row in found if row["variant"] == variant and "not_run" not in row}
        alone, beside = phases.get("alone"), phases.get("beside long prompts")
        if alone and beside and alone["output_per_s"]:
            share = beside["output_per_s"] / alone["output_per_s"]
            said.append(f"Beside long prompts, chats keep {share:.1%} of their tokens/s ({variant}).\n")
    return "".join(said)


def picture(found: Mapping[str, Any]) -> str:
    """Tokens a second of every row, as an SVG document."""
    rows = [
        Row(
            f"{_name(row)} {row['seconds']:.0f}s",
            {
                name: row[f"linked_{key}_per_s"]
                for name, key in (("output tokens/s", "output"), ("total tokens/s", "total"))
                if row[f"linked_{key}_per_s"] >= LEAST_SHOWN
            },
        )
        for row in found["rows"]
        if "not_run" not in row
    ]
    return marks("The whole service, one rank of eight, exchange computed", "tokens/s a GPU", SERIES, rows)


def write_csv(found: Mapping[str, Any], directory: Path) -> None:
    """A file a row, as aiperf exports it."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(found["rows"]):
        if "not_run" not in row:
            name = "-".join(filter(None, (row["cell"], row["phase"], row["variant"], str(number)))).replace(" ", "-")
            (directory / f"{name.replace(',', '')}.csv").write_text(aiperf_csv(row["aiperf"]))


def _moved(run: int | None, by: int) -> int | None:
    """The number of a run among all; None of a cell whose run has no result."""
    return None if run is None else run + by


def _name(row: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (row["cell"], row["phase"], "" if row["variant"] == "as is" else row["variant"])))


def _run(number: int, run: Mapping[str, Any]) -> str:
    at, setting = run["machine"], run["setting"]
    return (
        f"run {number}: {at['gpu']}, {at['driver_pcie']}; {setting['layers']} layers, {setting['as']}, "
        f"{setting['variant']}, overlap {setting['overlap']}, chunks of {setting['prefill_chunk_tokens']}, "
        f"{setting['hot_chunks']:,} hot chunks, {setting['index_pages']:,} index pages, host pages distinct "
        f"{setting['distinct_gib']:.0f} of {setting['wanted_gib']:.0f} GiB wanted, started in {setting['start_s']} s: "
        f"`{at['command']}`"
    )


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    published = WORKLOADS[row["workload"]].published.get(row["clients"])
    said = f"{published.figure} ({published.source})" if published and row["variant"] == "as is" else ""
    name = " ".join(filter(None, (row["cell"], row.get("phase", ""))))
    if "not_run" in row:
        return name, row["variant"], f"not run: {row['not_run']}", *[""] * (len(COLUMNS) - 4), said
    long = f"; long {_seconds(row['long_ttft_s'])}" if row["long_ttft_s"] else ""
    return (
        name,
        row["variant"],
        f"{row['seconds']:.0f}",
        f"{row['linked_output_per_s']:,.0f} ({row['output_per_s']:,.0f})",
        f"{row['linked_total_per_s']:,.0f} ({row['total_per_s']:,.0f})",
        f"{row['stretch']:.2f} ×",
        _seconds(row["ttft_s"]) + long,
        f"{row['waiting']}, {row['waiting_longest_s']:.0f}",
        _ms(row["gap_s"]),
        f"{_ms(row['linked_worker_gap_s'])} ({_ms(row['worker_gap_s'])})",
        f"{row['step_rows']:.1f}",
        _share(row["swap_hits"]),
        _share(row["prefix_hits"]),
        said,
    )


def _seconds(found: Mapping[str, float] | None) -> str:
    return f"{found['p50']:.1f}, {found['p99']:.1f} ({found['count']:.0f})" if found else "none"


def _ms(found: Mapping[str, float] | None) -> str:
    return f"{1e3 * found['p50']:.0f}, {1e3 * found['p99']:.0f}" if found else "none"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

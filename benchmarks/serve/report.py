"""Results of benchmarks.serve as a line, tables, a picture, and files in aiperf's form. Pure but for writing those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.plots import Row, Series, marks
from benchmarks.serve.measures import aiperf_csv
from benchmarks.serve.workloads import WORKLOADS
from benchmarks.tables import Column, Read, table


def _at(name: str, figure: str, factor: float = 1.0) -> Read:
    """A percentile or count of a distribution of the row; None where nothing was counted."""
    return lambda row: factor * row[name][figure] if row.get(name) else None


def _published(row: Mapping[str, Any], part: str) -> str | None:
    found = WORKLOADS[row["workload"]].published.get(row["clients"])
    return str(getattr(found, part)) if found and row["variant"] == "as is" else None


COLUMNS: Final = (
    Column("cell", lambda row: " ".join(filter(None, (row["cell"], row.get("phase", ""))))),
    Column("as", "variant"),
    Column("run", lambda row: None if row["run"] is None else str(row["run"])),
    Column("state", lambda row: f"not run: {row['not_run']}" if "not_run" in row else None),
    Column("window", "seconds", ".0f", "s"),
    *(
        column
        for name in ("output", "total")
        for column in (
            Column(f"{name} tokens/s", f"linked_{name}_per_s", ",.0f"),
            Column(f"{name}, without links", f"{name}_per_s", ",.0f"),
        )
    ),
    Column("with links, as long", "stretch", ".2f", "×"),
    *(
        Column(f"{named} {figure}", _at(name, figure), ".0f" if figure == "count" else ".1f", "s" * (figure != "count"))
        for named, name in (("TTFT", "ttft_s"), ("long prompts' TTFT", "long_ttft_s"))
        for figure in ("p50", "p99", "count")
    ),
    Column("waiting", "waiting"),
    Column("waiting, longest", "waiting_longest_s", ".0f", "s"),
    *(
        Column(f"{named} {figure}", _at(name, figure, 1e3), ".0f", "ms")
        for named, name in (
            ("gaps of clients", "gap_s"),
            ("gaps by the worker", "linked_worker_gap_s"),
            ("the same, without links", "worker_gap_s"),
        )
        for figure in ("p50", "p99")
    ),
    Column("requests in a step", "step_rows", ".1f"),
    Column("swap-in hits", "swap_hits", ".2f"),
    Column("prefix hits", "prefix_hits", ".2f"),
    Column("published", lambda row: _published(row, "figure")),
    Column("source", lambda row: _published(row, "source")),
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
        f"{row['step_rows']:.1f} a step, {row['steps']} steps, {row['units']} units",
        f"computed {row['computed_per_s']:.0f}/s, reused {row['reused_per_s']:.0f}/s",
        f"swap hits {_share(row['swap_hits'])}, prefix hits {_share(row['prefix_hits'])}",
        f"entered {row['entered_s']:.1f} s, running {row['running']:.1f}, written in window {row['written_tokens']}",
    )
    return f"{name}: {'; '.join(filter(None, parts))}"


def tables(found: Mapping[str, Any]) -> str:
    """The runs and one table of all rows."""
    about = "".join(f"- {_run(number, run)}\n" for number, run in enumerate(found["runs"]))
    return f"{about}\n{table(COLUMNS, found['rows'])}\n{kept(found['rows'])}"


def kept(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the share of their tokens/s that clients of a mix keep beside long prompts, as text."""
    said = []
    found = list(rows)
    for variant in dict.fromkeys(row["variant"] for row in found):
        phases = {
            row.get("phase"): row
            for row in found
            if row["variant"] == variant and row["workload"] == "mix" and "not_run" not in row
        }
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
        f"{setting['variant']}, overlap {setting['overlap']}, prompts in {setting['prompts']}, "
        f"{setting['hot_chunks']:,} hot chunks, {setting['index_pages']:,} index pages, host pages distinct "
        f"{setting['distinct_gib']:.0f} of {setting['wanted_gib']:.0f} GiB wanted, started in {setting['start_s']} s: "
        f"`{at['command']}`"
    )


def _seconds(found: Mapping[str, float] | None) -> str:
    return f"{found['p50']:.1f}, {found['p99']:.1f} ({found['count']:.0f})" if found else "none"


def _ms(found: Mapping[str, float] | None) -> str:
    return f"{1e3 * found['p50']:.0f}, {1e3 * found['p99']:.0f}" if found else "none"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

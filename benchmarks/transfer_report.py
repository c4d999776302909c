"""Rewrite tables of page transfer and of first tokens in RESULTS.md: `python -m benchmarks.transfer_report FILE...`

Files are outputs of benchmarks.transfer and benchmarks.ttft, in the order in which they are to be shown. The tables lie
between marks in RESULTS.md, two for each of the benchmarks; text around them is written by hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.decode_report import table

RESULTS: Final = Path(__file__).parent / "RESULTS.md"
MEMORY: Final = ("memcpy", "checksum", "copy_with_checksum")
COPIES: Final = {"stage": "to_host", "preload": "to_device"}

Result = dict[str, Any]


# ---------------------------------------------------------------- benchmarks.transfer


def transfer(result: Result) -> str:
    """Medians of the rounds; shares are of the limit in the same round."""
    rounds, machine = result["rounds"], result["machine"]
    lines = []
    for name in rounds[0]:
        limit = "memcpy" if name in (*MEMORY, "shared") else "tcp"
        share = median(row[name]["gbps"] / row[limit]["gbps"] for row in rounds)
        cpu = "" if name in MEMORY else f"{median(row[name]['cpu_s_per_gb'] for row in rounds):.2f}"
        of = "" if name == limit else f"{share:.0%} of {limit}"
        lines.append((name, f"{median(row[name]['gbps'] for row in rounds):.2f}", of, cpu))
    return (
        f"{result['pages']} pages of {result['page_bytes']:,} bytes, {len(rounds)} rounds, {result['between']}, "
        f"{machine['cores']} cores, load {machine['load'][0]:.1f}:\n\n"
        f"{table(('', 'GB/s', 'of its limit', 'CPU s per GB'), lines)}\n"
    )


# ---------------------------------------------------------------- benchmarks.ttft


def first_tokens(result: Result) -> str:
    machine, rows, limits = result["machine"], result["rows"], result["plain_copies"]
    devices = " and ".join(machine["devices"]) or f"{machine['cores']} cores"
    plain = "; ".join(
        f"{device} {rate['to_host']:.1f} to the host, {rate['to_device']:.1f} from it, {rate['both']:.1f} both at once"
        for device, rate in limits.items()
    )
    columns = ("way", "busy", "tokens", "first", "second", "prefill", "handover", "gap", "copied by the workers, GB/s")
    return (
        f"Command: `{machine['command']}`. {devices}, torch {machine['torch']}, load {machine['load'][0]:.1f}. "
        f"Plain copies, GB/s: {plain}.\n\n"
        f"{table(columns, (line(row, limits) for row in rows))}\n"
    )


def line(row: Result, limits: dict[str, dict[str, float]]) -> tuple[str, ...]:
    times = (f"{row[name]:,.1f}" for name in ("first", "second", "prefill", "handover"))
    gap = f"{row['gap']:,.1f}" if "gap" in row else ""
    return (row["way"], str(row["busy"]), f"{row['tokens']:,}", *times, gap, ", ".join(rates(row, limits)))


def rates(row: Result, limits: dict[str, dict[str, float]]) -> Iterable[str]:
    """Each with its share of the plain copy, of whichever device has the quicker one."""
    for name, rate in row["gb_per_s"].items():
        limit = max(found[COPIES[name]] for found in limits.values()) if name in COPIES else 0.0
        yield f"{name} {rate:.1f}" + (f" ({rate / limit:.0%})" if limit else "")


# ---------------------------------------------------------------- both


SECTIONS: Final[dict[str, Callable[[Result], str]]] = {"transfer": transfer, "ttft": first_tokens}


def rewrite(text: str, name: str, parts: list[str]) -> str:
    """`text` with `parts` between the marks of `name`."""
    begin, end = f"<!-- {name}: table -->", f"<!-- {name}: end -->"
    before, after = text.index(begin) + len(begin), text.index(end)
    return f"{text[:before]}\n\n{''.join(parts)}{text[after:]}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer_report")
    parser.add_argument("files", type=Path, nargs="+")
    results: list[Result] = [json.loads(file.read_text()) for file in parser.parse_args().files]
    text = RESULTS.read_text()
    for name, section in SECTIONS.items():
        if parts := [section(result) for result in results if ("plain_copies" in result) == (name == "ttft")]:
            text = rewrite(text, name, parts)
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()

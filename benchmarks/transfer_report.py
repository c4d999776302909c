"""Tables of page transfer and of first tokens, from results of benchmarks.transfer, two_gpus and ttft. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any, Final

from benchmarks.decode_report import table

MEMORY: Final = ("memcpy", "checksum", "copy_with_checksum")
#: What the first and the second GPU do at once, and what is their limit.
PAIRS: Final = (("stage", "load"), ("plain_to_host", "plain_to_device"))
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


# ---------------------------------------------------------------- benchmarks.two_gpus


def links(result: Result) -> str:
    rates, size = result["gb_per_s"], result["pages"] * result["page_bytes"] / 1e9
    together = [" + ".join(pair) for pair in PAIRS]
    rows = [(*PAIRS[0], together[0]), (*PAIRS[1], together[1])]
    lines = [
        (name, f"{rates[name]:.1f}", f"{rates[limit]:.1f}", f"{rates[name] / rates[limit]:.0%}")
        for name, limit in zip(*rows, strict=True)
    ]
    return (
        f"{' and '.join(result['devices'])}, one host pool, {size:.1f} GB of {result['pages']} pages:\n\n"
        f"{table(('', 'GB/s', 'plain copies', 'share'), lines)}\n"
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

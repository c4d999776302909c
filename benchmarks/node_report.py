"""Tables of host pool, staging and resuming, warm starts, crashes and layer groups, from results. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.decode_report import table

Result = Mapping[str, Any]
GIB = 1 << 30


def host_pool(result: Result) -> str:
    at = result["machine"]
    columns = ("size", "threads", "huge pages", "touch", "register", "unregister", "drop mappings", "remove", "memset")
    return (
        f"Command: `python -m benchmarks.host_pool --dir /dev/shm --budget-seconds 30`. Machine: {at['gpu']}, "
        f"{at['cpus']} cores, torch {at['torch']}. One run; left out: {len(result['left_out'])} cells.\n\n"
        f"{table(columns, map(_pool_line, result['rows']))}"
    )


def _pool_line(row: Result) -> tuple[str, ...]:
    def rate(name: str) -> str:
        return f"{row[name]:.2f} s, {row['bytes'] / row[name] / 1e9:.1f} GB/s"

    size = f"{row['bytes'] / GIB:.0f} GiB", str(row["threads"]), "asked for" if row["huge_pages"] else "no"
    rest = (f"{row[name]:.2f} s" for name in ("unregister_s", "drop_s", "remove_s"))
    return *size, rate("touch_s"), rate("register_s"), *rest, rate("memset_s")


def resume(result: Result) -> str:
    at, setting = result["machine"], result["setting"]
    columns = (
        "context",
        "staging, of a plain copy",
        "loading, of a plain copy",
        "resumed, hot buffer",
        "resumed, resident",
        "prefilled",
        "prefill over resume",
    )
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, torch {at['torch']}. {setting['layers']} layers, "
        f"{setting['kv_dtype']} rows, hot buffers of {setting['hot_slots']:,} slots, prompts in chunks of "
        f"{setting['chunk_tokens']:,}; the quickest of three resumes.\n\n"
        f"{table(columns, map(_resume_line, result['rows']))}"
    )


def _resume_line(row: Result) -> tuple[str, ...]:
    def share(way: str) -> str:
        ours, plain = row[f"{way}_gb_per_s"], row[f"plain_{way}_gb_per_s"]
        return f"{ours:.1f} of {plain:.1f} GB/s, {ours / plain:.0%}"

    times = (f"{1e3 * row[name]:,.1f} ms" for name in ("managed_resumed_s", "resident_resumed_s"))
    prefilled = f"{1e3 * row['managed_first_token_s']:,.0f} ms", f"{row['managed_prefill_over_resume']:.0f} ×"
    return f"{row['context']:,}", share("to_host"), share("to_device"), *times, *prefilled


def warm_start(result: Result) -> str:
    at, setting, rows = result["machine"], result["setting"], result["rows"]
    columns = ("start", "misses of the first step", "next token, ms", "longest step of the other request, ms")
    lines = [
        (
            name,
            f"{row['misses']:,}" if "misses" in row else "",
            f"{row['next_token_ms']:.1f}" if "next_token_ms" in row else "",
            f"{row['longest_step_ms']:.1f}",
        )
        for name, row in rows.items()
    ]
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, torch {at['torch']}. {setting['layers']} layers, "
        f"{setting['kv_dtype']} rows, {setting['context']:,} tokens, {setting['hot_slots']:,} hot slots, overlap of "
        f"selections {setting['overlap']:g}, medians of {setting['repeats']}.\n\n{table(columns, lines)}"
    )


def worker_crash(result: Result) -> str:
    columns = ("prompt", "SIGKILL to declared down, ms", "resumed, ms", "prefilled again, ms", "ratio")
    device = result.get("device", "cpu")
    command = "python -m benchmarks.worker_crash" + (f" --device {device}" if device != "cpu" else "")
    return (
        f"Command: `{command}`. Machine: {result['cpus']} cores, {device}, {result['machine']}. Rounds in their "
        f"order.\n\n{table(columns, map(_crash_line, result['results']))}"
    )


def _crash_line(result: Result) -> tuple[str, ...]:
    rounds = result["rounds"]
    return (
        f"{result['median']['tokens']:,}",
        *(", ".join(f"{it[name]:,.0f}" for it in rounds) for name in ("detect_ms", "resume_ms", "prefill_ms")),
        ", ".join(f"{it['ratio']:.1f}" for it in rounds),
    )


def layer_groups(result: Result) -> str:
    setting, at = result["setting"], result["machine"]
    names = ("prefill", "staged", "arrived", "total")
    columns = ("a group has", "groups", *(f"{name}, ms" for name in names))
    lines = [
        (
            "the whole page" if group == "0" else group,
            str(row["groups"]),
            *(
                f"{row[f'{name}_ms']:,.1f} ({min(times):,.1f}–{max(times):,.1f})"
                for name in names
                for times in [[1e3 * it[name] for it in row["rounds"]]]
            ),
        )
        for group, row in result["rows"].items()
    ]
    return (
        f"Engine `{setting['engine']}`, {setting['layers']} layers, {setting['tokens']:,} tokens in chunks of "
        f"{setting['chunk_tokens']:,}, pages of {result['page_bytes'] / 1e6:.1f} MB, {at['gpu'] or 'no GPU'}, "
        f"{at['cores']} cores at load {at['load'][0]:.1f}; medians of {setting['rounds']} rounds, smallest and "
        f"largest.\n\n{table(columns, lines)}"
    )


def prefix_reuse(result: Result) -> str:
    at, found = result["machine"], result["result"]
    cold, warm = (", ".join(f"{it:,.0f}" for it in found[f"ttft_{name}_all_ms"]) for name in ("cold", "warm"))
    columns = ("prompt", "reused", "off", "a miss adds", "a hit adds", "bound")
    return (
        f"Command: `{at['command']}`. Machine: {at['cores']} cores, Python {at['python']}, load average "
        f"{float(at['load_average']):.0f}. {found['prompt_tokens']:,} prompt tokens, {found['cached_tokens']:,} "
        f"reused: first token after {cold} ms cold, {warm} ms warm, {found['mismatched_tokens']} tokens differ. CPU of "
        f"the coordinator for one admission, µs:\n\n{table(columns, map(_admission_line, found['admissions']))}"
    )


def prefix_restored(result: Result) -> str:
    at, found = result["result"]["machine"], result["result"]
    low, high = min(found["layer_gb_per_s"]), max(found["layer_gb_per_s"])
    return (
        f"Command: `{result['machine']['command']}`. Machine: {at['gpu']}, torch {at['torch']}, load average "
        f"{float(result['machine']['load_average']):.0f}. {found['layers']} layers, {found['cached_tokens']:,} of "
        f"{found['prompt_tokens']:,} prompt tokens restored: first token after {found['ttft_warm_ms']:,.0f} ms, "
        f"{found['ttft_cold_ms']:,.0f} when all is prefilled ({found['ttft_ratio']:.1f} ×). Rows of a layer alone: "
        f"{low:.1f} to {high:.1f} GB/s, {found['layer_share_of_dma']:.0%} of one plain copy "
        f"({found['dma_gb_per_s']:.1f}); index keys {found['keys_share_of_dma']:.0%}. All loads of the request: "
        f"{found['in_situ_gb_per_s']:.1f} GB/s, {found['in_situ_gb_per_s'] / found['dma_gb_per_s']:.0%}, with "
        f"worker.layer_group {found['layer_group']}. "
        f"{_restored_tokens(found)}\n"
    )


def _restored_tokens(found: Result) -> str:
    """What became of the tokens behind the restored prefix."""
    return (
        f"Of {found['compared_tokens']} tokens {found['mismatched_tokens']} differ from those of the whole prefill, "
        f"and {found['tied_tokens']} follow a tie of less than {found['tie_bound']}; log-probabilities of the same "
        f"context change by {found['logprob_change_max']:.3f} at most. Behind {found['same_chunks_prefix_tokens']:,} "
        f"tokens, which leave the same chunks to compute, {found['same_chunks_mismatched_tokens']} of "
        f"{found['same_chunks_compared_tokens']} differ in any bit."
    )


def _admission_line(row: Result) -> tuple[str, ...]:
    counts = (f"{row[name]:,}" for name in ("prompt_tokens", "reused_tokens"))
    return *counts, *(f"{row[name]:,.0f}" for name in ("off_us", "miss_extra_us", "hit_extra_us", "bound_us"))

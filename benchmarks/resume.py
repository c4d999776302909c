"""What moving a context costs: staging, resuming, and the prefill that a resume saves. `python -m benchmarks.resume`.

A model as in benchmarks/decode.py, one request. Two parts, each with its yardstick from the same run:

    copies   copy_rows of a whole context in pieces as the worker's streams launch them: rows and index keys to host
             pages, and back. GB/s beside one plain copy of as many bytes between device and pinned memory.
    stays    a prompt is prefilled and staged, decodes some tokens, is withdrawn, and comes back from host memory: time
             until it decodes again, index keys and (when resident) rows loaded, and of its first step, in which a cold
             hot buffer misses. Prefill's floating-point operations are counted (projections and MLPs of every token,
             index scores of every pair, attention over the selected rows) and held against an 8192-cubed bfloat16
             product of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.decode import LOOKAHEAD, TAIL_SLOTS, Clock, make_pool, sizing_of
from benchmarks.swap_in import machine
from kernels.copy_rows import copy_rows_to_device, copy_rows_to_host
from kernels.state import DeviceState
from protocol.arrays import pack_int32
from protocol.messages import Admit, Event, Released, Sampling, Staged, Withdraw
from protocol.settings import WorkerSettings
from protocol.text import make_tokenizer
from protocol.units import PAGE_TOKENS, managed_chunks, pages_for
from worker.loop.executor import Executor
from worker.loop.swap import piece_tokens
from worker.runners.synthetic import synthetic_config, synthetic_runner
from worker.streams import make_streams

NEW_TOKENS: Final = 64
REPEATS: Final = 7
HELD_CYCLES: Final = 4_000_000  # 2 ms
TURNS_MAX: Final = 10_000_000


class Stays(Clock):
    """Reports of one request: when its tokens came, and its events by type."""

    def last(self, kind: type[Event]) -> Any:
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)


# ---------------------------------------------------------------- copies


def median_s(work: Callable[[], object]) -> float:
    """Seconds on the device, median of REPEATS after one more. All launches are queued when the first may begin."""
    times: list[float] = []
    for _ in range(REPEATS + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HELD_CYCLES)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times[1:])


def measure_copies(state: DeviceState, context: int) -> dict[str, float]:
    """GB/s of a context's rows and keys to the host and back, and of plain copies of as many bytes."""
    geometry, pages = state.geometry, pages_for(context)
    token = torch.arange(context, device="cuda")
    host_page = torch.randperm(len(state.host), device="cuda")[:pages][token // PAGE_TOKENS]
    places = [
        (piece.expand(geometry.groups, -1).contiguous(), piece, host_page[piece], piece % PAGE_TOKENS)
        for piece in token.split(piece_tokens(geometry.page_bytes // PAGE_TOKENS))
    ]

    def move(command: Callable[..., None]) -> None:
        for piece in places:
            command(state, *piece)

    size = pages * geometry.page_bytes
    device, host = state.rows.view(-1)[:size], state.host.view(-1)[:size]
    if len(device) < size:
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
    seconds = {
        "to_host": median_s(partial(move, copy_rows_to_host)),
        "to_device": median_s(partial(move, copy_rows_to_device)),
        "plain_to_host": median_s(lambda: host.copy_(device, non_blocking=True)),
        "plain_to_device": median_s(lambda: device.copy_(host, non_blocking=True)),
    }
    return {f"{name}_gb_per_s": size / s / 1e9 for name, s in seconds.items()} | {"bytes": size}


# ---------------------------------------------------------------- stays


def turn_until(executor: Executor, condition: Callable[[], object]) -> float:
    """Turn until `condition`; the seconds that took."""
    began = time.perf_counter()
    for _ in range(TURNS_MAX):
        if condition():
            return time.perf_counter() - began
        executor.turn()
    raise SystemExit("nothing more happens")


def measure_stay(executor: Executor, reports: Stays, context: int, hot_slots: int, vocab: int) -> dict[str, float]:
    """Prefill, stage, decode, withdraw, resume, decode."""
    number = len(reports.events) + 1
    pages = pages_for(context + NEW_TOKENS + LOOKAHEAD)
    prompt = pack_int32([(number + 37 * token) % vocab for token in range(context)])
    hot_chunks = managed_chunks(hot_slots) if hot_slots else pages

    def admit(placement: int, durable: int, generated: list[int]) -> Admit:
        return Admit(
            placement=placement,
            request_index=0,
            request_id=f"stay-{placement}",
            prompt=prompt,
            generated=pack_int32(generated),
            durable_tokens=durable,
            sampling=Sampling(max_tokens=NEW_TOKENS, ignore_eos=True),
            host_pages=pack_int32(list(range(pages))),
            index_pages=pages,
            hot_slots=hot_slots,
            hot_chunks=hot_chunks,
        )

    reports.steps.clear()
    executor.submit(admit(number, 0, []))
    first_s = turn_until(executor, lambda: reports.steps)
    turn_until(executor, lambda: len(reports.steps) >= 8)
    staged = reports.last(Staged)
    executor.submit(Withdraw(number))
    turn_until(executor, lambda: (found := reports.last(Released)) is not None and found.placement == number)
    durable = reports.last(Released).durable_tokens
    reports.steps.clear()
    executor.submit(admit(number + 1, durable, list(range(durable - context + 1))))
    resumed_s = turn_until(executor, lambda: reports.steps)
    steady_s = turn_until(executor, lambda: len(reports.steps) >= 9) / 8
    executor.submit(Withdraw(number + 1))
    turn_until(executor, lambda: executor.idle)
    return {
        "first_token_s": first_s,
        "prefill_s": staged.prefill_ms / 1e3,
        "stage_tail_s": staged.stage_ms / 1e3,
        "resumed_s": resumed_s,
        "step_s": steady_s,
        "prefill_over_resume": first_s / resumed_s,
    }


def prefill_operations(config: Any, context: int) -> float:
    """Floating-point operations of a prompt: the module's own products, scores of all pairs, selected attention."""
    c, heads = config, config.num_attention_heads
    latent, rope, nope, value = c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim, c.v_head_dim
    attention = c.hidden_size * (c.q_lora_rank + latent + rope) + c.q_lora_rank * heads * (nope + rope)
    attention += heads * latent * (nope + value) + heads * value * c.hidden_size
    index = c.q_lora_rank * c.index_n_heads * c.index_head_dim + c.hidden_size * (c.index_head_dim + c.index_n_heads)
    token = attention + index + 3 * c.hidden_size * c.intermediate_size
    selected = sum(min(position + 1, c.index_topk) for position in range(context)) * heads * (2 * latent + rope)
    scores = context * (context + 1) / 2 * c.index_n_heads * c.index_head_dim
    operations: float = 2.0 * c.num_hidden_layers * (token * context + selected + scores)
    return operations


def product_rate() -> float:
    """Operations per second of an 8192-cubed bfloat16 product of random values."""
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / median_s(partial(torch.matmul, left, right))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/resume.json"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--hot-slots", type=int, default=4096)
    parser.add_argument("--pass-tokens", type=int, default=2048, help="tokens of a prompt pass")
    parser.add_argument("--contexts", type=int, nargs="*", default=[8_192, 32_768])
    options = parser.parse_args()
    config = synthetic_config("deepseek-v3.2", options.layers)
    runner = synthetic_runner(config, kv_dtype=options.kv_dtype)
    geometry = runner.geometry
    pool, peak = make_pool(geometry, config, 4), product_rate()
    rows = []
    for context in options.contexts:
        pages = pages_for(context + NEW_TOKENS + LOOKAHEAD)
        sizing = sizing_of(
            geometry,
            seats=1,
            context_pages=pages,
            chunks=max(pages, managed_chunks(options.hot_slots)),
            slab_pages=pages_for(context),
            hot_slots=options.hot_slots,
            host_pages=len(pool),
        )
        settings = WorkerSettings(device="cuda", seats=1, tail_slots=TAIL_SLOTS, pass_tokens=options.pass_tokens)
        reports, streams = Stays(), make_streams("cuda")
        executor = Executor(runner, settings, sizing, streams, pool, make_tokenizer("bytes"), reports)
        row = {"context": context} | measure_copies(executor.state, context)
        row["prefill_tflop"] = prefill_operations(config, context) / 1e12
        for name, hot_slots in (("managed", options.hot_slots), ("resident", 0)):
            stays = [measure_stay(executor, reports, context, hot_slots, runner.info.vocab_size) for _ in range(3)]
            best = min(stays, key=lambda stay: stay["resumed_s"])
            row |= {f"{name}_{key}": value for key, value in best.items()}
        row["prefill_share_of_peak"] = row["prefill_tflop"] * 1e12 / row["managed_prefill_s"] / peak
        streams.close()
        rows.append(row)
        print("\n".join(f"{key:28} {value:12.4f}" for key, value in row.items()), flush=True)
    setting = vars(options) | {"out": str(options.out), "product_tflop_per_s": peak / 1e12}
    setting["prompts"] = f"passes of {options.pass_tokens:,}"
    command = " ".join(["python", "-m", "benchmarks.resume", *sys.argv[1:]])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine() | {"command": command}, "setting": setting, "rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

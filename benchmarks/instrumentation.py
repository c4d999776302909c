"""What counting and timing costs: `python -m benchmarks.instrumentation [step|scrape] [--device cuda]`.

step     One executor decodes with what it counts and times switched on and off, BLOCK steps at a time, in the order on,
         off, off, on, so that drift hits both; the lower quartile of either counts. Off: nothing is timed, no histogram
         and no beat is kept; hits and misses per request are read as ever, since clients see them. On the CPU
         everything but the executor's own Python is taken out of the step, which leaves the host's part of one on a
         GPU, in processor time; the bound is STEP_US_MAX. On a GPU: the model of benchmarks.decode, with its graphs, in
         time that passes; the bound is GPU_SHARE_MAX of a step.
scrape   A coordinator process with 10,000 live requests of 16 workers, under load: GET /metrics, SCRAPES times, from
         connect to last byte. The bound is SCRAPE_MS_MAX. Besides, what latencies cost per report of so many requests.

Exits with 1 when a bound is not met.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest.mock import patch

import numpy as np
import torch
import trio

from benchmarks import coordinator as fleet
from benchmarks import decode
from coordinator.tokens.token_times import TokenTimes
from kernels.layout import Geometry
from kernels.state import DeviceState, StepBatch
from metrics.state import Buckets, FenceWaits, WaitCounters, WorkerCounters
from protocol.messages import ModelInfo
from protocol.units import pages_for
from tests.support.ports import free_ports
from worker.loop.decode import TIMED_EVERY
from worker.loop.executor import Executor
from worker.runners.adjust import Adjust
from worker.runners.base import SamplerState, StepOutputs
from worker.runners.synthetic import synthetic_config, synthetic_runner
from worker.streams import Streams, make_streams

#: Of one decode step of SEATS requests on the host.
STEP_US_MAX: Final = 10.0
#: More time that a step on a GPU may take.
GPU_SHARE_MAX: Final = 0.01
SCRAPE_MS_MAX: Final = 50.0
#: Steps measured together; each such block has one timed step.
BLOCK: Final = TIMED_EVERY
SEATS: Final = 64
LAYERS: Final = 8
SCRAPES: Final = 40


class StillRunner:
    """Launches what a model launches around swap-in, and computes nothing."""

    geometry = Geometry(LAYERS, row_bytes=16, group_of_layer=tuple(range(LAYERS)), index_row_bytes=8, topk=64)
    info = ModelInfo("still", "still", 1 << 20, 1_000, LAYERS, 64, (), "bytes", "")

    def launch_prefill_chunk(self, *_: object) -> None:
        raise NotImplementedError

    def launch_forward(self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch) -> None:
        for layer in range(LAYERS):
            streams.compute.launch("project", streams.of_layer(layer, _nothing))

    def launch_sample(
        self, streams: Streams, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        streams.compute.launch("sample", lambda: outputs.tokens.fill_(1))


def _nothing(*_: object, **__: object) -> None:
    """In the place of device work."""


@contextmanager
def switched_off(executor: Executor) -> Iterator[None]:
    with ExitStack() as stack:
        for where, name in (
            (WorkerCounters, "beat"),
            (WorkerCounters, "stepped"),
            (Buckets, "observe"),
            (FenceWaits, "observe"),
        ):
            stack.enter_context(patch.object(where, name, _nothing))
        stack.enter_context(patch.object(executor._streams, "timed", lambda work, spent: work))
        stack.enter_context(patch.object(executor._decoder, "_timed_every", 0))
        yield


def compare(
    executor: Executor, clock: decode.Clock, blocks: int, now: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Seconds per step of each block, on and off, by the clock `now`."""
    on: list[float] = []
    off: list[float] = []
    for number in range(blocks):
        if number % 4 in (0, 3):
            on.append(_block(executor, clock, now))
        else:
            with switched_off(executor):
                off.append(_block(executor, clock, now))
    return on, off


def _block(executor: Executor, clock: decode.Clock, now: Callable[[], float]) -> float:
    decode.turn_until(executor, clock, len(clock.steps) + 2)  # what the other kind has launched is read first
    first, began = len(clock.steps), now()
    decode.turn_until(executor, clock, first + BLOCK)
    return (now() - began) / (len(clock.steps) - first)


# ---------------------------------------------------------------- steps


def still_executor(clock: decode.Clock) -> Executor:
    runner, cell = StillRunner(), decode.Cell(256, "hisparse", SEATS, 0.9)
    pages = SEATS * pages_for(cell.context + decode.TOKENS_AHEAD)
    pool = torch.zeros(pages, runner.geometry.page_bytes, dtype=torch.uint8)
    return decode.open_executor(runner, pool, cell, 128, clock, make_streams("inline"), device="cpu")


def gpu_executor(clock: decode.Clock, options: argparse.Namespace) -> Executor:
    config = synthetic_config("deepseek-v3.2", options.layers)
    runner = synthetic_runner(config, kv_dtype="fp8")
    pool = decode.make_pool(runner.geometry, config, options.pool_gib)
    cell, geometry = decode.Cell(8_192, "hisparse", options.concurrency, 0.9), runner.geometry
    runner.after_index_topk = decode.Selections(
        geometry.groups, cell.concurrency, cell.context, geometry.topk, cell.overlap
    )
    return decode.open_executor(runner, pool, cell, 4_096, clock, make_streams("cuda"))


def measure_steps(options: argparse.Namespace) -> bool:
    clock, is_gpu = decode.Clock(), options.device == "cuda"
    with ExitStack() as stack:
        stack.enter_context(patch.object(decode, "TOKENS_AHEAD", (BLOCK + 4) * (options.blocks + 4)))
        if not is_gpu:
            for name in ("worker.loop.decode.begin_step", "worker.loop.swap.copy_rows_to_host"):
                stack.enter_context(patch(name, _nothing))
        executor = gpu_executor(clock, options) if is_gpu else still_executor(clock)
        decode.turn_until(executor, clock, BLOCK)
        on, off = compare(executor, clock, options.blocks, time.perf_counter if is_gpu else time.thread_time)
    on_us, off_us = (1e6 * statistics.quantiles(blocks, n=4)[0] for blocks in (on, off))
    print(
        f"step ({options.device}, {len(on)} blocks of {BLOCK} steps each way): on {on_us:.1f} us, off {off_us:.1f} us:"
        f" instrumentation takes {on_us - off_us:.1f} us per decode step, {100 * (on_us / off_us - 1):.2f} %"
    )
    if not is_gpu:
        return on_us - off_us <= STEP_US_MAX
    counters = executor.counters
    layers_us = [round(1e6 * seconds / counters.steps) for seconds in counters.swap.seconds]
    print(
        f"  on the device {1e6 * counters.computing_s / counters.steps:.0f} us, of it swap-in by layer {layers_us} us"
    )
    return on_us / off_us - 1 <= GPU_SHARE_MAX


# ---------------------------------------------------------------- scrapes


@dataclass(frozen=True)
class Scrape:
    ms: float
    series: int


def scrape(url: str) -> Scrape:
    began = time.perf_counter()
    with urllib.request.urlopen(url, timeout=10) as response:
        lines = response.read().splitlines()
    return Scrape(1e3 * (time.perf_counter() - began), sum(not line.startswith(b"#") for line in lines))


async def scrape_under_load(endpoints: dict[str, str], url: str, requests: int, rate: float) -> list[Scrape]:
    load = fleet.Load(requests)
    client = fleet.CheckingClient(load)
    async with trio.open_nursery() as nursery:
        await nursery.start(fleet.FakeWorkers(load).run, endpoints["worker"])
        await nursery.start(client.run, endpoints["client"])
        with trio.fail_after(fleet.PHASE_LIMIT_S):
            for number in range(requests):
                await client.submit(number)
            await load.all_admitted.wait()
        load.rate = rate
        if rate:
            load.running.set()
        await trio.sleep(2.0)
        scrapes = []
        for _ in range(SCRAPES):
            scrapes.append(await trio.to_thread.run_sync(scrape, url))
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    return scrapes


def measure_scrapes(options: argparse.Namespace) -> bool:
    port = free_ports(1)
    os.environ["HISPARSE_COORDINATOR_METRICS_PORT"] = str(port)
    cores = sorted(os.sched_getaffinity(0))
    apart = len(cores) > 1
    is_met = True
    for rate in (0.0, options.rate):
        core = cores[0] if apart else None
        with (
            tempfile.TemporaryDirectory() as name,
            fleet.running_coordinator(Path(name) / "run", core, "none", options.requests) as (_, endpoints),
            fleet.confined_to(cores[1] if apart else None),
        ):
            url = f"http://127.0.0.1:{port}/metrics"
            scrapes = trio.run(scrape_under_load, endpoints, url, options.requests, rate)
        times = sorted(it.ms for it in scrapes)
        median, worst = times[len(times) // 2], times[-1]
        print(
            f"scrape ({options.requests} live requests, {rate:.0f} token events/s offered): {median:.1f} ms in the"
            f" median, {worst:.1f} ms at worst of {len(times)}; {scrapes[-1].series} series"
        )
        is_met &= median <= SCRAPE_MS_MAX
    report_cost(options.requests // fleet.WORKERS)
    return is_met


def report_cost(requests: int) -> None:
    """Of latencies, for a report with a token of each of `requests`."""
    times, waits = TokenTimes(requests), WaitCounters()
    slots, known, fresh = np.arange(requests), np.ones(requests, np.int32), np.ones(requests, np.int32)

    def hear() -> None:
        waits.tokens_came(*times.arrived(slots, known, fresh, time.perf_counter()))

    print(f"latencies: {1e6 * seconds_per_call(hear):.0f} us per report of {requests} requests")


def seconds_per_call(call: Callable[[], None], calls: int = 2_000) -> float:
    began = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - began) / calls


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instrumentation")
    parser.add_argument("what", nargs="?", choices=("step", "scrape"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--blocks", type=int, default=160)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model on a GPU")
    parser.add_argument("--concurrency", type=int, default=32, help="on a GPU")
    parser.add_argument("--pool-gib", type=int, default=8, help="on a GPU; a power of two")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=100_000.0, help="token events per second offered")
    options = parser.parse_args()
    met = [
        measure(options)
        for name, measure in (("step", measure_steps), ("scrape", measure_scrapes))
        if options.what in (None, name)
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())

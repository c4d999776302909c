"""What reuse of prefixes costs the coordinator at an admission, and its loop while long prompts arrive.

The real Scheduler, HostPool and Request actors in one process, over a worker port that computes nothing; no gateway and
no journal, whose costs are the same with and without reuse. An admission is CPU time of the process from `submit` until
the Admit command is sent: validation, digests, lookup, ledger change. Two coordinators, with reuse and without, take
turns, so that what else the machine does meets both.

    miss    no page of the prompt is cached: a lookup ends at the first page
    hit     all pages are cached, so that all are looked up, shared and marked as used
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np
import trio
import trio.testing

from coordinator.actor import open_supervisor
from coordinator.scheduler.scheduler import Scheduler
from coordinator.state.events import Ending, LinkStats
from coordinator.tokens.token_log import TokenLog
from protocol import messages
from protocol.settings import CoordinatorSettings
from protocol.units import PAGE_TOKENS

CONTEXT_TOKENS: Final = 1 << 21
PAGES: Final = 4 * CONTEXT_TOKENS // PAGE_TOKENS
VOCABULARY: Final = 100_000
LONG_TOKENS: Final = 1 << 20
#: How often the loop's lateness is looked at.
TICK_S: Final = 0.001

MODEL: Final = messages.ModelInfo("bench", "bench", CONTEXT_TOKENS, VOCABULARY, 4, 128, (), "bytes", "")
CAPACITY: Final = messages.WorkerCapacity(
    seats=64,
    hot_chunks=PAGES,
    index_pages=PAGES,
    prompt_max_tokens=PAGES * PAGE_TOKENS,
    host_pages=PAGES,
    page_bytes=1024,
    hot_size_classes=(4096,),
    tail_slots=8,
    overshoot_tokens=2,
    pool_path="/nowhere",
)


class Listener:
    def ended(self, ending: Ending) -> None: ...

    def recovered(self, ending: Ending) -> None: ...

    def forgotten(self, request_index: int) -> None: ...


class Port:
    """A worker that notes when it is sent an Admit, and says the rest when told to."""

    def __init__(self) -> None:
        self.admitted: messages.Admit | None = None
        self.arrived = trio.Event()
        self.withdrawn = trio.Event()

    def send(self, command: messages.Command) -> None:
        if isinstance(command, messages.Admit):
            self.admitted = command
            self.arrived.set()
        elif isinstance(command, messages.Withdraw):
            self.withdrawn.set()

    def step_s(self) -> float:
        return 2e-6

    def stats(self) -> LinkStats:
        return LinkStats(1, 2.0, 3, 4, 0.5, 6.0)


class Bench:
    """One coordinator with one worker."""

    def __init__(self, scheduler: Scheduler, token_log: TokenLog, port: Port) -> None:
        self.scheduler, self._log, self._port = scheduler, token_log, port
        self._number = 0

    async def submit(self, prompt: bytes) -> str:
        self._number += 1
        submit = messages.Submit(1, prompt, messages.Sampling(max_tokens=4), f"r{self._number}")
        return (await self.scheduler.submit(submit, "bench")).request_id

    async def admission_s(self, prompt: bytes, *, is_kept: bool = False) -> float:
        """CPU seconds of one. `is_kept`: all of its rows become durable, so that full pages may be cached."""
        self._port.arrived, self._port.withdrawn = trio.Event(), trio.Event()
        began = time.process_time()
        request_id = await self.submit(prompt)
        await self._port.arrived.wait()
        took = time.process_time() - began
        assert self._port.admitted is not None
        placement = self._port.admitted.placement
        await trio.testing.wait_all_tasks_blocked()
        if is_kept:
            self.scheduler.on_event("w", 1, messages.Staged(placement, 0.0, 0.0))
            await trio.testing.wait_all_tasks_blocked()
        await self.scheduler.abort((request_id,), "bench")
        await self._port.withdrawn.wait()
        self.scheduler.on_event("w", 1, messages.Released(placement, len(prompt) // 4 if is_kept else 0))
        await trio.testing.wait_all_tasks_blocked()
        await self.scheduler.acknowledge((request_id,), "bench")
        return took

    def reused(self) -> int:
        assert self._port.admitted is not None
        return self._port.admitted.prefix_tokens


@asynccontextmanager
async def opened(mode: str) -> AsyncIterator[Bench]:
    settings = CoordinatorSettings(prefix_reuse=mode, audit_interval_s=0)
    async with open_supervisor() as supervisor:
        token_log = TokenLog(settings.live_requests_max + settings.ended_keep_max, 1 << 20)
        scheduler = Scheduler(settings, token_log=token_log, listener=Listener())
        supervisor.start(scheduler)
        port = Port()
        hello = messages.WorkerHello(1, "w", "n", 1, 4711, 0, 0, 1, MODEL, CAPACITY)
        await scheduler.worker_up(hello, port)
        yield Bench(scheduler, token_log, port)
        await supervisor.shutdown()


def _prompt(rng: np.random.Generator, tokens: int) -> bytes:
    return rng.integers(0, VOCABULARY, tokens, dtype=np.int32).tobytes()


async def admissions(lengths: Iterable[int], rounds: int) -> list[dict[str, Any]]:
    """One row for each length of a prompt: medians in us, and the median of what reuse adds, over pairs."""
    rows = []
    rng = np.random.default_rng(1)
    async with opened("off") as off, opened("own") as own:
        for tokens in lengths:
            pages = tokens // PAGE_TOKENS
            known = _prompt(rng, tokens)
            await own.admission_s(known, is_kept=True)
            await off.admission_s(known)
            found: dict[str, list[float]] = {"off": [], "off_again": [], "miss": [], "hit": []}
            reused, count = 0, max(20, rounds // max(1, pages // 64))
            gc.collect()
            gc.disable()
            turns = [("off", off, None), ("off_again", off, known), ("miss", own, None), ("hit", own, known)]
            for _ in range(count):
                rng.shuffle(turns)  # what comes first finds cold caches
                for name, bench, prompt in turns:
                    found[name].append(await bench.admission_s(prompt or _prompt(rng, tokens)))
                    reused = bench.reused() if name == "hit" else reused
            gc.enable()
            row: dict[str, Any] = {"prompt_tokens": tokens, "pages": pages, "rounds": count, "reused_tokens": reused}
            row |= {f"{name}_us": round(1e6 * statistics.median(times), 2) for name, times in found.items()}
            for name, without in (("miss", "off"), ("hit", "off_again")):
                extra = statistics.median(b - a for a, b in zip(found[without], found[name], strict=True))
                row[f"{name}_extra_us"] = round(1e6 * extra, 2)
            row["bound_us"] = round(10 + 2 * pages if pages else 0.02 * row["off_us"], 2)
            rows.append(row)
    return rows


class Steps(trio.abc.Instrument):
    """CPU seconds of each step of each task: for so long no other task runs."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self._began = -1.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began >= 0:
            self.took.append(time.thread_time() - self._began)


async def loop_delay(mode: str, prompts: int) -> dict[str, float]:
    """While prompts of a million tokens arrive, every other one cached where prefixes are reused: how late a task is
    that sleeps for a millisecond, and the longest step that any task takes between its checkpoints."""
    late: list[float] = []
    steps = Steps()

    async def tick() -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await trio.sleep(TICK_S)
            late.append(time.perf_counter() - due)

    rng = np.random.default_rng(2)
    base = _prompt(rng, LONG_TOKENS)
    async with opened(mode) as bench, trio.open_nursery() as nursery:
        await bench.admission_s(base, is_kept=True)
        nursery.start_soon(tick)
        trio.lowlevel.add_instrument(steps)
        for number in range(prompts):
            fresh = np.int32(number).tobytes() + base[4:]
            await bench.admission_s(base if number % 2 else fresh)
            await trio.sleep(0.05)
        trio.lowlevel.remove_instrument(steps)
        nursery.cancel_scope.cancel()
    ordered, took = sorted(late), sorted(steps.took)
    return {
        "late_ms_p50": round(1e3 * ordered[len(ordered) // 2], 3),
        "late_ms_p99": round(1e3 * ordered[int(0.99 * len(ordered))], 3),
        "step_ms_p99": round(1e3 * took[int(0.99 * len(took))], 3),
        "step_ms_max": round(1e3 * took[-1], 3),
        "ticks": len(ordered),
    }

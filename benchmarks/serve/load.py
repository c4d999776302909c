"""The clients of a cell, in a closed loop, and the cell from its first request to its figures."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import numpy as np
import trio

from benchmarks.serve.client import Refused
from benchmarks.serve.measures import Answer, Window, measured
from benchmarks.serve.service import Service
from benchmarks.serve.workloads import Cell, Entry, drawn, entries, next_history
from protocol.errors import Unavailable

#: Requests have entered when all have their first token, or when none has come for so long: others wait for memory.
ENTRY_QUIET_S: Final = 4.0
POLL_S: Final = 0.05
#: With which the window beside long prompts ends.
LONG_PROMPTS: Final = 2
#: Until what was decoded in a window has reached its clients and the journal.
CLIENT_LAG_S: Final = 0.3


@dataclass(frozen=True)
class Pace:
    """Seconds of a cell. `window` begins `settle` after the requests have entered. `alone`: of the window without the
    long prompt; `long`: the most that the window of long prompts takes."""

    window: float
    settle: float
    alone: float
    long: float


@dataclass
class Load:
    """The clients of one cell, and all that they have asked."""

    service: Service
    cell: Cell
    seed: str
    vocab: int
    link_ms: Callable[[int], float]
    layers: int
    reuses_prefixes: bool = True
    answers: list[Answer] = field(default_factory=list)
    is_writing: bool = False
    long_ended: int = 0

    def tokens(self, count: int, *about: object) -> list[int]:
        """Token ids that no other prompt of this service has."""
        seed = Random(f"{self.seed} {about}").getrandbits(64)
        found: list[int] = np.random.default_rng(seed).integers(0, self.vocab, count).tolist()
        return found

    async def ask(self, prompt: Sequence[int], output: int, *, is_long: bool = False) -> list[int]:
        answer = Answer(len(prompt), time.monotonic(), self.is_writing, is_long=is_long)
        self.answers.append(answer)
        return await self.service.front.complete(prompt, output, answer)

    async def write_histories(self, found: Sequence[Entry]) -> None:
        """Contexts of sessions, as prefixes that the coordinator knows: of each a request of one token, written."""
        async with trio.open_nursery() as nursery:
            for entry in found:
                nursery.start_soon(self.ask, self.history(entry), 1)
        self.answers.clear()

    def history(self, entry: Entry) -> list[int]:
        return self.tokens(entry.history, "history", entry.number)

    async def keep(self, entry: Entry) -> None:
        """One client, until it is cancelled."""
        work, random = self.cell.workload, Random(f"{self.seed} client {entry.number}")
        prompt, output, turn = (
            [*self.history(entry), *self.tokens(entry.prompt, "entry", entry.number)],
            entry.output,
            0,
        )
        while True:
            said = await self.ask(prompt, output)
            turn += 1
            fresh = self.tokens(drawn(work.fresh, random), "fresh", entry.number, turn)
            before = next_history(work, [*prompt, *said]) if work.has_sessions else []
            prompt, output = [*before, *fresh], work.output

    async def send_long(self) -> None:
        """Long prompts, each sent at the first token of the one before."""
        while True:
            await self.ask(self.tokens(self.cell.workload.long_prompt, "long", self.long_ended), 1, is_long=True)
            self.long_ended += 1

    async def until_entered(self) -> None:
        since, known = trio.current_time(), -1
        while known < self.cell.clients and trio.current_time() - since < ENTRY_QUIET_S:
            begun = sum(it.first is not None for it in self.answers)
            if begun != known:
                since, known = trio.current_time(), begun
            await trio.sleep(POLL_S)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[trio.Nursery]:
        """The clients, in their steady state; gone behind the block, with their requests."""
        found = list(entries(self.cell, Random(self.seed)))
        self.is_writing = True
        await self.service.set_writing(True)
        if self.cell.workload.has_sessions and self.reuses_prefixes:
            await self.write_histories(found)
        try:
            async with trio.open_nursery() as nursery:
                for entry in found:
                    nursery.start_soon(self.keep, entry)
                await self.until_entered()
                await self._compute()
                yield nursery
                nursery.cancel_scope.cancel()
        except* Refused as refused:
            raise Unavailable(str(refused.exceptions[0]), field="cell", value=self.cell.name) from None
        await self.service.until_idle()

    async def _compute(self) -> None:
        """From now on prompts are computed, those too that wait for memory."""
        await self.service.set_writing(False)
        self.is_writing = False
        for answer in self.answers:
            answer.is_written = answer.first is not None

    async def window(self, seconds: float, *, long_prompts: int = 0) -> dict[str, Any]:
        """The figures of a window, of so many seconds at most where it ends with the last of `long_prompts`."""
        before, pool, began = await self.service.worker(), await self.service.pool(), time.monotonic()
        running = []
        wanted = self.long_ended + long_prompts
        while time.monotonic() - began < seconds and not (long_prompts and self.long_ended >= wanted):
            running.append((await self.service.worker()).running)
            await trio.sleep(min(1.0, seconds / 4))
        after, held, ended = await self.service.worker(), await self.service.pool(), time.monotonic()
        await trio.sleep(CLIENT_LAG_S)
        hits, misses = after.hits - before.hits, after.misses - before.misses
        found = measured(
            self.answers,
            self.service.records(),
            Window(began, ended),
            self.link_ms,
            layers=self.layers,
            reused_tokens=held.prefix_reused_tokens - pool.prefix_reused_tokens,
            asked_tokens=held.prefix_asked_tokens - pool.prefix_asked_tokens,
        )
        return found | {
            "running": sum(running) / max(1, len(running)),
            "swap_hits": hits / (hits + misses) if hits + misses else None,
            "cached_pages": held.cached,
            "held_pages": held.host_pages - held.free,
        }


async def run_cell(load: Load, pace: Pace) -> list[dict[str, Any]]:
    """The rows of a cell: one, or of a mix that of the clients alone and that beside long prompts. Raises Unavailable
    when a request is refused or does not leave."""
    cell, began = load.cell, time.monotonic()
    rows = []
    async with load.entered() as nursery:
        entered_s = time.monotonic() - began
        await trio.sleep(pace.settle)
        about = {"workload": cell.workload.name, "cell": cell.name, "clients": cell.clients, "entered_s": entered_s}
        if not cell.workload.long_prompt:
            rows.append(about | {"phase": ""} | await load.window(pace.window))
        else:
            rows.append(about | {"phase": "alone"} | await load.window(pace.alone))
            nursery.start_soon(load.send_long)
            found = await load.window(pace.long, long_prompts=LONG_PROMPTS)
            rows.append(about | {"phase": "beside long prompts"} | found)
        nursery.cancel_scope.cancel()
    return rows

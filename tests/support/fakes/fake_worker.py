"""A worker without tensors: it obeys commands, counts the memory given to it, and writes rows that it checks later.

A host row holds `row_tag(request, position)`. A resumed request reads its rows back, and every decode step reads one
at random, so a page that was handed out twice, too early or in the wrong order is seen as a wrong row (I1, I2). A
worker that was declared lost goes on writing until its process is ended, as a stopped process would.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from protocol import messages
from protocol.arrays import pack_int64, unpack_int32
from protocol.inventory import InventoryRow
from protocol.units import PAGE_TOKENS, managed_chunks, pages_for
from worker.device.inventory import FreeDeviceMemory, take_inventory

#: Tokens of one decode burst between two looks of the coordinator.
BURST_TOKENS_MAX = 40


def row_tag(request_id: str, position: int) -> int:
    return (crc32(request_id.encode()) << 24) + position + 1


def token_of(request_id: str, position: int) -> int:
    """The generated token at `position`: the same on every worker, so outputs can be compared."""
    return (crc32(request_id.encode()) * 31 + position * 40_503) % 1000


def output_tokens(request_id: str, max_tokens: int) -> int:
    """Where the request ends by itself: some at max_tokens (all whose id ends in "!"), some earlier."""
    if request_id.endswith("!"):
        return max_tokens
    return min(max_tokens, crc32(request_id.encode()) % (2 * max_tokens) + 1)


class FakePool:
    """The host pool of a node: one tag per row."""

    def __init__(self, pages: int) -> None:
        self.rows = np.zeros((pages, PAGE_TOKENS), dtype=np.int64)


@dataclass
class FakeRun:
    """One admission on the worker."""

    admit: messages.Admit
    prompt_tokens: int
    pages: list[int]
    index_pages: int
    hot_slots: int
    hot_chunks: int
    generated: int
    rows: int
    durable: int
    phase: str  # prefilling, staged, running, leaving
    resize: messages.Resize | None = None
    parked: bool = False

    @property
    def request_id(self) -> str:
        return self.admit.request_id


@dataclass
class FakeWorker:
    """`emit` takes events, `report` takes (slot, admission, start, tokens, durable); both reach the coordinator as long
    as the link is up."""

    name: str
    node: str
    epoch: int
    capacity: messages.WorkerCapacity
    pool: FakePool
    emit: Callable[[messages.Event], None]
    report: Callable[[int, int, int, list[int], int], None]
    rng: random.Random
    runs: dict[int, FakeRun] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    alive: bool = True

    # ---------------------------------------------------------------- commands

    def obey(self, command: messages.Command) -> None:
        if not self.alive:
            return
        match command:
            case messages.Admit():
                self._admit(command)
            case messages.Grant(placement=placement) if placement in self.runs:
                run = self.runs[placement]
                assert run.resize is None, "a grant must not overtake a resize"
                assert command.host_pages, "a grant of nothing"
                run.pages += unpack_int32(command.host_pages, "host_pages").tolist()
                run.index_pages += command.index_pages
                run.hot_chunks += command.hot_chunks
                run.parked = False
            case messages.Resize(placement=placement) if placement in self.runs:
                assert self.runs[placement].resize is None, "one resize at a time"
                self.runs[placement].resize = command
            case messages.Withdraw(placement=placement) if placement in self.runs:
                self.runs[placement].phase = "leaving"
            case messages.Audit():
                self.emit(self.inventory(command.number))
        self.check_memory()

    def _admit(self, admit: messages.Admit) -> None:
        assert admit.placement not in self.seen, "I4: an admission is never reused"
        self.seen.add(admit.placement)
        prompt, generated = len(admit.prompt) // 4, len(admit.generated) // 4
        pages = unpack_int32(admit.host_pages, "host_pages").tolist()
        cold = admit.durable_tokens == 0
        assert not admit.prefix_tokens % PAGE_TOKENS
        known = generated or int(admit.first_token != messages.NO_TOKEN)
        assert cold or prompt <= admit.durable_tokens <= prompt + known - 1, "rows to go on from"
        assert admit.warm_start in (b"", b"" if cold else admit.request_id.encode()), "another's, or of no rows"
        assert not admit.by_steps or (admit.prefix_tokens and cold)
        assert not admit.computes_prompt or prompt <= self.capacity.prompt_max_tokens, "longer than its passes take"
        there = admit.durable_tokens or admit.prefix_tokens
        assert len(pages) >= pages_for(max(prompt, admit.durable_tokens))
        run = FakeRun(
            admit,
            prompt,
            pages,
            admit.index_pages,
            admit.hot_slots,
            admit.hot_chunks,
            generated,
            there,
            there,
            "prefilling" if admit.computes_prompt else "staged",
        )
        self.runs[admit.placement] = run
        for position in range(generated):
            token = int(unpack_int32(admit.generated, "generated")[position])
            assert token == token_of(admit.request_id, position), "what was delivered never changes"
        for position in range(there):
            self._check_row(run, position)

    def inventory(self, number: int) -> messages.Inventory:
        held = [
            (
                InventoryRow(
                    it.admit.placement,
                    len(it.pages),
                    it.hot_chunks,
                    index_pages=it.index_pages,
                    chunks=it.hot_chunks,
                ),
                it.pages,
            )
            for it in self.runs.values()
        ]
        size = self.capacity
        free = FreeDeviceMemory(
            size.seats - len(held),
            size.hot_chunks - sum(row.chunks for row, _ in held),
            size.index_pages - sum(row.index_pages for row, _ in held),
        )
        return take_inventory(number, held, free)

    # ---------------------------------------------------------------- work

    def advance(self, placement: int) -> None:
        """One thing happens to one admission."""
        run = self.runs[placement]
        if run.resize is not None and run.phase in ("running", "leaving"):
            return self._resize(run)
        match run.phase:
            case "prefilling":
                self._write_rows(run, run.prompt_tokens)
                run.phase, run.durable = "staged", run.prompt_tokens
                self._publish(run, 1)
                self.emit(messages.Staged(placement, 1.0, 1.0))
                if run.hot_slots == messages.NO_HOT_BUFFER:
                    run.phase = "leaving"
            case "staged":
                run.phase = "running"
                self.emit(messages.Started(placement))
            case "running":
                self._decode(run)
            case "leaving":
                del self.runs[placement]
                warm_start = run.admit.request_id.encode()
                one = pack_int64([1])
                self.emit(messages.Counters(1, 1, 0, pack_int64([placement]), one, one, one, pack_int64([0])))
                self.emit(messages.Released(placement, run.durable, warm_start=warm_start))
        return None

    def _decode(self, run: FakeRun) -> None:
        end = output_tokens(run.request_id, run.admit.sampling.max_tokens)
        for _ in range(self.rng.randint(1, BURST_TOKENS_MAX)):
            done = max(0, run.rows - run.prompt_tokens)  # forced tokens are replayed until rows catch up
            if done + 1 >= end:
                break
            resident_rows = run.hot_chunks * PAGE_TOKENS if run.hot_slots == 0 else len(run.pages) * PAGE_TOKENS
            if run.rows >= min(len(run.pages) * PAGE_TOKENS, resident_rows):
                if not run.parked:
                    run.parked = True
                    self.emit(messages.Parked(run.admit.placement))
                return
            self._check_row(run, self.rng.randrange(run.rows))
            self._write_rows(run, run.rows + 1)
            self._publish(run, run.rows - run.prompt_tokens + 1)
        run.durable = max(run.durable, run.rows - self.rng.randint(0, 3))
        self.report(run.admit.request_index, run.admit.placement, run.generated, [], run.durable)
        if max(0, run.rows - run.prompt_tokens) + 1 >= end:
            run.phase = "leaving"
            self.emit(messages.Finished(run.admit.placement, "eos", run.generated))

    def _resize(self, run: FakeRun) -> None:
        resize, run.resize = run.resize, None
        assert resize is not None
        run.hot_slots, run.hot_chunks = resize.hot_slots, resize.hot_chunks
        self.emit(messages.Resized(run.admit.placement, run.hot_slots, run.hot_chunks))

    def _publish(self, run: FakeRun, generated: int) -> None:
        """Report tokens up to `generated`; forced ones are not reported again."""
        fresh = [token_of(run.request_id, position) for position in range(run.generated, generated)]
        if fresh:
            self.report(run.admit.request_index, run.admit.placement, run.generated, fresh, run.durable)
            run.generated = generated

    def _write_rows(self, run: FakeRun, stop: int) -> None:
        for position in range(run.rows, stop):
            page = run.pages[position // PAGE_TOKENS]
            self.pool.rows[page, position % PAGE_TOKENS] = row_tag(run.request_id, position)
        run.rows = stop

    def _check_row(self, run: FakeRun, position: int) -> None:
        found = self.pool.rows[run.pages[position // PAGE_TOKENS], position % PAGE_TOKENS]
        assert found == row_tag(run.request_id, position), f"I2: row {position} of {run.request_id} was overwritten"

    # ---------------------------------------------------------------- invariants

    def check_memory(self) -> None:
        """What the coordinator has given out on this worker never exceeds what there is."""
        runs, capacity = list(self.runs.values()), self.capacity
        pages = [page for run in runs for page in run.pages]
        assert len(pages) == len(set(pages)), "I1: a page is given to one admission"
        assert len(runs) <= capacity.seats
        chunks = sum(max(run.hot_chunks, run.resize.hot_chunks if run.resize else 0) for run in runs)
        assert chunks <= capacity.hot_chunks
        assert sum(run.index_pages for run in runs) <= capacity.index_pages
        for run in runs:
            assert run.index_pages == len(run.pages)
            managed = managed_chunks(run.hot_slots) if run.hot_slots > 0 else 0
            assert run.hot_chunks == (managed if run.hot_slots else len(run.pages))
            assert capacity.decodes or run.hot_slots == messages.NO_HOT_BUFFER, "it only prefills"
            assert capacity.prefills or not run.admit.computes_prompt, "it only decodes"
            limit = run.prompt_tokens + run.admit.sampling.max_tokens + capacity.overshoot_tokens
            assert len(run.pages) <= pages_for(limit), "never granted beyond what can be used"

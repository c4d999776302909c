"""Seats and what is held with them: opened, changed and closed at step boundaries, in launch order.

A request holds one seat, index pages one to one with its host pages, hot chunks, and slab pages while a pass takes its
prompt further. Methods launch what the device must do and change the host's state at once, which is exact; the device's
tables follow on `compute`.

    open        D = 0: hot chunks that prefill fills; index keys of a shared prefix are loaded behind
                `request.prefix_load`. D > 0 (resume), or a rest that goes through steps: hot chunks, set up and
                loaded behind `request.fences`; rows too when the buffer can hold them all, else those of the last
                top-k: unknown, a managed one starts cold
    take_slab   slab pages for the rows of a prompt that a pass reads and writes
    free_slab   those, once everything of the pass was launched
    take_over   the hot buffer that prefill has filled is set up
    grant       more pages, and chunks while resident
    resize      another hot buffer
    keep_topk   what the last step selected, for the next worker
    close       tables cleared, counters kept, `quiesced` recorded; `release` once that was observed

Every check comes before the first change: a placement that raises holds nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from kernels.backend import prepare
from kernels.seat import clear_seat, latest_tokens
from kernels.state import DeviceState
from protocol.arrays import Int32Array, unpack_int32
from protocol.errors import BadInput, CapacityError, InternalError
from protocol.logprobs import row_words
from protocol.logs import fields, logger
from protocol.messages import NO_HOT_BUFFER, Admit, Grant, ModelInfo
from protocol.settings import WorkerSettings
from protocol.units import PAGE_TOKENS, TAIL_PAGES, pages_for
from worker.device.arena import Arena
from worker.device.hot_buffer import HotBuffer, HotBufferChange, SetUp, change, check_size, set_up_prompt
from worker.device.inventory import FreeDeviceMemory
from worker.device.pinned import host_tensor
from worker.device.sizing import Sizing
from worker.device.step_rows import StepRows
from worker.loop.acceptance import RowProgress
from worker.loop.batch import RunningRequest, SeatMemory, Status
from worker.loop.decode import Decoder
from worker.loop.drafting import DraftSeats
from worker.loop.inputs import SeatTables
from worker.loop.output import Output, held_back
from worker.loop.sampler_seats import SamplerSeats
from worker.loop.swap import Swap
from worker.loop.swap_counts import Int64s, SwapCounts
from worker.loop.topk_bytes import unpack
from worker.loop.warm_start import TopkBuffers
from worker.runners.adjust import Adjust
from worker.runners.base import Runner, SamplerState
from worker.streams import Fence, Streams

log = logger("worker.loop.seats")


def allocate_state(runner: Runner, settings: WorkerSettings, sizing: Sizing, host: Tensor) -> DeviceState:
    """The device memory that `sizing` has counted. On a GPU, with its kernels loaded; `host` is registered with it
    then."""
    capacity = sizing.capacity
    state = DeviceState.allocate(
        runner.geometry,
        seats=capacity.seats,
        chunks=capacity.hot_chunks,
        index_pages=capacity.index_pages,
        max_pages=sizing.max_pages,
        max_chunks=sizing.max_chunks,
        slab_pages=sizing.slab_pages,
        tail_slots=capacity.tail_slots if runner.geometry.slot_tokens == 1 else TAIL_PAGES,
        seat_rows=StepRows.of(settings).rows,
        host=host,
        device=settings.device,
    )
    prepare(state)
    return state


def check_admit(admit: Admit, sizing: Sizing, info: ModelInfo, prefix_unit: int = PAGE_TOKENS) -> None:
    """BadInput, naming the field, when this worker can never carry `admit` out. A shared prefix is a multiple of
    `prefix_unit` tokens."""
    prompt, generated = unpack_int32(admit.prompt, "prompt"), unpack_int32(admit.generated, "generated")
    held = held_back(admit.first_token)
    if len(generated) and held:
        raise BadInput("held back behind tokens that were said", field="first_token", value=admit.first_token)
    row_bytes = 4 * row_words(admit.sampling.logprobs)
    if any(len(it.logprobs) != row_bytes for it in held):
        raise BadInput(f"comes without {row_bytes} bytes of log-probabilities", field="first_token", value=held)
    named = ("prompt", prompt), ("generated", generated), ("first_token", np.array([it.token for it in held], np.int32))
    for name, ids in named:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < info.vocab_size:
            raise BadInput(f"ids must lie in 0..{info.vocab_size - 1}", field=name, value=ids[:8].tolist())
    tokens, durable = len(prompt), admit.durable_tokens
    longest = tokens + admit.sampling.max_tokens
    if not tokens or admit.sampling.max_tokens < 1 or longest > sizing.context_max_tokens:
        raise BadInput(
            f"prompt and output must have tokens, {sizing.context_max_tokens} together at most",
            field="prompt",
            value=f"{tokens} + {admit.sampling.max_tokens} tokens",
        )
    known = len(generated) + len(held)
    if durable and not tokens <= durable < tokens + known:
        raise BadInput(
            f"a resume builds on {tokens} to {tokens + known - 1} rows", field="durable_tokens", value=durable
        )
    _check_prefix(admit, tokens, prefix_unit)
    rows, has_rows = max(tokens, durable), not admit.computes_prompt
    _check_pages(unpack_int32(admit.host_pages, "host_pages").tolist(), admit.index_pages, rows, sizing)
    if not has_rows and tokens > sizing.capacity.prompt_max_tokens:
        raise BadInput(
            f"passes have memory for prompts of {sizing.capacity.prompt_max_tokens} tokens",
            field="prompt",
            value=f"{tokens} tokens",
        )
    if admit.hot_slots != NO_HOT_BUFFER:
        check_hot_size(admit.hot_slots, admit.hot_chunks, rows, sizing)
    elif has_rows or admit.hot_chunks:
        raise BadInput("a stay for the prompt alone has no rows before it and no chunks", field="hot_slots", value=-1)


def _check_prefix(admit: Admit, tokens: int, unit: int) -> None:
    prefix, unsent = admit.prefix_tokens, admit.unsent_tokens
    if unsent and (not admit.transfer_id or not 0 < unsent < tokens or unsent % PAGE_TOKENS):
        raise BadInput(
            f"must be a multiple of {PAGE_TOKENS} below the prompt's {tokens} tokens, with a transfer",
            field="unsent_tokens",
            value=unsent,
            remedy="send unsent_tokens 0",
        )
    if admit.by_steps and not prefix:
        raise BadInput("there are no rows before it to go on from", field="by_steps", value=True)
    if not prefix:
        return
    if admit.durable_tokens:
        raise BadInput(
            f"the placement resumes from {admit.durable_tokens} durable tokens",
            field="prefix_tokens",
            value=prefix,
            remedy="send either prefix_tokens or durable_tokens",
        )
    if not 0 < prefix < tokens or prefix % unit:
        raise BadInput(
            f"must be a multiple of {unit} below the prompt's {tokens} tokens",
            field="prefix_tokens",
            value=prefix,
            remedy=f"send at most {(tokens - 1) // unit * unit}",
        )
    if admit.by_steps and unit > PAGE_TOKENS:
        raise BadInput(
            "in deterministic mode what follows a shared prefix is prefilled",
            field="by_steps",
            value=True,
            remedy="send by_steps false",
        )


def check_hot_size(hot_slots: int, hot_chunks: int, rows: int, sizing: Sizing) -> None:
    """BadInput unless this worker offers the hot buffer for a context of `rows`."""
    check_size(hot_slots, hot_chunks, rows, sizing.capacity.hot_size_classes, sizing.max_chunks)


def _check_pages(host_pages: Sequence[int], index_pages: int, rows: int, sizing: Sizing) -> None:
    if not pages_for(rows) <= len(host_pages) <= sizing.max_pages or index_pages != len(host_pages):
        raise BadInput(
            f"{rows} rows need {pages_for(rows)} pages, as many index pages, at most {sizing.max_pages}",
            field="host_pages",
            value=f"{len(host_pages)} with {index_pages} index pages",
        )
    _check_page_ids(host_pages, sizing)


def _check_page_ids(host_pages: Sequence[int], sizing: Sizing) -> None:
    if len(set(host_pages)) < len(host_pages) or not all(0 <= page < sizing.capacity.host_pages for page in host_pages):
        raise BadInput(f"must be distinct ids below {sizing.capacity.host_pages}", field="host_pages", value=host_pages)


class Seats:
    """The only holder of the arenas."""

    def __init__(
        self,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        swap: Swap,
        decoder: Decoder,
        sizing: Sizing,
        warm_start: TopkBuffers,
        rows: StepRows,
        drafting: DraftSeats | None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`eos_token_ids` are the model's."""
        capacity = sizing.capacity
        self.chunks = Arena("hot chunk", capacity.hot_chunks)
        self.slab = Arena("slab page", sizing.slab_pages)
        self._lent: list[int] = []
        self.index_pages = Arena("index page", capacity.index_pages)
        self._sizing = sizing
        self._step_rows = rows.rows
        self._drafting = drafting
        self._compute = streams.compute
        self._state = state
        self._tail_chunks = state.geometry.tail_chunks
        self._samplers = SamplerSeats(streams.compute, sampler, eos_token_ids)
        self._swap = swap
        self._decoder = decoder
        self._warm_starts = warm_start
        self.swap_counts = SwapCounts(swap.counters.swap, capacity.seats, state.tail_slots, state.geometry.slot_tokens)
        self._tables = SeatTables(streams.compute, state)
        self._free = deque(range(capacity.seats))
        selections, device = state.geometry.selections, state.rows.device
        self._final_counts = host_tensor(2, capacity.seats, selections, dtype=torch.int64, device=device)

    def open(self, admit: Admit, output: Output) -> RunningRequest:
        """Seat a placement that `check_admit` accepted. CapacityError, holding nothing, when memory is short."""
        prompt, host_pages = unpack_int32(admit.prompt, "prompt"), unpack_int32(admit.host_pages, "host_pages").tolist()
        rows = admit.durable_tokens or (admit.prefix_tokens if admit.by_steps else 0)  # that decoding goes on from
        resumes, begins = rows > 0, rows or len(prompt)
        step_rows = min(1 + admit.draft_tokens, self._step_rows)
        if not self._free:
            raise CapacityError("no seat left", field="seats", value=self._sizing.capacity.seats)
        if self.index_pages.free < admit.index_pages:
            raise CapacityError("no index pages left", field="index_pages", value=admit.index_pages)
        chunks = tuple(self.chunks.take(admit.hot_chunks))
        memory = SeatMemory(
            host_pages,
            self.index_pages.take(admit.index_pages),
            HotBuffer(admit.hot_slots, chunks) if admit.hot_slots != NO_HOT_BUFFER else HotBuffer(),
            admit.hot_slots,
            admit.hot_chunks,
        )
        request = RunningRequest(
            placement=admit.placement,
            request_index=admit.request_index,
            seat=self._free.popleft(),
            prompt=prompt,
            output=output,
            memory=memory,
            status=Status.LOADING if resumes else Status.PREFILLING,
            progress=RowProgress(begins, begins, admit.durable_tokens or admit.prefix_tokens, step_rows),
            adjust=Adjust.of(admit.sampling),
            logprob_words=row_words(admit.sampling.logprobs),
            owner=admit.owner,
            prefilled=len(prompt) if resumes else admit.prefix_tokens,
        )
        self.swap_counts.open(request.seat)
        self._write_tables(request)
        self._samplers.set(request, admit.sampling)
        if request.adjust is not None or request.logprob_words:
            request.progress.step_rows = 1  # what a draw asks for depends on the draws before it
        if self._drafting is not None:
            self._drafting.open(request.seat, begins)
        if resumes:
            self._resume(request, admit.warm_start)
        elif admit.prefix_tokens:
            memory, tokens = request.memory, request.prefilled
            request.prefix_load = self._swap.load_keys(memory.index_pages, memory.host_pages, tokens)
        return request

    def take_slab(self, request: RunningRequest, rows: int) -> None:
        """Take slab pages for the first `rows` of a prompt; its tables follow with `flush`. CapacityError, changing
        nothing, when too few are free."""
        request.memory.slab = self.slab.take(pages_for(rows))
        self._tables.set("slab_table", request.seat, 0, request.memory.slab)

    def free_slab(self, request: RunningRequest) -> None:
        """Everything of a pass was launched. Its units are ahead of the next owner's on `compute`; the next owner waits
        for its copies to host memory (worker/loop/prefill.py)."""
        self.slab.give(request.memory.slab)
        request.memory.slab = []

    @property
    def lendable_slab(self) -> int:
        """Slab pages that a split pass of another rank can have, behind the one that has some."""
        return self.slab.free + len(self._lent)

    def lend_slab(self, counts: Sequence[int]) -> list[list[int]]:
        """Take as many slab pages as `counts` says for each part of another rank's pass. CapacityError, changing
        nothing, when too few are free."""
        pages = iter(self.slab.take(sum(counts)))
        lent = [list(islice(pages, count)) for count in counts]
        self._lent = [page for held in lent for page in held]
        return lent

    def end_loan(self) -> None:
        """Everything of that pass was launched; see `free_slab`."""
        self.slab.give(self._lent)
        self._lent = []

    def take_over(self, request: RunningRequest) -> None:
        """A prompt was seen staged: its hot buffer, which prefill has filled, is set up."""
        self._tables.flush()
        self._set_up(request, set_up_prompt(request.memory.hot, request.prompt_tokens, self._tail_chunks))
        request.note_memory()

    def grant(self, request: RunningRequest, grant: Grant) -> None:
        """Append pages, and chunks for a resident buffer. BadInput or CapacityError before any change."""
        host_pages = unpack_int32(grant.host_pages, "host_pages").tolist()
        memory, pages = request.memory, len(request.memory.host_pages)
        _check_page_ids([*memory.host_pages, *host_pages], self._sizing)
        if grant.index_pages != len(host_pages) or pages + len(host_pages) > self._sizing.max_pages:
            raise BadInput(
                f"pages come with index pages, {self._sizing.max_pages} at most", field="host_pages", value=host_pages
            )
        if grant.hot_chunks and (memory.hot_slots or memory.hot_chunks + grant.hot_chunks > self._sizing.max_chunks):
            raise BadInput("chunks are for resident buffers", field="hot_chunks", value=grant.hot_chunks)
        if self.index_pages.free < grant.index_pages or self.chunks.free < grant.hot_chunks:
            raise CapacityError("no index pages or chunks left", field="index_pages", value=grant.index_pages)
        self._grant_chunks(request, grant.hot_chunks)
        index_pages = self.index_pages.take(grant.index_pages)
        self._tables.set("host_table", request.seat, pages, host_pages)
        self._tables.set("index_table", request.seat, pages, index_pages)
        memory.host_pages += host_pages
        memory.index_pages += index_pages
        request.note_memory()

    def resize(self, request: RunningRequest, hot_slots: int, hot_chunks: int) -> bool:
        """Give a request that may be resized another hot buffer; True when it must load its rows, behind
        `request.fences`.

        BadInput or CapacityError before any change.
        """
        check_hot_size(hot_slots, hot_chunks, request.position, self._sizing)
        memory, old = request.memory, request.memory.hot
        if hot_chunks - len(old.chunks) > self.chunks.free:
            raise CapacityError("no chunks left", field="hot_chunks", value=hot_chunks)
        memory.hot_slots, memory.hot_chunks = hot_slots, hot_chunks
        if not request.has_hot_buffer:
            self._resize_empty(request)
            return False
        self._decoder.wait_backed_up()
        done = self._change(request, old, request.position)
        self.chunks.give(done.freed)
        if done.freed or done.reload:
            self._swap.reclaim()
        if done.reload:
            managed = done.buffer.hot_slots > 0
            request.fences = self._load_units(request, []) if managed else (self._load_rows(request),)
        return done.reload

    def step_back(self, request: RunningRequest) -> None:
        """The step launched last for `request` is to be launched again. A managed buffer has its row in a tail slot
        already, and begins cold; one of pages finds the row's page in its slot."""
        self._decoder.withdraw(request)
        self._decoder.wait_backed_up()
        hot = request.memory.hot
        if hot.hot_slots and self._state.geometry.slot_tokens == 1:
            self._set_up(request, HotBufferChange(hot, (), SetUp.MANAGED))

    def keep_topk(self, request: RunningRequest) -> None:
        """Keep what the last step of a request selected that is about to leave, if its buffer tells. Before `close`."""
        hot = request.memory.hot
        if hot.hot_slots and request.status in (Status.RUNNING, Status.PARKED):
            request.topk_place = place = self._warm_starts.take()
            if place is not None:
                work = partial(
                    self._keep_topk, request.seat, self._swap.slots_in(hot.hot_slots), self._warm_starts[place]
                )
                self._compute.launch("keep top-k", work)

    def warm_start(self, request: RunningRequest) -> bytes:
        """What was kept of a closed request whose fences were observed, packed. Asked once."""
        return b"" if request.topk_place is None else self._warm_starts.read(request.topk_place)

    def close(self, request: RunningRequest) -> None:
        """Launch the end of `request` behind everything launched for it; `request.fences` tell when it has passed."""
        self._tables.flush()
        self._compute.launch("close seat", partial(self._close, request.seat))
        request.fences = self._swap.quiesce()

    def release(self, request: RunningRequest) -> Int64s:
        """Take everything back from a closed request whose fences were observed; its final hits and misses by index
        group, int64[2, G]."""
        self.chunks.give(request.memory.hot.chunks)
        self.slab.give(request.memory.slab)
        self.index_pages.give(request.memory.index_pages)
        self._free.append(request.seat)
        counts: Int64s = self._final_counts[:, request.seat].numpy()
        return counts

    def free(self) -> FreeDeviceMemory:
        """What no request holds."""
        return FreeDeviceMemory(len(self._free), self.chunks.free, self.index_pages.free)

    def flush(self) -> None:
        """Launch table edits not launched yet: before every step."""
        self._tables.flush()

    def check_invariants(self, requests: Iterable[RunningRequest]) -> None:
        """InternalError unless each chunk, page and seat is free or held by one of `requests` (I1)."""
        held = list(requests)
        self.chunks.check_invariants(chunk for r in held for chunk in r.memory.hot.chunks)
        self.slab.check_invariants([*self._lent, *(page for r in held for page in r.memory.slab)])
        self.index_pages.check_invariants(page for r in held for page in r.memory.index_pages)
        seats = sorted([*self._free, *(r.seat for r in held)])
        if seats != list(range(self._sizing.capacity.seats)):
            raise InternalError("a seat is free and held, or neither", field="seats", value=seats)

    # ---------------------------------------------------------------- parts

    def _resume(self, request: RunningRequest, warm_start: bytes) -> None:
        memory, hot, rows = request.memory, request.memory.hot, request.position
        kind = SetUp.MANAGED if hot.hot_slots else SetUp.RESIDENT
        loads = not hot.hot_slots or rows <= self._swap.slots_in(hot.hot_slots) * self._state.geometry.slot_tokens
        self._set_up(request, HotBufferChange(hot, (), kind, tokens=rows if loads else 0))
        keys = self._swap.load_keys(memory.index_pages, memory.host_pages, rows)
        request.fences = (keys, self._load_rows(request)) if loads else (keys, *self._load_topk(request, warm_start))
        request.note_memory()

    def _load_topk(self, request: RunningRequest, packed: bytes) -> tuple[Fence, ...]:
        """Begin with what was selected last, where that is known; a hint that cannot be read is counted."""
        return self._load_units(request, self._selected(request, packed))

    def _load_units(self, request: RunningRequest, selected: list[Int32Array]) -> tuple[Fence, ...]:
        """Load the units `selected`, by selection, into an empty buffer, and the page that the next token continues."""
        tokens = self._begin_with(request, selected)
        if not tokens:
            return ()
        self.swap_counts.fill(request.seat, [len(positions) for positions in tokens])
        return (self._swap.load_topk(request.seat, request.memory.hot, request.memory.host_pages, tokens),)

    def _selected(self, request: RunningRequest, packed: bytes) -> list[Int32Array]:
        """Return the units by selection that `packed` names; none where it is empty or cannot be read."""
        starts, geometry = self._swap.counters.warm_starts, self._state.geometry
        units = -(-request.position // geometry.slot_tokens)
        if not packed:
            starts["cold"] += 1
            return []
        try:
            tokens = unpack(packed, geometry.selections, geometry.topk, units)
        except BadInput as error:
            starts["refused"] += 1
            log.warning("cold start", extra=fields(placement=request.placement, error=error))
            return []
        starts["warm"] += 1
        return tokens

    def _begin_with(self, request: RunningRequest, selected: list[Int32Array]) -> list[Int32Array]:
        """Return the units by selection that an empty buffer is to hold, no more than its ordinary slots: a page that
        the next token continues has to be among them, and comes first."""
        geometry, room = self._state.geometry, self._swap.slots_in(request.memory.hot.hot_slots)
        page, inside = divmod(request.position, geometry.slot_tokens)
        if inside:
            first = np.array([page], np.int32)
            others = selected or [first] * geometry.selections
            selected = [np.concatenate((first, pages[pages != page])) for pages in others]
        return [units[:room] for units in selected]

    def _load_rows(self, request: RunningRequest) -> Fence:
        return self._swap.load_rows(request.memory.hot.chunks, request.memory.host_pages, request.position)

    def _change(self, request: RunningRequest, old: HotBuffer, length: int) -> HotBufferChange:
        """Carry out what `change` decides, but for the chunks that it frees."""
        memory = request.memory
        extra = self.chunks.take(max(0, memory.hot_chunks - len(old.chunks)))
        done = change(old, memory.hot_slots, memory.hot_chunks, length, extra, self._tail_chunks)
        memory.hot = done.buffer
        if done.set_up is SetUp.SHRINK:  # needs the old chunk table
            self._tables.flush()
            self._set_up(request, done)
        chunks = done.buffer.chunks
        surplus = max(0, len(old.chunks) - len(chunks))
        self._tables.set("chunk_table", request.seat, 0, (*chunks, *([-1] * surplus)))
        self._tables.flush()
        if done.set_up is not SetUp.SHRINK:
            self._set_up(request, done)
        request.note_memory()
        return done

    def _resize_empty(self, request: RunningRequest) -> None:
        """Exchange the chunks of a hot buffer that no operation was launched for."""
        memory, old = request.memory, request.memory.hot.chunks
        kept, freed = old[: memory.hot_chunks], old[memory.hot_chunks :]
        chunks = *kept, *self.chunks.take(memory.hot_chunks - len(kept))
        memory.hot = HotBuffer(memory.hot_slots, chunks)
        self._tables.set("chunk_table", request.seat, 0, (*chunks, *[-1] * (len(old) - len(chunks))))
        self.chunks.give(freed)

    def _set_up(self, request: RunningRequest, change: HotBufferChange) -> None:
        self._swap.set_up(request.seat, change)
        self.swap_counts.set_up(request.seat, change, request.position)

    def _grant_chunks(self, request: RunningRequest, count: int) -> None:
        memory = request.memory
        memory.hot_chunks += count
        if not count:
            return
        chunks = self.chunks.take(count)
        self._tables.set("chunk_table", request.seat, len(memory.hot.chunks), chunks)
        memory.hot = HotBuffer(memory.hot.hot_slots, (*memory.hot.chunks, *chunks))

    def _write_tables(self, request: RunningRequest) -> None:
        seat, memory = request.seat, request.memory
        self._tables.set("host_table", seat, 0, memory.host_pages)
        self._tables.set("index_table", seat, 0, memory.index_pages)
        self._tables.set("chunk_table", seat, 0, memory.hot.chunks)
        self._tables.flush()

    def _keep_topk(self, seat: int, hot_slots: int, kept: Tensor) -> None:
        latest = torch.empty(kept.shape, dtype=torch.int32, device=self._state.rows.device)
        latest_tokens(self._state, seat, hot_slots, latest)
        kept.copy_(latest, non_blocking=True)

    def _close(self, seat: int) -> None:
        """Operation: keep the seat's counters for `release` and empty it."""
        for kept, counts in zip(self._final_counts, (self._state.hits, self._state.misses), strict=True):
            kept[seat].copy_(counts[:, seat].contiguous(), non_blocking=True)
        clear_seat(self._state, seat)

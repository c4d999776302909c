"""Drives a runner as the executor does, without executor, coordinator or pool file: prefill, stage, decode, one thread.

Every request gets scattered pages and chunks, its whole prompt in host memory, and either a resident or a managed hot
buffer. Its slab pages are chunks of the arena, so that tests see a prompt's rows of every layer behind its pass.
`decode` runs one step of the seats named, in the order named; with `graphs`, on a GPU, what the runner launches is
captured once per batch size and replayed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kernels.begin_step import begin_step
from kernels.copy_rows import copy_rows_to_host
from kernels.cuda.launch import prepare
from kernels.seat import hold_tokens, init_managed, init_resident
from kernels.state import BackupPlan, DeviceState, StepBatch
from protocol.units import PAGE_TOKENS, managed_chunks, pages_for
from tests.support.prompts import PASS_TOKENS, launch_prompt
from worker.runners.base import DraftRows, DraftRunner, Runner, SamplerState, StepOutputs
from worker.streams import Streams, make_streams

TAIL_SLOTS = 4
TAIL_PAGES = 2


@dataclass
class _Step:
    """What steps of one batch size use."""

    batch: StepBatch
    plan: BackupPlan
    outputs: StepOutputs
    replay: Callable[[], object] | None = None


class Rig:
    def __init__(
        self,
        runner: Runner,
        *,
        seats: int,
        context_tokens: int,
        streams: Streams | None = None,
        seed: int = 0,
        device: str = "cpu",
        graphs: bool = False,
        pass_tokens: int = PASS_TOKENS,
    ) -> None:
        geometry, pages = runner.geometry, pages_for(context_tokens)
        chunks = seats * (2 * pages + 1)
        # Rows of dense layers lie by index page: a prompt's, by slab page, lie before those of contexts.
        first_index = chunks if geometry.dense else 0
        self.runner = runner
        self.streams = streams or make_streams("inline")
        host = torch.zeros(seats * pages, geometry.page_bytes, dtype=torch.uint8)
        self.state = DeviceState.allocate(
            geometry,
            seats=seats,
            chunks=chunks,
            index_pages=first_index + seats * pages,
            max_pages=pages,
            max_chunks=pages + 1,
            slab_pages=pages,
            tail_slots=TAIL_SLOTS if geometry.slot_tokens == 1 else TAIL_PAGES,
            host=host if device == "cpu" else host.pin_memory(),
            device=device,
        )
        vars(self.state)["_slab_views"] = (self.state, self.state)  # the arena: a slab that keeps every layer
        if device != "cpu":
            prepare(self.state)
        self.sampler = SamplerState.allocate(seats, runner.info.vocab_size, device)
        self.lengths = [0] * seats
        self.device, self.graphs = device, graphs
        self.pass_tokens = pass_tokens
        self._steps: dict[int, _Step] = {}
        self._drafted: list[int] = []
        draw = random.Random(seed)
        self._chunks = draw.sample(range(chunks), chunks)
        self._pages = draw.sample(range(first_index, first_index + seats * pages), seats * pages)

    def open(
        self, seat: int, prompt: Sequence[int], *, hot_slots: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[int, Tensor]:
        """Prefill, stage, and set up the hot buffer (0: resident) cold or by copy: the first token and its logits."""
        tokens, outputs = torch.tensor(list(prompt), device=self.device), self.outputs()
        self.grant(seat, len(tokens), temperature=temperature, seed=seed)
        memory = self.streams, self.state, self.sampler, seat
        launch_prompt(self.runner, *memory, tokens, 0, outputs, pass_tokens=self.pass_tokens)
        self.streams.compute.record("sampled").wait()
        self._stage(seat, len(tokens))
        self.set_hot(seat, hot_slots, len(tokens))
        self.lengths[seat] = len(tokens)
        assert outputs.logits is not None
        assert outputs.warm_start is not None
        self.warm_start = outputs.warm_start  # of the prompt opened last
        return int(outputs.tokens[0]), outputs.logits[0].clone()

    def grant(self, seat: int, tokens: int, *, temperature: float = 0.0, seed: int = 0) -> None:
        """Memory for a prompt of so many tokens, before anything is computed."""
        state, pages = self.state, self.state.host_table.shape[1]
        state.index_table[seat] = self._take(self._pages, pages)
        state.host_table[seat] = torch.arange(seat * pages, (seat + 1) * pages).int().flip(0)
        state.slab_table[seat, : pages_for(tokens)] = self._take(self._chunks, pages_for(tokens))
        self.sampler.set_seat(seat, temperature, 1.0, seed)

    def outputs(self) -> StepOutputs:
        """Outputs for a first token, with logits and what it selected."""
        g, vocab = self.runner.geometry, self.runner.info.vocab_size
        return StepOutputs.allocate(1, vocab, keep_logits=True, topk_shape=(g.selections, g.topk), device=self.device)

    def set_hot(self, seat: int, hot_slots: int, tokens: int) -> None:
        """A fresh hot buffer of a context of `tokens`: resident with all rows, or managed and cold."""
        state, pages = self.state, self.state.host_table.shape[1]
        chunks = managed_chunks(hot_slots) if hot_slots else pages
        state.chunk_table[seat] = -1
        if hot_slots:
            state.chunk_table[seat, :chunks] = self._take(self._chunks, chunks)
            slots = hot_slots if state.geometry.slot_tokens == 1 else chunks - state.tail_slots
            init_managed(state, seat, slots, 0, 0)
            if tokens % state.geometry.slot_tokens:
                self._hold(seat, slots, tokens // PAGE_TOKENS)
            return
        slab = state.slab_table[seat, : pages_for(tokens)]
        state.chunk_table[seat, : len(slab)] = slab
        state.chunk_table[seat, len(slab) : pages] = self._take(self._chunks, pages - len(slab))
        init_resident(state, seat)

    def _hold(self, seat: int, slots: int, page: int) -> None:
        """Put the page that the next token lies in into slot 0 of every selection."""
        state = self.state
        selections = torch.arange(state.geometry.selections)
        hold_tokens(state, seat, slots, selections, torch.zeros_like(selections), torch.full_like(selections, page))
        source, target = int(state.slab_table[seat, page]), int(state.chunk_table[seat, 0])
        for plane in state.planes:
            by_page = plane.unflatten(1, (-1, PAGE_TOKENS))
            by_page[:, target] = by_page[:, source]

    def decode(
        self, seats: Sequence[int], *, rows: int = 0, inputs: Sequence[int] | None = None
    ) -> tuple[list[int], Tensor]:
        """One step of `seats` in a batch padded to `rows`: tokens and logits float32[len(seats), vocab]."""
        step = self._step(rows or len(seats))
        for seat in seats:
            self.lengths[seat] += 1
        self._fill(step.batch, seats, [self.lengths[seat] for seat in seats], inputs or [-1] * len(seats))
        self._launch(step)
        outputs = step.outputs
        assert outputs.logits is not None
        assert not self.state.tripwires.any(), self.state.tripwires
        return outputs.tokens[: len(seats)].tolist(), outputs.logits[: len(seats)].clone()

    def draft(
        self,
        seats: Sequence[int],
        following: Sequence[int],
        *,
        further: bool = False,
        rows: int = 0,
        rows_alone: bool = False,
    ) -> DraftRows:
        """Drafts, with logits, of the step of these `seats` and `rows` that ran last, and of the tokens `following`.
        With `further` drafts: of what the launch before drafted, one position later. With `rows_alone` the layer's rows
        and index keys, and no drafts."""
        step, runner = self._step(rows or len(seats)), cast(DraftRunner, self.runner)
        count = len(step.batch.seats)
        draft = DraftRows.allocate(count, source_rows=count if further else 0, vocab_size=self.runner.info.vocab_size)
        draft.following[: len(following)] = torch.tensor(following)
        if draft.source is not None:
            for seat in seats:
                self.lengths[seat] += 1
            draft.source[: len(seats)] = torch.tensor([self._drafted.index(seat) for seat in seats])
            self._fill(step.batch, seats, [self.lengths[seat] for seat in seats], [-1] * len(seats))
            self.streams.compute.launch("begin", lambda: begin_step(self.state, step.batch, step.plan))
        self._drafted = list(seats)
        if rows_alone:
            runner.launch_draft_rows(self.streams, self.state, step.batch, draft)
        else:
            runner.launch_draft(self.streams, self.state, self.sampler, step.batch, draft)
        self.streams.compute.record("sampled").wait()
        return draft

    def hit_rate(self) -> float:
        hits, misses = int(self.state.hits.sum()), int(self.state.misses.sum())
        return hits / max(1, hits + misses)

    def _step(self, rows: int) -> _Step:
        if rows in self._steps:
            return self._steps[rows]
        places, vocab = self.runner.geometry.places, self.runner.info.vocab_size
        step = self._steps[rows] = _Step(
            StepBatch.allocate(rows, places, self.device),
            BackupPlan.allocate(rows, places, self.device),
            StepOutputs.allocate(rows, vocab, keep_logits=True, device=self.device),
        )
        if self.graphs:
            self._launch(step)  # padding alone: scratch memory and compiled kernels, before anything is captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._launch_runner(step)
            step.replay = graph.replay
        return step

    @staticmethod
    def _fill(batch: StepBatch, seats: Sequence[int], lengths: Sequence[int], inputs: Sequence[int]) -> None:
        for tensor, values, padding in (
            (batch.seats, seats, -1),
            (batch.lengths, lengths, 0),
            (batch.inputs, inputs, -1),
        ):
            tensor.copy_(torch.tensor([*values, *[padding] * (len(tensor) - len(values))]))
        batch.num_real.fill_(len(seats))

    def _launch(self, step: _Step) -> None:
        compute, backup, state, plan = self.streams.compute, self.streams.backup, self.state, step.plan
        compute.launch("begin", lambda: begin_step(state, step.batch, plan))
        if step.replay is None:
            self._launch_runner(step)
        else:
            compute.launch("replay", step.replay)
        backup.wait(compute.record("row_written"))
        places = (plan.device_row, plan.index_row, plan.host_page, plan.host_offset)
        backup.launch("backup", lambda: copy_rows_to_host(state, *places))
        compute.wait(backup.record("backed_up"))
        compute.record("sampled").wait()

    def _launch_runner(self, step: _Step) -> None:
        self.runner.launch_forward(self.streams, self.state, self.sampler, step.batch)
        self.runner.launch_sample(self.streams, self.sampler, step.batch, step.outputs, None)

    def _stage(self, seat: int, tokens: int) -> None:
        state, positions = self.state, torch.arange(tokens, device=self.device)
        pages, offsets = positions // PAGE_TOKENS, positions % PAGE_TOKENS
        rows = state.slab_table[seat].long()[pages] * PAGE_TOKENS + offsets
        keys = state.index_table[seat].long()[pages] * PAGE_TOKENS + offsets
        places = rows.expand(state.geometry.places, -1).contiguous()
        copy_rows_to_host(state, places, keys, state.host_table[seat].long()[pages], offsets)
        for plane in state.dense_planes:
            plane[:, keys] = plane[:, rows]

    @staticmethod
    def _take(free: list[int], count: int) -> Tensor:
        taken = free[:count]
        del free[:count]
        return torch.tensor(taken)

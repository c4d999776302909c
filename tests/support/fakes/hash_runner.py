"""A runner that computes hashes of the bytes it really reads, so that one wrong byte gives other tokens.

Hidden states, rows and keys are 64-bit hashes. A row depends on its token and on everything attended to so far; a
layer's output depends on every selected row and on its rank; the selection on every index key of the context. The
same arithmetic over plain lists, without any memory of ours, is `expected_tokens`: the oracle.

It runs where its tensors are, and on a GPU without waiting for it, so that its steps may be captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kernels.layout import Geometry
from kernels.rows import (
    gather_rows,
    read_index_keys,
    read_slab_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.state import DeviceState, MissPlan, StepBatch, real_rows
from protocol.messages import ModelInfo
from protocol.units import PAGE_TOKENS
from worker.runners.adjust import Adjust
from worker.runners.base import LayerWritten, SamplerState, StepOutputs, no_listener
from worker.runners.logprobs import write_logprobs
from worker.runners.swapping import launch_swap_in
from worker.streams import Fence, Streams

VOCAB = 251
TOPK = 64
EOS = 250
#: Index groups by layer: layer 1 shares the selection of layer 0, layer 2 has its own.
SHARED = (0, 0, 1)
#: Every layer has its own selection, so nothing ever waits for `swap` within a step.
SEPARATE = (0, 1)
#: How many different selections a context is read with: few enough that successive steps share rows.
PATTERNS = 3


def mix(values: Tensor) -> Tensor:
    """A 64-bit hash of int64 values, by multiply and xor-shift."""
    values = (values ^ (values >> 29)) * -0x4B47D0C5E1A2F3C9
    values = (values ^ (values >> 32)) * -0x2545F4914F6CDD1D
    return values ^ (values >> 31)


def embed(tokens: Tensor) -> Tensor:
    return mix(tokens.long() * 2 + 1)


def rows_of(hidden: Tensor, layer: int) -> Tensor:
    """int64[..., 2]: the KV row of a hidden state."""
    return torch.stack((mix(hidden + layer), mix(hidden - layer - 7)), -1)


def keys_of(hidden: Tensor, group: int) -> Tensor:
    return mix(hidden * 3 + group)


def select(hidden: Tensor, keys: Tensor, held: Tensor) -> Tensor:
    """int64[B, k] positions, ascending, -1 padded, of keys [B, n] of which `held` exist."""
    patterns = mix(hidden.abs() % PATTERNS).unsqueeze(1)
    places = torch.arange(keys.shape[1], device=keys.device)
    scores = (mix(keys ^ patterns ^ places) >> 1).masked_fill(~held, torch.iinfo(torch.int64).min)
    count = min(TOPK, keys.shape[1])
    chosen = scores.topk(count, dim=1).indices
    absent = torch.iinfo(torch.int64).max
    chosen = torch.where(held.gather(1, chosen), chosen, absent).sort(1).values
    chosen = torch.where(chosen == absent, -1, chosen)
    return torch.nn.functional.pad(chosen, (0, TOPK - count), value=-1)


def attend(hidden: Tensor, rows: Tensor, held: Tensor) -> Tensor:
    """Hidden states after the rows int64[B, k, 2] that `held` marks, in their order."""
    ranks = torch.arange(2 * rows.shape[1], device=rows.device).view(-1, 2)
    ranks = ranks // 2 * 5 + ranks % 2
    return mix(hidden + mix(rows + ranks).sum(-1).masked_fill(~held, 0).sum(1))


def attend_prompt(hidden: Tensor, start: int, rows: Tensor) -> Tensor:
    """Hidden states of positions start.. after all rows int64[n, 2] up to their own."""
    return mix(hidden + mix(rows).sum(-1).cumsum(0)[start:])


def draw(hidden: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Tokens int32[B]; seeds 0 are greedy."""
    return (mix(hidden + mix(seeds * 1_000_003 + positions * seeds.sign())).abs() % VOCAB).int()


def draw_allowed(hidden: Tensor, allowed: Tensor) -> Tensor:
    """Tokens int32[B] of those that `allowed` bool[B, VOCAB] marks."""
    scores = mix(hidden.unsqueeze(1) + torch.arange(VOCAB, device=hidden.device)) >> 1
    return scores.masked_fill(~allowed, torch.iinfo(torch.int64).min).argmax(1).int()


#: A grammar whose outputs of up to 120 tokens take turns between two sets of bytes.
ALTERNATING = "start: /([a-m][n-z]){60}/"


def alternates(place: int) -> Tensor:
    """bool[1, VOCAB]: what ALTERNATING allows at a place of the output."""
    tokens = torch.arange(VOCAB)
    first = ord("n" if place % 2 else "a")
    return ((tokens >= first) & (tokens < first + 13)).unsqueeze(0)


def logits_of(hidden: Tensor) -> Tensor:
    return (mix(hidden.unsqueeze(1) + torch.arange(VOCAB, device=hidden.device)).abs() % 1_000_003).float()


@dataclass(eq=False)
class _Scratch:
    hidden: Tensor
    topk: Tensor
    out_rows: Tensor
    plan: MissPlan


@dataclass(eq=False)
class Chunk:
    seat: int
    start: int
    warm_start: Tensor | None
    hidden: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


class FakeRunner:
    """See worker/runners/base.py. Prefill raises for the prompt whose sampling seed is `poison`."""

    def __init__(
        self,
        groups: Sequence[int] = SHARED,
        *,
        poison: int | None = None,
        eos: tuple[int, ...] = (EOS,),
    ) -> None:
        self.geometry = geometry_of(groups)
        self.layers = len(groups)
        self.info = ModelInfo(
            fingerprint="hash",
            name="hash",
            context_max_tokens=4_096,
            vocab_size=VOCAB,
            layers=self.geometry.layers,
            topk=TOPK,
            eos_token_ids=eos,
            tokenizer_kind="bytes",
            tokenizer_hash="",
        )
        self.poison = poison
        self._scratch: dict[int, _Scratch] = {}

    def launch_prefill_chunk(
        self,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        seat: int,
        tokens: Tensor,
        start: int,
        outputs: StepOutputs | None,
        layer_written: LayerWritten = no_listener,
        adjust: Adjust | None = None,
    ) -> None:
        self.launch_model_chunk(streams, state, sampler, seat, tokens, start, outputs, layer_written, adjust)

    def launch_model_chunk(
        self,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        seat: int,
        tokens: Tensor,
        start: int,
        outputs: StepOutputs | None,
        layer_written: LayerWritten,
        adjust: Adjust | None,
    ) -> Chunk:
        """What `launch_prefill_chunk` launches, of the model's own layers."""
        if self.poison is not None and int(sampler.seed[seat]) == self.poison:
            raise ValueError("a poisoned prompt")
        compute, chunk = streams.compute, Chunk(seat, start, outputs.warm_start if outputs else None)
        compute.launch("prefill", partial(self._embed_prompt, chunk, tokens))
        for layer in range(self.layers):
            compute.launch("prefill project", partial(self._project_prompt, chunk, state, layer))
            layer_written(layer)
            compute.launch("prefill attend", partial(self._attend_prompt, chunk, state, layer))
        if outputs is not None:
            draw_first = partial(self._first_token, chunk, sampler, start + len(tokens), outputs, adjust)
            compute.launch("first token", draw_first)
        return chunk

    def launch_forward(self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch) -> None:
        scratch, compute = self._scratch_for(len(batch.seats), state.rows.device), streams.compute
        compute.launch("embed", partial(self._embed, scratch, sampler, batch))
        loaded: dict[int, Fence] = {}
        for layer, group in enumerate(self.geometry.group_of_layer[: self.layers]):
            if layer == self.geometry.layers_of_group(group)[0]:
                compute.launch("select", partial(self._select, scratch, state, batch, group))
                selection = scratch.topk, batch, scratch.out_rows, scratch.plan
                loaded = launch_swap_in(streams, state, group, *selection)
            compute.launch("project", partial(self._project, scratch, state, batch, layer))
            if layer in loaded:
                compute.wait(loaded[layer])
            compute.launch("attend", partial(self._attend, scratch, state, layer))

    def launch_sample(
        self, streams: Streams, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        """Adjusts nothing but by grammars: its draws are hashes, and have no logits."""
        scratch = self._scratch_for(len(batch.seats), batch.seats.device)
        streams.compute.launch("sample", partial(self._sample, scratch, sampler, batch, outputs, adjust))

    def _embed_prompt(self, chunk: Chunk, tokens: Tensor) -> None:
        chunk.hidden = embed(tokens)

    def _project_prompt(self, chunk: Chunk, state: DeviceState, layer: int) -> None:
        group, seat, start = self.geometry.group_of_layer[layer], chunk.seat, chunk.start
        write_slab_rows(state, layer, seat, start, _bytes(rows_of(chunk.hidden, layer)))
        if self.geometry.layers_of_group(group)[0] == layer:
            write_prompt_index_keys(state, group, seat, start, _bytes(keys_of(chunk.hidden, group).unsqueeze(1)))
            keys = read_index_keys(state, group, seat, start + len(chunk.hidden)).view(torch.int64)
            if chunk.warm_start is not None:
                held = keys.view(1, -1)
                chunk.warm_start[group] = select(chunk.hidden[-1:], held, torch.ones_like(held, dtype=torch.bool))[0]
            chunk.hidden = mix(chunk.hidden + keys.sum())

    def _attend_prompt(self, chunk: Chunk, state: DeviceState, layer: int) -> None:
        rows = read_slab_rows(state, layer, chunk.seat, chunk.start + len(chunk.hidden)).view(torch.int64)
        chunk.hidden = attend_prompt(chunk.hidden, chunk.start, rows)

    def _first_token(
        self, chunk: Chunk, sampler: SamplerState, position: int, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        hidden, own = chunk.hidden[-1:], slice(chunk.seat, chunk.seat + 1)
        seats = torch.full_like(hidden, chunk.seat)
        token = _drawn(sampler, adjust, hidden, seats, torch.full_like(hidden, position))
        outputs.tokens[:1] = token
        sampler.last_token[own] = token
        if outputs.logprobs is not None:
            write_logprobs(logits_of(hidden), token, outputs.logprobs[:1])

    def _embed(self, scratch: _Scratch, sampler: SamplerState, batch: StepBatch) -> None:
        drawn = sampler.last_token[batch.seats.long().clamp(min=0)]
        scratch.hidden = embed(torch.where(batch.inputs >= 0, batch.inputs, drawn).clamp(min=0))

    def _select(self, scratch: _Scratch, state: DeviceState, batch: StepBatch, group: int) -> None:
        write_index_keys(state, group, batch, _bytes(keys_of(scratch.hidden, group).unsqueeze(1)))
        lengths = batch.lengths.unsqueeze(1)
        pages = state.index_table[batch.seats.long().clamp(min=0)].long().clamp(min=0)
        keys = state.key_words[group].view(-1, PAGE_TOKENS)[pages].flatten(1)
        held = torch.arange(keys.shape[1], device=keys.device) < lengths
        scratch.topk.copy_(select(scratch.hidden, keys, held))

    def _project(self, scratch: _Scratch, state: DeviceState, batch: StepBatch, layer: int) -> None:
        write_new_rows(state, layer, batch, _bytes(rows_of(scratch.hidden, layer)))

    def _attend(self, scratch: _Scratch, state: DeviceState, layer: int) -> None:
        rows = gather_rows(state, layer, scratch.out_rows).view(torch.int64)
        scratch.hidden = attend(scratch.hidden, rows, scratch.out_rows >= 0)

    def _sample(
        self, scratch: _Scratch, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        real, seats = real_rows(batch), batch.seats.long().clamp(min=0)
        if adjust is not None and adjust.grammar:
            real = real & sampler.adjust.drawn(seats)
        tokens = _drawn(sampler, adjust, scratch.hidden, seats, batch.lengths.long())
        outputs.tokens.copy_(tokens.masked_fill(~real, -1))
        owners = torch.arange(len(sampler.seed), device=seats.device).unsqueeze(1) == batch.seats.masked_fill(~real, -1)
        drawn = (owners * tokens).sum(1).int()
        sampler.last_token.copy_(torch.where(owners.any(1), drawn, sampler.last_token))
        if outputs.logits is not None:
            outputs.logits.copy_(logits_of(scratch.hidden))
        if outputs.logprobs is not None:
            write_logprobs(logits_of(scratch.hidden), tokens, outputs.logprobs)

    def _scratch_for(self, rows: int, device: torch.device) -> _Scratch:
        if rows not in self._scratch:
            topk = torch.full((rows, TOPK), -1, dtype=torch.int32, device=device)
            hidden = torch.zeros(rows, dtype=torch.int64, device=device)
            self._scratch[rows] = _Scratch(hidden, topk, topk.clone(), MissPlan.allocate(rows, TOPK, device))
        return self._scratch[rows]


def _drawn(sampler: SamplerState, adjust: Adjust | None, hidden: Tensor, seats: Tensor, positions: Tensor) -> Tensor:
    tokens = draw(hidden, sampler.seed[seats], positions)
    if adjust is None or not adjust.grammar:
        return tokens
    held = draw_allowed(hidden, sampler.adjust.allowed(seats))
    return torch.where(sampler.adjust.has_grammar[seats], held, tokens)


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    seed: int,
    chunk_tokens: int,
    groups: tuple[int, ...] = SHARED,
    prefilled: int | None = None,
    is_held: bool = False,
) -> list[int]:
    """What `count` generated tokens must be, over plain lists of rows and keys. The prompt goes through decode steps
    from position `prefilled` on. `is_held`: to ALTERNATING."""

    prefilled = len(prompt) if prefilled is None else prefilled
    chunks = {start: min(start + chunk_tokens, prefilled) for start in range(0, prefilled, chunk_tokens)}
    return computed(prompt, count, seed, chunks, groups, is_held=is_held)[0]


def computed(
    prompt: Sequence[int],
    count: int,
    seed: int,
    chunks: Mapping[int, int],
    groups: tuple[int, ...] = SHARED,
    *,
    is_held: bool = False,
) -> tuple[list[int], Tensor]:
    """The tokens that `expected_tokens` returns, and the states int64[n] of all positions that have a row. Positions
    from a key of `chunks` to its value go through one prompt chunk, all others through decode steps."""

    def drawn(hidden: Tensor, position: int) -> int:
        if is_held:
            return int(draw_allowed(hidden, alternates(position - len(prompt))))
        return int(draw(hidden, torch.tensor([seed]), torch.tensor([position])))

    rows: list[list[Tensor]] = [[] for _ in groups]
    keys: list[list[Tensor]] = [[] for _ in groups]
    tokens, states, position = list(prompt), list[Tensor](), 0
    while len(tokens) < len(prompt) + count:
        stop = chunks.get(position, 0)
        hidden, chosen = embed(torch.tensor(tokens[position : stop or position + 1])), torch.zeros(0)
        for layer, group in enumerate(groups):
            rows[layer].append(rows_of(hidden, layer))
            if groups.index(group) == layer:
                keys[group].append(keys_of(hidden, group))
                all_keys = torch.cat(keys[group])
                if stop:
                    hidden = mix(hidden + all_keys.sum())
                else:
                    chosen = select(hidden, all_keys[None], torch.ones_like(all_keys[None], dtype=torch.bool))
            all_rows = torch.cat(rows[layer])
            if stop:
                hidden = attend_prompt(hidden, position, all_rows)
            else:
                hidden = attend(hidden, all_rows[chosen.clamp(min=0)], chosen >= 0)
        states.append(hidden)
        position = stop or position + 1
        if position >= len(prompt):
            tokens.append(drawn(hidden[-1:], position))
    return tokens[len(prompt) :], torch.cat(states)


def geometry_of(groups: Sequence[int]) -> Geometry:
    return Geometry(len(groups), row_bytes=16, group_of_layer=tuple(groups), index_row_bytes=8, topk=TOPK)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)

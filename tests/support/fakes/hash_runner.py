"""A runner that computes hashes of the bytes it really reads, so that one wrong byte gives other tokens.

Hidden states, rows and keys are 64-bit hashes. A row depends on its token and on everything attended to so far; a
layer's output depends on every selected row and on its rank; the selection on every index key of the context. A prompt
token attends to all keys and rows up to its own, so that nothing depends on how prompts are cut into units. The same
arithmetic over plain lists, without any memory of ours, is `expected_tokens`: the oracle.

It runs where its tensors are, and on a GPU without waiting for it, so that its steps may be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from worker.runners.base import PromptPart, PromptPass, SamplerState, StepOutputs, UnitWritten, no_listener
from worker.runners.logprobs import write_logprobs
from worker.runners.swapping import launch_selection
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
#: Rows of the largest unit, by default.
BLOCK_TOKENS = 64


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


def see_keys(hidden: Tensor, start: int, keys: Tensor) -> Tensor:
    """Hidden states of prompt positions start.. after all keys int64[n] up to their own."""
    return mix(hidden + keys.cumsum(0)[start:])


def attend_prompt(hidden: Tensor, start: int, rows: Tensor) -> Tensor:
    """Hidden states of prompt positions start.. after all rows int64[n, 2] up to their own."""
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
class FakePass(PromptPass):
    """States int64[P] of its tokens int64[P], and positions int32[G, k] by the number of a part that ends."""

    tokens: Tensor = field(init=False)
    hidden: Tensor = field(init=False)
    warm_starts: dict[int, Tensor] = field(default_factory=dict)


Pieces = list[tuple[int, PromptPart]]


class FakeRunner:
    """See worker/runners/base.py. The first token raises for the prompt whose sampling seed is `poison`."""

    def __init__(
        self,
        groups: Sequence[int] = SHARED,
        *,
        poison: int | None = None,
        eos: tuple[int, ...] = (EOS,),
        block_tokens_max: int = BLOCK_TOKENS,
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
        self.block_tokens_max = block_tokens_max
        self._scratch: dict[int, _Scratch] = {}

    def prompt_bytes(self, pass_tokens: int) -> int:
        return 8 * pass_tokens

    def begin_pass(
        self, streams: Streams, state: DeviceState, parts: Sequence[PromptPart], tokens: Tensor
    ) -> PromptPass:
        prompts = FakePass(tuple(parts))
        streams.compute.launch("prompt embed", partial(self._embed_prompts, prompts, tokens))
        return prompts

    def launch_unit(
        self,
        streams: Streams,
        state: DeviceState,
        prompts: PromptPass,
        layer: int,
        first: int,
        stop: int,
        written: UnitWritten = no_listener,
        rows: int = 0,
    ) -> None:
        assert isinstance(prompts, FakePass)
        assert 0 <= first < stop <= min(prompts.rows, first + self.block_tokens_max)
        compute, pieces = streams.compute, list(prompts.pieces(first, stop))
        compute.launch("prompt project", partial(self._project_prompts, prompts, state, layer, pieces))
        written()
        compute.launch("prompt attend", partial(self._attend_prompts, prompts, state, layer, pieces))

    def launch_first_token(
        self,
        streams: Streams,
        sampler: SamplerState,
        prompts: PromptPass,
        number: int,
        outputs: StepOutputs,
        adjust: Adjust | None,
    ) -> None:
        assert isinstance(prompts, FakePass)
        if self.poison is not None and int(sampler.seed[prompts.parts[number].seat]) == self.poison:
            raise ValueError("a poisoned prompt")
        work = partial(self._first_token, prompts, number, sampler, outputs, adjust)
        streams.compute.launch("first token", work)

    def launch_forward(self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch) -> None:
        scratch, compute = self._scratch_for(len(batch.seats), state.rows.device), streams.compute
        compute.launch("embed", partial(self._embed, scratch, sampler, batch))
        loaded: dict[int, Fence] = {}
        for layer, group in enumerate(self.geometry.group_of_layer[: self.layers]):
            if layer == self.geometry.layers_of_group(group)[0]:
                select = partial(self._select, scratch, state, batch, group)
                selection = scratch.topk, batch, scratch.out_rows, scratch.plan
                loaded = launch_selection(streams, state, group, select, *selection)
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

    def _embed_prompts(self, prompts: FakePass, tokens: Tensor) -> None:
        prompts.tokens = tokens.clone()
        prompts.hidden = embed(prompts.tokens)

    def _project_prompts(self, prompts: FakePass, state: DeviceState, layer: int, pieces: Pieces) -> None:
        group = self.geometry.group_of_layer[layer]
        for number, (seat, start, stop, first, ends) in pieces:
            hidden = prompts.hidden[first : first + stop - start]
            write_slab_rows(state, layer, seat, start, _bytes(rows_of(hidden, layer)))
            if self.geometry.layers_of_group(group)[0] != layer:
                continue
            write_prompt_index_keys(state, group, seat, start, _bytes(keys_of(hidden, group).unsqueeze(1)))
            keys = read_index_keys(state, group, seat, stop).view(torch.int64).flatten()
            if ends:
                selected = select(hidden[-1:], keys[None], torch.ones_like(keys[None], dtype=torch.bool))[0].int()
                prompts.warm_starts.setdefault(number, selected.new_full((self.geometry.groups, TOPK), -1))
                prompts.warm_starts[number][group] = selected
            hidden.copy_(see_keys(hidden, start, keys))

    def _attend_prompts(self, prompts: FakePass, state: DeviceState, layer: int, pieces: Pieces) -> None:
        for _, (seat, start, stop, first, _) in pieces:
            rows = read_slab_rows(state, layer, seat, stop).view(torch.int64)
            hidden = prompts.hidden[first : first + stop - start]
            hidden.copy_(attend_prompt(hidden, start, rows))

    def _first_token(
        self, prompts: FakePass, number: int, sampler: SamplerState, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        part = prompts.parts[number]
        hidden, own = prompts.hidden[part.end - 1 : part.end], slice(part.seat, part.seat + 1)
        token = _drawn(sampler, adjust, hidden, torch.full_like(hidden, part.seat), torch.full_like(hidden, part.stop))
        if outputs.warm_start is not None:
            outputs.warm_start.copy_(prompts.warm_starts[number])
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
    groups: tuple[int, ...] = SHARED,
    prefilled: int | None = None,
    is_held: bool = False,
) -> list[int]:
    """What `count` generated tokens must be, over plain lists of rows and keys. The prompt goes through decode steps
    from position `prefilled` on. `is_held`: to ALTERNATING."""
    return computed(prompt, count, seed, len(prompt) if prefilled is None else prefilled, groups, is_held=is_held)[0]


def computed(
    prompt: Sequence[int],
    count: int,
    seed: int,
    prefilled: int | Sequence[range],
    groups: tuple[int, ...] = SHARED,
    *,
    is_held: bool = False,
) -> tuple[list[int], Tensor]:
    """The tokens that `expected_tokens` returns, and the states int64[n] of all positions that have a row. Positions
    below `prefilled`, or in one of its ranges, go through prompt passes, all others through decode steps."""

    def drawn(hidden: Tensor, position: int) -> int:
        if is_held:
            return int(draw_allowed(hidden, alternates(position - len(prompt))))
        return int(draw(hidden, torch.tensor([seed]), torch.tensor([position])))

    spans = [range(prefilled)] if isinstance(prefilled, int) else prefilled
    stops = {span.start: span.stop for span in spans if span}
    rows: list[list[Tensor]] = [[] for _ in groups]
    keys: list[list[Tensor]] = [[] for _ in groups]
    tokens, states, position = list(prompt), list[Tensor](), 0
    while len(tokens) < len(prompt) + count:
        stop = stops.get(position, 0)
        hidden, chosen = embed(torch.tensor(tokens[position : stop or position + 1])), torch.zeros(0)
        for layer, group in enumerate(groups):
            rows[layer].append(rows_of(hidden, layer))
            if groups.index(group) == layer:
                keys[group].append(keys_of(hidden, group))
                all_keys = torch.cat(keys[group])
                if stop:
                    hidden = see_keys(hidden, position, all_keys)
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

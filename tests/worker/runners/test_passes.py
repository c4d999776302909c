"""Prompt passes of real models: rows, keys, first tokens and drafts do not depend on units, neighbours or leavers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from kernels.cuda import deep_gemm, prompt_index, quantize
from kernels.cuda.prompt_topk import SCORES_MAX
from kernels.prompt_pieces import PromptPiece, PromptPieces
from kernels.rows import read_index_keys, read_slab_rows
from protocol.errors import InternalError
from protocol.settings import WorkerSettings
from protocol.units import BLOCK_TOKENS_MAX, PAGE_TOKENS, pages_for
from tests.support.checkpoints import DRAFTING, LATENT
from tests.support.fakes.hash_runner import FakePass
from tests.support.history import dealt
from tests.support.prompts import launch_layers
from tests.support.runner_rig import Rig
from tests.worker.runners.test_drafting import pair_of, random_prompt
from worker.device.step_rows import block_tokens_max
from worker.group.exchange import PIECE_ROWS, Alike, Exchange
from worker.runners.base import PromptPart, PromptPass, StepOutputs
from worker.runners.prompt import ModelPass, PromptBlock
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights.layout import (
    EXPERT_ROWS_MAX,
    EXPERT_TILE_ROWS,
    QUANTIZED_EXPERT_ROWS_MAX,
    TOPK_SCRATCH_BYTES,
    _quantized_experts_bytes,
    prompt_scratch_bytes,
)
from worker.weights.synth import published_config

#: Tokens of prompts, by seat: several pages, less than one, some beyond the top-k.
PROMPTS = (230, 40, 150, 97)
#: Products of other counts of rows add in another order.
CLOSE = {"rtol": 0, "atol": 2e-4}
#: A NaN, in floats of any width: what reads it shows it.
FILLED = 0xFF

forms = pytest.mark.parametrize("gathered", [False, True], ids=["expanded", "gathered"])
families = pytest.mark.parametrize("family", LATENT)
families_and_forms = pytest.mark.parametrize(("family", "gathered"), dealt(LATENT, (False, True)))
#: Form, layer at which a part leaves, and the part.
LEAVING = [*product((False, True), range(3), range(3))]


@dataclass(frozen=True)
class Result:
    """Memory that a prompt left behind: rows by layer, index keys by group, and its first token."""

    rows: list[Tensor]
    keys: list[Tensor]
    outputs: StepOutputs


class Prompts:
    """A rig whose seats hold the prompts PROMPTS."""

    def __init__(self, family: str, *, gathered: bool, block: int = 0) -> None:
        pair = pair_of(family)
        self.runner = TransformersRunner(pair.model, pair.runner.info, pair.runner.geometry, gathered_prefill=gathered)
        self.block = block or self.runner.block_tokens_max
        self.rig = Rig(self.runner, seats=len(PROMPTS), context_tokens=max(PROMPTS))
        self.tokens = [torch.tensor(random_prompt(seat, count)) for seat, count in enumerate(PROMPTS)]
        for seat, count in enumerate(PROMPTS):
            self.rig.grant(seat, count)

    def begin(self, *spans: tuple[int, int, int]) -> ModelPass:
        """A pass of spans: seat, start, stop."""
        parts, row = list[PromptPart](), 0
        for seat, start, stop in spans:
            parts.append(PromptPart(seat, start, stop, row, stop == PROMPTS[seat]))
            row = parts[-1].end
        tokens = torch.cat([self.tokens[seat][start:stop] for seat, start, stop in spans])
        prompts = self.runner.begin_pass(self.rig.streams, self.rig.state, parts, tokens)
        tokens.fill_(-1)  # the pass has its own
        assert isinstance(prompts, ModelPass)
        return prompts

    def layer(self, prompts: PromptPass, layer: int, cuts: Sequence[int] = ()) -> None:
        """One layer, in units between `cuts`."""
        for first, stop in pairwise([0, *cuts, prompts.rows]):
            self.runner.launch_unit(self.rig.streams, self.rig.state, prompts, layer, first, stop)

    def end(self, prompts: PromptPass) -> dict[int, Result]:
        """Launch first tokens and draft rows; returns those of parts that end, by seat."""
        rig, found = self.rig, {}
        for number, part in enumerate(prompts.parts):
            if number in prompts.left:
                continue
            outputs, following = None, self.tokens[part.seat][part.stop : part.stop + 1]
            if part.ends:
                outputs = rig.outputs()
                self.runner.launch_first_token(rig.streams, rig.sampler, prompts, number, outputs, None)
            memory = rig.streams, rig.state, rig.sampler, prompts, number
            if self.runner.geometry.layers > self.runner.info.layers:
                self.runner.launch_prompt_drafts(*memory, outputs, None if part.ends else following)
            if outputs is not None:
                found[part.seat] = self.result(part.seat, outputs)
        assert not rig.state.tripwires.any()
        return found

    def result(self, seat: int, outputs: StepOutputs) -> Result:
        geometry, state, stop = self.runner.geometry, self.rig.state, PROMPTS[seat]
        rows = [read_slab_rows(state, layer, seat, stop).view(torch.float32) for layer in range(geometry.layers)]
        keys = [read_index_keys(state, group, seat, stop).view(torch.float32) for group in range(geometry.groups)]
        return Result(rows, keys, outputs)

    def alone(self, seat: int) -> Result:
        """A prompt in one pass, a unit for each layer."""
        prompts = self.begin((seat, 0, PROMPTS[seat]))
        for layer in range(self.runner.info.layers):
            self.layer(prompts, layer)
        return self.end(prompts)[seat]

    def pages_of(self, seat: int) -> tuple[Tensor, Tensor]:
        """Slab pages and index pages of a seat."""
        count = pages_for(PROMPTS[seat])
        return self.rig.state.slab_table[seat, :count].long(), self.rig.state.index_table[seat, :count].long()

    def fill(self, seat: int) -> None:
        """Overwrite all that the seat's memory holds."""
        state, (slab, index) = self.rig.state, self.pages_of(seat)
        for page in slab.tolist():
            state.rows[:, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = FILLED
        for page in index.tolist():
            state.index_keys[:, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = FILLED

    def is_filled(self, seat: int) -> bool:
        state, (slab, index) = self.rig.state, self.pages_of(seat)
        rows = torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in slab.tolist()])
        keys = torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in index.tolist()])
        return bool((state.rows[:, rows] == FILLED).all() and (state.index_keys[:, keys] == FILLED).all())


def assert_alike(found: Result, wanted: Result) -> None:
    for one, other in zip(found.rows + found.keys, wanted.rows + wanted.keys, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert found.outputs.logits is not None
    assert wanted.outputs.logits is not None
    torch.testing.assert_close(found.outputs.logits, wanted.outputs.logits, rtol=0, atol=1e-3)
    assert found.outputs.tokens.tolist() == wanted.outputs.tokens.tolist()
    assert found.outputs.warm_start is not None
    assert wanted.outputs.warm_start is not None
    assert torch.equal(found.outputs.warm_start, wanted.outputs.warm_start)
    assert (found.outputs.warm_start >= 0).sum(1).tolist() == [min(32, len(found.rows[0]))] * len(found.keys)


def uneven(rows: int, chance: random.Random) -> list[int]:
    return sorted(chance.sample(range(1, rows), chance.randint(1, 5)))


# ---------------------------------------------------------------- units


@families_and_forms
def test_units_of_any_sizes_give_the_pass_of_one_unit_a_layer(family: str, gathered: bool) -> None:
    """Also where a layer takes the selection of another layer in other blocks than that had."""
    one, cut, chance = Prompts(family, gathered=gathered), Prompts(family, gathered=gathered), random.Random(7)
    wanted = one.alone(0)
    prompts = cut.begin((0, 0, PROMPTS[0]))
    for layer in range(cut.runner.info.layers):
        cut.layer(prompts, layer, uneven(prompts.rows, chance))
    assert_alike(cut.end(prompts)[0], wanted)
    whole = one.begin((0, 0, PROMPTS[0]))
    for layer in range(one.runner.info.layers):
        one.layer(whole, layer)
    selected, expected = (it if isinstance(it, list) else [it] for it in (prompts.selection, whole.selection))
    assert all(map(same_positions(cut, one), selected, expected))


def same_positions(cut: Prompts, one: Prompts) -> Callable[[Tensor, Tensor], bool]:
    """Tell whether two selections of the prompt in seat 0 are alike, of rigs with pages at the same places."""
    assert torch.equal(cut.rig.state.slab_table[0], one.rig.state.slab_table[0])
    return torch.equal


@families_and_forms
def test_several_passes_give_the_rows_of_one(family: str, gathered: bool) -> None:
    """Two are open at once, layer by layer: the second reads what the first has written."""
    one, two = Prompts(family, gathered=gathered), Prompts(family, gathered=gathered)
    wanted = one.alone(0)
    first, second = two.begin((0, 0, 100)), two.begin((0, 100, PROMPTS[0]))
    for layer in range(two.runner.info.layers):
        two.layer(first, layer, [33])
        two.layer(second, layer, [64, 70])
    assert not two.end(first)
    assert_alike(two.end(second)[0], wanted)


@forms
def test_block_is_written_when_its_listener_is_called(gathered: bool) -> None:
    it = Prompts("glm-5", gathered=gathered)
    wanted, seen = it.alone(0), list[tuple[int, bool]]()
    prompts = it.begin((0, 0, PROMPTS[0]))
    it.fill(0)
    for layer in range(it.runner.info.layers):
        for first, stop in ((0, 90), (90, PROMPTS[0])):

            def written(layer: int = layer, stop: int = stop) -> None:
                rows = read_slab_rows(it.rig.state, layer, 0, stop).view(torch.float32)
                seen.append((layer, torch.allclose(rows, wanted.rows[layer][:stop], **CLOSE)))

            it.runner.launch_unit(it.rig.streams, it.rig.state, prompts, layer, first, stop, written)
    assert seen == [(layer, True) for layer in range(it.runner.info.layers) for _ in range(2)]


# ---------------------------------------------------------------- parts


@families_and_forms
def test_packed_prompts_are_those_of_each_alone(family: str, gathered: bool) -> None:
    """One is behind a cached prefix, one ends in a later pass, one is shorter than the top-k's pages."""
    apart, packed, chance = Prompts(family, gathered=gathered), Prompts(family, gathered=gathered), random.Random(3)
    wanted = {seat: apart.alone(seat) for seat in range(len(PROMPTS))}
    prefix = packed.begin((2, 0, 64))
    for layer in range(packed.runner.info.layers):
        packed.layer(prefix, layer)
    assert not packed.end(prefix)
    found = dict[int, Result]()
    for spans in ([(2, 64, 150), (1, 0, 40), (0, 0, 129)], [(0, 129, 230), (3, 0, 97)]):
        prompts = packed.begin(*spans)
        for layer in range(packed.runner.info.layers):
            packed.layer(prompts, layer, uneven(prompts.rows, chance))
        found |= packed.end(prompts)
    assert found.keys() == wanted.keys()
    for seat, result in found.items():
        assert_alike(result, wanted[seat])


@pytest.mark.parametrize(("leaving", "family"), dealt(LEAVING, LATENT))
def test_part_that_left_is_neither_read_nor_written(leaving: tuple[bool, int, int], family: str) -> None:
    """The part leaves within a layer, and between a layer that selects and one that shares the selection."""
    gathered, layers, leaver = leaving
    apart, packed = Prompts(family, gathered=gathered), Prompts(family, gathered=gathered)
    prompts = packed.begin((0, 0, 230), (1, 0, 40), (2, 0, 150))
    for layer in range(packed.runner.info.layers):
        if layer == layers and leaver < 2:
            prompts.leave(leaver)
            packed.fill(leaver)
        packed.runner.launch_unit(packed.rig.streams, packed.rig.state, prompts, layer, 0, 100)
        if layer == layers and leaver == 2:
            prompts.leave(leaver)
            packed.fill(leaver)
        packed.runner.launch_unit(packed.rig.streams, packed.rig.state, prompts, layer, 100, 245)
        packed.runner.launch_unit(packed.rig.streams, packed.rig.state, prompts, layer, 245, 420)
    found = packed.end(prompts)
    assert packed.is_filled(leaver)
    assert prompts.hidden.isfinite().all()
    assert found.keys() == {0, 1, 2} - {leaver}
    for seat, result in found.items():
        assert_alike(result, apart.alone(seat))


@forms
def test_pass_whose_parts_all_left_goes_on_as_padding(gathered: bool) -> None:
    it = Prompts("glm-5", gathered=gathered)
    prompts = it.begin((0, 0, 230), (1, 0, 40))
    for number in range(2):
        prompts.leave(number)
        it.fill(number)
    launch_layers(it.runner, it.rig.streams, it.rig.state, prompts)
    assert not it.end(prompts)
    assert it.is_filled(0)
    assert it.is_filled(1)
    assert prompts.hidden.isfinite().all()


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize("family", DRAFTING)
def test_draft_rows_do_not_depend_on_their_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for block in (230, 64):
        it = Prompts(family, gathered=False)
        monkeypatch.setattr(it.runner, "_block_tokens_max", block)
        results.append(it.alone(0))
    assert_alike(*results)


# ---------------------------------------------------------------- sizes


def test_table_of_a_block_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the device for each layer would cost as much as a launch."""
    packed = Prompts("glm-5", gathered=True)
    made: list[int] = []
    make = PromptPieces.of.__func__  # type: ignore[attr-defined]

    def count(cls: type[PromptPieces], pieces: Sequence[PromptPiece], device: torch.device) -> PromptPieces:
        made.append(len(pieces))
        table: PromptPieces = make(cls, pieces, device)
        return table

    monkeypatch.setattr(PromptPieces, "of", classmethod(count))
    prompts = packed.begin((0, 0, 150), (1, 0, 40), (3, 0, 97))
    assert packed.runner.geometry.groups > 1
    for layer in range(packed.runner.info.layers):
        packed.layer(prompts, layer, [100])
    assert made == [1, 3]
    prompts = packed.begin((0, 150, 230), (2, 0, 150))
    packed.layer(prompts, 0)
    prompts.leave(1)
    for layer in range(1, packed.runner.info.layers):
        packed.layer(prompts, layer)
    assert made == [1, 3, 2, 1], "pieces of those that are there"


def test_pieces_are_rows_of_the_parts_that_are_there() -> None:
    parts = PromptPart(5, 64, 94, 0, True), PromptPart(6, 0, 10, 30, False), PromptPart(7, 0, 20, 40, True)
    prompts = ModelPass(parts)
    assert prompts.rows == 60
    assert prompts.ending == [0, 2]
    assert list(prompts.pieces(10, 45)) == [
        (0, PromptPart(5, 74, 94, 10, True)),
        (1, PromptPart(6, 0, 10, 30, False)),
        (2, PromptPart(7, 0, 5, 40, False)),
    ]
    block = PromptBlock.of(prompts, 10, 45)
    assert not list(block.gaps())
    prompts.leave(1)
    assert [number for number, _ in prompts.pieces(10, 45)] == [0, 2]
    assert not list(block.gaps())  # it was launched before
    assert list(PromptBlock.of(prompts, 10, 45).gaps()) == [slice(20, 30)]
    prompts.leave(2)
    assert list(PromptBlock.of(prompts, 10, 45).gaps()) == [slice(20, 35)]
    prompts.leave(0)
    assert list(PromptBlock.of(prompts, 10, 45).gaps()) == [slice(0, 35)]


def test_largest_block_is_that_of_form_mode_and_group() -> None:
    pair = pair_of(LATENT[0])

    def made(**options: object) -> TransformersRunner:
        return TransformersRunner(pair.model, pair.runner.info, pair.runner.geometry, **options)  # type: ignore[arg-type]

    assert [made(gathered_prefill=gathered).block_tokens_max for gathered in (False, True)] == [512, BLOCK_TOKENS_MAX]
    assert made(gathered_prefill=True, deterministic_seats=8).block_tokens_max == 512
    config = pair.model.config
    exchange = Exchange(
        Alike(0, 1),
        hidden=config.hidden_size,
        choices=config.num_experts_per_tok,
        rows_max=300,
        dtype=torch.float32,
        device="cpu",
        deterministic=False,
    )
    assert made(exchange=exchange).block_tokens_max == 300


@families
def test_open_pass_keeps_the_bytes_that_are_computed(family: str) -> None:
    """Beside what last tokens select. The prompt is longer than the top-k."""
    it = Prompts(family, gathered=True)
    prompts, config = it.begin((0, 0, PROMPTS[0])), it.runner._layers.model.config
    kept = prompts.tokens, prompts.hidden, *prompts.angles, prompts.selection
    one, two = (prompt_scratch_bytes(config, 512, PROMPTS[0], passes, dtype="float32") for passes in (1, 2))
    assert sum(tensor.nbytes for tensor in kept) == two - one


@families
def test_rows_of_experts_take_the_bytes_that_are_computed(family: str) -> None:
    """For the worst routing of a piece: two of what follow one another at a time."""
    config = published_config(family)
    choices, experts = config.num_experts_per_tok, config.n_routed_experts // 8
    rows = quantize.rows_most(deep_gemm.PIECE_TOKENS * choices, experts, deep_gemm.ROWS_MANY)
    hidden, middle = config.hidden_size, config.moe_intermediate_size
    read, gated = (values + 4 * values // 128 for values in (hidden, middle))
    held = max(read + 4 * middle, 4 * middle + gated, gated + 2 * hidden)
    computed = _quantized_experts_bytes(config, BLOCK_TOKENS_MAX, 8, 2) - 2 * BLOCK_TOKENS_MAX * hidden
    assert rows * held <= computed < 1.01 * rows * held


@families
def test_block_of_a_published_model_takes_a_few_gigabytes(family: str) -> None:
    config = published_config(family)
    block = prompt_scratch_bytes(config, BLOCK_TOKENS_MAX, 8_192, 0)
    assert 1 << 30 < block < 3 << 30
    assert block <= prompt_scratch_bytes(config, BLOCK_TOKENS_MAX, 8_192, 0, ranks=8) < 1.25 * block
    assert prompt_scratch_bytes(config, 512, 8_192, 0) < block / 3
    assert block / 2 < prompt_scratch_bytes(config, 512, 8_192, 0, ranks=8) < block
    assert (EXPERT_ROWS_MAX, TOPK_SCRATCH_BYTES) == (PIECE_ROWS, 4 * SCORES_MAX)
    assert (QUANTIZED_EXPERT_ROWS_MAX, EXPERT_TILE_ROWS) == (deep_gemm.PIECE_TOKENS, deep_gemm.ROWS_MANY)
    assert prompt_index.scratch_bytes(processors=160) <= TOPK_SCRATCH_BYTES


@pytest.mark.parametrize(
    ("device", "deterministic", "pass_tokens", "wanted"),
    [
        ("cpu", False, 8_192, 512),
        ("cpu", False, 100, 100),
        ("cuda", False, 8_192, 4_096),
        ("cuda:1", False, 1_000, 1_000),
        ("cuda", True, 8_192, 512),
    ],
)
def test_largest_block_follows_from_settings(device: str, deterministic: bool, pass_tokens: int, wanted: int) -> None:
    settings = WorkerSettings(device=device, deterministic=deterministic, pass_tokens=pass_tokens)
    assert block_tokens_max(settings) == wanted


def test_pass_of_another_runner_is_refused() -> None:
    it = Prompts("glm-5", gathered=False)
    with pytest.raises(InternalError, match="another runner"):
        it.runner.launch_unit(it.rig.streams, it.rig.state, FakePass((PromptPart(0, 0, 4, 0, True),)), 0, 0, 4)

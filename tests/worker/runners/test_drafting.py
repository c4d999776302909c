"""The draft layer against the model library's MtpModel: rows of prompts and of steps, further drafts, both families."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protocol.errors import BadInput, ConfigError, InternalError
from protocol.messages import ModelInfo
from tests.support.checkpoints import DRAFTING
from tests.support.history import dealt
from tests.support.runner_rig import Rig
from worker.runners import tiny_weights
from worker.runners.base import PromptPart
from worker.runners.checkpoint import geometry_of
from worker.runners.layers import Layers
from worker.runners.sampling import sample
from worker.runners.tiny import tiny_config, write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights.model import load_model
from worker.weights.quantization import Quantization

TOPK = 32
PROMPT, STEPS = 150, 6
#: Of logits, float32. The two forms add in another order.
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


@dataclass(frozen=True)
class Pair:
    """A model with a draft layer, if its family has one, and the library's MtpModel of the same weights."""

    model: Any
    theirs: Any
    runner: TransformersRunner


class _HiddenAlone(nn.Module):
    """GLM's layer also returns its selection, for which the library's MtpLayer has no use."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        returned = self.block(*arguments, **named)
        hidden: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return hidden


@functools.cache
def pair_of(family: str) -> Pair:
    """The shaped weights of a tiny checkpoint, so that no near-tie at the edge of a top-k weighs anything; the draft
    layer's norms, states and experts count for more than there."""
    from transformers import AutoModelForCausalLM

    config, generator = tiny_config(family, TOPK, 1_024), torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tiny_weights._shape(model.requires_grad_(False), generator, predictable=False)
    info = ModelInfo("", "drafting", 1_024, config.vocab_size, 4, TOPK, (), "bytes", "")
    if family not in DRAFTING:
        return Pair(model, None, TransformersRunner(model, info, geometry_of(config, "float32")))
    tiny_weights._add_draft_layer(model, generator)
    layer = model.model.layers[-1]
    for norm in (model.model.norm, layer.enorm, layer.hnorm, layer.shared_head.norm):
        norm.weight += 0.2 * torch.randn(norm.weight.shape, generator=generator)
    layer.eh_proj.weight[:, config.hidden_size :] *= 10
    for weight in (layer.mlp.experts.down_proj, layer.mlp.shared_experts.down_proj.weight):
        weight.mul_(10)
    geometry = geometry_of(config, "float32", draft_layer=True)
    return Pair(model, of_library(model), TransformersRunner(model, info, geometry))


def of_library(model: Any) -> Any:
    """The library's MtpModel over `model`, with the weights of its draft layer."""
    from transformers.modeling_layers import MtpModel

    config = model.config
    config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["indexed_attention"], ["sparse"]
    shared = [(it.weight, it.weight.clone()) for it in (model.model.embed_tokens, model.lm_head)]
    theirs = MtpModel(model, 1).eval().requires_grad_(False)
    for weight, kept in shared:  # which the library draws anew
        weight.copy_(kept)
    layer, ours = theirs.layers[0], dict(model.model.layers[-1].state_dict())
    for name, weight in layer.state_dict().items():
        source = "shared_head.norm.weight" if name == "post_norm.weight" else name.removeprefix("mtp_block.")
        weight.copy_(ours.pop(source))
    assert not ours
    layer.mtp_block = _HiddenAlone(layer.mtp_block)
    return theirs


def outputs_of_library(pair: Pair, hidden: Tensor, following: Tensor) -> Tensor:
    """The layer's outputs [T, hidden] for states [T, hidden] of positions 0 on, and the tokens int64[T] behind them."""
    theirs, count = pair.theirs, len(following)
    embedded, positions = theirs.embed_tokens(following[None]), torch.arange(count)[None]
    mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    angles = theirs.rotary_emb(embedded, position_ids=positions)
    outputs: Tensor = theirs.layers[0](embedded, hidden[None], angles, mask, positions, None)
    return outputs[0]


def logits_of(pair: Pair, outputs: Tensor) -> Tensor:
    logits: Tensor = pair.theirs._project_to_logits(outputs)
    return logits


def states_of(pair: Pair, tokens: Tensor) -> Tensor:
    """The model's last hidden states [T, hidden], behind its final norm."""
    hidden: Tensor = pair.model.model(tokens[None]).last_hidden_state
    return hidden[0]


def random_prompt(seed: int, tokens: int = PROMPT) -> list[int]:
    drawn: list[int] = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def opened(
    pair: Pair, *, hot_slots: int, temperature: float = 0.0, pass_tokens: int = PROMPT
) -> tuple[Rig, list[list[int]]]:
    """Two requests behind their prompts, and the tokens of each, with the first one drawn."""
    rig = Rig(pair.runner, seats=2, context_tokens=PROMPT + STEPS + 8, pass_tokens=pass_tokens)
    known = [random_prompt(seed) for seed in range(2)]
    for seat, prompt in enumerate(known):
        prompt.append(rig.open(seat, prompt, hot_slots=hot_slots, temperature=temperature, seed=seat)[0])
    return rig, known


def stepped(rig: Rig, known: list[list[int]]) -> list[int]:
    """One step of the model for both requests: the tokens that it drew."""
    tokens, _ = rig.decode([0, 1])
    for request, token in zip(known, tokens, strict=True):
        request.append(token)
    return tokens


@pytest.mark.parametrize(("family", "sizes"), dealt(DRAFTING, ((0, PROMPT), (64, 64))))
def test_drafts_of_steps_are_those_of_the_library(family: str, sizes: tuple[int, int]) -> None:
    """The prompt's rows are the layer's too: the first step attends to little else."""
    hot_slots, pass_tokens = sizes
    pair = pair_of(family)
    rig, known = opened(pair, hot_slots=hot_slots, pass_tokens=pass_tokens)
    for _ in range(STEPS):
        draft = rig.draft([0, 1], stepped(rig, known))
        assert draft.logits is not None
        for seat in range(2):
            torch.testing.assert_close(draft.logits[seat], wanted_logits(pair, known[seat]), **CLOSE)
        assert draft.tokens.tolist() == draft.logits.argmax(-1).tolist()
    assert not rig.state.tripwires.any()


@pytest.mark.parametrize("family", DRAFTING)
def test_steps_without_drafts_write_the_rows_of_those_with_drafts(family: str) -> None:
    """And the index keys. The buffers are resident: no row moves."""
    rig, known = opened(pair_of(family), hot_slots=0)
    held = rig.state.rows, rig.state.index_keys
    for _ in range(2):
        tokens = stepped(rig, known)
        before = [it.clone() for it in held]
        assert rig.draft([0, 1], tokens, rows_alone=True).tokens.tolist() == [-1, -1]
        alone = [it.clone() for it in held]
        assert not any(map(torch.equal, before, alone))
        rig.draft([0, 1], tokens)
        assert all(map(torch.equal, alone, held))
    assert not rig.state.tripwires.any()


@pytest.mark.parametrize("family", DRAFTING)
def test_drafts_of_an_fp8_checkpoint_are_those_of_its_decoded_weights(tmp_path: Path, family: str) -> None:
    """FP8 is kept in ours, and decoded for the library's."""
    write_tiny_checkpoint(tmp_path, family, index_topk=TOPK, fp8=True, powers_of_two=family == "glm-5")
    decoded = load_model(tmp_path, Quantization(), dtype=torch.float32, draft_layer=True)
    runner = TransformersRunner.load(tmp_path, draft_tokens=1, keeps_fp8=True)
    pair = Pair(decoded, of_library(decoded), runner)
    rig, known = opened(pair, hot_slots=64)
    for _ in range(2):
        draft = rig.draft([0, 1], stepped(rig, known))
    assert draft.logits is not None
    for seat in range(2):
        torch.testing.assert_close(draft.logits[seat], wanted_logits(pair, known[seat]), **CLOSE)


@pytest.mark.parametrize("family", DRAFTING)
def test_further_drafts_are_those_of_the_library(family: str) -> None:
    """The layer is applied to its own outputs; the rows of seats change places between two launches."""
    pair = pair_of(family)
    rig, known = opened(pair, hot_slots=64)
    draft = rig.draft([0, 1], stepped(rig, known))
    drafted: list[list[int]] = [[], []]
    order = [0, 1]
    for seats in ([1, 0], [0, 1]):
        for row, seat in enumerate(order):
            drafted[seat].append(int(draft.tokens[row]))
        draft, order = rig.draft(seats, [drafted[seat][-1] for seat in seats], further=True), seats
        assert draft.logits is not None
        for row, seat in enumerate(seats):
            wanted = wanted_logits(pair, known[seat], drafted[seat])
            torch.testing.assert_close(draft.logits[row], wanted, **CLOSE)


def wanted_logits(pair: Pair, tokens: list[int], drafted: list[int] | None = None) -> Tensor:
    """The library's logits [vocab] of the draft behind `tokens` and what was `drafted` before."""
    known = torch.tensor(tokens)
    states, following = states_of(pair, known[:-1]), known[1:]
    outputs = outputs_of_library(pair, states, following)
    for token in drafted or ():
        states, following = torch.cat((states, outputs[-1:])), torch.cat((following, torch.tensor([token])))
        outputs = outputs_of_library(pair, states, following)
    return logits_of(pair, outputs[-1])


def test_row_that_a_draft_wrote_is_written_again_from_the_models_state() -> None:
    pair = pair_of(DRAFTING[0])
    rig, known = opened(pair, hot_slots=0)
    for _ in range(STEPS):
        draft = rig.draft([0, 1], stepped(rig, known))
        rig.draft([0, 1], [(token + 1) % 256 for token in draft.tokens.tolist()], further=True)  # and it is rejected
        rig.lengths = [length - 1 for length in rig.lengths]
    assert draft.logits is not None
    for seat in range(2):
        torch.testing.assert_close(draft.logits[seat], wanted_logits(pair, known[seat]), **CLOSE)


def test_draft_is_drawn_with_the_seed_and_the_position_of_its_request() -> None:
    rig, known = opened(pair_of(DRAFTING[0]), hot_slots=64, temperature=1.5)
    hot = torch.full((2,), 1.5)
    for _ in range(STEPS):
        draft = rig.draft([0, 1], stepped(rig, known))
        assert draft.logits is not None
        positions = torch.tensor([len(tokens) for tokens in known])  # of the token behind all that are known
        assert torch.equal(draft.tokens, sample(draft.logits, hot, torch.ones(2), torch.arange(2), positions))
    assert draft.tokens.tolist() != draft.logits.argmax(-1).tolist()


def test_padding_drafts_nothing() -> None:
    pair = pair_of(DRAFTING[1])
    rig, known = opened(pair, hot_slots=64)
    token = rig.decode([1], rows=3)[0]
    draft = rig.draft([1], token, rows=3)
    assert draft.tokens[1:].tolist() == [-1, -1]
    assert draft.logits is not None
    torch.testing.assert_close(draft.logits[0], wanted_logits(pair, known[1] + token), **CLOSE)


def test_last_token_of_a_prompt_selects_alike_in_both_forms_of_prefill() -> None:
    pair, warm = pair_of(DRAFTING[0]), []
    for gathered in (False, True):
        runner = TransformersRunner(pair.model, pair.runner.info, pair.runner.geometry, gathered_prefill=gathered)
        rig = Rig(runner, seats=1, context_tokens=PROMPT + 2)
        rig.open(0, random_prompt(0), hot_slots=64)
        warm.append(set(rig.warm_start[-1].tolist()))
    assert warm[0] == warm[1]
    assert len(warm[0]) == TOPK


def test_part_without_the_token_behind_it_is_refused() -> None:
    runner = pair_of(DRAFTING[0]).runner
    rig, tokens = Rig(runner, seats=1, context_tokens=64), torch.zeros(4, dtype=torch.long)
    prompts = runner.begin_pass(rig.streams, rig.state, [PromptPart(0, 0, 4, 0, False)], tokens)
    with pytest.raises(BadInput, match="following=None: the draft layer needs the token behind a part"):
        runner.launch_prompt_drafts(rig.streams, rig.state, rig.sampler, prompts, 0)


@pytest.mark.parametrize(("draft_tokens", "batches"), [(0, [8]), (1, [16]), (3, [32, 8])])
def test_deterministic_mode_checks_all_batches_of_a_step(
    draft_tokens: int, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, seen = pair_of("glm-5"), list[int]()

    def are_apart(_: Layers, rows: int) -> bool:
        seen.append(rows)
        return True

    monkeypatch.setattr(Layers, "_are_rows_apart", are_apart)
    sizes = {"deterministic_seats": 8, "draft_tokens": draft_tokens}
    TransformersRunner(pair.model, pair.runner.info, pair.runner.geometry, **sizes)
    assert seen == batches


def test_runner_without_the_layer_does_not_draft() -> None:
    pair = pair_of(DRAFTING[0])
    plain = TransformersRunner(pair.model, pair.runner.info, geometry_of(pair.model.config, "float32"))
    rig = Rig(plain, seats=1, context_tokens=64)
    rig.open(0, [1, 2, 3], hot_slots=0)
    rig.decode([0])
    with pytest.raises(InternalError, match="without the draft layer"):
        rig.draft([0], [1])


@pytest.mark.parametrize("family", DRAFTING)
def test_geometry_has_the_layer_in_a_group_of_its_own(family: str) -> None:
    config = tiny_config(family, TOPK, 1_024)
    config.num_nextn_predict_layers = 1
    plain, drafting = geometry_of(config, "float32"), geometry_of(config, "float32", draft_layer=True)
    assert drafting.group_of_layer == (*plain.group_of_layer, plain.groups)
    assert drafting.row_format != plain.row_format
    assert drafting.page_bytes - plain.page_bytes == 64 * (plain.row_bytes + plain.index_row_bytes)


@pytest.mark.parametrize("layers", [None, 0, 2, True])
def test_model_without_one_draft_layer_is_refused_where_drafts_are_asked(layers: object) -> None:
    config = tiny_config(DRAFTING[0], TOPK, 1_024)
    config.num_nextn_predict_layers = layers
    geometry_of(config, "float32")
    with pytest.raises(ConfigError, match=rf"num_nextn_predict_layers={layers}: drafts need a model with one MTP"):
        geometry_of(config, "float32", draft_layer=True)

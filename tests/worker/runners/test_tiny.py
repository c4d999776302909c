"""The tiny checkpoint: reproducible, told apart by its fingerprint, refused by name; its drafts."""

from __future__ import annotations

import random
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from protocol.errors import ConfigError
from tests.support.checkpoints import DRAFTING
from tests.support.history import in_turn
from tests.support.runner_rig import Rig
from worker.families.table import family_named
from worker.runners import tiny_weights
from worker.runners.checkpoint import fingerprint, read_config
from worker.runners.tiny import FAMILIES, write_tiny_checkpoint
from worker.runners.tiny_weights import PRINTABLE
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights.layout import tensors_of


@pytest.mark.parametrize("family", FAMILIES)
def test_seed_determines_the_checkpoint(tmp_path: Path, family: str) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_tiny_checkpoint(tmp_path / name, family, seed=seed, index_topk=256, context_max_tokens=2_048)
    prints = [fingerprint(tmp_path / name) for name in "abc"]
    assert prints[0] == prints[1] != prints[2]
    config = read_config(tmp_path / "a")
    assert (config["index_topk"], config["max_position_embeddings"]) == (256, 2_048)
    assert ("shared" in config.get("indexer_types", ())) == (family in ("glm-5", "hy4"))
    head = load_file(tmp_path / "a" / "model.safetensors")[family_named(family).stored_name("lm_head.weight")]
    assert sorted(head.abs().sum(1).nonzero().flatten().tolist()) == sorted(PRINTABLE)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deepseek-v3\.2, glm-5"):
        write_tiny_checkpoint(tmp_path, "llama")


SAID = "a step reads only the rows of a long context that its indexer selects and the others stay in host memory"


@pytest.mark.parametrize(("family", "fp8"), [*zip(DRAFTING, cycle(in_turn(((False, True), (True, False)))))])
def test_drafts_of_a_predictable_checkpoint_are_right_in_three_of_ten(tmp_path: Path, family: str, fp8: bool) -> None:
    """One draft a step, of three requests, greedy; docs/real-models.md states shares on longer prompts."""
    write_tiny_checkpoint(tmp_path, family, fp8=fp8, predictable=True)
    drawn, seats = random.Random(0), [0, 1, 2]
    prompts = [list(" ".join(drawn.choices(SAID.split(), k=140)).encode())[:600] for _ in seats]
    rig = Rig(TransformersRunner.load(tmp_path, draft_tokens=1), seats=len(seats), context_tokens=700)
    for seat, prompt in zip(seats, prompts, strict=True):
        rig.open(seat, prompt, hot_slots=128)
    drafts: list[int] = []
    right = drafted = 0
    for _ in range(32):
        tokens, _ = rig.decode(seats)
        right += sum(draft == token for draft, token in zip(drafts, tokens, strict=bool(drafts)))
        drafted += len(drafts)
        drafts = rig.draft(seats, tokens).tokens.tolist()
    print(f"{family}, {'FP8' if fp8 else 'float32'}: {right} of {drafted} drafts are right")
    assert 0.3 < right / drafted < 0.95  # and some are wrong, or nothing would be rejected


@pytest.mark.parametrize("family", DRAFTING)
def test_draft_layer_is_drawn_behind_all_weights_of_the_model(tmp_path: Path, family: str) -> None:
    """The model is the one that it would be without: its weights do not depend on what follows them."""
    write_tiny_checkpoint(tmp_path, family, index_topk=64, context_max_tokens=2_048)
    stored = load_file(tmp_path / "model.safetensors")
    extra = {name for name in stored if name.startswith("model.layers.4.")}
    config = AutoConfig.from_pretrained(tmp_path)
    assert extra == {it.name for it in tensors_of(config, draft_layer=True)} - {it.name for it in tensors_of(config)}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).requires_grad_(False)
    tiny_weights._shape(model, torch.Generator().manual_seed(0), predictable=False)
    for name in stored.keys() - extra:
        if ".experts." not in name:
            assert torch.equal(stored[name], model.state_dict()[family_named(family).module_name(name)]), name

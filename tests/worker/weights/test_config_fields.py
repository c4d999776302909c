"""The lists of config.json's fields against the model library's config classes and what its modules read."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pytest
import torch
import transformers

from protocol.errors import ConfigError
from worker.families.base import SHARING
from worker.families.latent import LatentFamily
from worker.families.table import FAMILIES
from worker.runners.tiny import tiny_config
from worker.weights.config_fields import (
    FIXED,
    READ,
    ROPE_TYPES,
    WITHOUT_EFFECT,
    check_fields,
    unserved,
)

#: Of families whose config.json has no parts.
CLASSES: Final = {kind: type(it.config()) for kind, it in FAMILIES.items() if isinstance(it, LatentFamily)}
NAMES: Final = {kind: family.name for kind, family in FAMILIES.items()}
#: Of each field without effect that a class has, a value that is not the class's own. With `return_dict` false the
#: library's own forward fails, which is not used.
OTHER_VALUES: Final[dict[str, Any]] = {
    "architectures": ["Other"],
    "attention_dropout": 0.5,
    "bos_token_id": 7,
    "chunk_size_feed_forward": 2,
    "head_dim": 4,
    "id2label": {0: "a", 1: "b"},
    "initializer_range": 0.5,
    "label2id": {"a": 0, "b": 1},
    "learnable_sink_init": 3.0,
    "output_hidden_states": True,
    "output_router_logits": True,
    "pad_token_id": 5,
    "problem_type": "regression",
    "transformers_version": "5.0.0",
    "use_cache": False,
}


def fields_of(family: str) -> set[str]:
    return {it.name for it in dataclasses.fields(CLASSES[family])}


def lists_of(family: str) -> list[set[str]]:
    added = FAMILIES[family]
    return [set(READ | added.read), {*FIXED, *added.fixed, "layer_types"}, set(WITHOUT_EFFECT)]


def published(family: str, **changed: Any) -> dict[str, Any]:
    stored: dict[str, Any] = CLASSES[family]().to_dict()
    return stored | changed


def refusal(family: str, **changed: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_fields(published(family, **changed), "config.json", "worker.model")
    assert (caught.value.field, caught.value.value) == ("worker.model", "config.json")
    assert caught.value.remedy
    return caught.value.message


@pytest.mark.parametrize("family", CLASSES)
def test_each_field_of_the_librarys_class_is_on_one_list(family: str) -> None:
    lists = lists_of(family)
    for name in fields_of(family) | published(family).keys():
        assert sum(name in it for it in lists) == 1, name
    assert sum(map(len, lists)) == len(set().union(*lists))
    check_fields(published(family), "config.json", "worker.model")


@pytest.mark.parametrize("family", CLASSES)
def test_what_the_librarys_modules_read_is_read_or_has_one_value(family: str) -> None:
    """Fields that modules look up while they are made and compute; those without effect are the next test's."""
    seen: set[str] = set()

    class Seen(CLASSES[family]):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    config = Seen(**tiny_config(NAMES[family], 32, 256).to_dict())
    seen.clear()
    model = model_of(config)
    model(torch.arange(40)[None])
    read, fixed, idle = lists_of(family)
    looked_up = seen & fields_of(family)
    assert len(looked_up) > 20
    assert looked_up <= read | fixed | idle
    assert looked_up & idle <= {*OTHER_VALUES, "return_dict"}
    never = {"first_k_dense_replace", "n_routed_experts", "dtype"}  # read under another name, or when it is made
    assert fields_of(family) & read - looked_up - never <= {"eos_token_id", *SHARING}


def model_of(config: Any) -> Any:
    kind = FAMILIES[config.model_type].config_class.replace("Config", "ForCausalLM")
    return getattr(transformers, kind)(config).eval()


@pytest.mark.parametrize("family", CLASSES)
def test_fields_without_effect_change_no_logits_of_the_library(family: str) -> None:
    idle = fields_of(family) & WITHOUT_EFFECT.keys()
    assert idle == {*OTHER_VALUES, "return_dict"} & fields_of(family)
    stored = tiny_config(NAMES[family], 32, 256).to_dict()
    torch.manual_seed(0)
    plain = model_of(CLASSES[family](**stored))
    tokens = torch.arange(3, 43)[None]
    wanted = plain(tokens).logits
    for name in idle - {"return_dict"}:
        value = OTHER_VALUES[name]
        changed = model_of(CLASSES[family](**stored | {name: value}))
        changed.load_state_dict(plain.state_dict())
        found = changed(tokens).logits
        assert torch.equal(found, wanted), name
    changed = model_of(CLASSES[family](**stored | {"rms_norm_eps": 0.1}))
    changed.load_state_dict(plain.state_dict())
    assert not torch.equal(changed(tokens).logits, wanted)  # one with effect does


@pytest.mark.parametrize("family", CLASSES)
def test_other_values_of_fixed_fields_are_refused_by_name(family: str) -> None:
    for name, values in {**FIXED, **FAMILIES[family].fixed}.items():
        check_fields(published(family, **{name: values[0]}), "config.json", "worker.model")
        check_fields(published(family, **{name: None}), "config.json", "worker.model")
        other = not values[0] if isinstance(values[0], bool) else 2 if isinstance(values[0], int) else "other"
        assert refusal(family, **{name: other}).startswith(f"{name} {other} is not served, {values[0]} is")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"swiglu_alpha": 1.7}, "swiglu_alpha: no such field is known"),
        ({"a": 0, "b": "", "c": None, "d": False}, "a, b: no such field is known"),
        ({f"f{it}": 1 for it in range(9)}, "f0, f1, f2, f3, f4, f5 and 3 more: no such"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not served, "),
        ({"layer_types": ["indexed_attention", "full_attention"]}, "layer_types full_attention is not served"),
        ({"layer_types": "full_attention"}, "layer_types full_attention is not served"),
        ({"layer_types": 3}, "layer_types 3 is not served"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_parameters.rope_type dynamic is not served",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type longrope is not served"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope_scaling.type ['yarn'] is not served"),
        ({"rope_parameters": {"mrope_section": [8]}}, "rope_parameters.mrope_section: no such field is known"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor 0.5 is not"),
    ],
)
def test_arithmetic_that_is_not_computed_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    for family in CLASSES:
        assert message in refusal(family, **changed)


def test_unknown_field_is_refused_unless_it_is_off() -> None:
    check_fields(published("deepseek_v32", vendor_switch=False, vendor_value=None), "config.json", "model")
    for value in (True, 0, "", [], {"a": 1}):
        with pytest.raises(ConfigError, match="vendor_switch: no such field is known"):
            check_fields(published("deepseek_v32", vendor_switch=value), "config.json", "model")


def test_shared_selections_are_of_one_family() -> None:
    """DeepSeek-V3.2's class has an indexer in each layer, whatever the file says."""
    for name, value in (("indexer_types", ["full", "shared"]), ("index_topk_pattern", "FS"), ("index_topk_freq", 4)):
        check_fields(published("glm_moe_dsa", **{name: value}), "config.json", "worker.model")
        assert name in refusal("deepseek_v32", **{name: value})


def test_rotations_that_the_length_does_not_change_are_served() -> None:
    for kind in ROPE_TYPES:
        check_fields(published("deepseek_v32", rope_scaling={"type": kind}), "config.json", "worker.model")
    assert "indexed_attention" in FAMILIES["deepseek_v32"].layer_kinds


@pytest.mark.parametrize("kind", [None, 3, ["glm_moe_dsa"], {}, "llama", "deepseek_v4"])
def test_other_families_are_refused(kind: object) -> None:
    assert f"model_type {kind} is not served" in unserved({"model_type": kind})
    assert not unserved({"model_type": "glm_moe_dsa"})

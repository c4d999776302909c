"""Which quantization_config is served; others are refused by field and value."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import ConfigError
from worker.weights.quantization import Quantization, read_quantization

PUBLISHED: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def test_no_quantization_is_none() -> None:
    assert read_quantization({}, "config.json") is None
    assert read_quantization({"quantization_config": None}, "config.json") is None


@pytest.mark.parametrize("scale_format", [None, "ue8m0", "float"])
def test_published_forms_are_served(scale_format: str | None) -> None:
    config = {"quantization_config": PUBLISHED | {"scale_fmt": scale_format}}
    assert read_quantization(config, "config.json") == Quantization(powers_of_two=scale_format == "ue8m0")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"quant_method": "awq"}, "quant_method"),
        ({"quant_method": None}, "quant_method"),
        ({"fmt": "e5m2"}, "fmt"),
        ({"weight_block_size": [64, 64]}, "weight_block_size"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"weight_block_size": 128}, "weight_block_size"),
        ({"scale_fmt": "e5m10"}, "scale_fmt"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"modules_to_not_convert": [1]}, "modules_to_not_convert"),
    ],
)
def test_another_form_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config\.{field}"):
        read_quantization({"quantization_config": PUBLISHED | change}, "config.json")
    with pytest.raises(ConfigError, match="quantization_config"):
        read_quantization({"quantization_config": "fp8"}, "config.json")


def test_listed_modules_are_excluded_by_name_end_or_prefix() -> None:
    listed = Quantization(not_converted=("lm_head", "model.layers.3.self_attn", "indexer.wk"))
    assert listed.excludes("lm_head.weight")
    assert listed.excludes("model.layers.3.self_attn.o_proj.weight")
    assert listed.excludes("model.layers.9.self_attn.indexer.wk.weight")
    assert not listed.excludes("model.layers.30.self_attn.o_proj.weight")

"""Directories of checkpoints: config.json, index and weights files that cannot work are refused by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from protocol.errors import ConfigError
from tests.support.checkpoints import tiny_checkpoint
from worker.runners import transformers_dsa
from worker.runners.checkpoint import read_config
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights.dimensions import BOUNDS, check_dimensions
from worker.weights.shards import INDEX, Shards


@pytest.fixture(scope="module")
def written(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, "glm-5", index_topk=64, context_max_tokens=2_048)


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "model"))


def change(model: Path, name: str = "config.json", **fields: Any) -> None:
    stored = json.loads((model / name).read_text())
    (model / name).write_text(json.dumps(stored | fields))


def refusal(model: Path, file: str) -> str:
    """The message of a ConfigError about `file`, from the check that `hisparse up` makes and from the worker's load."""
    messages = []
    for load in (read_config, TransformersRunner.load):
        with pytest.raises(ConfigError) as caught:
            load(model)
        assert (caught.value.field, caught.value.value) == ("worker.model", str(model / file))
        assert caught.value.remedy
        messages.append(caught.value.message)
    assert messages[0] == messages[1]
    return messages[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is not a whole number from 1 to 1024"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers 1000000000.0 is not"),
        ({"num_hidden_layers": True}, "num_hidden_layers True is not"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0 is not"),
        ({"num_hidden_layers": 10**4000}, "num_hidden_layers of many digits is not"),
        ({"vocab_size": 10**12}, "vocab_size 1000000000000 is not"),
        ({"hidden_size": -128}, "hidden_size -128 is not"),
        ({"n_routed_experts": "32"}, "n_routed_experts '32' is not"),
        ({"kv_lora_rank": [1] * 1_000}, "kv_lora_rank [1, 1, 1"),
        ({"num_hidden_layers": 5}, "indexer_types has 4 entries, and num_hidden_layers is 5"),
        ({"indexer_types": ["full", {}]}, "is not a list of full or shared"),
        ({"indexer_types": []}, "is not a list of full or shared"),
        ({"dtype": ["float32"]}, "dtype is no text"),
    ],
)
def test_absurd_configuration_is_refused(model: Path, fields: dict[str, Any], message: str) -> None:
    change(model, **fields)
    assert message in refusal(model, "config.json")


def test_deeply_nested_configuration_is_refused(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": ' + '{"a": ' * 100_000)
    assert refusal(model, "config.json") == "is nested deeper than 32 levels"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
def test_a_pipe_in_a_file_s_place_is_refused_at_once(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert refusal(model, name) == "is no regular file"


def test_template_that_cannot_be_compiled_is_refused_before_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "chat_template.jinja").write_text("a\n{% unknown %}")
    monkeypatch.setattr(transformers_dsa, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="cannot be compiled: line 2: ") as caught:
        TransformersRunner.load(model)
    assert (caught.value.field, caught.value.value) == ("worker.model", str(model / "chat_template.jinja"))


def test_weights_are_checked_file_by_file(model: Path) -> None:
    file = model / "model.safetensors"
    data = file.read_bytes()
    with Shards.open(model) as shards:
        assert shards.tensors["model.embed_tokens.weight"].tensor.shape == (264, 128)
    file.write_bytes(data[:-1])
    assert "are beyond the data" in refusal(model, "model.safetensors")
    file.write_bytes(data[:100])
    assert "is beyond the end of the file" in refusal(model, "model.safetensors")
    file.write_bytes(data)
    (model / "more.safetensors").write_bytes(b"")
    assert "has 0 bytes" in refusal(model, "more.safetensors")


def test_missing_layer_is_refused(model: Path) -> None:
    """The model library would draw such weights at random."""
    file = model / "model.safetensors"
    tensors = {name: it for name, it in load_file(file).items() if not name.startswith("model.layers.2.")}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.2\.input_layernorm\.weight"):
        TransformersRunner.load(model)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[" * 100_000, "no readable index"),
        ('{"weight_map": 3}', "no readable index"),
        ('{"weight_map": {"a": 3}}', "no readable index"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names '../model.safetensors', which is no safetensors file"),
    ],
)
def test_malformed_index_is_refused(model: Path, index: str, message: str) -> None:
    (model / INDEX).write_text(index)
    assert message in refusal(model, INDEX)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{" * 3, "is not JSON"),
        ('{"a": ' * 100_000, "is nested deeper"),
        ('{"eos_token_id": ["x"]}', "eos_token_id is not a token id below 264"),
        ('{"eos_token_id": 264}', "eos_token_id is not a token id below 264"),
        (json.dumps({"eos_token_id": [1] * 65}), "a list of at most 64"),
    ],
)
def test_malformed_generation_config_is_refused(model: Path, text: str, message: str) -> None:
    (model / "generation_config.json").write_text(text)
    assert message in refusal(model, "generation_config.json")


@pytest.mark.parametrize("fields", [{"rope_parameters": 7}, {"hidden_act": "none"}])
def test_configuration_that_the_library_cannot_load_is_refused(model: Path, fields: dict[str, Any]) -> None:
    change(model, **fields)
    with pytest.raises(ConfigError, match=r"worker\.model=.*the model library cannot load it: \w+: ") as caught:
        TransformersRunner.load(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BOUNDS)
def test_each_size_has_both_bounds(name: str) -> None:
    least, most = BOUNDS[name]
    for value in (least, most, None):
        check_dimensions({name: value}, "config.json", "config")
    for value in (least - 1, most + 1, float(most), str(most), True, [most]):
        with pytest.raises(
            ConfigError, match=f"config=config.json: {name} .* is not a whole number from {least} to {most}"
        ):
            check_dimensions({name: value}, "config.json", "config")

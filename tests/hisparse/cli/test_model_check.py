"""`hisparse model check`: published configurations of all families, served or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hisparse.cli import main
from protocol.byte_sizes import parse_size
from tests.support.published import DEEPSEEK_V32, FP8, GLM_53, SERVED
from tests.support.sparse_repository import write_sparse
from worker.families.table import FAMILIES
from worker.runners.checkpoint import geometry_of, read_dimensions
from worker.runners.tiny import write_tiny_checkpoint
from worker.weights.config_fields import NOT_SERVED
from worker.weights.shares import rank_bytes

#: Families that the model library has, and those that only other engines have.
LIBRARY = sorted(NOT_SERVED.keys() - {"deepseek_v41", "kimi_k3"})


def check(path: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["model", "check", str(path), *args])


def found(path: Path, *args: str) -> dict[str, Any]:
    result = check(path, *args, "--json")
    assert result.exit_code == 0, result.output
    about: dict[str, Any] = json.loads(result.stdout)
    return about


def refused(path: Path, *args: str) -> str:
    result = check(path, *args)
    assert result.exit_code == 8, result.output
    assert not result.stdout
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module", params=["glm-5.3", pytest.param("deepseek-v3.2", marks=pytest.mark.deep)])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, int]:
    """A family, its repository in published size without values, and the bytes of its tensors."""
    from transformers import AutoConfig

    path = tmp_path_factory.mktemp("models") / request.param
    fields = SERVED[request.param]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    return request.param, path, write_sparse(path, fields, AutoConfig.from_pretrained(path))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_checkpoint(path, "glm-5", index_topk=64, context_max_tokens=16_384)
    return path


def test_published_repositories_are_served_by_eight_gpus(published: tuple[str, Path, int]) -> None:
    name, path, stored = published
    about = found(path, "--kv-dtype", "fp8")
    shape = {"deepseek-v3.2": (61, 61, 163_840), "glm-5.3": (78, 21, 1_048_576)}[name]
    assert (about["layers"], about["selecting_layers"], about["context_max_tokens"]) == shape
    assert about["no_drafts"] == ""
    *small, eight = about["fits"]
    assert [it["gpus"] for it in small] == [1, 2, 4]
    assert all(it["refused"].startswith("the weights take ") for it in small)
    assert (eight["gpus"], eight["refused"], eight["context_tokens"]) == (8, "", shape[2])
    assert eight["requests"] >= 1
    dimensions = read_dimensions(path)
    assert eight["weights_bytes"] == sum(rank_bytes(dimensions, "bfloat16", (128, 128), 8, 512).weights.values())
    assert eight["host_bytes_per_token"] == geometry_of(dimensions, "fp8").page_bytes // 64
    assert about["weights_bytes"] == stored
    quantized, rows = about["approximate"]
    assert ("powers of two" in quantized) == (name == "deepseek-v3.2")
    assert "worker.kv_dtype = fp8" in rows


def test_a_repository_has_one_page(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "glm-5", fp8=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    result = check(tmp_path, "--gpu-mem", "4GB", "--host-mem", "1GB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) < 24
    assert lines[0].startswith(f"{tmp_path} can be served: hisparse up --model {tmp_path}")
    assert "4, of which 2 select 128 rows" in result.stdout
    assert "FP8 in blocks of 128 x 128" in result.stdout
    assert "worker.matmul = auto on Hopper" in lines[-1]
    assert "worker.kv_dtype" not in result.stdout


def test_a_cpu_is_advised_where_a_family_has_no_kernels(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "minimax-m3")
    result = check(tmp_path, "--gpu-mem", "4GB", "--host-mem", "1GB")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].endswith("--device cpu")
    assert "4, of which 3 select 256 rows" in result.stdout


def test_the_context_is_halved_until_a_request_fits(tiny: Path) -> None:
    whole, less = (found(tiny, "--gpu-mem", "4GB", "--host-mem", size) for size in ("1GB", "16MB"))
    assert whole["fits"][0]["context_tokens"] == 16_384
    fit = less["fits"][0]
    assert fit["context_tokens"] in (8_192, 4_096)
    size = fit["host_bytes_per_token"]
    assert fit["context_tokens"] * size < parse_size("16MB", "") < 2 * fit["context_tokens"] * size
    one = check(tiny, "--gpu-mem", "4GB", "--host-mem", "16MB", "--context", "16384")
    assert one.exit_code == 5
    assert "--context=16384: not one request of this length fits" in one.stderr


def test_an_exact_repository_says_so(tiny: Path) -> None:
    about = found(tiny)
    assert about["approximate"] == ["nothing: tokens are those of the model library, up to ties within rounding"]
    assert about["chat_template"]
    (rows,) = found(tiny, "--kv-dtype", "bfloat16")["approximate"]
    assert rows == "worker.kv_dtype = bfloat16: the model's dtype is float32"


def test_a_repository_without_its_draft_layer_says_why(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    assert found(tmp_path)["no_drafts"] == "drafts need a model with one MTP layer"


@pytest.mark.parametrize("family", LIBRARY)
def test_other_families_are_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    (tmp_path / "config.json").write_text(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
    text = refused(tmp_path)
    assert f"worker.model={tmp_path}: model_type {family} is not served: it has {NOT_SERVED[family]}" in text
    assert f"(use one of {', '.join(it.model_type for it in FAMILIES.values())})" in text


@pytest.mark.parametrize("family", ["deepseek_v41", "kimi_k3", "longcat_flash", "step5"])
def test_families_of_other_engines_are_refused(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V32 | {"model_type": family}))
    assert f"model_type {family} is not served" in refused(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "quant_method=modelopt: "),
        ({"scoring_func": "softmax"}, "scoring_func softmax is not served, sigmoid is"),
        ({"swiglu_limit": 10.0}, "swiglu_limit: no such field is known"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype bfloat16 is not served, float32 is"),
        ({}, "no safetensors"),
    ],
)
def test_other_forms_of_a_served_family_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM_53 | changed))
    assert message in refused(tmp_path)


def test_tensors_that_do_not_fit_the_config_are_refused(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_routed_experts": 31}))
    assert "mlp.gate.weight is [32, 128], and config.json makes it [31, 128]" in refused(tmp_path)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--gpu-mem", "much"), 8, "--gpu-mem=much: "),
        (("--host-mem", "much"), 8, "--host-mem=much: "),
        (("--kv-dtype", "int4"), 8, "--kv-dtype=int4: "),
        (("--context", "17000"), 8, "--context=17000: the model's context ends at 16384 tokens"),
        (("--gpu-mem", "6MB"), 8, "--gpu-mem=6MB: "),
        (("--host-mem", "1KB"), 8, "--host-mem=1KB: "),
    ],
)
def test_other_sizes_are_refused_by_flag(tiny: Path, args: tuple[str, ...], code: int, message: str) -> None:
    result = check(tiny, *args)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.stderr.split())
    assert "worker." not in result.stderr


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("deepseek-v3.2", 48_068),
        ("glm-5", 61_464),
        ("glm-5.3", 53_940),
        ("a.x-k2", 48_068),
        ("a.x-k2-light", 15_744),
    ],
)
def test_sizes_reach_the_published_context(name: str, row: int, tmp_path: Path) -> None:
    """Bytes of host memory per token in fp8, all layers; GLM-5.2 and 5.3 to a million tokens."""
    from worker.weights.synth import published_config

    stored = {"dtype": "bfloat16", "quantization_config": FP8}
    file, fields = tmp_path / "config.json", SERVED.get(name) or published_config(name).to_dict() | stored
    file.write_text(json.dumps(fields))
    context = str(fields["max_position_embeddings"])
    command = ["size", "--config", str(file), "--kv-dtype", "fp8", "--host-mem", "1TB", "--gpu-mem", "141GB"]
    result = CliRunner().invoke(main, [*command, "--group-size", "8", "--context", context, "--json"])
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout)
    assert about["host_bytes_per_token"] == row
    assert about["recommended"]["batch"] >= 1
    if "moe_router_dtype" in fields:
        plain = tmp_path / "plain.json"
        plain.write_text(json.dumps(SERVED["glm-5.2"]))
        command[2] = str(plain)
        other = json.loads(
            CliRunner().invoke(main, [*command, "--group-size", "8", "--context", "1m", "--json"]).stdout
        )
        routers = 75 * 256 * 6144
        held, rounded = about["weights_bytes_by_dtype"], other["weights_bytes_by_dtype"]
        assert held["float32"] - rounded["float32"] == 4 * routers
        assert rounded["bfloat16"] - held["bfloat16"] == 2 * routers

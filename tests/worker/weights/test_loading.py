"""Repositories to modules: equal to the library's loader, bounded in memory, and each fault named with its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from protocol.errors import ConfigError
from tests.support.checkpoints import DRAFTING, LATENT, tiny_checkpoint
from tests.support.history import dealt
from tests.support.router_bytes import with_exact_routers
from worker.runners.checkpoint import geometry_of, read_dimensions
from worker.runners.tiny import FAMILIES, tiny_config, write_tiny_checkpoint
from worker.weights import reading, synth
from worker.weights.layout import EXPERT, ExpertShare, is_of_mtp, weights_bytes
from worker.weights.model import held_bytes, keeps_exact, load_model
from worker.weights.modules import BlockExperts, BlockLinear
from worker.weights.quantization import read_quantization
from worker.weights.shards import INDEX, Shards
from worker.weights.writing import quantize_blocks

NORM = "model.norm.weight"
OTHER_PARTS = ("model.vision_tower.", "model.multi_modal_projector.")
Q_A = "model.layers.1.self_attn.q_a_proj.weight"


@pytest.fixture(scope="session")
def plain(run_dir: Path) -> dict[str, Path]:
    return {family: tiny_checkpoint(run_dir, family, index_topk=128) for family in FAMILIES}


@pytest.fixture(scope="session")
def quantized(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, fp8=True)


@pytest.fixture
def copied(quantized: Path, tmp_path: Path) -> Path:
    """A copy whose files a test may change."""
    for file in quantized.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(path: Path, **options: Any) -> Any:
    config = json.loads((path / "config.json").read_text())
    quantization = read_quantization(config, path / "config.json")
    return load_model(path, quantization, **({"dtype": torch.float32} | options))


def index_of(path: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    return weight_map


def rewrite(path: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Change the tensors of the shard that holds `name`, and write it again."""
    file = path / index_of(path)[name]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


@pytest.mark.parametrize(("family", "dtype"), dealt(FAMILIES, (torch.float32, torch.bfloat16)))
def test_plain_checkpoints_load_as_by_the_library(plain: dict[str, Path], family: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_parts = family not in LATENT
    kind = AutoModelForImageTextToText if has_parts else AutoModelForCausalLM
    theirs = kind.from_pretrained(plain[family], dtype=dtype)
    ours = load(plain[family], dtype=dtype)
    for named in ("named_parameters", "named_buffers"):
        wanted, found = dict(getattr(theirs, named)()), dict(getattr(ours, named)())
        if has_parts:  # the language model is one of them
            text = {name.replace("model.language_model.", "model."): it for name, it in wanted.items()}
            wanted = {name: it for name, it in text.items() if name in found or not name.startswith(OTHER_PARTS)}
        assert wanted.keys() == found.keys()
        if has_parts:  # the library rounds what corrects the choice of experts
            found = {name: it.to(wanted[name].dtype) for name, it in found.items()}
        assert all(found[name].dtype == it.dtype and torch.equal(found[name], it) for name, it in wanted.items())
    assert has_parts or ours.config.to_dict() == theirs.config.to_dict()
    assert not ours.training


def test_only_a_router_that_would_be_rounded_is_held_in_float32(plain: dict[str, Path], tmp_path: Path) -> None:
    """As published, in bfloat16, a router's weight takes no more than that and computes the same."""
    path, name = plain["deepseek-v3.2"], "model.layers.2.mlp.gate.weight"
    stored = {key: it.bfloat16() for key, it in load_file(path / "model.safetensors").items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    rounded, whole = (load(it, dtype=torch.bfloat16) for it in (tmp_path, path))
    exact = torch.float32 if keeps_exact(whole, name) else torch.bfloat16
    assert torch.equal(rounded.state_dict()[name], stored[name])
    assert whole.state_dict()[name].dtype == exact
    assert not keeps_exact(whole, "model.layers.2.mlp.shared_experts.gate_proj.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_change_no_value(quantized: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(quantized, dtype=dtype).state_dict()
    monkeypatch.setattr(reading, "PIECE_BYTES", 128 * 160)  # one block of rows at a time
    cut = load(quantized, dtype=dtype).state_dict()
    assert all(torch.equal(cut[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("keeps_fp8", [False, True])
def test_held_bytes_are_those_computed(quantized: Path, keeps_fp8: bool) -> None:
    model = load(quantized, dtype=torch.bfloat16, keeps_fp8=keeps_fp8)
    computed = weights_bytes(model.config, "bfloat16", (128, 128), on_gpu=keeps_fp8)
    held, wanted = held_bytes(model), with_exact_routers(computed, model)
    if not keeps_fp8:  # absorbed halves are made later
        config = model.config
        wanted["bfloat16"] -= 4 * 4 * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank * 2
    assert held == wanted


def test_kept_fp8_holds_the_stored_values(quantized: Path) -> None:
    model, stored = load(quantized, keeps_fp8=True), {}
    for file in quantized.glob("*.safetensors"):
        stored |= load_file(file)
    for name, module in model.named_modules():
        if isinstance(module, BlockLinear):
            weight = module.block_weight
            assert torch.equal(weight.values.view(torch.uint8), stored[f"{name}.weight"].view(torch.uint8))
            assert torch.equal(weight.scales, stored[f"{name}.weight_scale_inv"])
        if isinstance(module, BlockExperts):
            down = stored[f"{name}.7.down_proj.weight"]
            assert torch.equal(module.weight("down", 7).values.view(torch.uint8), down.view(torch.uint8))
    assert any(isinstance(it, BlockExperts) for it in model.modules())


def test_a_share_reads_its_experts_alone(quantized: Path) -> None:
    share = ExpertShare(8, 4)
    whole, part = load(quantized), load(quantized, experts=share)
    name = "model.layers.2.mlp.experts"
    for stack in ("gate_up_proj", "down_proj"):
        assert torch.equal(part.state_dict()[f"{name}.{stack}"], whole.state_dict()[f"{name}.{stack}"][8:12])


def _scale_or(name: str) -> str:
    return name.removesuffix("_scale_inv")


@pytest.mark.parametrize("stored", ["plain", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keeps_fp8", [False, True])
def test_a_rank_reads_and_holds_the_bytes_of_its_share(
    plain: dict[str, Path],
    quantized: Path,
    stored: str,
    dtype: torch.dtype,
    keeps_fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No byte of another rank's expert is read, and none is held, in whatever form the weights are kept."""
    path = plain["glm-5"] if stored == "plain" else quantized
    size, rank = 4, 2
    total = json.loads((path / "config.json").read_text())["n_routed_experts"]
    share = ExpertShare.of(rank, size, total)
    read: dict[str, int] = {}
    read_into = Shards.read_into

    def counting(self: Shards, name: str, offset: int, out: memoryview) -> None:
        read[name] = read.get(name, 0) + out.nbytes
        read_into(self, name, offset, out)

    monkeypatch.setattr(Shards, "read_into", counting)
    model = load(path, dtype=dtype, keeps_fp8=keeps_fp8, experts=share)

    of_experts = [it for name in read if (it := EXPERT.match(_scale_or(name)))]
    assert {int(it[2]) for it in of_experts} == set(range(share.first, share.first + share.count))
    with Shards.open(path) as shards:
        needed = {
            name: located.tensor.end - located.tensor.begin
            for name, located in shards.tensors.items()
            if (not (it := EXPERT.match(_scale_or(name))) or int(it[2]) in share) and not is_of_mtp(name, 4)
        }
    assert read == needed

    block = (128, 128) if stored == "fp8" else None
    kind = str(dtype).removeprefix("torch.")
    wanted = dict(weights_bytes(model.config, kind, block, on_gpu=keeps_fp8, experts=share))
    if dtype == torch.bfloat16:
        wanted = with_exact_routers(wanted, model)
    if not keeps_fp8:  # the absorbed halves of kv_b_proj are made later
        config = model.config
        heads = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
        wanted[kind] -= config.num_hidden_layers * heads * config.kv_lora_rank * dtype.itemsize
    assert held_bytes(model) == wanted
    modules = [it for name, it in model.named_modules() if name.endswith("mlp.experts")]
    assert modules
    for module in modules:
        if isinstance(module, BlockExperts):
            assert (module.first, module.total, len(module.weights[-1].values)) == (share.first, total, share.count)
        else:
            assert {len(it) for it in module.parameters()} == {module.num_experts} == {share.count}


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (3, 24)])
def test_shares_follow_the_order_of_ranks(rank: int, first: int) -> None:
    assert ExpertShare.of(rank, 4, 32) == ExpertShare(first, 8)


@pytest.mark.parametrize("size", [0, 3, 64])
def test_a_size_that_experts_do_not_divide_is_refused_with_those_that_do(size: int) -> None:
    with pytest.raises(ConfigError, match=r"32 experts.*1, 2, 4, 8, 16, 32") as refused:
        ExpertShare.of(0, size, 32)
    assert (refused.value.field, refused.value.value) == ("worker.group_size", str(size))


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="use 0 to 3") as refused:
        ExpertShare.of(4, 4, 32)
    assert refused.value.field == "worker.group_rank"


def test_experts_outside_the_share_may_be_absent(copied: Path) -> None:
    """Files of other ranks' experts need not be on this machine, as long as the index does not name them."""
    index = json.loads((copied / INDEX).read_text())
    gone = [
        name for name in index["weight_map"] if (it := EXPERT.match(name.removesuffix("_scale_inv"))) and it[2] > "3"
    ]
    for name in gone:
        rewrite(copied, name, lambda tensors, name=name: tensors.pop(name))  # type: ignore[misc]
        del index["weight_map"][name]
        (copied / INDEX).write_text(json.dumps(index))
    load(copied, experts=ExpertShare(0, 1))
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.2\.mlp\.experts"):
        load(copied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_power_of_two_scales_load_from_either_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    write_tiny_checkpoint(tmp_path, fp8=True, powers_of_two=True)
    wanted = load(tmp_path).state_dict()
    for file in sorted(tmp_path.glob("*.safetensors")):
        tensors = load_file(file)
        save_file({name: it.to(dtype) if name.endswith("_scale_inv") else it for name, it in tensors.items()}, file)
    found = load(tmp_path).state_dict()
    assert all(torch.equal(found[name], it) for name, it in wanted.items())


def add(path: Path, *names: str) -> None:
    """Store tensors of these names beside the final norm."""
    file = rewrite(path, NORM, lambda tensors: tensors.update({it: torch.zeros(3) for it in names}))
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(names, file.name)
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("draft_layer", [False, True])
def test_what_the_draft_layer_shares_and_rotary_tables_are_left_unread(copied: Path, draft_layer: bool) -> None:
    add(copied, "model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")
    add(copied, "model.rotary_emb.inv_freq")
    model = load(copied, draft_layer=draft_layer)
    assert len(model.model.layers) == 4 + draft_layer


DRAFT = "model.layers.4"


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (f"{DRAFT}.hnorm.weight", None, rf"lacks {DRAFT}\.hnorm\.weight"),
        (f"{DRAFT}.eh_proj.weight", torch.zeros(160, 160), rf"{DRAFT}\.eh_proj\.weight is \[160, 160\], and"),
        (f"{DRAFT}.enorm.weight", torch.zeros(160, dtype=torch.int8), rf"{DRAFT}\.enorm\.weight is stored as I8"),
    ],
)
def test_a_wrong_draft_layer_is_refused_where_it_is_asked_for(
    copied: Path, name: str, change: Tensor | None, match: str
) -> None:
    rewrite(copied, name, lambda tensors: tensors.pop(name) if change is None else tensors.update({name: change}))
    if change is None:
        index = json.loads((copied / INDEX).read_text())
        del index["weight_map"][name]
        (copied / INDEX).write_text(json.dumps(index))
    load(copied)
    with pytest.raises(ConfigError, match=match):
        load(copied, draft_layer=True)


@pytest.mark.parametrize(("family", "fp8"), dealt(DRAFTING, (False, True)))
def test_synthetic_repository_has_a_draft_layer(
    tmp_path: Path, family: str, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the published configuration, in the widths of a tiny one."""
    config = synth.published_config(family, layers=4, experts=32)
    assert config.num_nextn_predict_layers == 1
    small = tiny_config(family, 64, 2_048)
    small.num_nextn_predict_layers = config.num_nextn_predict_layers
    monkeypatch.setattr(synth, "published_config", lambda *_, **__: small)
    synth.write_synthetic(tmp_path, family, layers=4, fp8=fp8)
    with Shards.open(tmp_path) as shards:
        stored = shards.tensors.keys()
    assert (f"{DRAFT}.self_attn.q_a_proj.weight_scale_inv" in stored) == fp8
    assert f"{DRAFT}.eh_proj.weight_scale_inv" not in stored
    model = load(tmp_path, draft_layer=True)
    assert model.model.layers[4].mlp.experts.down_proj.std() > 0
    dimensions = read_dimensions(tmp_path)
    counts = [geometry_of(dimensions, "bfloat16", draft_layer=it).layers for it in (False, True)]
    assert counts == [4, 5]


@pytest.mark.parametrize("name", [f"{DRAFT}.strange.weight", "model.layers.5.eh_proj.weight"])
def test_a_tensor_that_no_draft_layer_has_is_refused_where_it_is_asked_for(copied: Path, name: str) -> None:
    add(copied, name)
    load(copied)
    with pytest.raises(ConfigError, match=f"holds {name}, which a deepseek_v32 of this config.json does not have"):
        load(copied, draft_layer=True)


@pytest.mark.parametrize("keeps_fp8", [False, True])
def test_a_share_of_the_draft_layer_is_read_alone(quantized: Path, keeps_fp8: bool) -> None:
    share = ExpertShare(8, 4)
    model = load(quantized, experts=share, draft_layer=True, keeps_fp8=keeps_fp8, dtype=torch.bfloat16)
    whole = load(quantized, draft_layer=True, keeps_fp8=keeps_fp8, dtype=torch.bfloat16)
    ours, theirs = (it.model.layers[4].mlp.experts for it in (model, whole))
    if keeps_fp8:
        assert isinstance(ours, BlockExperts)
        codes = [it.weights[-1].values.view(torch.uint8) for it in (ours, theirs)]
        assert torch.equal(codes[0], codes[1][8:12])
    else:
        assert torch.equal(ours.down_proj, theirs.down_proj[8:12])
    config = model.config
    block = (128, 128)
    computed = weights_bytes(config, "bfloat16", block, on_gpu=keeps_fp8, experts=share, draft_layer=True)
    wanted = with_exact_routers(computed, model)
    if not keeps_fp8:  # absorbed halves are made later
        wanted["bfloat16"] -= 5 * 4 * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank * 2
    assert held_bytes(model) == wanted


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def _with(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (Q_A, _without(Q_A), rf"lacks {Q_A}, which {INDEX} places there"),
        (
            Q_A,
            _with(Q_A, torch.zeros(96, 160)),
            r"q_a_proj\.weight is \[96, 160\], and config\.json makes it \[160, 160\]",
        ),
        (Q_A, _with(Q_A, torch.zeros(160, 160, dtype=torch.int8)), "is stored as I8"),
        (f"{Q_A}_scale_inv", _with(f"{Q_A}_scale_inv", torch.ones(1, 2)), r"is \[1, 2\], and blocks of 128 x 128"),
        (f"{Q_A}_scale_inv", _with(f"{Q_A}_scale_inv", torch.ones(2, 2).half()), "is stored as F16"),
        (f"{Q_A}_scale_inv", _with(f"{Q_A}_scale_inv", torch.tensor([[1.0, -1.0], [1, 1]])), "negative or no number"),
        (f"{Q_A}_scale_inv", _with(f"{Q_A}_scale_inv", torch.full((2, 2), float("nan"))), "negative or no number"),
        (Q_A, _with("model.layers.1.self_attn.q_a_proj.bias", torch.zeros(160)), "does not place there"),
    ],
)
def test_an_unfit_tensor_is_refused_with_its_file(
    copied: Path, name: str, change: Callable[[dict[str, Tensor]], None], match: str
) -> None:
    file = rewrite(copied, name, change)
    with pytest.raises(ConfigError, match=match) as refused:
        load(copied)
    assert str(file) in str(refused.value)


def test_an_unexpected_tensor_is_refused(plain: dict[str, Path], tmp_path: Path) -> None:
    source = plain["deepseek-v3.2"]
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.weight"):
        load(tmp_path)


def test_fp8_without_its_scales_is_refused(copied: Path) -> None:
    name = f"{Q_A}_scale_inv"
    rewrite(copied, name, _without(name))
    index = json.loads((copied / INDEX).read_text())
    del index["weight_map"][name]
    (copied / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"is FP8 and has no {name}"):
        load(copied)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"quantization_config": None}, "is FP8, and config.json has no quantization_config"),
        ({"hidden_size": 128}, "config.json makes it"),
        ({"num_hidden_layers": 5}, "lacks model.layers.4"),
        ({"n_routed_experts": 31}, r"mlp\.gate\.weight is \[32, 160\], and config\.json makes it \[31, 160\]"),
    ],
)
def test_a_configuration_of_another_model_is_refused(copied: Path, change: dict[str, Any], match: str) -> None:
    config = json.loads((copied / "config.json").read_text()) | change
    if "num_hidden_layers" in change:
        config |= {"mlp_layer_types": ["dense"] * 5, "layer_types": ["indexed_attention"] * 5}
        match = "lacks model"
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=match):
        load(copied)


def test_a_listed_module_that_is_fp8_is_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "model.layers.1.self_attn.q_a_proj"]
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="modules_to_not_convert lists it"):
        load(copied)


def test_a_truncated_shard_is_refused_by_name(copied: Path) -> None:
    file = copied / index_of(copied)[Q_A]
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="beyond the data") as refused:
        load(copied)
    assert file.name in str(refused.value)


def test_a_shard_that_shrinks_while_it_is_read_is_refused(copied: Path) -> None:
    with Shards.open(copied) as shards:
        file = copied / shards.tensors[Q_A].file
        with file.open("r+b") as out:
            out.truncate(shards.tensors[Q_A].tensor.begin + 5)
        destination = torch.empty(160, 160, dtype=torch.float8_e4m3fn)
        with pytest.raises(ConfigError, match=f"ended while {Q_A} was read"):
            reading.read_all(shards, [reading.Read(Q_A, destination)])


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("{", "no readable index"),
        ("[]", "no readable index"),
        ('{"weight_map": {"a": 1}}', "no readable index"),
        ('{"weight_map": {}}', "names no tensors"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "no safetensors file beside it"),
        ('{"weight_map": {"a": "x.bin"}}', "no safetensors file beside it"),
        ('{"weight_map": {"a": "absent.safetensors"}}', rf"is missing, and {INDEX} names it"),
        ('{"weight_map": {"a": ' + "[" * 100_000 + "}}", "no readable index"),
    ],
)
def test_an_unfit_index_is_refused(copied: Path, index: str, match: str) -> None:
    (copied / INDEX).write_text(index)
    with pytest.raises(ConfigError, match=match):
        Shards.open(copied)


def test_files_without_an_index_must_not_hold_a_tensor_twice(copied: Path) -> None:
    (copied / INDEX).unlink()
    load(copied)
    save_file({Q_A: torch.zeros(1)}, copied / "z.safetensors")
    with pytest.raises(ConfigError, match=f"holds {Q_A}, and so does"):
        load(copied)


def test_refused_repositories_leave_no_file_open(copied: Path) -> None:
    (copied / index_of(copied)[Q_A]).write_bytes(b"no header")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(ConfigError):
            Shards.open(copied)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (160, 300), (576, 130)])
def test_quantized_blocks_use_the_whole_range(shape: tuple[int, int], powers_of_two: bool) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = quantize_blocks(weight, powers_of_two=powers_of_two)
    assert found.scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    scales = found.scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    torch.testing.assert_close(found.values.float() * scales, weight, rtol=0.07, atol=1e-2)
    assert not powers_of_two or torch.equal(torch.exp2(torch.log2(found.scales).round()), found.scales)

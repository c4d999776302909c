"""What fits: `hisparse size`, and the cut of device memory for a length of context, at real dimensions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.memory.ledger import Ledger
from hisparse.cli import main
from kernels.layout import Geometry
from kernels.state import DeviceState
from protocol.byte_sizes import parse_size
from protocol.config import HostFacts, build
from protocol.config_checks import SEATS_MAX
from protocol.errors import CapacityError, ConfigError
from protocol.messages import ModelInfo
from protocol.settings import WorkerSettings
from protocol.sizing import Length, Memory, hot_sizes_for, misfit, page_limit
from protocol.units import BLOCK_TOKENS_MAX, PAGE_TOKENS, managed_chunks, pages_for
from tests import ROOT
from tests.support.checkpoints import tiny_checkpoint
from worker.device.capacity import MemoryPlan, plan
from worker.device.passes import PARTS_MAX
from worker.device.sizing import DEVICE_SHARE, STANDBY_DEVICE_BYTES, STEP_SHARE, Sizing, auto_budget, size_worker
from worker.group.exchange import Alike, Exchange
from worker.keeper.messages import GPU_SEGMENT_BYTES
from worker.loop.reuse import WARM_UP_STEPS
from worker.loop.selections import TraceSizes, encode, encode_head
from worker.runners.checkpoint import anonymous_info, geometry_of, kinds_of, read_dimensions
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights.layout import ExpertShare, exchange_bytes, group_sizes, prompt_scratch_bytes, weights_bytes
from worker.weights.matmul import DECODED, Matmul
from worker.weights.model import load_model
from worker.weights.quantization import Quantization
from worker.weights.shares import fitting_group_size, rank_bytes
from worker.weights.synth import published_config

FP8_ROW, FP8_KEY, BF16_ROW, BF16_KEY = 656, 132, 1152, 256
LAYERS = 61
BIG = WorkerSettings(device_mem="30GB", host_mem="1TB", kv_dtype="fp8", seats=1024)


def deepseek(kind: str = "fp8") -> Geometry:
    row, key = (FP8_ROW, FP8_KEY) if kind == "fp8" else (BF16_ROW, BF16_KEY)
    return Geometry(LAYERS, row, tuple(range(LAYERS)), key, topk=2048)


def info(context: int = 163_840) -> ModelInfo:
    return ModelInfo("f", "m", context, 1000, LAYERS, 2048, (), "bytes", "")


def sized(geometry: Geometry | None = None, **changes: object) -> Sizing:
    return size_worker(msgspec.structs.replace(BIG, **changes), geometry or deepseek(), info())


def planned(context: int, workers: int = 1, **changes: object) -> MemoryPlan:
    return plan(msgspec.structs.replace(BIG, **changes), deepseek(), info(), context, workers)


# ---------------------------------------------------------------- the share of index pages


def index_share(sizing: Sizing, geometry: Geometry) -> float:
    index = sizing.capacity.index_pages * geometry.index_page_bytes
    return index / (index + sizing.capacity.hot_chunks * geometry.chunk_bytes)


def test_index_pages_take_half_without_a_target() -> None:
    assert index_share(sized(), deepseek()) == pytest.approx(0.5, abs=0.001)


@pytest.mark.parametrize(("context", "percent"), [(32_768, 61), (131_072, 86)])
def test_index_share_follows_rows_and_length(context: int, percent: int) -> None:
    """The percentages that worker/device/sizing.py names."""
    assert round(100 * index_share(sized(context_target_tokens=context), deepseek())) == percent


@pytest.mark.parametrize("context", [2_000, 4_096, 32_768, 131_072, 163_840])
@pytest.mark.parametrize("kind", ["fp8", "bfloat16"])
def test_index_pages_and_hot_chunks_run_out_together(context: int, kind: str) -> None:
    """Neither keeps room for a request of the target's length that the other has none for."""
    geometry = deepseek(kind)
    capacity = sized(geometry, context_target_tokens=context).capacity
    pages = pages_for(context + capacity.overshoot_tokens)
    chunks = min(managed_chunks(4096), pages)
    assert capacity.index_pages // pages == capacity.hot_chunks // chunks > 0


def test_target_admits_more_requests_than_halves() -> None:
    pages = pages_for(131_072 + 1)
    aimed, halves = sized(context_target_tokens=131_072).capacity, sized().capacity
    assert aimed.index_pages // pages > 1.5 * (halves.index_pages // pages)


@pytest.mark.parametrize(("target", "counts"), [(32_768, (633, 65, 65)), (0, (126, 10, 85))])
def test_worker_logs_its_request_capacity_at_start(target: int, counts: tuple[int, int, int]) -> None:
    """Of the length aimed at, or of the longest."""
    _, enough = sized(context_target_tokens=target).report()
    assert enough["context_target_tokens"] == (target or 163_840)
    kinds = ("host_pages", "index_pages", "hot_chunks")
    assert tuple(enough[f"requests_by_{kind}"] for kind in kinds) == counts


def test_a_target_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="contexts end at 65536 tokens") as caught:
        sized(context_max_tokens=65_536, context_target_tokens=65_537)
    assert caught.value.field == "worker.context_target_tokens"


# ---------------------------------------------------------------- the slab


@pytest.mark.parametrize("context", [163_840, 1_048_576])
def test_slab_holds_two_layers_of_the_longest_prompt(context: int) -> None:
    """GLM-5.2's rows: a prompt of a million tokens is admitted, where all of its layers would take 54 GB."""
    layers = 78
    geometry = Geometry(layers, FP8_ROW, tuple(it // 4 for it in range(layers)), FP8_KEY, topk=2048)
    settings = msgspec.structs.replace(BIG, device_mem="20GB", seats=4)
    found = size_worker(settings, geometry, info(context))
    longest = pages_for(context + found.capacity.overshoot_tokens)
    assert longest * geometry.slab_page_bytes == longest * 64 * 2 * FP8_ROW < 1.4e9
    packed = (found.slab_pages - longest) * geometry.slab_page_bytes
    assert 0 < packed <= min(parse_size("20GB", "") // 32, 262_144 * 2 * FP8_ROW)
    assert not misfit(Length(context - 100, 0, 100), found.capacity, "w0")


def test_slab_of_ranks_that_split_prompts_counts_what_guests_take() -> None:
    """Index keys of one group, and their tables; not where ranks split nothing."""
    kinds = {"context_max_tokens": 4_096, "group_size": 8}
    geometry, plain = deepseek(), sized(**kinds, split_tokens=0)
    assert plain.slab_page_bytes == sized(**kinds, deterministic=True).slab_page_bytes == geometry.slab_page_bytes
    assert sized(context_max_tokens=4_096).slab_page_bytes == geometry.slab_page_bytes
    splitting = sized(**kinds)
    sizes = dict.fromkeys(("seats", "chunks", "index_pages", "max_pages", "max_chunks", "tail_slots"), 1)
    host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8)
    guest = DeviceState.allocate(geometry, slab_pages=splitting.slab_pages, host=host, **sizes).guest(PARTS_MAX)
    taken = sum(it.numel() * it.element_size() for it in (guest.slab_rows, guest.index_keys, guest.slab_table))
    assert taken == splitting.slab_pages * splitting.slab_page_bytes
    assert splitting.device_bytes <= parse_size("30GB", "")


# ---------------------------------------------------------------- what a plan says is what a worker has


@given(
    context=st.integers(100, 163_840),
    workers=st.integers(1, 8),
    device_gb=st.integers(8, 120),
    host_gb=st.integers(100, 2_000),
    kind=st.sampled_from(["fp8", "bfloat16"]),
)
@settings(max_examples=25)
def test_printed_settings_hold_exactly_the_batch(
    context: int, workers: int, device_gb: int, host_gb: int, kind: str
) -> None:
    """A real ledger of the node takes the whole batch at its longest on each worker, and, seats aside, not one more on
    all of them. SGLang #24039: what is exposed is what admission finds."""
    geometry = deepseek(kind)
    wanted = msgspec.structs.replace(BIG, device_mem=f"{device_gb}GB", host_mem=f"{host_gb}GB", kv_dtype=kind)
    try:
        found = plan(wanted, geometry, info(), context, workers)
    except (ConfigError, CapacityError):
        return  # not one fits
    assert found.settings.seats == found.recommended.batch
    capacity = size_worker(found.settings, geometry, info()).capacity
    pages = page_limit(Length(1, 0, context - 1), capacity)
    each = Memory(pages, hot_sizes_for(pages, capacity)[0].hot_chunks, pages)
    ledger = Ledger(capacity.host_pages)
    for worker in range(workers):
        ledger.add_worker(f"w{worker}", 1, capacity)
        for number in range(found.recommended.batch):
            ledger.reserve(1 + worker * SEATS_MAX + number, f"w{worker}", each)
    short = [ledger.shortfall(f"w{worker}", each) for worker in range(workers)]
    assert all(short) or found.recommended.by_host * workers < found.requests_by_host, "hosts' pages share out evenly"


def test_largest_hot_buffer_without_lost_seats_is_chosen() -> None:
    scarce = planned(131_072, workers=8, host_mem="500GB")
    assert scarce.recommended.batch == scarce.requests_by_host // 8 == 9
    assert scarce.recommended.hot_slots == 32_768
    assert {choice.batch for choice in scarce.choices} == {9}, "host memory is what ends every choice"
    plenty = planned(131_072, workers=1)
    assert plenty.recommended.hot_slots == 4096, "each larger one costs requests"
    assert [choice.batch for choice in plenty.choices] == sorted((c.batch for c in plenty.choices), reverse=True)


def test_decode_only_worker_spends_no_memory_on_prompts() -> None:
    """Its slab is one page."""
    assert sized(role="decode").slab_pages == 1
    alone, both = planned(131_072, role="decode"), planned(131_072)
    assert alone.prompt_max_tokens == 0
    assert alone.slab_bytes == deepseek().slab_page_bytes
    assert (both.slab_bytes, both.prompt_max_tokens) == ((2_049 + 4_096) * deepseek().slab_page_bytes, 131_072)


def test_oversized_hot_buffers_are_left_out() -> None:
    small = planned(131_072, role="decode", device_mem="2.5GB")
    assert [choice.hot_slots for choice in small.choices] == [4096, 8192, 16_384]
    assert min(choice.batch for choice in small.choices) == 1


def test_larger_classes_than_the_context_are_left_out() -> None:
    assert [choice.hot_slots for choice in planned(6_000).choices] == [4096, 0]
    assert [choice.hot_slots for choice in planned(2_000).choices] == [0]


def test_oversized_length_is_refused_with_arithmetic() -> None:
    with pytest.raises(CapacityError, match="needs 2049 host pages, worker has 1625") as caught:
        planned(131_072, host_mem="5GB")
    assert caught.value.field == "context"


# ---------------------------------------------------------------- config.json


@pytest.fixture(scope="module")
def config_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3.2's published dimensions, as the model library's own class writes them."""
    from transformers import DeepseekV32Config

    path = tmp_path_factory.mktemp("deepseek") / "config.json"
    DeepseekV32Config(dtype="bfloat16").to_json_file(path)
    return path


def test_dimensions_are_those_of_the_published_model(config_json: Path) -> None:
    dimensions = read_dimensions(config_json)
    assert geometry_of(dimensions, "fp8") == deepseek()
    assert geometry_of(dimensions, "bfloat16") == deepseek("bfloat16")
    assert anonymous_info(dimensions, "m").context_max_tokens == 163_840
    assert read_dimensions(config_json.parent).index_topk == 2048


def test_shared_selection_layers_are_read_as_in_the_library(tmp_path: Path) -> None:
    """The file may leave the pattern to the library, which makes index groups of it."""
    from transformers import GlmMoeDsaConfig

    config = GlmMoeDsaConfig(num_hidden_layers=8, index_topk_freq=4)
    fields = config.to_dict()
    for name in ("indexer_types", "layer_types", "mlp_layer_types"):
        del fields[name]
    (tmp_path / "config.json").write_text(json.dumps(fields | {"index_topk_freq": 4}))
    geometry = geometry_of(read_dimensions(tmp_path), "fp8")
    assert geometry.group_of_layer == geometry_of(config, "fp8").group_of_layer
    assert geometry.groups < 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is JSON, but no object"),
        ('{"a": ' * 100_000, "is nested deeper than 32 levels"),
        ('{"model_type": "deepseek_v32", "num_hidden_layers": 1000000000}', "num_hidden_layers 1000000000 is not"),
        (
            '{"model_type": "glm_moe_dsa", "index_topk_freq": 2, "num_hidden_layers": 1e9}',
            "num_hidden_layers 1000000000.0",
        ),
        ('{"model_type": "glm_moe_dsa", "index_topk_pattern": "FX"}', "the model library cannot load it: KeyError"),
        ('{"model_type": "llama"}', "model_type llama is not served"),
        ('{"model_type": "deepseek_v32", "num_hidden_layers": 61}', "has no kv_lora_rank, no qk_rope_head_dim"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_dimensions(file)
    assert caught.value.remedy


# ---------------------------------------------------------------- the command


def size(config_json: Path, *args: str) -> str:
    result = CliRunner().invoke(main, ["size", "--config", str(config_json), *args])
    assert result.exit_code == 0, result.output
    return result.stdout


ISSUED = ("--host-mem", "1TB", "--device-mem", "30GB", "--context", "131072")


def test_capacity_prints_a_single_object(config_json: Path) -> None:
    found = json.loads(size(config_json, *ISSUED, "--workers", "8", "--kv-dtype", "fp8", "--json"))
    assert found["host_bytes_per_token"] == LAYERS * (FP8_ROW + FP8_KEY) == 48_068
    assert found["requests_by_host"] == parse_size("1TB", "") // (64 * 48_068) // 2049 == 158
    assert found["recommended"]["batch"] == 19
    assert found["resident"] == 4
    assert found["settings"]["seats"] == 19


def test_printed_settings_start_a_worker(config_json: Path) -> None:
    text = size(config_json, *ISSUED, "--kv-dtype", "fp8")
    assert size_worker(printed_settings(text), deepseek(), info()).capacity.seats == printed_settings(text).seats == 23


def printed_settings(text: str) -> WorkerSettings:
    table = tomllib.loads(text[text.index("[worker]") :])
    return build(table, {}, {"worker.device": "cuda"}, HostFacts("h", 1, 1)).worker


@pytest.mark.parametrize(
    ("flags", "rows", "keys"),
    [
        (("--kv-dtype", "fp4"), ("fp4", 352), ("fp4", 68)),
        (("--kv-dtype", "fp8", "--index-dtype", "fp4"), ("fp8", 656), ("fp4", 68)),
        (("--row-dtype", "fp4", "--index-dtype", "fp8"), ("fp4", 352), ("fp8", 132)),
    ],
)
def test_formats_of_rows_and_keys_are_printed_and_kept(
    config_json: Path, flags: tuple[str, ...], rows: tuple[str, int], keys: tuple[str, int]
) -> None:
    text = size(config_json, *ISSUED, *flags)
    assert f"  row             {rows[1]} bytes in {rows[0]}\n  index key       {keys[1]} bytes in {keys[0]}\n" in text
    found = json.loads(size(config_json, *ISSUED, *flags, "--json"))
    assert (found["row_dtype"], found["row_bytes"]) == rows
    assert (found["index_dtype"], found["index_row_bytes"]) == keys
    assert kinds_of(read_dimensions(config_json), printed_settings(text)) == (rows[0], keys[0])


def test_capacity_needs_no_torch(config_json: Path) -> None:
    code = (
        "import sys; from hisparse.cli import main\n"
        f"main(['size', '--config', {str(config_json)!r}, *{ISSUED!r}], standalone_mode=False)\n"
        "print([m for m in ('torch', 'transformers', 'zmq', 'trio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_worked_example_is_the_command_output(config_json: Path) -> None:
    """docs/operations.md shows it word for word."""
    guide = (ROOT / "docs" / "operations.md").read_text()
    command, _, rest = guide.split("$ hisparse size --config config.json ")[1].partition("\n")
    shown = rest.split("```")[0]
    printed = size(config_json, *command.replace("\\", "").split())
    assert [line.rstrip() for line in printed.splitlines()] == shown.rstrip("\n").splitlines()


def test_worked_example_text_uses_the_command_figures(config_json: Path) -> None:
    guide = re.sub(r"\s+", " ", (ROOT / "docs" / "operations.md").read_text())
    found = json.loads(size(config_json, *ISSUED, "--workers", "8", "--kv-dtype", "fp8", "--json"))
    small, larger, largest = found["choices"][:3]
    batch, resident = small["batch"], found["resident"]
    assert f"So {batch} requests of 128k tokens decode on each GPU, where {resident} would fit" in guide
    assert f"{8 * batch} on the node instead of {8 * resident}" in guide
    assert (small["by_host"], small["by_index_pages"]) == (batch, 23)
    assert (batch - larger["batch"], batch - largest["batch"]) == (0, 3)
    loaded = 0.1 * batch * found["miss_bytes_per_step"]
    assert (
        f"{loaded / 1e6:.0f} MB: {1e3 * loaded / 55e9:.1f} ms of the link. At 50 % it is {5e3 * loaded / 55e9:.0f} ms"
        in guide
    )
    assert f"cost the slab {found['slab_bytes'] / 2**20:.1f} MiB" in guide


# ---------------------------------------------------------------- whole GPUs


def published(path: Path, family: str, **change: Any) -> Path:
    """config.json of the published FP8 repository, but for `change`."""
    about = json.loads(published_config(family).to_json_string(use_diff=False))
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    (path / "config.json").write_text(
        json.dumps(about | {"dtype": "bfloat16", "quantization_config": quantization} | change)
    )
    return path / "config.json"


WHOLE = ("--host-mem", "2TB", "--context", "131072", "--kv-dtype", "fp8")


@pytest.mark.parametrize(
    ("family", "weights"),
    [("deepseek-v3.2", 668_865_724_416 + 6_024_409_600 + 163_363_520), ("glm-5", 740_728_504_320 + 6_546_315_908)],
)
def test_a_whole_gpu_is_weights_and_nine_tenths_of_the_rest(tmp_path: Path, family: str, weights: int) -> None:
    found = json.loads(size(published(tmp_path, family), *WHOLE, "--gpu-mem", "1TB", "--json"))
    assert abs(found["weights_bytes_per_gpu"] - weights) < 1_000_000
    assert sum(found["weights_bytes_by_dtype"].values()) == found["weights_bytes_per_gpu"]
    left = parse_size("1TB", "") - found["weights_bytes_per_gpu"] - STANDBY_DEVICE_BYTES - GPU_SEGMENT_BYTES
    budget = int(left * DEVICE_SHARE)
    assert found["settings"]["device_mem"] == str(budget)
    assert found["seats_per_gpu"] == found["recommended"]["batch"] > 0
    assert found["host_bytes_per_gpu"] == found["host_pages"] * 64 * found["host_bytes_per_token"]


def test_a_worker_leaves_its_standby_memory_of_the_gpu(config_json: Path) -> None:
    text = size(config_json, *ISSUED, "--kv-dtype", "fp8")
    table = tomllib.loads(text[text.index("[worker]") :]) | {}
    table["worker"]["device_mem"] = "auto"
    sized = []
    for standby, free in ((0, 30 << 30), (1, (30 << 30) + STANDBY_DEVICE_BYTES), (1, 30 << 30)):
        settings = build(table, {}, {"worker.device": "cuda", "worker.standby": standby}, HostFacts("h", 1, 1)).worker
        sized.append(size_worker(settings, deepseek(), info(), free_device_bytes=free))
    assert sized[0] == sized[1] != sized[2]
    assert 0 < sized[1].device_bytes - sized[2].device_bytes <= STANDBY_DEVICE_BYTES


def test_weights_beyond_the_gpu_are_refused_with_the_sum(tmp_path: Path) -> None:
    config = published(tmp_path, "deepseek-v3.2")
    refused = CliRunner().invoke(main, ["size", "--config", str(config), *WHOLE, "--gpu-mem", "141GB"])
    assert refused.exit_code == 8
    said = " ".join(refused.output.split())
    assert "the weights take 675.1 GB (668.9 GB float8_e4m3fn + 6.0 GB bfloat16 + 0.2 GB float32)" in said
    assert "and prompt passes 2.6 GB and the last piece of their keeper 0.1 GB of 141.0 GB" in said


def test_a_refusal_names_the_size_of_a_group_that_fits(tmp_path: Path) -> None:
    config = published(tmp_path, "deepseek-v3.2")
    for gpu_mem, remedy in (("141GB", "(--group-size 8 fits; or use"), ("15GB", "(use a checkpoint in FP8")):
        refused = CliRunner().invoke(main, ["size", "--config", str(config), *WHOLE, "--gpu-mem", gpu_mem])
        assert refused.exit_code == 8
        assert remedy in " ".join(refused.output.split())


def test_eight_gpus_of_141_gb_hold_671_billion_parameters(tmp_path: Path) -> None:
    """An eighth of the experts, all else whole, and the buffers of the exchange; the pool is shared by the group."""
    config = published(tmp_path, "deepseek-v3.2")
    found = json.loads(size(config, *WHOLE, "--gpu-mem", "141GB", "--group-size", "8", "--json"))
    assert (found["group_size"], found["workers"]) == (8, 8)
    model = published_config("deepseek-v3.2")
    share = weights_bytes(model, "bfloat16", (128, 128), on_gpu=True, experts=ExpertShare(0, 32))
    assert found["weights_bytes_by_dtype"] == dict(share)
    rows, hidden, choices = BLOCK_TOKENS_MAX, 7168, 8
    exchange = rows * (9 * (2 * hidden + 8 * choices) + 8 * 2 * 2 * hidden)
    assert found["exchange_bytes_per_gpu"] == exchange_bytes(model, "bfloat16", 8, rows) == exchange
    left = parse_size("141GB", "") - found["weights_bytes_per_gpu"] - exchange - GPU_SEGMENT_BYTES
    prompts = prompt_scratch_bytes(model, rows, WorkerSettings().pass_tokens, ranks=8)
    assert found["prompt_bytes_per_gpu"] == prompts
    assert found["settings"]["device_mem"] == str(auto_budget(left, prompts)) == str(int((left - prompts) * STEP_SHARE))
    assert 30e9 < left < 60e9
    assert found["recommended"]["batch"] > 10
    assert BLOCK_TOKENS_MAX > SEATS_MAX, "a block of a prompt has more rows than any step"
    text = " ".join(size(config, *WHOLE, "--gpu-mem", "141GB", "--group-size", "8").split())
    assert "Weights on each GPU of a group of 8:" in text
    assert "Buffers for the exchange of rows: 1.4 GiB. Prompt passes: 2.9 GiB." in text


def test_ranks_that_draft_hold_a_share_of_the_draft_layer(tmp_path: Path) -> None:
    """They exchange as many rows as others, since a block of a prompt has more than 1 + n of each seat."""
    config, model = published(tmp_path, "deepseek-v3.2"), published_config("deepseek-v3.2")
    args = ("--gpu-mem", "141GB", "--group-size", "8", "--draft-tokens", "2", "--json")
    found = json.loads(size(config, *WHOLE, *args))
    share, block = ExpertShare(0, 32), (128, 128)
    held = weights_bytes(model, "bfloat16", block, on_gpu=True, experts=share, draft_layer=True)
    assert found["weights_bytes_by_dtype"] == dict(held)
    assert found["exchange_bytes_per_gpu"] == exchange_bytes(model, "bfloat16", 8, BLOCK_TOKENS_MAX)
    assert found["settings"]["draft_tokens"] == 2


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choices", [2, 3])
def test_buffers_of_the_exchange_are_those_that_a_rank_has(
    deterministic: bool, dtype: torch.dtype, choices: int
) -> None:
    config, name = SimpleNamespace(hidden_size=384, num_experts_per_tok=choices), str(dtype).removeprefix("torch.")
    for matmul in (None, DECODED, Matmul("fake 0.0")):
        form = {"hidden": 384, "choices": choices, "rows_max": 10, "dtype": dtype, "device": "cpu", "matmul": matmul}
        exchange = Exchange(Alike(0, 3), deterministic=deterministic, **form)  # type: ignore[arg-type]
        quantized = matmul is not None and matmul.quantizes_rows
        computed = exchange_bytes(config, name, 3, 10, deterministic=deterministic, quantized=quantized)
        assert computed == exchange.bytes


def test_deterministic_sums_are_exchanged_in_float32() -> None:
    config = published_config("deepseek-v3.2")
    kept, exact = (exchange_bytes(config, "bfloat16", 4, 100, deterministic=it) for it in (False, True))
    assert exact - kept == 2 * 4 * 100 * 7168 * 2
    assert exchange_bytes(config, "bfloat16", 1, 100) == 0


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("--group-size", "3"), 8, "256 experts cannot be divided evenly among that many ranks (use one of 1, 2, 4"),
        (("--group-size", "8", "--workers", "3"), 2, "neither whole groups of 8, nor an equal part of one"),
    ],
)
def test_an_unfit_group_is_refused(tmp_path: Path, args: tuple[str, ...], code: int, text: str) -> None:
    config = published(tmp_path, "deepseek-v3.2")
    for mem in ("--gpu-mem", "--device-mem"):
        refused = CliRunner().invoke(main, ["size", "--config", str(config), *WHOLE, mem, "141GB", *args])
        assert refused.exit_code == code
        assert text in re.sub(r"[\s│]+", " ", refused.output)


def test_the_group_size_is_the_first_that_fits() -> None:
    config, block = published_config("deepseek-v3.2"), (128, 128)
    sizes = group_sizes(config.n_routed_experts)
    held = {size: rank_bytes(config, "bfloat16", block, size, 512).total for size in sizes}
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for wanted in (1, 8):
        found = fitting_group_size(config, "bfloat16", block, sizes, 512, held[wanted] + 1)
        assert found == wanted
    assert fitting_group_size(config, "bfloat16", block, [1, 2, 4, 8], 512, held[8]) == 0


@pytest.mark.parametrize("mem", [(), ("--gpu-mem", "141GB", "--device-mem", "30GB")])
def test_one_kind_of_gpu_memory_is_given(config_json: Path, mem: tuple[str, ...]) -> None:
    refused = CliRunner().invoke(main, ["size", "--config", str(config_json), *WHOLE, *mem])
    assert refused.exit_code == 2
    assert "--gpu-mem, the whole memory of a GPU, or --device-mem" in refused.output


def test_quantization_that_a_worker_refuses_is_refused(tmp_path: Path) -> None:
    config = published(tmp_path, "glm-5", quantization_config={"quant_method": "awq"})
    refused = CliRunner().invoke(main, ["size", "--config", str(config), *WHOLE, "--gpu-mem", "1TB"])
    assert refused.exit_code == 8
    assert "method awq is not served" in " ".join(refused.output.split())


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_weights_are_those_that_a_runner_holds(tmp_path: Path, draft_tokens: int) -> None:
    """FP8 kept and prompts gathered, as on a GPU."""
    write_tiny_checkpoint(tmp_path, "glm-5", fp8=True)
    found, drafts = json.loads(size(tmp_path, *TINY, "--draft-tokens", str(draft_tokens), "--json")), draft_tokens > 0
    model = load_model(tmp_path, Quantization(), dtype=torch.float32, keeps_fp8=True, draft_layer=drafts)
    info, geometry = anonymous_info(model.config, "tiny"), geometry_of(model.config, "float32", draft_layer=drafts)
    runner = TransformersRunner(model, info, geometry, gathered_prefill=True)
    runner.release_unused()
    assert runner.weights_bytes() == found["weights_bytes_by_dtype"]
    assert found["host_bytes_per_token"] == geometry.page_bytes // PAGE_TOKENS


@pytest.mark.parametrize(("drafts", "rows"), [("0", 1), ("3", 4), ("auto", 5)])
def test_printed_settings_of_a_worker_that_drafts_are_valid(tmp_path: Path, drafts: str, rows: int) -> None:
    write_tiny_checkpoint(tmp_path, "glm-5")
    text = size(tmp_path, *TINY, "--draft-tokens", drafts)
    table = tomllib.loads(text[text.index("[worker]") :])
    chosen = build(table, {}, {"worker.device": "cuda"}, HostFacts("h", 1, 1)).worker
    assert str(chosen.draft_tokens) == drafts
    assert 0 < chosen.seats <= SEATS_MAX // rows
    assert chosen.tail_slots == max(8, 2 * rows)


TINY = ("--host-mem", "1GB", "--context", "4096", "--gpu-mem", "2GB", "--hot-size-classes", "256")


# ---------------------------------------------------------------- what is typed

SIZE_WORDS = "write a number and a unit: KiB, MiB, GiB, TiB, or KB, MB, GB, TB of 1000; or auto"


@pytest.fixture(scope="module")
def tiny(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, index_topk=128)


@pytest.mark.parametrize(
    ("args", "code", "text", "remedy"),
    [
        ("--host-mem lots --device-mem 1GB --context 1k", 8, f"--host-mem=lots: not a size ({SIZE_WORDS})",
         "--host-mem auto --device-mem 1GB --context 1k"),
        ("--host-mem 1GB --device-mem lots --context 1k", 8, f"--device-mem=lots: not a size ({SIZE_WORDS})",
         "--host-mem 1GB --device-mem 1TiB --context 1k"),
        ("--host-mem 1GB --gpu-mem lots --context 1k", 8, f"--gpu-mem=lots: not a size ({SIZE_WORDS})",
         "--host-mem 1gb --gpu-mem 2gib --context 1k"),
        ("--host-mem 1GB --gpu-mem 1885MB --context 16k", 8, "--gpu-mem=1885MB: leaves 0 slab pages",
         "--host-mem 1GB --gpu-mem 2GB --context 16k"),
        ("--host-mem 1GB --gpu-mem 5MB --context 16k", 8, "--gpu-mem=5MB: the weights take", ""),
        ("--host-mem 1GB --gpu-mem 2GB --context 1x", 2, "'1x' is no number of tokens from 1 to 2147483647", ""),
        ("--host-mem 1GB --gpu-mem 2GB --context 0", 2, "'0' is no number of tokens", ""),
        ("--host-mem 1GB --gpu-mem 2GB --context 3g", 2, "'3g' is no number of tokens", ""),
        ("--host-mem 1GB --gpu-mem 2GB --context 9999999m", 2, "'9999999m' is no number of tokens", ""),
        ("--host-mem 1GB --gpu-mem 2GB --context 128k", 8, "--context=131072: the model's context ends at 16384 tokens "
         "(use 16384 or less)", "--host-mem 1GB --gpu-mem 2GB --context 16384"),
        ("--host-mem 1MB --gpu-mem 2GB --context 16k", 5, "--context=16384: not one request of this length fits", ""),
        ("--host-mem 1KB --gpu-mem 2GB --context 1k", 8, "--host-mem=1KB: one host page needs 114688 bytes",
         "--host-mem 2MB --gpu-mem 2GB --context 1k"),
        ("--host-mem 1GB --gpu-mem 2GB --context 1k --kv-dtype fp9", 8, "--kv-dtype=fp9: unknown value (use one",
         "--host-mem 1GB --gpu-mem 2GB --context 1k --kv-dtype fp8"),
        ("--host-mem 1GB --gpu-mem 2GB --context 1k --hot-size-classes 64", 8, "--hot-size-classes=64: a step selects "
         "128 rows, which must all fit the hot buffer (name sizes from 128 upward)",
         "--host-mem 1GB --gpu-mem 2GB --context 1k --hot-size-classes 128,256"),
        ("--host-mem 1GB --gpu-mem 2GB --context 1k --seats 5000", 8, "--seats=5000: not from 1 to 1024",
         "--host-mem 1GB --gpu-mem 2GB --context 1k --seats 1024"),
    ],
)  # fmt: skip
def test_refusals_name_the_flag_and_the_value_that_were_typed(
    tiny: Path, args: str, code: int, text: str, remedy: str
) -> None:
    refused = CliRunner().invoke(main, ["size", "--config", str(tiny), *args.split()])
    assert refused.exit_code == code
    assert text in " ".join(refused.stderr.split())
    assert "worker." not in refused.stderr
    if remedy:
        size(tiny, *remedy.split())


@pytest.mark.parametrize("args", [("--device-mem", "auto"), ("--gpu-mem", "auto")])
def test_auto_is_the_gpu_of_this_machine(tiny: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    wanted = ("--host-mem", "1GB", "--context", "1k", "--json")
    monkeypatch.setattr("hisparse.cluster.gpus.gpu_bytes", lambda: [80_000_000_000, 70_000_000_000])
    assert size(tiny, *wanted, *args) == size(tiny, *wanted, "--gpu-mem", "70GB")
    if "--device-mem" in args:
        assert size(tiny, *wanted, *args, "--gpu-mem", "9GB") == size(tiny, *wanted, "--gpu-mem", "9GB")
    monkeypatch.setattr("hisparse.cluster.gpus.gpu_bytes", list)
    refused = CliRunner().invoke(main, ["size", "--config", str(tiny), *wanted, *args])
    assert refused.exit_code == 8
    example = {"--gpu-mem": "141GB", "--device-mem": "30GB"}[args[0]]
    assert f"{args[0]}=auto: no GPU is here (give a size, as in {example})" in refused.stderr


def test_small_models_have_a_whole_table_and_settings_from_it(tiny: Path) -> None:
    """The default hot sizes hold every row of a request of a small model."""
    for context, listed in (("16k", [256, 512, 1024, 2048, 4096, 8192, 0]), ("1k", [256, 512, 0])):
        for memory in ("100MB", "300MB", "1GB"):
            found = json.loads(size(tiny, "--host-mem", "1GB", "--device-mem", memory, "--context", context, "--json"))
            slots = [choice["hot_slots"] for choice in found["choices"]]
            assert slots == listed[: len(slots)]
            assert len(slots) > 1
            usable = {*slots, 1024 if context == "1k" else 16384}  # the last holds all rows: resident
            assert set(found["settings"]["hot_size_classes"]) <= usable


# ---------------------------------------------------------------- with a trace


@pytest.fixture(scope="module")
def small(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, index_topk=32)


SMALL = (
    *("--host-mem", "1GB", "--device-mem", "64MB", "--context", "4096", "--seats", "128"),
    *("--hot-size-classes", "64,128,256"),
)


def write_trace(path: Path, config: Path, topk: int = 32, groups: int = 0) -> None:
    """One request; each step selects 32 positions, of which three leave and three come by turns of 96 tokens."""
    sizes = TraceSizes(groups or geometry_of(read_dimensions(config), "float32").groups, topk)
    with path.open("wb") as file:
        file.write(encode_head(sizes))
        for step in range(200):
            positions = [(3 * step + at) % 96 for at in range(min(topk, 32))]
            file.write(encode(step, 1, 500 + step, np.array([positions] * sizes.groups, np.int32)))


def test_a_trace_says_which_hot_size_pays(small: Path, tmp_path: Path) -> None:
    """96 tokens come by turns: a buffer of 64 slots misses three a layer in each step, one of 128 none."""
    trace = tmp_path / "trace"
    write_trace(trace, small)
    found = json.loads(size(small, *SMALL, "--trace", str(trace), "--json"))
    first, *others = found["trace"]["hot_sizes"]
    assert (found["trace"]["requests"], found["trace"]["steps"]) == (1, 200 - WARM_UP_STEPS)
    assert found["trace"]["selected"] == 32 * found["layers"]
    assert first["hot_slots"] == 64
    assert first["misses"] == pytest.approx(3 * found["layers"], rel=0.05)
    assert all(it["misses"] <= 0.5 * found["layers"] for it in others)
    batch, resident = found["choices"][0]["batch"], found["resident"]
    load_s = batch * first["misses"] * found["row_bytes"] / 55e9
    assert first["load_s"] == pytest.approx(load_s)
    assert batch > resident
    step_s = first["pays_from_s"]
    assert batch / (step_s + load_s) == pytest.approx(resident / step_s), "both give the same there"


def test_a_trace_is_a_part_of_the_table(small: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    write_trace(trace, small)
    text = size(small, *SMALL, "--trace", str(trace))
    assert "PAYS FROM MS" in text
    assert "1 requests, 184 steps" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"topk": 16}, "top-k is 32", marks=pytest.mark.refuses("BadInput --trace={}")),
        ({"groups": 1}, "index groups"),
        (None, "no trace"),
    ],
    ids=["topk", "groups", "text"],
)
def test_traces_of_other_models_are_refused(
    small: Path, tmp_path: Path, change: dict[str, int] | None, message: str
) -> None:
    trace = tmp_path / "trace"
    if change is None:
        trace.write_text("nothing that a worker wrote")
    else:
        write_trace(trace, small, **change)
    refused = CliRunner().invoke(main, ["size", "--config", str(small), *SMALL, "--trace", str(trace)])
    assert refused.exit_code != 0
    assert message in refused.output

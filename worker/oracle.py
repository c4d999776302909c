"""What the model library's own generate() says of some prompts: the referee for our tokens.

Run as a file, in a process of its own (`python worker/oracle.py < job.json`): it imports torch, transformers and the
standard library, and nothing of this project, so that two runs that are wrong alike cannot agree by sharing code.

stdin    one JSON object:
           model           checkpoint directory; block-FP8 weights are decoded here, by code of this file
           prompts         list of {"tokens": [ids], "max_new_tokens": n}
           ignore_eos      go on after an end-of-sequence token (default false)
           threads         torch threads (default 1)
           dtype, device   default "float32", "cpu"
           matmul          "w8a8": linear layers and experts with FP8 weights first round their inputs to e4m3, 128
                           values to a scale, where a worker does (default "weight_only")
           nudge           a number: each value of the embeddings is first changed by about NUDGE of itself, otherwise
                           for each number. A token that changes hangs on rounding (default: no change)
           prefill_chunk   generate()'s own prefill_chunk_size (default 512; 0: the whole prompt at once). The indexer's
                           scores of a whole prompt take 4 * heads * P**2 bytes: 1 GB at 4,000 tokens and 16 heads
stdout   one JSON line per prompt, in order, as soon as it is done:
           index, tokens   greedy ids, an end-of-sequence token included
           runners_up      id of the second-best logit at each step
           gaps            best logit minus second-best at each step: where it is within rounding, either is right
           duration_s

Exit status 2 and one line on stderr for a job that cannot be read.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # run as a file, the interpreter puts this directory first; nothing here is to be imported

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils import logging

#: Values of a row that share a scale.
BLOCK = 128
#: Eight units in the last place of float32: about what other orders of additions amount to behind some layers.
NUDGE = 1e-6


def main() -> int:
    try:
        job = json.load(sys.stdin)
        model_path, prompts = job["model"], [(prompt["tokens"], prompt["max_new_tokens"]) for prompt in job["prompts"]]
    except (ValueError, KeyError, TypeError) as error:
        print(f"oracle: unreadable job: {error!r}", file=sys.stderr)
        return 2
    logging.disable_progress_bar()
    torch.set_num_threads(job.get("threads", 1))
    dtype = getattr(torch, job.get("dtype", "float32"))
    with decoded(Path(model_path), dtype) as readable:
        has_parts = "text_config" in json.loads((readable / "config.json").read_text())  # and one is the language model
        kind = AutoModelForImageTextToText if has_parts else AutoModelForCausalLM
        model = kind.from_pretrained(readable, dtype=dtype)
    model = model.to(job.get("device", "cpu")).eval()
    if job.get("matmul", "weight_only") == "w8a8":
        round_inputs(model, Path(model_path))
    if "nudge" in job:
        nudge(model, job["nudge"])
    if job.get("ignore_eos", False):
        model.generation_config.eos_token_id = None
    for index, (tokens, max_new_tokens) in enumerate(prompts):
        start = time.monotonic()
        answer = greedy(model, tokens, max_new_tokens, job.get("prefill_chunk", 512))
        print(json.dumps({"index": index, **answer, "duration_s": time.monotonic() - start}), flush=True)
    return 0


@contextmanager
def decoded(model_path: Path, dtype: torch.dtype) -> Iterator[Path]:
    """The checkpoint itself, or a temporary copy in `dtype` of one in block-FP8: value x scale, rounded once."""
    config = json.loads((model_path / "config.json").read_text())
    quantization = config.pop("quantization_config", None)
    if quantization is None:
        yield model_path
        return
    height, width = quantization["weight_block_size"]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        tensors |= load_file(file)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scales, weight = tensors.pop(name).float(), tensors[name.removesuffix("_scale_inv")]
        exact = torch.empty(weight.shape, dtype=dtype)
        for row, column in torch.cartesian_prod(torch.arange(scales.shape[0]), torch.arange(scales.shape[1])).tolist():
            block = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            exact[block] = (weight[block].double() * scales[row, column].double()).float().to(dtype)
        tensors[name.removesuffix("_scale_inv")] = exact
    tensors = stacked(tensors)
    with tempfile.TemporaryDirectory() as copy:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, Path(copy) / "model.safetensors")
        (Path(copy) / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
        generation = model_path / "generation_config.json"
        if generation.exists():
            (Path(copy) / generation.name).write_bytes(generation.read_bytes())
        yield Path(copy)


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with all experts of a layer in one, as the library has them: of some families it reads no others."""
    found, experts = dict[str, torch.Tensor](), dict[str, dict[int, dict[str, torch.Tensor]]]()
    for name, tensor in tensors.items():
        prefix, is_expert, rest = name.partition(".mlp.experts.")
        if is_expert:
            number, projection, _ = rest.split(".")
            experts.setdefault(f"{prefix}{is_expert}", {}).setdefault(int(number), {})[projection] = tensor
        else:
            found[name] = tensor
    for prefix, of_layer in experts.items():
        ordered = [of_layer[number] for number in sorted(of_layer)]
        found[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((one["gate_proj"], one["up_proj"])) for one in ordered])
        found[f"{prefix}down_proj"] = torch.stack([one["down_proj"] for one in ordered])
    return found


def round_inputs(model: Any, model_path: Path) -> None:
    """Round the inputs of products with FP8 weights, but for kv_b_proj's, and for sizes that a worker decodes.

    A worker rounds where rows of weights are whole blocks and their count is a multiple of 8; of experts where the
    inner size has whole blocks too. The library says how it renames stored weights.
    """
    powers = json.loads((model_path / "config.json").read_text())["quantization_config"].get("scale_fmt") == "ue8m0"
    stored = {name for file in model_path.glob("*.safetensors") for name in load_file(file)}
    names = {name.removesuffix("_scale_inv") for name in stored if name.endswith(".weight_scale_inv")}
    for way in get_model_conversion_mapping(model):
        if isinstance(way, WeightRenaming):
            names = {way.rename_source_key(name)[0] for name in names}
    kept, modules = {name.removesuffix(".weight") for name in names}, dict(model.named_modules())
    for name in kept:
        layer = ".".join(name.split(".")[:3])  # a draft layer is none of the model's, and its experts are one module
        if name not in modules and layer in modules and ".experts." not in name:
            raise ValueError(f"{name}: the library's model has no such module, so its inputs would not be rounded")
    for name, module in modules.items():
        if isinstance(module, torch.nn.Linear) and name in kept and not name.endswith("kv_b_proj"):
            if module.in_features % BLOCK == 0 and module.out_features % 8 == 0:
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], powers), *inputs[1:]))
        elif hasattr(module, "gate_up_proj") and f"{name}.0.down_proj" in kept:
            _, width, middle = module.down_proj.shape
            if width % BLOCK == 0 and middle % BLOCK == 0:
                module.forward = partial(mixed, module, powers)


def rounded(rows: torch.Tensor, powers: bool) -> torch.Tensor:
    """`rows` [..., K] as e4m3 and a scale for each 128 values represent them: largest magnitude / 448, of `powers` the
    next power of two."""
    parts = rows.float().unflatten(-1, (-1, BLOCK))
    most = parts.abs().amax(-1, keepdim=True)
    scales = most / 448
    if powers:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scales = torch.where(most == 0, 1.0, scales)
    back: torch.Tensor = (parts / scales).to(torch.float8_e4m3fn).float() * scales
    return back.flatten(-2).to(rows.dtype)


def mixed(module: Any, powers: bool, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """For `hidden` [T, K] the sum over experts `chosen` [T, k] of share * down(silu(gate x) * up x), inputs rounded."""
    total = torch.zeros(hidden.shape, device=hidden.device)
    rows = rounded(hidden, powers)
    for expert in chosen.unique().tolist():
        tokens, choices = (chosen == expert).nonzero(as_tuple=True)
        middle = rounded(module._apply_gate(rows[tokens] @ module.gate_up_proj[expert].T), powers)
        part = (middle @ module.down_proj[expert].T) * shares[tokens, choices, None]
        total.index_add_(0, tokens, part.float())
    return total.to(hidden.dtype)


def nudge(model: Any, number: int) -> None:
    """Change each value of the embeddings by NUDGE of itself times a normal value, the same for the same `number`."""
    weight = model.get_input_embeddings().weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    weight.data *= (1 + NUDGE * noise).to(weight)


@torch.inference_mode()
def greedy(
    model: Any, tokens: list[int], max_new_tokens: int, prefill_chunk: int
) -> dict[str, list[int] | list[float]]:
    """Greedy continuation of one prompt, with the runner-up and its distance at each step."""
    output = model.generate(
        torch.tensor([tokens], device=model.device),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long, device=model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        prefill_chunk_size=prefill_chunk or None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).float().topk(2)
    return {
        "tokens": output.sequences[0, len(tokens) :].tolist(),
        "runners_up": best.indices[:, 1].tolist(),
        "gaps": (best.values[:, 0] - best.values[:, 1]).tolist(),
    }


if __name__ == "__main__":
    sys.exit(main())

"""`hisparse model check`: can a repository be served? By the loader's checks and the sizes of `hisparse size`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from hisparse.cli.size import FLAGS, host_bytes, size_node, whole_memory, worker_flags
from hisparse.console.options import TokenCount, named_by_flags, output_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hisparse.cli.size import NodeSizes

#: Sizes of groups that are listed: the first that fits, and so many larger ones.
LARGER_GROUPS: Final = 2
#: GPUs of one node; ranks of larger groups are on several.
NODE_GPUS: Final = 8
#: Contexts are halved down to this many tokens where longer ones do not fit.
CONTEXT_LEAST: Final = 4_096
#: Fields of refusals that more GPUs may lift; the first of them is that of weights which do not fit.
WEIGHTS_FIELD: Final = "--gpu-mem"
MEMORY_FIELDS: Final = (WEIGHTS_FIELD, "worker.device_mem", "worker.host_mem")


@dataclass(frozen=True)
class Repository:
    """Facts that the files of a repository state, in bytes and counts; weights are those of a draft layer, too.

    `no_drafts`: why no tokens can be drafted, else "".
    """

    path: str
    model_type: str
    layers: int
    selecting_layers: int
    topk: int
    context_max_tokens: int
    files: int
    weights_bytes: int
    dtype: str
    fp8: bool
    scales_powers_of_two: bool
    tokenizer: str
    chat_template: bool
    no_drafts: str


@dataclass(frozen=True)
class GroupFit:
    """GPUs that share one copy, with bytes and counts of each: `refused` says why they are too few, else "".

    `requests`: those of `context_tokens` that decode at once on one GPU.
    """

    gpus: int
    refused: str
    context_tokens: int = 0
    requests: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    host_bytes_per_token: int = 0


@click.command(short_help="Say whether a repository can be served.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--gpu-mem", default="141GB", show_default=True, metavar="SIZE", help="Whole memory of one GPU.")
@click.option("--host-mem", default="1TB", show_default=True, metavar="SIZE", help="Host pool of a node.")
@click.option("--context", type=TokenCount(), metavar="TOKENS", help="Tokens of a request; default: the model's most.")
@click.option("--kv-dtype", metavar="KIND", help="Rows and index keys: float32, bfloat16, fp8; default: the model's.")
@output_option
def check(path: Path, gpu_mem: str, host_mem: str, context: int | None, kv_dtype: str | None, output: str) -> None:
    """Read the repository at PATH and say whether it can be served, on how many GPUs, with which context, and what is
    approximate.

    Reads config.json, the tokenizer, and the headers of all safetensors files, with the checks of a worker's start.
    Reads no weights and needs no GPU. What cannot be served is refused with field and remedy.
    """
    from hisparse.console.output import emit_one, print_table, size_text, write_line
    from hisparse.console.table import Column
    from protocol.byte_sizes import parse_size

    found = read_repository(path)
    typed = {"--gpu-mem": gpu_mem, "--host-mem": host_mem, "--kv-dtype": kv_dtype, "--context": context}
    with named_by_flags(FLAGS | {"worker.device_mem": "--gpu-mem"}, typed):
        parse_size(gpu_bytes := whole_memory(gpu_mem, None), "--gpu-mem", takes_auto=True)
        parse_size(host := host_bytes(host_mem), "--host-mem", takes_auto=True)
        fits = list(_fits(path, context, found.context_max_tokens, gpu_bytes, host, kv_dtype))
    kind = kv_dtype or found.dtype
    if output != "table":
        about = {"fits": [asdict(fit) for fit in fits], "approximate": list(_approximate(found, kind))}
        emit_one(asdict(found) | about, output, ())
        return
    for line in _lines(found, fits, gpu_mem, host_mem):
        write_line(line)
    columns: list[Column[GroupFit]] = [
        Column("GPUS", lambda fit: str(fit.gpus), True),
        Column("WEIGHTS", lambda fit: size_text(fit.weights_bytes) if fit.weights_bytes else "", True),
        Column("KV", lambda fit: size_text(fit.kv_bytes) if fit.kv_bytes else "", True),
        Column("CONTEXT", lambda fit: str(fit.context_tokens) if fit.context_tokens else "", True),
        Column("REQUESTS", lambda fit: str(fit.requests) if fit.requests else "", True),
        Column("TOO FEW", lambda fit: fit.refused),
    ]
    print_table(fits, columns)
    write_line("Approximate:")
    for line in _approximate(found, kind):
        write_line(f"  {line}")


def read_repository(path: Path) -> Repository:
    """Check the repository at `path` as a worker does before it reads weights. Raises ConfigError."""
    from protocol.errors import ConfigError
    from protocol.tokenizer_files import read_tokenizer
    from worker.runners.checkpoint import geometry_of, library_refusals, read_by_library, read_config, stored_dtype
    from worker.weights.matching import match
    from worker.weights.quantization import read_quantization
    from worker.weights.safetensors_header import FIELD
    from worker.weights.shards import Shards

    config = read_config(path)
    quantization, tokenizer = read_quantization(config, path / "config.json"), read_tokenizer(path)
    no_drafts = ""
    with library_refusals(path, FIELD), Shards.open(path) as shards:
        about = read_by_library(path)
        try:
            matches = match(about, shards, quantization, draft_layer=True)
        except ConfigError as refusal:
            no_drafts, matches = refusal.message, match(about, shards, quantization)
        dtype = stored_dtype(about)
        geometry = geometry_of(about, dtype)
        names = [name for tensor in matches for name in (tensor.spec.name, tensor.scale) if name]
        stored = sum(shards.tensors[name].bytes for name in names)
        files = len(shards.files)
    return Repository(
        path=str(path),
        model_type=about.model_type,
        layers=geometry.layers,
        selecting_layers=geometry.groups,
        topk=about.index_topk,
        context_max_tokens=about.max_position_embeddings,
        files=files,
        weights_bytes=stored,
        dtype=dtype,
        fp8=quantization is not None,
        scales_powers_of_two=quantization is not None and quantization.powers_of_two,
        tokenizer=tokenizer.kind,
        chat_template=bool(tokenizer.chat_template),
        no_drafts=no_drafts,
    )


def _fits(
    path: Path, context: int | None, context_max: int, gpu_mem: str, host_mem: str, kv_dtype: str | None
) -> Iterator[GroupFit]:
    """Groups of one GPU, two, four and so on: those that are too small, then the first that fit.

    Each with requests of `context` tokens; None: of the model's most, or else of half of it and so on, as fit. Raises
    ConfigError or CapacityError where none fits, with the reason of the largest.
    """
    from protocol.errors import CapacityError, ConfigError
    from worker.runners.checkpoint import read_dimensions
    from worker.weights.layout import group_sizes

    dimensions, fitting, refusal = read_dimensions(path), 0, None
    for gpus in [size for size in group_sizes(dimensions.n_routed_experts) if size & (size - 1) == 0]:
        for length in _lengths(context, context_max):
            flags = worker_flags(dimensions, length, None, "0", {"kv_dtype": kv_dtype})
            flags["worker.host_mem"] = host_mem
            try:
                sized = size_node(path, dimensions, flags, length, gpu_mem, gpus, min(gpus, NODE_GPUS))
            except (ConfigError, CapacityError) as error:
                if isinstance(error, ConfigError) and error.field not in MEMORY_FIELDS:
                    raise
                refusal = error
                if error.field == WEIGHTS_FIELD:
                    break  # a shorter context makes weights no smaller
            else:
                yield _fit(gpus, length, sized)
                fitting += 1
                break
        if not fitting:
            assert refusal is not None
            yield GroupFit(gpus, refusal.message)
        elif fitting > LARGER_GROUPS or gpus >= NODE_GPUS:
            return
    if refusal is not None and not fitting:
        raise refusal


def _lengths(context: int | None, context_max: int) -> Iterator[int]:
    if context is not None:
        yield context
        return
    while context_max >= CONTEXT_LEAST:
        yield context_max
        context_max //= 2


def _fit(gpus: int, context: int, sized: NodeSizes) -> GroupFit:
    from protocol.byte_sizes import parse_size

    plan, _, held = sized
    assert held is not None
    return GroupFit(
        gpus=gpus,
        refused="",
        context_tokens=context,
        requests=plan.recommended.batch,
        weights_bytes=sum(held.weights.values()),
        kv_bytes=parse_size(plan.settings.device_mem, "worker.device_mem"),
        host_bytes_per_token=plan.host_bytes_per_token,
    )


def _lines(found: Repository, fits: list[GroupFit], gpu_mem: str, host_mem: str) -> Iterator[str]:
    from hisparse.console.output import size_text
    from worker.families.table import FAMILIES

    first = next(fit for fit in fits if not fit.refused)
    device = "cuda" if FAMILIES[found.model_type].on_gpu else "cpu"
    group = f" -n {first.gpus} --group-size {first.gpus}" if first.gpus > 1 else ""
    shape = ", FP8 in blocks of 128 x 128" if found.fp8 else ""
    yield f"{found.path} can be served: hisparse up --model {found.path} --device {device}{group}"
    yield f"  family      {found.model_type}"
    yield f"  layers      {found.layers}, of which {found.selecting_layers} select {found.topk} rows"
    yield f"  weights     {size_text(found.weights_bytes)} in {found.files} files, {found.dtype}{shape}"
    yield f"  context     {found.context_max_tokens} tokens at most"
    yield f"  host memory {first.host_bytes_per_token} bytes per token"
    yield f"  tokenizer   {found.tokenizer}, chat template: {'yes' if found.chat_template else 'no'}"
    drafts = f"none: {found.no_drafts}" if found.no_drafts else "by the MTP layer (worker.draft_tokens)"
    yield f"  drafts      {drafts}"
    yield f"GPUs of {gpu_mem} that share one copy, {host_mem} of host memory a node; what each of them holds:"


def _approximate(found: Repository, kind: str) -> Iterator[str]:
    """Differences from the model as its authors' library computes it in the dtype of the repository."""
    quantizes = found.fp8 and found.dtype == "bfloat16"
    if quantizes:
        scales = "powers of two" if found.scales_powers_of_two else "float32"
        yield (
            f"worker.matmul = auto on Hopper: activations are quantized to FP8, 128 values to a scale ({scales}); "
            "weight_only is exact"
        )
    if kind == "fp8":
        yield "worker.kv_dtype = fp8: rows and index keys are rounded to FP8; bfloat16 keeps them"
    elif kind != found.dtype:
        yield f"worker.kv_dtype = {kind}: the model's dtype is {found.dtype}"
    if not quantizes and kind == found.dtype:
        yield "nothing: tokens are those of the model library, up to ties within rounding"

"""`hisparse size`: how many requests fit a node, computed without starting it, by worker/device/capacity.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from hisparse.console.options import TokenCount, load_config, named_by_flags, output_option
from protocol.byte_sizes import AUTO
from protocol.units import SEAT_ROWS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hisparse.console.table import Column
    from kernels.layout import Geometry
    from kernels.row_bytes import KvKinds
    from protocol.settings import WorkerSettings
    from worker.device.capacity import Choice, MemoryPlan
    from worker.loop.reuse import TraceMisses
    from worker.weights.shares import RankBytes

#: The printed settings for workers: those that sizes depend on.
PRINTED: Final = (
    *("seats", "device_mem", "host_mem", "kv_dtype", "context_max_tokens", "context_target_tokens"),
    *("hot_size_classes", "role"),
)

#: Those that are printed where they are not auto.
OWN_KINDS: Final = ("row_dtype", "index_dtype")

#: Those of a worker that drafts, too.
DRAFTING: Final = ("draft_tokens", "tail_slots")

#: The device whose sizes are asked for.
CUDA: Final = "cuda"

#: Rate of copies over the link: measured on an H200 (docs/operations.md).
LINK_BYTES_PER_S: Final = 55e9

#: The flag of each setting that a refusal may name.
FLAGS: Final = {
    "context": "--context",
    "worker.context_max_tokens": "--context",
    "worker.context_target_tokens": "--context",
    "worker.group_size": "--group-size",
    "worker.draft_tokens": "--draft-tokens",
    **{
        f"worker.{name}": f"--{name.replace('_', '-')}"
        for name in (
            "host_mem",
            "device_mem",
            "kv_dtype",
            *OWN_KINDS,
            "hot_size_classes",
            "role",
            "seats",
            "draft_tokens",
        )
    },
}


@click.command(short_help="Compute how many requests fit a node.")
@click.option(
    "--config",
    "path",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE",
    help="The model's config.json, or a directory with it.",
)
@click.option(
    "--host-mem", required=True, metavar="SIZE", help="Host pool of the node, e.g. 1TB; auto: by this machine's memory."
)
@click.option(
    "--gpu-mem",
    metavar="SIZE",
    help="Whole memory of one GPU, e.g. 141GB, of which the weights take a part; auto: of this machine's GPU.",
)
@click.option(
    "--device-mem",
    metavar="SIZE",
    help="KV budget of one GPU, beside the weights, e.g. 30GB; auto: nine tenths of what weights leave of --gpu-mem.",
)
@click.option(
    "--context", required=True, type=TokenCount(), metavar="TOKENS", help="Tokens of prompt and output, e.g. 128k."
)
@click.option("--workers", type=click.IntRange(1), help="GPUs that share the host pool; default: one group of them.")
@click.option(
    "--group-size", default=1, show_default=True, type=click.IntRange(1), help="GPUs that share one copy of the model."
)
@click.option("--kv-dtype", metavar="KIND", help="Rows and keys: float32, bfloat16, fp8, fp4; default: the model's.")
@click.option("--row-dtype", metavar="KIND", help="Rows alone; default: as --kv-dtype.")
@click.option("--index-dtype", metavar="KIND", help="Index keys alone; default: as --kv-dtype.")
@click.option("--hot-size-classes", metavar="SLOTS,...", help="Hot-buffer sizes to compare.")
@click.option("--role", type=click.Choice(["both", "decode"]), help="decode: other workers compute prompts.")
@click.option("--seats", type=click.IntRange(1), help="Requests in one decode batch at most; default: as many as fit.")
@click.option(
    "--draft-tokens",
    default="0",
    show_default=True,
    type=click.Choice([*map(str, range(SEAT_ROWS_MAX)), AUTO]),
    help="Tokens drafted for a step: rows and weights of the draft layer count.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Recorded by worker.record_selections: what each hot size misses of it, and from which step time it pays.",
)
@output_option
def size(
    path: Path,
    host_mem: str,
    gpu_mem: str | None,
    device_mem: str | None,
    context: int,
    workers: int | None,
    group_size: int,
    seats: int | None,
    draft_tokens: str,
    trace: Path | None,
    output: str,
    **sizes: Any,
) -> None:
    """Compute how many requests of one length fit a node, for each hot size, and the settings for it.

    Starts no process and needs no GPU. Workers with the printed settings have exactly these sizes. With --group-size
    each GPU holds a part of the experts, and the whole of everything else.
    """
    from dataclasses import asdict

    from hisparse.console.output import emit_one
    from protocol.byte_sizes import parse_size
    from protocol.errors import ConfigError
    from protocol.units import PAGE_TOKENS
    from worker.runners.checkpoint import geometry_of, read_dimensions
    from worker.weights.layout import ExpertShare

    dimensions = read_dimensions(path)
    whole = whole_memory(gpu_mem, device_mem)
    workers = workers or group_size
    if workers % group_size and group_size % workers:
        message = f"{workers} GPUs of a node are neither whole groups of {group_size}, nor an equal part of one"
        raise click.BadParameter(message, param_hint="--workers")
    if group_size > 1 and draft_tokens == AUTO:
        message = f"the ranks of a group draft equally many tokens in all steps: use 0 to {SEAT_ROWS_MAX - 1}"
        raise click.BadParameter(message, param_hint="--draft-tokens")
    flags = worker_flags(dimensions, context, seats, draft_tokens, sizes)
    typed = {"--gpu-mem": gpu_mem or whole, "--host-mem": host_mem}
    with named_by_flags(FLAGS | ({"worker.device_mem": "--gpu-mem"} if whole else {}), typed):
        flags |= {"worker.host_mem": host_bytes(host_mem), "worker.device_mem": None if whole else device_mem}
        if group_size > 1:
            ExpertShare.of(0, group_size, dimensions.n_routed_experts)
        gpu_bytes = parse_size(whole, "--gpu-mem", takes_auto=True) if whole else 0
        try:
            found, kinds, held = size_node(path, dimensions, flags, context, whole, group_size, workers)
        except ConfigError as error:
            if error.field == "--gpu-mem":  # of weights: the text itself was fit
                error.remedy = _remedy(path, dimensions, gpu_bytes, load_config(None, flags).worker)
            raise
    geometry = geometry_of(dimensions, kinds, draft_layer=found.settings.draft_tokens_max > 0)
    traced = _read_trace(trace, geometry, found) if trace is not None else None
    if output == "table":
        _print(found, dimensions, kinds, held, group_size, traced)
    else:
        about = {
            "settings": _chosen(found.settings),
            "row_dtype": kinds.rows,
            "index_dtype": kinds.keys,
            "group_size": group_size,
            "weights_bytes_per_gpu": sum(held.weights.values()) if held else None,
            "weights_bytes_by_dtype": dict(held.weights) if held else {},
            "exchange_bytes_per_gpu": held.exchange if held else None,
            "prompt_bytes_per_gpu": held.prompts if held else None,
            "seats_per_gpu": found.recommended.batch,
            "host_bytes_per_gpu": found.host_pages * found.host_bytes_per_token * PAGE_TOKENS // workers,
        }
        emit_one(asdict(found) | about | ({"trace": traced.about} if traced else {}), output, ())


class NodeSizes(NamedTuple):
    """A plan, what its KV is kept in, and what a GPU holds beside KV (None: its KV budget was given)."""

    plan: MemoryPlan
    kinds: KvKinds
    held: RankBytes | None


def worker_flags(
    dimensions: Any, context: int, seats: int | None, draft_tokens: str, sizes: Mapping[str, Any]
) -> dict[str, object]:
    """Return the settings that sizes depend on, memory aside, by name. `sizes` are given ones, None by default."""
    from protocol.settings import WorkerSettings
    from worker.device.capacity import classes_for, seats_for
    from worker.device.step_rows import StepRows

    classes = sizes.get("hot_size_classes") or classes_for(dimensions.index_topk, context)
    flags: dict[str, object] = {f"worker.{name}": value for name, value in sizes.items()}
    drafts = WorkerSettings(draft_tokens=AUTO if draft_tokens == AUTO else int(draft_tokens))
    flags |= {"worker.hot_size_classes": classes, "worker.draft_tokens": drafts.draft_tokens}
    flags |= {"worker.seats": seats_for(seats, drafts)}
    return flags | {"worker.tail_slots": max(drafts.tail_slots, 2 * StepRows.of(drafts).rows)}


def size_node(
    path: Path,
    dimensions: Any,
    flags: Mapping[str, object],
    context: int,
    gpu_mem: str,
    group_size: int,
    workers: int,
) -> NodeSizes:
    """Size a worker of `flags`, which have its host memory, for requests of `context` tokens.

    `gpu_mem`: the whole memory of a GPU; "": `flags` have its KV budget. Raises ConfigError and CapacityError that name
    settings.
    """
    from msgspec.structs import replace

    from worker.device.capacity import plan
    from worker.runners.checkpoint import anonymous_info, geometry_of, kinds_of

    held: RankBytes | None = None
    flags = dict(flags)
    if gpu_mem:
        load_config(None, flags | {"worker.device": CUDA})  # refuses what a CPU alone serves
        flags["worker.device_mem"], held = _budget(path, dimensions, group_size, gpu_mem, flags)
    settings = load_config(None, flags).worker
    kinds = kinds_of(dimensions, settings)
    info = anonymous_info(dimensions, dimensions.model_type)
    _require_context(context, info.context_max_tokens)
    geometry = geometry_of(dimensions, kinds, draft_layer=settings.draft_tokens_max > 0)
    found = plan(replace(settings, group_size=group_size), geometry, info, context, workers)
    return NodeSizes(found, kinds, held)


@dataclass(frozen=True)
class _Traced:
    """What the choices would miss of a trace, by hot slots: rows of a request in a step, of all layers; seconds of the
    link in a step of the whole batch; seconds from which that pays (None: it never does)."""

    found: TraceMisses
    misses: dict[int, float]
    load_s: dict[int, float]
    pays_from_s: dict[int, float | None]

    @property
    def about(self) -> dict[str, object]:
        sizes = [
            {"hot_slots": it, "misses": self.misses[it], "load_s": self.load_s[it], "pays_from_s": self.pays_from_s[it]}
            for it in self.misses
        ]
        found = self.found
        return {"requests": found.requests, "steps": found.steps, "selected": found.selected, "hot_sizes": sizes}


def _read_trace(path: Path, geometry: Geometry, plan: MemoryPlan) -> _Traced:
    """Raises BadInput, as worker.loop.reuse does, also for a trace of another top-k."""
    from math import isfinite

    from protocol.errors import BadInput
    from worker.loop.reuse import misses_of, pays_from_s
    from worker.loop.selections import read_head, read_records

    hot_sizes = [it.hot_slots for it in plan.choices if it.hot_slots]
    layers = [len(geometry.layers_of_group(group)) for group in range(geometry.groups)]
    with path.open("rb") as file:
        head = read_head(file)
        if head.topk != geometry.topk:
            message, remedy = f"the model's top-k is {geometry.topk}, the trace's another", "record this model"
            raise BadInput(message, field="--trace", value=head.topk, remedy=remedy)
        found = misses_of(read_records(file, head), head, hot_sizes, plan.settings.tail_slots, layers)
    misses = dict(zip(hot_sizes, found.misses, strict=True)) | {0: 0.0}
    load_s = {it.hot_slots: it.batch * misses[it.hot_slots] * plan.row_bytes / LINK_BYTES_PER_S for it in plan.choices}
    pays = {it.hot_slots: pays_from_s(load_s[it.hot_slots], it.batch, plan.resident) for it in plan.choices}
    chosen = {it.hot_slots: misses[it.hot_slots] for it in plan.choices}
    return _Traced(found, chosen, load_s, {it: s if isfinite(s) else None for it, s in pays.items()})


def whole_memory(gpu_mem: str | None, device_mem: str | None) -> str:
    """What --gpu-mem comes to; "" where --device-mem is the budget itself."""
    from protocol.byte_sizes import parse_size

    typed, example = ("--device-mem", "30GB") if gpu_mem is None else ("--gpu-mem", "141GB")
    if device_mem == AUTO:
        device_mem, gpu_mem = None, gpu_mem or AUTO
    if (gpu_mem is None) == (device_mem is None):
        raise click.UsageError("give --gpu-mem, the whole memory of a GPU, or --device-mem, its KV budget")
    if device_mem is not None:
        parse_size(device_mem, "--device-mem", takes_auto=True)
    if gpu_mem != AUTO:
        return gpu_mem or ""
    from hisparse.cluster.gpus import gpu_bytes
    from protocol.errors import ConfigError

    found = gpu_bytes()
    if not found:
        raise ConfigError("no GPU is here", field=typed, value=AUTO, remedy=f"give a size, as in {example}")
    return str(min(found))


def _require_context(context: int, context_max: int) -> None:
    from protocol.errors import ConfigError

    if context > context_max:
        raise ConfigError(
            f"the model's context ends at {context_max} tokens",
            field="--context",
            value=context,
            remedy=f"use {context_max} or less",
        )


def host_bytes(host_mem: str) -> str:
    """`host_mem`, or what a worker here would take for auto."""
    if host_mem != AUTO:
        return host_mem
    from worker.pool.host_memory import AUTO_SHARE, memory_room

    return str(int(memory_room().free_bytes * AUTO_SHARE))


def _budget(
    path: Path, dimensions: Any, group_size: int, gpu_mem: str, flags: Mapping[str, object]
) -> tuple[str, RankBytes]:
    """KV budget of a GPU with `gpu_mem` of memory, and what it holds beside KV. Raises ConfigError when that is all."""
    from protocol.byte_sizes import parse_size
    from worker.device.sizing import STANDBY_DEVICE_BYTES, auto_budget, require_weights_fit

    gpu_bytes, sized = parse_size(gpu_mem, "--gpu-mem", takes_auto=True), load_config(None, dict(flags)).worker
    held = _held(path, dimensions, group_size, sized)
    left = require_weights_fit(
        held.weights,
        gpu_bytes,
        "--gpu-mem",
        gpu_mem,
        exchange_bytes=held.exchange,
        prompt_bytes=held.prompts,
        is_kept=sized.keeper,
    )
    standby = STANDBY_DEVICE_BYTES if group_size == 1 or sized.standbys else 0
    return str(auto_budget(left - standby, held.prompts)), held


def _block(path: Path, dimensions: Any) -> tuple[int, int] | None:
    from worker.weights.quantization import read_quantization

    quantization = read_quantization(vars(dimensions), path)
    return quantization.block if quantization else None


def _held(path: Path, dimensions: Any, group_size: int, settings: WorkerSettings) -> RankBytes:
    """What a GPU holds beside KV. Raises ConfigError where the experts cannot be divided among `group_size`."""
    from worker.runners.checkpoint import stored_dtype
    from worker.weights.shares import rank_bytes

    drafts = settings.draft_tokens_max > 0
    dtype, block, rows = stored_dtype(dimensions), _block(path, dimensions), _rows_max(settings)
    tokens = settings.pass_tokens
    return rank_bytes(dimensions, dtype, block, group_size, rows, pass_tokens=tokens, draft_layer=drafts)


def _rows_max(settings: WorkerSettings) -> int:
    """Rows of the largest block or step of a GPU, whatever this machine has."""
    from msgspec.structs import replace

    from worker.device.step_rows import rows_max

    return rows_max(replace(settings, device=CUDA))


def _remedy(path: Path, dimensions: Any, gpu_bytes: int, settings: WorkerSettings) -> str:
    """What to do when the weights do not fit: the smallest size of a group that would, where one does."""
    from worker.keeper.messages import GPU_SEGMENT_BYTES
    from worker.runners.checkpoint import stored_dtype
    from worker.weights.layout import group_sizes
    from worker.weights.shares import fitting_group_size

    dtype, block, rows = stored_dtype(dimensions), _block(path, dimensions), _rows_max(settings)
    left = gpu_bytes - (GPU_SEGMENT_BYTES if settings.keeper else 0)
    sizes, drafts = group_sizes(dimensions.n_routed_experts), settings.draft_tokens_max > 0
    fitting = fitting_group_size(
        *(dimensions, dtype, block, sizes, rows, left), pass_tokens=settings.pass_tokens, draft_layer=drafts
    )
    group = f"--group-size {fitting} fits; or " if fitting else ""
    return f"{group}use a checkpoint in FP8, a smaller model, or a GPU with more memory"


def _chosen(settings: WorkerSettings) -> dict[str, object]:
    own = (name for name in OWN_KINDS if getattr(settings, name) != AUTO)
    names = (*PRINTED, *own, *(DRAFTING if settings.draft_tokens_max else ()))
    return {name: getattr(settings, name) for name in names}


def _print(
    plan: MemoryPlan, dimensions: Any, kinds: KvKinds, held: RankBytes | None, group_size: int, traced: _Traced | None
) -> None:
    from hisparse.console.output import print_table, size_text, write_line
    from hisparse.console.table import Column
    from worker.device.sizing import STANDBY_DEVICE_BYTES, STANDBY_HOST_BYTES

    for line in _lines(plan, dimensions, kinds):
        write_line(line)
    if held is not None:
        parts = ", ".join(f"{size_text(size)} {name}" for name, size in held.weights.items())
        shared = f" of a group of {group_size}" if group_size > 1 else ""
        write_line(f"Weights on each GPU{shared}: {size_text(sum(held.weights.values()))} ({parts}).")
        if held.exchange:
            write_line(f"Buffers for the exchange of rows: {size_text(held.exchange)}.")
        write_line(f"Prompt passes: {size_text(held.prompts)}.")
        if group_size == 1:
            standby = size_text(STANDBY_DEVICE_BYTES), size_text(STANDBY_HOST_BYTES)
            write_line(f"A standby: {standby[0]} of the GPU, and {standby[1]} of host memory beside the pool.")
    columns: list[Column[Choice]] = [
        Column("HOT SLOTS", lambda it: str(it.hot_slots) if it.hot_slots else "resident", True),
        Column("HOT BUFFER", lambda it: size_text(it.hot_bytes), True),
        Column("BY HOST PAGES", lambda it: str(it.by_host), True),
        Column("BY INDEX PAGES", lambda it: str(it.by_index_pages), True),
        Column("BY HOT CHUNKS", lambda it: str(it.by_hot_chunks), True),
        Column("BATCH", lambda it: str(it.batch), True),
    ]
    if traced is not None:
        columns += _trace_columns(traced)
    print_table(plan.choices, columns)
    if traced is not None:
        write_line(_trace_line(traced, plan))
    write_line(
        f"Without hot buffers, all rows on the GPU: {plan.resident}. The largest that does not reduce the batch:\n"
    )
    write_line("[worker]")
    for name, value in _chosen(plan.settings).items():
        write_line(f"{name} = {_toml(value)}")


def _trace_columns(traced: _Traced) -> list[Column[Choice]]:
    from hisparse.console.table import Column

    def pays(it: Choice) -> str:
        seconds = traced.pays_from_s[it.hot_slots]
        return "never" if seconds is None else f"{1e3 * seconds:.1f}"

    return [
        Column("MISSES", lambda it: f"{traced.misses[it.hot_slots]:.0f}", True),
        Column("LOAD MS", lambda it: f"{1e3 * traced.load_s[it.hot_slots]:.1f}", True),
        Column("PAYS FROM MS", pays, True),
    ]


def _trace_line(traced: _Traced, plan: MemoryPlan) -> str:
    found = traced.found
    return (
        f"MISSES of the {found.selected:.0f} rows that a request selects in a step, all layers, in the trace: "
        f"{found.requests} requests, {found.steps} steps.\nLOAD MS of the batch at {LINK_BYTES_PER_S / 1e9:g} GB/s. "
        f"PAYS FROM MS: a step without loads that takes longer gives more tokens a second than {plan.resident} "
        "requests with all rows on the GPU."
    )


def _lines(plan: MemoryPlan, dimensions: Any, kinds: KvKinds) -> Iterator[str]:
    from hisparse.console.output import size_text

    each = f", {plan.requests_by_host // plan.workers} for each of {plan.workers} workers" if plan.workers > 1 else ""
    model, topk = dimensions.model_type, dimensions.index_topk
    yield f"{model}: {plan.layers} layers, {plan.index_groups} index groups, top-k {topk}"
    yield f"  row             {plan.row_bytes} bytes in {kinds.rows}"
    yield f"  index key       {plan.index_row_bytes} bytes in {kinds.keys}"
    yield f"A request of {plan.context_tokens} tokens:"
    yield (
        f"  host memory     {plan.host_bytes_per_token} bytes per token, "
        f"{plan.host_pages_per_request} pages, {size_text(plan.host_bytes_per_request)}"
    )
    yield f"  host pool       {plan.host_pages} pages hold {plan.requests_by_host}{each}"
    yield f"  index pages     {size_text(plan.index_bytes_per_request)} on the GPU"
    yield f"  swap-in         {size_text(plan.miss_bytes_per_step)} in a step without any hit"
    if plan.prompt_max_tokens:
        yield f"  prefill slab    {size_text(plan.slab_bytes)}, for prompts up to {plan.prompt_max_tokens} tokens"
    yield "Requests at once on one GPU:"


def _toml(value: object) -> str:
    """`value` as TOML, whose lists, texts and numbers are written as JSON's."""
    import json

    return json.dumps(value)

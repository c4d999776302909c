"""Settings of the workers of `hisparse up`: names, roles, ports, groups and GPUs. Pure.

    worker i    is called w0, w1, ...; a fixed metrics port counts up
    standby     with `worker.standby` = auto one for each worker on a GPU, and none for ranks of a group
    group j     is called g0, g1, ...; its rank i is worker j * size + i. All of its ranks have one role, and meet in
                the runtime directory
    GPU         `worker.device` = cuda gives worker i the GPU cuda:i; cuda:N puts all workers on that one

Without a size the group is the smallest that divides the number of workers and whose ranks leave a GPU memory for KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from protocol.byte_sizes import AUTO, parse_size
from protocol.errors import ConfigError
from protocol.messages import BOTH, DECODE, PREFILL
from protocol.settings import WorkerSettings
from worker.device.sizing import require_weights_fit
from worker.device.step_rows import rows_max
from worker.keeper.messages import GPU_SEGMENT_BYTES
from worker.weights.layout import ExpertShare, group_sizes
from worker.weights.shares import fitting_group_size, rank_bytes

FIELD: Final = "group-size"
CUDA: Final = "cuda"


class Weights(NamedTuple):
    """What sizes of weights follow from: dimensions of the model, its dtype, and the blocks of FP8 weights if any."""

    dimensions: Any
    dtype: str
    block: tuple[int, int] | None


def place(
    settings: WorkerSettings,
    workers: int,
    *,
    roles: Sequence[str] = (),
    group_size: int = 1,
    experts: int = 0,
    gpus: int = 0,
) -> tuple[WorkerSettings, ...]:
    """Settings of each worker, in order.

    `roles` of workers, of groups where there are any; without them all have the role of `settings`. `experts`: routed
    ones of the model, where a group divides them. `gpus`: how many there are for `worker.device` = cuda; 0: not known,
    and all workers are given the same. Raises ConfigError.
    """
    if settings.group or settings.group_endpoint or settings.group_size != 1:
        raise ConfigError(
            "groups that are started here are named here",
            field="worker.group",
            value=settings.group or settings.group_size,
            remedy="leave worker.group, group_size and group_endpoint out, and pass --group-size",
        )
    _require_groups(workers, group_size, experts)
    _require_roles(workers // group_size, "groups" if group_size > 1 else "workers", roles or (settings.role,), roles)
    is_spread = settings.device == CUDA and gpus > 0
    if is_spread and workers > gpus:
        raise ConfigError(
            f"{workers} workers need a GPU each, and there are {gpus}",
            field="worker.device",
            value=settings.device,
            remedy=f"start at most {gpus}, or name one GPU for all of them, as in {CUDA}:0",
        )
    if group_size > 1 and settings.device.startswith(f"{CUDA}:"):
        raise ConfigError(
            "ranks of a group need a GPU each",
            field="worker.device",
            value=settings.device,
            remedy=f"set it to {CUDA}",
        )
    return tuple(_worker(settings, i, roles, group_size, is_spread) for i in range(workers))


def choose_group_size(settings: WorkerSettings, workers: int, gpu_bytes: Sequence[int], weights: Weights) -> int:
    """The smallest size of groups of `workers` whose ranks fit their GPUs. `gpu_bytes`: whole memory of each GPU.

    Raises ConfigError with the arithmetic when there is none.
    """
    dimensions, dtype, block = weights
    kv_bytes = 0 if settings.device_mem == AUTO else parse_size(settings.device_mem, "worker.device_mem")
    left, kept_bytes = min(gpu_bytes) - kv_bytes, GPU_SEGMENT_BYTES if settings.keeper else 0
    rows = rows_max(settings)
    kind: dict[str, Any] = {
        "deterministic": settings.deterministic,
        "draft_layer": settings.draft_tokens_max > 0,
        "pass_tokens": settings.pass_tokens,
    }
    possible = group_sizes(dimensions.n_routed_experts)
    sizes = [size for size in possible if workers % size == 0]

    def fitting(among: Sequence[int]) -> int:
        return fitting_group_size(dimensions, dtype, block, among, rows, left - kept_bytes, **kind)

    if found := fitting(sizes):
        return found
    most = sizes[-1]
    held = rank_bytes(dimensions, dtype, block, most, rows, **kind)
    enough = fitting(possible)
    more = f"start {enough} workers, which fit as one group; or " if enough else ""
    kv = f" beside {settings.device_mem} for KV" if kv_bytes else ""
    require_weights_fit(
        held.weights,
        left,
        FIELD,
        most,
        exchange_bytes=held.exchange,
        prompt_bytes=held.prompts,
        is_kept=settings.keeper,
        remedy=f"{more}use a checkpoint in FP8, a smaller model, or GPUs with more than "
        f"{min(gpu_bytes) / 1e9:.1f} GB{kv}",
    )
    raise AssertionError("what does not fit was refused")


def _require_groups(workers: int, group_size: int, experts: int) -> None:
    if group_size < 1 or workers % group_size:
        divisors = ", ".join(str(size) for size in range(1, workers + 1) if workers % size == 0)
        raise ConfigError(
            f"{workers} workers cannot be divided into groups of that size",
            field=FIELD,
            value=group_size,
            remedy=f"use one of {divisors}, or another number of workers",
        )
    if group_size > 1:
        ExpertShare.of(0, group_size, experts)


def _require_roles(count: int, what: str, taken: Sequence[str], given: Sequence[str]) -> None:
    """Each of the `count` workers or groups has a role, and together they compute prompts and decode."""
    if given and len(given) != count:
        raise ConfigError(
            f"{len(given)} for {count} {what}", field="roles", value=",".join(given), remedy="name one for each of them"
        )
    for role, other, does in ((PREFILL, DECODE, "decodes"), (DECODE, PREFILL, "computes prompts")):
        if set(taken) == {role}:
            raise ConfigError(
                f"none of the {what} {does}, so that no request would end",
                field="roles",
                value=",".join(taken),
                remedy=f"give one of them the role {other} or {BOTH}",
            )


def _worker(
    settings: WorkerSettings, index: int, roles: Sequence[str], group_size: int, is_spread: bool
) -> WorkerSettings:
    port = settings.metrics_port + index if settings.metrics_port > 0 else settings.metrics_port
    number = index // group_size
    role = roles[number] if roles else settings.role
    device = f"{CUDA}:{index}" if is_spread else settings.device
    own = msgspec.structs.replace(settings, name=f"w{index}", metrics_port=port, role=role, device=device)
    if group_size == 1:
        standbys = int(device != "cpu") if settings.standby == AUTO else settings.standbys
        return msgspec.structs.replace(own, standby=standbys)
    rank, standbys = index % group_size, settings.standbys
    return msgspec.structs.replace(own, group=f"g{number}", group_rank=rank, group_size=group_size, standby=standbys)

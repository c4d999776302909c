"""How many requests of one length fit, and with which hot buffer: what `hisparse size` computes. Pure.

Nothing is estimated: each choice of hot buffer is a worker sized by worker.device.sizing with that choice's settings,
and what a request takes there is what admission would reserve for it (protocol.sizing) at its longest. So a figure
printed here is one that a worker started with the settings printed beside it has.

    by host         requests whose pages the node's pool holds, shared evenly among its workers
    by index pages  requests whose index keys fit the device
    by hot chunks   requests whose hot buffers fit the device
    batch           the least of the three: how many of them decode at once on one worker
    resident        for comparison: how many fit when the device holds all of their rows, and nothing else

A choice of H slots is sized with size classes from H up and `context_target_tokens` at the length asked for, since a
split of the device that suits one hot buffer does not suit the next.

Rejected: a formula of the hit rate by hot buffer. It depends on what the model attends to; benchmarks and metrics tell.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kernels.layout import Geometry
from protocol.config_checks import SEATS_MAX
from protocol.errors import CapacityError, ConfigError
from protocol.messages import ModelInfo
from protocol.settings import WorkerSettings
from protocol.sizing import RESIDENT, Length, hot_sizes_for, misfit, page_limit
from protocol.units import PAGE_TOKENS, pages_for
from worker.device.sizing import Sizing, size_worker
from worker.device.step_rows import StepRows


@dataclass(frozen=True)
class Choice:
    """One hot buffer: what it costs and how many requests that leaves room for on one worker. 0 slots: resident."""

    hot_slots: int
    hot_bytes: int
    by_host: int
    by_index_pages: int
    by_hot_chunks: int
    batch: int


@dataclass(frozen=True)
class MemoryPlan:
    """Requests of `context_tokens`, prompt and output together, on `workers` workers of one node. Bytes and counts."""

    context_tokens: int
    workers: int
    row_bytes: int
    index_row_bytes: int
    layers: int
    index_groups: int
    topk: int
    host_bytes_per_token: int
    host_bytes_per_request: int
    host_pages_per_request: int
    host_pages: int
    requests_by_host: int
    index_bytes_per_request: int
    slab_bytes: int
    prompt_max_tokens: int  # 0: prompts are computed by other workers
    miss_bytes_per_step: int
    resident: int
    choices: tuple[Choice, ...]
    recommended: Choice
    settings: WorkerSettings  # of the recommended choice


def plan(
    settings: WorkerSettings, geometry: Geometry, info: ModelInfo, context_tokens: int, workers: int = 1
) -> MemoryPlan:
    """Sizes of a worker, `settings` for the rest, and the largest hot buffer that costs no request its place.

    Raises ConfigError as `size_worker` does, and CapacityError with the arithmetic when not one request fits.
    """
    wanted = msgspec.structs.replace(settings, context_max_tokens=context_tokens, context_target_tokens=context_tokens)
    listed = len(_choices(wanted, geometry, info, workers))
    wanted = msgspec.structs.replace(wanted, hot_size_classes=wanted.hot_size_classes[:listed])
    choices = _choices(wanted, geometry, info, workers)
    most = max(choice.batch for choice in choices)
    best = max(at for at, choice in enumerate(choices) if choice.batch == most)
    chosen = _from_class(wanted, best)
    chosen = msgspec.structs.replace(chosen, seats=min(most, chosen.seats))
    return _report(chosen, geometry, size_worker(chosen, geometry, info), workers, tuple(choices), choices[best])


def classes_for(topk: int, context_tokens: int) -> tuple[int, ...]:
    """Hot sizes to compare where none are given, the last of them for all rows of a request: the default ones.

    Those of a small model begin at twice its top-k, and each is twice the one before.
    """
    default = WorkerSettings().hot_size_classes
    sizes = [-(-2 * topk // PAGE_TOKENS) * PAGE_TOKENS]
    if sizes[0] >= default[0]:
        return default
    while sizes[-1] < context_tokens and 2 * sizes[-1] <= default[-1]:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def _choices(settings: WorkerSettings, geometry: Geometry, info: ModelInfo, workers: int) -> list[Choice]:
    """One for each size class that requests of this length use, and a resident one where the next would hold all rows.

    Raises as `plan` does.
    """
    choices: list[Choice] = []
    for at in range(len(settings.hot_size_classes)):
        try:
            choices.append(_choice(_from_class(settings, at), geometry, info, workers))
        except (ConfigError, CapacityError):
            if not choices:
                raise
            break  # not one request fits with a hot buffer as large
        if choices[-1].hot_slots == RESIDENT:
            break  # larger classes are never used for this length
    return choices


def seats_for(seats: int | None, settings: WorkerSettings) -> int:
    """Seats to size with: as many as asked for, or so many that they limit nothing but what a step takes."""
    return seats or SEATS_MAX // StepRows.of(settings).rows


def _from_class(settings: WorkerSettings, at: int) -> WorkerSettings:
    return msgspec.structs.replace(settings, hot_size_classes=settings.hot_size_classes[at:])


def _choice(settings: WorkerSettings, geometry: Geometry, info: ModelInfo, workers: int) -> Choice:
    capacity = size_worker(settings, geometry, info).capacity
    length = _length(settings)
    short = misfit(length, capacity, "worker")
    if short:
        raise CapacityError(
            f"not one request of this length fits: it {', it '.join(it.text for it in short)}",
            field="context",
            value=settings.context_max_tokens,
            remedy="give more memory, or a shorter context",
        )
    pages = page_limit(length, capacity)
    hot_size = hot_sizes_for(pages, capacity)[0]
    limits = (
        capacity.host_pages // pages // workers,
        capacity.index_pages // pages,
        capacity.hot_chunks // hot_size.hot_chunks,
    )
    return Choice(hot_size.hot_slots, hot_size.hot_chunks * geometry.chunk_bytes, *limits, min(*limits, settings.seats))


def _length(settings: WorkerSettings) -> Length:
    """Of a request at its longest; how much of it is prompt concerns the slab alone, which is reported apart."""
    return Length(1, 0, settings.context_max_tokens - 1)


def _report(
    settings: WorkerSettings,
    geometry: Geometry,
    sizing: Sizing,
    workers: int,
    choices: tuple[Choice, ...],
    recommended: Choice,
) -> MemoryPlan:
    capacity = sizing.capacity
    pages = page_limit(_length(settings), capacity)
    return MemoryPlan(
        context_tokens=settings.context_max_tokens,
        workers=workers,
        row_bytes=geometry.row_bytes,
        index_row_bytes=geometry.index_row_bytes,
        layers=geometry.layers,
        index_groups=geometry.groups,
        topk=geometry.topk,
        host_bytes_per_token=geometry.page_bytes // PAGE_TOKENS,
        host_bytes_per_request=pages * geometry.page_bytes,
        host_pages_per_request=pages,
        host_pages=capacity.host_pages,
        requests_by_host=capacity.host_pages // pages,
        index_bytes_per_request=pages * geometry.index_page_bytes,
        slab_bytes=sizing.slab_pages * sizing.slab_page_bytes,
        prompt_max_tokens=capacity.prompt_max_tokens * capacity.prefills,
        miss_bytes_per_step=geometry.topk
        * geometry.slot_tokens
        * (geometry.layers - geometry.dense)
        * geometry.row_bytes,
        resident=min(sizing.device_bytes // (pages_for(settings.context_max_tokens) * geometry.page_bytes), SEATS_MAX),
        choices=choices,
        recommended=recommended,
        settings=settings,
    )

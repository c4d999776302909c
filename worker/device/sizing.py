"""How a worker's memory is cut up: settings and a model's geometry in, counts and a report out. Pure.

Host memory is host pages and nothing else. Device memory (`device_mem`, the budget for KV) is cut in this order:

    bookkeeping    seat tables, tails, counters: grows with seats and the longest context, not with tokens held
    prefill slab   rows of two layers of one longest prompt, in at most half of what is left, and for passes of several
                   prompts as many more as a small share holds. A worker of role decode computes no prompts and has one
                   page. Where ranks of a group split passes, a page has index keys of one group beside its rows
    index pages    as many as host pages or seats can use, at most their share of what is left: without its index keys a
                   context in host memory cannot be decoded
    hot chunks     the rest, at most `hot_chunks_max`

The share of index pages. A context needs index pages in proportion to its length, and hot chunks by the size of its hot
buffer, which does not grow with it; so no fixed share fits all. `context_target_tokens` names the length that is to be
served most: what is left is then cut so that index pages and the smallest hot buffers run out at the same number of
such requests. DeepSeek-V3.2 with rows in fp8 wants 61 percent for index pages at 32k tokens, 86 at 128k. Shorter
contexts then find index pages to spare and hot chunks short, so without a target each gets one half.

With `device_mem` = auto the budget is DEVICE_SHARE of what a GPU has free once the model is loaded, or STEP_SHARE of
what open prompt passes leave of that, if it is less; the rest is for graphs, scratch memory of steps, and libraries.
What steps take is known after the warm-up only, and printed then. A standby of the worker (`worker.standby`) has a
context of its own, for which STANDBY_DEVICE_BYTES are left free.

A request is refused by the first of these that it exceeds: the context limit, index pages, host pages, hot chunks of
the smallest hot buffer and, with its prompt, the slab. `longest_context_tokens` says which length fits a worker that
serves it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kernels.layout import QUEUE_RING, Geometry
from protocol.byte_sizes import AUTO, parse_size
from protocol.errors import ConfigError
from protocol.logprobs import ROW_BYTES_MAX
from protocol.messages import (
    DECODE,
    EOS_IDS_MAX,
    LOGIT_BIAS_MAX,
    STOP_TOKEN_IDS_MAX,
    ModelInfo,
    WorkerCapacity,
)
from protocol.settings import WorkerSettings
from protocol.sizing import smallest_chunks
from protocol.units import CONTEXT_MAX_TOKENS, PAGE_TOKENS, managed_chunks, pages_for
from worker.device.passes import PARTS_MAX, split_tokens
from worker.device.step_rows import StepRows
from worker.keeper.messages import GPU_SEGMENT_BYTES

#: Share of the budget, bookkeeping aside, that the prefill slab takes at most.
SLAB_SHARE = 0.5
#: Beside one longest prompt: so that a pass packs prompts with long prefixes, and short ones preempt a long one. Eight
#: prompts of 500 tokens behind 32k, half a pass, have 262,144 rows.
PACKED_SHARE: Final = 1 / 32
PACKED_PAGES_MAX: Final = 4_096
#: Share of what is then left that index pages take at most when no length is aimed at.
INDEX_SHARE = 0.5
#: Share of a GPU's free memory that `device_mem` = auto takes.
DEVICE_SHARE = 0.9
#: Likewise, of what prompt passes leave of it.
STEP_SHARE = 0.95
#: Of a GPU, for a standby that waits: its context and libraries, 718 MiB on an H200, its kernels and their scratch
#: memory. Weights are those of its worker, mapped once more.
STANDBY_DEVICE_BYTES: Final = 3 << 29
#: Of host memory, beside the pool: 0.96 GiB there, of which 0.38 are mapped files.
STANDBY_HOST_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Sizing:
    """Counts for the coordinator, the pages of the slab, and the widths of the tables that belong to them."""

    capacity: WorkerCapacity
    slab_pages: int
    slab_page_bytes: int
    context_max_tokens: int
    max_pages: int
    max_chunks: int
    bookkeeping_bytes: int
    device_bytes: int
    longest_context_tokens: int
    context_target_tokens: int = 0

    def report(self) -> tuple[dict[str, object], ...]:
        """Fields of the lines for the start of the process: what it has, and what that is enough for."""
        c, target = self.capacity, self.context_target_tokens or self.context_max_tokens
        pages = pages_for(target + c.overshoot_tokens)
        return (
            {
                "seats": c.seats,
                "host_pages": c.host_pages,
                "host_bytes": c.host_pages * c.page_bytes,
                "page_bytes": c.page_bytes,
                "token_bytes": c.page_bytes // PAGE_TOKENS,
                "device_bytes": self.device_bytes,
                "hot_chunks": c.hot_chunks,
                "chunk_rows": PAGE_TOKENS,
                "hot_size_classes": ",".join(map(str, c.hot_size_classes)),
                "index_pages": c.index_pages,
                "slab_pages": self.slab_pages,
                "bookkeeping_bytes": self.bookkeeping_bytes,
            },
            {
                "context_longest_tokens": self.longest_context_tokens,
                "context_max_tokens": self.context_max_tokens,
                "context_target_tokens": target,
                "requests_by_host_pages": c.host_pages // pages,
                "requests_by_index_pages": c.index_pages // pages,
                "requests_by_hot_chunks": c.hot_chunks // smallest_chunks(pages, c.hot_size_classes),
            },
        )


def size_worker(
    settings: WorkerSettings,
    geometry: Geometry,
    info: ModelInfo,
    pool_path: str = "",
    free_device_bytes: int = 0,
    prompt_bytes: int = 0,
) -> Sizing:
    """Cut the memory of one worker. `free_device_bytes` is a GPU's, 0 on the CPU; of a rank, less its exchange.
    `prompt_bytes` of it are for open prompt passes, and its standbys have theirs.

    Raises ConfigError naming the setting when the device has less, or when not even one request would fit.
    """
    classes = _classes(settings, geometry)
    context = _context(settings, info)
    host_pages = parse_size(settings.host_mem, "worker.host_mem") // geometry.page_bytes
    overshoot = StepRows.of(settings).overshoot_tokens(settings.lookahead_steps)
    max_pages = pages_for(context + overshoot)
    max_chunks = max(max_pages, managed_chunks(classes[-1]))
    bookkeeping = _bookkeeping_bytes(settings, geometry, max_pages, max_chunks, info.vocab_size)
    own_bytes = max(0, free_device_bytes - settings.standbys * STANDBY_DEVICE_BYTES)
    device = _budget(settings, own_bytes, prompt_bytes)
    left = device - bookkeeping
    slab_page = slab_page_bytes(settings, geometry)
    slab = _slab_pages(settings, slab_page, max_pages, left)
    left -= slab * slab_page
    index_bytes = _index_bytes(settings, geometry, classes, context, overshoot, max(0, left))
    index_pages = min(host_pages, settings.seats * max_pages, index_bytes // geometry.index_page_bytes)
    chunks = max(0, left - index_pages * geometry.index_page_bytes) // geometry.chunk_bytes
    if settings.hot_chunks_max:
        chunks = min(chunks, settings.hot_chunks_max)
    _require_room(settings, geometry, host_pages, slab, index_pages, chunks, classes[0])
    return Sizing(
        capacity=WorkerCapacity(
            seats=settings.seats,
            hot_chunks=chunks,
            index_pages=index_pages,
            prompt_max_tokens=min(context, slab * PAGE_TOKENS),
            host_pages=host_pages,
            page_bytes=geometry.page_bytes,
            hot_size_classes=classes,
            tail_slots=settings.tail_slots,
            overshoot_tokens=overshoot,
            pool_path=pool_path,
            role=settings.role,
            row_format=geometry.row_format,
        ),
        slab_pages=slab,
        slab_page_bytes=slab_page,
        context_max_tokens=context,
        max_pages=max_pages,
        max_chunks=max_chunks,
        bookkeeping_bytes=bookkeeping,
        device_bytes=bookkeeping
        + slab * slab_page
        + chunks * geometry.chunk_bytes
        + index_pages * geometry.index_page_bytes,
        longest_context_tokens=min(context, PAGE_TOKENS * min(host_pages, index_pages)),
        context_target_tokens=settings.context_target_tokens,
    )


def require_weights_fit(
    weights: Mapping[str, int],
    device_bytes: int,
    field: str,
    value: object,
    *,
    exchange_bytes: int = 0,
    prompt_bytes: int = 0,
    is_kept: bool = False,
    remedy: str = "use a checkpoint in FP8, a smaller model, or a GPU with more memory",
) -> int:
    """Bytes of a device that weights, given by dtype, and the exchange of a group leave, those of prompt passes among
    them. `is_kept`: weights lie in the memory of a keeper, whose last piece is taken whole.

    Raises ConfigError with the sum when these and prompt passes leave none.
    """
    kept_bytes = GPU_SEGMENT_BYTES if is_kept else 0
    needed = sum(weights.values()) + exchange_bytes + prompt_bytes + kept_bytes
    if needed >= device_bytes:
        parts = " + ".join(f"{size / 1e9:.1f} GB {name}" for name, size in weights.items())
        exchange = f" and the exchange {exchange_bytes / 1e9:.1f} GB" if exchange_bytes else ""
        exchange += f" and prompt passes {prompt_bytes / 1e9:.1f} GB" if prompt_bytes else ""
        exchange += f" and the last piece of their keeper {kept_bytes / 1e9:.1f} GB" if is_kept else ""
        raise ConfigError(
            f"the weights take {sum(weights.values()) / 1e9:.1f} GB ({parts}){exchange} of {device_bytes / 1e9:.1f} "
            "GB, and KV needs some",
            field=field,
            value=value,
            remedy=remedy,
        )
    return device_bytes - needed + prompt_bytes


def auto_budget(free_device_bytes: int, prompt_bytes: int) -> int:
    """Bytes for KV of a GPU that has `free_device_bytes`, of which prompt passes take `prompt_bytes`."""
    return max(0, int(min(free_device_bytes * DEVICE_SHARE, (free_device_bytes - prompt_bytes) * STEP_SHARE)))


def _budget(settings: WorkerSettings, free_device_bytes: int, prompt_bytes: int) -> int:
    if settings.device_mem == AUTO:
        return auto_budget(free_device_bytes, prompt_bytes)
    budget = parse_size(settings.device_mem, "worker.device_mem")
    if free_device_bytes and budget > free_device_bytes:
        raise ConfigError(
            f"the device has {free_device_bytes} bytes free",
            field="worker.device_mem",
            value=settings.device_mem,
            remedy=f"set it to {auto_budget(free_device_bytes, prompt_bytes) >> 20}MiB or less, or to {AUTO}",
        )
    return budget


def _classes(settings: WorkerSettings, geometry: Geometry) -> tuple[int, ...]:
    classes = tuple(sorted(settings.hot_size_classes))
    selected = geometry.topk * geometry.slot_tokens
    step = geometry.slot_tokens * geometry.tail_chunks if geometry.slot_tokens > 1 else 1
    if not classes or classes[0] < selected or any(size % step for size in classes):
        multiples = f", multiples of {step}" if step > 1 else ""
        raise ConfigError(
            f"a step selects {selected} rows, which must all fit the hot buffer{multiples}",
            field="worker.hot_size_classes",
            value=",".join(map(str, classes)),
            remedy=f"name sizes from {selected} upward{multiples}",
        )
    return classes


def _context(settings: WorkerSettings, info: ModelInfo) -> int:
    if settings.context_max_tokens > info.context_max_tokens:
        raise ConfigError(
            f"the model's context ends at {info.context_max_tokens} tokens",
            field="worker.context_max_tokens",
            value=settings.context_max_tokens,
            remedy="lower it, or leave it at 0",
        )
    return min(settings.context_max_tokens or info.context_max_tokens, CONTEXT_MAX_TOKENS)


def sampler_seat_bytes(vocab: int) -> int:
    """Device bytes of a seat's draws (worker/runners/base.py): occurrences of each token of the vocabulary, int16; a
    mask, one bit for each; biases, ends and parameters."""
    mask = 4 * -(-vocab // 32)
    return vocab * 2 + mask + LOGIT_BIAS_MAX * 12 + (EOS_IDS_MAX + STOP_TOKEN_IDS_MAX) * 8 + 63


def _bookkeeping_bytes(
    settings: WorkerSettings, geometry: Geometry, max_pages: int, max_chunks: int, vocab: int
) -> int:
    """Tables index, host, slab [seats, max_pages] and chunk [seats, max_chunks]; per selection tails, counters, and the
    eviction queue; draws, and rows of log-probabilities, one more for prefill."""
    per_group = 4 * settings.tail_slots + 48 + 6 * QUEUE_RING
    per_seat = 4 * (3 * max_pages + max_chunks + 2) + geometry.selections * per_group
    draws = settings.seats * sampler_seat_bytes(vocab) + 2 * vocab + (settings.seats + 1) * ROW_BYTES_MAX
    return settings.seats * per_seat + draws


def slab_page_bytes(settings: WorkerSettings, geometry: Geometry) -> int:
    """Device bytes of a slab page: rows, and where ranks split passes index keys of one group, and an entry in the
    table of each part (kernels/state.py: DeviceState.guest)."""
    guests = PAGE_TOKENS * geometry.index_row_bytes + 4 * PARTS_MAX if split_tokens(settings) else 0
    return geometry.slab_page_bytes + guests


def _slab_pages(settings: WorkerSettings, page_bytes: int, max_pages: int, left: int) -> int:
    if settings.role == DECODE:
        return 1
    longest = min(max_pages, max(0, int(left * SLAB_SHARE)) // page_bytes)
    return longest + min(PACKED_PAGES_MAX, max(0, int(left * PACKED_SHARE)) // page_bytes)


def _index_bytes(
    settings: WorkerSettings, geometry: Geometry, classes: tuple[int, ...], context: int, overshoot: int, left: int
) -> int:
    """Of `left` bytes for index pages and hot chunks, those for index pages."""
    target = settings.context_target_tokens
    if not target:
        return int(left * INDEX_SHARE)
    if target > context:
        raise ConfigError(
            f"contexts end at {context} tokens",
            field="worker.context_target_tokens",
            value=target,
            remedy="lower it, or raise worker.context_max_tokens",
        )
    pages = pages_for(target + overshoot)
    index = pages * geometry.index_page_bytes
    whole = index + smallest_chunks(pages, classes) * geometry.chunk_bytes
    return left * index // whole


def _require_room(
    settings: WorkerSettings,
    geometry: Geometry,
    host_pages: int,
    slab: int,
    index_pages: int,
    chunks: int,
    smallest: int,
) -> None:
    if not host_pages:
        raise ConfigError(
            f"one host page needs {geometry.page_bytes} bytes",
            field="worker.host_mem",
            value=settings.host_mem,
            remedy="raise it",
        )
    if min(slab, index_pages) < 1 or chunks < managed_chunks(smallest):
        raise ConfigError(
            f"leaves {slab} slab pages, {index_pages} index pages and {max(0, chunks)} hot chunks; the smallest hot "
            f"buffer needs {managed_chunks(smallest)} chunks of {geometry.chunk_bytes} bytes",
            field="worker.device_mem",
            value=settings.device_mem,
            remedy="raise it, or lower worker.seats, worker.context_max_tokens or worker.hot_size_classes",
        )

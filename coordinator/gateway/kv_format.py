"""KV events as vLLM publishes them, so that routers made for vLLM read them. Pure.

A batch is an array `[ts, events, data_parallel_rank]`. Fields of events at their defaults are left out.

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys
    BlockRemoved      block_hashes, medium
    AllBlocksCleared

In the form `map`, of vLLM 0.24 and later (its pull request 42892; fields as in streams of 0.31), an event is a map with
its class as `type`. In the form `array`, of vLLM 0.10.2 to 0.23 and routers of that time, it is an array that begins
with its class. Source: vllm/distributed/kv_events.py.

A hash is the first 8 bytes of a page's digest, as an unsigned integer: routers compare hashes and never compute ours.
`medium` is what vLLM calls host memory. `extra_keys` has one entry for each block: in the first block of a prompt user,
tenant and cache_salt, as far as there are any (vLLM: cache_salt), else null.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from coordinator.memory.kv_events import KvEvent, PagesRemoved, PagesStored
from coordinator.memory.prefix_index import Digest
from protocol.units import PAGE_TOKENS

MEDIUM: Final = "CPU"
HASH_BYTES: Final = 8
#: One service is one rank to a router.
RANK: Final = 0


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


BlockEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """`ts`: seconds since the epoch."""

    ts: float
    events: list[Any]  # BlockEvent, or one as an array
    data_parallel_rank: int


_encode = msgspec.msgpack.Encoder().encode


def encode_batch(events: Iterable[KvEvent], ts: float, *, as_arrays: bool) -> bytes:
    """The payload of one message."""
    blocks: list[Any] = [_block_event(it) for it in events]
    return _encode(EventBatch(ts, [_array(it) for it in blocks] if as_arrays else blocks, RANK))


def _array(event: BlockEvent) -> list[object]:
    """The class, and all fields up to the last that is not at its default."""
    fields = [type(event).__name__, *msgspec.structs.astuple(event)]
    return fields[:-1] if isinstance(event, BlockStored) and event.extra_keys is None else fields


def _block_event(event: KvEvent) -> BlockEvent:
    match event:
        case PagesStored(digests, parent, tokens, scope):
            keys = [scope, *[None] * (len(digests) - 1)] if scope else None
            return BlockStored(
                block_hashes=[_hash(it) for it in digests],
                parent_block_hash=None if parent is None else _hash(parent),
                token_ids=np.frombuffer(tokens, dtype=np.int32).tolist(),
                block_size=PAGE_TOKENS,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=keys,
            )
        case PagesRemoved(digests):
            return BlockRemoved([_hash(it) for it in digests], MEDIUM)
        case _:
            return AllBlocksCleared()


def _hash(digest: Digest) -> int:
    return int.from_bytes(digest[:HASH_BYTES], "big")

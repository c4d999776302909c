"""Bytes of a KV row and of an index key, by kind. Arithmetic alone, for code that sizes memory without torch.

kernels/row_format.py has the diagrams; it reads and writes rows of exactly these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from protocol.errors import ConfigError

KINDS: Final = ("float32", "bfloat16", "fp8", "fp4")
#: Latent values under one scale.
GROUP: Final = 128
FP4_GROUP: Final = 16
#: Values of an index key in fp4 under one scale; in fp8 it has one scale.
FP4_KEY_GROUP: Final = 32
#: Bytes of a scale, of the kinds that have one.
SCALE_BYTES: Final = {"fp8": 4, "fp4": 1}
#: Bytes of a value that is not scaled.
PLAIN_BYTES: Final = {"float32": 4, "bfloat16": 2, "fp8": 2, "fp4": 1}


class KvKinds(NamedTuple):
    """Kinds of KV rows and of index keys."""

    rows: str
    keys: str


@dataclass(frozen=True)
class RowShape:
    """One row: `scaled` values that fp8 and fp4 quantise in groups of `group`, then `plain` ones."""

    kind: str
    scaled: int
    plain: int
    group: int

    @property
    def is_quantised(self) -> bool:
        return self.kind in SCALE_BYTES

    @property
    def values(self) -> int:
        return self.scaled + self.plain

    @property
    def row_bytes(self) -> int:
        if self.kind not in SCALE_BYTES:
            return self.values * PLAIN_BYTES[self.kind]
        return self.code_bytes + self.scale_bytes + PLAIN_BYTES[self.kind] * self.plain

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of all scaled values. Two values of fp4 share one."""
        return self.scaled // 2 if self.kind == "fp4" else self.scaled

    @property
    def scale_bytes(self) -> int:
        """Bytes of all scales."""
        return SCALE_BYTES[self.kind] * (self.scaled // self.group)


def kv_row_shape(kind: str, latent: int, rope: int) -> RowShape:
    """Rows of one latent and one rope key. Raises ConfigError for a kind that does not exist, or does not fit."""
    group = FP4_GROUP if kind == "fp4" else min(GROUP, latent)
    _require_fit(kind, latent % group == 0 and latent % 4 == 0 and rope % 2 == 0, f"kv_lora_rank {latent}")
    return RowShape(kind, latent, rope, group)


def index_key_shape(kind: str, dim: int) -> RowShape:
    """Keys of the indexer. Raises ConfigError; fp8 and fp4 want a power of two, so that keys can be rotated."""
    group = FP4_KEY_GROUP if kind == "fp4" else dim
    _require_fit(kind, dim >= 4 and dim % group == 0 and dim & (dim - 1) == 0, f"index_head_dim {dim}")
    return RowShape(kind, dim, 0, group)


def _require_fit(kind: str, fits: bool, dimension: str) -> None:
    if kind not in KINDS:
        raise ConfigError(
            "unknown row format", field="worker.kv_dtype", value=kind, remedy=f"use auto or one of {', '.join(KINDS)}"
        )
    if kind in SCALE_BYTES and not fits:
        raise ConfigError(
            f"rows of this model do not divide into groups with a scale: {dimension}",
            field="worker.kv_dtype",
            value=kind,
            remedy="use bfloat16" if kind == "fp8" else "use fp8 or bfloat16",
        )

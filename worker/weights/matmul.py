"""Products with FP8 weights: what worker.matmul comes to on a device, for a checkpoint.

weight_only   weights are decoded in the kernel: exact
w8a8          activations are quantized too, and a library multiplies FP8 by FP8: what the checkpoint's authors serve
auto          w8a8 where the card, the library and the checkpoint can, else weight_only, with the cause in the log.
              weight_only in deterministic mode, where all workers must have the same bits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from kernels.cuda import deep_gemm
from protocol.config_checks import AUTO_MATMUL, W8A8, WEIGHT_ONLY
from protocol.errors import ConfigError
from protocol.logs import fields, logger
from worker.weights.quantization import Quantization

FIELD: Final = "worker.matmul"

log = logger("worker.weights")


@dataclass(frozen=True)
class Matmul:
    """`library`: name and version of what multiplies FP8 by FP8; empty: weights are decoded. `powers`: scales of
    activations are powers of two."""

    library: str = ""
    powers: bool = False

    @property
    def quantizes_rows(self) -> bool:
        return bool(self.library)

    @property
    def name(self) -> str:
        """Words for what the bits of rows depend on: the mode, and the library's version."""
        return f"{W8A8} by {self.library}" if self.library else WEIGHT_ONLY


DECODED: Final = Matmul()


def resolve_matmul(
    asked: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None,
    deterministic: bool,
) -> Matmul:
    """The products that `asked`, a value of worker.matmul, comes to. `quantization` of weights that stay FP8.

    Raises ConfigError for w8a8 that `device`, its library, the dtype of the model or the checkpoint cannot do.
    """
    follows = quantization is not None and device.type == "cuda" and not deterministic
    if asked == WEIGHT_ONLY or (asked == AUTO_MATMUL and not follows):
        return DECODED
    try:
        found = _quantizing(asked, device, dtype, quantization)
    except ConfigError as problem:
        if asked != AUTO_MATMUL:
            raise
        log.warning("w8a8 cannot be used: weight_only", extra=fields(cause=str(problem)))
        return DECODED
    log.info("products", extra=fields(matmul=found.name, powers_of_two=found.powers))
    return found


def _quantizing(asked: str, device: torch.device, dtype: torch.dtype, quantization: Quantization | None) -> Matmul:
    """w8a8, or ConfigError with what stands in its way."""
    if quantization is None:
        raise ConfigError(
            "the checkpoint has no weights in FP8",
            field=FIELD,
            value=asked,
            remedy=f"use {WEIGHT_ONLY} or {AUTO_MATMUL}",
        )
    if device.type != "cuda":
        raise ConfigError("no CPU multiplies FP8", field=FIELD, value=asked, remedy=f"use a GPU, or {WEIGHT_ONLY}")
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"quantizes activations in bfloat16, not in {str(dtype).removeprefix('torch.')}",
            field=FIELD,
            value=asked,
            remedy=f"set worker.dtype = bfloat16, or use {WEIGHT_ONLY}",
        )
    try:
        library = deep_gemm.require(device)
    except ConfigError as problem:
        raise ConfigError(
            f"{problem.field} ({problem.value}) {problem.message}", field=FIELD, value=asked, remedy=problem.remedy
        ) from problem
    return Matmul(library, quantization.powers_of_two)

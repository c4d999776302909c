"""The weight that products of kernels/block_fp8.py take: codes and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protocol.errors import BadInput

BLOCK: Final = 128
E4M3: Final = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class BlockFp8:
    """`values` float8_e4m3fn[..., N, K]; `scales` float32[..., ceil(N / 128), ceil(K / 128)]; both contiguous.

    Leading dimensions number experts. Raises BadInput when the two do not belong together.
    """

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        check_tensor("values", self.values, E4M3, tuple(self.values.shape))
        if self.values.dim() < 2:
            raise BadInput(
                "has no rows and columns", field="values", value=str(list(self.values.shape)), remedy="pass [..., N, K]"
            )
        *batch, rows, columns = self.values.shape
        check_tensor("scales", self.scales, torch.float32, (*batch, -(-rows // BLOCK), -(-columns // BLOCK)))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *, rows_apart: bool = False
) -> None:
    """Raises BadInput that names `name` unless the tensor is of that dtype and shape, and contiguous; `rows_apart`:
    within its rows."""
    is_dense = tensor.is_contiguous() or (rows_apart and tensor.stride(-1) == 1)
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not is_dense:
        raise BadInput(
            f"expected a contiguous {dtype}{list(shape)}".replace("torch.", ""),
            field=name,
            value=f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch."),
            remedy="pass a contiguous tensor of that dtype and shape",
        )

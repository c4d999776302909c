"""Tensors are checked before they are used: shape by symbolic size, dtype, layout and device, by name.

    sizes = Sizes(groups=geometry.groups)
    sizes.check("topk", topk, ("batch", "k"), torch.int32)      # binds batch and k
    sizes.check("out_rows", out_rows, ("batch", "k"), torch.int32)  # must agree with topk

A mismatch raises BadInput naming the tensor, what it is and what it should be; nothing has been touched by then.
"""

from __future__ import annotations

import torch

from protocol.errors import BadInput

Dimension = int | str


def check_number(name: str, value: int, size: int) -> None:
    """Raises BadInput unless `value`, which numbers one of `size` things, names one of them."""
    if not 0 <= value < size:
        raise BadInput("out of range", field=name, value=value, remedy=f"0 to {size - 1}")


class Sizes:
    """Symbolic sizes of one call. A name is bound by its first use, or up front by keyword."""

    def __init__(self, **bound: int) -> None:
        self._bound = bound
        self._device: torch.device | None = None

    def __getitem__(self, name: str) -> int:
        return self._bound[name]

    def check(self, name: str, tensor: torch.Tensor, shape: tuple[Dimension, ...], *dtypes: torch.dtype) -> None:
        """Raises BadInput unless `tensor` is contiguous, of one of `dtypes`, of `shape`, and where its peers are."""
        if self._device is None:
            self._device = tensor.device
        if (
            tensor.dtype in dtypes
            and tensor.is_contiguous()
            and tensor.device == self._device
            and self._fits(tensor, shape)
        ):
            return
        raise BadInput(
            f"got {_describe(tensor)}, expected {self._expected(shape, dtypes)}",
            field=name,
            value=f"{tensor.dtype}".removeprefix("torch."),
            remedy="pass a contiguous tensor of that dtype and shape, on the device of the others",
        )

    def _fits(self, tensor: torch.Tensor, shape: tuple[Dimension, ...]) -> bool:
        if tensor.dim() != len(shape):
            return False
        for got, want in zip(tensor.shape, shape, strict=True):
            if got != (self._bound.setdefault(want, got) if isinstance(want, str) else want):
                return False
        return True

    def _expected(self, shape: tuple[Dimension, ...], dtypes: tuple[torch.dtype, ...]) -> str:
        names = "|".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = ", ".join(
            f"{want}={self._bound[want]}" if isinstance(want, str) and want in self._bound else str(want)
            for want in shape
        )
        return f"{names}[{sizes}] contiguous on {self._device}"


def _describe(tensor: torch.Tensor) -> str:
    sizes = ", ".join(str(size) for size in tensor.shape)
    layout = "contiguous" if tensor.is_contiguous() else f"strided {tuple(tensor.stride())}"
    return f"{tensor.dtype}[{sizes}] {layout} on {tensor.device}".removeprefix("torch.")

"""Memory of the tensors that a model reads from its checkpoint, or makes of those once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class WeightMemory(Protocol):
    """Memory of tensors by name. `is_filled`: they have their values, and none is to be read or made.

    Whatever the model keeps of its checkpoint lies here, in its final form: a worker that finds it filled has no work
    left to do on it.
    """

    @property
    def is_filled(self) -> bool: ...

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The contiguous tensor of this name, which none had before."""
        ...

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor that is there, and was not given yet."""
        ...


class OwnMemory:
    """Memory of this process alone."""

    is_filled = False

    def __init__(self, device: torch.device | str) -> None:
        self._device = device

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def dtype_of(self, name: str) -> torch.dtype | None:
        return None

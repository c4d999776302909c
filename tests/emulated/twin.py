"""A Twin whose second state is run by the CUDA kernels' own sources, emulated (device.py)."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulated.device import Device
from tests.gpu.twin import Twin


class EmulatedTwin(Twin):
    """On `on`, which must be installed."""

    device = "cpu"

    def __init__(self, seed: int, on: Device, **sizes: Any) -> None:
        self._on = on
        super().__init__(seed, **sizes)

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def prepare(self) -> None:
        self._on.adopt(self.gpu)

"""What shows that a test waits for nothing on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_syncs() -> Iterator[None]:
    """Within it, whatever of torch makes the host wait for the device, but for events that are polled, raises
    RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""The store through which torch.distributed exchanges addresses, over the control connection."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from worker.group.control import Control


class ControlStore(Store):
    """Keys are set or appended to, and are kept by rank 0. Waits have no timeout: a lost rank ends the process.

    What gloo and NCCL ask for is here; `add`, `delete_key` and `num_keys` raise as in the base class. NCCL's monitor
    asks once a second with `check` for a key of its timeouts, which this project does not use.
    """

    def __init__(self, control: Control) -> None:
        super().__init__()
        self._control = control

    def set(self, key: str, value: str | bytes) -> None:
        self._control.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def append(self, key: str, value: str | bytes) -> None:
        self._control.set(key, value.encode() if isinstance(value, str) else bytes(value), appends=True)

    def get(self, key: str) -> bytes:
        return self._control.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        del timeout
        for key in keys:
            self._control.get(key)

    def check(self, keys: list[str]) -> bool:
        del keys
        return False  # rank 0 is not asked: the answer would wait for it

    def set_timeout(self, timeout: timedelta) -> None:
        del timeout

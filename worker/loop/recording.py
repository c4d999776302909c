"""Records what decode steps select, into a trace (selections.py): `worker.record_selections`. Off by default.

    compute   in a step, behind each index_topk: copy the group's top-k aside · behind the step: download all of them
    executor  when it reads the step: copy what was downloaded, put it in a queue, go on
    thread    pack and write

The copies make each step longer: top-k of every group of every request, 8 KiB a group at 2,048, cross the link. Packing
takes a core. The queue holds QUEUED_STEPS; steps that find it full are left out, counted and told in the log, so that
the disk never delays a token. An error of the disk ends the recording, not the worker.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import Final

import torch
from torch import Tensor

from kernels.layout import Geometry
from kernels.state import StepBatch
from protocol import logs
from protocol.arrays import Int32Array
from protocol.errors import ConfigError
from protocol.logs import fields
from worker.device.pinned import host_tensor
from worker.loop.selections import TraceSizes, encode, encode_head

QUEUED_STEPS: Final = 64
#: Longest that the end of a worker waits for what is queued.
CLOSE_LIMIT_S: Final = 10.0

log = logs.logger("worker.recording")


@dataclass(frozen=True, eq=False)
class _Step:
    number: int
    placements: list[int]
    lengths: list[int]
    topk: Int32Array  # [G, rows, k]


class SelectionRecorder:
    """`steps_in_flight`: steps that may be launched and not read. Raises ConfigError if the file cannot be made."""

    def __init__(
        self, path: Path, geometry: Geometry, seats: int, device: torch.device | str, steps_in_flight: int
    ) -> None:
        shape = (geometry.selections, seats, geometry.topk)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            message = f"cannot be created: {error.strerror}"
            remedy = "name a path in a directory that exists"
            raise ConfigError(message, field="worker.record_selections", value=path, remedy=remedy) from error
        self.left_out = 0
        self._file = os.fdopen(handle, "wb")
        self._file.write(encode_head(TraceSizes(geometry.selections, geometry.topk)))
        self._device = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._hosts = [host_tensor(*shape, dtype=torch.int32, device=device) for _ in range(steps_in_flight)]
        self._queue: Queue[_Step | None] = Queue(QUEUED_STEPS)
        self._failed = False
        self._thread = threading.Thread(target=self._write, name="selections", daemon=True)
        self._thread.start()
        log.warning("recording selections: steps take longer", extra=fields(path=str(path)))

    def keep(self, group: int, batch: StepBatch, topk: Tensor) -> None:
        """Operation behind index_topk of `group`: topk int32[B, k] is overwritten by the next group's."""
        del batch
        self._device[group, : len(topk)].copy_(topk)

    def download(self, step: int, rows: int) -> None:
        """Operation behind a step."""
        self._hosts[step % len(self._hosts)][:, :rows].copy_(self._device[:, :rows], non_blocking=True)

    def take(self, step: int, placements: list[int], lengths: list[int]) -> None:
        """Queue a step that was downloaded; its first rows are those of `placements`. Never blocks."""
        if self._failed or not placements:
            return
        topk = self._hosts[step % len(self._hosts)][:, : len(placements)].numpy().copy()
        try:
            self._queue.put_nowait(_Step(step, placements, lengths, topk))
        except Full:
            self.left_out += 1
            if self.left_out & (self.left_out - 1) == 0:
                log.warning("steps left out of the trace of selections", extra=fields(steps=self.left_out))

    def close(self) -> None:
        """Write what is queued, for CLOSE_LIMIT_S at most."""
        try:
            self._queue.put(None, timeout=CLOSE_LIMIT_S if self._thread.is_alive() else 0)
        except Full:
            return
        self._thread.join(CLOSE_LIMIT_S)

    def _write(self) -> None:
        try:
            with self._file as file:
                while (step := self._queue.get()) is not None:
                    for row, (placement, length) in enumerate(zip(step.placements, step.lengths, strict=True)):
                        file.write(encode(step.number, placement, length, step.topk[:, row]))
        except OSError as error:
            self._failed = True
            log.error("selections are no longer recorded", extra=fields(error=error))  # noqa: TRY400

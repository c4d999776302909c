"""The worker's process: `python -m benchmarks.serve.worker SPEC worker ...` is `hisparse worker ...` for a model that
is made on its device. Everything else of it is the product's.

    runner       one rank of a group with random weights; the other ranks' rows are synthesised, in steps and prompts
    selections   of decode steps: Overlapping, in place of the indexer's, which runs all the same
    written      while the control file says so, of a prompt all but its last page's rows are staged as they lie in the
                 slab instead of being computed; the rest is computed and draws the first token. Before the first one,
                 device memory is filled with encoded random rows
    journal      a record of each step and each unit of a prompt, with the time at which it was complete
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.rank import SynthesisedRanks
from benchmarks.serve.measures import RECORD, STEP, UNIT, WRITTEN
from benchmarks.serve.model import Spec
from kernels.layout import SLAB_LAYERS
from kernels.row_format import index_key_format_of, kv_row_format_of
from kernels.state import DeviceState, StepBatch
from metrics.state import WorkerCounters
from protocol.settings import WorkerSettings
from protocol.tokenizer_files import read_tokenizer
from protocol.units import PAGE_TOKENS, pages_for
from worker.device.passes import PassUnit
from worker.device.step_rows import rows_max
from worker.loop.batch import RunningRequest
from worker.loop.executor import Executor
from worker.loop.prefill import LaunchedPass, Prefill
from worker.loop.prompts import NextUnit, Prompts
from worker.loop.swap import StagedRows
from worker.runners.base import arithmetic, prefix_unit_tokens
from worker.runners.synthetic import synthetic_matmul, synthetic_runner
from worker.runners.transformers_dsa import TransformersRunner

#: Between two looks at the control file, and two writes of the journal.
POLL_S: Final = 0.05
#: Multipliers of Overlapping, larger than any context: a layer group takes one of them in turn.
PRIMES: Final = (1_000_003, 1_299_709, 1_500_007, 1_750_009)
SEAT_STEP: Final = 7_919
SAMPLE_ROWS: Final = 4_096
WRITING: Final = "writing"


class Overlapping:
    """Stands in for the indexer's output inside captured graphs: of k entries, `overlap` were in the request's step
    before. Entries are k places of a permutation of the context that begin further with each position; the permutation
    is another for each seat and for neighbouring groups, and covers the context in multiples of 2 k. Shorter contexts,
    which a hot buffer holds, keep what the indexer selected."""

    def __init__(self, k: int, overlap: float, device: torch.device | str) -> None:
        self._fresh, self._unit = round((1 - overlap) * k), 2 * k
        self._places = torch.arange(k, device=device)
        self._entries: list[Tensor] = []
        self._long = torch.zeros(0, device=device)

    def __call__(self, group: int, batch: StepBatch, topk: Tensor) -> None:
        if group == 0:
            lengths = batch.lengths.long().unsqueeze(1)
            places = lengths * self._fresh + self._places + batch.seats.long().clamp(min=0).unsqueeze(1) * SEAT_STEP
            covered = (lengths // self._unit * self._unit).clamp(min=self._unit)
            self._entries = [(places * prime % covered).int() for prime in PRIMES]
            self._long = lengths >= self._unit
        torch.where(self._long, self._entries[group % len(PRIMES)], topk, out=topk)


class Journal:
    """Records on their way to a file. One thread writes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._records: list[tuple[int, int, float, float]] = []

    def note(self, kind: int, rows: int, seconds: float = 0.0) -> None:
        self._records.append((kind, rows, time.monotonic(), seconds))

    def flush(self) -> None:
        if self._records:
            self._file.write(np.array(self._records, dtype=RECORD).tobytes())
            self._records.clear()


class Loop:
    """The benchmark's part in the worker's loop, between its turns and in its launches."""

    def __init__(self, spec: Spec) -> None:
        self._control = Path(spec.control)
        self._journal = Journal(Path(spec.journal))
        self._due = 0.0
        self._is_writing = False
        self._is_filled = False
        self._under_way: deque[tuple[Callable[[], bool], int]] = deque()

    def poll(self) -> None:
        """Between two turns."""
        while self._under_way and self._under_way[0][0]():
            self._journal.note(UNIT, self._under_way.popleft()[1])
        now = time.monotonic()
        if now >= self._due:
            self._due = now + POLL_S
            self._is_writing = self._control.exists() and self._control.read_text() == WRITING
            self._journal.flush()

    def stepped(self, seconds: float, requests: int) -> None:
        self._journal.note(STEP, requests, seconds)

    def write(self, prompts: Prompts) -> None:
        """While the control file says so, stage what lies in the slab for prompts that wait, but for the last page."""
        for request in prompts._prompts.values() if self._is_writing else ():
            stop = (request.prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
            if request.prefilled < stop:
                self._write(prompts._prefill, request, request.prefilled, stop)

    def launch(self, launch: Callable[[int], None], prefill: Prefill, unit: PassUnit) -> None:
        """Launch a unit by `launch`, the worker's own, with the rows of all ranks."""
        launch(unit.rows)
        self._under_way.append((_complete(prefill._state.rows), unit.rows))

    def _write(self, prefill: Prefill, request: RunningRequest, start: int, stop: int) -> None:
        if not self._is_filled:
            fill(prefill._state, prefill._runner)
            self._is_filled = True
        memory = request.memory
        rows = StagedRows(range(pages_for(stop)), memory.index_pages, memory.host_pages, start, stop)
        for layer in range(prefill._state.geometry.layers):
            prefill._swap.stage([rows], layer)
        request.prefilled = stop
        self._journal.note(WRITTEN, stop - start)


def _complete(of: Tensor) -> Callable[[], bool]:
    """Return whether all that was launched on the current stream has run."""
    if not of.is_cuda:
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query


def fill(state: DeviceState, runner: Any) -> None:
    """Random rows and index keys, encoded once and repeated, in all of the device's memory for them."""
    geometry, config = state.geometry, runner._layers.model.config
    latent, rope, dim = config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim
    device = state.rows.device
    rows = kv_row_format_of(geometry.row_bytes, latent, rope).encode(
        torch.randn(SAMPLE_ROWS, latent + rope, device=device)
    )
    keys = index_key_format_of(geometry.index_row_bytes, dim).encode(torch.randn(PAGE_TOKENS, dim, device=device))
    halves = [[plane[:1] for plane in state.slab(layer).planes] for layer in range(SLAB_LAYERS)]
    for planes in (state.planes, *halves):
        at = 0
        for plane in planes:
            width = plane.shape[-1]
            for layer in plane:
                for piece in layer.split(SAMPLE_ROWS):
                    piece.copy_(rows[: len(piece), at : at + width])
            at += width
    state.key_pages.copy_(keys)


def runner_of(spec: Spec, settings: WorkerSettings) -> TransformersRunner:
    """Return a runner as worker.process.load_runner does, with random weights."""
    config = spec.config
    most = rows_max(settings)
    is_quantized = synthetic_matmul(settings.matmul, device=settings.device, fp8=spec.fp8).quantizes_rows
    runner = synthetic_runner(
        config,
        device=settings.device,
        kv_dtype=settings.kv_dtype,
        fp8=spec.fp8,
        matmul=settings.matmul,
        collectives=SynthesisedRanks.draw(config, spec.ranks, most, settings.device, quantized=is_quantized),
        rows_max=most,
        after_index_topk=Overlapping(config.index_topk, spec.overlap, settings.device),
    )
    tokenizer = read_tokenizer(settings.model)
    runner.info = msgspec.structs.replace(
        runner.info,
        tokenizer_kind=tokenizer.kind,
        tokenizer_hash=tokenizer.hash,
        prefix_unit_tokens=prefix_unit_tokens(settings),
        reuses_generated=not settings.deterministic,
        arithmetic=arithmetic(settings, runner.matmul),
    )
    return runner


@contextmanager
def changed(spec: Spec) -> Iterator[None]:
    """The worker's process with what the benchmark changes in it."""
    loop = Loop(spec)
    turn, stepped = Executor.turn, WorkerCounters.stepped
    follow, launch = Prompts.next, Prefill.launch

    def turned(executor: Executor) -> bool:
        loop.poll()
        return turn(executor)

    def counted(counters: WorkerCounters, seconds: float, requests: int, *, is_alone: bool = True) -> None:
        stepped(counters, seconds, requests, is_alone=is_alone)
        loop.stepped(seconds, requests)

    def followed(prompts: Prompts, **limits: Any) -> NextUnit | None:
        loop.write(prompts)
        return follow(prompts, **limits)

    def launched(prefill: Prefill, this: LaunchedPass, unit: PassUnit, rows: int = 0) -> None:
        loop.launch(partial(launch, prefill, this, unit), prefill, unit)

    with (
        patch("worker.process.load_runner", lambda settings, *_: runner_of(spec, settings)),
        patch.object(Executor, "turn", turned),
        patch.object(WorkerCounters, "stepped", counted),
        patch.object(Prompts, "next", followed),
        patch.object(Prefill, "launch", launched),
    ):
        yield


def main() -> None:
    from hisparse.cli import main as hisparse_main

    spec = msgspec.json.decode(Path(sys.argv.pop(1)).read_bytes(), type=Spec)
    with changed(spec):
        hisparse_main(prog_name="hisparse")


if __name__ == "__main__":
    main()

"""Decode steps: launched one ahead of those that are read, at fixed addresses.

One step n of b requests, padded to a bucket of B rows:

    compute   upload inputs · wait backed_up of step n-T · begin_step · the runner's operations · download results
    backup    wait row_written · copy the new rows by the step's BackupPlan · backed_up, durable

Everything a step touches is allocated once per bucket, so that a bucket's operations can be captured in a graph and
replayed: between captures only the inputs, the backup plan's place in its ring and the results' place change, and all
three are outside of what the runner launches. In deterministic mode there is one bucket, of all seats.

What was launched and not yet read, or not yet seen durable, is kept here with the requests it concerns; positions are
those of the moment of launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.begin_step import begin_step
from kernels.state import BackupPlan, DeviceState, StepBatch
from worker.batch import RunningRequest
from worker.inputs import RING_BUFFERS, Ring, StepInputs
from worker.runners.base import Runner, SamplerState, StepOutputs
from worker.streams import Fence, Streams
from worker.swap import Swap


class _Bucket:
    """What steps of one padded size use: the batch, its inputs' ring, backup plans of the last T steps, outputs."""

    def __init__(self, rows: int, state: DeviceState, outputs: StepOutputs) -> None:
        groups, device = state.geometry.groups, state.rows.device
        self.rows = rows
        self.batch = StepBatch.allocate(rows, groups, device)
        self.ring = Ring([StepInputs(rows) for _ in range(RING_BUFFERS)])
        self.plans = [BackupPlan.allocate(rows, groups, device) for _ in range(state.tail_slots)]
        self.outputs = outputs


class _Results:
    """Host memory that a step's results are downloaded to."""

    def __init__(self, seats: int) -> None:
        self.tokens = torch.full((seats,), -1, dtype=torch.int32)
        self.counts = torch.zeros(2, seats, dtype=torch.int64)

    def download(self, outputs: StepOutputs, state: DeviceState | None) -> None:
        """Operation: keep the tokens, and the hits and misses of every seat when `state` is given."""
        self.tokens[: len(outputs.tokens)].copy_(outputs.tokens)
        if state is not None:
            self.counts[0].copy_(state.hits.sum(0))
            self.counts[1].copy_(state.misses.sum(0))


@dataclass(slots=True)
class _Launched:
    requests: list[RunningRequest]
    positions: list[int]
    sampled: Fence
    results: _Results
    counted: bool
    at_s: float


@dataclass(slots=True)
class StepTokens:
    """A step that was read: requests, the row each wrote, the token each drew; hits and misses by seat if asked for."""

    requests: list[RunningRequest]
    positions: list[int]
    tokens: list[int]
    counts: list[list[int]] | None
    launched_s: float


class Decoder:
    """Launches and reads steps, in order."""

    def __init__(
        self,
        runner: Runner,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        swap: Swap,
        *,
        buckets: Sequence[int],
        lookahead: int,
        keep_logits: bool = False,
    ) -> None:
        self._runner = runner
        self._streams = streams
        self._state = state
        self._sampler = sampler
        self._swap = swap
        vocab, device = runner.info.vocab_size, state.rows.device
        self._buckets = [
            _Bucket(rows, state, StepOutputs.allocate(rows, vocab, keep_logits=keep_logits, device=device))
            for rows in sorted(buckets)
        ]
        self._results = [_Results(state.seats) for _ in range(lookahead + 1)]
        self._number = 0
        self._launched: deque[_Launched] = deque()
        self._backed_up: deque[Fence] = deque()
        self._undurable: deque[tuple[Fence, list[RunningRequest], list[int]]] = deque()

    @property
    def in_flight(self) -> int:
        """Steps launched and not read; at most lookahead + 1."""
        return len(self._launched)

    @property
    def settled(self) -> bool:
        """Whether everything launched was read and seen durable."""
        return not self._launched and not self._undurable

    def launch(self, requests: list[RunningRequest], now_s: float, *, count: bool = False) -> None:
        """Launch one step of `requests`, each of which has memory for its next row, and advance their positions."""
        bucket = next(bucket for bucket in self._buckets if bucket.rows >= len(requests))
        positions = [request.position for request in requests]
        compute = self._streams.compute
        self._upload(bucket, requests, positions)
        if len(self._backed_up) == self._state.tail_slots:
            compute.wait(self._backed_up.popleft())
        plan = bucket.plans[self._number % len(bucket.plans)]
        compute.launch("begin step", partial(begin_step, self._state, bucket.batch, plan))
        self._runner.launch_decode(self._streams, self._state, self._sampler, bucket.batch, bucket.outputs)
        backed_up, durable = self._swap.backup(plan, len(requests))
        results = self._results[self._number % len(self._results)]
        compute.launch("download", partial(results.download, bucket.outputs, self._state if count else None))
        sampled = compute.record("sampled")
        self._launched.append(_Launched(requests, positions, sampled, results, count, now_s))
        self._backed_up.append(backed_up)
        self._undurable.append((durable, requests, positions))
        self._number += 1
        for request in requests:
            request.position += 1

    def read(self) -> StepTokens:
        """The oldest step in flight. Blocks the host until its tokens are there."""
        step = self._launched.popleft()
        step.sampled.wait()
        tokens = step.results.tokens[: len(step.requests)].tolist()
        counts = step.results.counts.tolist() if step.counted else None
        return StepTokens(step.requests, step.positions, tokens, counts, step.at_s)

    def note_durable(self) -> Iterator[RunningRequest]:
        """Raise `durable_rows` as far as completions have been observed; yields the requests concerned."""
        while self._undurable and self._undurable[0][0].done():
            _, requests, positions = self._undurable.popleft()
            for request, position in zip(requests, positions, strict=True):
                request.durable_rows = position + 1
                yield request

    def wait_backed_up(self) -> None:
        """What is launched on `compute` from now on finds every row of the steps so far in host memory (I3)."""
        if self._backed_up:
            self._streams.compute.wait(self._backed_up[-1])

    def _upload(self, bucket: _Bucket, requests: list[RunningRequest], positions: list[int]) -> None:
        inputs = bucket.ring.next()
        inputs.fill(
            [request.seat for request in requests],
            [position + 1 for position in positions],
            [request.next_input() for request in requests],
        )
        self._streams.compute.launch("upload", partial(inputs.upload, bucket.batch))
        bucket.ring.launched(self._streams.compute.record("inputs_consumed"))


def batch_sizes(seats: int, *, deterministic: bool) -> list[int]:
    """Padded batch sizes: powers of two up to the seats, or the seats alone."""
    return sorted({seats} if deterministic else {min(1 << power, seats) for power in range(seats.bit_length() + 1)})

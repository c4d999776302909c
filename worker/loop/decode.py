"""Decode steps: launched one ahead of those that are read, at fixed addresses, replayed from graphs on a GPU.

One step n of b requests, padded to a bucket of B rows:

    compute   upload inputs · wait backed_up of step n-T · begin_step · the runner's operations · download results
    backup    wait row_written · copy the new rows by the step's BackupPlan · backed_up, durable

Everything a step touches is allocated once per bucket, so that what the runner launches can be captured in a graph and
replayed: between steps only the inputs, the backup plan's place in its ring and the results' place change, and all
three are outside of it. `warm_up` runs each bucket on padding, so that scratch memory, compiled kernels and library
workspaces exist, and then captures it, the largest first: the memory of its graph serves the others. In deterministic
mode there is one bucket, of all seats. Where requests of a lost worker wait, steps begin without graphs, which are
captured one by one between steps (`capture_next`), behind the first; until then the same operations are launched. The
graph of a bucket that several steps in a row have used comes first, since these requests repeat up to a page of steps
before they have new tokens.

What was launched and not yet read, or not yet seen durable, is kept here with the requests it concerns. How many rows
a step takes of a request, and which of them hold, is said by acceptance.py; T is StepRows.backup_steps there.

The device's part of each step is timed, for those who pace prompts. In one step of TIMED_EVERY each swap-in is timed
too, and it stands for as many. Where there are graphs, such a step replays a second one, captured with timing events as
nodes.

A step with a request that adjusts its logits (worker/runners/logits.py) or asks for log-probabilities
(worker/runners/logprobs.py) replays a graph of its forward pass alone, and launches its draws behind it one by one. All
other steps are one graph, draws included. With a request that has a grammar the draws are launched later, by `draw`:
its mask depends on the token of the step before, which is read meanwhile. A row whose mask is late draws nothing, and
its step is launched again. What drafts follow such draws with is a graph of its own: ranks of a group exchange in it,
and what a rank exchanges in a graph must meet a graph on the others, since NCCL may use other buffers there.

Rejected: timing events in every step's graph (a microsecond or two each, two per layer); begin_step and the upload
inside the graph (a graph for each of the T backup plans), and the backup in it (its fences lie between replays, since
step n+T waits for them).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Final

import torch

from kernels.begin_step import begin_step
from kernels.state import BackupPlan, DeviceState
from protocol.arrays import Int32Array
from protocol.errors import InternalError
from protocol.logprobs import ROW_WORDS_MAX
from worker.device.pinned import host_tensor
from worker.device.step_rows import StepRows
from worker.loop.acceptance import StepProgress, drafts_in_step
from worker.loop.batch import RunningRequest
from worker.loop.draft_length import StepSeen
from worker.loop.drafting import COUNTS, DraftInputs, DraftSeats, DraftStep
from worker.loop.inputs import RING_BUFFERS, Ring, StepInputs
from worker.loop.recording import SelectionRecorder
from worker.loop.swap import Swap
from worker.loop.swap_counts import Int64s
from worker.runners.adjust import Adjust
from worker.runners.base import Runner, SamplerState, StepOutputs
from worker.runners.logprobs import allocate_rows
from worker.streams import Fence, Streams
from worker.streams.fences import Spent

#: Steps of which one is timed.
TIMED_EVERY: Final = 64
#: Steps in a row of one bucket for which its graph is captured ahead of others.
STEPS_ALIKE: Final = 4


class _Bucket:
    """What steps of one padded size use: the batch, its inputs' ring, backup plans of the last T steps, outputs."""

    def __init__(
        self,
        seats: int,
        plans: int,
        state: DeviceState,
        outputs: StepOutputs,
        logprobs: torch.Tensor,
        drafting: DraftSeats | None,
        window: int,
        draft_tokens: int,
    ) -> None:
        places, device, rows = state.geometry.places, state.rows.device, len(outputs.tokens)
        self.seats, self.draft_tokens = seats, draft_tokens
        self.drafts: DraftStep | None = None
        self.ring: Ring[StepInputs] | Ring[DraftInputs]
        if drafting is None:
            self.inputs = torch.zeros(3 * rows + 1, dtype=torch.int32, device=device)
            self.batch = StepInputs.batch(self.inputs, places)
            self.ring = Ring([StepInputs(rows, device) for _ in range(RING_BUFFERS)])
        else:
            self.drafts = DraftStep(drafting, seats, window, draft_tokens)
            self.inputs, self.batch = self.drafts.inputs, self.drafts.batch
            self.ring = Ring([DraftInputs(seats, window, device) for _ in range(RING_BUFFERS)])
        self.plans = [BackupPlan.allocate(rows, places, device) for _ in range(plans)]
        self.outputs = outputs
        self.outputs_with_logprobs = replace(outputs, logprobs=logprobs[:rows])
        self.replay: Callable[[], object] | None = None  # what the runner launches, as one operation on compute
        self.timed_replay: Callable[[], object] | None = None  # likewise, with each swap-in timed
        self.forward: Callable[[], object] | None = None  # without the draws
        self.timed_forward: Callable[[], object] | None = None
        self.begin: Callable[[], object] | None = None  # of a step that drafts: what begin_step reads
        self.verify: Callable[[], object] | None = None  # behind draws: which rows hold, and the next drafts


class _Results:
    """Host memory that a step's results are downloaded to; logits when they are kept."""

    def __init__(self, state: DeviceState, vocab: int) -> None:
        device = state.rows.device
        rows = state.seats * state.seat_rows
        self.tokens = host_tensor(rows, dtype=torch.int32, device=device, fill=-1)
        self.drafts = host_tensor(len(COUNTS) * state.seats, dtype=torch.int32, device=device)
        self.counts = host_tensor(2, state.geometry.selections, state.seats, dtype=torch.int64, device=device)
        self.logits = host_tensor(rows, vocab, dtype=torch.float32, device=device)
        self.logprobs = host_tensor(rows, ROW_WORDS_MAX, dtype=torch.int32, device=device)

    def download(self, outputs: StepOutputs, state: DeviceState | None, drafts: torch.Tensor | None) -> None:
        """Operation: keep tokens, logits and log-probabilities, the hits and misses of every seat when `state` is
        given, and what a step that drafts counted."""
        rows = len(outputs.tokens)
        if drafts is not None:
            self.drafts[: drafts.numel()].copy_(drafts.flatten(), non_blocking=True)
        self.tokens[:rows].copy_(outputs.tokens, non_blocking=True)
        if outputs.logits is not None:
            self.logits[:rows].copy_(outputs.logits, non_blocking=True)
        if outputs.logprobs is not None:
            self.logprobs[:rows].copy_(outputs.logprobs, non_blocking=True)
        if state is not None:
            self.counts[0].copy_(state.hits, non_blocking=True)
            self.counts[1].copy_(state.misses, non_blocking=True)


@dataclass(slots=True)
class _Launched:
    requests: list[RunningRequest]
    progress: StepProgress
    sampled: Fence
    results: _Results
    counted: bool
    has_logprobs: bool
    number: int
    at_s: float
    undrawn: Collection[RunningRequest] = ()
    seats: int = 0  # padded
    draft_tokens: int = 0
    is_alone: bool = True


@dataclass(slots=True)
class _Begun:
    """A step whose draws were not launched yet."""

    bucket: _Bucket
    outputs: StepOutputs
    adjust: Adjust | None
    requests: list[RunningRequest]
    progress: StepProgress
    counted: bool
    number: int
    at_s: float
    is_alone: bool
    undrawn: list[RunningRequest] = field(default_factory=list)


@dataclass(slots=True)
class StepTokens:
    """A step that was read: requests, the first row that each wrote, the tokens that its rows drew which hold; if asked
    for, `counts` int64[2, G, S], hits and misses by index group and seat. `undrawn` drew no token. `drafts`, of a step
    that drafts: of each request, those verified, and of these those that hold. It has `seats` padded seats, and
    `draft_tokens` of each request; `is_alone`: no prompt was launched beside it, nor before it was read.

    `logits` float32[requests, vocab] if they are kept, `logprobs` int32[requests, ROW_WORDS_MAX] if a request asks for
    them: true until as many steps have been launched as are in flight.
    """

    requests: list[RunningRequest]
    positions: list[int]
    tokens: list[list[int]]
    counts: Int64s | None
    launched_s: float
    logits: torch.Tensor
    logprobs: Int32Array | None
    undrawn: Collection[RunningRequest] = ()
    drafts: Sequence[tuple[int, int]] = ()
    seats: int = 0
    draft_tokens: int = 0
    is_alone: bool = True

    def rows(self, number: int) -> tuple[bytes, ...]:
        """Log-probabilities of the tokens of a request, as far as it asks for them; none where it does not."""
        words = self.requests[number].logprob_words
        return (self.logprobs[number, :words].tobytes(),) if self.logprobs is not None and words else ()


@dataclass(frozen=True)
class _Capture:
    """A graph that is to be captured: `name` is its attribute of the bucket."""

    bucket: _Bucket
    name: str
    launch: Callable[[], None]

    @property
    def is_timed(self) -> bool:
        return self.name.startswith("timed")


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
        rows: StepRows,
        drafting: DraftSeats | None = None,
        lookahead: int,
        keep_logits: bool = False,
        timed_every: int = TIMED_EVERY,
        stepped: Spent | None = None,
        recorder: SelectionRecorder | None = None,
    ) -> None:
        """`timed_every` 0: no swap-in is timed. `stepped` is told how long the device took for each step. `recorder` is
        told by the runner what its steps select."""
        self._runner = runner
        self._streams = streams
        self._state = state
        self._sampler = sampler
        self._swap = swap
        self._recorder = recorder
        vocab, device = runner.info.vocab_size, state.rows.device
        logprobs = allocate_rows(rows.rows * max(buckets), device)
        window = rows.window_tokens(lookahead)
        self._buckets = [
            _Bucket(
                size,
                rows.backup_steps(state.tail_slots),
                state,
                StepOutputs.allocate((1 + draft_tokens) * size, vocab, keep_logits=keep_logits, device=device),
                logprobs,
                drafting,
                window,
                draft_tokens,
            )
            for draft_tokens, size in product(rows.choices, sorted(buckets))
        ]
        self._backup_steps = rows.backup_steps(state.tail_slots)
        self._seat_rows, self._draft_tokens = rows.rows, rows.draft_tokens
        self._results = [_Results(state, vocab if keep_logits else 0) for _ in range(lookahead + 1)]
        self._timed_every = timed_every
        self._stepped = stepped
        self._counters = swap.counters
        self._number = 0
        self._launched: deque[_Launched] = deque()
        self._begun: _Begun | None = None
        self._uncaptured: deque[_Capture] = deque()
        self._last_bucket: _Bucket | None = None
        self._steps_alike = 0
        self._backed_up: deque[Fence] = deque()
        self._undurable: deque[tuple[Fence, list[RunningRequest], StepProgress]] = deque()

    @property
    def in_flight(self) -> int:
        """Steps launched with their draws and not read; at most lookahead + 1."""
        return len(self._launched)

    @property
    def settled(self) -> bool:
        """Whether everything launched was read and seen durable."""
        return not self._launched and not self._undurable and self._begun is None

    def warm_up(self, *, graphs: bool, later: bool = False, is_warm: bool = False) -> None:
        """Run each bucket once on padding alone and, where there are graphs and if asked for, capture it. Blocks.

        `later`: leave captures to `capture_next`. `is_warm`: the runner has run batches of these sizes in this process.
        """
        for bucket in sorted(self._buckets, key=lambda it: -len(it.outputs.tokens)):
            if not is_warm:
                self._run_padding(bucket)
            if graphs:
                self._uncaptured += self._captures_of(bucket)
            while not later and self._uncaptured:
                self.capture_next()

    def _run_padding(self, bucket: _Bucket) -> None:
        compute = self._streams.compute
        self._upload(bucket, [])
        compute.launch("begin step", partial(begin_step, self._state, bucket.batch, bucket.plans[0]))
        self._launch_runner(bucket)
        compute.record("sampled").wait()

    def _captures_of(self, bucket: _Bucket) -> Iterator[_Capture]:
        """The graphs of a bucket, those of most steps first."""
        yield _Capture(bucket, "replay", partial(self._launch_runner, bucket))
        yield _Capture(bucket, "forward", partial(self._launch_forward, bucket))
        if bucket.drafts is not None:
            yield _Capture(bucket, "begin", bucket.drafts.launch_begin)
            yield _Capture(bucket, "verify", partial(bucket.drafts.launch_verify, bucket.outputs))
        if self._timed_every:
            yield _Capture(bucket, "timed_replay", partial(self._launch_runner, bucket))
            yield _Capture(bucket, "timed_forward", partial(self._launch_forward, bucket))

    @property
    def uncaptured(self) -> int:
        """Graphs that `capture_next` is to capture."""
        return len(self._uncaptured)

    @property
    def may_capture(self) -> bool:
        """Return whether a graph is left to be captured, and this is the moment: behind a step, all draws of which have
        been launched. The first step of a thread makes what libraries hold for each thread, as a handle of cuBLAS,
        which nothing may make in a capture."""
        return bool(self._uncaptured) and self._number > 0 and self._begun is None

    @property
    def steps(self) -> int:
        """Steps begun since the start."""
        return self._number

    @property
    def lacks_graph(self) -> bool:
        """Return whether the last STEPS_ALIKE steps at least were of one bucket whose graph is left to be captured."""
        return self._steps_alike >= STEPS_ALIKE and self._wanted() is not None

    def _wanted(self) -> _Capture | None:
        bucket = self._last_bucket
        return next((one for one in self._uncaptured if one.bucket is bucket and one.name == "replay"), None)

    def capture_next(self) -> None:
        """Capture the graph that the last step lacked, or the next one, between two steps. Blocks until the device is
        idle."""
        capture = self._wanted() or self._uncaptured[0]
        self._uncaptured.remove(capture)
        with self._timing() if capture.is_timed else nullcontext():
            setattr(capture.bucket, capture.name, self._streams.capture(capture.launch))

    @property
    def batch_sizes(self) -> list[int]:
        """What batches are padded to, ascending."""
        return [bucket.seats for bucket in self._buckets if bucket.draft_tokens == self._draft_tokens]

    def padded(self, seats: int) -> int:
        """The batch size that a step of so many seats is padded to."""
        return next(size for size in self.batch_sizes if size >= seats)

    def launch(
        self,
        requests: list[RunningRequest],
        now_s: float,
        *,
        count: bool = False,
        rows: int = 0,
        draft_tokens: int | None = None,
        is_alone: bool = True,
    ) -> None:
        """Launch one step of `requests`, each of which has memory for its next row, and advance their positions.

        It is padded to `rows` at least. With a grammar in it, `draw` must follow before the next. `draft_tokens` is one
        of the choices of its StepRows, by default the most; `is_alone` as StepTokens has it.
        """
        drafts, seats = self._draft_tokens if draft_tokens is None else draft_tokens, max(rows, len(requests))
        bucket = next(it for it in self._buckets if it.draft_tokens == drafts and it.seats >= seats)
        asking = [request for request in requests if request.adjust is not None or request.logprob_words]
        adjust = Adjust.together(request.adjust for request in asking)
        has_logprobs = any(request.logprob_words for request in asking)
        outputs = bucket.outputs_with_logprobs if has_logprobs else bucket.outputs
        compute = self._streams.compute
        self._upload(bucket, requests)
        if len(self._backed_up) == self._backup_steps:
            compute.wait(self._backed_up.popleft())
        plan = bucket.plans[self._number % len(bucket.plans)]
        compute.launch("begin step", partial(begin_step, self._state, bucket.batch, plan))
        is_timed = self._timed_every > 0 and self._number % self._timed_every == self._timed_every - 1
        progress = StepProgress([request.progress for request in requests], 1 + drafts)
        begun = _Begun(bucket, outputs, adjust, requests, progress, count, self._number, now_s, is_alone)
        draws_later = adjust is not None and adjust.grammar
        if draws_later:
            self._begun = begun
            self._launch_forward_of(bucket, is_timed=is_timed)
        else:
            self._launch_bucket(begun, is_timed=is_timed)
        self._back_up(plan, requests, progress)
        self._number += 1
        self._steps_alike = self._steps_alike + 1 if bucket is self._last_bucket else 1
        self._last_bucket = bucket
        if not draws_later:
            self._download(begun)

    def _back_up(self, plan: BackupPlan, requests: list[RunningRequest], progress: StepProgress) -> None:
        backed_up, durable = self._swap.backup(plan, len(requests))
        self._backed_up.append(backed_up)
        self._undurable.append((durable, requests, progress))

    def awaits_drafts(self, request: RunningRequest) -> bool:
        """Whether operations on its memory are to be launched yet, behind the draws of the step launched last."""
        return self._begun is not None and self._begun.bucket.drafts is not None and request in self._begun.requests

    def withdraw(self, request: RunningRequest) -> None:
        """`request` draws nothing in the step whose draws are to come: its mask is late. The step is launched again."""
        assert self._begun is not None
        self._begun.progress.withdraw(self._begun.requests.index(request))
        self._begun.undrawn.append(request)

    def draw(self, mask_ready: Fence) -> None:
        """Launch the draws of the step launched last, behind `mask_ready`."""
        begun, self._begun = self._begun, None
        assert begun is not None
        self._streams.compute.wait(mask_ready)
        self._launch_draws(begun.bucket, begun.outputs, begun.adjust)
        if begun.bucket.drafts is not None:  # the draft layer's rows follow the draws
            plan = begun.bucket.plans[begun.number % len(begun.bucket.plans)]
            self._backed_up.pop()
            _, requests, progress = self._undurable.pop()
            self._back_up(plan, requests, progress)
        self._download(begun)

    def _download(self, begun: _Begun) -> None:
        compute, number, requests = self._streams.compute, begun.number, begun.requests
        results = self._results[number % len(self._results)]
        counted = self._state if begun.counted else None
        drafts = begun.bucket.drafts.counts if begun.bucket.drafts is not None else None
        compute.launch("download", partial(results.download, begun.outputs, counted, drafts))
        if self._recorder is not None:
            compute.launch("download selections", partial(self._recorder.download, number, len(requests)))
        sampled = compute.record("sampled")
        has_logprobs = begun.outputs.logprobs is not None
        self._launched.append(
            _Launched(
                requests,
                begun.progress,
                sampled,
                results,
                begun.counted,
                has_logprobs,
                number,
                begun.at_s,
                begun.undrawn,
                begun.bucket.seats,
                begun.bucket.draft_tokens,
                begun.is_alone,
            )
        )

    def read(self) -> StepTokens:
        """The oldest step in flight. Blocks the host until its tokens are there."""
        step = self._launched.popleft()
        step.sampled.wait()
        accepted, drafts = self._accepted(step)
        positions = step.progress.read(accepted)
        if self._recorder is not None:
            placements = [request.placement for request in step.requests]
            self._recorder.take(step.number, placements, [position + 1 for position in positions])
        rows = 1 + step.draft_tokens
        by_seat = step.results.tokens[: rows * step.seats].view(rows, -1).T
        tokens: list[list[int]] = by_seat[: len(step.requests)].tolist()
        if self._seat_rows > 1 or step.undrawn:
            tokens = [row[:count] for row, count in zip(tokens, accepted, strict=True)]
        counts = step.results.counts.numpy().copy() if step.counted else None
        logits = step.results.logits[: len(step.requests)]
        logprobs = step.results.logprobs[: len(step.requests)].numpy() if step.has_logprobs else None
        return StepTokens(
            *(step.requests, positions, tokens, counts, step.at_s, logits, logprobs, step.undrawn, drafts),
            step.seats,
            step.draft_tokens,
            is_alone=step.is_alone,
        )

    def _accepted(self, step: _Launched) -> tuple[list[int], list[tuple[int, int]]]:
        """Of each request, rows that hold; and StepTokens.drafts."""
        if self._seat_rows == 1:
            undrawn = step.undrawn
            return [int(it not in undrawn) for it in step.requests] if undrawn else [1] * len(step.requests), []
        counted = step.results.drafts[: len(COUNTS) * step.seats].view(len(COUNTS), -1)
        counts: list[list[int]] = counted[:, : len(step.requests)].tolist()
        accepted, drafted, right = counts
        for request, count in zip(step.requests, accepted, strict=True):
            if (count == 0) != (request in step.undrawn) and not request.is_leaving:
                raise InternalError("a step has no row that holds", field="placement", value=request.placement)
        for numbers in zip(accepted, drafted, right, strict=True):
            verified, held = drafts_in_step(*numbers)
            self._counters.drafted.update(verified)
            self._counters.accepted.update(held)
        return accepted, list(zip(drafted, right, strict=True))

    def note_durable(self) -> Iterator[RunningRequest]:
        """Raise `durable_rows` as far as completions have been observed; yields the requests of those steps."""
        while self._undurable and self._undurable[0][0].done():
            _, requests, progress = self._undurable.popleft()
            progress.note_durable()
            yield from requests

    def wait_backed_up(self) -> None:
        """What is launched on `compute` from now on finds every row of the steps so far in host memory (I3)."""
        if self._backed_up:
            self._streams.compute.wait(self._backed_up[-1])

    def _launch_bucket(self, begun: _Begun, *, is_timed: bool) -> None:
        """A step in one graph, where there are graphs; with the draws behind it where rows adjust their logits or ask
        for log-probabilities."""
        bucket = begun.bucket
        if begun.adjust is None and begun.outputs.logprobs is None:
            self._launch_part(bucket.timed_replay if is_timed else bucket.replay, self._launch_runner, bucket, is_timed)
            return
        self._launch_forward_of(bucket, is_timed=is_timed)
        self._launch_draws(begun.bucket, begun.outputs, begun.adjust)

    def _launch_forward_of(self, bucket: _Bucket, *, is_timed: bool) -> None:
        self._launch_part(bucket.timed_forward if is_timed else bucket.forward, self._launch_forward, bucket, is_timed)

    def _launch_draws(self, bucket: _Bucket, outputs: StepOutputs, adjust: Adjust | None) -> None:
        """Behind a forward pass that was launched by itself."""
        self._runner.launch_sample(self._streams, self._sampler, bucket.batch, outputs, adjust)
        if bucket.verify is not None:
            self._streams.compute.launch("replay", bucket.verify)
        elif bucket.drafts is not None:
            bucket.drafts.launch_verify(outputs)

    def _launch_part(
        self,
        replay: Callable[[], object] | None,
        launch: Callable[[_Bucket], None],
        bucket: _Bucket,
        is_timed: bool,
    ) -> None:
        compute = self._streams.compute
        spent = partial(self._spent, is_timed) if is_timed or self._stepped is not None else None
        if replay is not None:
            compute.launch("replay", replay if spent is None else self._streams.timed(replay, spent))
        elif spent is None:
            launch(bucket)
        else:
            with self._timing() if is_timed else nullcontext():
                self._streams.timed(partial(launch, bucket), spent)()

    def _spent(self, is_timed: bool, seconds: float) -> None:
        """A step took `seconds` on the device; one that is timed stands for several."""
        if is_timed:
            self._counters.computed(self._timed_every, seconds)
        if self._stepped is not None:
            self._stepped(seconds)

    @contextmanager
    def _timing(self) -> Iterator[None]:
        """Swap-ins that are launched within are timed."""
        self._streams.layer_spent = partial(self._counters.swap.spent, self._timed_every)
        try:
            yield
        finally:
            self._streams.layer_spent = None

    def _launch_runner(self, bucket: _Bucket) -> None:
        self._launch_forward(bucket)
        self._runner.launch_sample(self._streams, self._sampler, bucket.batch, bucket.outputs, None)
        if bucket.drafts is not None:
            bucket.drafts.launch_verify(bucket.outputs)

    def _launch_forward(self, bucket: _Bucket) -> None:
        self._runner.launch_forward(self._streams, self._state, self._sampler, bucket.batch)

    def _upload(self, bucket: _Bucket, requests: list[RunningRequest]) -> None:
        inputs = bucket.ring.next()
        inputs.fill(requests)
        self._streams.compute.launch("upload", partial(inputs.upload, bucket.inputs))
        bucket.ring.launched(self._streams.compute.record("inputs_consumed"))
        if bucket.begin is not None:
            self._streams.compute.launch("replay", bucket.begin)
        elif bucket.drafts is not None:
            bucket.drafts.launch_begin()


def step_seen(step: StepTokens, seconds: float) -> StepSeen:
    """What the choice of the next drafts hears of a step. Of a request that read known tokens, the rows that hold say
    nothing of drafts: it counts as one whose rows are those of plain decoding."""
    held = [
        right if len(tokens) == 1 + right else 0 for tokens, (_, right) in zip(step.tokens, step.drafts, strict=True)
    ]
    holding = [sum(right >= depth for right in held) for depth in range(1, 1 + step.draft_tokens)]
    requests, is_measured = len(step.requests), step.is_alone and not step.undrawn
    return StepSeen(
        step.seats, step.draft_tokens, requests, requests + sum(held), holding, seconds if is_measured else None
    )


def batch_sizes(seats: int, *, deterministic: bool) -> list[int]:
    """Padded batch sizes: powers of two up to the seats, or the seats alone."""
    return sorted({seats} if deterministic else {min(1 << power, seats) for power in range(seats.bit_length() + 1)})

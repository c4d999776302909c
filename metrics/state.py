"""The numbers that processes count as they work: plain structs, no Prometheus object in a hot path.

Each struct has one writing thread (named below); the exporter's thread reads it at scrape time. Reads may see one
event half counted (a histogram's sum without its bucket), never a torn number: each field is one Python object.
Totals only ever grow; what is true now (requests by state, pages by state) is read from its owner at scrape time and
has no copy here.

    struct             writer                    readers
    WorkerCounters     executor thread           worker collector, link's heartbeats
    SwapTotals         executor thread           worker collector
    FenceWaits         executor thread           worker collector
    TransferCounters   thread of that end        worker collector
    SpanCounters       see there                 coordinator and front's collectors
    LinkCounters       the worker's trio thread  worker collector
    CoordinatorCounters the coordinator's thread  coordinator collector
    HttpCounters       the front's trio thread   front's collector
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from time import monotonic
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from basics.tracing.spans import SpanCounters

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

#: Decode steps: 0.2 ms (small GPU batch) to 5 s (a CPU).
STEP_BOUNDS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
#: Staging and prefill of one prompt.
STAGE_BOUNDS_S: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
#: Command round trips over a local socket.
COMMAND_BOUNDS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
#: Answers over HTTP and their first tokens: 5 ms to ten minutes.
ANSWER_BOUNDS_S: Final = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
#: Group commits: 0.1 ms (a disk with a safe cache) to 5 s (one that is dying).
COMMIT_BOUNDS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
#: An executor whose loop has not turned for this long hangs; one unit of a prompt of a large model on a CPU takes less.
EXECUTOR_STALE_S: Final = 30.0
#: Waits of requests for a place, for their first token, for operators: 5 ms to an hour.
WAIT_BOUNDS_S: Final = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
#: Between two tokens of one request: decode steps, and the pauses of a retraction.
TOKEN_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
#: Gaps of decoding requests beside prompts: 1 ms to 6 s. Bounds are as far apart as a gap may be from its target before
#: HiSparseGapTargetMissed fires, so that the p99 that Prometheus estimates of gaps within the target never does.
GAP_FACTOR: Final = 1.25
GAP_BOUNDS_S: Final = tuple(float(f"{0.001 * GAP_FACTOR**power:.4g}") for power in range(40))
#: Ages of waiting prompts by which these are counted: those that wait longer.
PROMPT_AGES_S: Final = (0, 1, 10, 60)
#: Host pages live as long as their requests: seconds to days.
PAGE_BOUNDS_S: Final = (0.1, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)
#: How a context that its hot buffer cannot hold comes back: with the rows of its last top-k; with none, since it was
#: not known; with none, since it could not be read.
WARM_STARTS: Final = ("warm", "cold", "refused")
#: A moving average over about the last 16 steps.
STEP_AVERAGE_WEIGHT: Final = 1 / 16


class Buckets:
    """A histogram of fixed bounds: `counts[i]` values at most `bounds[i]` (and above the one before), the last all
    beyond. `observe` costs about 0.2 us."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: FloatArray, times: IntArray | None = None) -> None:
        """Each of `values`, as many `times` as its element says, or once: some 10 us and 30 ns per value."""
        if not len(values):
            return
        places = np.searchsorted(self.bounds, values)
        added = np.bincount(places, weights=times, minlength=len(self.counts)).astype(np.int64).tolist()
        self.counts[:] = map(add, self.counts, added)
        self.total += float(values.sum() if times is None else values @ times)


class FenceWaits:
    """How long consumers waited for fences, by the fence's name: `seconds` in `samples` waits. Host waits are all
    measured; waits between streams on a sample, of which each stands for `weight` waits; those inside a captured graph
    not at all."""

    __slots__ = ("samples", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.samples: dict[str, int] = {}

    def observe(self, fence: str, seconds: float, weight: int = 1) -> None:
        self.seconds[fence] = self.seconds.get(fence, 0.0) + weight * seconds
        self.samples[fence] = self.samples.get(fence, 0) + weight


class Busy:
    """Seconds that work of one kind took. `spent` is what the work is launched with: see worker.streams.Streams."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def spent(self, seconds: float) -> None:
        self.seconds += seconds


class SwapTotals:
    """Swap-in by layer. Layers of one index group share hits, misses and evictions, which are kept by selection, group
    * heads + head: int64 [G * heads] each. `seconds` float [L] are of timed steps, each of which stands for `weight`
    steps; of the first layer of a group in the way of the step, of the others beside it."""

    __slots__ = ("evictions", "group_of_layer", "heads", "hits", "misses", "row_bytes", "seconds")

    def __init__(self, group_of_layer: Sequence[int] = (), row_bytes: int = 0, heads: int = 1) -> None:
        """`group_of_layer` is below 0 for layers that select nothing. What a head selects has `row_bytes`."""
        groups = max(group_of_layer, default=-1) + 1
        self.group_of_layer, self.heads = tuple(group_of_layer), heads
        self.row_bytes = row_bytes
        self.hits, self.misses, self.evictions = (np.zeros(groups * heads, np.int64) for _ in range(3))
        self.seconds = [0.0] * len(self.group_of_layer)

    @property
    def selecting(self) -> list[int]:
        """Return the numbers of the layers that select."""
        return [layer for layer, group in enumerate(self.group_of_layer) if group >= 0]

    def by_layer(self, counts: IntArray) -> list[int]:
        """Return, for each of `selecting`, the sum of `counts` int64 [G * heads] over the heads of its group."""
        of_group: IntArray = counts.reshape(-1, self.heads).sum(1)
        return [int(of_group[self.group_of_layer[layer]]) for layer in self.selecting]

    @property
    def totals(self) -> tuple[int, int, int]:
        """Hits, misses and bytes loaded by all layers."""
        return int(self.hits.sum()), int(self.misses.sum()), self.loaded_bytes

    @property
    def loaded_bytes(self) -> int:
        """Of all layers, from the host."""
        return self.row_bytes * sum(self.by_layer(self.misses))

    @property
    def waited_seconds(self) -> float:
        """Of the first layer of each group."""
        groups = self.group_of_layer
        return sum(self.seconds[layer] for layer in self.selecting if groups.index(groups[layer]) == layer)

    def spent(self, weight: int, layer: int, seconds: float) -> None:
        self.seconds[layer] += weight * seconds


@dataclass(frozen=True)
class MemoryUse:
    """Units of 64 tokens of one device memory, and the bytes of a unit; read from the allocator at scrape time."""

    used: int
    total: int
    unit_bytes: int


@dataclass(slots=True)
class WorkerCounters:
    """What the executor did. `beats` grows whenever its loop turns, last at `beat_at` (time.monotonic); `step_us` is a
    moving average of decode steps. `prompts_since`: when each prompt was admitted that waits or is under way
    (time.monotonic), replaced as a whole."""

    beats: int = 0
    awaits: str = ""  # worker of its group that the loop waits for
    beat_at: float = field(default_factory=monotonic)
    steps: int = 0
    step_us: float = 0.0
    step_requests: int = 0  # of all steps together
    alone_steps: int = 0  # of `steps`, those that no prompt ran beside; their seconds and requests
    alone_s: float = 0.0
    alone_requests: int = 0
    step_s: Buckets = field(default_factory=lambda: Buckets(STEP_BOUNDS_S))
    prefill_s: Buckets = field(default_factory=lambda: Buckets(STAGE_BOUNDS_S))
    stage_s: Buckets = field(default_factory=lambda: Buckets(STAGE_BOUNDS_S))
    load_s: Buckets = field(default_factory=lambda: Buckets(STAGE_BOUNDS_S))
    prompt_tokens: int = 0  # of whole prompts
    prompt_pass_tokens: int = 0  # of passes that ended
    prompt_units: int = 0  # one layer over a block of a pass each
    split_units: int = 0  # of them, those that all ranks of the group share
    prompt_s: float = 0.0  # of units, on the device
    prompts_since: tuple[float, ...] = ()
    gap_s: Buckets = field(default_factory=lambda: Buckets(GAP_BOUNDS_S))  # between two steps with units between them
    gap_target_s: float = 0.0  # 0: unbounded
    gap_target_too_small: bool = False  # a target that was set, and is below a plain step
    plain_step_s: float = 0.0  # a decode step without units before it; 0: none was measured
    tokens: int = 0
    surplus_tokens: int = 0  # decoded past a request's end, discarded
    late_masks: int = 0  # rows of steps that drew nothing, since what their grammars allow was not known in time
    drafted: Counter[int] = field(default_factory=Counter)  # drafts that steps verified, by row of the step
    accepted: Counter[int] = field(default_factory=Counter)  # of them, those that the model drew too
    draft_tokens: int = 0  # drafted for the step launched last
    draft_switches: int = 0  # times that another number was chosen; trials are none
    staged_bytes: int = 0  # device to host, prompts
    backed_up_bytes: int = 0  # device to host, decoded rows
    preloaded_bytes: int = 0  # host to device, index keys of prefixes, keys and rows of resumed requests
    refilled_bytes: int = 0  # host to device, earlier rows of prompts for the layer to come
    admitted: int = 0
    released: int = 0
    faulted: int = 0
    parked: int = 0  # times a request ran out of granted pages
    warm_starts: Counter[str] = field(default_factory=Counter)  # by outcome, of WARM_STARTS
    resized: int = 0
    staging: Busy = field(default_factory=Busy)
    backing_up: Busy = field(default_factory=Busy)
    preloading: Busy = field(default_factory=Busy)
    refilling: Busy = field(default_factory=Busy)
    computing_s: float = 0.0  # decode steps on the device, swap-in included; a timed one stands for several
    swap: SwapTotals = field(default_factory=SwapTotals)
    fence_waits: FenceWaits = field(default_factory=FenceWaits)

    def beat(self) -> None:
        """The loop turned, busy or idle. A loop that does not for EXECUTOR_STALE_S hangs."""
        self.beats += 1
        self.beat_at = monotonic()

    @property
    def prompts_waiting(self) -> tuple[int, float]:
        """Prompts that wait or are under way, and the seconds that the oldest has waited."""
        since = self.prompts_since
        return len(since), monotonic() - min(since) if since else 0.0

    @property
    def swapped_bytes(self) -> int:
        """Host to device, misses."""
        return self.swap.loaded_bytes

    @property
    def drafted_tokens(self) -> int:
        """In any place."""
        return self.drafted.total()

    @property
    def accepted_tokens(self) -> int:
        """In any place."""
        return self.accepted.total()

    def computed(self, weight: int, seconds: float) -> None:
        """A timed step kept the device busy for `seconds`; it stands for `weight` steps."""
        self.computing_s += weight * seconds

    def stepped(self, seconds: float, requests: int, *, is_alone: bool = True) -> None:
        """Count one decode step of `requests` that took `seconds`; `is_alone`: no prompt ran beside it."""
        self.steps += 1
        self.step_requests += requests
        if is_alone:
            self.alone_steps += 1
            self.alone_s += seconds
            self.alone_requests += requests
        self.step_s.observe(seconds)
        step_us = seconds * 1e6
        self.step_us += (step_us - self.step_us) * (STEP_AVERAGE_WEIGHT if self.steps > 1 else 1.0)


@dataclass(slots=True)
class TransferCounters:
    """One end of page transfer. `bytes` and `pages` were verified by the receiver; `checksum_seconds` is a sum over the
    threads that verify. The last two are levels."""

    bytes: int = 0
    pages: int = 0
    refused_units: int = 0
    failed_transfers: int = 0
    revoked_transfers: int = 0
    shut_out_senders: int = 0
    unreadable_messages: int = 0
    checksum_seconds: float = 0.0
    open_transfers: int = 0
    in_flight_bytes: int = 0


@dataclass(slots=True)
class LinkCounters:
    """What the link to the coordinator went through. `welcomed` is the only state: 1 while commands are obeyed."""

    welcomed: int = 0
    connects: int = 0
    welcomes: int = 0
    drops: Counter[str] = field(default_factory=Counter)  # by reason
    commands: int = 0
    duplicate_commands: int = 0
    command_gaps: int = 0
    unreadable: int = 0
    reports: int = 0
    replayed_reports: int = 0
    epochs: int = 0


@dataclass(slots=True)
class HttpCounters:
    """What HTTP clients asked the front for. `in_flight` (completions being answered) and `connections` are state."""

    in_flight: int = 0
    connections: int = 0
    connection_ends: Counter[tuple[str]] = field(default_factory=Counter)  # by reason
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (path, status)
    disconnects: int = 0  # clients that left before their answer was complete
    abandoned: int = 0  # requests aborted after their last client left
    answer_s: Buckets = field(default_factory=lambda: Buckets(ANSWER_BOUNDS_S))
    first_token_s: Buckets = field(default_factory=lambda: Buckets(ANSWER_BOUNDS_S))
    spans: SpanCounters = field(default_factory=SpanCounters)


@dataclass(slots=True)
class JournalCounters:
    """What was written down. `written_bytes` are those of the records, without the file's own; `last_error` outlives
    what it was about."""

    commits: int = 0
    records: int = 0
    written_bytes: int = 0
    errors: int = 0
    last_error: str = ""
    commit_s: Buckets = field(default_factory=lambda: Buckets(COMMIT_BOUNDS_S))


@dataclass(slots=True)
class WaitCounters:
    """Seconds that requests waited, and for what; coordinator.state.request and coordinator.tokens.token_times say from
    when to when."""

    queue_s: Buckets = field(default_factory=lambda: Buckets(WAIT_BOUNDS_S))
    retract_s: Buckets = field(default_factory=lambda: Buckets(WAIT_BOUNDS_S))
    hand_over_s: Buckets = field(default_factory=lambda: Buckets(WAIT_BOUNDS_S))
    resume_s: Buckets = field(default_factory=lambda: Buckets(WAIT_BOUNDS_S))
    first_token_s: Buckets = field(default_factory=lambda: Buckets(WAIT_BOUNDS_S))
    token_s: Buckets = field(default_factory=lambda: Buckets(TOKEN_BOUNDS_S))

    def tokens_came(self, first: FloatArray, between: FloatArray, times: IntArray) -> None:
        """Waits for first tokens, and for later ones: each of `between` was that of as many tokens as `times` says."""
        self.first_token_s.observe_all(first)
        self.token_s.observe_all(between, times)


@dataclass(slots=True)
class CoordinatorCounters:
    """What went through the coordinator since it started."""

    submitted: int = 0
    prompt_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by error code
    ended: Counter[str] = field(default_factory=Counter)  # by outcome
    failed: Counter[str] = field(default_factory=Counter)  # by cause
    admissions: int = 0
    prefix_asked_tokens: int = 0  # of prompts admitted to be prefilled, where prefixes are reused
    prefix_tokens: int = 0  # of these: reused, not computed
    prefix_pages_evicted: int = 0
    prefix_pages_evicted_lent: int = 0
    kv_event_batches: int = 0
    kv_event_batches_dropped: int = 0
    retractions: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (mode keep or drop, reason)
    tokens: int = 0
    repeated_tokens: int = 0  # positions already known, dropped (I5)
    deliveries: int = 0
    stalled_deliveries: int = 0  # a client's socket was full; its cursor stayed
    commands: int = 0
    replayed_commands: int = 0
    command_ack_s: Buckets = field(default_factory=lambda: Buckets(COMMAND_BOUNDS_S))
    reports: int = 0
    report_gaps: int = 0
    audits: int = 0  # of one worker each
    audit_differences: Counter[str] = field(default_factory=Counter)  # by kind, each told once
    waits: WaitCounters = field(default_factory=WaitCounters)
    host_page_s: Buckets = field(default_factory=lambda: Buckets(PAGE_BOUNDS_S))  # from taken to free
    dropped_messages: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (socket, reason)
    journal: JournalCounters = field(default_factory=JournalCounters)
    spans: SpanCounters = field(default_factory=SpanCounters)

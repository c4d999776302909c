"""The numbers that processes count as they work: plain structs, no Prometheus object in a hot path.

Each struct has one writing thread (named below); the exporter's thread reads it at scrape time. Reads may see one
event half counted (a histogram's sum without its bucket), never a torn number: each field is one Python object.
Totals only ever grow; what is true now (requests by state, pages by state) is read from its owner at scrape time and
has no copy here.

    struct             writer                    readers
    WorkerCounters     executor thread           worker collector, link's heartbeats
    FenceWaits         executor thread           worker collector
    LinkCounters       the worker's trio thread  worker collector
    CoordinatorCounters the coordinator's thread  coordinator collector
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

#: Decode steps: 0.2 ms (small GPU batch) to 5 s (a CPU).
STEP_BOUNDS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
#: Staging and prefill of one prompt.
STAGE_BOUNDS_S: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
#: Command round trips over a local socket.
COMMAND_BOUNDS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
#: Group commits: 0.1 ms (a disk with a safe cache) to 5 s (one that is dying).
COMMIT_BOUNDS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
#: An executor whose loop has not turned for this long hangs; one prefill chunk of a large model on a CPU takes less.
EXECUTOR_STALE_S: Final = 30.0
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


class FenceWaits:
    """How long consumers waited for fences, by the fence's name: `seconds` in `samples` waits. Host waits are all
    counted, waits between streams on a sample, and those inside a captured graph not at all."""

    __slots__ = ("samples", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.samples: dict[str, int] = {}

    def observe(self, fence: str, seconds: float) -> None:
        self.seconds[fence] = self.seconds.get(fence, 0.0) + seconds
        self.samples[fence] = self.samples.get(fence, 0) + 1


@dataclass(frozen=True)
class MemoryUse:
    """Units of 64 tokens of one device memory, and the bytes of a unit; read from the allocator at scrape time."""

    used: int
    total: int
    unit_bytes: int


@dataclass(slots=True)
class WorkerCounters:
    """What the executor did. `beats` grows whenever its loop turns, last at `beat_at` (time.monotonic); `step_us` is a
    moving average of decode steps."""

    beats: int = 0
    beat_at: float = field(default_factory=monotonic)
    steps: int = 0
    step_us: float = 0.0
    step_s: Buckets = field(default_factory=lambda: Buckets(STEP_BOUNDS_S))
    prefill_s: Buckets = field(default_factory=lambda: Buckets(STAGE_BOUNDS_S))
    stage_s: Buckets = field(default_factory=lambda: Buckets(STAGE_BOUNDS_S))
    prompt_tokens: int = 0
    tokens: int = 0
    surplus_tokens: int = 0  # decoded past a request's end, discarded
    hits: int = 0
    misses: int = 0
    staged_bytes: int = 0  # device to host, prompts
    backed_up_bytes: int = 0  # device to host, decoded rows
    swapped_bytes: int = 0  # host to device, misses
    preloaded_bytes: int = 0  # host to device, index keys and rows of resumed requests
    admitted: int = 0
    released: int = 0
    faulted: int = 0
    parked: int = 0  # times a request ran out of granted pages
    resized: int = 0
    fence_waits: FenceWaits = field(default_factory=FenceWaits)

    def beat(self) -> None:
        """The loop turned, busy or idle. A loop that does not for EXECUTOR_STALE_S hangs."""
        self.beats += 1
        self.beat_at = monotonic()

    def stepped(self, seconds: float) -> None:
        """Count one decode step that took `seconds`."""
        self.steps += 1
        self.step_s.observe(seconds)
        step_us = seconds * 1e6
        self.step_us += (step_us - self.step_us) * (STEP_AVERAGE_WEIGHT if self.steps > 1 else 1.0)


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
class CoordinatorCounters:
    """What went through the coordinator since it started."""

    submitted: int = 0
    prompt_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by error code
    ended: Counter[str] = field(default_factory=Counter)  # by outcome
    admissions: int = 0
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
    dropped_messages: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (socket, reason)
    journal: JournalCounters = field(default_factory=JournalCounters)

"""The table of all fences, and what a stream and a fence are.

Every dependency between two streams is declared once, in FENCES; `record` and `wait` refuse any other. What a fence
need not cover is stream order: a chunk that changes hands on `compute` alone, the steps of one ring on `backup`.

Host memory that operations read when they run (step inputs, results) is ordered by fences too: the host is a consumer
like any stream. The other direction needs none: what the host writes before it launches an operation is seen by it
(`inputs_ready` is launch order).

`swap` and `masks` need no fence to quiesce: whatever they do belongs to a step or a prompt, which `compute` does
not end without it.

A fence lies *inside* a captured graph or *between* its replays. Recorded inside a capture it becomes an edge of the
graph and means nothing outside; recorded before a capture it cannot be waited for inside, since every replay would
have to wait for another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final, Literal, TypeAlias

from metrics.state import FenceWaits
from protocol.errors import InternalError

Placement = Literal["between replays", "inside capture"]
#: An operation, or a part of one.
Work: TypeAlias = Callable[[], object]
#: Told how many seconds some work took, by the thread that launches.
Spent: TypeAlias = Callable[[float], None]

HOST: Final = "host"
STREAM_NAMES: Final = ("compute", "stage", "backup", "swap", "load", "masks", "refill")


class FenceError(InternalError):
    """A fence used against its declaration, or a wait that nothing ends."""


@dataclass(frozen=True)
class FenceSpec:
    """Who records a fence, who may wait for it, what would be wrong without it, and where it lies with graphs."""

    producers: frozenset[str]
    consumers: frozenset[str]
    guards: str
    placement: Placement = "between replays"


def _spec(producers: str, consumers: str, guards: str, placement: Placement = "between replays") -> FenceSpec:
    return FenceSpec(frozenset(producers.split()), frozenset(consumers.split()), guards, placement)


FENCES: Final[dict[str, FenceSpec]] = {
    "inputs_consumed": _spec(
        "compute", "host", "inputs are overwritten only after they were read; few units are ahead"
    ),
    "prefill_written": _spec("compute", "stage", "staging reads slab rows and index keys that prefill has written"),
    "staged": _spec("stage", "host", "decoding reads the prompt's host rows"),
    "slab_staged": _spec(
        "stage",
        "compute refill host",
        "rows are written over those of two layers before or of the pass before, and loaded from host pages",
    ),
    "slab_read": _spec("compute", "refill", "a layer's earlier rows are loaded over those of two layers before"),
    "refilled": _spec("refill", "compute host", "prefill reads a layer's earlier rows, loaded from host pages"),
    "row_written": _spec("compute", "backup", "backup reads the plan, the new row and index key of every layer"),
    "backed_up": _spec("backup", "compute", "a tail slot retires, so swap-in may read its host row; plans are reused"),
    "durable": _spec("backup", "host", "the durable length in reports: only completions that were observed"),
    "preloaded": _spec("load", "compute host", "decoding reads rows that were loaded from host pages"),
    "index_loaded": _spec("load", "compute host", "decoding and prefill read index keys that were loaded likewise"),
    "selected": _spec("compute", "swap", "swap-in reads the top-k of a group", "inside capture"),
    "compressed": _spec("compute", "swap", "a selection on swap reads what projections begin with", "inside capture"),
    "swapped_in": _spec("swap", "compute", "a layer gathers rows that swap-in found or loaded", "inside capture"),
    "prefetched": _spec("swap", "compute", "a shared-index layer gathers rows that replay copied", "inside capture"),
    "normed": _spec("compute", "swap", "shared experts read hidden states behind the attention", "inside capture"),
    "shared": _spec("swap", "compute", "a layer adds what its shared experts gave", "inside capture"),
    "chunk_reclaimed": _spec("compute", "load", "rows are loaded into chunks that launched steps still read"),
    "mask_ready": _spec("masks", "compute", "draws read the masks of this step, of requests with a grammar"),
    "sampled": _spec("compute", "host", "the host reads the tokens of a step"),
    "dealt": _spec("compute", "host", "the host reads which parts a split pass of another rank has"),
    "wishes_gathered": _spec("compute", "host", "the host reads what the ranks of a group wish to run next"),
    "quiesced": _spec(
        "compute stage backup load refill", "host", "memory of a request that left goes to another owner"
    ),
}


class Fence(ABC):
    """One recorded point of one stream. Complete once everything launched on that stream before it has run."""

    name: str

    @abstractmethod
    def done(self) -> bool:
        """Whether the host has seen it complete. FenceError when the host is no consumer of this fence."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until it is complete. FenceError as for `done`, and when nothing completes it in time."""


class Stream(ABC):
    """A FIFO of operations. One thread launches."""

    name: str

    @abstractmethod
    def launch(self, label: str, work: Callable[[], object]) -> None:
        """Queue `work`. It may run now or at any later launch or host sync; what it raises comes out there."""

    @abstractmethod
    def record(self, name: str) -> Fence:
        """Mark the point reached by what was launched so far. FenceError unless FENCES[name] is produced here."""

    @abstractmethod
    def wait(self, fence: Fence) -> None:
        """Hold back what is launched from now on until `fence` is complete. FenceError unless declared for here."""


class Streams(ABC):
    """The streams of one executor. `waits` is what its fences cost, where that can be measured.

    `layer_spent`, while it is set, is told by layer how long the swap-ins take that are launched. `waits_for_peers`:
    what is launched waits for other processes, which may take any time.
    """

    compute: Stream
    stage: Stream
    backup: Stream
    swap: Stream
    load: Stream
    masks: Stream
    refill: Stream

    def __init__(self) -> None:
        self.waits = FenceWaits()
        self.layer_spent: Callable[[int, float], None] | None = None
        self.waits_for_peers = False

    @property
    def all(self) -> tuple[Stream, ...]:
        return (self.compute, self.stage, self.backup, self.swap, self.load, self.masks, self.refill)

    def adopt_thread(self) -> None:
        """Called first in each thread that launches, one thread after another."""
        return

    def capture(self, launch: Callable[[], None]) -> Callable[[], object] | None:
        """Capture into a graph what `launch` launches on `compute` and on streams forked from it and joined again.

        Returns the operation that replays it, to be launched on `compute`; None where there are no graphs, and then
        nothing was launched. FenceError for whatever worker/streams/capture.py forbids.
        """
        del launch
        return None

    def timed(self, work: Work, spent: Spent) -> Work:
        """`work` that tells `spent` how long it took on its stream, now or later."""
        return partial(_run_timed, work, spent)

    def of_layer(self, layer: int, work: Work) -> Work:
        """`work` of a layer's swap-in, timed while `layer_spent` is set."""
        return work if self.layer_spent is None else self.timed(work, partial(self.layer_spent, layer))

    @abstractmethod
    def close(self) -> None:
        """Run everything queued, then refuse use. FenceError when it does not end in time."""

    def drop_graphs(self) -> None:
        """Free what `capture` made, none of which is replayed again. `close` does it, too."""
        return


def _run_timed(work: Work, spent: Spent) -> None:
    began = perf_counter()
    work()
    spent(perf_counter() - began)


def check_record(stream: str, name: str) -> None:
    """FenceError unless FENCES declares that `stream` records `name`."""
    spec = FENCES.get(name)
    if spec is None or stream not in spec.producers:
        raise FenceError(f"fence {name} is not declared to be recorded on {stream}", field="fence", value=name)


def check_wait(consumer: str, name: str) -> None:
    """FenceError unless FENCES declares that `consumer` waits for `name`."""
    if consumer not in FENCES[name].consumers:
        raise FenceError(f"fence {name} is not declared to be waited for by {consumer}", field="fence", value=name)


def check_omitted(names: frozenset[str]) -> None:
    """FenceError when one of the fences to be left out does not exist."""
    unknown = names - FENCES.keys()
    if unknown:
        raise FenceError("no such fence", field="omit", value=",".join(sorted(unknown)))

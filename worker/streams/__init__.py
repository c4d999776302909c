"""Streams and fences: the only way in which memory is touched, and the only order that other code may rely on.

A stream runs its operations one after another; two streams run in any order, except where one waits for a fence that
the other recorded. Streams and fences mean what CUDA's streams and events mean: `launch` queues and returns, `record`
marks the point reached so far, `wait` holds back what is launched after it.

| backend   | runs an operation                                   | finds                                       |
|-----------|-----------------------------------------------------|---------------------------------------------|
| inline    | inside `launch`                                     | nothing: launch order satisfies every fence |
| simulated | at host syncs and launches, any order fences permit | a missing or misplaced fence, as wrong bytes|
| cuda      | on the device; its Python part inside `launch`      | what the device finds                       |

    fences.py      the table of fences, and what the backends implement
    capture.py     the rules of a capture into a graph
    spans.py       how long work takes on a GPU

`omit` names fences whose waits do nothing, on streams and host alike: a mutant, to see that a test would notice.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.errors import ConfigError
from worker.streams.fences import (
    FENCES,
    HOST,
    STREAM_NAMES,
    Fence,
    FenceError,
    FenceSpec,
    Stream,
    Streams,
    check_record,
    check_wait,
)
from worker.streams.inline import InlineStreams
from worker.streams.simulated import QUEUED_MAX, Order, SimulatedStreams

__all__ = [
    "FENCES",
    "HOST",
    "QUEUED_MAX",
    "STREAM_NAMES",
    "Fence",
    "FenceError",
    "FenceSpec",
    "InlineStreams",
    "Order",
    "SimulatedStreams",
    "Stream",
    "Streams",
    "check_record",
    "check_wait",
    "make_streams",
]


def make_streams(
    backend: str = "inline",
    seed: int = 0,
    order: Order = "seeded",
    omit: Iterable[str] = (),
    device: str = "cuda",
) -> Streams:
    """Streams of `backend`. `seed` and `order` concern the simulated one, `omit` that and CUDA, `device` CUDA alone.

    ConfigError for an unknown backend, or for CUDA without a device.
    """
    if backend == "inline":
        return InlineStreams()
    if backend == "simulated":
        return SimulatedStreams(seed, order, frozenset(omit))
    if backend == "cuda":
        from worker.streams.cuda import CudaStreams  # torch's CUDA part, for those who ask for it

        return CudaStreams(device, frozenset(omit))
    raise ConfigError(
        "unknown stream backend", field="worker.stream_backend", value=backend, remedy="use inline, simulated or cuda"
    )

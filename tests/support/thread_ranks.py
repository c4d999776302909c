"""Ranks of a group as threads of this process: collectives between them, and executors turned by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from protocol.settings import WorkerSettings
from tests.support.group_rig import Ask, Requests
from tests.support.worker_rig import Logits, Rig
from worker.group.control import LoopProgress
from worker.runners.load import load_runner
from worker.streams import Streams, make_streams

#: After which a rank that waits for another gives up: the other one has ended.
LIMIT_S = 120.0


@dataclass
class ThreadCollectives:
    """Of one rank. `parts` and `barrier` are those of all ranks."""

    rank: int
    size: int
    parts: list[Tensor]
    barrier: threading.Barrier
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of what this rank gave, call by call

    @classmethod
    def of(cls, size: int) -> list[ThreadCollectives]:
        parts, barrier = [torch.empty(0)] * size, threading.Barrier(size)
        return [cls(rank, size, parts, barrier) for rank in range(size)]

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        self._share(own)
        output.copy_(torch.cat(self.parts).view_as(output))
        self._meet()

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        self._share(parts)
        output.copy_(torch.stack([part[self.rank] for part in self.parts]))
        self._meet()

    def broadcast(self, data: Tensor, source: int) -> None:
        self._share(data)
        if self.rank != source:
            data.copy_(self.parts[source])
        self._meet()

    def _share(self, own: Tensor) -> None:
        self.shapes.append(tuple(own.shape))
        self.parts[self.rank] = own
        self._meet()

    def _meet(self) -> None:
        """Return once all ranks have come here, and what each of them did before is done."""
        self.barrier.wait(LIMIT_S)


@dataclass
class DeviceCollectives(ThreadCollectives):
    """Collectives of ranks on one GPU. As NCCL's, a call returns before the device has copied anything: the ranks'
    current streams wait for each other. `reached` by rank: where its stream has come."""

    reached: list[torch.cuda.Event] = field(default_factory=list)

    @classmethod
    def of(cls, size: int) -> list[ThreadCollectives]:
        reached = [torch.cuda.Event() for _ in range(size)]
        ranks = super().of(size)
        for rank in ranks:
            cast(DeviceCollectives, rank).reached = reached
        return ranks

    def _meet(self) -> None:
        self.reached[self.rank] = event = torch.cuda.Event()  # a rank that still has to wait for the last one may wait
        event.record()  # for this one as well
        self.barrier.wait(LIMIT_S)
        for other in self.reached:
            torch.cuda.current_stream().wait_event(other)


@dataclass
class FakeControl:
    """A rank that wakes wakes all at once."""

    ranks: list[FakeControl]
    progress: LoopProgress = field(default_factory=LoopProgress)
    woken_at: int = -1

    def wake(self, number: int) -> None:
        for control in self.ranks:
            control.woken_at = max(control.woken_at, number)


@dataclass
class Ran:
    """What the ranks of a run did, by rank, by number of request or as Rig has it."""

    tokens: dict[int, list[int]]
    logits: Logits
    depths: dict[tuple[int, int], int]
    rigs: list[Rig]
    shapes: list[list[tuple[int, ...]]]

    @property
    def accepted(self) -> int:
        return sum(rig.executor.counters.accepted_tokens for rig in self.rigs)


def run_ranks(
    checkpoint: Path,
    asks: Sequence[Sequence[Ask]],
    settings: WorkerSettings,
    *,
    on_rig: Callable[[int, Rig], None] = lambda rank, rig: None,
    streams_of: Callable[[int], Streams] = lambda rank: make_streams("inline"),
    script: Callable[[int, Rig], None] | None = None,
    kind: type[ThreadCollectives] = ThreadCollectives,
) -> Ran:
    """The requests of each rank until all have ended, with the logits of rows that hold. `on_rig` sees each rank before
    its first turn; `streams_of` gives each rank its streams; `script` turns a rank in place of its requests; `kind` of
    collectives."""
    size = len(asks)
    collectives = kind.of(size)
    settings = msgspec.structs.replace(settings, model=str(checkpoint), group_size=size)
    runners = [load_runner(settings, own) for own in collectives]
    controls: list[FakeControl] = []
    controls += [FakeControl(controls) for _ in range(size)]
    done, rigs, errors = [False] * size, dict[int, Rig](), list[BaseException]()

    def run(rank: int) -> None:
        group: Any = SimpleNamespace(rank=rank, size=size, control=controls[rank], collectives=collectives[rank])
        rigs[rank] = rig = Rig(streams_of(rank), settings=settings, runner=runners[rank], keep_logits=True, group=group)
        on_rig(rank, rig)
        if script is None:
            requests = Requests(rig, checkpoint, rank)
            for ask in asks[rank]:
                requests.add(ask)
            requests.run(0)
        else:
            script(rank, rig)
        while not all(done):
            done[rank] = False
            rig.executor.turn()
            done[rank] = rig.executor.idle
            time.sleep(0.0005)
        rig.check_end()

    def run_or_abort(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)
            collectives[rank].barrier.abort()
            done[:] = [True] * size

    threads = [threading.Thread(target=run_or_abort, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    ordered = [rigs[rank] for rank in range(size)]
    tokens = {life.number: life.tokens for rig in ordered for life in rig.coordinator.lives}
    logits = {place: values for rig in ordered for place, values in rig.logits.items()}
    depths = {place: depth for rig in ordered for place, depth in rig.depths.items()}
    return Ran(tokens, logits, depths, ordered, [own.shapes for own in collectives])


def run_ranks_on_gpu(checkpoint: Path, asks: Sequence[Sequence[Ask]], settings: WorkerSettings, **kinds: Any) -> Ran:
    """`run_ranks` with all ranks on one GPU, without graphs: none of a rank could wait for another's."""
    settings, opened = msgspec.structs.replace(settings, device="cuda", graphs=False), list[Streams]()

    def streams_of(rank: int) -> Streams:
        opened.append(make_streams("cuda"))
        return opened[-1]

    try:
        return run_ranks(checkpoint, asks, settings, streams_of=streams_of, kind=DeviceCollectives, **kinds)
    finally:
        for streams in opened:
            streams.close()

"""An executor, turned by hand, with a small coordinator around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from kernels.integrity import check_state
from protocol.messages import Faulted
from protocol.settings import WorkerSettings
from protocol.text import make_tokenizer
from tests.support.fakes.coordinator import FakeCoordinator
from tests.support.fakes.hash_runner import FakeRunner
from tests.support.fakes.pace import DrawnPace
from worker.device.pinned import host_tensor
from worker.device.sizing import size_worker
from worker.group.group import Group
from worker.loop.batch import Status
from worker.loop.decode import Decoder, StepTokens
from worker.loop.executor import Executor
from worker.loop.pace import Pacing
from worker.loop.recording import SelectionRecorder
from worker.runners.base import Runner, prompt_block_tokens
from worker.streams import InlineStreams, Streams, make_streams
from worker.streams.cuda import CudaStreams

Logits = dict[tuple[int, int], torch.Tensor]

SETTINGS = WorkerSettings(
    seats=4,
    hot_size_classes=(64, 128, 192),
    tail_slots=3,
    pass_tokens=64,
    layer_group="1KiB",
    context_max_tokens=512,
    host_mem="512KiB",
    device_mem="256KiB",
)
#: Turns after which nothing more will happen.
TURNS_MAX = 200_000
#: Seconds between two looks at a clock.
TICK_S = 1e-4


class Ticks:
    """A clock that moves with each look, so that what depends on time depends on the run alone."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += TICK_S
        return self._now


class Rig:
    """One executor, turned by hand; on a GPU when its streams are. With `keep_logits`, `logits` has those of every row
    that holds, by sampling seed and position of the token drawn, and `depths` where in its step that row was."""

    def __init__(
        self,
        streams: Streams | None = None,
        settings: WorkerSettings = SETTINGS,
        *,
        runner: Runner | None = None,
        host: torch.Tensor | None = None,
        ahead_tokens: int = 8,
        keep_logits: bool = False,
        group: Group | None = None,
        recorder: SelectionRecorder | None = None,
        pages: range | None = None,
        pace: Pacing | int = 0,
        graphs_later: bool = False,
    ) -> None:
        """`pages` of the host pool are this rig's to give; by default all are. `pace` is of prompts; a number is the
        seed of one that is drawn, but for a GPU."""
        self.runner: Runner = runner or FakeRunner()
        runner = self.runner
        self.streams = streams or make_streams("inline")
        device = "cuda" if isinstance(self.streams, CudaStreams) else "cpu"
        self.settings = settings = msgspec.structs.replace(settings, device=device)
        self.sizing = size_worker(settings, runner.geometry, runner.info)
        capacity = self.sizing.capacity
        shape = (capacity.host_pages, capacity.page_bytes)
        self.host = host_tensor(*shape, dtype=torch.uint8, device=device) if host is None else host
        self.coordinator = FakeCoordinator(self.sizing, ahead_tokens=ahead_tokens, pages=pages)
        self.executor = Executor(
            runner,
            settings,
            self.sizing,
            self.streams,
            self.host,
            make_tokenizer("bytes"),
            self.coordinator,
            keep_logits=keep_logits,
            group=group,
            recorder=recorder,
            graphs_later=graphs_later,
            **self._paced(pace, alone=group is None) if device == "cpu" else {},
        )
        self.coordinator.submit = self.executor.submit
        self.logits: Logits = {}
        self.depths: dict[tuple[int, int], int] = {}
        if keep_logits:
            self._keep_logits(self.executor._decoder)

    def _paced(self, pace: Pacing | int, *, alone: bool) -> dict[str, Any]:
        """A pace, and a clock for a worker alone, of which the same run is made again."""
        settings = self.settings
        block = prompt_block_tokens(settings) if settings.deterministic else 0
        block_max = min(self.runner.block_tokens_max, settings.pass_tokens)
        drawn = DrawnPace(pace, block_max, fixed_block=block) if isinstance(pace, int) else pace
        return {"pace": drawn, "clock": Ticks()} if alone else {"pace": drawn}

    def turn(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.executor.turn()

    def run_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(TURNS_MAX):
            if condition():
                return
            if not self.executor.turn() and any(request.lacks_mask for request in self.executor.held()):
                time.sleep(0.001)  # threads and processes build it
        raise AssertionError(f"nothing more happens: {self.coordinator.lives}")

    def run(self) -> None:
        self.run_until(lambda: self.executor.idle)

    def _keep_logits(self, decoder: Decoder) -> None:
        read = decoder.read

        def read_and_keep() -> StepTokens:
            launched = decoder._launched[0]
            rows = launched.results.logits[: decoder._seat_rows * launched.seats].unflatten(0, (-1, launched.seats))
            step, seeds = read(), {life.number: life.sampling.seed for life in self.coordinator.lives}
            for place, (request, position, tokens) in enumerate(
                zip(step.requests, step.positions, step.tokens, strict=True)
            ):
                for depth in range(len(tokens)):
                    at = seeds[request.request_index], position + 1 + depth
                    self.logits[at], self.depths[at] = rows[depth, place].clone(), depth
            return step

        decoder.read = read_and_keep  # type: ignore[method-assign]

    def wrong(self) -> list[int]:
        """Numbers of the requests whose tokens are not the oracle's, as far as they went, or are none of their
        grammar; none may have faulted otherwise."""
        faults = [event.message for event in self.coordinator.events if isinstance(event, Faulted)]
        assert all("its grammar any further: Parser Error: token" in message for message in faults), faults
        groups, bad = self.runner.geometry.group_of_layer, []
        for life in self.coordinator.lives:
            expected = life.expected(groups)
            whole = life.outcome == "length"
            if life.outcome in faults or life.tokens != (expected if whole else expected[: len(life.tokens)]):
                bad.append(life.number)
        return bad

    def check(self) -> None:
        """No tripwire, tables that agree with themselves, memory held exactly once (I1, I3, I6)."""
        self.executor.check_invariants()
        assert not self.executor.state.tripwires.any()
        if isinstance(self.streams, InlineStreams):  # other streams may not have run what the host launched
            for request in self.executor.held():
                if request.status in (Status.RUNNING, Status.PARKED):
                    check_state(self.executor.state, request.seat, request.position)

    def check_end(self) -> None:
        self.check()
        self.coordinator.check_nothing_leaked()

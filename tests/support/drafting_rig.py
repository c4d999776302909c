"""A rig whose runner drafts what a test wants: the tokens to come, right in a given share of places."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from kernels.state import DeviceState, StepBatch, real_rows
from protocol.messages import Admit
from protocol.settings import WorkerSettings
from tests.support.fakes.coordinator import Life
from tests.support.fakes.drafting_runner import DraftingFakeRunner
from tests.support.worker_rig import SETTINGS, Rig
from worker.loop.batch import RunningRequest
from worker.loop.drafting import DraftSeats
from worker.loop.inputs import host_tensor
from worker.loop.output import Output
from worker.runners.base import DraftRows, DraftRunner, SamplerState
from worker.streams import Streams
from worker.streams.cuda import CudaStreams

#: No token of a wrong draft: the hash runner draws it in one of 251 places.
WRONG = 7


def drafting_settings(draft_tokens: int, settings: WorkerSettings = SETTINGS, **changes: object) -> WorkerSettings:
    """Memory for the draft layer too, and the shortest tail."""
    sizes: dict[str, object] = {"host_mem": "1MiB", "device_mem": "512KiB", "tail_slots": 2 * (1 + draft_tokens)}
    return msgspec.structs.replace(settings, draft_tokens=draft_tokens, **{**sizes, **changes})


class DraftRig(Rig):
    """`percent` of the drafts are right, drawn from the request and the position; None: they are the runner's own."""

    def __init__(
        self,
        streams: Streams | None,
        settings: WorkerSettings,
        percent: int | None,
        *,
        runner: DraftRunner | None = None,
        expected: Callable[[Life], Sequence[int]] | None = None,
        ahead_tokens: int = 8,
        keep_logits: bool = False,
    ) -> None:
        runner = runner or DraftingFakeRunner()
        device = "cuda" if isinstance(streams, CudaStreams) else "cpu"
        shape = settings.seats, settings.context_max_tokens + 2
        self._guesses = torch.full(shape, WRONG, dtype=torch.int32, device=device)  # by seat and position
        self._given: dict[int, Tensor] = {}  # by request number, for operations that have not run
        self._percent, self._expected = percent or 0, expected or self.tokens_of
        if percent is not None and settings.draft_tokens:
            self._aim_drafts(runner)
        super().__init__(streams, settings, runner=runner, ahead_tokens=ahead_tokens, keep_logits=keep_logits)
        drafting = self.executor._seats._drafting
        if percent is not None and drafting is not None:
            self._tell_guesses(drafting)

    def tokens_of(self, life: Life) -> Sequence[int]:
        """What the hash runner gives."""
        groups = self.runner.geometry.group_of_layer[:-1]
        return life.expected(groups, self.settings.prefill_chunk_tokens)

    def wrong(self) -> list[int]:
        bad = []
        for life in self.coordinator.lives:
            expected = list(self._expected(life))
            if life.tokens != (expected if life.outcome == "length" else expected[: len(life.tokens)]):
                bad.append(life.number)
        return bad

    def _aim_drafts(self, runner: DraftRunner) -> None:
        """Before graphs are captured: drafts are those of `_guesses`."""
        launch = runner.launch_draft

        def launch_draft(
            streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch, draft: DraftRows
        ) -> None:
            launch(streams, state, sampler, batch, draft)
            streams.compute.launch("aim", partial(self._aim, batch, draft))

        runner.launch_draft = launch_draft  # type: ignore[method-assign]

    def _aim(self, batch: StepBatch, draft: DraftRows) -> None:
        seats = batch.seats.long().clamp(min=0)
        positions = (batch.lengths.long() + 1).clamp(max=self._guesses.shape[1] - 1)
        draft.tokens.copy_(torch.where(real_rows(batch), self._guesses[seats, positions], -1))

    def _tell_guesses(self, drafting: DraftSeats) -> None:
        """Whenever a request gets a seat, in the order of operations."""
        open_seat = self.executor._seats.open

        def open_and_tell(admit: Admit, output: Output) -> RunningRequest:
            request = open_seat(admit, output)
            guesses = self._guesses_of(request.request_index)
            copy = partial(self._guesses[request.seat].copy_, guesses, non_blocking=True)
            drafting.streams.compute.launch("tell guesses", copy)
            return request

        self.executor._seats.open = open_and_tell  # type: ignore[method-assign]

    def _guesses_of(self, number: int) -> Tensor:
        """int32[positions]: its tokens, as far as they are guessed."""
        if number not in self._given:
            life = next(it for it in self.coordinator.lives if it.number == number)
            size, device, first = self._guesses.shape[1], self._guesses.device, len(life.prompt)
            guesses = host_tensor(size, dtype=torch.int32, device=device, fill=WRONG)
            for position, token in enumerate(self._expected(life), first):
                if 100 * random.Random(f"{number} {position}").random() < self._percent:
                    guesses[position] = token
            self._given[number] = guesses
        return self._given[number]

"""A rig whose runner drafts what a test wants: the tokens to come, right in a given share of places."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from kernels.state import DeviceState, StepBatch, real_rows
from protocol.settings import WorkerSettings
from tests.support.fakes.coordinator import Life
from tests.support.fakes.drafting_runner import DraftingFakeRunner
from tests.support.worker_rig import SETTINGS, Rig
from worker.runners.base import DraftRows, DraftRunner, SamplerState
from worker.streams import Streams

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
        super().__init__(streams, settings, runner=runner, ahead_tokens=ahead_tokens, keep_logits=keep_logits)
        self._percent = percent or 0
        self._expected = expected or self.tokens_of
        self._tokens: dict[int, Sequence[int]] = {}
        if percent is None:
            return
        launch = self.runner.launch_draft  # type: ignore[attr-defined]

        def launch_draft(
            streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch, draft: DraftRows
        ) -> None:
            launch(streams, state, sampler, batch, draft)
            streams.compute.launch("aim", lambda: self._aim(batch, draft))

        self.runner.launch_draft = launch_draft  # type: ignore[attr-defined]

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

    def _aim(self, batch: StepBatch, draft: DraftRows) -> None:
        places = zip(batch.seats.tolist(), batch.lengths.tolist(), real_rows(batch).tolist(), strict=True)
        tokens = [self._guess(seat, length + 1) if is_real else -1 for seat, length, is_real in places]
        aimed: Tensor = torch.tensor(tokens, dtype=torch.int32)
        draft.tokens.copy_(aimed)

    def _guess(self, seat: int, position: int) -> int:
        request = next((it for it in self.executor.held() if it.seat == seat), None)
        if request is None:
            return WRONG
        number, place = request.request_index, position - request.prompt_tokens
        if number not in self._tokens:
            life = next(it for it in self.coordinator.lives if it.number == number)
            self._tokens[number] = self._expected(life)
        tokens, chance = self._tokens[number], random.Random(f"{number} {position}")
        is_right = 100 * chance.random() < self._percent and 0 <= place < len(tokens)
        return int(tokens[place]) if is_right else WRONG

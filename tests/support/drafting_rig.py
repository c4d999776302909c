"""A rig whose runner drafts what a test wants: the tokens to come, right in a given share of places. It can watch what
the draft layer of the hash runner leaves in host memory, and what it draws."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial

import msgspec
import torch
from torch import Tensor

from kernels.state import DeviceState, StepBatch, real_rows
from protocol.messages import Admit, Released
from protocol.settings import DraftTokens, WorkerSettings
from protocol.units import PAGE_TOKENS
from tests.support.fakes.coordinator import Life
from tests.support.fakes.drafting_runner import DraftingFakeRunner, DraftOracle
from tests.support.fakes.hash_runner import TOPK, computed
from tests.support.worker_rig import SETTINGS, Rig
from worker.device.pinned import host_tensor
from worker.loop.batch import RunningRequest
from worker.loop.drafting import DraftSeats
from worker.loop.output import Output
from worker.runners.base import DraftRows, DraftRunner, SamplerState
from worker.streams import Streams
from worker.streams.cuda import CudaStreams

#: No token of a wrong draft: the hash runner draws it in one of 251 places.
WRONG = 7


def drafting_settings(
    draft_tokens: DraftTokens, settings: WorkerSettings = SETTINGS, **changes: object
) -> WorkerSettings:
    """Memory for the draft layer too, and the shortest tail."""
    drafting = msgspec.structs.replace(settings, draft_tokens=draft_tokens)
    tail_slots = 2 * (1 + drafting.draft_tokens_max)
    sizes: dict[str, object] = {"host_mem": "1MiB", "device_mem": "512KiB", "tail_slots": tail_slots}
    return msgspec.structs.replace(drafting, **{**sizes, **changes})


@cache
def _computed(
    prompt: tuple[int, ...],
    count: int,
    seed: int,
    prefilled: tuple[range, ...],
    groups: tuple[int, ...],
    is_held: bool,
) -> tuple[list[int], Tensor]:
    return computed(prompt, count, seed, prefilled, groups, is_held=is_held)


def _whole_prompt(life: Life) -> list[range]:
    return [range(len(life.prompt))]


class DraftRig(Rig):
    """`percent` of the drafts are right, drawn from the request and the position; None: they are the runner's own.

    `prefilled_of` says which positions of a request the hash runner computes by prompt passes. With `watches`, what its
    draft layer does is compared with the oracle: `wrong_rows` are requests with positions whose row or index key in
    host memory was wrong when the request left, `wrong_drafts` drafts that it drew.
    """

    def __init__(
        self,
        streams: Streams | None,
        settings: WorkerSettings,
        percent: int | None,
        *,
        runner: DraftRunner | None = None,
        host: Tensor | None = None,
        expected: Callable[[Life], Sequence[int]] | None = None,
        prefilled_of: Callable[[Life], Sequence[range]] | None = None,
        ahead_tokens: int = 8,
        keep_logits: bool = False,
        watches: bool = False,
    ) -> None:
        runner = runner or DraftingFakeRunner()
        device = "cuda" if isinstance(streams, CudaStreams) else "cpu"
        shape = settings.seats, settings.context_max_tokens + 2
        self._guesses = torch.full(shape, WRONG, dtype=torch.int32, device=device)  # by seat and position
        self._given: dict[int, Tensor] = {}  # by request number, for operations that have not run
        self._percent, self._expected = percent, expected or self.tokens_of
        self._prefilled_of = prefilled_of or _whole_prompt
        self._owners: dict[int, int] = {}  # of seats: numbers of requests, as operations see them
        self._drawn: dict[int, set[tuple[int, tuple[int, ...], int]]] = defaultdict(set)  # place, fed drafts, draft
        self.watches, self.wrong_rows = watches, list[tuple[int, int]]()
        is_told = bool(settings.draft_tokens) and (percent is not None or watches)
        if is_told:
            self._aim_drafts(runner, watches=watches)
        super().__init__(
            streams, settings, runner=runner, host=host, ahead_tokens=ahead_tokens, keep_logits=keep_logits
        )
        drafting = self.executor._seats._drafting
        if is_told:
            assert drafting is not None
            self._drafting = drafting
            self._tell_guesses(drafting)
        if watches:
            self._watch_releases()

    def computed(self, life: Life) -> tuple[list[int], Tensor]:
        """Tokens and states that the hash runner gives (see hash_runner.computed)."""
        sampling, prefilled = life.sampling, tuple(self._prefilled_of(life))
        groups = self.runner.geometry.group_of_layer[:-1]
        return _computed(life.prompt, sampling.max_tokens, sampling.seed, prefilled, groups, bool(sampling.grammar))

    def tokens_of(self, life: Life) -> Sequence[int]:
        """What the hash runner gives."""
        return self.computed(life)[0]

    def wrong_drafts(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Number of the request, place of the row, and drafts that the layer had been applied to. Those of a request
        with a grammar go nowhere: it takes one row a step."""
        bad = []
        for life in (it for it in self.coordinator.lives if not it.sampling.grammar):
            oracle, rows = self._oracle(life), len(self.computed(life)[1])
            for place, fed, draft in sorted(self._drawn[life.number]):
                if place < rows and draft != oracle.draft(place, fed):
                    bad.append((life.number, place, fed))
        return bad

    @property
    def drafts_watched(self) -> int:
        """Drafts behind the first ones among them."""
        return sum(bool(fed) for drawn in self._drawn.values() for _, fed, _ in drawn)

    def _oracle(self, life: Life) -> DraftOracle:
        tokens, states = self.computed(life)
        return DraftOracle([*life.prompt, *tokens], states, self.runner.geometry.group_of_layer[:-1])

    def wrong(self) -> list[int]:
        bad = []
        for life in self.coordinator.lives:
            expected = list(self._expected(life))
            if life.tokens != (expected if life.outcome == "length" else expected[: len(life.tokens)]):
                bad.append(life.number)
        return bad

    def _aim_drafts(self, runner: DraftRunner, *, watches: bool) -> None:
        """Before graphs are captured: drafts are those of `_guesses`."""
        launch = runner.launch_draft

        def launch_draft(
            streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch, draft: DraftRows
        ) -> None:
            launch(streams, state, sampler, batch, draft)
            if watches:
                streams.compute.launch("watch", partial(self._watch, state, batch, draft))
            if self._percent is not None:
                streams.compute.launch("aim", partial(self._aim, batch, draft))

        runner.launch_draft = launch_draft  # type: ignore[method-assign]

    def _watch(self, state: DeviceState, batch: StepBatch, draft: DraftRows) -> None:
        """Keep drafts behind rows that hold. What a buffer that has no room for a row selected is of no interest."""
        rooms, drafting = TOPK * state.seat_rows, self._drafting
        for row in (real_rows(batch) & (batch.lengths > 0)).nonzero().flatten().tolist():
            seat, place = int(batch.seats[row]), int(batch.lengths[row]) - 1
            held = int(drafting.position[seat]) - 1  # the row that holds last
            if 0 < int(state.hot_slots[seat]) < rooms or (draft.source is None and place > held):
                continue
            fed = () if draft.source is None else tuple(drafting.drafts[: place - held, seat].tolist())
            self._drawn[self._owners[seat]].add((place - len(fed), fed, int(draft.tokens[row])))

    def _aim(self, batch: StepBatch, draft: DraftRows) -> None:
        seats = batch.seats.long().clamp(min=0)
        positions = (batch.lengths.long() + 1).clamp(max=self._guesses.shape[1] - 1)
        draft.tokens.copy_(torch.where(real_rows(batch), self._guesses[seats, positions], -1))

    def _tell_guesses(self, drafting: DraftSeats) -> None:
        """Whenever a request gets a seat, in the order of operations."""
        open_seat = self.executor._seats.open

        def open_and_tell(admit: Admit, output: Output) -> RunningRequest:
            request = open_seat(admit, output)
            tell = partial(self._tell, request.seat, request.request_index, self._guesses_of(request.request_index))
            drafting.streams.compute.launch("tell guesses", tell)
            return request

        self.executor._seats.open = open_and_tell  # type: ignore[method-assign]

    def _tell(self, seat: int, number: int, guesses: Tensor) -> None:
        self._owners[seat] = number
        self._guesses[seat].copy_(guesses, non_blocking=True)

    def _guesses_of(self, number: int) -> Tensor:
        """int32[positions]: its tokens, as far as they are guessed."""
        if number not in self._given:
            life = next(it for it in self.coordinator.lives if it.number == number)
            size, device, first = self._guesses.shape[1], self._guesses.device, len(life.prompt)
            guesses = host_tensor(size, dtype=torch.int32, device=device, fill=WRONG)
            percent = self._percent or 0
            for position, token in enumerate(self._expected(life) if percent else (), first):
                if 100 * random.Random(f"{number} {position}").random() < percent:
                    guesses[position] = token
            self._given[number] = guesses
        return self._given[number]

    def _watch_releases(self) -> None:
        release = self.coordinator._released

        def look_and_release(life: Life, event: Released) -> None:
            self.look(life, event.durable_tokens)
            release(life, event)

        self.coordinator._released = look_and_release  # type: ignore[method-assign]

    def look(self, life: Life, rows: int) -> None:
        """Compare the draft layer's rows and index keys in host memory, of positions below `rows`."""
        if not rows:
            return
        oracle, state, layer = self._oracle(life), self.executor.state, self.runner.geometry.layers - 1
        positions = torch.arange(rows)
        pages, offsets = torch.tensor(life.host_pages)[positions // PAGE_TOKENS], positions % PAGE_TOKENS
        found = state.host_row_words[0][pages, layer, offsets]
        keys = state.host_key_words[pages, self.runner.geometry.groups - 1, offsets, 0]
        wrong = (found != oracle.rows[:rows]).any(1) | (keys != oracle.keys[:rows])
        self.wrong_rows += [(life.number, place) for place in wrong.nonzero().flatten().tolist()]

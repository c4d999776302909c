"""Steps that draft, on the device: where a step begins, which of its rows hold, and the drafts for the next step.

Of one step of S seats with 1 + n rows each, on `compute`, around what plain steps do (decode.py):

    begin       first row of each seat from `position`; tokens of its rows: known ones from the host, else drafts
    begin_step · forward pass · draws of every row
    verify      which rows hold (acceptance.py); `position` and the last token advance
    draft       the draft layer over the step's rows, with the tokens behind them: rows that hold get its rows and keys
                anew, and the draft of a seat is that of its last row that holds
    n - 1 times begin_step for one row a seat, the draft layer on its own output · the next draft

Rows begun by `draft` are no rows of the request: the next step begins at the same position and writes them again. They
retire tail slots ahead of it, so that a step waits for one backup more (`backup_steps`).

The host does not know where a step begins, so that it sends a window of known tokens, from the first row that may begin
it on (acceptance.py: `certain`), and the first row that no step may write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kernels.begin_step import begin_step
from kernels.state import BackupPlan, DeviceState, StepBatch
from worker.device.pinned import host_tensor
from worker.device.step_rows import StepRows
from worker.loop.batch import RunningRequest
from worker.loop.inputs import Ids
from worker.runners.base import DraftRows, DraftRunner, SamplerState, StepOutputs
from worker.streams import Streams

#: What `counts` has of each seat.
COUNTS: Final = ("accepted", "drafted", "drafts accepted")
#: Of each seat, what goes before the window.
ROWS_AHEAD: Final = 4


class DraftInputs:
    """What the host says of one step of S seats: int32[(ROWS_AHEAD + window) * S + 1], so that it travels in one copy.

    Seats, the first row that no step may write, how many rows a step takes at most, the row that the window begins
    with; tokens of the window, -1 where they are not known; the number of real seats.
    """

    def __init__(self, seats: int, window: int, device: torch.device | str) -> None:
        self._host = host_tensor((ROWS_AHEAD + window) * seats + 1, dtype=torch.int32, device=device)
        array: Ids = self._host.numpy()
        self._rows, self._count, self._window = array[:-1].reshape(ROWS_AHEAD + window, seats), array[-1:], window

    def fill(self, requests: Sequence[RunningRequest]) -> None:
        real = len(requests)
        self._rows[:] = -1
        self._rows[0, :real] = [request.seat for request in requests]
        self._rows[1, :real] = [request.progress.rows_end for request in requests]
        self._rows[2, :real] = [request.progress.step_rows for request in requests]
        self._rows[3, :real] = [request.progress.certain for request in requests]
        for place, request in enumerate(requests):
            tokens = request.known_tokens(request.progress.certain, self._window)
            self._rows[ROWS_AHEAD : ROWS_AHEAD + len(tokens), place] = tokens
        self._count[0] = real

    def upload(self, target: Tensor) -> None:
        """Operation: into the step's fixed addresses."""
        target.copy_(self._host, non_blocking=True)


@dataclass(eq=False)
class _Given:
    """The parts of uploaded DraftInputs, by view."""

    seats: Tensor  # int32[S]
    limits: Tensor
    step_rows: Tensor
    base: Tensor
    window: Tensor  # int32[W, S]
    num_real: Tensor  # int32[1]


class _Owners:
    """Which place of a step each seat has, so that values by place go to tables by seat: no shape depends on data."""

    def __init__(self, seats: int, device: torch.device) -> None:
        self._seats = torch.arange(seats, dtype=torch.int32, device=device).unsqueeze(1)
        self._place = torch.zeros(seats, dtype=torch.int64, device=device)  # 0 where it has none
        self.owned = torch.zeros(seats, dtype=torch.bool, device=device)

    def fill(self, seats: Tensor, real: Tensor) -> None:
        """`seats` int32[S], each once at most where `real` bool[S]."""
        has = (self._seats == seats) & real
        self.owned.copy_(has.any(1))
        self._place.copy_(has.int().argmax(1))

    def of(self, values: Tensor) -> Tensor:
        """By seat; meaningless where it is not owned."""
        return values.index_select(0, self._place)

    def put(self, table: Tensor, values: Tensor, where: Tensor | None = None) -> None:
        """table[seats] = values, of one dtype; `where` bool[seats]: only there, and only where a seat is owned."""
        torch.where(self.owned if where is None else where, self.of(values), table, out=table)


class DraftSeats:
    """Where each seat is, and its drafts: int32[seats] and int32[n, seats], -1 where there is none, of operations on
    `compute` alone."""

    def __init__(
        self, runner: DraftRunner, streams: Streams, state: DeviceState, sampler: SamplerState, rows: StepRows
    ) -> None:
        device, seats = state.rows.device, state.seats
        self.runner, self.streams, self.state, self.sampler, self.rows = runner, streams, state, sampler, rows
        self.position = torch.zeros(seats, dtype=torch.int32, device=device)
        self.drafts = torch.full((rows.draft_tokens, seats), -1, dtype=torch.int32, device=device)

    def open(self, seat: int, position: int) -> None:
        """Launch: the next step of `seat` begins at `position`."""
        self.streams.compute.launch("open drafts", partial(self._open, seat, position))

    def _open(self, seat: int, position: int) -> None:
        self.position[seat].fill_(position)
        self.drafts[:, seat].fill_(-1)


class DraftStep:
    """What steps of one padded size and one n do and use: S seats, B = (1 + n) S rows, turn by turn."""

    def __init__(self, drafting: DraftSeats, seats: int, window: int, draft_tokens: int) -> None:
        state = drafting.state
        places, device, rows = state.geometry.places, state.rows.device, 1 + draft_tokens
        self._owner, self._seats, self._rows, self._window = drafting, seats, rows, window
        self.inputs = torch.zeros((ROWS_AHEAD + window) * seats + 1, dtype=torch.int32, device=device)
        seat_rows, numbers = self.inputs[:-1].view(ROWS_AHEAD + window, seats), self.inputs[-1:]
        seat, limits, step_rows, base = (seat_rows[at] for at in range(ROWS_AHEAD))
        self._given = _Given(seat, limits, step_rows, base, seat_rows[ROWS_AHEAD:], numbers)
        batch = StepBatch.allocate(rows * seats, places, device, seat_rows=rows)
        self.batch = replace(batch, num_real=numbers)
        self.counts = torch.zeros(len(COUNTS), seats, dtype=torch.int32, device=device)
        self._owners = _Owners(state.seats, device)
        self._places = torch.arange(seats, dtype=torch.int32, device=device)
        self._depths = torch.arange(rows + 1, dtype=torch.int32, device=device).unsqueeze(1)
        self._known = torch.zeros(rows + 1, seats, dtype=torch.int32, device=device)
        self._last = torch.zeros(seats, dtype=torch.int32, device=device)  # row of each seat that holds last
        self._first_drafts = DraftRows.allocate(rows * seats, device=device)
        self._one = replace(StepBatch.allocate(seats, places, device), num_real=numbers)
        self._unused_plan = BackupPlan.allocate(seats, places, device)
        sources = [rows * seats, *[seats] * (rows - 3)] if rows > 2 else []
        self._further = [DraftRows.allocate(seats, source_rows=source, device=device) for source in sources]

    def launch_begin(self) -> None:
        """Behind the upload of `inputs`: what begin_step reads, and the tokens of all rows."""
        self._owner.streams.compute.launch("begin drafts", self._begin)

    def launch_verify(self, outputs: StepOutputs) -> None:
        """Behind the draws: `counts`, and the drafts of the next step."""
        owner, compute = self._owner, self._owner.streams.compute
        parts = owner.streams, owner.state, owner.sampler
        compute.launch("verify", partial(self._verify, outputs))
        if self._rows == 1:  # another step may draft: it needs the layer's rows of this one
            owner.runner.launch_draft_rows(owner.streams, owner.state, self.batch, self._first_drafts)
            return
        owner.runner.launch_draft(*parts, self.batch, self._first_drafts)
        compute.launch("keep drafts", self._keep_first)
        for number, further in enumerate(self._further, 1):
            compute.launch("begin draft", partial(self._begin_further, number, further))
            owner.runner.launch_draft(*parts, self._one, further)
            compute.launch("keep drafts", partial(self._keep, number, further.tokens))

    # ---------------------------------------------------------------- operations

    def _begin(self) -> None:
        owner, given, batch = self._owner, self._given, self.batch
        real, at = self._real(), given.seats.long().clamp(min=0)
        self._owners.fill(given.seats, real)
        first = owner.position[at]
        batch.seats[: self._seats] = given.seats
        batch.lengths[: self._seats] = (first + 1).mul_(real)
        places = (first - given.base) + self._depths
        found = given.window.gather(0, places.long().clamp(0, self._window - 1))
        self._known.copy_(found.masked_fill_((places < 0) | (places >= self._window), -1))
        guessed = owner.drafts[: self._rows - 1, at]
        batch.inputs[: self._seats] = self._known[0]
        fed = torch.where(self._known[1 : self._rows] >= 0, self._known[1 : self._rows], guessed)
        batch.inputs[self._seats :] = fed.flatten()
        guided = (fed >= 0).int().cumprod(0).sum(0, dtype=torch.int32) + 1  # rows that have a token
        self._grant(first + torch.minimum(given.step_rows, guided))

    def _verify(self, outputs: StepOutputs) -> None:
        owner, owners, batch = self._owner, self._owners, self.batch
        drawn, fed = outputs.tokens.view(self._rows, -1), batch.inputs.view(self._rows, -1)
        fits, known = batch.rejected.view(self._rows, -1) == 0, self._known >= 0
        right = (drawn[:1] >= 0) & self._real()
        if self._rows > 1:
            fits = fits.int().cumprod(0) > 0  # with all before it
            right = torch.cat((right, known[1:-1] | (fed[1:] == drawn[:-1])))
        holds = (right & fits).int().cumprod(0)
        accepted = holds.sum(0, dtype=torch.int32)
        self.counts[0] = accepted
        following = torch.where(known[1:], self._known[1:], drawn)
        self._first_drafts.following.copy_(following.flatten())
        last = following[0]
        if self._rows > 1:
            drafted = fits[1:] & ~known[1:-1]
            self.counts[1] = drafted.sum(0)
            self.counts[2] = (drafted & (holds[1:] > 0)).sum(0)
            self._last.copy_((accepted - 1).clamp_(min=0) * self._seats + self._places)
            last = following.flatten().gather(0, self._last.long())
        position = owner.position[self._given.seats.long().clamp(min=0)] + accepted
        self._grant(position + self._given.step_rows - 1)
        moved = owners.of(accepted > 0) & owners.owned
        owners.put(owner.position, position, moved)
        owners.put(owner.sampler.last_token, last, moved)
        owner.drafts[self._rows - 1 :].masked_fill_(owners.owned, -1)

    def _keep_first(self) -> None:
        self._keep(0, self._first_drafts.tokens.gather(0, self._last.long()))

    def _keep(self, number: int, tokens: Tensor) -> None:
        """-1: no row could take it, past the granted rows."""
        self._owners.put(self._owner.drafts[number], tokens)

    def _begin_further(self, number: int, further: DraftRows) -> None:
        owner, given, one = self._owner, self._given, self._one
        at = given.seats.long().clamp(min=0)
        one.seats.copy_(given.seats)
        one.lengths.copy_(torch.where(self._real(), owner.position[at] + number, 0))
        begin_step(owner.state, one, self._unused_plan)
        further.following.copy_(owner.drafts[number - 1][at])
        assert further.source is not None
        further.source.copy_(self._last if number == 1 else self._places)

    def _grant(self, stops: Tensor) -> None:
        """Rows of each seat before its stop may be written, as far as its memory goes: those of a step, then those that
        drafts of the next step begin."""
        self._owners.put(self._owner.state.granted_rows, torch.minimum(self._given.limits, stops))

    def _real(self) -> Tensor:
        return self._places < self._given.num_real

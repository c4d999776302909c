"""What ranks exchange in a round: rows for the experts of a mixture, partial sums back, and wishes.

A mixture of experts of a group (after GShard's dispatch and combine, with all-gather in place of routing):

    gate            on a rank's own rows: the experts that they chose, and weights
    all-gather      rows and choices of all ranks, each padded to the size of the round; padding chose expert -1
    experts         this rank's experts for all rows: a partial sum for each row
    all-to-all      each rank gets the partial sums of its own rows from every rank
    sum             locally, in the order of ranks, in float32

So the order of additions depends on neither the collective library nor on where a row lies. No shape depends on data,
nothing is read by the host, and the worst routing (all rows to one rank) fits: buffers hold all rows of all ranks.
Experts work through the gathered rows in pieces of at most PIECE_ROWS rows (deterministic: the rows of one rank), which
bounds their scratch memory; all at once where they bound it themselves.

Rows and choices travel as one byte array: one collective instead of three. Where experts quantize their rows
(worker.matmul), rows are quantized before they travel: half the bytes, and the same sums.

Rejected: all-reduce and reduce-scatter (gloo adds in an order that depends on place and size); sending each row only
to the ranks of its choices (shapes from data, a host read in each layer, buffers of the same size).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.block_fp8 import quantize_rows
from kernels.block_weight import E4M3
from kernels.cuda.quantize import Codes
from kernels.expert_choice import state_bytes
from kernels.routing import ExchangedRows, exchanged_rows, pack_rows, unpack_rows
from protocol.config_checks import WEIGHT_ONLY
from protocol.errors import ConfigError
from worker.group.control import LoopProgress
from worker.weights.layout import exchanged_row_bytes
from worker.weights.matmul import FIELD, Matmul

#: Rows that experts compute at once.
PIECE_ROWS: Final = 4_096

#: Output [T, h] of this rank's experts for rows [T, h], choices int[T, k] and weights float32[T, k]; given a place for
#: it, they may write it there. Rows that travel quantized are Codes.
Experts = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Collectives(Protocol):
    """Between `size` ranks, of which this is `rank`. Called in the same order with the same shapes on each."""

    rank: int
    size: int

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        """output [size * n, ...] = `own` [n, ...] of each rank, in the order of ranks."""
        ...

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        """output[r] = parts[rank] of rank r, for [size, n, ...]."""
        ...

    def broadcast(self, data: Tensor, source: int) -> None:
        """`data`, contiguous, becomes that of rank `source`."""
        ...


class Exchange:
    """The mixtures of a model over `collectives`. Operations on `compute`, one round after the other."""

    def __init__(
        self,
        collectives: Collectives,
        *,
        hidden: int,
        choices: int,
        rows_max: int,
        dtype: torch.dtype,
        device: torch.device | str,
        deterministic: bool,
        matmul: Matmul | None = None,
    ) -> None:
        """`rows_max`: the largest round. Partial sums travel in `dtype`, deterministic ones in float32.

        `matmul` of experts in block-FP8, which bound their memory themselves: they take the rows of all ranks at once,
        but for deterministic ones. Rows that it quantizes travel so.
        """
        self.collectives = collectives
        self._hidden, self._choices, self._dtype = hidden, choices, dtype
        self.rows_max = rows_max
        self._deterministic, self._whole = deterministic, matmul is not None
        self._powers = matmul is not None and matmul.powers
        self.row_dtype = E4M3 if matmul is not None and matmul.quantizes_rows else dtype  # in which rows travel
        self._row_bytes = exchanged_row_bytes(state_bytes(hidden, self.row_dtype.itemsize), choices)
        size, partial = collectives.size, torch.float32 if deterministic else dtype
        self._own = torch.zeros(rows_max, self._row_bytes, dtype=torch.uint8, device=device)
        self._all = torch.zeros(size * rows_max, self._row_bytes, dtype=torch.uint8, device=device)
        self._partials = torch.zeros(size * rows_max, hidden, dtype=partial, device=device)
        self._returned = torch.zeros(size * rows_max, hidden, dtype=partial, device=device)

    @property
    def bytes(self) -> int:
        """Bytes of the buffers on the device."""
        held = (self._own, self._all, self._partials, self._returned)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def own(self, rows: int) -> ExchangedRows:
        """This rank's rows of a round of `rows`, by view: what `parts_of_own` sends."""
        return exchanged_rows(self._own[:rows], self._hidden, self.row_dtype, self._choices)

    def own_states(self, rows: int, count: int) -> Tensor | Codes:
        """The hidden states of the first `count` of `own(rows)`, by view."""
        return self._states(self.own(rows), slice(count))

    def _states(self, rows: ExchangedRows, part: slice) -> Tensor | Codes:
        hidden = rows.hidden[part]
        return hidden if rows.scales is None else Codes(hidden, rows.scales[part], self._powers)

    @contextmanager
    def standing_for_all(self) -> Iterator[None]:
        """Wait for no rank within: this one stands for all, with its rows in the place of each."""
        collectives = self.collectives
        self.collectives = Alike(collectives.rank, collectives.size)
        try:
            yield
        finally:
            self.collectives = collectives

    def parts(self, hidden: Tensor, chosen: Tensor, weights: Tensor, rows: int, experts: Experts) -> Tensor:
        """Sums over the choices of `hidden` [n, h], n <= rows, by rank: [ranks, n, h], void in the next round. `chosen`
        int[n, k], -1 for none; weights [n, k].

        `rows` is the size of the round, equal on all ranks.
        """
        states: Tensor | Codes = hidden
        if self.row_dtype == E4M3:
            states = Codes(*quantize_rows(hidden, powers=self._powers), self._powers)
        pack_rows(states, chosen, weights, self._own[:rows])
        return self.parts_of_own(len(hidden), rows, experts)

    def parts_of_own(self, count: int, rows: int, experts: Experts) -> Tensor:
        """`parts` of `count` rows that lie in `own(rows)`."""
        size, own = self.collectives.size, self._own[:rows]
        everything = self._all[: size * rows]
        self.collectives.all_gather(everything, own)
        partials = self._partials[: size * rows]
        for piece in self._pieces(rows):
            given = unpack_rows(everything[piece], self._hidden, self.row_dtype, self._choices)
            found = experts(self._states(given, slice(None)), given.chosen, given.weights, partials[piece])
            if found.data_ptr() != partials[piece].data_ptr():
                partials[piece] = found
        returned = self._returned[: size * rows].view(size, rows, self._hidden)
        self.collectives.all_to_all(returned, partials.view(size, rows, self._hidden))
        return returned[:, :count]

    def _pieces(self, rows: int) -> Iterator[slice]:
        total, at_once = self.collectives.size * rows, max(rows, PIECE_ROWS // rows * rows)
        if self._deterministic:
            at_once = rows
        elif self._whole:
            at_once = total
        return (slice(start, min(start + at_once, total)) for start in range(0, total, at_once))


def require_alike(collectives: Collectives, arithmetic: str, device: torch.device | str) -> None:
    """Wait for all ranks, and raise ConfigError where one came to another `arithmetic` (ModelInfo.arithmetic): rows of
    an exchange would differ."""
    digest = hashlib.sha256(arithmetic.encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)], device=device)
    everyone = own.new_zeros(collectives.size)
    collectives.all_gather(everyone, own)
    others = [rank for rank, value in enumerate(everyone.tolist()) if value != int(own)]
    if others:
        name = arithmetic or WEIGHT_ONLY
        raise ConfigError(
            f"came to {name} here, and to other products on rank {', '.join(map(str, others))}",
            field=FIELD,
            value=name,
            remedy="set the same on all ranks, and install the same releases",
        )


class Alike:
    """Collectives of one process that stands for all ranks, each with the same rows: to check this rank's share."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        output.view(self.size, -1).copy_(own.reshape(1, -1).expand(self.size, -1))

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        output.copy_(parts[self.rank : self.rank + 1].expand_as(output))

    def broadcast(self, data: Tensor, source: int) -> None:
        """Every rank has it."""


class ProcessGroupCollectives:
    """Over a backend of torch.distributed. On a CPU a call returns when all ranks came; it counts in `progress`."""

    def __init__(self, group: Any, rank: int, size: int, progress: LoopProgress, explain: Callable[[], bool]) -> None:
        """`group` is a Backend. `explain`: whether a lost rank explains a failed call, after a wait; the process then
        ends by itself."""
        self.rank, self.size = rank, size
        self._group, self._progress, self._explain = group, progress, explain

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        with self._entered():
            self._group._allgather_base(output.view(-1), own.reshape(-1)).wait()

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        with self._entered():
            self._group.alltoall_base(output.view(-1), parts.reshape(-1), [], []).wait()

    def broadcast(self, data: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        with self._entered():
            self._group.broadcast([data], options).wait()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self._progress.entered += 1
        self._progress.begin_wait()
        try:
            with explained(self._explain):
                yield
        finally:
            self._progress.end_wait()


@contextmanager
def explained(explain: Callable[[], bool]) -> Iterator[None]:
    """A call of the library, which fails where a rank is lost. `explain` as for ProcessGroupCollectives."""
    try:
        yield
    except RuntimeError:
        if explain():
            _never()
        raise


def _never() -> None:
    """Wait for the end of the process, which the control thread brings about."""
    threading.Event().wait()

"""A state on the GPU with scattered index pages and one index_topk over it, checked against float64 and itself.

The scores that the kernels computed are in their scratch: row after row, padded to whole units, only of rows longer
than k.
"""

from __future__ import annotations

import torch

from kernels.cuda.index_topk import indexer_of, scratch_of
from kernels.cuda.structures import UNIT
from kernels.index_topk import index_topk
from kernels.layout import Geometry
from kernels.reference.index_topk import row_keys, top_positions
from kernels.row_bytes import FP4_KEY_GROUP
from kernels.row_format import RowFormat
from kernels.state import DeviceState, StepBatch
from protocol.units import pages_for

SCALE = 0.25
#: Of the sum of magnitudes of all products: how far a score may be where queries are e4m3.
FP8_QUERIES = 2**-7


class IndexBench:
    """A state on the GPU with scattered index pages, and one step over it."""

    def __init__(
        self,
        lengths: list[int],
        *,
        kind: str = "bfloat16",
        dtype: torch.dtype = torch.bfloat16,
        heads: int = 8,
        dim: int = 32,
        k: int = 64,
        padding: int = 0,
        seed: int = 0,
        exact: bool = False,
        ids: torch.dtype = torch.int32,
    ) -> None:
        self.lengths, self.k = lengths, k
        self.form = RowFormat(kind, dim, 0, FP4_KEY_GROUP if kind == "fp4" else dim)
        self.generator = torch.Generator("cuda").manual_seed(seed)
        held = [pages_for(length) for length in lengths]
        self.state = DeviceState.allocate(
            Geometry(2, 8, (0, 1), self.form.row_bytes, k),
            seats=len(lengths) + 1,
            chunks=1,
            index_pages=sum(held) + 1,
            max_pages=max(held),
            max_chunks=1,
            slab_pages=1,
            tail_slots=1,
            host=torch.zeros(1, 64 * (2 * 8 + 2 * self.form.row_bytes), dtype=torch.uint8),
            device="cuda",
        )
        self.state.hot_slots.zero_()
        self.seats = torch.randperm(len(lengths) + 1, generator=self.generator, device="cuda")[: len(lengths)]
        pages = torch.randperm(sum(held) + 1, generator=self.generator, device="cuda").int()
        for seat, count in zip(self.seats.tolist(), held, strict=True):
            self.state.index_table[seat, :count], pages = pages[:count], pages[count:]
        self.fill_keys(exact)
        batch = len(lengths) + padding
        self.queries = self.draw(exact, batch, heads, dim).to(dtype)
        self.weights = self.draw(exact, batch, heads)
        self.batch = StepBatch.allocate(batch, 2, "cuda")
        self.batch.seats = torch.randint(-2, 5, (batch,), generator=self.generator, device="cuda").to(ids)
        self.batch.lengths = torch.randint(-2, 500, (batch,), generator=self.generator, device="cuda").to(ids)
        self.batch.seats[: len(lengths)] = self.seats.to(ids)
        self.batch.lengths[: len(lengths)] = torch.tensor(lengths, device="cuda").to(ids)
        self.batch.num_real.fill_(len(lengths))

    def draw(self, exact: bool, *shape: int) -> torch.Tensor:
        if exact:
            return torch.randint(-2, 3, shape, generator=self.generator, device="cuda").float()
        return torch.randn(shape, generator=self.generator, device="cuda")

    def fill_keys(self, exact: bool) -> None:
        """Random keys in pieces; exact ones are small integers, in fp8 with scales that are powers of two."""
        for start in range(0, self.state.index_keys.shape[1], 1 << 18):
            part = self.state.index_keys[1, start : start + (1 << 18)]
            values = self.draw(exact, len(part), self.form.scaled)
            if exact and self.form.kind == "fp8":
                exponents = torch.randint(-1, 2, (len(part),), generator=self.generator, device="cuda")
                values[:, 0] = 448 * 2.0**exponents
            part.copy_(self.form.encode(values))

    def run(self) -> torch.Tensor:
        out = torch.full((self.batch.seats.shape[0], self.k), 777, dtype=torch.int32, device="cuda")
        index_topk(self.state, 1, self.queries, self.weights, self.batch, SCALE, out)
        return out

    def keys(self, row: int) -> torch.Tensor:
        """float32[length, D] of a row's context."""
        held = row_keys(self.state, 1, int(self.seats[row]), self.lengths[row])
        assert held is not None
        return self.form.decode(held)

    def scores(self) -> list[torch.Tensor | None]:
        """What the last run computed, by row; None where it had no need to."""
        found: list[torch.Tensor | None] = []
        at = 0
        for length in self.lengths:
            scored = length > self.k
            found.append(scratch_of(self.state).scores[at : at + length].clone() if scored else None)
            at += -(-length // UNIT) * UNIT if scored else 0
        return found

    def check(self) -> None:
        """One run: scores near float64's, the top-k exactly that of the scores, nothing left behind in the scratch."""
        out = self.run()
        for row, (length, scores) in enumerate(zip(self.lengths, self.scores(), strict=True)):
            want = torch.arange(length, device="cuda") if scores is None else top_positions(scores, self.k)
            assert out[row, : len(want)].tolist() == want.tolist(), f"row {row} of length {length}"
            assert bool((out[row, len(want) :] == -1).all()), f"I6: row {row} of length {length}"
            if scores is not None:
                self.check_scores(row, scores)
        assert bool((out[len(self.lengths) :] == -1).all()), "I6: padding"
        assert not scratch_of(self.state).histogram.any()
        assert not scratch_of(self.state).counters.any()
        assert not self.state.tripwires.any()

    @property
    def quantizes(self) -> bool:
        """Return whether queries are multiplied in fp8."""
        indexer = indexer_of(self.queries.shape[1], self.form, self.queries.dtype)
        major, minor = torch.cuda.get_device_capability()
        return indexer.on_hopper(10 * major + minor)

    def check_scores(self, row: int, scores: torch.Tensor) -> None:
        for start in range(0, len(scores), 1 << 16):
            keys = self.keys(row)[start : start + (1 << 16)].double()
            terms = torch.relu(keys @ self.queries[row].double().t() * SCALE) * self.weights[row].double()
            near = 1e-5 * terms.abs().sum(1) + 1e-6 * keys.abs().sum(1)
            if self.quantizes:  # and products are summed to some 14 bits
                reach = keys.abs() @ self.queries[row].double().abs().t() * SCALE
                near += FP8_QUERIES * (reach * self.weights[row].double().abs()).sum(1)
            assert bool(((scores[start : start + (1 << 16)] - terms.sum(1)).abs() <= near).all()), f"row {row}"

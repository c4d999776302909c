"""index_select: the kernel's own source, emulated, against a stable sort of the scores."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from kernels.cuda import structures
from kernels.cuda.index_topk import SELECT_SHARED_BYTES, SELECT_WARPS
from kernels.state import Tripwire
from protocol.units import PAGE_TOKENS
from tests.emulated.device import COMPILER, library

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

Float32Array: TypeAlias = npt.NDArray[np.float32]
SOLO = 512
DRAW = np.random.default_rng(0)


def order_keys(scores: Float32Array) -> npt.NDArray[np.int64]:
    """Integers that compare as scores do: NaN below everything, both zeros equal."""
    bits = (scores + np.float32(0)).view(np.uint32).astype(np.int64)
    return np.where(np.isnan(scores), 0, np.where(bits >> 31, 0xFFFFFFFF - bits, bits | 0x80000000))


def best(scores: Float32Array, k: int) -> list[int]:
    return sorted(np.argsort(-order_keys(scores), kind="stable")[:k].tolist())


@dataclass
class Step:
    """Rows of one launch, each with scores of its own, and what the launch leaves of them."""

    rows: list[Float32Array]
    k: int
    ungranted: tuple[int, ...] = ()
    trips: int = field(default=0, init=False)
    left: bool = field(default=False, init=False)

    def run(self, ranks: int, seed: int = 1) -> list[list[int]]:
        """Output by row."""
        count, unit = len(self.rows), structures.UNIT
        scored = [scores for scores in self.rows if len(scores) > self.k]
        flat = np.concatenate([np.pad(scores, (0, -len(scores) % unit), constant_values=np.nan) for scores in scored])
        flat = (flat + np.float32(0)).astype(np.float32)
        histogram = np.zeros((count, structures.BINS + structures.COARSE_BINS), np.uint32)
        counters = np.zeros((count, structures.COUNTERS), np.int32)
        for row, scores in enumerate(self.rows):
            if len(scores) > self.k:
                np.add.at(histogram[row], order_keys(scores) >> 19, 1)
                np.add.at(histogram[row], structures.BINS + (order_keys(scores) >> 24), 1)
            counters[row, 0] = row in self.ungranted
        pages = max(-(-len(scores) // PAGE_TOKENS) for scores in self.rows)
        seats = np.arange(count, dtype=np.int32)
        lengths = np.array([len(scores) for scores in self.rows], np.int32)
        real = np.array([count], np.int32)
        table = np.zeros((count, pages), np.int32)
        hot = np.zeros(count, np.int32)
        trips = np.zeros(len(Tripwire), np.int64)
        out = np.full((count, self.k), 777, np.int32)
        block = structures.IndexTopk(
            state=structures.State(
                index_table=table.ctypes.data,
                hot_slots=hot.ctypes.data,
                tripwires=trips.ctypes.data,
                key_rows=PAGE_TOKENS,
                seats=count,
                max_pages=pages,
            ),
            batch=structures.Batch(
                seats=seats.ctypes.data, lengths=lengths.ctypes.data, num_real=real.ctypes.data, size=count
            ),
            topk_out=out.ctypes.data,
            scores=flat.ctypes.data,
            histogram=histogram.ctypes.data,
            counters=counters.ctypes.data,
            capacity=len(flat),
            k=self.k,
            rows=count,
        )
        said = ctypes.create_string_buffer(200)
        kernel = library("index_select", (("SELECT_WARPS", SELECT_WARPS), ("SOLO", SOLO))).emulate_index_select
        kernel.restype = ctypes.c_bool
        numbers = (ranks, count, 32 * SELECT_WARPS, ranks, SELECT_SHARED_BYTES, seed)
        assert kernel(ctypes.byref(block), *numbers, said, len(said)), said.value.decode()
        self.trips, self.left = int(trips[Tripwire.UNGRANTED]), bool(histogram.any() or counters.any())
        return out.tolist()

    def check(self, ranks: int) -> None:
        for row, (found, scores) in enumerate(zip(self.run(ranks), self.rows, strict=True)):
            count = min(len(scores), self.k)
            assert found == best(scores, self.k) + [-1] * (self.k - count), f"row {row}"
        assert (self.trips, self.left) == (0, False)


def normal(length: int, spread: float = 1.0) -> Float32Array:
    return (12 + spread * DRAW.standard_normal(length)).astype(np.float32)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_of_all_lengths(ranks: int) -> None:
    """The shortest need no scores, some are one block's, the longest are parted."""
    Step([normal(length) for length in (1, 100, 101, 511, 512, 513, 2049, 9001)], k=100).check(ranks)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("k", [1, 64, 2048])
def test_few_values_and_their_ties(ranks: int, k: int) -> None:
    """Every score many times, so that the bar lies among equal ones; more edges than are compared one by one."""
    rows = [DRAW.integers(low, high, 3000).astype(np.float32) for low, high in ((-2, 3), (0, 400))]
    Step(rows, k).check(ranks)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-2])
def test_scores_crowded_into_a_bin(ranks: int, spread: float) -> None:
    """More edges than lists hold: equal, different in the last bits, or within one bin."""
    Step([normal(6000, spread), normal(700)], k=300).check(ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_positions_than_threads_hold(ranks: int) -> None:
    """A bitmap stands for them; few values, whose ties are cut."""
    Step([normal(20_000), np.round(normal(17_000) * 40).astype(np.float32)], k=2048).check(ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_position_beyond_a_bitmap(ranks: int) -> None:
    Step([normal(140_000), normal(300_000)], k=2048).check(ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_infinities_and_nan(ranks: int) -> None:
    """NaN is chosen last of all, after -inf."""
    scores = normal(900)
    scores[10:40], scores[60:64], scores[600:640] = np.nan, np.inf, -np.inf
    for k in (3, 862, 880):
        Step([scores], k).check(ranks)


@pytest.mark.parametrize("ranks", [1, 4])
def test_row_that_is_not_wholly_granted(ranks: int) -> None:
    """-1 and a trip; rows beside it are whole, and nothing is left behind."""
    step = Step([normal(800), normal(900), normal(70)], 64, ungranted=(1,))
    first, second, third = step.run(ranks)
    assert second == [-1] * 64
    assert [first, third] == [best(step.rows[0], 64), best(step.rows[2], 64)]
    assert (step.trips, step.left) == (1, False)


def test_edges_in_one_part_of_a_row() -> None:
    """One block of four has all edges, and all that is chosen."""
    scores = normal(4000, 0.1)
    scores[3100:3900] += 30
    Step([scores], 500).check(4)

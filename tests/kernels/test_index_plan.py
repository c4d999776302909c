"""Shares of the blocks of index_scores on Hopper, and their histograms: the kernels' own source, emulated."""

from __future__ import annotations

import ctypes
import random
import tempfile
from functools import lru_cache

import numpy as np
import pytest

from kernels.cuda import structures
from kernels.cuda.index_topk import AHEAD_ROWS, HOPPER, HOPPER_WARPS, Indexer
from protocol.units import PAGE_TOKENS
from tests.emulated.device import COMPILER, FLAGS, SOURCE, build, sources_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

INDEXER = Indexer(64, 128, 2, 1)
THREADS = 32 * HOPPER_WARPS + 32
K = 64
AHEAD_PAGES = 16
TOLD, ASKED = 400, 32  # words of a block: parts of its share, and pages that it had brought to L2
PROBE = """
#include "cuda.hpp"
#include "barriers.cuh"
#include "index_plan.cuh"
void index_plan(hisparse::IndexTopk p) {
    using namespace hisparse;
    ScoreShared& s = *reinterpret_cast<ScoreShared*>(emulated::self->block->shared);
    const i64 bytes = p.batch.size * (p.batch.wide_lengths ? 8 : 4);
    void* const lengths = const_cast<void*>(p.batch.lengths);
    if (p.scores && threadIdx.x == 0) std::memcpy(lengths, p.scores, bytes);
    if (threadIdx.x == 0) brought.clear();  // libraries of one process share it
    __syncthreads();
    ends = [&] { if (p.scores) std::memcpy(lengths, p.histogram, bytes); };
    const PlannedShare plan = plan_share(p, s);
    ends = {};
    if (threadIdx.x != 0) return;
    i32* const told = p.topk_out + blockIdx.x * TOLD;
    each_part(s, plan.own, [&](int row, u32 from, u32 stop, u32 before) {
        i32* const part = told + 1 + 4 * told[0]++;
        part[0] = row, part[1] = from, part[2] = stop, part[3] = before;
    });
    i32* const asked = p.counters + blockIdx.x * ASKED;
    for (const void* page : brought)
        asked[++asked[0]] = static_cast<i32>((static_cast<const u8*>(page) - p.state.index_keys) / PAGE_BYTES);
}
void index_flush(hisparse::IndexTopk p) {
    using namespace hisparse;
    u32* const bins = reinterpret_cast<u32*>(p.counters);
    if (p.k == 512) flush_bins<512>(bins, p.histogram);
    if (p.k == 384) flush_bins<384>(bins, p.histogram);
    if (p.k == 32) flush_bins<32>(bins, p.histogram);
}
"""


@lru_cache
def probe() -> ctypes.CDLL:
    flags = [
        *FLAGS,
        *(f"-D{key}={value}" for key, value in (*INDEXER.defines(HOPPER), ("TOLD", TOLD), ("ASKED", ASKED))),
    ]
    source = PROBE + SOURCE.format(kernel="index_plan") + SOURCE.format(kernel="index_flush")
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(build("index_plan", sources_of("index_plan", source=source), flags).cubin)
        file.flush()
        return ctypes.CDLL(file.name)


def check(
    lengths: list[int],
    hot: list[int],
    real: int,
    blocks: int,
    *,
    wide: bool = False,
    seed: int = 0,
    ahead_of: list[int] | None = None,
) -> None:
    """Every block's share and the pages that it asked for, against the pages of all rows in order. `ahead_of`: lengths
    as they stand until the kernel ahead has ended; what was asked for is not compared then."""
    draw = random.Random(seed)
    rows, most = len(lengths), max(1, *(-(-length // PAGE_TOKENS) for length in lengths))
    named = draw.sample(range(len(hot)), rows)
    ids = np.int64 if wide else np.int32
    seats, held = np.array(named, ids), np.array(lengths, ids)
    table = np.array(draw.sample(range(len(hot) * most), len(hot) * most), np.int32).reshape(len(hot), most)
    early, final = np.array(ahead_of or lengths, ids), held.copy()
    slots, count = np.array(hot, np.int32), np.array([real], np.int32)
    told, asked = np.zeros(blocks * TOLD, np.int32), np.zeros(blocks * ASKED, np.int32)
    keys = np.zeros(32, np.uint8)
    block = structures.IndexTopk(
        state=structures.State(
            index_table=table.ctypes.data,
            hot_slots=slots.ctypes.data,
            index_keys=-(-keys.ctypes.data // 16) * 16,
            key_rows=PAGE_TOKENS * table.size,
            seats=len(hot),
            max_pages=most,
        ),
        batch=structures.Batch(
            seats=seats.ctypes.data,
            lengths=held.ctypes.data,
            num_real=count.ctypes.data,
            size=rows,
            wide_seats=int(wide),
            wide_lengths=int(wide),
        ),
        topk_out=told.ctypes.data,
        counters=asked.ctypes.data,
        capacity=1 << 30,
        k=K,
        rows=rows,
        scores=early.ctypes.data if ahead_of else 0,
        histogram=final.ctypes.data,
    )
    said = ctypes.create_string_buffer(200)
    kernel = probe().emulate_index_plan
    kernel.restype = ctypes.c_bool
    numbers = (blocks, 1, THREADS, 1, INDEXER.shared_bytes(HOPPER), seed)
    assert kernel(ctypes.byref(block), *numbers, said, len(said)), said.value.decode()

    scored = [row for row in range(rows) if row < real and lengths[row] > K and hot[named[row]] >= 0]
    pages = [(row, page) for row in scored for page in range(-(-lengths[row] // PAGE_TOKENS))]
    over = blocks % len(scored) if 0 < len(scored) <= blocks else 0
    sharing = blocks - (over if over <= blocks // 16 else 0)
    for number in range(blocks):
        begin, end = (one * (len(pages) // sharing) + min(one, len(pages) % sharing) for one in (number, number + 1))
        want = pages[begin:end] if number < sharing else []
        found: list[tuple[int, int]] = []
        words = told[number * TOLD :]
        for row, first, stop, before in words[1 : 1 + 4 * words[0]].reshape(-1, 4).tolist():
            assert before == len(found)
            found += [(row, page) for page in range(first, stop)]
        assert found == want, f"block {number}"
        words = asked[number * ASKED :]
        ahead = [int(table[named[row], page]) for row, page in want[:AHEAD_PAGES] if row == want[0][0]]
        ahead = sorted(ahead) if rows <= AHEAD_ROWS else []
        assert ahead_of or sorted(words[1 : 1 + words[0]].tolist()) == ahead, f"block {number}"


@pytest.mark.parametrize("rows", [1, 2, 3, 33, 63, 64, 65, 70])
def test_blocks_share_the_pages_of_all_rows_that_are_scored(rows: int) -> None:
    """Some rows need no scores, some seats have no slots, some rows are padding."""
    draw = random.Random(rows)
    lengths = [draw.choice([1, 50, 64, 65, 200, 1000, 3000]) for _ in range(rows)]
    hot = [draw.choice([3, 3, 3, -1]) for _ in range(rows + 2)]
    check(lengths, hot, rows, 13, seed=rows)
    check(lengths, hot, rows - 1, 4, wide=True, seed=rows)


@pytest.mark.parametrize("wide", [False, True])
def test_what_the_kernel_ahead_changes_last_counts(wide: bool) -> None:
    check([3000, 50, 700, 65], [3, 3, 3, 3, 3], 4, 1, wide=wide, ahead_of=[3000, 50, 701, 65])
    check([3000, 50, 700], [3, 3, -1, 3], 3, 1, wide=wide, ahead_of=[64, 50, 9])


def test_rows_of_one_length_are_cut_at_their_ends() -> None:
    check([8192], [0], 1, 132)
    check([2048] * 16, [0] * 16, 16, 33)
    check([2048] * 3, [0] * 3, 3, 34)


def test_a_step_without_rows_has_no_shares() -> None:
    check([3000, 200], [0, 0], 0, 4)
    check([3000, 200], [-1, -1], 2, 4)


@pytest.mark.parametrize("threads", [32, 384, 512])
def test_a_histogram_is_added_and_emptied(threads: int) -> None:
    """Few bins, far apart, and a crowd of neighbours; the row's histogram holds something before."""
    draw = np.random.default_rng(threads)
    bins = np.zeros(structures.BINS, np.uint32)
    bins[[0, 31, 32, 4095, structures.BINS - 1]] = draw.integers(1, 9, 5)
    bins[5000:5100] = draw.integers(0, 3, 100)
    histogram = draw.integers(0, 5, structures.BINS + structures.COARSE_BINS).astype(np.uint32)
    want = histogram + np.concatenate([bins, bins.reshape(structures.COARSE_BINS, -1).sum(axis=1, dtype=np.uint32)])
    block = structures.IndexTopk(counters=bins.ctypes.data, histogram=histogram.ctypes.data, k=threads)
    said = ctypes.create_string_buffer(200)
    kernel = probe().emulate_index_flush
    kernel.restype = ctypes.c_bool
    assert kernel(ctypes.byref(block), 1, 1, threads, 1, 0, 1, said, len(said)), said.value.decode()
    assert histogram.tolist() == want.tolist()
    assert not bins.any()

"""The list by which prompt_index selects, and prompt_merge: the kernels' source, emulated, against a stable sort."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from protocol.arrays import Int32Array
from protocol.units import PAGE_TOKENS
from tests.emulated.device import FLAGS, build, compiler_version, sources_of
from tests.support.kept_kernels import digest, kept, sources_key

Float32Array: TypeAlias = npt.NDArray[np.float32]

#: Entries of a list, as the source has it.
LISTED: Final = 4096
K: Final = 2048
GROUP: Final = 8
UNIT: Final = """
#include "cuda.hpp"
#include "prompt_merge.cuh"

using namespace hisparse;
struct Try {
    const float* scores;
    i32 *out, *rows;
    const i32* slab_pages;
    u32* lists;
    i32 length, k, splits;
};
void try_list(const Try p) {
    static u32 bins[SPLITS_MAX][RANGE_BINS];
    static MergeShared s;
    const i32 lane = threadIdx.x % 32, share = threadIdx.x / 32;
    const ListOut out{p.out, p.rows, p.slab_pages};
    const i64 first = (p.splits - 1) * GROUP, own = (first - share * GROUP) * (2 * LISTED);
    if (share < p.splits) {
        PromptList<8> list{{p.lists + own, bins[share]}, static_cast<u32>(p.k)};
        const i32 end = p.length * (share + 1) / p.splits;
        for (i32 base = p.length * share / p.splits; base < end; base += 32 * TAKEN) {
            u32 keys[TAKEN];
            for (i32 i = 0; i < TAKEN; ++i) {
                const i32 position = base + lane + 32 * i;
                keys[i] = position < end ? prompt_order(p.scores[position]) : 0;
            }
            if (list.crowded()) list.keep(list.cut(false));
            list.take(keys, base + lane, end);
        }
        if (p.splits == 1) list.put(list.cut(true), out);
        else list.save(s.heads + share);
    }
    __syncthreads();
    PromptIndex index{};
    index.lists = p.lists, index.k = p.k, index.splits = p.splits;
    if (p.splits > 1) Merging{index, s, first}.select(out);
}
extern "C" bool run_try(const float* scores, int length, int k, int splits, int* out, int* rows, const int* slab_pages,
                        void* lists) {
    Try p{scores, out, rows, slab_pages, static_cast<u32*>(lists), length, k, splits};
    return emulated::run(try_list, &p, {1, 1, 1}, splits > 1 ? MERGE_THREADS : 32, 1, 0, 1).empty();
}
"""


@cache
def library() -> ctypes.CDLL:
    sources = sources_of("prompt_merge", source=UNIT)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "unit.so"
        key = digest(compiler_version(), *FLAGS, *sources_key(sources, ()))
        built = kept("prompt_list-emulated", key, partial(build, "prompt_merge", sources, list(FLAGS)))
        path.write_bytes(built.cubin)
        return ctypes.CDLL(str(path))


def selected(scores: Float32Array, k: int, splits: int = 1) -> Int32Array:
    """Positions that a list selects, or prompt_merge of the lists of `splits` equal parts. Their rows are checked."""
    out, rows = np.full((2, k), -1, np.int32)
    pages = np.random.default_rng(0).permutation(-(-len(scores) // PAGE_TOKENS)).astype(np.int32)
    lists = np.zeros((splits * GROUP, 2, LISTED), np.uint32)
    scores = np.ascontiguousarray(scores, np.float32)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (scores, out, rows, pages, lists)]
    assert library().run_try(pointers[0], len(scores), k, splits, *pointers[1:])
    assert np.array_equal(rows, pages[out // PAGE_TOKENS] * PAGE_TOKENS + out % PAGE_TOKENS)
    return out


def best(scores: Float32Array, k: int) -> Int32Array:
    """Positions of the k highest, of equal ones the lowest, ascending; NaN is below all."""
    order = np.argsort(-np.where(np.isnan(scores), -np.inf, scores), kind="stable")
    order = np.concatenate((order[~np.isnan(scores[order])], order[np.isnan(scores[order])]))
    return np.sort(order[:k]).astype(np.int32)


def ramps(dice: np.random.Generator, length: int) -> Float32Array:
    """A history of topics: stretches that rise and fall."""
    return np.float32(np.sin(np.arange(length) / dice.integers(50, 3_000)) + 0.01 * dice.standard_normal(length))


KINDS: Final[dict[str, Callable[[np.random.Generator, int], Float32Array]]] = {
    "normal": lambda dice, length: np.float32(dice.standard_normal(length)),
    "ascending": lambda _, length: np.arange(length, dtype=np.float32),
    "descending": lambda _, length: -np.arange(length, dtype=np.float32),
    "equal": lambda _, length: np.full(length, 0.25, np.float32),
    "few values": lambda dice, length: np.float32(dice.integers(0, 3, length)),
    "zeros of both signs": lambda dice, length: np.float32(dice.choice((0.0, -0.0), length)),
    "neighbours": lambda dice, length: np.float32(dice.integers(1 << 23, (1 << 23) + 700, length)),
    "ramps": ramps,
    "all magnitudes": lambda dice, length: np.float32(
        dice.choice((-1, 1), length) * 10.0 ** dice.uniform(-38, 38, length)
    ),
    "infinities and no numbers": lambda dice, length: np.float32(dice.choice((np.inf, -np.inf, np.nan, 1.0), length)),
    "ties behind the bar": lambda dice, length: np.float32(
        np.minimum(dice.integers(0, 40, length), 39 - 2 * (np.arange(length) % 3))
    ),
}


@pytest.mark.parametrize("length", [K + 1, LISTED - 63, LISTED, 9_001, 20_000])
@pytest.mark.parametrize("kind", KINDS)
def test_list_selects_the_best_of_any_scores(kind: str, length: int) -> None:
    scores = KINDS[kind](np.random.default_rng(length), length)
    assert np.array_equal(selected(scores, K), best(scores, K))


@pytest.mark.parametrize("splits", [2, 7, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_lists_select_what_one_does(kind: str, splits: int) -> None:
    scores = KINDS[kind](np.random.default_rng(splits), 30_000)
    assert np.array_equal(selected(scores, K, splits), best(scores, K))


@pytest.mark.parametrize("k", [1, 63, 64, 1_000, 3_072])
def test_list_selects_any_number(k: int) -> None:
    scores = np.float32(np.random.default_rng(k).integers(0, 5_000, 12_345))
    assert np.array_equal(selected(scores, k), best(scores, k))

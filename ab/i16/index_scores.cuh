// index_scores: the score of every position of every row longer than k, and a histogram of them per row.
//
// Compiled for one indexer: HEADS, DIM, QUERY_BYTES, KEY_BYTES, and WARPS and STAGES by the architecture's shared
// memory (kernels/cuda/index_topk.py). A block's share is a run of units, mostly of one row; its warps take them in
// turn, each through a ring of STAGES units of its own in shared memory, so that only the histogram, and products that
// a team makes together, let warps wait for each other. Keys lie in pages of 64: 32 pages are looked up at a time.
//
// The histogram is kept in shared memory and added to the row's own when the share leaves the row: only bins that are
// not empty travel.
#pragma once

#if QUERY_BYTES == 2
#include "index_mma.cuh"
#else
#include "index_fma.cuh"
#endif

namespace hisparse {

constexpr int SCORE_THREADS = 32 * WARPS;
static_assert(STAGES >= 2, "one unit is read while another arrives");

// The index pages of every WARPS-th unit, 32 looked up at a time and 32 ahead of those.
struct Pages {
    const i32* table;
    u32 unit;   // the warp's first
    int count;  // its units
    i32 held, later;

    __device__ __forceinline__ Pages(const i32* table, u32 unit, int count) : table(table), unit(unit), count(count) {
        held = look_up(0);
        later = look_up(32);
    }
    __device__ __forceinline__ i32 look_up(int from) const {
        const int i = from + static_cast<int>(threadIdx.x % 32);
        return i < count ? table[(unit + i * WARPS) / (PAGE_TOKENS / UNIT)] : -1;
    }
    // For i = 0, 1, 2, ... in order.
    __device__ __forceinline__ i32 next(int i) {
        if (i % 32 == 0 && i > 0) {
            held = later;
            later = look_up(i + 32);
        }
        return __shfl_sync(0xFFFFFFFF, held, i % 32);
    }
};

// How many units a warp takes that begins with `unit`.
__device__ __forceinline__ int turns(u32 unit, u32 end) {
    return unit < end ? static_cast<int>((end - unit + WARPS - 1) / WARPS) : 0;
}

// Units [begin, end) of the row, whose scores begin at `scores`.
__device__ __forceinline__ void score_units(const IndexTopk& p, int row, u32 begin, u32 end, float* scores, u8* ring,
                                            Queries& queries, u32* bins) {
    const IndexRow at = index_row(p, row);
    const int lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32, unit = begin + warp;
    const int count = turns(unit, end), rounds = turns(begin + warp / TEAM * TEAM, end);
    const u32 pages_held = static_cast<u32>(p.state.key_rows / PAGE_TOKENS);
    const u8* const keys = p.state.index_keys + p.group * p.state.key_rows * KEY_ROW;
    Pages pages(p.state.index_table + static_cast<i64>(at.seat) * p.state.max_pages, unit, count);
    auto issue = [&](int i, int slot) {
        if (i < count) {
            const u32 page = static_cast<u32>(pages.next(i));
            const u32 part = (unit + i * WARPS) % (PAGE_TOKENS / UNIT);
            const i64 first = static_cast<i64>(page) * PAGE_TOKENS + part * UNIT;
            if (page < pages_held)
                stage_unit(ring + slot * UNIT_BYTES, keys + first * KEY_ROW);
            else if (lane == 0)
                p.counters[row * COUNTERS + UNGRANTED_ROW] = 1;
        }
        end_stage();
    };
    for (int i = 0; i < STAGES - 1; ++i) issue(i, i);
    Scorer::stage(p, row, queries);
    __syncthreads();
    const Scorer scorer(queries);
    int slot = 0, free = STAGES - 1;
    const auto next = [&](int i) { return i + 1 == STAGES ? 0 : i + 1; };
    const auto keep = [&](int i, float score, int key, bool mine) {
        score += 0.0f;  // -0 becomes 0
        const u32 position = (unit + i * WARPS) * UNIT + key;
        if (mine && i < count && position < static_cast<u32>(at.length)) {
            scores[position] = score;
            atomicAdd(bins + (order_key(score) >> BIN_SHIFT), 1u);
        }
    };
    int key;
    bool mine;
    for (int i = 0; i < rounds; ++i) {
        await_stage<STAGES - 2>();
        issue(i + STAGES - 1, free);
        const float score = scorer.score(ring + slot * UNIT_BYTES, key, mine);
        keep(i, score, key, mine);
        free = slot, slot = next(slot);
    }
    await_stage<0>();
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::SCORE_THREADS, 1)
    index_scores(const __grid_constant__ hisparse::IndexTopk p) {
    using namespace hisparse;
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ u32 first[BATCH_MAX + 1], sums[WARPS];
    u32* const bins = reinterpret_cast<u32*>(dynamic);
    Queries& queries = *reinterpret_cast<Queries*>(dynamic + sizeof(u32) * BINS);
    u8* const rings = dynamic + sizeof(u32) * BINS + (sizeof(Queries) + 127) / 128 * 128;
    u8* const ring = rings + threadIdx.x / 32 * (STAGES * UNIT_BYTES);
    let_next_begin();
    for (int i = 4 * threadIdx.x; i < BINS; i += 4 * SCORE_THREADS)
        *reinterpret_cast<uint4*>(bins + i) = make_uint4(0, 0, 0, 0);
    divide<SCORE_THREADS>(p, sums, units_of, [&](int row, u32 units) { first[row] = units; });
    const u32 total = static_cast<u32>(min(static_cast<i64>(first[p.batch.size]), p.capacity / UNIT));
    u32 begin = share(total, blockIdx.x, gridDim.x);
    const u32 end = share(total, blockIdx.x + 1, gridDim.x);
    for (int row = row_at(first, p.batch.size, begin); begin < end; ++row) {
        const u32 stop = min(end, first[row + 1]);
        if (begin >= stop) continue;
        float* const scores = p.scores + static_cast<i64>(first[row]) * UNIT;
        score_units(p, row, begin - first[row], stop - first[row], scores, ring, queries, bins);
        __syncthreads();
        flush_bins<SCORE_THREADS>(bins, row_histogram(p, row));
        __syncthreads();
        begin = stop;
    }
}

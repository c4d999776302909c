// What the two kernels of index_topk share: which rows take part, how work is cut, how scores are ordered.
//
//     index_scores   scores of every row longer than k, and a histogram of their order keys by the top 13 bits
//     index_select   the bin of the k-th score, the few positions at or above it, exact selection among those
//
// Scoring is a grid of one block per multiprocessor. Its work is measured in units of keys, summed over rows from the
// lengths on the device, and cut into equal shares of whole units: the time follows the tokens held, not the captured
// maximum, and one long row is shared by all blocks. Scores lie row after row, padded to whole units: rows hold pages of
// their own, so all scores of a step fit in one float per index-key row. Selection is a cluster of blocks a row.
//
// Order key of a score: a u32 that compares as the score does, 0 for NaN, equal for both zeros.
//
// Rejected: a grid-wide barrier between scoring and selection (every block resident at once, and no gain over a second
// launch inside a graph), scores per head in memory (64 times the traffic), an approximate threshold.
#pragma once

#include "memory.cuh"

namespace hisparse {

constexpr int BIN_SHIFT = 19;
static_assert(BINS == 1 << (32 - BIN_SHIFT), "a bin is the top bits of an order key");
static_assert(PAGE_TOKENS % UNIT == 0, "a unit lies in one page");

enum Counter { UNGRANTED_ROW };
enum Kind { PADDING, REFUSED, IDENTITY, SCORED };

struct IndexRow {
    i32 seat, length;
    Kind kind;
};

// A row as the batch names it.
struct NamedRow {
    i32 row, real;
    i64 seat, length;
};
__device__ __forceinline__ NamedRow named_row(const IndexTopk& p, int row) {
    return {row, *p.batch.num_real, read_id(p.batch.seats, row, p.batch.wide_seats),
            read_id(p.batch.lengths, row, p.batch.wide_lengths)};
}
// hot_slots(seat): of the state's.
template <class HotSlots>
__device__ __forceinline__ IndexRow index_row(const IndexTopk& p, const NamedRow& named, HotSlots hot_slots) {
    const i64 seat = named.seat, length = named.length;
    const bool seated = seat >= 0 && seat < p.state.seats && hot_slots(seat) >= 0;
    if (named.row >= named.real || named.row >= p.rows || length < 1 || !seated) return {-1, 0, PADDING};
    const i32 held = static_cast<i32>(seat);
    if (length > static_cast<i64>(p.state.max_pages) * PAGE_TOKENS) return {held, 0, REFUSED};
    return {held, static_cast<i32>(length), length <= p.k ? IDENTITY : SCORED};
}
__device__ __forceinline__ IndexRow index_row(const IndexTopk& p, int row) {
    return index_row(p, named_row(p, row), [&](i64 seat) { return p.state.hot_slots[seat]; });
}

__device__ __forceinline__ u32 units_of(const IndexRow& r) {
    return r.kind == SCORED ? static_cast<u32>(r.length + UNIT - 1) / UNIT : 0;
}

// Sum of `value` over the threads before this one; `total` over all. `sums` holds a word per warp.
template <int THREADS, class Sum> __device__ __forceinline__ Sum sum_before(Sum value, Sum* sums, Sum& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Sum inclusive = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Sum left = __shfl_up_sync(0xFFFFFFFF, inclusive, step);
        if (lane >= step) inclusive += left;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    Sum before = inclusive - value;
    total = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
        const Sum sum = sums[w];
        if (w < warp) before += sum;
        total += sum;
    }
    return before;
}

// store(row, sum of measure over all rows before it), and for row = batch over all. Ends with a barrier.
template <int THREADS, class Sum, class Measure, class Store>
__device__ __forceinline__ void divide(const IndexTopk& p, Sum* sums, Measure measure, Store store) {
    Sum carry = 0;
    for (int base = 0; base < p.batch.size; base += THREADS) {
        const int row = base + static_cast<int>(threadIdx.x);
        Sum total;
        const Sum before =
            sum_before<THREADS, Sum>(row < p.batch.size ? measure(index_row(p, row)) : Sum(0), sums, total);
        if (row < p.batch.size) store(row, carry + before);
        carry += total;
    }
    if (threadIdx.x == 0) store(p.batch.size, carry);
    __syncthreads();
}

// The row that holds unit `place`: the last with first[row] <= place that is not empty.
__device__ __forceinline__ int row_at(const u32* first, int rows, u32 place) {
    int low = 0, high = rows;
    while (low + 1 < high) {
        const int middle = (low + high) / 2;
        if (first[middle] <= place)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Where block b's share of `total` units begins, of so many blocks.
__device__ __forceinline__ u32 share(u32 total, u32 block, u32 blocks) {
    return block * (total / blocks) + min(block, total % blocks);
}

__device__ __forceinline__ u32 order_key(float score) {
    const u32 bits = __float_as_uint(score);
    if (score != score) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Add what `bins` holds to the row's histogram, and empty them; only bins from `lowest` to `highest` hold anything. Whole
// warps, THREADS in all.
template <int THREADS>
__device__ __forceinline__ void flush_bins(u32* bins, u32* histogram, u32 lowest = 0, u32 highest = BINS - 1) {
    static_assert(BINS == 32 * COARSE_BINS && THREADS % 32 == 0, "eight lanes hold what a coarse bin sums");
#pragma unroll 1
    for (u32 i = lowest / 128 * 32 + threadIdx.x; i / 32 <= highest / 128; i += THREADS) {
        const uint4 held = reinterpret_cast<const uint4*>(bins)[i];
        u32 sum = held.x + held.y + held.z + held.w;
        if (__any_sync(0xFFFFFFFF, sum != 0) == 0) continue;
        if (sum != 0) {
            reinterpret_cast<uint4*>(bins)[i] = make_uint4(0, 0, 0, 0);
            if (held.x) atomicAdd(histogram + 4 * i, held.x);
            if (held.y) atomicAdd(histogram + 4 * i + 1, held.y);
            if (held.z) atomicAdd(histogram + 4 * i + 2, held.z);
            if (held.w) atomicAdd(histogram + 4 * i + 3, held.w);
        }
#pragma unroll
        for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
        if (threadIdx.x % 8 == 0 && sum != 0) atomicAdd(histogram + BINS + i / 8, sum);
    }
}
__device__ __forceinline__ u32* row_histogram(const IndexTopk& p, int row) {
    return p.histogram + static_cast<i64>(row) * (BINS + COARSE_BINS);
}

}  // namespace hisparse

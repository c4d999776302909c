// index_select: an exact top-k of each row's scores, ties to the lowest position, ascending by position.
//
//     1  The row's histogram gives the bin of the k-th score, and how many scores lie above it.
//     2  Every block collects from its share: positions above the bin are chosen for sure, those in it are *edges*.
//        Both go to lists of the row, in any order.
//     3  The block that ends the row's last share refines the k-th score among the edges by the other 19 bits of the
//        key (two more histograms), then marks the chosen in a bitmap over positions, in windows of 262,144: counting
//        bits gives each its place, so the output is ascending without a sort, and ties go to the lowest positions.
//
// Where scores crowd into one bin (all equal, say) the list of edges would overflow: then step 3 reads the row's scores
// again instead. Slower, as exact.
//
// The ending block empties histogram and counters for the next launch. Lists are read past L1: other blocks wrote them.
// Rows not longer than k, padding and refused rows need no scores: one unit of work each.
#pragma once

#include "index_rows.cuh"

namespace hisparse {

constexpr int SELECT_THREADS = 1024;
constexpr int STRIDE = 4 * SELECT_THREADS;    // positions that a block reads together
constexpr int WINDOW_WORDS = 8 * SELECT_THREADS;
constexpr int WINDOW = 32 * WINDOW_WORDS;
constexpr int BINS_EACH = BINS / SELECT_THREADS;
constexpr int FINE_BITS = 10;
static_assert(STRIDE <= EDGES_MAX, "a block's list takes what it reads together");
static_assert(BINS_EACH == 8 && BIN_SHIFT <= 2 * FINE_BITS && 1 << FINE_BITS <= SELECT_THREADS, "a thread per bin");

// Dynamic shared memory: lists while collecting, bitmaps while ending.
struct Lists {
    u64 edges[EDGES_MAX];  // order key << 32 | position
    i32 sure[TOPK_MAX];
};
struct Bitmaps {
    u32 taken[WINDOW_WORDS];
    u32 tied[WINDOW_WORDS];
};

// Where the k-th score lies: in `bin`, with `above` scores in higher bins and `inside` in it.
struct Cut {
    u32 bin, above, inside;
};

struct SelectShared {
    u32 units[BATCH_MAX + 1], spans[BATCH_MAX + 1];
    u32 sums[SELECT_THREADS / 32];
    Cut cut;
    u32 edges, sure, edge_base, sure_base;
    u32 crowded, last;
};

// The bin, counted from the highest, in which the `wanted`-th falls. Each thread holds EACH bins, highest first.
template <int EACH>
__device__ __forceinline__ Cut find_cut(const u32 (&counts)[EACH], u32 bins, u32 wanted, SelectShared& s) {
    u32 sum = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += counts[i];
    u32 before = sum_before<SELECT_THREADS>(sum, s.sums, total);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (before < wanted && wanted <= before + counts[i])
            s.cut = {bins - 1 - (threadIdx.x * EACH + i), before, counts[i]};
        before += counts[i];
    }
    __syncthreads();
    return s.cut;
}

__device__ __forceinline__ Cut row_cut(const IndexTopk& p, int row, SelectShared& s) {
    const u32* const bins = p.histogram + static_cast<i64>(row) * BINS + (BINS - BINS_EACH * (threadIdx.x + 1));
    const uint4 low = reinterpret_cast<const uint4*>(bins)[0], high = reinterpret_cast<const uint4*>(bins)[1];
    const u32 counts[BINS_EACH] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
    return find_cut(counts, BINS, p.k, s);
}

// Move the block's list of edges to the row's.
__device__ __forceinline__ void flush_edges(const IndexTopk& p, int row, Lists& lists, SelectShared& s) {
    const u32 count = s.edges;
    if (threadIdx.x == 0) s.edge_base = atomicAdd(p.counters + row * COUNTERS + EDGES, static_cast<i32>(count));
    __syncthreads();
    const u32 base = s.edge_base;
    u64* const target = p.edges + static_cast<i64>(row) * EDGES_MAX;
    for (u32 i = threadIdx.x; i < count && base + i < EDGES_MAX; i += SELECT_THREADS) target[base + i] = lists.edges[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        s.edges = 0;
        s.crowded = base + count > EDGES_MAX;
    }
    __syncthreads();
}

__device__ __forceinline__ void flush_sure(const IndexTopk& p, int row, Lists& lists, SelectShared& s) {
    const u32 count = s.sure;
    if (threadIdx.x == 0) s.sure_base = atomicAdd(p.counters + row * COUNTERS + SURE, static_cast<i32>(count));
    __syncthreads();
    i32* const target = p.sure + static_cast<i64>(row) * TOPK_MAX + s.sure_base;
    for (u32 i = threadIdx.x; i < count; i += SELECT_THREADS) target[i] = lists.sure[i];
}

__device__ __forceinline__ float4 four_scores(const float* scores, u32 position, u32 end) {
    return position < end ? *reinterpret_cast<const float4*>(scores + position) : make_float4(0, 0, 0, 0);
}

// Positions [begin, end) of the row at or above the bin, into the row's lists.
__device__ __forceinline__ void collect(const IndexTopk& p, int row, const float* scores, u32 begin, u32 end, u32 bin,
                                        Lists& lists, SelectShared& s) {
    if (threadIdx.x == 0) s.edges = s.sure = s.crowded = 0;
    float4 ahead = four_scores(scores, begin + 4 * threadIdx.x, end);
    __syncthreads();
    for (u32 at = begin; at < end; at += STRIDE) {
        const u32 position = at + 4 * threadIdx.x;
        const float four[4] = {ahead.x, ahead.y, ahead.z, ahead.w};
        ahead = four_scores(scores, position + STRIDE, end);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 key = order_key(four[i]);
            if (position + i >= end || key >> BIN_SHIFT < bin) continue;
            if (key >> BIN_SHIFT > bin)
                lists.sure[atomicAdd(&s.sure, 1u) % TOPK_MAX] = static_cast<i32>(position + i);
            else if (!s.crowded)
                lists.edges[atomicAdd(&s.edges, 1u) % EDGES_MAX] = static_cast<u64>(key) << 32 | (position + i);
        }
        // Whoever adds the last edge sees the final count, so all threads decide alike.
        const u32 held = *static_cast<volatile u32*>(&s.edges);
        if (__syncthreads_or(held > EDGES_MAX - STRIDE)) flush_edges(p, row, lists, s);
    }
    if (s.edges) flush_edges(p, row, lists, s);
    if (s.sure) flush_sure(p, row, lists, s);
}

// Calls f(key, position) for the row's edges: from the list, or from all scores when the list did not hold them.
template <class Each>
__device__ __forceinline__ void each_edge(const IndexTopk& p, int row, const float* scores, u32 length, u32 bin,
                                          u32 listed, Each f) {
    if (listed <= EDGES_MAX) {
        const u64* const edges = p.edges + static_cast<i64>(row) * EDGES_MAX;
        for (u32 i = threadIdx.x; i < listed; i += SELECT_THREADS) {
            const u64 edge = __ldcg(edges + i);
            f(static_cast<u32>(edge >> 32), static_cast<u32>(edge));
        }
        return;
    }
    for (u32 position = 4 * threadIdx.x; position < length; position += STRIDE) {
        const float4 v = four_scores(scores, position, length);
        const float four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 key = order_key(four[i]);
            if (position + i < length && key >> BIN_SHIFT == bin) f(key, position + i);
        }
    }
}

// Keys above `bar` are chosen, and the first `ties` of those equal to it.
struct Bar {
    u32 key, ties;
};

__device__ __forceinline__ Bar find_bar(const IndexTopk& p, int row, const float* scores, u32 length, Cut cut,
                                        u32 listed, u32* bins, SelectShared& s) {
    u32 prefix = cut.bin, wanted = p.k - cut.above, shift = BIN_SHIFT, inside = cut.inside;
    while (shift > 0 && inside != wanted) {
        const u32 bits = min(shift, static_cast<u32>(FINE_BITS));
        bins[threadIdx.x] = 0;
        __syncthreads();
        each_edge(p, row, scores, length, cut.bin, listed, [&](u32 key, u32) {
            if (key >> shift == prefix) atomicAdd(bins + (key >> (shift - bits) & ((1u << bits) - 1)), 1u);
        });
        __syncthreads();
        const u32 counts[1] = {threadIdx.x < 1u << bits ? bins[(1u << bits) - 1 - threadIdx.x] : 0};
        const Cut fine = find_cut(counts, 1u << bits, wanted, s);
        prefix = prefix << bits | fine.bin;
        wanted -= fine.above;
        inside = fine.inside;
        shift -= bits;
    }
    const u32 lowest = prefix << shift;  // of the keys that are not yet told apart
    return inside == wanted ? Bar{lowest - 1, 0} : Bar{lowest, wanted};
}

__device__ __forceinline__ u32 lowest_bits(u32 word, u32 count) {
    while (__popc(word) > count) word &= ~(0x80000000u >> __clz(word));
    return word;
}

__device__ __forceinline__ void load_words(const u32* bitmap, u32 (&words)[8]) {
    const uint4 low = reinterpret_cast<const uint4*>(bitmap)[2 * threadIdx.x];
    const uint4 high = reinterpret_cast<const uint4*>(bitmap)[2 * threadIdx.x + 1];
    words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
    words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
}
__device__ __forceinline__ u32 count_bits(const u32 (&words)[8]) {
    u32 count = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) count += __popc(words[i]);
    return count;
}

// The bits of a window, in order, as positions from out[written]; the ties among them cut. Returns how many.
__device__ __forceinline__ u32 write_window(const Bitmaps& maps, u32 from, Bar& bar, i32* out, u32 written, u32 k,
                                            SelectShared& s) {
    u32 words[8], total;
    load_words(maps.taken, words);
    if (bar.ties) {
        u32 ties[8];
        load_words(maps.tied, ties);
        u32 before = sum_before<SELECT_THREADS>(count_bits(ties), s.sums, total);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 count = __popc(ties[i]);
            words[i] |= lowest_bits(ties[i], before < bar.ties ? bar.ties - before : 0);
            before += count;
        }
        bar.ties -= min(bar.ties, total);
    }
    u32 place = written + sum_before<SELECT_THREADS>(count_bits(words), s.sums, total);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        for (u32 left = words[i]; left; left &= left - 1, ++place)
            if (place < k) out[place] = static_cast<i32>(from + (threadIdx.x * 8 + i) * 32 + __ffs(left) - 1);
    return total;
}

__device__ __forceinline__ void write_chosen(const IndexTopk& p, int row, const float* scores, u32 length, Cut cut,
                                             u32 listed, Bitmaps& maps, SelectShared& s) {
    Bar bar = find_bar(p, row, scores, length, cut, listed, maps.taken, s);
    const i32* const sure = p.sure + static_cast<i64>(row) * TOPK_MAX;
    i32* const out = p.topk_out + static_cast<i64>(row) * p.k;
    u32 written = 0;
    for (u32 from = 0; from < length && written < static_cast<u32>(p.k); from += WINDOW) {
        const u32 tie_key = bar.key, ties = bar.ties;
        auto set = [&](u32* bitmap, u32 position) {
            const u32 place = position - from;
            if (place < WINDOW) atomicOr(bitmap + place / 32, 1u << place % 32);
        };
        __syncthreads();
        for (int i = 4 * threadIdx.x; i < 2 * WINDOW_WORDS; i += STRIDE)
            *reinterpret_cast<uint4*>(maps.taken + i) = make_uint4(0, 0, 0, 0);
        __syncthreads();
        for (u32 i = threadIdx.x; i < cut.above; i += SELECT_THREADS) set(maps.taken, __ldcg(sure + i));
        each_edge(p, row, scores, length, cut.bin, listed, [&](u32 key, u32 position) {
            if (key > tie_key)
                set(maps.taken, position);
            else if (key == tie_key && ties)
                set(maps.tied, position);
        });
        __syncthreads();
        written += write_window(maps, from, bar, out, written, p.k, s);
    }
}

// Spans [begin, end) of a row that has scores.
__device__ __forceinline__ void select_part(const IndexTopk& p, int row, const IndexRow& at, u32 begin, u32 end,
                                            u8* dynamic, SelectShared& s) {
    i32* const counters = p.counters + row * COUNTERS;
    u32* const histogram = p.histogram + static_cast<i64>(row) * BINS;
    const float* const scores = p.scores + static_cast<i64>(s.units[row]) * UNIT;
    const bool granted = counters[UNGRANTED_ROW] == 0;
    Cut cut{0, 0, 0};
    if (granted) {
        cut = row_cut(p, row, s);
        const u32 stop = min(end * SPAN, static_cast<u32>(at.length));
        collect(p, row, scores, begin * SPAN, stop, cut.bin, *reinterpret_cast<Lists*>(dynamic), s);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 done = static_cast<u32>(atomicAdd(counters + DONE, static_cast<i32>(end - begin))) + end - begin;
        s.last = done == s.spans[row + 1] - s.spans[row];
        __threadfence();
    }
    __syncthreads();
    if (!s.last) return;
    if (granted) {
        const u32 listed = static_cast<u32>(__ldcg(counters + EDGES));
        write_chosen(p, row, scores, at.length, cut, listed, *reinterpret_cast<Bitmaps*>(dynamic), s);
    } else {
        for (int i = threadIdx.x; i < p.k; i += SELECT_THREADS) p.topk_out[static_cast<i64>(row) * p.k + i] = -1;
        if (threadIdx.x == 0) trip(p.state, UNGRANTED, 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += SELECT_THREADS) histogram[i] = 0;
    if (threadIdx.x < COUNTERS) counters[threadIdx.x] = 0;
}

// A row that needs no scores.
__device__ __forceinline__ void write_plain(const IndexTopk& p, int row, const IndexRow& at) {
    int sound = at.kind == IDENTITY;
    if (sound) {
        const i32* const table = p.state.index_table + static_cast<i64>(at.seat) * p.state.max_pages;
        for (int i = threadIdx.x; i < (at.length + PAGE_TOKENS - 1) / PAGE_TOKENS; i += SELECT_THREADS)
            sound &= static_cast<u32>(table[i]) < static_cast<u32>(p.state.key_rows / PAGE_TOKENS);
    }
    sound = __syncthreads_and(sound);
    for (int i = threadIdx.x; i < p.k; i += SELECT_THREADS)
        p.topk_out[static_cast<i64>(row) * p.k + i] = sound && i < at.length ? i : -1;
    if (threadIdx.x == 0 && !sound && at.kind != PADDING) trip(p.state, UNGRANTED, 1);
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::SELECT_THREADS, 1)
    index_select(const __grid_constant__ hisparse::IndexTopk p) {
    using namespace hisparse;
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ SelectShared s;
    divide<SELECT_THREADS>(p, s.units, s.sums, [](const IndexRow& r) { return units_of(r); });
    divide<SELECT_THREADS>(p, s.spans, s.sums, [](const IndexRow& r) { return spans_of(r); });
    const u32 total = s.spans[p.batch.size];
    u32 begin = share(total, blockIdx.x);
    const u32 end = share(total, blockIdx.x + 1);
    for (int row = row_at(s.spans, p.batch.size, begin); begin < end; ++row) {
        const u32 first = s.spans[row], stop = min(end, s.spans[row + 1]);
        const IndexRow at = index_row(p, row);
        if (at.kind != SCORED)
            write_plain(p, row, at);
        else if (static_cast<i64>(s.units[row + 1]) * UNIT > p.capacity)
            write_plain(p, row, {at.seat, at.length, REFUSED});
        else
            select_part(p, row, at, begin - first, stop - first, dynamic, s);
        __syncthreads();
        begin = stop;
    }
}

// index_select: an exact top-k of each row's scores, ties to the lowest position, ascending by position.
//
//     1  The row's histogram gives the bin of the k-th score, and how many scores lie above it.
//     2  Every block takes its spans of 8192 scores into registers, 16 a thread: positions above the bin are chosen for
//        sure, those in it are *edges*. Each warp draws places for its own in lists of the row, in any order.
//     3  The block that ends the row's last span refines the k-th score among the edges by the other 19 bits of the key
//        (two more histograms), then marks the chosen in a bitmap over positions, in windows of 262,144: counting bits
//        gives each its place, so the output is ascending without a sort, and ties go to the lowest positions.
//
// A row within one block's share goes through shared memory alone: no lists in global memory, no tickets. A row of one
// span stays in registers: neither lists nor bitmaps.
//
// Where scores crowd into one bin (all equal, say) there are more edges than the lists hold: then step 3 reads the
// row's scores again instead. Slower, as exact.
//
// The ending block empties histogram and counters for the next launch. Lists are read past L1: other blocks wrote them.
// Rows not longer than k, padding and refused rows need no scores: one unit of work each.
//
// Rejected: sums over all threads of a block instead of places drawn by warp (a barrier for each span), and places drawn
// by thread (a chain of 32 atomics for each span).
#pragma once

#include "index_rows.cuh"

namespace hisparse {

constexpr int SELECT_THREADS = 512;
constexpr int STRIDE = 4 * SELECT_THREADS;  // positions that a block reads together
constexpr int READS = SPAN / STRIDE;
// A span is loaded while the one before it is worked on. The compiler does not find the registers for that on sm_120.
constexpr bool LOADS_AHEAD = __CUDA_ARCH__ < 1200;
constexpr int WINDOW_WORDS = 8192;
constexpr int WINDOW = 32 * WINDOW_WORDS;
constexpr int BINS_EACH = BINS / SELECT_THREADS;
constexpr int FINE_BITS = 10;
constexpr int FINE_EACH = (1 << FINE_BITS) / SELECT_THREADS;
constexpr int EDGES_EACH = EDGES_MAX / SELECT_THREADS;
constexpr int SURE_EACH = TOPK_MAX / SELECT_THREADS;
static_assert(BINS_EACH % 4 == 0 && BIN_SHIFT <= 2 * FINE_BITS && SPAN == 4 * STRIDE && SPAN < 1 << 16,
              "sizes fit, and four counts of a read's positions fit one sum");

// Dynamic shared memory: lists while collecting, bitmaps while ending.
struct Lists {
    u64 edges[EDGES_MAX];  // order key << 32 | position
    i32 sure[TOPK_MAX];
};
struct Bitmaps {
    u32 taken[WINDOW_WORDS];
    u32 tied[WINDOW_WORDS];
};

// Where the wanted score lies: in `bin`, with `above` scores in higher bins and `inside` in it.
struct Cut {
    u32 bin, above, inside;
};

struct SelectShared {
    u32 units[BATCH_MAX + 1], spans[BATCH_MAX + 1];
    u64 row_sums[SELECT_THREADS / 32];
    u32 sums[SELECT_THREADS / 32];
    Cut cut;
    u32 edges, sure, last;
    u64 base;
};

// The row that a block is at, and what the block that ends it holds of its lists in registers.
struct Row {
    const float* scores;
    u32 length;
    Cut cut;
    u32 listed;  // edges found, more than EDGES_MAX when the lists do not hold them
    u64 edges[EDGES_EACH];
    i32 sure[SURE_EACH];
};

// The bin, counted from the highest, in which the `wanted`-th falls. Each thread holds EACH bins, highest first.
template <int EACH>
__device__ __forceinline__ Cut find_cut(const u32 (&counts)[EACH], u32 bins, u32 wanted, SelectShared& s) {
    if (threadIdx.x == 0) s.cut = {bins, 0, 0};  // of a row that is not wholly granted, fewer may have been counted
    u32 sum = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += counts[i];
    u32 before = sum_before<SELECT_THREADS, u32>(sum, s.sums, total);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (before < wanted && wanted <= before + counts[i])
            s.cut = {bins - 1 - (threadIdx.x * EACH + i), before, counts[i]};
        before += counts[i];
    }
    __syncthreads();
    return s.cut;
}

__device__ __forceinline__ Cut row_cut(const IndexTopk& p, const u32* histogram, SelectShared& s) {
    const uint4* const last = reinterpret_cast<const uint4*>(histogram + BINS - BINS_EACH * threadIdx.x) - 1;
    u32 counts[BINS_EACH];
#pragma unroll
    for (int i = 0; i < BINS_EACH / 4; ++i) {
        const uint4 four = last[-i];
        counts[4 * i] = four.w, counts[4 * i + 1] = four.z, counts[4 * i + 2] = four.y, counts[4 * i + 3] = four.x;
    }
    return find_cut(counts, BINS, p.k, s);
}

// Order keys of up to SPAN positions, 16 of each thread: four neighbours of each read.
struct Span {
    u32 keys[4 * READS];
    u32 begin, end;

    __device__ __forceinline__ void load(const float* scores, u32 from, u32 length) {
        begin = from, end = min(from + SPAN, length);
#pragma unroll
        for (int read = 0; read < READS; ++read) {
            const u32 position = begin + read * STRIDE + 4 * threadIdx.x;
            float4 four = make_float4(0, 0, 0, 0);
            if (position < end) four = *reinterpret_cast<const float4*>(scores + position);
            keys[4 * read] = order_key(four.x), keys[4 * read + 1] = order_key(four.y);
            keys[4 * read + 2] = order_key(four.z), keys[4 * read + 3] = order_key(four.w);
        }
    }
    // Calls f(order key, position, read), in order of this thread's positions.
    template <class Each> __device__ __forceinline__ void each(Each f) const {
#pragma unroll
        for (int i = 0; i < 4 * READS; ++i) {
            const u32 position = begin + i / 4 * STRIDE + 4 * threadIdx.x + i % 4;
            if (position < end) f(keys[i], position, i / 4);
        }
    }
};

// Calls f(order key, position) for all positions of a row.
template <class Each> __device__ __forceinline__ void each_score(const float* scores, u32 length, Each f) {
    for (u32 from = 0; from < length; from += SPAN) {
        Span span;
        span.load(scores, from, length);
        span.each([&](u32 key, u32 position, int) { f(key, position); });
    }
}

// Spans [begin, end) of the row, the first of them `span`, into the block's lists; s.sure and s.edges count from 0.
// Each warp takes places for what it found in a span, so that no warp waits for another.
__device__ __forceinline__ void collect(const Row& r, Span& span, u32 begin, u32 end, Lists& lists, SelectShared& s) {
    const int lane = threadIdx.x % 32;
    for (u32 at = begin; at < end; ++at) {
        const Span now = span;
        const bool more = at + 1 < end;
        if (LOADS_AHEAD && more) span.load(r.scores, (at + 1) * SPAN, r.length);
        u32 count = 0;  // edges << 16 | sure
        now.each([&](u32 key, u32, int) {
            const u32 bin = key >> BIN_SHIFT;
            count += bin > r.cut.bin ? 1u : bin == r.cut.bin ? 1u << 16 : 0u;
        });
        u32 inclusive = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 left = __shfl_up_sync(0xFFFFFFFF, inclusive, step);
            if (lane >= step) inclusive += left;
        }
        const u32 all = __shfl_sync(0xFFFFFFFF, inclusive, 31);
        u32 first = 0;
        if (lane < 2) first = atomicAdd(lane ? &s.edges : &s.sure, lane ? all >> 16 : all & 0xFFFF);
        u32 sure = __shfl_sync(0xFFFFFFFF, first, 0) + ((inclusive - count) & 0xFFFF);
        u32 edges = __shfl_sync(0xFFFFFFFF, first, 1) + ((inclusive - count) >> 16);
        now.each([&](u32 key, u32 position, int) {
            const u32 bin = key >> BIN_SHIFT;
            if (bin > r.cut.bin) {
                if (sure < TOPK_MAX) lists.sure[sure] = static_cast<i32>(position);
                ++sure;
            } else if (bin == r.cut.bin) {
                if (edges < EDGES_MAX) lists.edges[edges] = static_cast<u64>(key) << 32 | position;
                ++edges;
            }
        });
        if (!LOADS_AHEAD && more) span.load(r.scores, (at + 1) * SPAN, r.length);
    }
    __syncthreads();
}

// Move the block's lists to the row's, as far as those hold them.
__device__ __forceinline__ void publish(const IndexTopk& p, int row, const Lists& lists, SelectShared& s) {
    const u32 edges = s.edges, sure = s.sure;
    if (threadIdx.x == 0)
        s.base = atomicAdd(reinterpret_cast<u64*>(p.counters + row * COUNTERS + LISTED),
                           static_cast<u64>(edges) << 32 | sure);
    __syncthreads();
    const u32 edge_base = static_cast<u32>(s.base >> 32), sure_base = static_cast<u32>(s.base);
    u64* const edge_list = p.edges + static_cast<i64>(row) * EDGES_MAX;
    i32* const sure_list = p.sure + static_cast<i64>(row) * TOPK_MAX;
    for (u32 i = threadIdx.x; i < edges && edge_base + i < EDGES_MAX; i += SELECT_THREADS)
        edge_list[edge_base + i] = lists.edges[i];
    for (u32 i = threadIdx.x; i < sure && sure_base + i < TOPK_MAX; i += SELECT_THREADS)
        sure_list[sure_base + i] = lists.sure[i];
    __threadfence();
    __syncthreads();
}

// True in the block that ends the row's last share.
__device__ __forceinline__ bool is_last(i32* counters, u32 spans, u32 all, SelectShared& s) {
    if (threadIdx.x == 0) {
        s.last = static_cast<u32>(atomicAdd(counters + DONE, static_cast<i32>(spans))) + spans == all;
        __threadfence();
    }
    __syncthreads();
    return s.last;
}

// Take the lists into registers: the block's own, or the row's.
__device__ __forceinline__ void load_lists(const IndexTopk& p, int row, bool own, const Lists& lists, Row& r,
                                           SelectShared& s) {
    const u64* const edges = p.edges + static_cast<i64>(row) * EDGES_MAX;
    const i32* const sure = p.sure + static_cast<i64>(row) * TOPK_MAX;
    const u64* const listed = reinterpret_cast<const u64*>(p.counters + row * COUNTERS + LISTED);
    r.listed = own ? s.edges : static_cast<u32>(__ldcg(listed) >> 32);
#pragma unroll
    for (int j = 0; j < EDGES_EACH; ++j) {
        const u32 i = j * SELECT_THREADS + threadIdx.x;
        r.edges[j] = i >= min(r.listed, static_cast<u32>(EDGES_MAX)) ? 0 : own ? lists.edges[i] : __ldcg(edges + i);
    }
#pragma unroll
    for (int j = 0; j < SURE_EACH; ++j) {
        const u32 i = j * SELECT_THREADS + threadIdx.x;
        r.sure[j] = i >= r.cut.above ? -1 : own ? lists.sure[i] : __ldcg(sure + i);
    }
}

// Calls f(order key, position) for the row's edges: from the lists, or from all scores when those did not hold them.
template <class Each> __device__ __forceinline__ void each_edge(const Row& r, Each f) {
    if (r.listed <= EDGES_MAX) {
#pragma unroll
        for (int j = 0; j < EDGES_EACH; ++j)
            if (j * SELECT_THREADS + threadIdx.x < r.listed)
                f(static_cast<u32>(r.edges[j] >> 32), static_cast<u32>(r.edges[j]));
        return;
    }
    each_score(r.scores, r.length, [&](u32 key, u32 position) {
        if (key >> BIN_SHIFT == r.cut.bin) f(key, position);
    });
}

// As each_edge, and for the positions above their bin.
template <class Each> __device__ __forceinline__ void each_candidate(const Row& r, Each f) {
    if (r.listed <= EDGES_MAX) {
#pragma unroll
        for (int j = 0; j < SURE_EACH; ++j)
            if (r.sure[j] >= 0) f(0xFFFFFFFFu, static_cast<u32>(r.sure[j]));
        each_edge(r, f);
        return;
    }
    each_score(r.scores, r.length, [&](u32 key, u32 position) {
        if (key >> BIN_SHIFT >= r.cut.bin) f(key, position);
    });
}

// Keys above `key` are chosen, and the first `ties` of those equal to it.
struct Bar {
    u32 key, ties;
};

// `each(f)` calls f(order key, position) for this thread's part of the positions in the bin of `cut`.
template <class Edges>
__device__ __forceinline__ Bar find_bar(const Cut& cut, u32 k, u32* bins, SelectShared& s, Edges each) {
    u32 prefix = cut.bin, wanted = k - cut.above, shift = BIN_SHIFT, inside = cut.inside;
    while (shift > 0 && inside != wanted) {
        const u32 bits = min(shift, static_cast<u32>(FINE_BITS)), mask = (1u << bits) - 1;
        for (int i = threadIdx.x; i <= mask; i += SELECT_THREADS) bins[i] = 0;
        __syncthreads();
        each([&](u32 key, u32) {
            if (key >> shift == prefix) atomicAdd(bins + (key >> (shift - bits) & mask), 1u);
        });
        __syncthreads();
        u32 counts[FINE_EACH];
#pragma unroll
        for (int i = 0; i < FINE_EACH; ++i) {
            const u32 place = threadIdx.x * FINE_EACH + i;
            counts[i] = place <= mask ? bins[mask - place] : 0;
        }
        const Cut fine = find_cut(counts, mask + 1, wanted, s);
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

// Bits of a thread's `each` words, summed over the threads before it; `total` over all.
__device__ __forceinline__ u32 bits_before(const u32* words, u32 each, u32& total, SelectShared& s) {
    u32 count = 0;
    for (u32 i = 0; i < each; ++i) count += __popc(words[i]);
    return sum_before<SELECT_THREADS, u32>(count, s.sums, total);
}

// The bits of a window of `each` words a thread, in order, as positions from out[written]; the ties among them cut.
__device__ __forceinline__ u32 write_window(Bitmaps& maps, u32 from, u32 each, Bar& bar, i32* out, u32 written, u32 k,
                                            SelectShared& s) {
    u32* const taken = maps.taken + threadIdx.x * each;
    u32 total;
    if (bar.ties) {
        const u32* const tied = maps.tied + threadIdx.x * each;
        u32 before = bits_before(tied, each, total, s);
        for (u32 i = 0; i < each; ++i) {
            taken[i] |= lowest_bits(tied[i], before < bar.ties ? bar.ties - before : 0);
            before += __popc(tied[i]);
        }
        bar.ties -= min(bar.ties, total);
    }
    u32 place = written + bits_before(taken, each, total, s);
    for (u32 i = 0; i < each; ++i)
        for (u32 left = taken[i]; left; left &= left - 1, ++place)
            if (place < k) out[place] = static_cast<i32>(from + (threadIdx.x * each + i) * 32 + __ffs(left) - 1);
    return total;
}

__device__ __forceinline__ void write_chosen(const Row& r, u32 k, i32* out, Bitmaps& maps, SelectShared& s) {
    Bar bar = find_bar(r.cut, k, maps.taken, s, [&](auto f) { each_edge(r, f); });
    u32 written = 0;
    for (u32 from = 0; from < r.length && written < k; from += WINDOW) {
        const u32 words = (min(r.length - from, static_cast<u32>(WINDOW)) + 31) / 32;
        const u32 each = (words + SELECT_THREADS - 1) / SELECT_THREADS;
        const Bar at = bar;
        __syncthreads();
        for (u32 i = threadIdx.x; i < each * SELECT_THREADS; i += SELECT_THREADS) maps.taken[i] = maps.tied[i] = 0;
        __syncthreads();
        each_candidate(r, [&](u32 key, u32 position) {
            const u32 place = position - from;
            if (place >= WINDOW) return;
            if (key > at.key)
                atomicOr(maps.taken + place / 32, 1u << place % 32);
            else if (key == at.key && at.ties)
                atomicOr(maps.tied + place / 32, 1u << place % 32);
        });
        __syncthreads();
        written += write_window(maps, from, each, bar, out, written, k, s);
    }
}

// Four counts, of a read each, are packed into one word; this sums them over the reads before each.
__device__ __forceinline__ u64 sums_of_reads(u64 counts) { return (counts << 16) + (counts << 32) + (counts << 48); }

// The output of a row of one span, from registers.
__device__ __forceinline__ void write_span(const Span& span, const Cut& cut, u32 k, i32* out, u32* bins,
                                           SelectShared& s) {
    const Bar bar = find_bar(cut, k, bins, s, [&](auto f) {
        span.each([&](u32 key, u32 position, int) {
            if (key >> BIN_SHIFT == cut.bin) f(key, position);
        });
    });
    u32 chosen = 0, place = 0;  // bit i: key i
    u64 total;
    if (bar.ties) {
        u64 ties = 0;
        span.each([&](u32 key, u32, int read) { ties += key == bar.key ? 1ull << 16 * read : 0ull; });
        u64 before = sum_before<SELECT_THREADS, u64>(ties, s.row_sums, total);
        before += sums_of_reads(total);
        place = 0;
        span.each([&](u32 key, u32, int read) {
            u32 rank = static_cast<u32>(before >> 16 * read) & 0xFFFF;
            if (key == bar.key) {
                if (rank < bar.ties) chosen |= 1u << place;
                before += 1ull << 16 * read;
            }
            ++place;
        });
    }
    place = 0;
    u64 count = 0;
    span.each([&](u32 key, u32, int read) {
        if (key > bar.key) chosen |= 1u << place;
        count += static_cast<u64>(chosen >> place & 1) << 16 * read;
        ++place;
    });
    u64 at = sum_before<SELECT_THREADS, u64>(count, s.row_sums, total);
    at += sums_of_reads(total);
    place = 0;
    span.each([&](u32, u32 position, int read) {
        if (chosen >> place & 1) {
            const u32 to = static_cast<u32>(at >> 16 * read) & 0xFFFF;
            if (to < k) out[to] = static_cast<i32>(position);
            at += 1ull << 16 * read;
        }
        ++place;
    });
}

// Spans [begin, end) of a row that has scores. All reads begin before anything is known of the row but its length.
__device__ __forceinline__ void select_part(const IndexTopk& p, int row, u32 length, u32 begin, u32 end, u8* dynamic,
                                            SelectShared& s) {
    Lists& lists = *reinterpret_cast<Lists*>(dynamic);
    i32* const counters = p.counters + row * COUNTERS;
    u32* const histogram = p.histogram + static_cast<i64>(row) * BINS;
    i32* const out = p.topk_out + static_cast<i64>(row) * p.k;
    const u32 all = s.spans[row + 1] - s.spans[row];
    const bool own = end - begin == all, granted = counters[UNGRANTED_ROW] == 0;
    Row r;
    r.scores = p.scores + static_cast<i64>(s.units[row]) * UNIT;
    r.length = length;
    Span span;
    span.load(r.scores, begin * SPAN, length);
    if (threadIdx.x == 0) s.sure = s.edges = 0;
    r.cut = row_cut(p, histogram, s);
    if (all > 1) {
        collect(r, span, begin, end, lists, s);
        if (!own) publish(p, row, lists, s);
        if (!own && !is_last(counters, end - begin, all, s)) return;
    }
    if (!granted) {
        for (int i = threadIdx.x; i < p.k; i += SELECT_THREADS) out[i] = -1;
        if (threadIdx.x == 0) trip(p.state, UNGRANTED, 1);
    } else if (all == 1) {
        write_span(span, r.cut, p.k, out, reinterpret_cast<u32*>(dynamic), s);
    } else {
        load_lists(p, row, own, lists, r, s);
        __syncthreads();
        write_chosen(r, p.k, out, *reinterpret_cast<Bitmaps*>(dynamic), s);
    }
    __syncthreads();
    for (int i = 4 * threadIdx.x; i < BINS; i += STRIDE)
        *reinterpret_cast<uint4*>(histogram + i) = make_uint4(0, 0, 0, 0);
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
    divide<SELECT_THREADS>(
        p, s.row_sums, [](const IndexRow& r) { return static_cast<u64>(units_of(r)) << 32 | spans_of(r); },
        [&](int row, u64 sum) {
            s.units[row] = static_cast<u32>(sum >> 32);
            s.spans[row] = static_cast<u32>(sum);
        });
    await_last();
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
            select_part(p, row, static_cast<u32>(at.length), begin - first, stop - first, dynamic, s);
        __syncthreads();
        begin = stop;
    }
}

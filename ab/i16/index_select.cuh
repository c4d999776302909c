// index_select: an exact top-k of each row's scores, ties to the lowest position, ascending by position.
//
// A row of up to SPAN positions is one block's, whose threads hold 16 neighbours each:
//
//     1  The row's histogram gives the bin of the k-th score, how many scores lie above it, and how many in it: *edges*.
//     2  A histogram of 11 more bits of the edges gives a bin of few, mostly of one.
//     3  What lies above that bin is chosen, and in it what ranks (below) as high as is wanted.
//     4  Counting the chosen gives each its place, so the output is ascending without a sort.
//
// A cluster of blocks has a longer row, and each of its blocks a range of positions:
//
//     1  As above.
//     2  Positions above the bin are chosen, edges are listed as ranks.
//     3  Blocks read each other's edges from shared memory, and each finds the same bar among them: a histogram of 11 bits
//        of the ranks, and so on until few are left, which are compared one by one.
//     4  As above. Where ranges are longer than SPAN, bits of a map stand for what threads held.
//
// Rank of a position: its order key, then the position, the lowest highest. Ranks differ, so that a bar divides the chosen
// from all others.
//
// Where scores crowd into one bin (all equal, say) there are more edges than the lists hold: then the bar is found from the
// row's scores, read again for each histogram. Slower, as exact.
//
// Histogram and counters are left empty for the next launch.
#pragma once

#include "index_rows.cuh"

namespace hisparse {

constexpr int SELECT_THREADS = 32 * SELECT_WARPS;
constexpr int READS = 16;                  // positions of a lane in a tile, 32 apart
constexpr u32 TILE = 32 * READS;           // neighbouring positions, read by a warp together
constexpr u32 WINDOW = 131072;             // positions of a bitmap
constexpr u32 EDGES = 4096;                // listed of a row
constexpr u32 REAL_BINS = 16;              // in those below lie -inf and NaN
constexpr u32 FEW = 64;                    // compared one by one
constexpr int POSITION_BITS = 20, FINE_BITS = 11;
constexpr int FINE_EACH = (1 << FINE_BITS) / SELECT_THREADS;
constexpr int EACH = 16;                   // neighbours of a thread
constexpr u32 SPAN = EACH * SELECT_THREADS;
static_assert(CONTEXT_MAX_TOKENS <= 1 << POSITION_BITS && FINE_EACH % 2 == 0 && UNIT == EACH && EACH <= READS, "sizes fit");
static_assert(SELECT_WARPS >= 16, "as many as blocks of a cluster");

// Where the wanted one lies: in `bin`, with `above` in higher bins and `inside` in it.
struct Cut {
    u32 bin, above, inside;
};

struct SelectShared {
    u64 edges[EDGES];   // this block's
    u64 listed[EDGES];  // the row's
    u32 chosen[WINDOW / 32];
    u32 bins[(1 << FINE_BITS) + 4];  // the last for what is not counted
    u64 few[FEW];
    u64 bar;
    Cut cut;
    u32 sums[32];
    u32 found, sure, before, compared;  // edges; positions above the bin; chosen edges of blocks before this
};

// The part of a row that a block has.
struct Part {
    const float* scores;
    u32 length, begin, end;
    u32 rank, ranks;  // among the blocks of the row
};

__device__ __forceinline__ void sync_row(const Part& part) {
    if (part.ranks > 1)
        sync_cluster();
    else
        __syncthreads();
}

// Sum of `value` over the threads before this one; `total` over all. A barrier must follow before the next.
__device__ __forceinline__ u32 sum_ahead(u32 value, u32* sums, u32& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 inclusive = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 left = __shfl_up_sync(0xFFFFFFFF, inclusive, step);
        if (lane >= step) inclusive += left;
    }
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    const u32 sum = lane < SELECT_WARPS ? sums[lane] : 0;
    total = __reduce_add_sync(0xFFFFFFFF, sum);
    return __reduce_add_sync(0xFFFFFFFF, lane < warp ? sum : 0) + inclusive - value;
}

// The bin, counted from the highest, in which the `wanted`-th falls. Each thread holds EACH bins, highest first.
template <int EACH>
__device__ __forceinline__ Cut find_cut(const u32 (&counts)[EACH], u32 bins, u32 wanted, SelectShared& s) {
    u32 sum = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += counts[i];
    u32 before = sum_ahead(sum, s.sums, total);
    if (before < wanted && wanted <= before + sum) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (before < wanted && wanted <= before + counts[i])
                s.cut = {bins - 1 - (threadIdx.x * EACH + i), before, counts[i]};
            before += counts[i];
        }
    }
    if (threadIdx.x == 0 && total < wanted) s.cut = {0, total - counts[0], counts[0]};  // of a row that is not wholly granted
    __syncthreads();
    return s.cut;
}

// Likewise among the bins of a warp's lanes, highest first, by each warp alone. `bin` is counted from the highest.
template <int EACH> __device__ __forceinline__ Cut find_cut(const u32 (&counts)[EACH], u32 wanted) {
    const u32 lane = threadIdx.x % 32;
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += counts[i];
    u32 inclusive = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 left = __shfl_up_sync(0xFFFFFFFF, inclusive, step);
        if (lane >= step) inclusive += left;
    }
    const u32 reached = __ballot_sync(0xFFFFFFFF, inclusive >= wanted);
    const u32 owner = reached ? __ffs(static_cast<int>(reached)) - 1 : 31;
    u32 above = inclusive - sum, bin = EACH * lane, inside = counts[0];
#pragma unroll
    for (int i = 1; i < EACH; ++i)
        if (above + inside < wanted) above += inside, inside = counts[i], ++bin;
    return {__shfl_sync(0xFFFFFFFF, bin, owner), __shfl_sync(0xFFFFFFFF, above, owner),
            __shfl_sync(0xFFFFFFFF, inside, owner)};
}

// Where the row's k-th score lies, found by each warp: among the coarse bins, then among the 32 of one.
__device__ __forceinline__ Cut row_cut(const u32* histogram, u32 k) {
    const u32 lane = threadIdx.x % 32;
    const uint4* const last = reinterpret_cast<const uint4*>(histogram + BINS + COARSE_BINS - 8 * lane);
    const uint4 high = __ldcg(last - 1), low = __ldcg(last - 2);
    const u32 counts[8] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
    const Cut coarse = find_cut(counts, k);
    const u32 highest = BINS - 1 - 32 * coarse.bin;
    const u32 count[1] = {__ldcg(histogram + highest - lane)};
    const Cut fine = find_cut(count, k - coarse.above);
    return {highest - fine.bin, coarse.above + fine.above, fine.inside};
}

// Likewise, by the block's first warp for all; a barrier must follow before `s.cut` is written again.
__device__ __forceinline__ Cut block_cut(const u32* histogram, u32 k, SelectShared& s) {
    if (threadIdx.x < 32) {
        const Cut cut = row_cut(histogram, k);
        if (threadIdx.x == 0) s.cut = cut;
    }
    __syncthreads();
    return s.cut;
}

// Scores of TILE positions, 32 apart in each lane; NaN behind the end.
struct Tile {
    float scores[READS];

    __device__ __forceinline__ void load(const float* from, u32 place, u32 end) {
        const u32 first = place + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < READS; ++i)
            scores[i] = first + 32 * i < end ? __ldcg(from + first + 32 * i) : __uint_as_float(0x7FFFFFFF);
    }
};

// The score of an order key that is no NaN's.
__device__ __forceinline__ float score_of(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7FFFFFFF : ~key); }

__device__ __forceinline__ u64 rank_of(u32 key, u32 position) {
    return static_cast<u64>(key) << 32 | ~position << (32 - POSITION_BITS);
}
__device__ __forceinline__ u32 position_of(u64 rank) {
    return (1u << POSITION_BITS) - 1 - (static_cast<u32>(rank) >> (32 - POSITION_BITS));
}

// Calls f(order key, position) for all positions of [begin, end).
template <class Each> __device__ __forceinline__ void each_score(const float* scores, u32 begin, u32 end, Each f) {
    for (u32 position = begin + threadIdx.x; position < end; position += SELECT_THREADS)
        f(order_key(__ldcg(scores + position)), position);
}

// Sets positions above the bin in the bitmap and lists the edges, of tiles from `from` on, the first of them `tile`.
__device__ __forceinline__ void mark_and_list(const Part& part, u32 bin, Tile& tile, u32 from, SelectShared& s) {
    const u32 lane = threadIdx.x % 32, flip = score_of(bin << BIN_SHIFT) < 0 ? 0xFFFFFFFF : 0x80000000;
    const float low = score_of(bin << BIN_SHIFT), high = score_of((bin + 1) << BIN_SHIFT);
    u32 sure = 0;
#pragma unroll 1
    for (u32 at = from; at < part.end; at += SELECT_WARPS * TILE) {
        const Tile now = tile;
        if (at + SELECT_WARPS * TILE < part.end) tile.load(part.scores, at + SELECT_WARPS * TILE, part.end);
        u32 word = 0, edges = 0;
#pragma unroll
        for (u32 i = 0; i < READS; ++i) {
            const u32 above = __ballot_sync(0xFFFFFFFF, now.scores[i] >= high);
            if (lane == i) word = above;
            if (now.scores[i] >= low && !(now.scores[i] >= high)) edges |= 1u << i;
        }
        if (lane < READS) s.chosen[(at - part.begin) / 32 + lane] = word;
        sure += __popc(word);
        const u32 count = __popc(edges);
        u32 inclusive = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 left = __shfl_up_sync(0xFFFFFFFF, inclusive, step);
            if (lane >= step) inclusive += left;
        }
        u32 first = 0;
        if (lane == 31 && inclusive > 0) first = atomicAdd(&s.found, inclusive);
        u64* to = s.edges + (__shfl_sync(0xFFFFFFFF, first, 31) + inclusive - count);
#pragma unroll
        for (u32 i = 0; i < READS; ++i)
            if (edges >> i & 1) *to++ = rank_of(__float_as_uint(now.scores[i]) ^ flip, at + lane + 32 * i);
    }
    sure = __reduce_add_sync(0xFFFFFFFF, sure);
    if (lane == 0 && sure > 0) atomicAdd(&s.sure, sure);
}

// The rank from which on exactly `wanted` of the `count` in the cut's bin are chosen. `each(f)` calls f(rank) for this
// thread's part of them: EVERYWHERE of those in the block's part of the row, else of all.
template <bool EVERYWHERE, class Ranks>
__device__ __forceinline__ u64 find_bar(const Part& part, u32 bin, u32 count, u32 wanted, SelectShared& s, Ranks each) {
    u64 prefix = bin;
    u32 shift = 32 + BIN_SHIFT, inside = count;
#pragma unroll 1
    while (inside > wanted && (EVERYWHERE || inside > FEW)) {
        const u32 bits = min(shift, static_cast<u32>(FINE_BITS)), mask = (1u << bits) - 1;
#pragma unroll
        for (u32 i = threadIdx.x; i < 1 << FINE_BITS; i += SELECT_THREADS) s.bins[i] = 0;
        __syncthreads();
        each([&](u64 rank) {
            if (rank >> shift == prefix) count_shared(s.bins + (static_cast<u32>(rank >> (shift - bits)) & mask));
        });
        if (EVERYWHERE)
            sync_row(part);
        else
            __syncthreads();
        u32 counts[FINE_EACH];
#pragma unroll
        for (int i = 0; i < FINE_EACH; ++i) {
            const u32 place = mask - (threadIdx.x * FINE_EACH + i);
            counts[i] = place <= mask ? s.bins[place] : 0;
            if (EVERYWHERE && place <= mask)
                for (u32 r = 1; r < part.ranks; ++r) counts[i] += *at_peer(s.bins + place, (part.rank + r) % part.ranks);
        }
        if (EVERYWHERE) sync_row(part);
        const Cut cut = find_cut(counts, mask + 1, wanted, s);
        prefix = prefix << bits | cut.bin;
        wanted -= cut.above;
        inside = cut.inside;
        shift -= bits;
    }
    if (inside <= wanted) return prefix << shift;
    each([&](u64 rank) {
        if (rank >> shift == prefix) s.few[atomicAdd(&s.compared, 1u)] = rank;
    });
    __syncthreads();
    if (threadIdx.x < inside) {
        const u64 own = s.few[threadIdx.x];
        u32 higher = 0;
#pragma unroll 4
        for (u32 i = 0; i < inside; ++i) higher += s.few[i] > own;
        if (higher + 1 == wanted) s.bar = own;
    }
    __syncthreads();
    return s.bar;
}

// The positions set in a bitmap of those from `from` on, in order, from out[written].
__device__ __forceinline__ u32 write_window(u32 from, u32 positions, u32 written, u32 k, i32* out, SelectShared& s) {
    const u32 words = (positions + 31) / 32, each = (words + SELECT_THREADS - 1) / SELECT_THREADS;
    const u32 begin = min(threadIdx.x * each, words), end = min(begin + each, words);
    u32 count = 0, total;
    for (u32 i = begin; i < end; ++i) count += __popc(s.chosen[i]);
    u32 place = written + sum_ahead(count, s.sums, total);
    for (u32 i = begin; i < end; ++i)
        for (u32 left = s.chosen[i]; left; left &= left - 1, ++place)
            if (place < k) out[place] = static_cast<i32>(from + 32 * i + __ffs(left) - 1);
    return total;
}

// The output of a row whose edges the lists do not hold, or whose parts a bitmap does not: its scores are read again.
__device__ __noinline__ void write_again(const Part& part, const Cut& cut, u32 k, i32* out, SelectShared& s) {
    const u64 bar = find_bar<true>(part, cut.bin, cut.inside, k - cut.above, s, [&](auto f) {
        each_score(part.scores, part.begin, part.end, [&](u32 key, u32 position) {
            if (key >> BIN_SHIFT == cut.bin) f(rank_of(key, position));
        });
    });
    if (threadIdx.x == 0) s.sure = 0;
    __syncthreads();
    u32 count = 0;
    each_score(part.scores, part.begin, part.end,
               [&](u32 key, u32 position) { count += rank_of(key, position) >= bar; });
    count = __reduce_add_sync(0xFFFFFFFF, count);
    if (threadIdx.x % 32 == 0) atomicAdd(&s.sure, count);
    sync_row(part);
    u32 written = 0;
    for (u32 r = 0; r < part.rank; ++r) written += *at_peer(&s.sure, r);
    sync_row(part);
    for (u32 from = part.begin; from < part.end; from += WINDOW) {
        const u32 positions = min(part.end - from, WINDOW);
        for (u32 i = threadIdx.x; i < WINDOW / 32; i += SELECT_THREADS) s.chosen[i] = 0;
        __syncthreads();
        each_score(part.scores, from, from + positions, [&](u32 key, u32 position) {
            if (rank_of(key, position) >= bar) atomicOr(s.chosen + (position - from) / 32, 1u << (position - from) % 32);
        });
        __syncthreads();
        written += write_window(from, positions, written, k, out, s);
        __syncthreads();
    }
}

// Copies the edges of all blocks of the row to `listed`; returns how many positions above the bin lie ahead of this block's.
__device__ __forceinline__ u32 gather_edges(const Part& part, SelectShared& s) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 found = lane < part.ranks ? *at_peer(&s.found, lane) : 0;
    const u32 sure = lane < part.rank ? *at_peer(&s.sure, lane) : 0;
    const u32 of = warp % part.ranks;
    const u32 first = __reduce_add_sync(0xFFFFFFFF, lane < of ? found : 0), count = __shfl_sync(0xFFFFFFFF, found, of);
    const u64* const from = at_peer(s.edges, of);
    const u32 stride = SELECT_THREADS / part.ranks;
    for (u32 i = warp / part.ranks * 32 + lane; i < count; i += stride) s.listed[first + i] = from[i];
    cluster_arrive();  // none reads from another any more
    __syncthreads();
    return __reduce_add_sync(0xFFFFFFFF, sure);
}

// For the next launch, once no block of the row reads it.
__device__ __forceinline__ void empty_histogram(const IndexTopk& p, int row, const Part& part) {
    uint4* const histogram = reinterpret_cast<uint4*>(row_histogram(p, row));
    for (u32 i = part.rank * SELECT_THREADS + threadIdx.x; i < (BINS + COARSE_BINS) / 4; i += part.ranks * SELECT_THREADS)
        histogram[i] = make_uint4(0, 0, 0, 0);
    if (part.rank == 0 && threadIdx.x < COUNTERS) p.counters[row * COUNTERS + threadIdx.x] = 0;
}

// Scores of EACH neighbours from `first` on; NaN behind the part's end.
__device__ __forceinline__ void load_neighbours(float (&scores)[EACH], const Part& part, u32 first) {
    const float none = __uint_as_float(0x7FFFFFFF);
#pragma unroll
    for (u32 i = 0; i < EACH; i += 4) {
        float4 four = make_float4(none, none, none, none);
        if (first < part.end) four = __ldcg(reinterpret_cast<const float4*>(part.scores + first + i));
        scores[i] = four.x, scores[i + 1] = four.y, scores[i + 2] = four.z, scores[i + 3] = four.w;
    }
    if (first < part.end && first + EACH > part.end) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i)
            if (first + i >= part.end) scores[i] = none;
    }
}

// The chosen of EACH neighbours, bits of `chosen`, in order behind `before` others.
__device__ __forceinline__ void write_neighbours(u32 chosen, u32 first, u32 before, u32 k, i32* out) {
    u32 place = before;
#pragma unroll 1
    for (u32 bits = chosen; bits; bits &= bits - 1, ++place)
        if (place < k) out[place] = static_cast<i32>(first + __ffs(static_cast<int>(bits)) - 1);
}

// A row of up to SPAN positions a block. False where it is not wholly granted or too many scores are alike: nothing is done.
__device__ __forceinline__ bool choose_apart(const IndexTopk& p, int row, const Part& part, SelectShared& s) {
    const u32 k = static_cast<u32>(p.k), first = part.begin + EACH * threadIdx.x, lane = threadIdx.x % 32;
    float scores[EACH];
    load_neighbours(scores, part, first);
    const bool granted = __ldcg(p.counters + row * COUNTERS + UNGRANTED_ROW) == 0;
    const Cut cut = block_cut(row_histogram(p, row), k, s);
    if (!granted || cut.bin < REAL_BINS || cut.inside > EDGES) return false;
    const float low = score_of(cut.bin << BIN_SHIFT), high = score_of((cut.bin + 1) << BIN_SHIFT);
    const u32 flip = low < 0 ? 0xFFFFFFFF : 0x80000000;
    u32 level = 0, chosen = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        if (scores[i] >= low) level |= 1u << i;
        if (scores[i] >= high) chosen |= 1u << i;
    }
    const u32 edge = level & ~chosen, count = __popc(edge);
    u32 inclusive = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 left = __shfl_up_sync(0xFFFFFFFF, inclusive, step);
        if (lane >= step) inclusive += left;
    }
    const u32 sure = __reduce_add_sync(0xFFFFFFFF, __popc(chosen));
    u32 place = 0;
    if (lane == 31 && inclusive > 0) place = atomicAdd(&s.found, inclusive);
    if (lane == 0 && sure > 0) atomicAdd(&s.sure, sure);
    u64* to = s.edges + (__shfl_sync(0xFFFFFFFF, place, 31) + inclusive - count);
#pragma unroll
    for (u32 i = 0; i < EACH; ++i)
        if (edge >> i & 1) *to++ = rank_of(__float_as_uint(scores[i]) ^ flip, first + i);
    sync_cluster();
    empty_histogram(p, row, part);
    const u32 sure_before = gather_edges(part, s);
    const u64 bar = find_bar<false>(part, cut.bin, cut.inside, k - cut.above, s, [&](auto f) {
        for (u32 i = threadIdx.x; i < cut.inside; i += SELECT_THREADS) f(s.listed[i]);
    });
    u32 before = 0, total;
    for (u32 i = threadIdx.x; i < cut.inside; i += SELECT_THREADS)
        before += s.listed[i] >= bar && position_of(s.listed[i]) < part.begin;
    before = __reduce_add_sync(0xFFFFFFFF, before);
    if (lane == 0 && before > 0) atomicAdd(&s.before, before);
#pragma unroll
    for (u32 i = 0; i < EACH; ++i)
        if (edge >> i & 1 && rank_of(__float_as_uint(scores[i]) ^ flip, first + i) >= bar) chosen |= 1u << i;
    const u32 ahead = sum_ahead(__popc(chosen), s.sums, total);
    write_neighbours(chosen, first, sure_before + s.before + ahead, k, p.topk_out + static_cast<i64>(row) * k);
    cluster_wait();
    return true;
}

// Likewise, by one block, with s.bins empty.
__device__ __forceinline__ bool choose_short(const IndexTopk& p, int row, const Part& part, SelectShared& s) {
    const u32 k = static_cast<u32>(p.k), first = EACH * threadIdx.x, lane = threadIdx.x % 32;
    float scores[EACH];
    load_neighbours(scores, part, first);
    const bool granted = __ldcg(p.counters + row * COUNTERS + UNGRANTED_ROW) == 0;
    const Cut cut = block_cut(row_histogram(p, row), k, s);
    if (!granted || cut.bin < REAL_BINS) return false;
    u32 wanted = k - cut.above, inside = cut.inside;
    float low = score_of(cut.bin << BIN_SHIFT), high = score_of((cut.bin + 1) << BIN_SHIFT);
    const u32 flip = low < 0 ? 0xFFFFFFFF : 0x80000000;
    if (inside > wanted) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            const u32 bin = (__float_as_uint(scores[i]) ^ flip) >> (BIN_SHIFT - FINE_BITS) & ((1u << FINE_BITS) - 1);
            const bool is_edge = scores[i] >= low && !(scores[i] >= high);
            count_shared_if(is_edge, s.bins + bin);
        }
        __syncthreads();
        u32 counts[FINE_EACH];
#pragma unroll
        for (int i = 0; i < FINE_EACH; ++i) counts[i] = s.bins[(1 << FINE_BITS) - 1 - (threadIdx.x * FINE_EACH + i)];
        const Cut fine = find_cut(counts, 1 << FINE_BITS, wanted, s);
        const u32 prefix = cut.bin << FINE_BITS | fine.bin;
        low = score_of(prefix << (BIN_SHIFT - FINE_BITS)), high = score_of((prefix + 1) << (BIN_SHIFT - FINE_BITS));
        wanted -= fine.above, inside = fine.inside;
    }
    if (inside > wanted && inside > 32) return false;
    u32 chosen = 0, level = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        if (scores[i] >= low) level |= 1u << i;
        if (scores[i] >= high) chosen |= 1u << i;
    }
    if (inside > wanted) {
#pragma unroll 1
        for (u32 left = level & ~chosen; left; left &= left - 1) {
            const u32 position = first + __ffs(static_cast<int>(left)) - 1;
            const u32 bits = __float_as_uint(__ldcg(part.scores + position));
            s.few[atomicAdd(&s.compared, 1u)] = rank_of(bits ^ flip, position);
        }
        level = chosen;
        __syncthreads();
        const u64 own = lane < inside ? s.few[lane] : 0;
        u32 higher = 0;
#pragma unroll 1
        for (u32 i = 0; i < inside; ++i) higher += s.few[i] > own;
        const u32 best = __ballot_sync(0xFFFFFFFF, lane < inside && higher < wanted);
#pragma unroll 1
        for (u32 i = 0; i < inside; ++i) {
            const u32 place = position_of(s.few[i]) - first;
            if (best >> i & 1 && place < EACH) level |= 1u << place;
        }
    }
    u32 total;
    const u32 ahead = sum_ahead(__popc(level), s.sums, total);
    write_neighbours(level, first, ahead, k, p.topk_out + static_cast<i64>(row) * k);
    empty_histogram(p, row, part);
    return true;
}

// A row that has scores.
__device__ __forceinline__ void choose(const IndexTopk& p, int row, const Part& part, SelectShared& s) {
    u32* const histogram = row_histogram(p, row);
    i32* const counters = p.counters + row * COUNTERS;
    i32* const out = p.topk_out + static_cast<i64>(row) * p.k;
    const u32 k = static_cast<u32>(p.k), first = part.begin + threadIdx.x / 32 * TILE;
    Tile tile;
    if (first < part.end) tile.load(part.scores, first, part.end);
    const bool granted = __ldcg(counters + UNGRANTED_ROW) == 0;
    const Cut cut = block_cut(histogram, k, s);
    const bool again = cut.inside > EDGES || cut.bin < REAL_BINS || part.length > part.ranks * WINDOW;
    if (granted && !again) mark_and_list(part, cut.bin, tile, first, s);
    sync_row(part);
    empty_histogram(p, row, part);
    if (!granted) {
        for (u32 i = part.rank * SELECT_THREADS + threadIdx.x; i < k; i += part.ranks * SELECT_THREADS) out[i] = -1;
        if (part.rank == 0 && threadIdx.x == 0) trip(p.state, UNGRANTED, 1);
        return;
    }
    if (again) return write_again(part, cut, k, out, s);
    const u32 edges = cut.inside, sure_before = part.ranks > 1 ? gather_edges(part, s) : 0;
    const u64* const list = part.ranks > 1 ? s.listed : s.edges;
    const u64 bar = find_bar<false>(part, cut.bin, edges, k - cut.above, s, [&](auto f) {
        for (u32 i = threadIdx.x; i < edges; i += SELECT_THREADS) f(list[i]);
    });
    u32 before = 0;
    for (u32 i = threadIdx.x; i < edges; i += SELECT_THREADS) {
        const u64 rank = list[i];
        const u32 position = position_of(rank), place = position - part.begin;
        if (rank < bar) continue;
        if (position < part.begin)
            ++before;
        else if (position < part.end)
            atomicOr(s.chosen + place / 32, 1u << place % 32);
    }
    if (part.ranks > 1) {
        before = __reduce_add_sync(0xFFFFFFFF, before);
        if (threadIdx.x % 32 == 0 && before > 0) atomicAdd(&s.before, before);
    }
    __syncthreads();
    if (part.begin < part.end) write_window(part.begin, part.end - part.begin, sure_before + s.before, k, out, s);
    if (part.ranks > 1) cluster_wait();
}

// A row that needs no scores, by one block.
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
    extern __shared__ u8 dynamic[];
    SelectShared& s = *reinterpret_cast<SelectShared*>(dynamic);
    const int row = static_cast<int>(blockIdx.y);
    let_next_begin();
    if (threadIdx.x == 0) s.found = s.sure = s.before = s.compared = 0;
    for (u32 i = threadIdx.x; i < 1 << FINE_BITS; i += SELECT_THREADS) s.bins[i] = 0;
    const IndexRow at = index_row(p, row);
    u32 ahead = 0, units;
    for (int i = threadIdx.x; i < row; i += SELECT_THREADS) ahead += units_of(index_row(p, i));
    sum_ahead(ahead, s.sums, units);
    const u32 length = static_cast<u32>(at.length);
    const bool fits = (static_cast<i64>(units) + units_of(at)) * UNIT <= p.capacity;
    const u32 ranks = at.kind == SCORED && length > SOLO ? gridDim.x : 1, rank = blockIdx.x;
    if (rank >= ranks) return;
    await_last();
    if (at.kind != SCORED || !fits) {
        if (rank == 0) write_plain(p, row, fits ? at : IndexRow{at.seat, at.length, REFUSED});
        return;
    }
    const u32 each = ((length + ranks - 1) / ranks + 31) / 32 * 32;
    const Part part{p.scores + static_cast<i64>(units) * UNIT, length, min(rank * each, length),
                    min(rank * each + each, length), rank, ranks};
    __syncthreads();
    if (length <= ranks * SPAN) {
        if (ranks > 1 ? choose_apart(p, row, part, s) : choose_short(p, row, part, s)) return;
        __syncthreads();
        if (threadIdx.x == 0) s.compared = 0;
    }
    choose(p, row, part, s);
}

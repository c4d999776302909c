// prompt_merge: the best k positions of each token whose keys several blocks of prompt_index have scored.
//
// A block takes a token: its lists of all shares of the context, in order of positions. The k-th best key is found by
// histograms over the range of what is listed, as for one list (prompt_list.cuh); then its warps write what is at least
// that, each warp in its place. Warp w has entries 128 w to 128 w + 127 of each list: a segment.
#pragma once

#include "prompt_job.cuh"

namespace hisparse {

constexpr int MERGE_THREADS = 1024, MERGE_WARPS = MERGE_THREADS / 32, SEGMENT = LISTED / MERGE_WARPS;
constexpr u32 MERGE_BITS = 11, MERGE_BINS = 1u << MERGE_BITS;
static_assert(SEGMENT == 128, "each lane has four entries of a segment");
static_assert(SPLITS_MAX == MERGE_WARPS && MERGE_BINS == 2 * MERGE_THREADS, "a thread has a segment, and two bins");

struct MergeShared {
    uint4 heads[SPLITS_MAX];
    u32 bins[MERGE_BINS];
    u32 sums[2][MERGE_WARPS];
    u32 over[SPLITS_MAX][MERGE_WARPS], equal[SPLITS_MAX][MERGE_WARPS];  // of each segment; then, of all before it
    u32 bin, inside, above;
    i32 best[PROMPT_TOPK_MAX];
};

// Sums over all threads before this one, of two numbers; `sums` is written.
__device__ __forceinline__ void sum_before(u32 (&sums)[2][MERGE_WARPS], u32& one, u32& two) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 through[2] = {one, two};
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const u32 left = __shfl_up_sync(0xFFFFFFFF, through[n], step);
            if (lane >= step) through[n] += left;
        }
    if (lane == 31) sums[0][warp] = through[0], sums[1][warp] = through[1];
    __syncthreads();
    one = through[0] - one + __reduce_add_sync(0xFFFFFFFF, lane < warp ? sums[0][lane] : 0);
    two = through[1] - two + __reduce_add_sync(0xFFFFFFFF, lane < warp ? sums[1][lane] : 0);
}

struct Merging {
    const PromptIndex& p;
    MergeShared& s;
    i64 first;  // number of the list of the first share; those of others lie before it

    __device__ __forceinline__ const u32* list_of(i32 share) const {
        return p.lists + (first - static_cast<i64>(share) * GROUP) * (2 * LISTED);
    }

    // Calls f(share, keys, their positions, how many of them there are) for this lane's entries of each list.
    template <class Each> __device__ __forceinline__ void each_keys(Each f) const {
        const u32 place = SEGMENT * (threadIdx.x / 32) + 4 * (threadIdx.x % 32);
        constexpr int READS = 4;
#pragma unroll 1
        for (i32 from = 0; from < p.splits; from += READS) {
            uint4 held[READS][2];
            u32 counts[READS];
#pragma unroll
            for (int n = 0; n < READS; ++n) {
                const u32 count = from + n < p.splits ? s.heads[from + n].x : 0;
                counts[n] = place < count ? min(4u, count - place) : 0;
                held[n][0] = held[n][1] = {};
                const uint4* const entries = reinterpret_cast<const uint4*>(list_of(from + n) + place);
                if (counts[n] > 0) held[n][0] = entries[0], held[n][1] = entries[LISTED / 4];  // keys, positions
            }
#pragma unroll
            for (int n = 0; n < READS; ++n) {
                if (from + n >= p.splits) break;
                const u32 keys[4] = {held[n][0].x, held[n][0].y, held[n][0].z, held[n][0].w};
                const u32 positions[4] = {held[n][1].x, held[n][1].y, held[n][1].z, held[n][1].w};
                f(from + n, keys, positions, counts[n]);
            }
        }
    }

    // Find the bin of the `wanted`-th of the keys in [low, low + (1 << width)), in bins of 1 << shift: `low` becomes its
    // first key, `wanted` the rank in it. Returns how many keys it holds.
    __device__ __forceinline__ u32 narrow(u32& low, u32 width, u32 shift, u32& wanted) const {
        const u32 base = low, bin = MERGE_BINS - 1 - 2 * threadIdx.x;
        s.bins[bin] = s.bins[bin - 1] = 0;
        __syncthreads();
        each_keys([&](i32, const u32(&keys)[4], const u32(&)[4], u32 held) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 over = keys[j] - base;
                if (j < held && keys[j] >= base && (width == 32 || over >> width == 0)) count_shared(s.bins + (over >> shift));
            }
        });
        __syncthreads();
        const u32 one = s.bins[bin], two = s.bins[bin - 1];
        u32 above = one + two, unused = 0;
        sum_before(s.sums, above, unused);
        if (above < wanted && above + one >= wanted) s.bin = bin, s.inside = one, s.above = above;
        else if (above + one < wanted && above + one + two >= wanted) s.bin = bin - 1, s.inside = two, s.above = above + one;
        __syncthreads();
        low += s.bin << shift, wanted -= s.above;
        return s.inside;
    }

    // The k-th best key; how many of those equal to it are wanted, or 0 and a bound between it and the next one.
    __device__ __forceinline__ u32 threshold(u32& ties) const {
        u32 low = 0xFFFFFFFF, bar = 0, most = 0, wanted = p.k;
        for (i32 share = 0; share < p.splits; ++share)
            if (s.heads[share].x > 0)
                low = min(low, s.heads[share].z), bar = max(bar, s.heads[share].y), most = max(most, s.heads[share].w);
        low = max(low, bar - min(bar, 1u)), ties = 0;  // k keys of a list are at least one less than its bar
        u32 width = 32 - __clz(static_cast<int>((most - low) | 1));
        while (true) {
            const u32 shift = width > MERGE_BITS ? width - MERGE_BITS : 0;
            const u32 inside = narrow(low, width, shift, wanted);
            if (inside == wanted) return low;
            if (shift == 0) {
                ties = wanted;
                return low;
            }
            width = shift;
        }
    }

    __device__ __forceinline__ void select(const ListOut& out) const {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u32 ties;
        const u32 low = threshold(ties), least = ties ? low + 1 : low;
        const auto count = [&](const u32(&keys)[4], u32 held) {  // those from `least` on, and those equal to `low`
            u32 over = 0, equal = 0;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) over += j < held && keys[j] >= least, equal += j < held && keys[j] == low;
            return over | equal << 16;
        };
        each_keys([&](i32 share, const u32(&keys)[4], const u32(&)[4], u32 held) {
            const u32 both = __reduce_add_sync(0xFFFFFFFF, count(keys, held));
            if (lane == 0) s.over[share][warp] = both & 0xFFFF, s.equal[share][warp] = both >> 16;
        });
        __syncthreads();
        const bool has_segment = static_cast<i32>(warp) < p.splits;
        u32 over = has_segment ? s.over[warp][lane] : 0, equal = has_segment ? s.equal[warp][lane] : 0;
        sum_before(s.sums, over, equal);
        s.over[warp][lane] = over, s.equal[warp][lane] = equal;
        __syncthreads();
        each_keys([&](i32 share, const u32(&keys)[4], const u32(&positions)[4], u32 held) {
            const u32 own = count(keys, held);
            u32 through = own;
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 left = __shfl_up_sync(0xFFFFFFFF, through, step);
                if (lane >= step) through += left;
            }
            u32 before = s.over[share][warp] + (through - own & 0xFFFF), equals = s.equal[share][warp] + (through - own >> 16);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const bool is_over = j < held && keys[j] >= least, is_tie = j < held && ties && keys[j] == low;
                if (is_over || (is_tie && equals < ties))
                    s.best[before + min(equals, ties)] = static_cast<i32>(positions[j]);
                before += is_over, equals += is_tie;
            }
        });
        __syncthreads();
        for (i32 i = threadIdx.x; i < p.k; i += MERGE_THREADS) out.put(i, s.best[i]);
    }
};

// The token of this block.
__device__ __forceinline__ void merge_token(const PromptIndex& p, MergeShared& s) {
    const i32 number = blockIdx.x / GROUP, token = blockIdx.x % GROUP;
    const Job job = job_at(p, number * p.splits);
    const Selecting selecting{p, job, token, job.length(token)};
    if (selecting.length == 0) return;
    if (!selecting.chooses() || !selecting.granted()) {
        if (threadIdx.x < 32) selecting.take_all();
        return;
    }
    const i64 first = static_cast<i64>(p.jobs * p.splits - 1 - number * p.splits) * GROUP + token;
    if (static_cast<i32>(threadIdx.x) < p.splits)
        s.heads[threadIdx.x] = reinterpret_cast<const uint4*>(p.heads)[first - static_cast<i64>(threadIdx.x) * GROUP];
    __syncthreads();
    Merging{p, s, first}.select(selecting.out());
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::MERGE_THREADS, 1)
    prompt_merge(const __grid_constant__ hisparse::PromptIndex p) {
    __shared__ hisparse::MergeShared s;
    hisparse::merge_token(p, s);
}

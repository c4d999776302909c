// The best k of a token's scores while they are formed: one warp, one token, positions in ascending order.
//
//     take     64 scores: those that may be among the best k are appended to a list in global memory (L2), in order
//     shorten  a full list: a bar below which nothing is needed any more, found by histograms of 256 bins over the range
//              of what is listed; entries below it go, the order stays
//     take_list  continues with what another warp listed of later positions
//     finish   the exact k best, ties to the lowest position, ascending
//
// The list is in order of position, so shortening it keeps that order and neither sorting nor bitmaps are needed, and a
// score equal to the bar's loses to those before it once k are listed. A list of LISTED entries is shortened to k and at
// most SLACK more, so a context of n positions in random order takes about k ln(n / k) appends and a few shortenings;
// one in ascending order of scores takes n / (LISTED - k) of them: slower, as exact.
//
// L2 is far: a list is read by vectors of four neighbours a lane, several ahead of their use. Memory does not grow with the
// context.
//
// Rejected: all scores in memory and a launch that selects (a block of 4,096 tokens at 128k takes 2 GiB, or as many
// launches as fit less), lists in shared memory (eight tokens of a block take 256 KiB), a bar guessed from the token
// before (not exact where the guess is too high).
#pragma once

#include "ptx.cuh"

namespace hisparse {

constexpr u32 LISTED = 4096, SLACK = 512, RANGE_BINS = 256, PAGES_AHEAD = 4;
constexpr i32 PROMPT_TOPK_MAX = LISTED - 2 * SLACK;  // so that a shortened list has room for more
static_assert(64 * PAGES_AHEAD < SLACK, "a list that is not shortened is not crowded either");

// Order key of a score: compares as the score does, 0 for NaN, equal for both zeros.
__device__ __forceinline__ u32 prompt_order(float score) {
    const u32 bits = __float_as_uint(score + 0.0f);
    if (score != score) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Where the best positions of a token go, and their rows in the slab.
struct ListOut {
    i32* positions;         // null: nowhere
    i32* rows;              // null: nowhere
    const i32* slab_pages;  // of the token's seat

    __device__ __forceinline__ void put(u32 place, i32 position) const {
        positions[place] = position;
        if (rows == nullptr) return;
        rows[place] = position < 0 ? -1 : slab_pages[position / PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS;
    }
};

// Where a list lies.
struct ListPlace {
    u32* keys;       // [LISTED], in global memory
    i32* positions;  // likewise
    u32* bins;       // [RANGE_BINS], in shared memory
};
struct ListState {
    u32 count, bar;  // keys below `bar` are not needed; the same in all lanes
};

// Calls f(vectors, place of their first entry of this lane) for READS neighbouring vectors of each lane at a time.
template <u32 READS, class Vector, class Each>
__device__ __forceinline__ void each_vectors(const void* list, u32 count, Each f) {
    const Vector* const vectors = static_cast<const Vector*>(list) + threadIdx.x % 32;
#pragma unroll 1
    for (u32 from = 0; from < count; from += 128 * READS) {
        Vector held[READS];
#pragma unroll
        for (u32 i = 0; i < READS; ++i) held[i] = vectors[from / 4 + 32 * i];
        f(held, from + 4 * (threadIdx.x % 32));
    }
}

// Find the bin that holds the `wanted`-th of the keys in [low, low + (1 << width)), in bins of 1 << shift: `low` becomes
// its first key, `wanted` the rank in it. Returns how many keys it holds.
__device__ __forceinline__ u32 narrow(const ListPlace& at, u32 count, u32& low, u32 width, u32 shift, u32& wanted) {
    constexpr u32 READS = 8;
    const u32 lane = threadIdx.x % 32, base = low;
    for (u32 i = lane; i < RANGE_BINS; i += 32) at.bins[i] = 0;
    __syncwarp();
    each_vectors<READS, uint4>(at.keys, count, [&](const uint4(&four)[READS], u32 place) {
#pragma unroll
        for (u32 i = 0; i < READS; ++i) {
            const u32 keys[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 over = keys[j] - base;
                const bool in = place + 128 * i + j < count && keys[j] >= base && (width == 32 || over >> width == 0);
                if (in) count_shared(at.bins + (over >> shift));
            }
        }
    });
    __syncwarp();
    u32 own[8], sum = 0;  // of eight bins, the highest lane 0's
#pragma unroll
    for (u32 i = 0; i < 8; ++i) own[i] = at.bins[RANGE_BINS - 1 - (8 * lane + i)], sum += own[i];
    u32 inclusive = sum;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 left = __shfl_up_sync(0xFFFFFFFF, inclusive, step);
        if (lane >= step) inclusive += left;
    }
    const u32 owner = __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFF, inclusive >= wanted))) - 1;
    u32 above = inclusive - sum, bin = 0, inside = 0;
    bool found = false;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        if (!found && above + own[i] >= wanted) found = true, bin = RANGE_BINS - 1 - (8 * lane + i), inside = own[i];
        if (!found) above += own[i];
    }
    bin = __shfl_sync(0xFFFFFFFF, bin, owner), inside = __shfl_sync(0xFFFFFFFF, inside, owner);
    wanted -= __shfl_sync(0xFFFFFFFF, above, owner);
    low += bin << shift;
    return inside;
}

// Keep keys from `low` on, in order, and of those equal to it only `ties`, unless that is 0: in the list, or with `out`
// their positions there. Entries move down, never past what has been read.
template <bool TIES> __device__ __forceinline__ u32 keep(const ListPlace& at, u32 count, u32 low, u32 ties, const ListOut& out) {
    constexpr u32 READS = 8;
    const u32 lane = threadIdx.x % 32, below = (1u << lane) - 1;
    u32 kept = 0;
#pragma unroll 1
    for (u32 from = 0; from < count; from += 32 * READS) {
        u32 keys[READS];
        i32 positions[READS];
#pragma unroll
        for (u32 i = 0; i < READS; ++i) {
            const u32 place = from + 32 * i + lane;
            keys[i] = at.keys[place], positions[i] = at.positions[place];
        }
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < READS; ++i) {
            const bool is_entry = from + 32 * i + lane < count;
            bool chosen = is_entry && (TIES ? keys[i] > low : keys[i] >= low);
            if (TIES) {
                const bool equal = is_entry && keys[i] == low;
                const u32 equals = __ballot_sync(0xFFFFFFFF, equal);
                chosen |= equal && __popc(equals & below) < ties;
                ties -= min(ties, static_cast<u32>(__popc(equals)));
            }
            const u32 lanes = __ballot_sync(0xFFFFFFFF, chosen), to = kept + __popc(lanes & below);
            if (chosen && out.positions != nullptr) out.put(to, positions[i]);
            if (chosen && out.positions == nullptr) at.keys[to] = keys[i], at.positions[to] = positions[i];
            kept += __popc(lanes);
        }
        __syncwarp();
    }
    return kept;
}

// Without `out`: down to k entries and a few more. With it: exactly k, whose positions are written there alone. All keys
// are in [least, most].
__device__ __noinline__ ListState shorten(ListPlace at, u32 k, u32 count, u32 least, u32 most, ListOut out) {
    __syncwarp();
    u32 low = least, width = 32 - __clz(static_cast<int>((most - least) | 1)), wanted = k, ties = 0;
    while (true) {
        const u32 shift = width > 8 ? width - 8 : 0;
        const u32 inside = narrow(at, count, low, width, shift, wanted);
        if (inside <= wanted + (out.positions == nullptr ? SLACK : 0)) break;
        if (shift == 0) {
            ties = wanted;
            break;
        }
        width = shift;
    }
    const u32 kept = ties != 0 ? keep<true>(at, count, low, ties, out) : keep<false>(at, count, low, 0, out);
    return {kept, low + (ties != 0)};
}

struct PromptList {
    ListPlace at;
    u32 k;
    ListState now = {0, 0};
    u32 least = 0xFFFFFFFF, most = 0;  // of the keys that this lane has listed, and those of all before it was last shortened

    // Two scores of a lane, as order keys, where it has them: the first ones of all lanes are of lower positions than the
    // second ones, and both in order of lanes. Without branches: other work of the warp goes on between its parts.
    __device__ __forceinline__ void take(u32 near, u32 far, bool has_near, bool has_far, i32 near_at, i32 far_at) {
        const u32 below = (1u << threadIdx.x % 32) - 1;
        has_near = has_near && near >= now.bar, has_far = has_far && far >= now.bar;
        const u32 nears = __ballot_sync(0xFFFFFFFF, has_near), fars = __ballot_sync(0xFFFFFFFF, has_far);
        const u32 place = now.count + __popc(nears & below);
        const u32 behind = now.count + __popc(nears) + __popc(fars & below);
        store_if(has_near, at.keys + place, near);
        store_if(has_near, at.positions + place, near_at);
        store_if(has_far, at.keys + behind, far);
        store_if(has_far, at.positions + behind, far_at);
        least = min(least, min(has_near ? near : 0xFFFFFFFF, has_far ? far : 0xFFFFFFFF));
        most = max(most, max(has_near ? near : 0, has_far ? far : 0));
        now.count += __popc(nears) + __popc(fars);
    }

    // It has room for PAGES_AHEAD times 64 scores, and must be relieved then.
    __device__ __forceinline__ bool crowded() const { return now.count > LISTED - 64 * PAGES_AHEAD; }
    // Shorten, where that makes room.
    __device__ __forceinline__ void relieve() {
        if (now.count <= k + SLACK) return;
        now = shortened({nullptr, nullptr, nullptr});
        least = now.bar - (now.bar > 0);  // what is equal to the least that was kept may be below the bar
    }

    // The k best, of a list that holds as many.
    __device__ __forceinline__ void finish(const ListOut& out) const {
        if (now.count > k) {
            shortened(out);
            return;
        }
        __syncwarp();
        for (u32 i = threadIdx.x % 32; i < k; i += 32) out.put(i, at.positions[i]);
    }

    // For another warp that continues the list.
    __device__ __forceinline__ void save(uint4* head) const {
        const u32 low = __reduce_min_sync(0xFFFFFFFF, least), high = __reduce_max_sync(0xFFFFFFFF, most);
        if (threadIdx.x % 32 == 0) *head = {now.count, now.bar, low, high};
    }
    // Take a list of later positions.
    __device__ __forceinline__ void take_list(const u32* keys, const i32* positions, u32 count) {
        const u32 lane = threadIdx.x % 32;
        u32 near = 0, far = 0;
        i32 near_at = 0, far_at = 0;
        const auto load = [&](u32 from) {
            if (from < count) near = keys[from], near_at = positions[from];
            if (from + 32 < count) far = keys[from + 32], far_at = positions[from + 32];
        };
        load(lane);
        for (u32 from = lane; from - lane < count; from += 64) {
            const u32 first = near, second = far;
            const i32 first_at = near_at, second_at = far_at;
            load(from + 64);
            if (crowded()) relieve();
            take(first, second, from < count, from + 32 < count, first_at, second_at);
        }
    }

   private:
    __device__ __forceinline__ ListState shortened(const ListOut& out) const {
        return shorten(at, k, now.count, __reduce_min_sync(0xFFFFFFFF, least), __reduce_max_sync(0xFFFFFFFF, most), out);
    }
};

}  // namespace hisparse

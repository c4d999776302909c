// The best k of a token's scores while they are formed: one warp, one token, positions in ascending order.
//
//     take     128 scores: those that may be among the best k are appended to a list in global memory (L2), in order
//     shorten  a full list: a bar below which nothing is needed any more, found by histograms of 256 bins over the range
//              of what is listed; entries below it go, the order stays. In the end, to the exact k best, of equal scores
//              those of the lowest positions
//     put      their positions, ascending, as the last cut is made
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

constexpr u32 LISTED = 4096, SLACK = 512, RANGE_BINS = 256;
constexpr int TAKEN = 4;  // scores of a lane that are taken together
constexpr i32 PROMPT_TOPK_MAX = LISTED - 2 * SLACK;  // so that a shortened list has room for more
static_assert(PROMPT_TOPK_MAX + SLACK <= LISTED - 32 * TAKEN, "a shortened list is not crowded");

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
    u32* keys;  // [LISTED], in global memory; behind them as many positions
    u32* bins;  // [RANGE_BINS], in shared memory

    __device__ __forceinline__ u32* positions() const { return keys + LISTED; }
};

// Find the bin that holds the `wanted`-th of the keys in [low, low + (1 << width)), in bins of 1 << shift: `low` becomes
// its first key, `wanted` the rank in it. Returns how many keys it holds.
template <int READS>
__device__ __forceinline__ u32 narrow(const ListPlace& at, u32 count, u32& low, u32 width, u32 shift, u32& wanted) {
    const u32 lane = threadIdx.x % 32, base = low;
    const uint4* const fours = reinterpret_cast<const uint4*>(at.keys) + lane;
    for (u32 i = lane; i < RANGE_BINS; i += 32) at.bins[i] = 0;
    __syncwarp();
    const auto count_key = [&](u32 key, bool is_entry) {
        const u32 over = key - base;
        if (is_entry && key >= base && (width == 32 || over >> width == 0)) count_shared(at.bins + (over >> shift));
    };
#pragma unroll 1
    for (u32 from = 0; from < count; from += 128 * READS) {
        uint4 held[READS];
#pragma unroll
        for (int i = 0; i < READS; ++i) held[i] = fours[from / 4 + 32 * i];
#pragma unroll
        for (int i = 0; i < READS; ++i) {
            const u32 place = from + 128 * i + 4 * lane;
            count_key(held[i].x, place < count), count_key(held[i].y, place + 1 < count);
            count_key(held[i].z, place + 2 < count), count_key(held[i].w, place + 3 < count);
        }
    }
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

template <class T> using Four = T[4];

// Which entries of a list are the best: keys from `least` on, and of those equal to `low` the first `ties`.
struct Cut {
    u32 least, low, ties;
};

// Calls f(which are chosen by `cut`, keys, positions, how many are before the first) for four neighbours of this lane, all in
// order; VECTORS of them are read together. Returns how many are chosen.
template <int VECTORS, class Each>
__device__ __forceinline__ u32 each_chosen(const ListPlace& at, u32 count, Cut cut, Each f) {
    const u32 lane = threadIdx.x % 32, below = (1u << lane) - 1;
    const uint4* const keys = reinterpret_cast<const uint4*>(at.keys) + lane;
    const uint4* const positions = reinterpret_cast<const uint4*>(at.positions()) + lane;
    // A bit of each lane's four: how many lower lanes have in all, and all lanes.
    const auto count_bits = [&](const bool(&bits)[4], u32& before, u32& all) {
        before = all = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 lanes = __ballot_sync(0xFFFFFFFF, bits[j]);
            before += __popc(lanes & below), all += __popc(lanes);
        }
    };
    u32 kept = 0;
#pragma unroll 1
    for (u32 from = 0; from < count; from += 128 * VECTORS) {
        uint4 held[VECTORS], places[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) held[i] = keys[from / 4 + 32 * i], places[i] = positions[from / 4 + 32 * i];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const u32 four[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
            const u32 own[4] = {places[i].x, places[i].y, places[i].z, places[i].w};
            bool chosen[4];
            u32 before, all;
            const u32 first = from + 128 * i + 4 * lane;
#pragma unroll
            for (int j = 0; j < 4; ++j) chosen[j] = first + j < count && four[j] >= cut.least;
            if (cut.ties > 0) {
                bool equal[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) equal[j] = first + j < count && four[j] == cut.low;
                count_bits(equal, before, all);
#pragma unroll
                for (int j = 0; j < 4; ++j) chosen[j] |= equal[j] && before < cut.ties, before += equal[j];
                cut.ties -= min(cut.ties, all);
            }
            count_bits(chosen, before, all);
            before += kept, kept += all;
            f(chosen, four, own, before);
        }
        __syncwarp();
    }
    return kept;
}

// A lane reads READS vectors of keys, or a quarter as many of keys and of positions, before it uses them.
template <int READS> struct PromptList {
    static_assert(LISTED % (128 * READS) == 0, "no lane reads beyond a list");
    ListPlace at;
    u32 k;
    u32 count = 0, bar = 0;             // keys below `bar` are not needed; the same in all lanes
    u32 least = 0xFFFFFFFF, most = 0;  // bounds of this lane's keys, and of all before it was last shortened

    // TAKEN scores of a lane, as order keys, from position `first` on, 32 apart, where they are below `end`. Without branches:
    // parts of it overlap.
    __device__ __forceinline__ void take(const u32 (&keys)[TAKEN], i32 first, i32 end) {
        const u32 below = (1u << threadIdx.x % 32) - 1;
        bool wanted[TAKEN];
        u32 lanes[TAKEN];
#pragma unroll
        for (int i = 0; i < TAKEN; ++i) {
            wanted[i] = first + 32 * i < end && keys[i] >= bar;
            lanes[i] = __ballot_sync(0xFFFFFFFF, wanted[i]);
            least = min(least, wanted[i] ? keys[i] : 0xFFFFFFFF), most = max(most, wanted[i] ? keys[i] : 0);
        }
#pragma unroll
        for (int i = 0; i < TAKEN; ++i) {
            u32* const to = at.keys + count + __popc(lanes[i] & below);
            store_if(wanted[i], to, keys[i]), store_if(wanted[i], to + LISTED, first + 32 * i);
            count += __popc(lanes[i]);
        }
    }

    // It may have no room for TAKEN scores of each lane, and must be shortened then.
    __device__ __forceinline__ bool crowded() const { return count > LISTED - 32 * TAKEN; }

    // Which entries are the best k, and at most SLACK more; if `exact`, k. It holds as many.
    __device__ __forceinline__ Cut cut(bool exact) const {
        __syncwarp();
        u32 low = __reduce_min_sync(0xFFFFFFFF, least), wanted = k, ties = 0;
        u32 width = 32 - __clz(static_cast<int>((__reduce_max_sync(0xFFFFFFFF, most) - low) | 1));
#pragma unroll 1
        while (true) {
            const u32 shift = width > 8 ? width - 8 : 0;
            const u32 inside = narrow<READS>(at, count, low, width, shift, wanted);
            if (inside <= wanted + (exact ? 0 : SLACK)) break;
            if (shift == 0) {
                ties = wanted;
                break;
            }
            width = shift;
        }
        return {low + (ties != 0), low, ties};
    }

    // Keep what is chosen. Entries move down, never past what has been read.
    __device__ __forceinline__ void keep(const Cut& cut) {
        bar = cut.least;
        const auto move = [&](const Four<bool>& chosen, const Four<u32>& keys, const Four<u32>& positions, u32 to) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (chosen[j]) at.keys[to] = keys[j], at.positions()[to] = positions[j];
                to += chosen[j];
            }
        };
        count = each_chosen<READS / 4>(at, count, cut, move);
        least = bar - (bar > 0);  // what is equal to the least that was kept may be below the bar
    }

    // Write the positions of what is chosen.
    __device__ __forceinline__ void put(const Cut& cut, const ListOut& out) const {
        const auto write = [&](const Four<bool>& chosen, const Four<u32>&, const Four<u32>& positions, u32 to) {
            i32 pages[4] = {};
            if (out.rows != nullptr)
#pragma unroll
                for (int j = 0; j < 4; ++j) load_if(chosen[j], pages[j], out.slab_pages + positions[j] / PAGE_TOKENS);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (chosen[j]) out.positions[to] = positions[j];
                if (chosen[j] && out.rows != nullptr) out.rows[to] = pages[j] * PAGE_TOKENS + positions[j] % PAGE_TOKENS;
                to += chosen[j];
            }
        };
        each_chosen<READS / 4>(at, count, cut, write);
    }

    // For prompt_merge.
    __device__ __forceinline__ void save(uint4* head) const {
        const u32 low = __reduce_min_sync(0xFFFFFFFF, least), high = __reduce_max_sync(0xFFFFFFFF, most);
        if (threadIdx.x % 32 == 0) *head = {count, bar, low, high};
    }
};

}  // namespace hisparse

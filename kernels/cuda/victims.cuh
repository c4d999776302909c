// Which slots go: exact LRU over the slots of one seat, by the control warps of a block. All blocks of a request choose
// alike, each for itself, from the same stamps and the same bits of slots that stay.
//
// Victims are all candidates with a stamp below the cut, and the lowest slots among those at it. The cut is found by
// counting candidates in four neighbouring classes of stamps at a time, from the oldest candidate's stamp on: every step
// evicts about as many slots as it leaves behind with one stamp, so that the first round nearly always ends the search.
// Otherwise classes grow fourfold until the cut is passed, then shrink fourfold until each is one stamp.
//
// Rejected: a histogram over all ages (atomics in shared memory on few distinct bins, then a scan: 4,800 cycles where
// this takes some hundred).
#pragma once

#include "swap_in_block.cuh"

namespace hisparse {

struct Cut {
    i32 stamp;    // victims are older, or as old
    u32 ties;     // so many as old
    u32 victims;  // in all; fewer than wanted only when slots run out

    // Victims among the first slots, of which `sofar` are older << 16 | as old.
    __device__ __forceinline__ u32 chosen(u32 sofar) const { return (sofar >> 16) + min(sofar & 0xFFFF, ties); }
};

__device__ __forceinline__ u32 shift_left(u32 value, u32 by) {  // 0 from 32 on, unlike C++
    u32 shifted;
    asm("shl.b32 %0, %1, %2;" : "=r"(shifted) : "r"(value), "r"(by));
    return shifted;
}

// Stamps of one control thread: `turns` quads of neighbouring slots, MUST_STAY for those that are no candidates. QUADS
// of them are held at a time. Threads follow each other in slot order, so that one prefix sum over threads ranks all.
struct Stamps {
    i32 held[QUADS][4];
    int first = -1;
    const u32 turns, base;  // base: the first turn's slot

    __device__ __forceinline__ explicit Stamps(const Seat& at)
        : turns((at.limit + 4 * CONTROL_THREADS - 1) / (4 * CONTROL_THREADS)), base(threadIdx.x * turns * 4) {}

    __device__ __forceinline__ u32 slot(int j) const { return base + (first + j) * 4; }

    // As memory has them, from turn `turn` on.
    __device__ __forceinline__ void load(const Seat& at, const Shared& s, const i32* stamp, int turn) {
        first = turn;
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            int4 quad = {MUST_STAY, MUST_STAY, MUST_STAY, MUST_STAY};
            if (first + j < turns && slot(j) < at.limit) {
                const i32 chunk = s.chunk(slot(j) / PAGE_TOKENS);
                if (chunk >= 0) quad = *reinterpret_cast<const int4*>(stamp + chunk * PAGE_TOKENS + slot(j) % PAGE_TOKENS);
            }
            held[j][0] = quad.x, held[j][1] = quad.y, held[j][2] = quad.z, held[j][3] = quad.w;
        }
    }

    __device__ __forceinline__ void mask(const Seat& at, const Shared& s) {
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            const u32 stays = slot(j) < at.limit ? s.stay(slot(j) / 32) >> slot(j) % 32 : 0;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (stays >> i & 1 || held[j][i] >= at.now) held[j][i] = MUST_STAY;
        }
    }

    __device__ __forceinline__ i32 oldest() const {
        i32 least = MUST_STAY;
#pragma unroll
        for (int j = 0; j < QUADS; ++j) least = min(min(min(least, held[j][0]), min(held[j][1], held[j][2])), held[j][3]);
        return least;
    }

    // Candidates in four classes of 1 << shift stamps each, from `stamp` on: 8 bits per class.
    __device__ __forceinline__ u32 count(i32 stamp, int shift) const {
        u32 counts = 0;
#pragma unroll
        for (int j = 0; j < QUADS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                counts += shift_left(1, min(static_cast<u32>(held[j][i] - stamp) >> shift, 4u) * 8);
        return counts;
    }

    // Victims of ranks up to before+wanted-1, from `sofar` (as in Cut) on, go to the entries that this block loads.
    __device__ __forceinline__ void assign(const Shared& s, const Cut& cut, u32& sofar, u32 before, u32 wanted) const {
#pragma unroll
        for (int j = 0; j < QUADS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (held[j][i] > cut.stamp) continue;
                const u32 rank = cut.chosen(sofar) - before;
                sofar += held[j][i] < cut.stamp ? 1 << 16 : 1;
                if (cut.chosen(sofar) - before > rank && rank < wanted)
                    s.slot(s.missing(rank)) = static_cast<u16>(slot(j) + i);
            }
    }
};
static_assert((SLOTS_MAX + CONTROL_THREADS - 1) / CONTROL_THREADS < 256 && SLOTS_MAX < 65536, "counts fit their bits");

// Counts of four classes, as Stamps::count has them, summed over all warps, and over those before this one: 16 bits each,
// even classes in x, odd ones in y.
__device__ __forceinline__ void sum_classes(Scalars& q, u32 counts, int round, uint2& all, uint2& before) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    all = {__reduce_add_sync(0xFFFFFFFF, counts & 0x00FF00FF), __reduce_add_sync(0xFFFFFFFF, counts >> 8 & 0x00FF00FF)};
    if (lane == 0) q.sums[round % 2][warp] = all;
    sync_named(CONTROL, CONTROL_THREADS);
    const uint2 sum = lane < CONTROL_WARPS ? q.sums[round % 2][lane] : uint2{0, 0};
    const bool earlier = lane < warp;
    all = {__reduce_add_sync(0xFFFFFFFF, sum.x), __reduce_add_sync(0xFFFFFFFF, sum.y)};
    before = {__reduce_add_sync(0xFFFFFFFF, earlier ? sum.x : 0), __reduce_add_sync(0xFFFFFFFF, earlier ? sum.y : 0)};
}

__device__ __forceinline__ u32 class_of(const uint2& sums, int c) { return (c % 2 ? sums.y : sums.x) >> c / 2 * 16 & 0xFFFF; }

__device__ __forceinline__ i32 oldest_of_all(Scalars& q, i32 oldest) {
    oldest = __reduce_min_sync(0xFFFFFFFF, oldest);
    if (threadIdx.x % 32 == 0) q.oldest[threadIdx.x / 32] = oldest;
    sync_named(CONTROL, CONTROL_THREADS);
    return __reduce_min_sync(0xFFFFFFFF, q.oldest[threadIdx.x % CONTROL_WARPS]);
}

// Chooses `total` victims, or as many as there are, and gives those from rank `before` on to this block's `misses`.
// `stamps` may come loaded, not masked. Returns the number of victims. One loop over the stamps for its three phases, since
// that loop is most of the code.
__device__ __forceinline__ u32 choose_victims(const Seat& at, const Shared& s, Scalars& q, const i32* stamp,
                                              Stamps& stamps, u32 total, u32 before, u32 misses) {
    enum { OLDEST, COUNT, ASSIGN } phase = OLDEST;
    Cut cut = {at.now, 0, 0};
    i32 from = 0;
    u32 older = 0;         // candidates older than `from`
    u32 ahead = 0;         // older << 16 | as old as the cut, in the warps before this one
    u32 own = 0;           // likewise in this thread
    bool passed = false;
    int shift = 0;
    if (stamps.first >= 0) stamps.mask(at, s);
#pragma unroll 1
    for (int round = 0;; ++round) {
        i32 oldest = MUST_STAY;
        u32 counts = 0;
#pragma unroll 1
        for (int turn = 0; turn < stamps.turns; turn += QUADS) {
            if (turn != stamps.first) {
                stamps.load(at, s, stamp, turn);
                stamps.mask(at, s);
            }
            if (phase == OLDEST) oldest = min(oldest, stamps.oldest());
            else if (phase == COUNT) counts += stamps.count(from, shift);
            else stamps.assign(s, cut, ahead, before, misses);
        }
        if (phase == ASSIGN) break;
        if (phase == OLDEST) {
            from = oldest_of_all(q, oldest);
            phase = COUNT;
        } else {
            uint2 all, in_warps_before;
            sum_classes(q, counts, round, all, in_warps_before);
            int found = 0;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const u32 upto = older + class_of(all, c);
                if (found < c || upto >= total) continue;
                found = c + 1;
                older = upto;
                ahead += class_of(in_warps_before, c) << 16;
                own += (counts >> 8 * c & 0xFF) << 16;
            }
            from += found << shift;
            if (found < 4 && shift == 0) {
                cut = {from, total - older, total};
                ahead += class_of(in_warps_before, found);
                own += counts >> 8 * found & 0xFF;
                phase = ASSIGN;
            }
            passed |= found < 4;
            shift = passed ? max(shift - 2, 0) : shift + 2;
        }
        if (phase == COUNT && from >= at.now) {  // slots run out
            cut.victims = older;
            phase = ASSIGN;
        }
        if (phase == ASSIGN) {
            ahead += warp_inclusive_sum(own) - own;
            misses = min(misses, cut.victims - min(before, cut.victims));
            const u32 first = cut.chosen(ahead), last = cut.chosen(ahead + own);
            if (!__any_sync(0xFFFFFFFF, first < last && first < before + misses && last > before)) break;
        }
    }
    return cut.victims;
}

}  // namespace hisparse

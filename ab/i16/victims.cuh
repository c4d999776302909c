// Victims by the stamps of all slots: exact LRU over the slots of one seat, by the control warps of a block. Each block
// of a request makes the same choice by itself, from the same stamps and the same bits of slots in use.
//
// Victims are all candidates with a stamp below the cut, and the lowest slots among those at it. The cut is found by
// counting candidates in four neighbouring classes of stamps at a time, from the oldest stamp on. A step evicts about as
// many slots as it leaves with one stamp, so the first round nearly always ends the search. Otherwise classes grow fourfold
// until the cut is passed, then shrink fourfold until each is one stamp.
//
// Rejected: a histogram over all ages (atomics in shared memory on few distinct bins, then a scan: slower).
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

// Stamps of one control thread: quads of neighbouring slots, MUST_STAY for those that are no candidates. QUADS of them
// are held at a time. Threads follow each other in slot order, so that one prefix sum over threads ranks all.
struct Stamps {
    i32 held[QUADS][4];
    u32 first = ~0u;  // of the thread's quads, the first one held
    u32 begin, own;   // the thread's first quad, and how many it has
    u32 most, turns;  // quads of a thread of this warp at most, and of any thread

    __device__ __forceinline__ explicit Stamps(const Seat& at) {
        const u32 quads = (at.limit + 3) / 4, each = quads / CONTROL_THREADS, more = quads % CONTROL_THREADS;
        begin = threadIdx.x * each + min(threadIdx.x, more);
        own = each + (threadIdx.x < more);
        most = each + ((threadIdx.x & ~31u) < more);
        turns = each + (more > 0);
    }

    __device__ __forceinline__ u32 slot(u32 j) const { return (begin + first + j) * 4; }

    // As memory has them, from quad `turn` on.
    __device__ __forceinline__ void load(Shared& s, const i32* stamp, u32 turn) {
        first = turn;
#pragma unroll
        for (u32 j = 0; j < QUADS; ++j) {
            int4 quad = {MUST_STAY, MUST_STAY, MUST_STAY, MUST_STAY};
            if (first + j < own) {
                const i32 chunk = s.chunk[slot(j) / PAGE_TOKENS];
                if (chunk >= 0)
                    quad = *reinterpret_cast<const int4*>(stamp + chunk * PAGE_TOKENS + slot(j) % PAGE_TOKENS);
            }
            held[j][0] = quad.x, held[j][1] = quad.y, held[j][2] = quad.z, held[j][3] = quad.w;
        }
    }

    __device__ __forceinline__ void mask(const Seat& at, Shared& s) {
#pragma unroll
        for (u32 j = 0; j < QUADS; ++j) {
            if (first + j >= most) break;
            const u32 stays = first + j < own ? s.stay[slot(j) / 32] >> slot(j) % 32 : 0;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (stays >> i & 1 || held[j][i] >= at.now) held[j][i] = MUST_STAY;
        }
    }

    __device__ __forceinline__ i32 oldest() const {
        i32 least = MUST_STAY;
#pragma unroll
        for (u32 j = 0; j < QUADS; ++j) {
            if (first + j >= most) break;
            least = min(min(min(least, held[j][0]), min(held[j][1], held[j][2])), held[j][3]);
        }
        return least;
    }

    // Candidates in four classes of 1 << shift stamps each, from `stamp` on: 8 bits per class.
    __device__ __forceinline__ u32 count(i32 stamp, int shift) const {
        u32 counts = 0;
#pragma unroll
        for (u32 j = 0; j < QUADS; ++j) {
            if (first + j >= most) break;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                counts += shift_left(1, min(static_cast<u32>(held[j][i] - stamp) >> shift, 4u) * 8);
        }
        return counts;
    }

    // This thread's victims to `take(number, slot)`, from rank `rank` on, `ties` of them as old as the cut at most; both
    // move on. Number 0 has rank `before`, and `wanted` are taken.
    template <class Take>
    __device__ __forceinline__ void assign(i32 cut, u32& rank, u32& ties, u32 before, u32 wanted, Take take) const {
        u64 older = 0, tied = 0;  // a bit per slot held
#pragma unroll
        for (u32 j = 0; j < QUADS; ++j) {
            if (first + j >= most) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                older |= static_cast<u64>(held[j][i] < cut) << (j * 4 + i);
                tied |= static_cast<u64>(held[j][i] == cut) << (j * 4 + i);
            }
        }
        while (__popcll(tied) > ties) tied &= ~(1ull << (63 - __clzll(tied)));
        ties -= __popcll(tied);
        for (u64 left = older | tied; left != 0; left &= left - 1, ++rank)
            if (rank - before < wanted) take(rank - before, slot(0) + __ffsll(left) - 1);
    }
};
static_assert(QUADS * 4 <= 64, "a bit per slot held");
static_assert((SLOTS_MAX + CONTROL_THREADS - 1) / CONTROL_THREADS < 256 && SLOTS_MAX < 65536, "counts fit their bits");

// A barrier of the control warps, or of all warps of a block.
template <u32 THREADS> __device__ __forceinline__ void sync_first() {
    static_assert(THREADS == CONTROL_THREADS || THREADS == BLOCK_THREADS);
    sync_named(THREADS == CONTROL_THREADS ? CONTROL : ALL, THREADS);
}

// Counts of four classes, as Stamps::count has them, summed over all warps, and over those before this one: 16 bits
// each, even classes in x, odd ones in y.
template <u32 THREADS>
__device__ __forceinline__ void sum_classes(Shared& s, u32 counts, int round, uint2& all, uint2& before) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    all = {__reduce_add_sync(0xFFFFFFFF, counts & 0x00FF00FF), __reduce_add_sync(0xFFFFFFFF, counts >> 8 & 0x00FF00FF)};
    if (lane == 0) s.sums[round % 2][warp] = all;
    sync_first<THREADS>();
    const uint2 sum = lane < THREADS / 32 ? s.sums[round % 2][lane] : uint2{0, 0};
    const bool earlier = lane < warp;
    all = {__reduce_add_sync(0xFFFFFFFF, sum.x), __reduce_add_sync(0xFFFFFFFF, sum.y)};
    before = {__reduce_add_sync(0xFFFFFFFF, earlier ? sum.x : 0), __reduce_add_sync(0xFFFFFFFF, earlier ? sum.y : 0)};
}

__device__ __forceinline__ u32 class_of(const uint2& sums, int c) {
    return (c % 2 ? sums.y : sums.x) >> c / 2 * 16 & 0xFFFF;
}

// A stamp that no candidate is older than, into s.oldest: by the stamps of all slots that are not known to stay.
__device__ __forceinline__ void find_oldest(const Seat& at, Shared& s, const i32* stamp,
                                            Stamps& stamps) {
    i32 oldest = MUST_STAY;
#pragma unroll 1
    for (u32 turn = 0; turn < stamps.turns; turn += QUADS) {
        if (turn != stamps.first) stamps.load(s, stamp, turn);
        stamps.mask(at, s);
        oldest = min(oldest, stamps.oldest());
    }
    oldest = __reduce_min_sync(0xFFFFFFFF, oldest);
    if (threadIdx.x % 32 == 0) s.oldest[threadIdx.x / 32] = oldest;
}

// Chooses `total` victims among all slots, or as many as there are (none at all in a DRAFT), in slot order: number
// `before` and the `wanted` that follow go to `take(number, slot)`, counted from 0. Returns the number of victims. One
// loop over the stamps for both phases, since that loop is most of the code.
template <class Take>
__device__ __forceinline__ u32 choose(const Seat& at, Shared& s, const i32* stamp, u32 total,
                                      u32 before, u32 wanted, Take take) {
    Stamps stamps(at);
    find_oldest(at, s, stamp, stamps);
    sync_named(CONTROL, CONTROL_THREADS);
    Cut cut = {at.now, 0, 0};
    i32 from = __reduce_min_sync(0xFFFFFFFF, s.oldest[threadIdx.x % CONTROL_WARPS]);
    u32 older = 0;           // candidates older than `from`
    u32 ahead = 0, own = 0;  // older << 16 | as old as the cut: in the threads before this one, and in this one
    u32 rank = 0, ties = 0;
    bool passed = false, assigns = false;
    int shift = 0;
#pragma unroll 1
    for (int round = 0;; ++round) {
        u32 counts = 0;
#pragma unroll 1
        for (u32 turn = 0; turn < stamps.turns; turn += QUADS) {
            if (turn != stamps.first) {
                stamps.load(s, stamp, turn);
                stamps.mask(at, s);
            }
            if (assigns) stamps.assign(cut.stamp, rank, ties, before, wanted, take);
            else counts += stamps.count(from, shift);
        }
        if (assigns) break;
        uint2 all, in_warps_before;
        sum_classes<CONTROL_THREADS>(s, counts, round, all, in_warps_before);
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
        // Without a candidate `from` is MUST_STAY, and the slots found at it stay.
        const bool exact = found < 4 && shift == 0 && from < at.now, out_of_slots = !exact && from >= at.now;
        passed |= found < 4;
        shift = passed ? max(shift - 2, 0) : shift + 2;
        if (!exact && !out_of_slots) continue;
        cut = {at.now, 0, older};
        if (exact) {
            cut = {from, total - older, total};
            ahead += class_of(in_warps_before, found);
            own += counts >> 8 * found & 0xFF;
        }
#if DRAFT
        if (cut.victims < total) return 0;
#endif
        ahead += warp_inclusive_sum(own) - own;
        wanted = min(wanted, cut.victims - min(before, cut.victims));
        rank = cut.chosen(ahead);
        ties = cut.ties - min(cut.ties, ahead & 0xFFFF);
        const u32 last = cut.chosen(ahead + own);
        assigns = __any_sync(0xFFFFFFFF, rank < last && rank < before + wanted && last > before);
        if (!assigns) break;
    }
    return cut.victims;
}

}  // namespace hisparse

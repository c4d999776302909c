// Which entries of a request miss: the control warps of each block read it from the codes and counts of all blocks, which
// peers have sent. Misses of lower ranks come first, those of one block in the order found. Of entries with the same token
// the first one is the leader; the others take its row.
#pragma once

#include "resolve.cuh"

namespace hisparse {

// Misses of all blocks that load a row.
struct Misses {
    u32 total;
    u32 before, own;  // of lower ranks, and of this block
};

// Counts of all warps of entries, four to a thread. Each warp of threads adds them up by itself: no warp waits for another.
struct Counts {
    u32 count[4];

    __device__ __forceinline__ static u32 first() { return threadIdx.x % 32 * 4; }

    __device__ __forceinline__ Counts(const Shared& s, const Part& part) {
        const u32 all = part.positions() / 32;
        uint4 v = {0, 0, 0, 0};
        if (first() < all) v = *reinterpret_cast<const uint4*>(s.count + first());
        count[0] = v.x, count[1] = v.y, count[2] = v.z, count[3] = v.w;
#pragma unroll
        for (u32 i = 1; i < 4; ++i)
            if (first() + i >= all) count[i] = 0;
    }

    __device__ __forceinline__ u32 hits() const {
        return __reduce_add_sync(0xFFFFFFFF, (count[0] >> 16) + (count[1] >> 16) + (count[2] >> 16) + (count[3] >> 16));
    }
    __device__ __forceinline__ bool any() const {
        return __any_sync(0xFFFFFFFF, (count[0] | count[1] | count[2] | count[3]) & 0xFFFF);
    }
    __device__ __forceinline__ Misses misses(const Part& part, u32 own) const {
        u32 sums = 0;  // all, and from 16 bits on those of lower ranks
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            sums += (count[i] & 0xFFFF) * (part.rank_at((first() + i) * 32) < part.rank ? 0x10001 : 1);
        sums = __reduce_add_sync(0xFFFFFFFF, sums);
        return {sums & 0xFFFF, sums >> 16, own};
    }
    // A bit for each block with misses, leaders or not.
    __device__ __forceinline__ u32 missing_ranks(const Part& part) const {
        u32 ranks = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if ((count[i] & 0xFFFF) > 0) ranks |= 1 << part.rank_at((first() + i) * 32);
        return __reduce_or_sync(0xFFFFFFFF, ranks);
    }
};

__device__ __forceinline__ u32 hash_of(u32 entry) { return (entry >> ENTRY_BITS) * 2654435761u >> 7; }

// Enters an entry into the hash set of missing tokens, which keeps the lowest entry of each token. Entering twice is
// harmless.
__device__ __forceinline__ void enter(Shared& s, u32 entry) {
    for (u32 place = hash_of(entry);; ++place) {
        u32& at = s.seen[place % SEEN];
        const u32 there = atomicCAS(&at, NOT_SEEN, entry);
        if (there == NOT_SEEN || there == entry) return;
        if (there >> ENTRY_BITS != entry >> ENTRY_BITS) continue;
        atomicMin(&at, entry);
        atomicOr(&s.duplicates, 1);
        return;
    }
}

// The leader of `entry`: the entry that loads its token.
__device__ __forceinline__ u32 leader_of(const Shared& s, u32 entry) {
    for (u32 place = hash_of(entry);; ++place) {
        const u32 there = s.seen[place % SEEN];
        if (there >> ENTRY_BITS == entry >> ENTRY_BITS) return there;
    }
}

// The entry whose code is at `position`.
__device__ __forceinline__ u32 entry_at(const Shared& s, const Part& part, u32 position) {
    const u32 place = part.place_at(position);
    return static_cast<u32>(s.token[place]) << ENTRY_BITS | place;
}

// Calls `visit(code)` for all codes, divided over the control threads.
template <class Visit> __device__ __forceinline__ void for_codes(const Shared& s, const Part& part, Visit visit) {
#pragma unroll 1
    for (u32 position = threadIdx.x * 4; position < part.positions(); position += CONTROL_THREADS * 4) {
        const uint2 v = *reinterpret_cast<const uint2*>(s.code + position);
        const u32 codes[4] = {v.x & 0xFFFF, v.x >> 16, v.y & 0xFFFF, v.y >> 16};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) visit(codes[i]);
    }
}

// Enters the misses of all blocks into the hash set. By the copy warps, which are idle while their loads are on the way.
__device__ __forceinline__ void enter_misses(Shared& s, const Part& part) {
    constexpr u32 STEP = COPY_THREADS * VECTOR_CODES;
#pragma unroll 1
    for (u32 position = (threadIdx.x - CONTROL_THREADS) * VECTOR_CODES; position < part.positions(); position += STEP) {
        const uint4 codes = *reinterpret_cast<const uint4*>(s.code + position);
        const u32 pairs[4] = {codes.x, codes.y, codes.z, codes.w};
        u32 missing = 0;  // a bit each
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 equal = __vcmpeq2(pairs[i], MISSING << 16 | MISSING);
            missing |= (equal & 1) << 2 * i | (equal >> 16 & 1) << (2 * i + 1);
        }
#pragma unroll 1
        for (; missing != 0; missing &= missing - 1) enter(s, entry_at(s, part, position + __ffs(missing) - 1));
    }
}

// Marks the slots of all hits as in use; complete after a barrier.
__device__ __forceinline__ void keep_hits(Shared& s, const Part& part) {
    for_codes(s, part, [&](u32 code) { set_bits_if(code < NOTHING, &s.stay[code / 32], 1u << code % 32); });
}

// Calls `visit(entry, rank)` for the misses of all blocks, shared out over the control threads.
template <class Visit>
__device__ __forceinline__ void for_all_misses(const Shared& s, const Part& part, Visit visit) {
#pragma unroll 1
    for (u32 position = threadIdx.x; position < part.positions(); position += CONTROL_THREADS)
        if (s.code[position] == MISSING) visit(entry_at(s, part, position), part.rank_at(position));
}

// Counts leaders only, and orders those of this block.
__device__ __forceinline__ void only_leaders(Shared& s, const Part& part, Misses& misses) {
    if (threadIdx.x < RANKS_MAX) s.leaders[threadIdx.x] = 0;
    sync_named(CONTROL, CONTROL_THREADS);
    for_all_misses(s, part, [&](u32 entry, u32 rank) {
        if (rank != part.rank && leader_of(s, entry) == entry) atomicAdd(&s.leaders[rank], 1);
    });
#pragma unroll 1
    for (u32 m = threadIdx.x; m < misses.own; m += CONTROL_THREADS) {
        const u32 place = s.miss[m].place, entry = static_cast<u32>(s.token[place]) << ENTRY_BITS | place;
        if (leader_of(s, entry) == entry) s.order[atomicAdd(&s.leaders[part.rank], 1)] = static_cast<u16>(m);
    }
    sync_named(CONTROL, CONTROL_THREADS);
    const u32 peer = threadIdx.x % 32, leaders = peer < part.ranks ? s.leaders[peer] : 0;
    misses.total = __reduce_add_sync(0xFFFFFFFF, leaders);
    misses.before = __reduce_add_sync(0xFFFFFFFF, peer < part.rank ? leaders : 0);
    misses.own = s.leaders[part.rank];
}

// Writes the outputs of entries that have a leader in this block.
__device__ __forceinline__ void follow(const SwapIn& p, const Seat& at, const Shared& s, int row, const Part& part) {
    i32* const out = p.out_rows + static_cast<i64>(row) * p.k;
    sync_named(CONTROL, CONTROL_THREADS);  // leaders have their outputs
    for_all_misses(s, part, [&](u32 entry, u32) {
        const u32 leader = leader_of(s, entry), place = leader & ((1 << ENTRY_BITS) - 1);
        if (leader == entry || place / 32 % part.ranks != part.rank) return;
        const i32 device_row = out[place];
        out[entry & ((1 << ENTRY_BITS) - 1)] = device_row;
#if !DRAFT
        trip(p.state, VICTIMS, device_row < 0);
#endif
        add_to_seat(p, at, p.state.hits, device_row >= 0);
    });
}

}  // namespace hisparse

// What the thread blocks of one swap_in share and pass around: sizes, shared memory, the seat, small helpers.
#pragma once

#include "planes.cuh"

namespace hisparse {

constexpr int CONTROL_THREADS = 256;
constexpr int COPY_THREADS = 256;
constexpr int BLOCK_THREADS = CONTROL_THREADS + COPY_THREADS;
constexpr int CONTROL_WARPS = CONTROL_THREADS / 32;
constexpr int FLIGHT = PLANES == 2 ? 5 : 6;  // lines in flight per group of copy lanes
constexpr int TOKENS = 4;       // top-k entries that one thread reads together
constexpr int ENTRIES = 3;      // entries that one thread resolves together: half a top-k of 2048, and what chance adds
constexpr int QUADS = 5;        // of four stamps, that one control thread loads together: 4096 slots and the tail
constexpr int SPECULATIVE = 4;  // from so many blocks per request on, host pages are looked up before a miss is known

constexpr int ENTRY_BITS = 12;
constexpr int HOME_TOKENS = 16;  // neighbouring tokens with one home: their entries of slot_of share a sector
constexpr u32 NOT_SEEN = ~0u;
constexpr i32 MUST_STAY = 0x7FFFFFF0;  // stamp of slots that are no candidates
static_assert(TOPK_MAX <= 1 << ENTRY_BITS && CONTEXT_MAX_TOKENS <= 1 << (32 - ENTRY_BITS), "an entry is one word");

enum Barrier { CONTROL = 1 };

// Dynamic shared memory; the launcher lays the sections out (kernels/cuda/swap_in.py). Entries are counted per block.
struct Shared {
    u8* base;
    const Sections& at;

    template <class T> __device__ __forceinline__ T& in(u32 section, u32 i) const {
        return reinterpret_cast<T*>(base + section)[i];
    }
    // [k] token << 12 | place in the top-k, of the tokens whose home is this block
    __device__ __forceinline__ u32& entry(u32 i) const { return in<u32>(0, i); }
    __device__ __forceinline__ u32 token(u32 i) const { return entry(i) >> ENTRY_BITS; }
    __device__ __forceinline__ u32 place(u32 i) const { return entry(i) & ((1 << ENTRY_BITS) - 1); }
    // [k] of missing entries: place of the token in slot_of, or the entry that this one follows
    __device__ __forceinline__ i32& key(u32 i) const { return in<i32>(at.key, i); }
    __device__ __forceinline__ i32& page(u32 i) const { return in<i32>(at.page, i); }  // [k] host page
    __device__ __forceinline__ u16& slot(u32 i) const { return in<u16>(at.slot, i); }  // [k] victim
    // [k] from the front the entries to load, from the back their followers
    __device__ __forceinline__ u16& missing(u32 m) const { return in<u16>(at.missing, m); }
    __device__ __forceinline__ u32& seen(u32 i) const { return in<u32>(at.seen, i); }  // hash set of entries by token
    __device__ __forceinline__ i32& chunk(u32 i) const { return in<i32>(at.chunks, i); }
    // bits of slots that are no victims: tail, beyond the limit; later also hits
    __device__ __forceinline__ u32& stay(u32 word) const { return in<u32>(at.stay, word); }
    // of each block: misses; bits of the slots that it hit
    __device__ __forceinline__ uint4* mail(int rank) const {
        return reinterpret_cast<uint4*>(base + at.mail + rank * at.mail_bytes);
    }
    __device__ __forceinline__ u32* hits(int rank) const { return reinterpret_cast<u32*>(mail(rank) + 1); }
};

struct Scalars {
    u64 hits_mail;     // all peers' mail is here
    u64 readers_mail;  // all peers have read the stamps
    uint2 sums[2][CONTROL_WARPS];
    i32 oldest[CONTROL_WARPS];
    u32 entries, misses, followers, hits;
};

struct Seat {
    i32 seat, length, hot, now;
    u32 limit;  // slots, tail included
};

// Of one block's mail, in 16 bytes: its misses, and a bit per slot.
__device__ __forceinline__ u32 mail_vectors(const Seat& at) { return 1 + (static_cast<u32>(at.limit) + 127) / 128; }

__device__ __forceinline__ i32 table_entry(const i32* table, i32 width, i32 seat, u32 place) {
    i32 entry = -1;
    if (place < static_cast<u32>(width)) load_now(entry, table + static_cast<i64>(seat) * width + place);
    return entry;
}

// The block of a request that resolves `token`, and with it every duplicate of it.
__device__ __forceinline__ u32 home_of(u32 token, u32 ranks) { return __umulhi(token / HOME_TOKENS * 2654435761u, ranks); }

__device__ __forceinline__ i32 slot_row(const Shared& s, u32 slot) {
    const i32 chunk = s.chunk(slot / PAGE_TOKENS);
    return chunk < 0 ? -1 : chunk * PAGE_TOKENS + static_cast<i32>(slot % PAGE_TOKENS);
}

__device__ __forceinline__ u32 warp_inclusive_sum(u32 value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 left = __shfl_up_sync(0xFFFFFFFF, value, step);
        if (lane >= step) value += left;
    }
    return value;
}

__device__ __forceinline__ u32 lanes_below() {
    u32 mask;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
    return mask;
}

// Place of this lane among those of its warp (all converged) that `want` one, from a counter in shared memory.
__device__ __forceinline__ u32 take_place(bool want, u32* counter) {
    const u32 wanting = __ballot_sync(0xFFFFFFFF, want);
    if (wanting == 0) return 0;
    u32 base = 0;
    if (threadIdx.x % 32 == 0) base = atomicAdd(counter, __popc(wanting));
    return __shfl_sync(0xFFFFFFFF, base, 0) + __popc(wanting & lanes_below());
}

__device__ __forceinline__ void add_to_seat(const SwapIn& p, const Seat& at, i64* counters, u32 count) {
    if (count) atomicAdd(reinterpret_cast<u64*>(counters + static_cast<i64>(p.group) * p.state.seats + at.seat),
                         static_cast<u64>(count));
}

}  // namespace hisparse

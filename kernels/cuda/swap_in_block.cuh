// What the thread blocks of one swap_in share and pass around: sizes, shared memory, the seat, small helpers.
#pragma once

#include "planes.cuh"

namespace hisparse {

constexpr int CONTROL_THREADS = 384;
constexpr int COPY_THREADS = 384;
constexpr int BLOCK_THREADS = CONTROL_THREADS + COPY_THREADS;
constexpr int CONTROL_WARPS = CONTROL_THREADS / 32;
constexpr int FLIGHT = PLANES == 2 ? 5 : 8;  // lines in flight per group of copy lanes
constexpr int ENTRIES = (2048 + BLOCK_THREADS - 1) / BLOCK_THREADS;  // that one thread resolves together
constexpr int QUADS = 6;        // of four stamps, that one control thread holds
constexpr int SPECULATIVE = 4;  // from so many blocks per request on, host pages are looked up before a miss is known
constexpr int RANKS_MAX = 16;
constexpr u32 LISTED_MISSES = NEXT_SLOTS / 4;  // of a step that takes victims from the list, or lists anew
constexpr u32 STAGED = 1024;    // index pages of a request that shared memory has room for

constexpr int ENTRY_BITS = 12;
constexpr int HOME_TOKENS = 16;  // neighbouring tokens with one home
constexpr u32 NOT_SEEN = ~0u;
constexpr i32 MUST_STAY = 0x7FFFFFF0;  // stamp of slots that are no candidates
static_assert(TOPK_MAX <= 1 << ENTRY_BITS && CONTEXT_MAX_TOKENS <= 1 << (32 - ENTRY_BITS), "an entry is one word");
static_assert(CONTROL_WARPS <= 32 && RANKS_MAX <= 32, "one lane per warp, and per block of a cluster");

enum Barrier { CONTROL = 1 };

// Dynamic shared memory; the launcher lays the sections out (kernels/cuda/swap_in.py). `share`: the most entries that a
// block has. A missing entry is one word, token << 12 | place in the top-k.
struct Shared {
    u8* base;
    const Sections& at;

    template <class T> __device__ __forceinline__ T& in(u32 section, u32 i) const {
        return reinterpret_cast<T*>(base + section)[i];
    }
    // [share] of this block's misses: place of the token in slot_of, host page, slot to load it into
    __device__ __forceinline__ i32& key(u32 m) const { return in<i32>(0, m); }
    __device__ __forceinline__ i32& page(u32 m) const { return in<i32>(at.pages, m); }
    __device__ __forceinline__ u16& victim(u32 m) const { return in<u16>(at.victims, m); }
    __device__ __forceinline__ u16& order(u32 l) const { return in<u16>(at.order, l); }  // misses that lead, in turn
    __device__ __forceinline__ u32& seen(u32 i) const { return in<u32>(at.seen, i); }  // hash set of entries by token
    __device__ __forceinline__ i32& chunk(u32 i) const { return in<i32>(at.chunks, i); }
    __device__ __forceinline__ i32& index(u32 i) const { return in<i32>(at.index, i); }  // [STAGED] index pages
    // [NEXT_SLOTS] a list of slots that go next, and what it is sorted by
    __device__ __forceinline__ u32* sort_key() const { return &in<u32>(at.next, 0); }
    __device__ __forceinline__ u16* next_slot() const { return reinterpret_cast<u16*>(sort_key() + NEXT_SLOTS); }
    // bits of slots that are no victims: tail, beyond the limit; later also hits
    __device__ __forceinline__ u32& stay(u32 word) const { return in<u32>(at.stay, word); }
    // of each block: misses; bits of the slots that it hit
    __device__ __forceinline__ uint4* mail(int rank) const {
        return reinterpret_cast<uint4*>(base + at.mail + rank * at.mail_bytes);
    }
    __device__ __forceinline__ u32* hits(int rank) const { return reinterpret_cast<u32*>(mail(rank) + 1); }
    __device__ __forceinline__ u32* list(int rank) const {  // of each block: its misses
        return reinterpret_cast<u32*>(base + at.lists + rank * at.list_bytes);
    }
};

struct Scalars {
    u64 hits_mail;     // all peers' misses and hits are here
    u64 lists_mail;    // all peers' lists are here
    u64 readers_mail;  // all peers have read the list of slots that go next
    u64 scanned_mail;  // all peers that miss anything have read all stamps
    u64 chosen;        // the control warps know the victims
    uint2 sums[2][CONTROL_WARPS];
    i32 oldest[CONTROL_WARPS];
    u32 listed[CONTROL_WARPS];
    u32 leaders[RANKS_MAX];
    u32 misses, duplicates;
    i32 hot, now;
};

struct Seat {
    i32 seat, length, hot, now;
    u32 limit;  // slots, tail included
};

__device__ __forceinline__ u32 limit_of(const SwapIn& p, i32 hot) {
    return min(hot + p.state.tail_slots, p.slots_limit);
}

// Of one block's mail, in 16 bytes: its misses, and a bit per slot.
__device__ __forceinline__ u32 mail_vectors(const Seat& at) { return 1 + (static_cast<u32>(at.limit) + 127) / 128; }

// Row of a table of pages or chunks that belongs to a seat; tables have fewer than 2**32 entries.
struct TableRow {
    const i32* table;
    u32 begin, width;

    __device__ __forceinline__ TableRow(const i32* table, i32 width, i32 seat)
        : table(table), begin(static_cast<u32>(seat) * static_cast<u32>(width)), width(width) {}
    __device__ __forceinline__ i32 operator[](u32 place) const {  // -1 beyond the table
        i32 entry = -1;
        if (place < width) load_now(entry, table + (begin + place));
        return entry;
    }
};

// The block of a request that resolves place `place` of the top-k: warps of entries are dealt out in turn.
__device__ __forceinline__ u32 block_of(u32 place, u32 ranks) { return place / 32 & (ranks - 1); }

// The block of a resident request that resolves `token`, and with it every duplicate of it.
__device__ __forceinline__ u32 home_of(u32 token, u32 ranks) {
    return __umulhi(token / HOME_TOKENS * 2654435761u, ranks);
}

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

// The next number of a counter in shared memory. Few threads of a warp ask: combining their requests would take longer.
__device__ __forceinline__ u32 take(u32* counter) {
    u32 number;
    asm volatile("atom.shared::cta.add.u32 %0, [%1], 1;" : "=r"(number) : "r"(shared_address(counter)) : "memory");
    return number;
}

__device__ __forceinline__ void add_to_seat(const SwapIn& p, const Seat& at, i64* counters, u32 count) {
    if (count) atomicAdd(reinterpret_cast<u64*>(counters + at.seat), static_cast<u64>(count));
}

}  // namespace hisparse

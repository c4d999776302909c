// Sizes, shared memory, parts of a top-k and seats: what all sources of swap_in use.
#pragma once

#include "planes.cuh"

namespace hisparse {

constexpr int CONTROL_THREADS = 384;
constexpr int COPY_THREADS = 384;
constexpr int BLOCK_THREADS = CONTROL_THREADS + COPY_THREADS;
constexpr int CONTROL_WARPS = CONTROL_THREADS / 32;
constexpr int BLOCK_WARPS = BLOCK_THREADS / 32;
constexpr int FLIGHT = PLANES == 2 ? 5 : 8;  // lines in flight per group of copy lanes
constexpr int ENTRIES_MAX = (TOPK_MAX / RANKS + BLOCK_THREADS - 1) / BLOCK_THREADS;  // of a thread
constexpr int ENTRIES = ENTRIES_MAX < 3 ? ENTRIES_MAX : 3;                           // that it resolves together
constexpr int QUADS = 6;        // of four stamps, that one control thread holds
constexpr int SPECULATIVE = 4;  // from so many blocks per request on, host pages are looked up before a miss is known
constexpr int SCATTERED = 4;    // from so many on, each thread stamps its own hits: few of a block are neighbours; some
                                // warps have no entries: they read the eviction queue ahead, or begin to copy at once
constexpr int QUEUE_FIRST = 8;  // from so many on, warps without entries read the eviction queue before all else
constexpr int RANKS_MAX = 16;
static_assert(RANKS >= 1 && RANKS <= RANKS_MAX, "blocks of a request: a compile-time constant");
constexpr u32 STAGED_SLOTS = 18432;  // whose ages fit shared memory where the top-k is no longer needed
constexpr u32 BLOCK_QUADS = (SLOTS_MAX / 4 + BLOCK_THREADS - 1) / BLOCK_THREADS;  // of four slots, to a thread of a block
constexpr u32 SEEN = TOPK_MAX;
constexpr u32 SLOT_WORDS = (SLOTS_MAX + 127) / 128 * 4;
constexpr u32 VECTOR_CODES = sizeof(uint4) / sizeof(u16);

constexpr int ENTRY_BITS = 12;
constexpr u32 NOT_SEEN = ~0u;
constexpr i32 MUST_STAY = 0x7FFFFFF0;  // stamp of slots that are no candidates
static_assert(TOPK_MAX <= 1 << ENTRY_BITS && CONTEXT_MAX_TOKENS <= 1 << (32 - ENTRY_BITS), "an entry is one word");
static_assert(CONTROL_WARPS <= 32 && RANKS_MAX <= 32, "one lane per warp, and per block of a cluster");
static_assert(TOPK_MAX / 32 <= 32 * 4, "four warps of entries to a lane");

// Code of an entry: the slot that it hit, or one of these.
constexpr u32 MISSING = 0xFFFF;
constexpr u32 NOTHING = 0xFFFE;  // neither hit nor missing, or no entry at all
static_assert(SLOTS_MAX <= NOTHING, "a slot number is a code");

enum Barrier { ALL = 0, CONTROL = 1, COPY = 2 };  // named barriers: warps that meet there

// A block's part of a top-k. Entries go to the blocks of a request in warps of 32, in turn. Their codes lie block by block,
// `entries` of each, a power of two.
struct Part {
    static constexpr u32 ranks = RANKS;
    u32 rank, entries;

    // In the top-k: entry `local` of this block; the one whose code is at `position`.
    __device__ __forceinline__ u32 place(u32 local) const { return (local / 32 * ranks + rank) * 32 + local % 32; }
    __device__ __forceinline__ u32 place_at(u32 position) const {
        return Part{rank_at(position), entries}.place(position & (entries - 1));
    }
    __device__ __forceinline__ u32 rank_at(u32 position) const { return position >> (31 - __clz(entries)); }
    __device__ __forceinline__ u32 positions() const { return ranks * entries; }
};

// A miss of this block, numbered as it was found.
struct Miss {
    u32 host_row;       // host page * PAGE_TOKENS + offset
    u16 victim, place;  // slot to load it into; place in the top-k
};

// A block's shared memory. Sizes are those of the largest case, so that an address is one instruction. A missing entry is
// one word elsewhere, token << 12 | place in the top-k.
struct alignas(16) Shared {
    u64 codes_arrived;  // gates: the table in swap_in.cuh
    u64 readers_done;
    u64 scans_done;
    u64 found;
    u64 prepared;
    u64 entered;
    u64 chosen;
    uint2 sums[2][BLOCK_WARPS];
    i32 oldest[CONTROL_WARPS];
    u32 warp_counts[BLOCK_WARPS];
    u32 leaders[RANKS_MAX];  // where there are duplicates
    u32 misses, duplicates;
    u32 taken;  // places of the eviction queue that are done with
    u64 last;   // slot added to the reserve: stamp + 2 << 32 | slot
    alignas(16) EvictionQueue queue;

    // Of all blocks, by rank: a code per entry; per warp of entries its misses, and its hits in the upper half. Peers write
    // their own.
    alignas(16) u32 count[TOPK_MAX / 32];
    alignas(16) u16 code[TOPK_MAX];

    alignas(16) u32 stay[SLOT_WORDS];  // bits of slots that are no victims: tail, beyond the limit; later also hits
    i32 chunk[OPENED_CHUNKS];
    union {
        struct {
            alignas(16) i32 token[TOPK_MAX];  // the top-k
            alignas(16) u32 seen[SEEN];       // hash set of entries by token
            i32 index[OPENED_PAGES];          // index pages
            alignas(16) u32 hit[SLOT_WORDS];  // bits of slots that this block hit
            i32 old[QUEUE_SLOTS];             // tokens that the victims of leaders held
            Miss miss[TOPK_MAX];
            u16 order[TOPK_MAX];  // misses that lead
        };
        uint2 ages[BLOCK_QUADS * BLOCK_THREADS];  // of slots: in a refill block, or when the first three are done with
    };
};
static_assert(sizeof(Shared) == SWAP_IN_SHARED_BYTES, "as the launcher has it");
static_assert((TOPK_MAX + SEEN + OPENED_PAGES) * sizeof(u32) >= STAGED_SLOTS * sizeof(u16), "while rows are copied");

struct Seat {
    i32 seat, length, hot, now;  // as begin_step left them
    u32 limit;  // slots, tail included
};

__device__ __forceinline__ u32 limit_of(const SwapIn& p, i32 hot) {
    return min(hot + p.state.tail_slots, p.slots_limit);
}

// The seat of a batch row, from the head of its OpenedRow.
__device__ __forceinline__ Seat seat_of(const SwapIn& p, const int4& head) {
    return {head.x, head.y, head.z, head.w, limit_of(p, head.z)};
}

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

// Where slot_of has a token of an index page; -1 without one.
__device__ __forceinline__ i32 key_in(i32 page, u32 token) {
    return page < 0 ? -1 : page * PAGE_TOKENS + static_cast<i32>(token % PAGE_TOKENS);
}
__device__ __forceinline__ i32 key_of(const SwapIn& p, const Seat& at, const Shared& s, u32 token) {
    const u32 held = token / PAGE_TOKENS;
    const i32 page = held < OPENED_PAGES ? s.index[held] : TableRow(p.state.index_table, p.state.max_pages, at.seat)[held];
    return key_in(page, token);
}

__device__ __forceinline__ i32 slot_row(const Shared& s, u32 slot) {
    const i32 chunk = s.chunk[slot / PAGE_TOKENS];
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

__device__ __forceinline__ void add_to_seat(const SwapIn& p, const Seat& at, i64* counters, u32 count) {
    if (count) atomicAdd(reinterpret_cast<u64*>(counters + at.seat), static_cast<u64>(count));
}

}  // namespace hisparse

// What the thread blocks of one swap_in share and pass around: sizes, shared memory, the seat, small helpers.
#pragma once

#include "planes.cuh"

namespace hisparse {

constexpr int CONTROL_THREADS = 256;
// Two blocks on a multiprocessor, without spills. A launcher reads the block size from the kernel's launch bound.
#if __CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1000
constexpr int COPY_THREADS = 128;
constexpr int FLIGHT = 8;  // lines in flight per group of copy lanes
#else
constexpr int COPY_THREADS = 256;
constexpr int FLIGHT = PLANES == 2 ? 6 : 7;
#endif
constexpr int BLOCK_THREADS = CONTROL_THREADS + COPY_THREADS;
constexpr int CONTROL_WARPS = CONTROL_THREADS / 32;
constexpr int STAMP_QUADS = 5;   // of four stamps, that one control thread loads together: 4096 slots and the tail
constexpr int ENTRIES = 4;       // top-k entries that one control thread resolves together
constexpr int AGE_BINS = 2048;
constexpr int BINS_PER_THREAD = AGE_BINS / CONTROL_THREADS;
constexpr int OLD = AGE_BINS - 1;  // the bin of all ages from here on
constexpr int OLD_SHIFT = 10;      // refined by age >> 10, then by age & 1023
constexpr int AGE_MAX = (AGE_BINS << OLD_SHIFT) - 1;
static_assert(CONTEXT_MAX_TOKENS < AGE_MAX, "every age has a bin");

enum Barrier { TABLES = 1, RECORDS = 2, CONTROL = 3, VICTIMS_KNOWN = 4, COPY = 5 };

// Dynamic shared memory, in order; all sections start at multiples of 16 bytes. The resident path uses it as a hash set.
struct Shared {
    u16* results;        // [N * span]
    u32* histogram;      // [AGE_BINS]
    i32* record_page;    // [span] host page of each miss of this block
    i32* record_token;   // [span]
    i32* record_key;     // [span] its place in slot_of
    u16* record_entry;   // [span] its place in the top-k
    u16* record_slot;    // [span] victim; CLAIMED: none (yet); ABSENT: another block loads it
    u16* winner_record;  // [span] records that this block loads, densely
    i32* chunks;         // [slots_limit / 64] chunk table
    u8* used;            // [slots_limit] 1: hit in this step, 2: tail
    u16* codes;          // [slots_limit] age + 1, at most AGE_BINS; 0: must stay

    __device__ Shared(u8* base, int span, int ranks, int slots_limit) {
        results = reinterpret_cast<u16*>(base);
        histogram = reinterpret_cast<u32*>(results + ranks * span);
        record_page = reinterpret_cast<i32*>(histogram + AGE_BINS);
        record_token = record_page + span;
        record_key = record_token + span;
        record_entry = reinterpret_cast<u16*>(record_key + span);
        record_slot = record_entry + span;
        winner_record = record_slot + span;
        chunks = reinterpret_cast<i32*>(winner_record + span);
        used = reinterpret_cast<u8*>(chunks + (slots_limit / PAGE_TOKENS + 3) / 4 * 4);
        codes = reinterpret_cast<u16*>(used + slots_limit);
    }
};

struct Scalars {
    u64 results_mail;  // all peers' results are here
    u64 readers_mail;  // all peers have read the stamps
    u32 records, winners;
    u32 counts;    // misses of earlier blocks << 16 | misses of all
    u32 distinct;  // distinct hits
    i32 cut, above;
    u32 warp_sums[CONTROL_WARPS];
};

struct Seat {
    i32 seat, length, hot, now, limit;  // limit: slots, tail included
};

struct Entry {
    i32 token, key, page;  // key: index page at first, then the place in slot_of; -1 without an index page
    u32 slot;
};

__device__ __forceinline__ i32 table_entry(const i32* table, i32 width, i32 seat, i32 place) {
    i32 entry = -1;
    if (place < width) load_now(entry, table + static_cast<i64>(seat) * width + place);
    return entry;
}

__device__ __forceinline__ bool is_inside(const Seat& at, i32 token) { return 0 <= token && token < at.length; }

__device__ __forceinline__ void read_pages(const SwapIn& p, const Seat& at, Entry (&entry)[ENTRIES]) {
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        const i32 place = is_inside(at, entry[j].token) ? entry[j].token / PAGE_TOKENS : p.state.max_pages;
        entry[j].key = table_entry(p.state.index_table, p.state.max_pages, at.seat, place);
        entry[j].page = table_entry(p.state.host_table, p.state.max_pages, at.seat, place);
    }
}

__device__ __forceinline__ void read_tokens(const SwapIn& p, int row, int begin, int last, Entry (&entry)[ENTRIES]) {
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        const int e = begin + j * CONTROL_THREADS + threadIdx.x;
        entry[j].token = e < last ? p.topk[static_cast<i64>(row) * p.k + e] : -1;
    }
}

// True for a row that decodes in this step; otherwise it is padding. The pages of `early` are asked for together with the
// seat's mode: one round trip less before slot_of.
__device__ __forceinline__ bool find_seat(const SwapIn& p, int row, Seat& at, Entry (&early)[ENTRIES]) {
    const i32 real = *p.batch.num_real;
    const i64 seat = read_id(p.batch.seats, row, p.batch.wide_seats);
    const i64 length = read_id(p.batch.lengths, row, p.batch.wide_lengths);
    at.seat = static_cast<i32>(seat);
    at.length = static_cast<i32>(min(length, static_cast<i64>(0x7FFFFFFF)));
    if (row >= real || seat < 0 || seat >= p.state.seats || length < 1) return false;
    load_now(at.hot, p.state.hot_slots + seat);
    load_now(at.now, p.state.now + seat);
    if (threadIdx.x < CONTROL_THREADS) read_pages(p, at, early);
    at.limit = at.hot + p.state.tail_slots;
    return at.hot >= 0;
}

__device__ __forceinline__ i32 slot_row(const i32* chunks, u32 slot) {
    const i32 chunk = chunks[slot / PAGE_TOKENS];
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

// Place of this lane among those of its warp (all converged) that `want` one, from a counter in shared memory.
__device__ __forceinline__ u32 take_place(bool want, u32* counter) {
    const u32 wanting = __ballot_sync(0xFFFFFFFF, want);
    if (wanting == 0) return 0;
    const int lane = threadIdx.x % 32;
    u32 base = 0;
    if (lane == 0) base = atomicAdd(counter, __popc(wanting));
    return __shfl_sync(0xFFFFFFFF, base, 0) + __popc(wanting & ((1u << lane) - 1));
}

}  // namespace hisparse

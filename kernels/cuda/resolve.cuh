// The first half of a swap_in, by all warps of a block: where the tokens of its entries are, and which must be loaded.
// Padding and resident requests end here.
//
// Every load that something later depends on is written where it can be issued early, and its value is used where it is
// needed at last: a use moved forward by the compiler, or a scoreboard shared with a slower load, costs a round trip.
#pragma once

#include "swap_in_block.cuh"

namespace hisparse {

struct Entry {
    i32 token, key, page;  // key: index page at first, then the place in slot_of; -1 without an index page
    u32 slot;
};

// Warps of entries are dealt out to blocks and warps in turn: those of a warp are neighbours in the top-k.
__device__ __forceinline__ int first_place(u32 rank, u32 ranks) {
    return (threadIdx.x / 32 * ranks + rank) * 32 + threadIdx.x % 32;
}
__device__ __forceinline__ bool none_in_warp(const SwapIn& p, int place) { return (place & ~31) >= p.k; }

// Entries of a thread from `place` on, `step` apart.
__device__ __forceinline__ void read_tokens(const SwapIn& p, int row, int place, int step, Entry (&entry)[ENTRIES]) {
    const u32 begin = static_cast<u32>(row) * static_cast<u32>(p.k);
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        entry[j] = {-1, -1, -1, SLOT_ABSENT};
        if (place + j * step < p.k) load_now(entry[j].token, p.topk + (begin + static_cast<u32>(place + j * step)));
    }
}

__device__ __forceinline__ void read_pages(const SwapIn& p, const Seat& at, u32 ranks, int place, int step,
                                           Entry (&entry)[ENTRIES]) {
    const u32 begin = static_cast<u32>(at.seat) * static_cast<u32>(p.state.max_pages);
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        if (none_in_warp(p, place + j * step)) break;
        const u32 token = entry[j].token, page = token / PAGE_TOKENS;
        if (token >= static_cast<u32>(at.length) || page >= static_cast<u32>(p.state.max_pages)) continue;
        if (ranks >= SPECULATIVE) load_now(entry[j].page, p.state.host_table + (begin + page));
        if (page >= STAGED) load_now(entry[j].key, p.state.index_table + (begin + page));
    }
}

// Slots of the entries whose pages are known.
__device__ __forceinline__ void read_slots(const SwapIn& p, const Seat& at, const Shared& s, int place, int step,
                                           Entry (&entry)[ENTRIES]) {
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        if (none_in_warp(p, place + j * step)) break;
        const u32 token = entry[j].token;
        if (token >= static_cast<u32>(at.length)) continue;
        if (token / PAGE_TOKENS < STAGED) entry[j].key = s.index(token / PAGE_TOKENS);
        if (entry[j].key < 0) continue;
        entry[j].key = entry[j].key * PAGE_TOKENS + (token & (PAGE_TOKENS - 1));
        entry[j].slot = p.state.slot_of[entry[j].key];
    }
}

// What a seat's tables say, asked for by the threads that put it into shared memory: places of the chunk table and of the
// index table's beginning, where lookups from all over would take a line each; in the last warp but one, the tail.
struct Tables {
    static constexpr int INDEXES = (STAGED + BLOCK_THREADS - 1) / BLOCK_THREADS;
    i32 hot, now, chunk, tail, index[INDEXES];

    __device__ __forceinline__ static u32 tail_place() { return BLOCK_THREADS - 33 - threadIdx.x; }

    __device__ __forceinline__ void load(const SwapIn& p, i32 seat) {
        load_now(hot, p.state.hot_slots + static_cast<u32>(seat));
        load_now(now, p.state.now + static_cast<u32>(seat));
        const u32 staged = min(static_cast<u32>(p.state.max_pages), STAGED);
        const i32* const indexes =
            p.state.index_table + (static_cast<u32>(seat) * static_cast<u32>(p.state.max_pages) + threadIdx.x);
#pragma unroll
        for (int j = 0; j < INDEXES; ++j) {
            index[j] = -1;
            if (threadIdx.x + j * BLOCK_THREADS < staged) load_now(index[j], indexes + j * BLOCK_THREADS);
        }
        const TableRow chunks(p.state.chunk_table, p.state.max_chunks, seat);
        chunk = tail = -1;
        if (threadIdx.x < p.slots_limit / PAGE_TOKENS) chunk = chunks[threadIdx.x];
        if (tail_place() < p.state.tail_slots)
            load_now(tail, p.state.tail + (static_cast<u32>(seat) * static_cast<u32>(p.state.tail_slots) + tail_place()));
    }

    __device__ __forceinline__ void store(const SwapIn& p, i32 seat, const Shared& s, Scalars& q) const {
        const u32 chunks = p.slots_limit / PAGE_TOKENS, more = threadIdx.x + BLOCK_THREADS;
#pragma unroll
        for (int j = 0; j < INDEXES; ++j)
            if (threadIdx.x + j * BLOCK_THREADS < STAGED) s.index(threadIdx.x + j * BLOCK_THREADS) = index[j];
        if (threadIdx.x < chunks) s.chunk(threadIdx.x) = chunk;
        if (more < chunks) s.chunk(more) = TableRow(p.state.chunk_table, p.state.max_chunks, seat)[more];
        if (threadIdx.x == 0) {
            q.hot = hot;
            q.now = now;
        }
    }

    // The slots that are no victims to begin with; a barrier after `store`, which shares the words with nobody else.
    __device__ __forceinline__ void keep_tail(const SwapIn& p, const Seat& at, const Shared& s) const {
        const u32 place = tail_place();
        if (place < p.state.tail_slots) {
            const u32 slot = tail < 0 ? at.hot + place : tail;
            atomicOr(&s.stay(slot / 32), 1u << slot % 32);
        }
        if (place == TAIL_SLOTS_MAX && at.limit % 32 > 0) atomicOr(&s.stay(at.limit / 32), ~0u << at.limit % 32);
    }
};
static_assert(TAIL_SLOTS_MAX < 32 && SLOTS_MAX / PAGE_TOKENS <= 2 * BLOCK_THREADS, "two entries per thread");

// ---- padding and resident requests

__device__ void write_padding(const SwapIn& p, int row, int rank, int ranks) {
    if (rank == 0 && threadIdx.x == 0) p.plan.count[row] = 0;
#pragma unroll 1
    for (int e = rank * BLOCK_THREADS + threadIdx.x; e < p.k; e += ranks * BLOCK_THREADS)
        p.out_rows[static_cast<i64>(row) * p.k + e] = -1;
}

// Whether `token` comes here for the first time, to a block that sees all its duplicates.
__device__ __forceinline__ bool first_of_token(const SwapIn& p, const Shared& s, u32 token) {
    for (u32 place = token * 2654435761u >> 7;; ++place) {
        const u32 there = atomicCAS(&s.seen(place & p.seen_mask), NOT_SEEN, token);
        if (there == NOT_SEEN || there == token) return there != token;
    }
}

__device__ void resolve_resident(const SwapIn& p, const Seat& at, const Shared& s, int row, u32 rank, u32 ranks) {
    if (rank == 0 && threadIdx.x == 0) p.plan.count[row] = 0;
    const TableRow chunks(p.state.chunk_table, p.state.max_chunks, at.seat);
    u32 distinct = 0;
    int ungranted = 0, foreign = 0;
#pragma unroll 1
    for (int e = threadIdx.x; e < p.k; e += BLOCK_THREADS) {
        const i64 place = static_cast<i64>(row) * p.k + e;
        const u32 token = p.topk[place];
        const bool inside = token < static_cast<u32>(at.length);
        if ((inside ? home_of(token, ranks) : block_of(e, ranks)) != rank) continue;
        const i32 chunk = inside ? chunks[token / PAGE_TOKENS] : -1;
        p.out_rows[place] = chunk < 0 ? -1 : chunk * PAGE_TOKENS + static_cast<i32>(token % PAGE_TOKENS);
        foreign += !inside && token != ~0u;
        ungranted += inside && chunk < 0;
        if (chunk >= 0) distinct += first_of_token(p, s, token);
    }
    trip(p.state, POSITION, foreign);
    trip(p.state, UNGRANTED, ungranted);
    distinct = __reduce_add_sync(0xFFFFFFFF, distinct);
    if (threadIdx.x % 32 == 0) add_to_seat(p, at, p.state.hits, distinct);
}

// ---- managed requests

// Lists a missing entry; false when its host page is not granted. The page is known when it has been looked up already.
__device__ __forceinline__ bool list_missing(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, u32 rank,
                                             u32 ranks, u32 place, const Entry& entry) {
    const u32 token = entry.token;
    i32 page = entry.page;
    if (ranks < SPECULATIVE) page = TableRow(p.state.host_table, p.state.max_pages, at.seat)[token / PAGE_TOKENS];
    if (page < 0) return false;
    const u32 m = take(&q.misses);
    s.list(rank)[m] = token << ENTRY_BITS | place;
    s.key(m) = entry.key;
    s.page(m) = page;
    s.victim(m) = static_cast<u16>(SLOT_ABSENT);
    s.order(m) = static_cast<u16>(m);
    return true;
}

// Outputs of hits, their bits in this block's mail; the list of misses. `entry` comes with the first slots.
__device__ __forceinline__ void resolve_managed(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row,
                                                u32 rank, u32 ranks, Entry (&entry)[ENTRIES]) {
    const u32 begin = static_cast<u32>(row) * static_cast<u32>(p.k);
    const int step = BLOCK_THREADS * ranks;
#pragma unroll 1
    for (int first = first_place(rank, ranks); !none_in_warp(p, first); first += ENTRIES * step) {
        if (first >= ENTRIES * step) {
            read_tokens(p, row, first, step, entry);
            read_pages(p, at, ranks, first, step, entry);
            read_slots(p, at, s, first, step, entry);
        }
        int ungranted = 0, foreign = 0;
#pragma unroll
        for (int j = 0; j < ENTRIES; ++j) {
            const u32 slot = entry[j].slot;
            const int place = first + j * step;
            if (none_in_warp(p, place)) break;
            if (place >= p.k) continue;
            const bool inside = static_cast<u32>(entry[j].token) < static_cast<u32>(at.length);
            if (entry[j].key >= 0 && slot == SLOT_ABSENT && list_missing(p, at, s, q, rank, ranks, place, entry[j]))
                continue;
            const i32 found = slot < at.limit ? slot_row(s, slot) : -1;
            p.out_rows[begin + static_cast<u32>(place)] = found;
            if (found >= 0) atomicOr(s.hits(rank) + slot / 32, 1u << slot % 32);
            ungranted += inside && found < 0;
            foreign += !inside && entry[j].token != -1;
        }
        trip(p.state, UNGRANTED, ungranted);
        trip(p.state, POSITION, foreign);
    }
}

}  // namespace hisparse

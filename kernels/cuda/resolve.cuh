// The first half of a swap_in, by all warps of a block: which entries of the top-k are its own, where their tokens are,
// and which of them must be loaded. Padding and resident requests end here.
//
// Every load that something later depends on is written where it can be issued early, and its value is used where it is
// needed at last: a use moved forward by the compiler, or a scoreboard shared with a slower load, costs a round trip.
#pragma once

#include "swap_in_block.cuh"

namespace hisparse {

// ---- all requests: which entries are this block's

__device__ __forceinline__ void read_tokens(const SwapIn& p, int row, int begin, i32 (&token)[TOKENS]) {
    const int place = begin + static_cast<int>(threadIdx.x) * TOKENS;
    const i32* const from = p.topk + static_cast<i64>(row) * p.k + place;
#pragma unroll
    for (int j = 0; j < TOKENS; ++j) token[j] = -1;
    if (p.wide_topk) {
        if (place < p.k) load_now(token, from);
    } else {
#pragma unroll
        for (int j = 0; j < TOKENS; ++j)
            if (place + j < p.k) load_now(token[j], from + j);
    }
}

// Outputs of places that name no token of the context.
__device__ __forceinline__ void refuse(const SwapIn& p, const Seat& at, Scalars& q, int row, int begin,
                                       const i32 (&token)[TOKENS]) {
    const int place = begin + static_cast<int>(threadIdx.x) * TOKENS;
    int foreign = 0;
#pragma unroll
    for (int j = 0; j < TOKENS; ++j) {
        if (place + j >= p.k || static_cast<u32>(token[j]) < static_cast<u32>(at.length)) continue;
        p.out_rows[static_cast<i64>(row) * p.k + place + j] = -1;
        foreign += token[j] != -1;
    }
    if (foreign > 0) atomicAdd(&q.foreign, foreign);
}

// Lists the entries whose home is this block. Outsiders are shared out by warps.
__device__ __forceinline__ void collect(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row, u32 rank,
                                        u32 ranks, i32 (&token)[TOKENS]) {
#pragma unroll 1
    for (int begin = 0; begin < p.k; begin += TOKENS * BLOCK_THREADS) {
        if (begin > 0) read_tokens(p, row, begin, token);
        u32 mine[TOKENS], total = 0;
        bool outside = false;
#pragma unroll
        for (int j = 0; j < TOKENS; ++j) {
            const bool inside = static_cast<u32>(token[j]) < static_cast<u32>(at.length);
            outside |= !inside;
            mine[j] = __ballot_sync(0xFFFFFFFF, inside && home_of(token[j], ranks) == rank);
            total += __popc(mine[j]);
        }
        if (__any_sync(0xFFFFFFFF, outside) && (threadIdx.x / 32 & (ranks - 1)) == rank)
            refuse(p, at, q, row, begin, token);
        if (total == 0) continue;
        u32 base = 0;
        if (threadIdx.x % 32 == 0) base = atomicAdd(&q.entries, total);
        base = __shfl_sync(0xFFFFFFFF, base, 0);
#pragma unroll
        for (int j = 0; j < TOKENS; ++j) {
            if (mine[j] >> threadIdx.x % 32 & 1)
                s.entry(base + __popc(mine[j] & lanes_below())) =
                    static_cast<u32>(token[j]) << ENTRY_BITS | (begin + threadIdx.x * TOKENS + j);
            base += __popc(mine[j]);
        }
    }
}

// The first entry of this block with the token of entry i that came here: i itself, or the one it duplicates.
__device__ __forceinline__ u32 first_with_token(const SwapIn& p, const Shared& s, u32 i) {
    const u32 token = s.token(i);
    for (u32 place = token * 2654435761u >> 7;; ++place) {
        const u32 there = atomicCAS(&s.seen(place & p.seen_mask), NOT_SEEN, i);
        if (there == NOT_SEEN) return i;
        if (s.token(there) == token) return there;
    }
}

// ---- padding and resident requests

__device__ void write_padding(const SwapIn& p, int row, int rank, int ranks) {
    if (rank == 0 && threadIdx.x == 0) p.plan.count[row] = 0;
#pragma unroll 1
    for (int e = rank * BLOCK_THREADS + threadIdx.x; e < p.k; e += ranks * BLOCK_THREADS)
        p.out_rows[static_cast<i64>(row) * p.k + e] = -1;
}

__device__ void resolve_resident(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row, int rank) {
    if (rank == 0 && threadIdx.x == 0) p.plan.count[row] = 0;
    u32 distinct = 0;
    int ungranted = 0;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < q.entries; i += BLOCK_THREADS) {
        const u32 token = s.token(i);
        const i32 chunk = table_entry(p.state.chunk_table, p.state.max_chunks, at.seat, token / PAGE_TOKENS);
        p.out_rows[static_cast<i64>(row) * p.k + s.place(i)] =
            chunk < 0 ? -1 : chunk * PAGE_TOKENS + static_cast<i32>(token % PAGE_TOKENS);
        if (chunk < 0) ++ungranted;
        else distinct += first_with_token(p, s, i) == i;
    }
    trip(p.state, UNGRANTED, ungranted);
    distinct = __reduce_add_sync(0xFFFFFFFF, distinct);
    if (threadIdx.x % 32 == 0) add_to_seat(p, at, p.state.hits, distinct);
}

// ---- managed requests: all warps

struct Entry {
    i32 key, page;  // key: index page at first, then the place in slot_of; -1 without an index page
    u32 slot;
};

// Entry j of this thread; those of a warp are neighbours, and a warp without any has nothing to do.
__device__ __forceinline__ u32 entry_of(int begin, int j) { return begin + j * BLOCK_THREADS + threadIdx.x; }
__device__ __forceinline__ bool none_in_warp(u32 i, u32 entries) { return (i & ~31u) >= entries; }

__device__ __forceinline__ void read_pages(const SwapIn& p, const Seat& at, const Shared& s, int begin, u32 ranks,
                                           Entry (&entry)[ENTRIES], u32 entries) {
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) entry[j] = {-1, -1, SLOT_ABSENT};
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        const u32 i = entry_of(begin, j);
        if (none_in_warp(i, entries)) break;
        if (i >= entries) continue;
        const u32 place = s.token(i) / PAGE_TOKENS;
        entry[j].key = table_entry(p.state.index_table, p.state.max_pages, at.seat, place);
        if (ranks >= SPECULATIVE) entry[j].page = table_entry(p.state.host_table, p.state.max_pages, at.seat, place);
    }
}

// What a seat's tables say, asked for by the threads that put it into shared memory: place threadIdx.x of the chunk
// table; from the last thread down, places of the tail.
struct Tables {
    i32 hot, now, chunk, tail;

    __device__ __forceinline__ static u32 tail_place() { return BLOCK_THREADS - 1 - threadIdx.x; }

    __device__ __forceinline__ void load(const SwapIn& p, i32 seat) {
        load_now(hot, p.state.hot_slots + seat);
        load_now(now, p.state.now + seat);
        chunk = tail = -1;
        if (threadIdx.x < p.slots_limit / PAGE_TOKENS)
            chunk = table_entry(p.state.chunk_table, p.state.max_chunks, seat, threadIdx.x);
        if (tail_place() < p.state.tail_slots)
            load_now(tail, p.state.tail + static_cast<i64>(seat) * p.state.tail_slots + tail_place());
    }

    __device__ __forceinline__ void store(const SwapIn& p, i32 seat, const Shared& s, Scalars& q) const {
        const u32 chunks = p.slots_limit / PAGE_TOKENS, more = threadIdx.x + BLOCK_THREADS, place = tail_place();
        if (threadIdx.x < chunks) s.chunk(threadIdx.x) = chunk;
        if (more < chunks) s.chunk(more) = table_entry(p.state.chunk_table, p.state.max_chunks, seat, more);
        if (threadIdx.x == 0) {
            q.hot = hot;
            q.now = now;
        }
        if (hot <= 0) return;
        if (place < p.state.tail_slots) {
            const u32 slot = tail < 0 ? hot + place : tail;
            atomicOr(&s.stay(slot / 32), 1u << slot % 32);
        }
        const u32 limit = limit_of(p, hot);
        if (place == 16 && limit % 32 > 0) atomicOr(&s.stay(limit / 32), ~0u << limit % 32);
    }
};
static_assert(TAIL_SLOTS_MAX <= 16 && SLOTS_MAX / PAGE_TOKENS <= 2 * BLOCK_THREADS, "two entries per thread");

// Of the warp's missing entries, bit j of `missing` for entry j of a thread, lists those to load and their followers.
// `key` and `page` of the entries are set, the latter only when it has been looked up.
__device__ __forceinline__ void list_missing(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row,
                                             u32 ranks, int begin, u32 missing) {
    int ungranted = 0;
#pragma unroll 1
    for (int j = 0; __any_sync(0xFFFFFFFF, missing >> j); ++j) {
        const u32 i = entry_of(begin, j);
        bool wanted = missing >> j & 1;
        if (wanted && ranks < SPECULATIVE)
            s.page(i) = table_entry(p.state.host_table, p.state.max_pages, at.seat, s.token(i) / PAGE_TOKENS);
        if (wanted && s.page(i) < 0) {
            p.out_rows[static_cast<i64>(row) * p.k + s.place(i)] = -1;
            ++ungranted;
            wanted = false;
        }
        const u32 leader = wanted ? first_with_token(p, s, i) : i;
        const u32 place = take_place(wanted && leader == i, &q.misses);
        const u32 behind = take_place(leader != i, &q.followers);
        if (!wanted) continue;
        if (leader == i) s.victim(place) = static_cast<u16>(SLOT_ABSENT);
        s.missing(leader == i ? place : p.sections.last - behind) = static_cast<u16>(i);
        if (leader != i) s.key(i) = static_cast<i32>(leader);
    }
    trip(p.state, UNGRANTED, ungranted);
}

// Slots of the entries whose pages are known.
__device__ __forceinline__ void read_slots(const SwapIn& p, const Shared& s, int begin, Entry (&entry)[ENTRIES],
                                           u32 entries) {
    const u16* const slot_of = p.state.slot_of;
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        const u32 i = entry_of(begin, j);
        if (none_in_warp(i, entries)) break;
        if (entry[j].key < 0) continue;
        entry[j].key = entry[j].key * PAGE_TOKENS + static_cast<i32>(s.token(i) % PAGE_TOKENS);
        entry[j].slot = slot_of[entry[j].key];
    }
}

// Outputs and stamps of hits, their bits in this block's mail; entries to load. `entry` comes with the first slots.
__device__ __forceinline__ void resolve_managed(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row,
                                                int rank, int ranks, Entry (&entry)[ENTRIES], u32 entries) {
    i32* const stamp = p.state.stamp;
    i32* const out = p.out_rows + static_cast<i64>(row) * p.k;
#pragma unroll 1
    for (u32 begin = 0; begin < entries; begin += ENTRIES * BLOCK_THREADS) {
        if (begin > 0) {
            read_pages(p, at, s, begin, ranks, entry, entries);
            read_slots(p, s, begin, entry, entries);
        }
        u32 missing = 0;
        int ungranted = 0;
#pragma unroll
        for (int j = 0; j < ENTRIES; ++j) {
            const u32 i = entry_of(begin, j), slot = entry[j].slot;
            if (none_in_warp(i, entries)) break;
            if (i >= entries) continue;
            if (entry[j].key >= 0 && slot == SLOT_ABSENT) {
                s.key(i) = entry[j].key;
                s.page(i) = entry[j].page;
                missing |= 1u << j;
                continue;
            }
            const i32 found = slot < at.limit ? slot_row(s, slot) : -1;
            out[s.place(i)] = found;
            if (found < 0) {
                ++ungranted;
                continue;
            }
            stamp[found] = at.now;
            atomicOr(s.hits(rank) + slot / 32, 1u << slot % 32);
        }
        if (__any_sync(0xFFFFFFFF, missing)) list_missing(p, at, s, q, row, ranks, begin, missing);
        trip(p.state, UNGRANTED, ungranted);
    }
}

}  // namespace hisparse

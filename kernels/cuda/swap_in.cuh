// swap_in: resolve a group's top-k to device rows, loading what is not hot. Contract: kernels/swap_in.py.
//
// N blocks of one request form a cluster (N = 1 where there are none). Every token has a home block, a hash of it, which
// resolves it and loads it when it is missing: duplicates meet in one block, and blocks agree on victims without knowing
// each other's tokens. Of the copies, warps 0-7 of a block decide (control) and warps 8-15 move rows: a host load takes
// 1.5 us, so it starts as soon as a miss is seen, its victim not known yet, and waits in the registers of warps that have
// nothing else to wait for.
//
//    all       seat, length, whole top-k          -> entries of this block
//              pages of the entries, mode, chunk table, tail; slot_of
//              hit: output, stamp, bit; miss: hash set of missing tokens
//    copy      start host loads                    control   misses and hit bits to every block of the cluster (st.async)
//                                                            cut, victims in slot order (victims.cuh)
//              store rows, loop for the rest                 all blocks have read the stamps (knocks)
//                                                            slot_of, slot_token, stamp, output, plan, counters
//
// Rejected: parts of the top-k by position (duplicates then meet in no block: an atomic on slot_of per miss, 1.3 us, and
// blocks that wait for each other); all warps for both jobs (a wait for anything then tends to be a wait for the host).
#pragma once

#include "victims.cuh"

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
__device__ __forceinline__ void refuse(const SwapIn& p, const Seat& at, int row, int begin, const i32 (&token)[TOKENS]) {
    const int place = begin + static_cast<int>(threadIdx.x) * TOKENS;
    int foreign = 0;
#pragma unroll
    for (int j = 0; j < TOKENS; ++j) {
        if (place + j >= p.k || static_cast<u32>(token[j]) < static_cast<u32>(at.length)) continue;
        p.out_rows[static_cast<i64>(row) * p.k + place + j] = -1;
        foreign += token[j] != -1;
    }
    trip(p.state, POSITION, foreign);
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
        if (__any_sync(0xFFFFFFFF, outside) && (threadIdx.x / 32 & (ranks - 1)) == rank) refuse(p, at, row, begin, token);
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

// Chunk table and tail into shared memory. `chunk` is the table's entry threadIdx.x.
__device__ __forceinline__ void settle_tables(const SwapIn& p, const Seat& at, const Shared& s, i32 chunk) {
    const u32 chunks = p.slots_limit / PAGE_TOKENS;
    if (threadIdx.x < chunks) s.chunk(threadIdx.x) = chunk;
    if (threadIdx.x + BLOCK_THREADS < chunks)
        s.chunk(threadIdx.x + BLOCK_THREADS) =
            table_entry(p.state.chunk_table, p.state.max_chunks, at.seat, threadIdx.x + BLOCK_THREADS);
    const u32 place = BLOCK_THREADS - 1 - threadIdx.x;  // the last warp has nothing else to do here
    if (place < p.state.tail_slots) {
        const i32 set = p.state.tail[(static_cast<i64>(p.group) * p.state.seats + at.seat) * p.state.tail_slots + place];
        const u32 slot = set < 0 ? at.hot + place : set;
        atomicOr(&s.stay(slot / 32), 1u << slot % 32);
    }
    if (place == 16 && at.limit % 32 > 0) atomicOr(&s.stay(at.limit / 32), ~0u << at.limit % 32);
}
static_assert(TAIL_SLOTS_MAX <= 16 && SLOTS_MAX / PAGE_TOKENS <= 2 * BLOCK_THREADS, "two entries per thread");

// Of the warp's missing entries, bit j of `missing` for entry j of this thread, lists those to load and their followers.
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
        s.slot(i) = static_cast<u16>(SLOT_ABSENT);
        s.missing(leader == i ? place : p.sections.last - behind) = static_cast<u16>(i);
        if (leader != i) s.key(i) = static_cast<i32>(leader);
    }
    trip(p.state, UNGRANTED, ungranted);
}

// Outputs and stamps of hits, their bits in this block's mail; entries to load. `entry` comes with the first pages.
__device__ __forceinline__ void resolve_managed(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row,
                                                int rank, int ranks, i32 chunk, Entry (&entry)[ENTRIES], u32 entries) {
    const u16* const slot_of = p.state.slot_of + p.group * p.state.key_rows;
    i32* const stamp = p.state.stamp + p.group * p.state.arena_rows;
    i32* const out = p.out_rows + static_cast<i64>(row) * p.k;
#pragma unroll 1
    for (u32 begin = 0; begin == 0 || begin < entries; begin += ENTRIES * BLOCK_THREADS) {
        if (begin > 0) read_pages(p, at, s, begin, ranks, entry, entries);
#pragma unroll
        for (int j = 0; j < ENTRIES; ++j) {
            const u32 i = entry_of(begin, j);
            if (none_in_warp(i, entries)) break;
            if (entry[j].key < 0) continue;
            entry[j].key = entry[j].key * PAGE_TOKENS + static_cast<i32>(s.token(i) % PAGE_TOKENS);
            entry[j].slot = slot_of[entry[j].key];
        }
        if (begin == 0) {
            settle_tables(p, at, s, chunk);
            __syncthreads();
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
            const i32 found = slot < static_cast<u32>(at.limit) ? slot_row(s, slot) : -1;
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

// ---- managed requests: copy warps

template <class P, bool FIRST>
__device__ __forceinline__ void copy_plane(const SwapIn& p, const Shared& s, u32 misses) {
    using Shape = typename P::Shape;
    constexpr u32 GROUPS = COPY_THREADS / Shape::LANES;
    const u32 first = (threadIdx.x - CONTROL_THREADS) / Shape::LANES;
    const u32 tasks = p.copies ? misses * Shape::LINES : 0;
    u8* const arena = arena_of<P>(p.state, p.anchor_layer);
    const auto host = [&](u32 m) {
        const u32 i = s.missing(m);
        return host_place<P>(p.state, s.page(i), s.token(i) % PAGE_TOKENS, p.anchor_layer);
    };
    const auto target = [&](u32 m) -> u8* {
        const u32 slot = s.slot(s.missing(m));
        return slot == SLOT_ABSENT ? nullptr : arena + static_cast<i64>(slot_row(s, slot)) * Shape::ROW;
    };
    Lines<Shape, FLIGHT> lines;
    lines.load(first, GROUPS, tasks, host, host);
    if (FIRST) __syncthreads();  // victims are known
    lines.store(first, GROUPS, target);
#pragma unroll 1
    for (u32 begin = first + GROUPS * FLIGHT; begin < tasks; begin += GROUPS * FLIGHT) {
        lines.load(begin, GROUPS, tasks, host, host);
        lines.store(begin, GROUPS, target);
    }
}

__device__ __forceinline__ void copy_misses(const SwapIn& p, const Shared& s, u32 misses) {
    copy_plane<Plane<0>, true>(p, s, misses);
    if (PLANES == 2) copy_plane<LastPlane, false>(p, s, misses);
}

// ---- managed requests: control warps

// Sends this block's mail to its peers and awaits theirs.
__device__ __forceinline__ void exchange(const Shared& s, Scalars& q, const Seat& at, u32 rank, u32 ranks, u32 misses) {
    const u32 vectors = mail_vectors(at);
    uint4* const own = s.mail(rank);
#pragma unroll 1
    for (u32 t = threadIdx.x; t < vectors * (ranks - 1); t += CONTROL_THREADS) {
        const u32 ahead = t / vectors, vector = t - ahead * vectors;
        const uint4 words = vector == 0 ? uint4{misses, 0, 0, 0} : own[vector];
        send(own + vector, words, &q.hits_mail, (rank + 1 + ahead) & (ranks - 1));
    }
    await_mail(&q.hits_mail);
}

// Hit slots of all blocks join those that stay. Returns how many distinct ones this thread saw.
__device__ __forceinline__ u32 merge_hits(const Shared& s, const Seat& at, int ranks) {
    u32 distinct = 0;
#pragma unroll 1
    for (u32 w = threadIdx.x; w * 32 < at.limit; w += CONTROL_THREADS) {
        u32 hits = 0;
#pragma unroll 8
        for (int r = 0; r < ranks; ++r) hits |= s.hits(r)[w];
        distinct += __popc(hits);
        s.stay(w) |= hits;
    }
    return distinct;
}

// Tables, outputs and plan of the rows that this block loads: copies before..before+misses-1 of the request.
__device__ __forceinline__ void publish(const SwapIn& p, const Seat& at, const Shared& s, int row, u32 before,
                                        u32 misses) {
    u16* const slot_of = p.state.slot_of + p.group * p.state.key_rows;
    i32* const stamp = p.state.stamp + p.group * p.state.arena_rows;
    i32* const slot_token = p.state.slot_token + p.group * p.state.arena_rows;
    const i64 base = static_cast<i64>(row) * p.k;
#pragma unroll 1
    for (u32 m = threadIdx.x; m < misses; m += CONTROL_THREADS) {
        const u32 i = s.missing(m), slot = s.slot(i);
        if (slot == SLOT_ABSENT) {
            p.out_rows[base + s.place(i)] = -1;
            trip(p.state, VICTIMS, 1);
            continue;
        }
        const i32 device_row = slot_row(s, slot), token = static_cast<i32>(s.token(i)), old = slot_token[device_row];
        p.out_rows[base + s.place(i)] = device_row;
        p.plan.device_row[base + before + m] = device_row;
        p.plan.host_page[base + before + m] = s.page(i);
        p.plan.host_offset[base + before + m] = token % PAGE_TOKENS;
        slot_of[s.key(i)] = static_cast<u16>(slot);
        slot_token[device_row] = token;
        stamp[device_row] = at.now;
        if (old < 0) continue;
        const i32 page = table_entry(p.state.index_table, p.state.max_pages, at.seat, old / PAGE_TOKENS);
        if (page >= 0) slot_of[page * PAGE_TOKENS + old % PAGE_TOKENS] = static_cast<u16>(SLOT_ABSENT);
    }
}

// Entries whose token another entry of this block loads.
__device__ __forceinline__ void follow(const SwapIn& p, const Shared& s, int row, u32 followers) {
#pragma unroll 1
    for (u32 f = threadIdx.x; f < followers; f += CONTROL_THREADS) {
        const u32 i = s.missing(p.sections.last - f), slot = s.slot(s.key(i));
        trip(p.state, VICTIMS, slot == SLOT_ABSENT);
        p.out_rows[static_cast<i64>(row) * p.k + s.place(i)] = slot == SLOT_ABSENT ? -1 : slot_row(s, slot);
    }
}

__device__ __forceinline__ void decide(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row, int rank,
                                       int ranks, u32 misses) {
    const i32* const stamp = p.state.stamp + p.group * p.state.arena_rows;
    const bool chooses = misses > 0 || rank == 0;
    Stamps stamps(at);
    if (misses > 0) stamps.load(at, s, stamp, 0);  // on their way while blocks agree
    u32 before = 0, total = misses;
    if (ranks > 1) {
        exchange(s, q, at, rank, ranks, misses);
        const int peer = threadIdx.x % 32;
        const u32 count = peer < ranks && peer != rank ? s.mail(peer)->x : 0;
        total += __reduce_add_sync(0xFFFFFFFF, count);
        before = __reduce_add_sync(0xFFFFFFFF, peer < rank ? count : 0);
    }
    if (chooses) {
        const u32 distinct = __reduce_add_sync(0xFFFFFFFF, merge_hits(s, at, ranks));
        if (rank == 0 && threadIdx.x % 32 == 0) add_to_seat(p, at, p.state.hits, distinct);
    }
    if (rank == 0 && threadIdx.x == 0 && total == 0) p.plan.count[row] = 0;
    if (total == 0) return;
    if (chooses) {
        sync_named(CONTROL, CONTROL_THREADS);
        const u32 victims = choose_victims(at, s, q, stamp, stamps, total, before, misses);
        if (rank == 0 && threadIdx.x == 0) {
            p.plan.count[row] = static_cast<i32>(victims);
            add_to_seat(p, at, p.state.misses, victims);
        }
    }
    if (misses > 0) __syncthreads();  // victims are known, to the copy warps too
    if (ranks > 1) {
        if (static_cast<int>(threadIdx.x) < ranks && static_cast<int>(threadIdx.x) != rank)
            knock(&q.readers_mail, threadIdx.x);
        await_mail(&q.readers_mail);
    }
    publish(p, at, s, row, before, misses);
    follow(p, s, row, q.followers);
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::BLOCK_THREADS, 2)
    swap_in(const __grid_constant__ hisparse::SwapIn p) {
    using namespace hisparse;
    extern __shared__ uint4 dynamic[];
    __shared__ Scalars q;
    const int ranks = cluster_ranks(), rank = cluster_rank(), row = cluster_number();
    const Shared s = {reinterpret_cast<u8*>(dynamic), p.sections};

    // Nothing here waits for anything.
    i32 token[TOKENS], real;
    load_now(real, p.batch.num_real);
    const i64 seat = read_id(p.batch.seats, row, p.batch.wide_seats);
    const i64 length = read_id(p.batch.lengths, row, p.batch.wide_lengths);
    read_tokens(p, row, 0, token);
    if (threadIdx.x == 0) {
        q.entries = q.misses = q.followers = 0;
        if (ranks > 1) {
            expect_knocks(&q.hits_mail, 1);
            expect_knocks(&q.readers_mail, ranks - 1);
        }
    }
    __syncthreads();
    if (ranks > 1) cluster_arrive();
    const uint4 none = {NOT_SEEN, NOT_SEEN, NOT_SEEN, NOT_SEEN}, zero = {0, 0, 0, 0};
#pragma unroll 1
    for (u32 i = threadIdx.x; i <= p.seen_mask / 4; i += BLOCK_THREADS) s.in<uint4>(p.sections.seen, i) = none;
    if (threadIdx.x * sizeof(uint4) < p.sections.mail_bytes) {
        s.mail(rank)[threadIdx.x] = zero;
        s.in<uint4>(p.sections.stay, threadIdx.x) = zero;
    }
    if (ranks > 1) cluster_wait();

    if (row >= real || static_cast<u64>(seat) >= static_cast<u64>(p.state.seats) || length < 1)
        return write_padding(p, row, rank, ranks);
    Seat at;
    at.seat = static_cast<i32>(seat);
    at.length = static_cast<i32>(min(length, static_cast<i64>(CONTEXT_MAX_TOKENS)));
    load_now(at.hot, p.state.hot_slots + seat);
    load_now(at.now, p.state.now + seat);
    i32 chunk = -1;
    if (threadIdx.x < p.slots_limit / PAGE_TOKENS)
        chunk = table_entry(p.state.chunk_table, p.state.max_chunks, at.seat, threadIdx.x);
    collect(p, at, s, q, row, rank, ranks, token);
    __syncthreads();
    Entry entry[ENTRIES];
    const u32 entries = q.entries;
    read_pages(p, at, s, 0, ranks, entry, entries);
    if (at.hot < 0) return write_padding(p, row, rank, ranks);
    if (at.hot == 0) return resolve_resident(p, at, s, q, row, rank);
    at.limit = min(at.hot + p.state.tail_slots, p.slots_limit);
    if (ranks > 1 && threadIdx.x == 0)
        expect_bytes(&q.hits_mail, (ranks - 1) * mail_vectors(at) * static_cast<u32>(sizeof(uint4)));

    resolve_managed(p, at, s, q, row, rank, ranks, chunk, entry, entries);
    __syncthreads();
    const u32 misses = q.misses;
    if (threadIdx.x < CONTROL_THREADS) {
        decide(p, at, s, q, row, rank, ranks, misses);
    } else if (misses > 0) {
        copy_misses(p, s, misses);
    }
}

// swap_in: resolve a group's top-k to device rows, loading what is not hot. Contract: kernels/swap_in.py.
//
// N blocks of one request form a cluster (N = 1 where there are none). Each resolves N-th part of the top-k; then all of
// them know all results, choose the same victims, and each loads its own misses. Warps 0-7 of a block decide (control),
// warps 8-15 copy: a host load takes 1.5 us, so it starts as soon as a miss is seen, its victim not known yet, and waits
// in the registers of warps that have nothing else to wait for.
//
//    control                                               copy
//    seat, length, top-k; pages; slot_of                   clear maps; chunk table and tail to shared memory
//    hit: output, stamp; miss: record                 ---> RECORDS: start host loads
//    claim each miss in slot_of (duplicates lose)
//    results to every block of the cluster (st.async)
//    map of used slots; misses of all, of earlier blocks
//    histogram of ages, cut-off, victims in slot order ---> VICTIMS: store rows; loop for the rest
//    all blocks have read the stamps (knocks)
//    slot_of, slot_token, stamp, output, plan, counters
//
// Exact LRU: age = steps since last use. Victims are all slots older than the cut-off and the lowest slots at it. Ages
// below 2047 have a bin each; older ones share one, which two more passes refine when the cut-off lies in it.
//
// What is exchanged is one uint16 per top-k entry (its slot, ABSENT, or CLAIMED for a miss): its size depends neither on
// the hot size nor on N. Rejected: bitmaps of used slots (N * H/8 bytes, then a reduction over N).
//
// Duplicates: the first block to clear a bit of an ABSENT entry of slot_of owns the load; others find the slot there when
// the owner has published it. Owners never wait for losers, and all blocks of a cluster are resident, so losers may spin.
#pragma once

#include "victims.cuh"

namespace hisparse {

// ---- padding and resident requests

__device__ void write_padding(const SwapIn& p, int row, int first, int last) {
    for (int e = first + threadIdx.x; e < last; e += BLOCK_THREADS) p.out_rows[static_cast<i64>(row) * p.k + e] = -1;
}

__device__ void resolve_resident(const SwapIn& p, const Seat& at, int row, int first, int last) {
    int foreign = 0, ungranted = 0;
    for (int e = first + threadIdx.x; e < last; e += CONTROL_THREADS) {
        const i64 place = static_cast<i64>(row) * p.k + e;
        const i32 token = p.topk[place];
        const bool inside = 0 <= token && token < at.length;
        const i32 chunk =
            inside ? table_entry(p.state.chunk_table, p.state.max_chunks, at.seat, token / PAGE_TOKENS) : -1;
        p.out_rows[place] = chunk < 0 ? -1 : chunk * PAGE_TOKENS + token % PAGE_TOKENS;
        foreign += token != -1 && !inside;
        ungranted += inside && chunk < 0;
    }
    trip(p.state, POSITION, foreign);
    trip(p.state, UNGRANTED, ungranted);
}

// Distinct tokens found, by one block's copy warps: a hash set of the whole top-k, at most half full.
__device__ void count_resident(const SwapIn& p, const Seat& at, int row, i32* set) {
    const int me = threadIdx.x - CONTROL_THREADS;
    for (int i = me; i <= p.distinct_mask; i += COPY_THREADS) set[i] = -1;
    sync_named(COPY, COPY_THREADS);
    u32 distinct = 0;
    for (int e = me; e < p.k; e += COPY_THREADS) {
        const i32 token = p.topk[static_cast<i64>(row) * p.k + e];
        if (token < 0 || token >= at.length) continue;
        if (table_entry(p.state.chunk_table, p.state.max_chunks, at.seat, token / PAGE_TOKENS) < 0) continue;
        u32 place = static_cast<u32>(token) * 2654435761u >> 7;
        i32 there;
        do {
            place = (place + 1) & p.distinct_mask;
            there = atomicCAS(set + place, -1, token);
        } while (there != -1 && there != token);
        distinct += there == -1;
    }
    distinct = __reduce_add_sync(0xFFFFFFFF, distinct);
    if (threadIdx.x % 32 == 0 && distinct)
        atomicAdd(reinterpret_cast<u64*>(p.state.hits + static_cast<i64>(p.group) * p.state.seats + at.seat),
                  static_cast<u64>(distinct));
}

// ---- managed requests: copy warps

__device__ void prepare_tables(const SwapIn& p, const Seat& at, const Shared& s) {
    const int me = threadIdx.x - CONTROL_THREADS;
    const uint4 zero = {0, 0, 0, 0};
    for (int i = me; i < (at.limit + 15) / 16; i += COPY_THREADS) reinterpret_cast<uint4*>(s.used)[i] = zero;
    for (int i = me; i < AGE_BINS / 4; i += COPY_THREADS) reinterpret_cast<uint4*>(s.histogram)[i] = zero;
    for (int i = me; i < (at.limit + PAGE_TOKENS - 1) / PAGE_TOKENS; i += COPY_THREADS)
        s.chunks[i] = table_entry(p.state.chunk_table, p.state.max_chunks, at.seat, i);
    arrive_named(TABLES, BLOCK_THREADS);
    sync_named(COPY, COPY_THREADS);
    if (me < p.state.tail_slots) {
        const i64 ring = (static_cast<i64>(p.group) * p.state.seats + at.seat) * p.state.tail_slots + me;
        const i32 slot = p.state.tail[ring];
        s.used[slot < 0 ? at.hot + me : slot] = 2;
    }
}

template <class P, bool FIRST>
__device__ __forceinline__ void copy_plane(const SwapIn& p, const Shared& s, int records) {
    using Shape = typename P::Shape;
    const int first = (threadIdx.x - CONTROL_THREADS) / Shape::LANES;
    constexpr int GROUPS = COPY_THREADS / Shape::LANES;
    const int tasks = records * Shape::LINES;
    u8* const arena = arena_of<P>(p.state, p.anchor_layer);
    const auto host = [&](int i) {
        return host_place<P>(p.state, s.record_page[i], s.record_token[i] % PAGE_TOKENS, p.anchor_layer);
    };
    const auto target = [&](int i) -> u8* {
        const u32 slot = s.record_slot[i];
        return slot >= SLOT_CLAIMED ? nullptr : arena + static_cast<i64>(slot_row(s.chunks, slot)) * Shape::ROW;
    };
    Lines<Shape, FLIGHT> lines;
    lines.load(first, GROUPS, tasks, host, host);
    if (FIRST) sync_named(VICTIMS_KNOWN, BLOCK_THREADS);
    lines.store(first, GROUPS, tasks, host, target);
    for (int begin = first + GROUPS * FLIGHT; begin < tasks; begin += GROUPS * FLIGHT) {
        lines.load(begin, GROUPS, tasks, host, host);
        lines.store(begin, GROUPS, tasks, host, target);
    }
}

__device__ __forceinline__ void copy_misses(const SwapIn& p, const Shared& s, int records) {
    copy_plane<Plane<0>, true>(p, s, records);
    if (PLANES == 2) copy_plane<LastPlane, false>(p, s, records);
}

// ---- managed requests: control warps

// Fills results, outputs of hits, records of misses. Entries first..last-1 of the top-k are this block's; `entry` comes
// with the pages of the first of them.
__device__ void resolve_managed(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row, int first,
                                int last, Entry (&entry)[ENTRIES]) {
    const u16* const slot_of = p.state.slot_of + p.group * p.state.key_rows;
    i32* const stamp = p.state.stamp + p.group * p.state.arena_rows;
    i32* const out = p.out_rows + static_cast<i64>(row) * p.k;
    const int stop = first + p.span;
    int foreign = 0, ungranted = 0;
    for (int begin = first; begin < stop; begin += ENTRIES * CONTROL_THREADS) {
        if (begin > first) {
            read_tokens(p, row, begin, last, entry);
            read_pages(p, at, entry);
        }
#pragma unroll
        for (int j = 0; j < ENTRIES; ++j) {
            entry[j].slot = SLOT_ABSENT;
            if (entry[j].key >= 0) {
                entry[j].key = entry[j].key * PAGE_TOKENS + entry[j].token % PAGE_TOKENS;
                entry[j].slot = load_shared_slot(slot_of + entry[j].key);
            }
        }
        if (begin == first) sync_named(TABLES, BLOCK_THREADS);
#pragma unroll
        for (int j = 0; j < ENTRIES; ++j) {
            const int e = begin + j * CONTROL_THREADS + threadIdx.x;
            if (begin + j * CONTROL_THREADS >= stop) break;
            const Entry& it = entry[j];
            const bool absent = it.slot >= SLOT_CLAIMED;
            i32 found = -1;
            if (!absent && it.slot < static_cast<u32>(at.limit)) found = slot_row(s.chunks, it.slot);
            const bool miss = it.key >= 0 && absent && it.page >= 0;
            if (found >= 0) stamp[found] = at.now;
            if (e < last && !miss) out[e] = found;
            if (e < stop) s.results[e] = static_cast<u16>(found >= 0 ? it.slot : SLOT_ABSENT);
            foreign += it.token != -1 && !is_inside(at, it.token);
            ungranted += is_inside(at, it.token) && !miss && found < 0;
            const u32 place = take_place(miss, &q.records);
            if (miss) {
                s.record_page[place] = it.page;
                s.record_token[place] = it.token;
                s.record_key[place] = it.key;
                s.record_entry[place] = static_cast<u16>(e);
            }
        }
    }
    trip(p.state, POSITION, foreign);
    trip(p.state, UNGRANTED, ungranted);
}

// Of several entries with the same missing token, one in the whole cluster wins.
__device__ void claim_misses(const SwapIn& p, const Shared& s, Scalars& q, int records) {
    u32* const words = reinterpret_cast<u32*>(p.state.slot_of + p.group * p.state.key_rows);
    for (int begin = 0; begin < records; begin += CONTROL_THREADS) {
        const int i = begin + threadIdx.x;
        bool won = false;
        if (i < records) {
            const i32 key = s.record_key[i];
            const int shift = key % 2 * 16;
            won = (atomicAnd(words + key / 2, ~(1u << shift)) >> shift & 0xFFFF) == SLOT_ABSENT;
            s.record_slot[i] = static_cast<u16>(won ? SLOT_CLAIMED : SLOT_ABSENT);
            if (won) s.results[s.record_entry[i]] = static_cast<u16>(SLOT_CLAIMED);
        }
        const u32 place = take_place(won, &q.winners);
        if (won) s.winner_record[place] = static_cast<u16>(i);
    }
}

__device__ void exchange(const SwapIn& p, const Shared& s, Scalars& q, int rank, int ranks) {
    const int vectors = p.span / 8;
    uint4* const results = reinterpret_cast<uint4*>(s.results);
    if (ranks > 1) {
        for (int t = threadIdx.x; t < vectors * (ranks - 1); t += CONTROL_THREADS) {
            const int ahead = t / vectors, vector = rank * vectors + t - ahead * vectors;
            send(results + vector, results[vector], &q.results_mail, (rank + 1 + ahead) % ranks);
        }
        await_mail(&q.results_mail);
    }
    u32 counts = 0;
    for (int v = threadIdx.x; v < vectors * ranks; v += CONTROL_THREADS) {
        const uint4 eight = results[v];
        const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
        u32 claimed = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 slot = pairs[i / 2] >> i % 2 * 16 & 0xFFFF;
            if (slot < SLOT_CLAIMED) s.used[slot] = 1;  // a tail slot that is hit stays out of reach all the same
            claimed += slot == SLOT_CLAIMED;
        }
        counts += claimed | (v < rank * vectors ? claimed << 16 : 0);
    }
    counts = __reduce_add_sync(0xFFFFFFFF, counts);
    if (threadIdx.x % 32 == 0 && counts) atomicAdd(&q.counts, counts);
    sync_named(CONTROL, CONTROL_THREADS);
}

// Tables, outputs and plan of the rows that this block loads.
__device__ void publish(const SwapIn& p, const Seat& at, const Shared& s, int row, u32 before, u32 winners) {
    u16* const slot_of = p.state.slot_of + p.group * p.state.key_rows;
    i32* const stamp = p.state.stamp + p.group * p.state.arena_rows;
    i32* const slot_token = p.state.slot_token + p.group * p.state.arena_rows;
    for (u32 w = threadIdx.x; w < winners; w += CONTROL_THREADS) {
        const int i = s.winner_record[w];
        const u32 slot = s.record_slot[i];
        const i64 base = static_cast<i64>(row) * p.k;
        if (slot == SLOT_CLAIMED) {
            slot_of[s.record_key[i]] = static_cast<u16>(SLOT_ABSENT);
            p.out_rows[base + s.record_entry[i]] = -1;
            trip(p.state, VICTIMS, 1);
            continue;
        }
        const i32 device_row = slot_row(s.chunks, slot), old = slot_token[device_row];
        if (old >= 0) {
            const i32 page = table_entry(p.state.index_table, p.state.max_pages, at.seat, old / PAGE_TOKENS);
            if (page >= 0) slot_of[page * PAGE_TOKENS + old % PAGE_TOKENS] = static_cast<u16>(SLOT_ABSENT);
        }
        slot_of[s.record_key[i]] = static_cast<u16>(slot);
        slot_token[device_row] = s.record_token[i];
        stamp[device_row] = at.now;
        p.out_rows[base + s.record_entry[i]] = device_row;
        p.plan.device_row[base + before + w] = device_row;
        p.plan.host_page[base + before + w] = s.record_page[i];
        p.plan.host_offset[base + before + w] = s.record_token[i] % PAGE_TOKENS;
    }
}

// Entries whose token another entry loads: wait until it is published.
__device__ void follow_winners(const SwapIn& p, const Shared& s, int row, int records) {
    const u16* const slot_of = p.state.slot_of + p.group * p.state.key_rows;
    for (int i = threadIdx.x; i < records; i += CONTROL_THREADS) {
        if (s.record_slot[i] != SLOT_ABSENT) continue;
        u32 slot;
        do slot = load_shared_slot(slot_of + s.record_key[i]);
        while (slot == SLOT_CLAIMED);
        trip(p.state, VICTIMS, slot == SLOT_ABSENT);
        p.out_rows[static_cast<i64>(row) * p.k + s.record_entry[i]] =
            slot == SLOT_ABSENT ? -1 : slot_row(s.chunks, slot);
    }
}

__device__ void count_hits(const SwapIn& p, const Seat& at, const Shared& s) {
    u32 distinct = 0;
    for (int i = threadIdx.x; i < (at.limit + 3) / 4; i += CONTROL_THREADS)
        distinct += __popc(reinterpret_cast<const u32*>(s.used)[i] & 0x01010101);
    distinct = __reduce_add_sync(0xFFFFFFFF, distinct);
    if (threadIdx.x % 32 == 0 && distinct)
        atomicAdd(reinterpret_cast<u64*>(p.state.hits + static_cast<i64>(p.group) * p.state.seats + at.seat),
                  static_cast<u64>(distinct));
}

// This block will not read stamps again: peers may write theirs.
__device__ __forceinline__ void tell_readers(Scalars& q, int rank, int ranks) {
    if (static_cast<int>(threadIdx.x) < ranks && static_cast<int>(threadIdx.x) != rank)
        knock(&q.readers_mail, threadIdx.x);
}

__device__ void load_misses(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row, int rank, int ranks,
                            int records, Stamps& early) {
    const i32* const stamp = p.state.stamp + p.group * p.state.arena_rows;
    const u32 before = q.counts >> 16, total = q.counts & 0xFFFF, winners = q.winners;
    u32 victims = 0;
    if (winners > 0 || rank == 0) {
        u32 cut, older;
        victims = choose_cut(at, s, q, stamp, early, total, cut, older);
        tell_readers(q, rank, ranks);
        assign_victims(at, s, q, cut, victims - older, before, winners);
    } else {
        tell_readers(q, rank, ranks);
    }
    if (records > 0) sync_named(VICTIMS_KNOWN, BLOCK_THREADS);
    if (ranks > 1) await_mail(&q.readers_mail);
    publish(p, at, s, row, before, winners);
    if (static_cast<u32>(records) > winners) follow_winners(p, s, row, records);
    if (rank == 0 && threadIdx.x == 0) {
        p.plan.count[row] = static_cast<i32>(victims);
        atomicAdd(reinterpret_cast<u64*>(p.state.misses + static_cast<i64>(p.group) * p.state.seats + at.seat),
                  static_cast<u64>(victims));
    }
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::BLOCK_THREADS, 2)
    swap_in(const __grid_constant__ hisparse::SwapIn p) {
    using namespace hisparse;
    extern __shared__ uint4 dynamic[];
    __shared__ Scalars q;
    const int ranks = cluster_ranks(), rank = cluster_rank(), row = blockIdx.x / ranks;
    const int first = rank * p.span, last = min(first + p.span, p.k);
    Entry entries[ENTRIES];
    if (threadIdx.x < CONTROL_THREADS) read_tokens(p, row, first, last, entries);
    if (threadIdx.x == 0) {
        q.records = q.winners = q.counts = 0;
        if (ranks > 1) {
            expect_bytes(&q.results_mail, (ranks - 1) * p.span * sizeof(u16));
            expect_knocks(&q.readers_mail, ranks - 1);
        }
    }
    __syncthreads();  // without it, warp 0 arrives in two parts, the first before the mailboxes are there
    if (ranks > 1) cluster_arrive();
    Seat at;
    const bool active = find_seat(p, row, at, entries);
    if (!active || at.hot == 0) {
        if (rank == 0 && threadIdx.x == 0) p.plan.count[row] = 0;
        if (!active) write_padding(p, row, first, last);
        else if (threadIdx.x < CONTROL_THREADS) resolve_resident(p, at, row, first, last);
        else if (rank == 0) count_resident(p, at, row, reinterpret_cast<i32*>(dynamic));
        return;
    }
    const Shared s(reinterpret_cast<u8*>(dynamic), p.span, ranks, p.slots_limit);
    if (threadIdx.x >= CONTROL_THREADS) {
        prepare_tables(p, at, s);
        sync_named(RECORDS, BLOCK_THREADS);
        if (q.records > 0) copy_misses(p, s, static_cast<int>(q.records));
        return;
    }
    resolve_managed(p, at, s, q, row, first, last, entries);
    if (ranks > 1) cluster_wait();
    sync_named(RECORDS, BLOCK_THREADS);
    const int records = static_cast<int>(q.records);
    const i32* const stamp = p.state.stamp + p.group * p.state.arena_rows;
    Stamps early;
    if (records > 0) {
        early.load(at, s, stamp, 0);  // on their way while blocks agree
        claim_misses(p, s, q, records);
        sync_named(CONTROL, CONTROL_THREADS);
    } else if (rank == 0) {
        early.load(at, s, stamp, 0);
    }
    exchange(p, s, q, rank, ranks);
    if ((q.counts & 0xFFFF) > 0) {
        load_misses(p, at, s, q, row, rank, ranks, records, early);
    } else {
        if (records > 0) sync_named(VICTIMS_KNOWN, BLOCK_THREADS);
        if (rank == 0 && threadIdx.x == 0) p.plan.count[row] = 0;
    }
    if (rank == 0) count_hits(p, at, s);
}

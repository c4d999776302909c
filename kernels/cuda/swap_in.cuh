// swap_in: resolve a group's top-k to device rows, loading what is not hot. Contract: kernels/swap_in.py.
//
// N blocks of one request form a cluster (N = 1 where there are none), and deal its top-k out by places. What one block
// needs of the others it gets by mail, written into its shared memory: the bits of the slots that they hit, and the
// tokens that they miss. From the same mail all choose the same victims, and find the same duplicates among the misses:
// of entries with one token the first leads, the others take its row. Warps of a block have two jobs: a host load takes
// 1.5 us, so copy warps start it as soon as a miss is seen, its victim not known yet, and have nothing else to wait for.
//
//    all       seat, length; entries of this block
//              mode, chunk table, tail, beginning of the index table -> shared memory; host pages; slots that go next
//              slot_of; stamps of the slots that go next
//              hit: output, bit; miss: list
//              bits, misses, list to every block (st.async)
//    copy      start host loads                    control   victims: next slots that are not in use (next_slots.cuh),
//              stamps of hits                                or, now and then, by the stamps of all (victims.cuh)
//              store rows, loop for the rest                 slot_of, slot_token, stamp, output, plan, counters
//
// Rejected: a home block for each token, a hash of it (duplicates meet there, but each block reads the whole top-k and
// lists its part in shared memory); an atomic on slot_of per miss (1.3 us, and blocks that wait for each other); all warps
// for both jobs (a wait for anything then is a wait for the host); the index table looked up and the stamps written one by
// one where tokens stand in any order (a line each: 3 us for a top-k of 2048 in one block).
#pragma once

#include "next_slots.cuh"
#include "resolve.cuh"

namespace hisparse {

// ---- managed requests: copy warps

// Stamps of the slots that this block hit: neighbouring slots together, where the hits came in any order.
__device__ __forceinline__ void stamp_hits(const SwapIn& p, const Seat& at, const Shared& s, int rank) {
    constexpr u32 TOGETHER = 4;
    const u32* const hits = s.hits(rank);
#pragma unroll 1
    for (u32 begin = threadIdx.x - CONTROL_THREADS; begin < at.limit; begin += TOGETHER * COPY_THREADS) {
        u32 hit[TOGETHER];
        i32 device_row[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; ++i) {
            const u32 slot = min(begin + i * COPY_THREADS, at.limit - 1);
            hit[i] = begin + i * COPY_THREADS < at.limit ? hits[slot / 32] >> slot % 32 & 1 : 0;
            device_row[i] = s.chunk(slot / PAGE_TOKENS) * PAGE_TOKENS + slot % PAGE_TOKENS;
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; ++i)
            if (hit[i]) p.state.stamp[device_row[i]] = at.now;
    }
}

template <class P, class Meanwhile>
__device__ __forceinline__ void copy_plane(const SwapIn& p, const Shared& s, u32 rank, u32 misses, Meanwhile meanwhile) {
    using Shape = typename P::Shape;
    constexpr u32 GROUPS = COPY_THREADS / Shape::LANES;
    const u32 first = (threadIdx.x - CONTROL_THREADS) / Shape::LANES;
    const u32 tasks = p.copies ? misses * Shape::LINES : 0;
    u8* const arena = arena_of<P>(p.state, p.anchor_layer);
    const u32* const tokens = s.list(rank);
    const auto host = [&](u32 m) {
        return host_place<P>(p.state, s.page(m), tokens[m] >> ENTRY_BITS & (PAGE_TOKENS - 1), p.anchor_layer);
    };
    const auto target = [&](u32 m) -> u8* {
        const u32 slot = s.victim(m);
        return slot == SLOT_ABSENT ? nullptr : arena + static_cast<i64>(slot_row(s, slot)) * Shape::ROW;
    };
    Lines<Shape, FLIGHT> lines;
    lines.load(first, GROUPS, tasks, host, host);
    meanwhile();
    lines.store(first, GROUPS, target);
#pragma unroll 1
    for (u32 begin = first + GROUPS * FLIGHT; begin < tasks; begin += GROUPS * FLIGHT) {
        lines.load(begin, GROUPS, tasks, host, host);
        lines.store(begin, GROUPS, target);
    }
}

__device__ __forceinline__ void copy_misses(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, u32 rank,
                                            u32 misses) {
    copy_plane<Plane<0>>(p, s, rank, misses, [&] {
        stamp_hits(p, at, s, rank);
        if (misses > 0) await_gate(&q.chosen);
    });
    if (PLANES == 2) copy_plane<LastPlane>(p, s, rank, misses, [] {});
}

// ---- managed requests: control warps

// What all blocks of a request miss.
struct Misses {
    u32 own, before, total;  // of this block, of those with lower ranks, of all
    u32 reporter;            // the lowest rank that misses anything
};

// Sends this block's mail to its peers: misses and hits, and then the list.
__device__ __forceinline__ void send_mail(const Shared& s, Scalars& q, const Seat& at, u32 rank, u32 ranks,
                                          u32 misses) {
    const u32 vectors = mail_vectors(at), listed = (misses + 3) / 4;
    uint4* const own = s.mail(rank);
    uint4* const list = reinterpret_cast<uint4*>(s.list(rank));
#pragma unroll 1
    for (u32 ahead = 1 + threadIdx.x / 32; ahead < ranks; ahead += CONTROL_WARPS) {
        const u32 peer = (rank + ahead) & (ranks - 1);
#pragma unroll 1
        for (u32 vector = threadIdx.x % 32; vector < vectors; vector += 32) {
            const uint4 words = vector == 0 ? uint4{misses, 0, 0, 0} : own[vector];
            send(own + vector, words, &q.hits_mail, peer);
        }
#pragma unroll 1
        for (u32 vector = threadIdx.x % 32; vector < listed; vector += 32)
            send(list + vector, list[vector], &q.lists_mail, peer);
    }
}

// Reads the mail of all peers, their lists included.
__device__ __forceinline__ Misses await_peers(const Shared& s, Scalars& q, u32 rank, u32 ranks, u32 misses) {
    if (ranks == 1) return {misses, 0, misses, 0};
    await_gate(&q.hits_mail);
    const u32 peer = threadIdx.x % 32;
    const u32 theirs = peer < ranks && peer != rank ? s.mail(peer)->x : 0;
    const u32 all = __reduce_add_sync(0xFFFFFFFF, theirs);
    const u32 before = __reduce_add_sync(0xFFFFFFFF, peer < rank ? theirs : 0);
    const u32 vectors = __reduce_add_sync(0xFFFFFFFF, (theirs + 3) / 4);
    const u32 some = __ballot_sync(0xFFFFFFFF, (peer == rank ? misses : theirs) > 0);
    if (all > 0) {
        if (threadIdx.x == 0) expect_bytes(&q.lists_mail, vectors * static_cast<u32>(sizeof(uint4)));
        await_gate(&q.lists_mail);
    }
    return {misses, before, misses + all, static_cast<u32>(__ffs(some) - 1)};
}

// Hit slots of all blocks join those that stay. Returns how many distinct ones this thread saw.
__device__ __forceinline__ u32 merge_hits(const Shared& s, const Seat& at, int ranks) {
    u32 distinct = 0;
#pragma unroll 1
    for (u32 w = threadIdx.x; w * 32 < at.limit; w += CONTROL_THREADS) {
        u32 hits = 0;
#pragma unroll 4
        for (int r = 0; r < ranks; ++r) hits |= s.hits(r)[w];
        distinct += __popc(hits);
        s.stay(w) |= hits;
    }
    return distinct;
}

__device__ __forceinline__ void count_hits(const SwapIn& p, const Seat& at, u32 distinct) {
    distinct = __reduce_add_sync(0xFFFFFFFF, distinct);
    if (threadIdx.x % 32 == 0) add_to_seat(p, at, p.state.hits, distinct);
}

// Misses of block r, as its mail says.
__device__ __forceinline__ u32 misses_of(const Shared& s, u32 r, u32 rank, const Misses& m) {
    return r == rank ? m.own : s.mail(r)->x;
}

// Calls `visit(rank, number, entry)` for the misses of all blocks, shared out over the control threads.
template <class Visit>
__device__ __forceinline__ void for_all_misses(const Shared& s, u32 rank, u32 ranks, const Misses& m, Visit visit) {
    const u32 r = threadIdx.x & (ranks - 1), count = misses_of(s, r, rank, m);
#pragma unroll 1
    for (u32 i = threadIdx.x / ranks; i < count; i += CONTROL_THREADS / ranks) visit(r, i, s.list(r)[i]);
}

// Enters an entry into the hash set of missing tokens, where the lowest entry of each token stays.
__device__ __forceinline__ void enter(const SwapIn& p, const Shared& s, Scalars& q, u32 entry) {
    for (u32 place = (entry >> ENTRY_BITS) * 2654435761u >> 7;; ++place) {
        u32& at = s.seen(place & p.seen_mask);
        const u32 there = atomicCAS(&at, NOT_SEEN, entry);
        if (there == NOT_SEEN) return;
        if (there >> ENTRY_BITS != entry >> ENTRY_BITS) continue;
        atomicMin(&at, entry);
        atomicOr(&q.duplicates, 1);
        return;
    }
}

// The entry that loads the token of `entry`.
__device__ __forceinline__ u32 leader_of(const SwapIn& p, const Shared& s, u32 entry) {
    for (u32 place = (entry >> ENTRY_BITS) * 2654435761u >> 7;; ++place) {
        const u32 there = s.seen(place & p.seen_mask);
        if (there >> ENTRY_BITS == entry >> ENTRY_BITS) return there;
    }
}

// Counts only entries that lead, and lists those of this block.
__device__ __forceinline__ Misses only_leaders(const SwapIn& p, const Shared& s, Scalars& q, u32 rank, u32 ranks,
                                            const Misses& m) {
    for_all_misses(s, rank, ranks, m, [&](u32 r, u32 i, u32 entry) {
        if (leader_of(p, s, entry) != entry) return;
        const u32 place = atomicAdd(&q.leaders[r], 1);
        if (r == rank) s.order(place) = static_cast<u16>(i);
    });
    sync_named(CONTROL, CONTROL_THREADS);
    const u32 peer = threadIdx.x % 32, leaders = peer < ranks ? q.leaders[peer] : 0;
    return {q.leaders[rank], __reduce_add_sync(0xFFFFFFFF, peer < rank ? leaders : 0),
            __reduce_add_sync(0xFFFFFFFF, leaders), m.reporter};
}

// Outputs of the entries that another one leads, in whichever block, by the block of that one.
__device__ __forceinline__ void follow(const SwapIn& p, const Shared& s, int row, u32 rank, u32 ranks, const Misses& m) {
    i32* const out = p.out_rows + static_cast<i64>(row) * p.k;
    sync_named(CONTROL, CONTROL_THREADS);  // leaders have their outputs
    for_all_misses(s, rank, ranks, m, [&](u32, u32, u32 entry) {
        const u32 leader = leader_of(p, s, entry), place = leader & ((1 << ENTRY_BITS) - 1);
        if (leader == entry || block_of(place, ranks) != rank) return;
        const i32 device_row = out[place];
        out[entry & ((1 << ENTRY_BITS) - 1)] = device_row;
        trip(p.state, VICTIMS, device_row < 0);
    });
}

// Tables, outputs and plan of the rows that this block loads.
__device__ __forceinline__ void publish(const SwapIn& p, const Seat& at, const Shared& s, int row, u32 rank,
                                        const Misses& lead) {
    const i64 base = static_cast<i64>(row) * p.k;
#pragma unroll 1
    for (u32 l = threadIdx.x; l < lead.own; l += CONTROL_THREADS) {
        const u32 m = s.order(l), slot = s.victim(m), entry = s.list(rank)[m];
        const i64 place = base + (entry & ((1 << ENTRY_BITS) - 1)), copy = base + lead.before + l;
        if (slot == SLOT_ABSENT) {
            p.out_rows[place] = -1;
            trip(p.state, VICTIMS, 1);
            continue;
        }
        const i32 device_row = slot_row(s, slot), token = static_cast<i32>(entry >> ENTRY_BITS);
        const i32 old = p.state.slot_token[device_row];
        p.out_rows[place] = device_row;
        p.plan.device_row[copy] = device_row;
        p.plan.host_page[copy] = s.page(m);
        p.plan.host_offset[copy] = token % PAGE_TOKENS;
        p.state.slot_of[s.key(m)] = static_cast<u16>(slot);
        p.state.slot_token[device_row] = token;
        p.state.stamp[device_row] = at.now;
        if (old < 0) continue;
        const u32 held = static_cast<u32>(old) / PAGE_TOKENS;
        const i32 page =
            held < STAGED ? s.index(held) : TableRow(p.state.index_table, p.state.max_pages, at.seat)[held];
        if (page >= 0) p.state.slot_of[page * PAGE_TOKENS + old % PAGE_TOKENS] = static_cast<u16>(SLOT_ABSENT);
    }
}

// No block writes any of the stamps that victims are chosen by before all have read them: those of the list, and those of
// all slots, which only blocks that miss something read.
__device__ __forceinline__ void tell_read(Scalars& q, u32 rank, u32 ranks) {
    const u32 peer = CONTROL_THREADS - 1 - threadIdx.x;
    if (peer < ranks && peer != rank) knock(&q.readers_mail, peer);
}
__device__ __forceinline__ void tell_scanned(const Shared& s, Scalars& q, u32 rank, u32 ranks, const Misses& m) {
    const u32 peer = CONTROL_THREADS - 1 - threadIdx.x;
    if (peer >= ranks || peer == rank) return;
    if (misses_of(s, peer, rank, m) > 0) knock(&q.scanned_mail, peer);
    else open_gate(&q.scanned_mail);
}

// Slots for this block's misses, into s.victim; returns the number of victims of all blocks, fewer than misses only when
// slots run out. `anew`: the list did not suffice, and `next` is a new one to be kept.
__device__ __forceinline__ u32 choose_victims(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q,
                                              const Misses& lead, NextSlots& next, bool& scanned, bool& anew) {
    const bool few = lead.total <= LISTED_MISSES;
    scanned = !few || take_next(s, q, next, lead.total, lead.before, lead.own) < lead.total;
    anew = few && scanned;
    if (!scanned) return lead.total;
    if (!anew)
        return choose(at, s, q, p.state.stamp, lead.total, lead.before, lead.own, [&](u32 number, u32 slot) {
            s.victim(s.order(number)) = static_cast<u16>(slot);
        });
    list_next(at, s, q, p.state.stamp, next);
    const u32 all = take_next(s, q, next, 0, lead.before, lead.own);
    return min(all, lead.total);
}

__device__ __forceinline__ void decide(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row, u32 rank,
                                       u32 ranks, u32 misses, NextSlots& next) {
    tell_read(q, rank, ranks);
    const Misses all = await_peers(s, q, rank, ranks, misses);
    if (misses > 0 || rank == 0) {
        const u32 distinct = merge_hits(s, at, ranks);
        if (rank == 0) count_hits(p, at, distinct);
    }
    if (all.total == 0 && rank == 0 && threadIdx.x == 0) p.plan.count[row] = 0;
    if (misses == 0) {
        if (ranks > 1) await_gate(&q.readers_mail);  // peers knock here
        return;
    }
    for_all_misses(s, rank, ranks, all, [&](u32, u32, u32 entry) { enter(p, s, q, entry); });
    sync_named(CONTROL, CONTROL_THREADS);
    Misses lead = all;
    if (q.duplicates) lead = only_leaders(p, s, q, rank, ranks, all);
    bool scanned, anew;
    const u32 victims = choose_victims(p, at, s, q, lead, next, scanned, anew);
    open_gate(&q.chosen);  // each thread for what it wrote
    if (rank == all.reporter && threadIdx.x == 0) {
        p.plan.count[row] = static_cast<i32>(victims);
        add_to_seat(p, at, p.state.misses, victims);
    }
    await_gate(&q.chosen);
    if (ranks > 1) {
        if (scanned) tell_scanned(s, q, rank, ranks, all);  // every control warp has chosen: none reads on
        await_gate(&q.readers_mail);
        if (scanned) await_gate(&q.scanned_mail);
    }
    publish(p, at, s, row, rank, lead);
    if (anew && rank == all.reporter) next.store(p.state, at);
    if (q.duplicates) follow(p, s, row, rank, ranks, all);
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::BLOCK_THREADS, 1)
    swap_in(const __grid_constant__ hisparse::SwapIn p) {
    using namespace hisparse;
    extern __shared__ uint4 dynamic[];
    __shared__ Scalars q;
    const int row = blockIdx.y;
    // What the kernel ahead has nothing to do with comes first: this one may begin while that one is at work.
    const u32 ranks = cluster_ranks(), rank = cluster_rank();
    const Shared s = {reinterpret_cast<u8*>(dynamic), p.sections};
    if (threadIdx.x == BLOCK_THREADS - 1) {  // in a warp that has the least to do
        q.misses = q.duplicates = 0;
        close_gate(&q.chosen, CONTROL_THREADS);
        if (ranks > 1) {
            close_gate(&q.hits_mail, 1);
            close_gate(&q.lists_mail, 1);
            close_gate(&q.readers_mail, ranks - 1);
            close_gate(&q.scanned_mail, ranks - 1);
            publish_mailboxes();
        }
    }
    if (threadIdx.x < RANKS_MAX) q.leaders[threadIdx.x] = 0;
    if (ranks > 1) cluster_arrive();  // peers may write to this block
    const uint4 zero = {0, 0, 0, 0}, none = {NOT_SEEN, NOT_SEEN, NOT_SEEN, NOT_SEEN};
    if (threadIdx.x * sizeof(uint4) < p.sections.mail_bytes) {
        s.mail(rank)[threadIdx.x] = zero;
        s.in<uint4>(p.sections.stay, threadIdx.x) = zero;
    }
    for (u32 i = threadIdx.x; i <= p.seen_mask / 4; i += BLOCK_THREADS) s.in<uint4>(p.sections.seen, i) = none;
    await_last();

    // Nothing here waits for anything. The seat comes first: all else depends on it.
    i32 real;
    Id seat_id, length_id;
    Entry entry[ENTRIES];
    seat_id.load(p.batch.seats, row, p.batch.wide_seats);
    length_id.load(p.batch.lengths, row, p.batch.wide_lengths);
    load_now(real, p.batch.num_real);
    const int first = first_place(rank, ranks), step = BLOCK_THREADS * ranks;
    read_tokens(p, row, first, step, entry);
    const i64 seat = seat_id.value(p.batch.wide_seats), length = length_id.value(p.batch.wide_lengths);
    if (row >= real || static_cast<u64>(seat) >= static_cast<u64>(p.state.seats) || length < 1) {
        write_padding(p, row, rank, ranks);
        if (ranks > 1) cluster_wait();
        return;
    }
    Seat at;
    at.seat = static_cast<i32>(seat);
    at.length = static_cast<i32>(min(length, static_cast<i64>(CONTEXT_MAX_TOKENS)));
    Tables tables;
    tables.load(p, at.seat);
    read_pages(p, at, ranks, first, step, entry);
    NextSlots next;
    next.load(p.state, at);
    if (ranks > 1) cluster_wait();  // the wait empties L1: nothing is in it yet
    tables.store(p, at.seat, s, q);
    __syncthreads();

    // Here the seat is known: in shared memory, where no thread waits for it before it must.
    read_slots(p, at, s, first, step, entry);
    next.load_stamps(s, p.state.stamp);
    at.hot = q.hot;
    at.now = q.now;
    at.limit = limit_of(p, at.hot);
    if (at.hot < 0) return write_padding(p, row, rank, ranks);
    if (at.hot == 0) return resolve_resident(p, at, s, row, rank, ranks);
    if (ranks > 1 && threadIdx.x == BLOCK_THREADS - 1)
        expect_bytes(&q.hits_mail, (ranks - 1) * mail_vectors(at) * static_cast<u32>(sizeof(uint4)));
    tables.keep_tail(p, at, s);
    resolve_managed(p, at, s, q, row, rank, ranks, entry);
    next.drop_used();
    __syncthreads();
    const u32 misses = q.misses;
    let_next_begin();  // a next kernel that is launched early: another swap_in, but in a decode step none so far
    if (threadIdx.x < CONTROL_THREADS) {
        send_mail(s, q, at, rank, ranks, misses);
        decide(p, at, s, q, row, rank, ranks, misses, next);
    } else {
        copy_misses(p, at, s, q, rank, misses);
    }
}

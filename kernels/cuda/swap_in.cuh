// swap_in: resolve a group's top-k to device rows, loading what is not hot. Contract: kernels/swap_in.py.
//
// N blocks of one request form a cluster (N = 1 where there are none). Every token has a home block, a hash of it,
// which resolves it and loads it when it is missing: duplicates meet in one block, and blocks agree on victims without
// knowing each other's tokens. Then warps 0-7 of a block decide (control) and warps 8-15 move rows (copy): a host load
// takes 1.5 us, so it starts as soon as a miss is seen, its victim not known yet, and waits in the registers of warps
// that have nothing else to wait for.
//
//    all       seat, length, whole top-k          -> entries of this block
//              pages of the entries, mode, chunk table, tail; slot_of
//              hit: output, stamp, bit; miss: hash set of missing tokens
//    copy      start host loads                    control   misses and hit bits to every block (st.async)
//                                                            cut, victims in slot order (victims.cuh)
//              store rows, loop for the rest                 all blocks have read the stamps (knocks)
//                                                            slot_of, slot_token, stamp, output, plan, counters
//
// Rejected: parts of the top-k by position (duplicates then meet in no block: an atomic on slot_of per miss, 1.3 us,
// and blocks that wait for each other); all warps for both jobs (a wait for anything then is a wait for the host).
#pragma once

#include "resolve.cuh"
#include "victims.cuh"

namespace hisparse {

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
        const u32 slot = s.victim(m);
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

// Sends this block's mail to its peers.
__device__ __forceinline__ void send_mail(const Shared& s, Scalars& q, const Seat& at, u32 rank, u32 ranks,
                                          u32 misses) {
    const u32 vectors = mail_vectors(at);
    uint4* const own = s.mail(rank);
#pragma unroll 1
    for (u32 ahead = 1 + threadIdx.x / 32; ahead < ranks; ahead += CONTROL_WARPS)
#pragma unroll 1
        for (u32 vector = threadIdx.x % 32; vector < vectors; vector += 32) {
            const uint4 words = vector == 0 ? uint4{misses, 0, 0, 0} : own[vector];
            send(own + vector, words, &q.hits_mail, (rank + ahead) & (ranks - 1));
        }
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

// Tables, outputs and plan of the rows that this block loads: copies before..before+misses-1 of the request.
__device__ __forceinline__ void publish(const SwapIn& p, const Seat& at, const Shared& s, int row, u32 before,
                                        u32 misses) {
    u16* const slot_of = p.state.slot_of;
    i32* const stamp = p.state.stamp;
    i32* const slot_token = p.state.slot_token;
    const i64 base = static_cast<i64>(row) * p.k;
#pragma unroll 1
    for (u32 m = threadIdx.x; m < misses; m += CONTROL_THREADS) {
        const u32 i = s.missing(m), slot = s.victim(m);
        if (slot == SLOT_ABSENT) {
            p.out_rows[base + s.place(i)] = -1;
            s.key(i) = -1;
            trip(p.state, VICTIMS, 1);
            continue;
        }
        const i32 device_row = slot_row(s, slot), token = static_cast<i32>(s.token(i)), old = slot_token[device_row];
        p.out_rows[base + s.place(i)] = device_row;
        p.plan.device_row[base + before + m] = device_row;
        p.plan.host_page[base + before + m] = s.page(i);
        p.plan.host_offset[base + before + m] = token % PAGE_TOKENS;
        slot_of[s.key(i)] = static_cast<u16>(slot);
        s.key(i) = device_row;
        slot_token[device_row] = token;
        stamp[device_row] = at.now;
        if (old < 0) continue;
        const i32 page = table_entry(p.state.index_table, p.state.max_pages, at.seat, old / PAGE_TOKENS);
        if (page >= 0) slot_of[page * PAGE_TOKENS + old % PAGE_TOKENS] = static_cast<u16>(SLOT_ABSENT);
    }
}

// Entries whose token another entry of this block loads.
__device__ __forceinline__ void follow(const SwapIn& p, const Shared& s, int row, u32 followers) {
    sync_named(CONTROL, CONTROL_THREADS);
#pragma unroll 1
    for (u32 f = threadIdx.x; f < followers; f += CONTROL_THREADS) {
        const u32 i = s.missing(p.sections.last - f);
        const i32 device_row = s.key(s.key(i));
        trip(p.state, VICTIMS, device_row < 0);
        p.out_rows[static_cast<i64>(row) * p.k + s.place(i)] = device_row;
    }
}

__device__ __forceinline__ void decide(const SwapIn& p, const Seat& at, const Shared& s, Scalars& q, int row, int rank,
                                       int ranks, u32 misses) {
    const i32* const stamp = p.state.stamp;
    const bool chooses = misses > 0 || rank == 0;
    Stamps stamps(at);
    if (ranks > 1) send_mail(s, q, at, rank, ranks, misses);
    if (misses > 0) find_oldest(at, s, q, stamp, stamps);
    u32 before = 0, total = misses;
    if (ranks > 1) {
        await_mail(&q.hits_mail);
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
        if (misses == 0) find_oldest(at, s, q, stamp, stamps);
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
    if (q.followers > 0) follow(p, s, row, q.followers);
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::BLOCK_THREADS, 2)
    swap_in(const __grid_constant__ hisparse::SwapIn p) {
    using namespace hisparse;
    extern __shared__ uint4 dynamic[];
    __shared__ Scalars q;
    const int ranks = cluster_ranks(), rank = cluster_rank(), row = blockIdx.y;
    const Shared s = {reinterpret_cast<u8*>(dynamic), p.sections};

    // Nothing here waits for anything.
    i32 token[TOKENS], real;
    Id seat_id, length_id;
    read_tokens(p, row, 0, token);
    load_now(real, p.batch.num_real);
    seat_id.load(p.batch.seats, row, p.batch.wide_seats);
    length_id.load(p.batch.lengths, row, p.batch.wide_lengths);
    if (threadIdx.x == 0) {
        q.entries = q.misses = q.followers = q.foreign = 0;
        if (ranks > 1) {
            expect_knocks(&q.hits_mail, 1);
            expect_knocks(&q.readers_mail, ranks - 1);
        }
    }
    __syncthreads();
    if (ranks > 1) cluster_arrive();  // peers may write to this block
    const uint4 none = {NOT_SEEN, NOT_SEEN, NOT_SEEN, NOT_SEEN}, zero = {0, 0, 0, 0};
#pragma unroll 1
    for (u32 i = threadIdx.x; i <= p.seen_mask / 4; i += BLOCK_THREADS) s.in<uint4>(p.sections.seen, i) = none;
    if (threadIdx.x * sizeof(uint4) < p.sections.mail_bytes) {
        s.mail(rank)[threadIdx.x] = zero;
        s.in<uint4>(p.sections.stay, threadIdx.x) = zero;
    }

    const i64 seat = seat_id.value(p.batch.wide_seats), length = length_id.value(p.batch.wide_lengths);
    if (row >= real || static_cast<u64>(seat) >= static_cast<u64>(p.state.seats) || length < 1)
        return write_padding(p, row, rank, ranks);
    Seat at;
    at.seat = static_cast<i32>(seat);
    at.length = static_cast<i32>(min(length, static_cast<i64>(CONTEXT_MAX_TOKENS)));
    collect(p, at, s, q, row, rank, ranks, token);
    Tables tables;  // not asked for earlier: they would share a scoreboard with the tokens
    tables.load(p, at.seat);
    __syncthreads();
    Entry entry[ENTRIES];
    const u32 entries = q.entries;
    read_pages(p, at, s, 0, ranks, entry, entries);
    read_slots(p, s, 0, entry, entries);
    tables.store(p, at.seat, s, q);
    __syncthreads();

    // Here the seat is known: in shared memory, where no thread waits for it before it must.
    at.hot = q.hot;
    at.now = q.now;
    at.limit = limit_of(p, at.hot);
    if (at.hot < 0) return write_padding(p, row, rank, ranks);
    if (threadIdx.x == 0) trip(p.state, POSITION, q.foreign);
    if (at.hot == 0) return resolve_resident(p, at, s, q, row, rank);
    if (ranks > 1 && threadIdx.x == 0)
        expect_bytes(&q.hits_mail, (ranks - 1) * mail_vectors(at) * static_cast<u32>(sizeof(uint4)));
    resolve_managed(p, at, s, q, row, rank, ranks, entry, entries);
    // One warp waits for the peers, on behalf of the block: the wait empties L1 and takes its time.
    if (ranks > 1 && threadIdx.x >= BLOCK_THREADS - 32) cluster_wait();
    __syncthreads();
    const u32 misses = q.misses;
    if (threadIdx.x < CONTROL_THREADS) {
        decide(p, at, s, q, row, rank, ranks, misses);
    } else if (misses > 0) {
        copy_misses(p, s, misses);
    }
}

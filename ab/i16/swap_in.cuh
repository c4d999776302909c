// swap_in: resolve a group's top-k to device rows, loading what is not hot. Contract: kernels/swap_in.py.
//
// RANKS blocks of one request form a cluster (RANKS = 1: no cluster; each number is a kernel of its own). The top-k is
// divided over them by places. A block encodes each of its entries in 16 bits: the slot that the entry hit, or a miss. Each
// warp writes its codes, and its counts of misses and hits, into the shared memory of all peers as soon as it has them.
// From the same codes all blocks number the same misses and choose the same victims. A block's warps have two jobs: a host
// load takes 1.5 us, so copy warps start it as soon as their block knows its misses, before victims are known.
//
//    all       seat, length, mode, clock; entries of this block; chunks and the index table's beginning -> shared memory
//              slot_of; host pages; head of the eviction queue, tail; the top-k -> shared memory
//              miss: list, and release the copy warps; hit: output, stamp; codes and counts to every block (st.async)
//              stamps and tokens of the queued slots
//    copy      start host loads                    control   misses of all, by their counts; end here if there are none
//              meanwhile duplicates, by the codes            victims: queued slots not in use (eviction_queue.cuh),
//              of misses                                     or, when too few are queued, by all stamps (victims.cuh)
//              store rows, loop for the rest                 slot_of, slot_token, stamp, output, plan, counters; the queue
//    refill    one block per request beside these: refills the eviction queue (refill_queue), if the device has room
//
// Synchronisation. A gate is an mbarrier of one use: threads arrive by open_gate (peers by open_remote_gate), and wait by
// await_gate. "RANKS < SCATTERED" and the like: which kernels have it. Which threads arrive depends on counts that all of
// them have read, never on a table's entry: a corrupt one costs an output, not the launch.
//
//    barrier          who arrives                     who waits          what it orders
//    launch           the kernel ahead                all threads        its writes, before anything is read
//    cluster          all threads of the cluster      the same           gates are initialised, before a peer writes
//    ALL, first       all threads                     the same           tables, cleared bits and gates in shared memory,
//                                                                        before entries are resolved
//    ALL, second      all threads                     the same           misses and hits of this block, before copies and
//      < SCATTERED                                                       stamps (`found` and `prepared` elsewhere)
//    found            threads with entries            copy warps         the list of this block's misses, before its loads
//      >= SCATTERED
//    prepared         copy warps                      control warps      top-k, empty hash set and tail bits, before
//      >= SCATTERED                                                      candidates are chosen
//    codes_arrived    peers, by bytes; one thread;    all warps that     codes and counts of all blocks, before misses
//                     warps with entries (>= SCATT.)  count misses       are numbered
//    CONTROL          control warps                   the same           each step of a choice before the next one
//    COPY             copy warps                      the same           the top-k in shared memory, before enter_misses
//    entered          copy warps                      control warps      the hash set of misses, before leaders are chosen
//    chosen           control warps                   all warps that     victims, before rows are stored and published
//                                                     load or publish
//    readers_done     each peer, when it has read     control warps      peers' reads of queued stamps, before this block
//                     the queue                                          changes stamps
//    scans_done       each peer with misses, when it  control warps      peers' reads of all stamps, likewise; used when
//                     has read all stamps                                victims were not taken from the queue
//    reserve_end      the refill block (release)      a control thread   queued slots in the reserve, before they are moved
//                                                     (acquire)
//    reserve_begin    a control thread (release)      the refill block   moved places, before they are filled again
//                                                     (acquire)
//    ALL, in a        all threads of the block        the same           tables and the queue in shared memory, before bits
//      refill block                                                      of slots; these before ages are counted; then each
//                                                                        round of a refill before the next one
//
// A step with drafts launches this once for each row of a seat, in order of position: later launches find the slots of
// earlier ones stamped with the same step, as hits and no victims. DRAFT is 1 in rows behind the first: one that does
// not fit loads nothing and is rejected.
//
// Where a request has a block or two, all warps resolve entries: they read the queue only when something misses, and copies
// begin when all entries are resolved.
//
// Few misses: instructions bound a launch, not memory. What a warp does once takes some 10 cycles an instruction, as code
// and parameters come into caches first (benchmarks/RESULTS.md). So warps with nothing to look up leave issue slots to
// the others, code for many lines or entries lies behind a branch, shared memory is laid out by constants, what depends on
// RANKS is known to the compiler, and what a step needs for its misses alone is prepared by warps that wait anyway.
//
// Rejected: a home block for each token, a hash of it (duplicates meet there, but each block reads the whole top-k and
// lists its part in shared memory); an atomic on slot_of per miss (1.3 us, and blocks that wait for each other); all warps
// for both jobs (every wait then is a wait for the host); the index table looked up and the stamps written one by one
// where tokens stand in any order (a line each: 3 us for a top-k of 2048 in one block); a bit per slot and a list of
// misses sent to peers when a whole block is done (batch 1, no misses: 4.3 us, where codes by warps took 3.9).
#pragma once

#include "eviction_queue.cuh"

namespace hisparse {

// ---- managed requests: copy warps

// The warp that writes a row's counters when nothing is missing.
__device__ __forceinline__ bool is_reporting_warp() { return threadIdx.x / 32 == CONTROL_WARPS - 1; }

// Stamps the slots that this block hit, by all but the reporting warp: neighbouring slots together, whatever the order of
// hits. Two words at a time: fetching code for six takes longer than three turns.
__device__ __forceinline__ void stamp_hits(const SwapIn& p, const Seat& at, const Shared& s) {
    constexpr u32 TOGETHER = 2, WARPS = BLOCK_WARPS - 1;
    if (is_reporting_warp()) return;
    const u32 words = (at.limit + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (u32 begin = warp - (warp >= CONTROL_WARPS); begin < words; begin += TOGETHER * WARPS) {
        u32 hit[TOGETHER];
        i32 chunk[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; ++i) {
            const u32 word = begin + i * WARPS;
            hit[i] = word < words ? s.hit[word] : 0;
            chunk[i] = word < words ? s.chunk[word / 2] : 0;
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; ++i) {
            const i32 device_row = chunk[i] * PAGE_TOKENS + static_cast<i32>((begin + i * WARPS) % 2 * 32 + lane);
            if (hit[i] >> lane & 1) p.state.stamp[device_row] = at.now;
        }
    }
}
static_assert(PAGE_TOKENS == 64, "two words of bits to a chunk");

template <class P, class Meanwhile>
__device__ __forceinline__ void copy_plane(const SwapIn& p, const Shared& s, u32 misses, Meanwhile meanwhile) {
    using Shape = typename P::Shape;
    constexpr u32 GROUPS = COPY_THREADS / Shape::LANES;
    const u32 first = (threadIdx.x - CONTROL_THREADS) / Shape::LANES;
    const u32 tasks = p.copies ? misses * Shape::LINES : 0;
    const u8* const from = p.host_rows[P::INDEX];
    u8* const to = p.device_rows[P::INDEX];
    const auto source = [&](u32 m) {
        const u32 host_row = s.miss[m].host_row;
        return from + static_cast<u64>(host_row / PAGE_TOKENS) * p.page_bytes + host_row % PAGE_TOKENS * Shape::ROW;
    };
    const auto target = [&](u32 m) -> u8* {
        const u32 slot = s.miss[m].victim;
        return slot == SLOT_ABSENT ? nullptr : to + static_cast<i64>(slot_row(s, slot)) * Shape::ROW;
    };
    {
        Lines<Shape, FLIGHT> lines;
        lines.load_few(first, GROUPS, tasks, source);
        meanwhile();
        lines.store_few(first, GROUPS, tasks, target);
    }
#pragma unroll 1
    for (u32 begin = first + GROUPS * FLIGHT; begin < tasks; begin += GROUPS * FLIGHT) {
        Lines<Shape, FLIGHT> lines;
        lines.load_few(begin, GROUPS, tasks, source);
        lines.store_few(begin, GROUPS, tasks, target);
    }
}

// Copies the `misses` of this block, at least one.
__device__ __forceinline__ void copy_misses(const SwapIn& p, Shared& s, const Part& part, u32 misses) {
    copy_plane<Plane<0>>(p, s, misses, [&] {
        if (part.ranks > 1) await_gate(&s.codes_arrived);
        sync_named(COPY, COPY_THREADS);  // the top-k is in shared memory
        enter_misses(s, part);
        open_gate(&s.entered);
        await_gate(&s.chosen);
    });
    if (PLANES == 2) copy_plane<LastPlane>(p, s, misses, [] {});
}

// ---- managed requests: control warps

// What is known of a missing row before its victim is.
struct Loading {
    u32 m, place, host_row;
    i32 token, key;

    __device__ __forceinline__ Loading(const SwapIn& p, const Seat& at, const Shared& s, u32 number) {
        m = s.order[number];
        place = s.miss[m].place, host_row = s.miss[m].host_row;
        token = s.token[place];
        key = key_of(p, at, s, token);
    }
};

// Tables, outputs and plan of the rows that this block loads, `first` being the thread's first one. `from_queue`:
// victims came from the eviction queue.
__device__ __forceinline__ void publish(const SwapIn& p, const Seat& at, const Shared& s, int row, const Misses& misses,
                                        bool from_queue, const Loading& first) {
    const u32 begin = static_cast<u32>(row) * static_cast<u32>(p.k);
#pragma unroll 1
    for (u32 l = threadIdx.x; l < misses.own; l += CONTROL_THREADS) {
        const Loading it = l == threadIdx.x ? first : Loading(p, at, s, l);
        const u32 slot = s.miss[it.m].victim, copy = begin + misses.before + l;
        if (slot == SLOT_ABSENT) {
            p.out_rows[begin + it.place] = -1;
#if !DRAFT
            trip(p.state, VICTIMS, 1);
#endif
            continue;
        }
        const i32 device_row = slot_row(s, slot);
        const i32 old = from_queue ? s.old[l] : p.state.slot_token[device_row];
        p.out_rows[begin + it.place] = device_row;
        p.plan.device_row[copy] = device_row;
        p.plan.host_page[copy] = static_cast<i32>(it.host_row / PAGE_TOKENS);
        p.plan.host_offset[copy] = it.token % PAGE_TOKENS;
        p.state.slot_of[it.key] = static_cast<u16>(slot);
        p.state.slot_token[device_row] = it.token;
        p.state.stamp[device_row] = at.now;
        const i32 key = old < 0 ? -1 : key_of(p, at, s, old);
        if (key >= 0) p.state.slot_of[key] = static_cast<u16>(SLOT_ABSENT);
    }
}

// Stamps by which victims are chosen change only after all blocks have read them: those of queued slots (signal_read), and
// those of all slots, which only blocks with misses read (signal_scanned). Stamps of hits may change at any time: their
// slots are no candidates.
__device__ __forceinline__ void signal_read(Shared& s, const Part& part) {
    const u32 peer = CONTROL_THREADS - 1 - threadIdx.x;
    if (peer < part.ranks && peer != part.rank) open_remote_gate(&s.readers_done, peer);
}
__device__ __forceinline__ void signal_scanned(Shared& s, const Part& part, u32 missing) {
    const u32 peer = CONTROL_THREADS - 1 - threadIdx.x;
    if (peer >= part.ranks || peer == part.rank) return;
    if (missing >> peer & 1) open_remote_gate(&s.scans_done, peer);
    else open_gate(&s.scans_done);
}

// Counts the hits of this block, while the peers' codes are on their way.
__device__ __forceinline__ void count_own_hits(const SwapIn& p, const Seat& at, const Shared& s, const Part& part) {
    const u32 begin = part.rank * part.entries / 32;
    u32 hits = 0;
#pragma unroll 1
    for (u32 i = threadIdx.x % 32; i < part.entries / 32; i += 32) hits += s.count[begin + i] >> 16;
    hits = __reduce_add_sync(0xFFFFFFFF, hits);
    if (threadIdx.x % 32 == 0) add_to_seat(p, at, p.state.hits, hits);
}

// By all control warps: victims, tables, outputs and plan. `queued` is being loaded already from SCATTERED blocks on.
__device__ __forceinline__ void decide(const SwapIn& p, const Seat& at, Shared& s, int row, const Part& part,
                                       QueuedSlots& queued) {
    constexpr bool ahead = Part::ranks >= SCATTERED;
    if (!ahead && s.misses == 0 && !is_reporting_warp()) return;
    if (!ahead && is_reporting_warp()) count_own_hits(p, at, s, part);
    if (part.ranks > 1) await_gate(&s.codes_arrived);
    if (ahead && s.misses == 0 && !is_reporting_warp()) return;
    const Counts counts(s, part);
    const bool any = counts.any();
    if (part.rank == 0 && is_reporting_warp()) {
        if (!any && threadIdx.x % 32 == 0) p.plan.count[row] = 0;
        if (ahead) {  // of all blocks: the end of the kernel would wait for an atomic of each
            const u32 hits = counts.hits();
            if (threadIdx.x % 32 == 0) add_to_seat(p, at, p.state.hits, hits);
        }
    }
    if (!any) return;
    Misses misses = counts.misses(part, s.misses);
    if (misses.own == 0) {
        signal_read(s, part);
        if (part.ranks > 1) await_gate(&s.readers_done);  // peers arrive at this block's gate: it must not end before
        return;
    }
    if (!ahead) {
        queued.load(p.state, at, s);
        queued.load_stamps(s, p.state.stamp, p.state.slot_token);
    }
    keep_hits(s, part);
    queued.drop_used();
    if (ahead) await_gate(&s.prepared);
    await_words();
    sync_named(CONTROL, CONTROL_THREADS);  // all have read the queue, and know which slots stay
    signal_read(s, part);
    const Candidates candidates(s, queued);
    sync_named(CONTROL, CONTROL_THREADS);
    await_gate(&s.entered);
    if (s.duplicates) only_leaders(s, part, misses);
    u32 victims = misses.total;  // fewer when slots run out
    const bool from_queue = take_from_queue(s, queued, candidates, misses) >= misses.total;
    if (!from_queue) {
        victims = choose(at, s, p.state.stamp, misses.total, misses.before, misses.own, [&](u32 number, u32 slot) {
            s.miss[s.order[number]].victim = static_cast<u16>(slot);
        });
    }
    open_gate(&s.chosen);  // each thread for what it wrote
    const Loading first(p, at, s, threadIdx.x < misses.own ? threadIdx.x : 0);
    await_gate(&s.chosen);
    if (part.ranks > 1) {
        if (!from_queue) signal_scanned(s, part, counts.missing_ranks(part));  // all control warps have chosen
        await_gate(&s.readers_done);
        if (!from_queue) await_gate(&s.scans_done);
    }
    publish(p, at, s, row, misses, from_queue, first);
    if (s.duplicates) follow(p, at, s, row, part);
    if ((counts.missing_ranks(part) & ((2u << part.rank) - 1)) != 1u << part.rank) return;
    if (threadIdx.x == CONTROL_THREADS - 1) {  // of the lowest rank that misses any
        p.plan.count[row] = static_cast<i32>(victims);
        add_to_seat(p, at, p.state.misses, victims);
#if DRAFT
        if (victims < misses.total) p.rejected[row] = 1;
#endif
    }
#if DRAFT
    if (victims < misses.total) return;  // nothing was evicted: the queue stays
#endif
    advance_queue(p.state, at, s, misses.total, from_queue, !p.refill_blocks);
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::BLOCK_THREADS, 1)
    swap_in(const __grid_constant__ hisparse::SwapIn p) {
    using namespace hisparse;
    extern __shared__ uint4 dynamic[];
    await_last();  // this one may begin while the kernel ahead is at work
    if (static_cast<int>(blockIdx.y) >= p.rows) {  // behind the blocks of the rows
        const int batch_row = static_cast<int>((blockIdx.y - p.rows) * RANKS + cluster_rank());
        return refill_queue(p, *reinterpret_cast<Shared*>(dynamic), batch_row);
    }
    // Nothing here waits for anything. The seat comes first: all else depends on it.
    const int row = blockIdx.y;
    int4 head;
    load_now(head, reinterpret_cast<const int4*>(p.opened + row));
    Shared& s = *reinterpret_cast<Shared*>(settled(dynamic));
    const Part part = {RANKS == 1 ? 0 : cluster_rank(), p.block_entries};
    const int first = part.place(threadIdx.x), step = BLOCK_THREADS * part.ranks;
    constexpr bool ahead = Part::ranks >= SCATTERED;
    const bool resolves = threadIdx.x < part.entries, copies = threadIdx.x >= CONTROL_THREADS;  // of whole warps
    Entry entry[ENTRIES];
    read_tokens(p, row, first, step, entry);
    if (copies) {
        fetch_tables(p, s, row);
        clear_bits(p, s, part);
    } else if (threadIdx.x == CONTROL_THREADS - 1) {  // in a warp that has the least to do
        s.misses = s.duplicates = 0;
        close_gate(&s.found, min(part.entries, static_cast<u32>(BLOCK_THREADS)));
        close_gate(&s.prepared, COPY_THREADS);
        close_gate(&s.entered, COPY_THREADS);
        close_gate(&s.chosen, CONTROL_THREADS);
        if (part.ranks > 1) {
            close_gate(&s.codes_arrived, ahead ? 1 + part.entries / 32 : 1);
            close_gate(&s.readers_done, part.ranks - 1);
            close_gate(&s.scans_done, part.ranks - 1);
            expect_bytes(&s.codes_arrived, (part.ranks - 1) * (part.entries * 2 + part.entries / 32 * 4));  // codes, counts
            publish_gates();
        }
    }
    if (part.ranks > 1) cluster_arrive();  // peers may write to this block
    const Seat at = seat_of(p, head);
    if (at.hot <= 0) {
        if (at.hot < 0) write_padding(p, row, part);
        else resolve_resident(p, at, row, part);
        await_words();
        if (part.ranks > 1) cluster_wait();
        return;
    }
    settle_tokens(at, entry);
    QueuedSlots queued;
    if (resolves) read_pages(p, at, entry);
    if (copies) await_words();
    else if (Part::ranks >= QUEUE_FIRST) queued.load(p.state, at, s);
    if (part.ranks > 1) cluster_wait();  // the wait empties L1: nothing is in it yet
    __syncthreads();

    if (resolves) {
        read_slots(p, s, first, step, entry);
        read_host_pages(p, at, first, step, entry);
    }
    Tail tail;
    if (copies) {
        tail.load(p, at);
        prepare_misses(p, s, row, part);
    } else if (ahead && Part::ranks < QUEUE_FIRST) {
        queued.load(p.state, at, s);
    }
    if (resolves) resolve_managed(p, at, s, row, part, entry);
    if (copies) tail.keep(p, at, s);
    const bool settled = is_settled(p, entry);
    if (!ahead) {
        await_words();
        __syncthreads();
    } else if (copies) {
        await_words();
        open_gate(&s.prepared);
        await_gate(&s.found);
    } else {
        queued.load_stamps(s, p.state.stamp, p.state.slot_token);
    }
    let_next_begin();  // a next kernel that is launched early: in a decode step, swap_in for the rows one deeper
    const u32 misses = copies ? s.misses : 0;
    if (misses > 0 && settled) copy_misses(p, s, part, misses);
    if (!ahead) stamp_hits(p, at, s);
    if (copies) return;
    decide(p, at, s, row, part, queued);
}

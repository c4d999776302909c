// The eviction queue of a seat: its oldest slots in LRU order. Most steps choose victims from it, not from all stamps.
//
// A queued slot carries the stamp that it had when it was queued. The order stays exact: a stamp only ever grows, so a slot
// that is not queued is evicted after all queued ones, and a queued slot that was used, evicted or made a tail slot since
// is recognised by its changed stamp and skipped. A step takes its victims from the queue's begin on and leaves the rest to
// the next step. Setting up or resizing a buffer empties its queue. A step that finds too few queued slots chooses by the
// stamps of all slots (victims.cuh).
//
//    queue_slot, queue_stamp    [QUEUE_SLOTS | QUEUE_RESERVE] of a seat: two rings
//    first ring                 read by every step, in parts of WARP_PLACES. The first part holds the begin: places before
//                               it were taken, and are recognised by their stamps
//    reserve                    the slots that follow. A step that leaves few in the first ring moves more from here, while
//                               copies are on their way
//
// The reserve is refilled with the slots of the next stamps, in slot order, found by the stamps of all slots. Slots need
// not be compared with each other: each step leaves a stamp of its own. Where the device has room, a refill block does it
// while the other blocks are at work (10 us in a block that has to wait for its instructions); elsewhere the block that
// moves slots does it. Stamps that other blocks change meanwhile do no harm: a slot used or evicted meanwhile is
// recognised by its changed stamp.
//
// Rejected: filling the first ring anew when it is used up (a sort, in every block: batch 1, 102 misses, each fifth step
// 6 us); refilling by all stamps every third step (4 us); a queue in slot order, from which victims are chosen by classes
// of stamps (no faster than from all slots).
#pragma once

#include "misses.cuh"
#include "victims.cuh"

namespace hisparse {

// The last control threads hold the first ring, two neighbours each: with many blocks, these threads have no entries.
constexpr u32 QUEUE_THREADS = QUEUE_SLOTS / 2;
constexpr u32 QUEUE_WARPS = QUEUE_THREADS / 32;
constexpr u32 WARP_PLACES = QUEUE_SLOTS / QUEUE_WARPS;
static_assert(QUEUE_THREADS <= CONTROL_THREADS && QUEUE_THREADS % 32 == 0, "whole control warps");

constexpr u32 FEW = QUEUE_SLOTS / 2;                    // left in the first ring: more are moved from the reserve
constexpr u32 FEW_IN_RESERVE = QUEUE_RESERVE / 8;       // left in the reserve: it is refilled, if no refill block does it
constexpr u32 MANY_IN_RESERVE = QUEUE_RESERVE / 4 * 3;  // a refill block adds none
constexpr u32 ROUNDS = 16;           // of four stamps each, in a refill at most
constexpr u32 REFILL_BLOCK_ROUNDS = 1;  // in a refill block, while one step cannot use up what is queued
constexpr i32 NOT_LOADED = -2;  // in place of a token
constexpr i32 NO_STAMP = -2;    // no slot has it

struct QueuedSlots {
    u32 slots = ~0u;  // two of 16 bits
    i32 then[2] = {-1, -1}, stamp[2] = {MUST_STAY, MUST_STAY};  // when listed, and now
    i32 old[2] = {NOT_LOADED, NOT_LOADED};                      // tokens that the slots hold
    i32 begin = 0, count = 0;                                   // of the first ring

    __device__ __forceinline__ static u32 number() { return threadIdx.x - (CONTROL_THREADS - QUEUE_THREADS); }
    __device__ __forceinline__ static bool has_some() { return number() < QUEUE_THREADS; }
    __device__ __forceinline__ u32 slot(int i) const { return i == 0 ? slots & 0xFFFF : slots >> 16; }
    // Number in the queue of the first of the two.
    __device__ __forceinline__ u32 turn() const { return (2 * number() - begin) % QUEUE_SLOTS; }

    // Loads queued slots and their stamps when queued; then (load_stamps) their present stamps and tokens.
    __device__ __forceinline__ void load(const State& state, const Seat& at, Shared& s) {
        if (!has_some()) return;
        const u32 seat = static_cast<u32>(at.seat), place = seat * (QUEUE_RING / 2) + number();
        const i32* const queue = &state.eviction_queue[seat].begin;
        const int2 begin_count = *reinterpret_cast<const int2*>(queue);
        if (number() < 2) fetch_words<4>(&s.queue.begin + 4 * number(), queue + 4 * number());
        slots = reinterpret_cast<const u32*>(state.queue_slot)[place];
        const int2 stamps = reinterpret_cast<const int2*>(state.queue_stamp)[place];
        begin = begin_count.x, count = begin_count.y;
        then[0] = stamps.x, then[1] = stamps.y;
    }
    __device__ __forceinline__ void load_stamps(const Shared& s, const i32* stamps, const i32* tokens) {
        if (!has_some()) return;
        const i32 from = static_cast<i32>(turn());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const i32 device_row = from + i < count ? slot_row(s, slot(i)) : -1;
            if (device_row < 0) continue;
            stamp[i] = stamps[device_row];
            old[i] = tokens[device_row];
        }
    }
    // Drops slots whose stamps have changed. Waits for the stamps.
    __device__ __forceinline__ void drop_used() {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (stamp[i] != then[i]) stamp[i] = MUST_STAY;
    }
};

// Queued slots that may be evicted. All control warps know the counts after a barrier.
struct Candidates {
    u32 eligible[2];  // lanes whose first, and second, slot may be evicted
    u32 place;     // of this warp in the queue

    // Slots with unchanged stamps, except those in use.
    __device__ __forceinline__ Candidates(Shared& s, const QueuedSlots& queued) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 slot = queued.slot(i);
            const bool stays = queued.stamp[i] == MUST_STAY || s.stay[slot / 32] >> slot % 32 & 1;
            eligible[i] = __ballot_sync(0xFFFFFFFF, !stays);
        }
        place = queued.turn() / WARP_PLACES;
        if (threadIdx.x % 32 == 0 && QueuedSlots::has_some())
            s.warp_counts[place] = __popc(eligible[0]) + __popc(eligible[1]);
    }
};

// Takes the first `misses.total` candidates, if there are so many; this block's misses get their victims. Returns how many
// candidates there are; s.taken is how many places of the queue are done with, if any are taken.
__device__ __forceinline__ u32 take_from_queue(Shared& s, const QueuedSlots& queued, const Candidates& candidates,
                                               const Misses& misses) {
    const u32 lane = threadIdx.x % 32, earlier = (1u << lane) - 1;
    const u32 count = lane < QUEUE_WARPS ? s.warp_counts[lane] : 0;
    const u32 all = __reduce_add_sync(0xFFFFFFFF, count);
    if (all < misses.total || !QueuedSlots::has_some()) return all;
    u32 rank = __reduce_add_sync(0xFFFFFFFF, lane < candidates.place ? count : 0);
    rank += __popc(candidates.eligible[0] & earlier) + __popc(candidates.eligible[1] & earlier);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (!(candidates.eligible[i] >> lane & 1)) continue;
        if (rank - misses.before < misses.own) {
            s.miss[s.order[rank - misses.before]].victim = static_cast<u16>(queued.slot(i));
            s.old[rank - misses.before] = queued.old[i];
        }
        if (++rank == misses.total) s.taken = queued.turn() + i + 1;
    }
    return all;
}

// Ages of slots: stamps counted from the queue's stamp on, 16 bits each, in shared memory. A refill block holds all slots
// there at once. Slots are divided over THREADS threads in slot order; each thread reads only its own.
constexpr u32 INELIGIBLE = 0xFFFF;  // in place of an age: queued, in use, or used in this step or the last one
constexpr u32 FAR = 0xFFFE;         // this age or more: told apart when the queue's stamp has advanced

template <u32 THREADS> struct Ages {
    // Quads of four slots that a thread holds at a time.
    static constexpr u32 TOGETHER = THREADS == BLOCK_THREADS ? BLOCK_QUADS : STAGED_SLOTS / 4 / THREADS;
    static constexpr u32 LOADS = 4;  // of stamps, in flight

    const EvictionQueue& queue;
    u32 begin, own;  // the thread's first quad, and how many it has
    u32 held = ~0u;  // of them, the first one held

    __device__ __forceinline__ Ages(const Seat& at, const EvictionQueue& queue) : queue(queue) {
        const u32 quads = (at.limit + 3) / 4, each = quads / THREADS, more = quads % THREADS;
        begin = threadIdx.x * each + min(threadIdx.x, more);
        own = each + (threadIdx.x < more);
    }

    // How often all threads together fill the room that there is.
    __device__ __forceinline__ static u32 stagings(const Seat& at) {
        return ((at.limit + 3) / 4 - 1) / (TOGETHER * THREADS) + 1;
    }

    // Calls `visit(slot, ages)` for four slots at a time, in order.
    template <class Visit>
    __device__ __forceinline__ void for_each(Shared& s, const Seat& at, const i32* stamp, Visit visit) {
#pragma unroll 1
        for (u32 turn = 0; turn < own; turn += TOGETHER) {
            const u32 quads = min(own - turn, TOGETHER);
            if (turn != held) stage(s, at, stamp, begin + turn, quads);
            held = turn;
#pragma unroll 1
            for (u32 j = 0; j < quads; ++j) visit((begin + turn + j) * 4, place(s, j));
        }
    }

   private:
    __device__ __forceinline__ static uint2& place(Shared& s, u32 j) { return s.ages[j * THREADS + threadIdx.x]; }

    __device__ __forceinline__ void stage(Shared& s, const Seat& at, const i32* stamp, u32 from, u32 quads) const {
#pragma unroll 1
        for (u32 first = 0; first < quads; first += LOADS) {
            int4 quad[LOADS];
#pragma unroll
            for (u32 j = 0; j < LOADS; ++j) {
                quad[j] = {MUST_STAY, MUST_STAY, MUST_STAY, MUST_STAY};
                const i32 device_row = first + j < quads ? slot_row(s, (from + first + j) * 4) : -1;
                if (device_row >= 0) quad[j] = *reinterpret_cast<const int4*>(stamp + device_row);
            }
#pragma unroll
            for (u32 j = 0; j < LOADS; ++j) {
                if (first + j >= quads) break;
                const u32 slot = (from + first + j) * 4, stays = s.stay[slot / 32] >> slot % 32;
                place(s, first + j) = {
                    age_of(at, quad[j].x, slot, stays) | age_of(at, quad[j].y, slot + 1, stays >> 1) << 16,
                    age_of(at, quad[j].z, slot + 2, stays >> 2) | age_of(at, quad[j].w, slot + 3, stays >> 3) << 16,
                };
            }
        }
    }

    __device__ __forceinline__ u32 age_of(const Seat& at, i32 stamp, u32 slot, u32 stays) const {
        const i32 age = stamp - queue.stamp;
        const bool queued = age < 0 || (age == 0 && static_cast<i32>(slot) <= queue.slot);
        return stays & 1 || queued || stamp >= at.now - 1 ? INELIGIBLE : min(static_cast<u32>(age), FAR);
    }
};
static_assert(Ages<CONTROL_THREADS>::TOGETHER * CONTROL_THREADS * 4 == STAGED_SLOTS, "whole turns of all threads");

// Which of four ages from `from` on each of four slots has, a byte each; 4: none of them.
__device__ __forceinline__ u32 classes_of(const uint2& ages, u32 from) {
    const u32 pair = from << 16 | from, none = 0x00040004;
    return __byte_perm(__vminu2(__vsub2(ages.x, pair), none), __vminu2(__vsub2(ages.y, pair), none), 0x6420);
}

// Steps from `from`, where no slot has one of four ages, to the next age that a slot has. By all of THREADS.
template <u32 THREADS>
__device__ u32 steps_to_next(const Seat& at, Shared& s, const i32* stamp, Ages<THREADS>& ages, u32 from) {
    u32 least = MUST_STAY;
    ages.for_each(s, at, stamp, [&](u32, const uint2& quad) {
        const u32 of[4] = {quad.x & 0xFFFF, quad.x >> 16, quad.y & 0xFFFF, quad.y >> 16};
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (of[i] != INELIGIBLE && of[i] - from >= 4) least = min(least, of[i] - from);
    });
    least = __reduce_min_sync(0xFFFFFFFF, least);
    if (threadIdx.x % 32 == 0) s.warp_counts[threadIdx.x / 32] = least;
    sync_first<THREADS>();
    return __reduce_min_sync(0xFFFFFFFF, s.warp_counts[threadIdx.x % 32 < THREADS / 32 ? threadIdx.x % 32 : 0]);
}

// Refills the reserve with the slots of the next stamps, in stamp order. Slots of this step and the last one are left out:
// there are many, and their eviction is far away. By the first THREADS of a block, the only one that refills this queue.
// The queue is in s.queue and has room for one slot at least. Returns how many slots were added.
template <u32 THREADS>
__device__ __forceinline__ u32 refill_reserve(const State& state, const Seat& at, Shared& s) {
    const EvictionQueue queue = s.queue;
    const u32 seat = static_cast<u32>(at.seat), ring = seat * QUEUE_RING + QUEUE_SLOTS;
    const u32 end = static_cast<u32>(queue.reserve_end);
    const u32 room = QUEUE_RESERVE - (end - static_cast<u32>(queue.reserve_begin));
    constexpr bool refill_block = THREADS == BLOCK_THREADS;
    const u32 stagings = refill_block ? 1 : Ages<THREADS>::stagings(at), held = QUEUE_RESERVE - room;
    // Ages that do not fit shared memory are read twice a round: fewer rounds then. A refill block should not delay the
    // end of the kernel: it does one round, and more in the next step. It does more rounds while the queue is short:
    // where steps missed little, a stamp has few slots.
    const u32 rounds = refill_block ? REFILL_BLOCK_ROUNDS : stagings == 1 ? ROUNDS : max(4 / stagings, 1);
    const auto goes_on = [&](u32 round, u32 added) {
        return round < rounds || (refill_block && round < ROUNDS && held + added < QUEUE_SLOTS);
    };
    Ages<THREADS> ages(at, queue);
    u32 added = 0, from = 0;
    const u32 until = static_cast<u32>(max(at.now - 1 - queue.stamp, 0));
    if (threadIdx.x == 0) s.last = 0;
#pragma unroll 1
    for (u32 round = 0; goes_on(round, added) && added < room && from < min(until, FAR - 4); ++round) {
        u32 counts = 0;
        ages.for_each(s, at, state.stamp, [&](u32, const uint2& quad) {
            const u32 classes = classes_of(quad, from);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) counts += shift_left(1, (classes >> 8 * i & 0xFF) * 8);
        });
        uint2 all, before;
        sum_classes<THREADS>(s, counts, round, all, before);
        const u32 in_first = class_of(all, 0), in_two = in_first + class_of(all, 1);
        const u32 in_three = in_two + class_of(all, 2);
        const u32 in_all = in_three + class_of(all, 3), even = counts & 0x00FF00FF, odd = counts >> 8 & 0x00FF00FF;
        // Numbers of the thread's next slots of each class, 16 bits each.
        u32 next_even = before.x + warp_inclusive_sum(even) - even + (in_two << 16);
        u32 next_odd = before.y + warp_inclusive_sum(odd) - odd + (in_first | in_three << 16);
        if (stagings > 1) {  // ages are read twice, and slots used in between leave gaps: no slot there
            for (u32 number = added + threadIdx.x; number < min(added + in_all, room); number += THREADS) {
                state.queue_slot[ring + (end + number) % QUEUE_RESERVE] = 0;
                state.queue_stamp[ring + (end + number) % QUEUE_RESERVE] = NO_STAMP;
            }
            sync_first<THREADS>();
        }
        ages.for_each(s, at, state.stamp, [&](u32 slot, const uint2& quad) {
            const u32 classes = classes_of(quad, from);
#pragma unroll 1
            for (u32 left = ~classes & 0x04040404; left != 0; left &= left - 1) {
                const u32 i = __ffs(left) / 8, which = classes >> 8 * i & 0xFF, bits = which / 2 * 16, one = 1 << bits;
                const u32 number = added + ((which & 1 ? next_odd : next_even) >> bits & 0xFFFF);
                next_odd += which & 1 ? one : 0;
                next_even += which & 1 ? 0 : one;
                if (number >= room) continue;
                const u32 place = ring + (end + number) % QUEUE_RESERVE;
                const i32 its = queue.stamp + static_cast<i32>(from + which);
                state.queue_slot[place] = static_cast<u16>(slot + i);
                state.queue_stamp[place] = its;
                if (number + 1 == room || stagings > 1) atomicMax(&s.last, static_cast<u64>(its + 2) << 32 | (slot + i));
            }
        });
        added += in_all;
        const u32 steps = in_all > 0 ? 4 : steps_to_next(at, s, state.stamp, ages, from);
        from += min(steps, until - from);
    }
    sync_first<THREADS>();
    if (threadIdx.x == 0) {
        int2 last = {queue.stamp + static_cast<i32>(from), -1};
        if (added >= room) last = {static_cast<i32>(s.last >> 32) - 2, static_cast<i32>(s.last & 0xFFFF)};
        if (from == 0 || (added >= room && s.last == 0)) last = {queue.stamp, queue.slot};  // none was added
        EvictionQueue& stored = state.eviction_queue[seat];
        stored.stamp = last.x, stored.slot = last.y;
        if (added >= room || from >= until) stored.refills_done = queue.refills_wanted;  // else the next step goes on
        store_release(&stored.reserve_end, static_cast<i32>(end + min(added, room)));
    }
    return min(added, room);
}

// Leaves the queue to the next step. By the control warps of one block, when all other blocks have read it. `from_queue`:
// this step's victims came from it. `refills`: this block refills the reserve, since no refill block does.
__device__ __forceinline__ void advance_queue(const State& state, const Seat& at, Shared& s, u32 misses, bool from_queue,
                                              bool refills) {
    constexpr u32 WRITER = CONTROL_THREADS - 1;
    EvictionQueue& queue = state.eviction_queue[at.seat];
    u32 begin = static_cast<u32>(s.queue.begin), left = 0;
    if (s.queue.count < 0) begin = 0;
    if (from_queue) {
        const u32 taken = s.taken & ~(WARP_PLACES - 1);
        begin = (begin + taken) % QUEUE_SLOTS;
        left = static_cast<u32>(s.queue.count) - taken;
    }
    if (left < FEW || left < 2 * misses) {
        const u32 taken = static_cast<u32>(s.queue.reserve_begin);
        u32 end;
        if (refills) {
            end = static_cast<u32>(s.queue.reserve_end);
            sync_named(CONTROL, CONTROL_THREADS);  // ages take the shared memory of the top-k: all are done with it
            if (end - taken < max(FEW_IN_RESERVE, QUEUE_SLOTS - left)) end += refill_reserve<CONTROL_THREADS>(state, at, s);
        } else {
            if (threadIdx.x == WRITER) s.queue.reserve_end = load_acquire(&queue.reserve_end);
            sync_named(CONTROL, CONTROL_THREADS);
            end = static_cast<u32>(s.queue.reserve_end);
        }
        const u32 moved = min(QUEUE_SLOTS - left, end - taken), ring = static_cast<u32>(at.seat) * QUEUE_RING;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < moved; i += CONTROL_THREADS) {
            const u32 from = ring + QUEUE_SLOTS + (taken + i) % QUEUE_RESERVE;
            const u32 to = ring + (begin + left + i) % QUEUE_SLOTS;
            state.queue_slot[to] = state.queue_slot[from];
            state.queue_stamp[to] = state.queue_stamp[from];
        }
        left += moved;
        sync_named(CONTROL, CONTROL_THREADS);  // all have been read: their places in the reserve are free
        if (threadIdx.x == WRITER) {
            queue.refills_wanted = s.queue.refills_wanted + 1;
            store_release(&queue.reserve_begin, static_cast<i32>(taken + moved));
        }
    }
    if (threadIdx.x == WRITER) queue.begin = static_cast<i32>(begin), queue.count = static_cast<i32>(left);
}

// A refill block, of one batch row: refills the reserve if it has room and a refill was wanted since the last one. Without
// misses it ends at once. Not inlined: its instructions would lie between those of the other blocks.
__device__ __noinline__ void refill_queue(const SwapIn& p, Shared& s, int row) {
    let_next_begin();
    if (row >= p.rows) return;
    const OpenedRow& opened = p.opened[row];
    const Seat at = seat_of(p, reinterpret_cast<const int4&>(opened));
    if (at.hot <= 0) return;
    i32 tail = -1;  // loaded together with the rest
    if (threadIdx.x < p.state.tail_slots) tail = p.state.tail[at.seat * p.state.tail_slots + threadIdx.x];
    if (threadIdx.x == BLOCK_THREADS - 1) {  // the row's blocks may write it meanwhile: read once
        EvictionQueue queue = p.state.eviction_queue[at.seat];
        queue.reserve_begin = load_acquire(&p.state.eviction_queue[at.seat].reserve_begin);
        s.queue = queue;
    }
    for (u32 i = threadIdx.x; i < p.slots_limit / PAGE_TOKENS; i += BLOCK_THREADS) s.chunk[i] = opened.chunk[i];
    for (u32 i = threadIdx.x; i <= at.limit / 32; i += BLOCK_THREADS) s.stay[i] = 0;
    __syncthreads();
    const u32 held = static_cast<u32>(s.queue.reserve_end) - static_cast<u32>(s.queue.reserve_begin);
    if (held >= MANY_IN_RESERVE || (s.queue.refills_done == s.queue.refills_wanted && s.queue.stamp >= 0)) return;
    if (threadIdx.x < p.state.tail_slots) {
        const u32 slot = tail < 0 ? at.hot + threadIdx.x : tail;
        atomicOr(&s.stay[slot / 32], 1u << slot % 32);
    }
    if (threadIdx.x == TAIL_SLOTS_MAX && at.limit % 32 > 0) atomicOr(&s.stay[at.limit / 32], ~0u << at.limit % 32);
    __syncthreads();
    refill_reserve<BLOCK_THREADS>(p.state, at, s);
}

}  // namespace hisparse

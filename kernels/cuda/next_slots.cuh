// Which slots go, by a list of those that go next: what most steps need instead of the stamps of all slots.
//
// A list holds the NEXT_SLOTS oldest slots of a seat in the order in which they go, with the stamps that they had. It
// stays exact while it lasts: a slot only ever gets a newer stamp, so whoever is not in the list goes after all who are,
// and who has been used, evicted or made a tail slot since then shows by a changed stamp. Resizing a buffer, or setting it
// up, empties the list. A step of m misses uses m slots up; with m of 20 a list lasts for some 25 steps. The step that
// finds too few lists anew, by the stamps of all.
//
// Rejected: a list in slot order, from which a step's victims are chosen by classes of stamps (no faster than from all
// slots); all lists sorted by comparing every key with every other (batch 1, 102 misses, a list for five steps: 7.8 us a
// step, where counting gives 6.9).
#pragma once

#include "victims.cuh"

namespace hisparse {

constexpr u32 NEXT_THREADS = NEXT_SLOTS / 2;  // the first ones of a block, each with two neighbours of the list
static_assert(NEXT_THREADS <= CONTROL_THREADS && NEXT_THREADS % 32 == 0, "whole control warps");
static_assert(CONTEXT_MAX_TOKENS < 1 << 22 && NEXT_SLOTS <= 1 << 9, "a stamp and a place are one word");

struct NextSlots {
    u32 slots = ~0u;  // two of 16 bits
    i32 then[2] = {-1, -1}, stamp[2] = {MUST_STAY, MUST_STAY};  // when listed, and now

    __device__ __forceinline__ static u32 place(const Seat& at) {
        return static_cast<u32>(at.seat) * NEXT_THREADS + threadIdx.x;
    }
    __device__ __forceinline__ u32 slot(int i) const { return i == 0 ? slots & 0xFFFF : slots >> 16; }

    // What the list says; what the stamps of its slots are now.
    __device__ __forceinline__ void load(const State& state, const Seat& at) {
        if (threadIdx.x >= NEXT_THREADS) return;
        slots = reinterpret_cast<const u32*>(state.next_slot)[place(at)];
        const int2 stamps = reinterpret_cast<const int2*>(state.next_stamp)[place(at)];
        then[0] = stamps.x, then[1] = stamps.y;
    }
    __device__ __forceinline__ void load_stamps(const Shared& s, const i32* stamps) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            stamp[i] = MUST_STAY;
            if (slot(i) == SLOT_ABSENT) continue;
            const i32 device_row = slot_row(s, slot(i));
            if (device_row >= 0) stamp[i] = stamps[device_row];
        }
    }
    // Leaves those in the list whose turn it still is. Waits for the stamps.
    __device__ __forceinline__ void drop_used() {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (stamp[i] != then[i]) stamp[i] = MUST_STAY;
    }
    __device__ __forceinline__ void store(const State& state, const Seat& at) const {
        if (threadIdx.x >= NEXT_THREADS) return;
        reinterpret_cast<u32*>(state.next_slot)[place(at)] = slots;
        reinterpret_cast<int2*>(state.next_stamp)[place(at)] = {stamp[0], stamp[1]};
    }
};

// The first `total` of the list that this step does not use go, if it has so many: number `before` and the `own` that
// follow to this block's misses. Returns how many it has.
__device__ __forceinline__ u32 take_next(const Shared& s, Scalars& q, const NextSlots& next, u32 total, u32 before,
                                         u32 own) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, earlier = (1u << lane) - 1;
    bool goes[2];
    u32 in_warp[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 slot = min(next.slot(i), SLOTS_MAX - 1);
        goes[i] = next.stamp[i] != MUST_STAY && !(s.stay(slot / 32) >> slot % 32 & 1);
        in_warp[i] = __ballot_sync(0xFFFFFFFF, goes[i]);
    }
    if (lane == 0) q.listed[warp] = __popc(in_warp[0]) + __popc(in_warp[1]);
    sync_named(CONTROL, CONTROL_THREADS);
    const u32 count = lane < CONTROL_WARPS ? q.listed[lane] : 0;
    const u32 all = __reduce_add_sync(0xFFFFFFFF, count);
    u32 rank = __reduce_add_sync(0xFFFFFFFF, lane < warp ? count : 0);
    if (all < total) return all;
    rank += __popc(in_warp[0] & earlier) + __popc(in_warp[1] & earlier);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (goes[i] && rank - before < own) s.victim(s.order(rank - before)) = static_cast<u16>(next.slot(i));
        rank += goes[i];
    }
    return all;
}

// The turns of two neighbours among all listed, by counting, where stamps are of few steps in a row: `since` of each, in
// steps from the oldest, is below `steps`, and 32 or more for what is not listed.
__device__ __forceinline__ void turns_by_counting(const Shared& s, const u32 (&since)[2], u32 steps, u32 (&turn)[2]) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, earlier = (1u << lane) - 1;
    u32 in_warp = 0;  // lane i: of step i
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
        const u32 first = __ballot_sync(0xFFFFFFFF, since[0] == step);
        const u32 second = __ballot_sync(0xFFFFFFFF, since[1] == step);
        const u32 before = __popc(first & earlier) + __popc(second & earlier);
        if (lane == step) in_warp = __popc(first) + __popc(second);
        if (since[0] == step) turn[0] = before;
        if (since[1] == step) turn[1] = before + (since[0] == step);
    }
    u32* const counts = s.sort_key();
    counts[warp * 32 + lane] = in_warp;
    sync_named(CONTROL, CONTROL_THREADS);
    u32 all = 0, before = 0;
#pragma unroll
    for (u32 w = 0; w < CONTROL_WARPS; ++w) {
        const u32 count = counts[w * 32 + lane];
        all += count;
        if (w < warp) before += count;
    }
    before += warp_inclusive_sum(all) - all;
#pragma unroll
    for (int i = 0; i < 2; ++i) turn[i] += __shfl_sync(0xFFFFFFFF, before, since[i]);
}
static_assert(CONTROL_THREADS <= NEXT_SLOTS, "a count per lane");

// Likewise, for any stamps: the number of lower keys.
__device__ __forceinline__ void turns_by_comparing(const Shared& s, const u32 (&key)[2], u32 (&turn)[2]) {
    if (threadIdx.x < NEXT_THREADS)
        for (int i = 0; i < 2; ++i) s.sort_key()[2 * threadIdx.x + i] = key[i];
    sync_named(CONTROL, CONTROL_THREADS);
    if (threadIdx.x >= NEXT_THREADS) return;
    const uint4* const keys = reinterpret_cast<const uint4*>(s.sort_key());
#pragma unroll 4
    for (u32 i = 0; i < NEXT_SLOTS / 4; ++i) {
        const uint4 other = keys[i];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            turn[j] += (other.x < key[j]) + (other.y < key[j]) + (other.z < key[j]) + (other.w < key[j]);
    }
}

// Lists the slots anew that go next, in every block of the request alike.
__device__ __forceinline__ void list_next(const Seat& at, const Shared& s, Scalars& q, const i32* stamp,
                                          NextSlots& next) {
    const u32 listed = choose(at, s, q, stamp, NEXT_SLOTS, 0, NEXT_SLOTS,
                              [&](u32 number, u32 slot) { s.next_slot()[number] = static_cast<u16>(slot); });
    sync_named(CONTROL, CONTROL_THREADS);
    // They came in slot order, in which those of one stamp go.
    const u32 place = 2 * threadIdx.x;
    const bool sorts = threadIdx.x < NEXT_THREADS;
    next = NextSlots();
    if (sorts && place < listed) next.slots = s.next_slot()[place] | ~0u << 16;
    if (sorts && place + 1 < listed) next.slots = next.slots & 0xFFFF | s.next_slot()[place + 1] << 16;
    next.load_stamps(s, stamp);
    const i32 oldest = __reduce_min_sync(0xFFFFFFFF, q.oldest[threadIdx.x % CONTROL_WARPS]);
    u32 since[2], key[2], turn[2] = {0, 0}, newest = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const bool held = next.stamp[i] != MUST_STAY;
        since[i] = held ? static_cast<u32>(next.stamp[i] - oldest) : ~0u;
        key[i] = held ? static_cast<u32>(next.stamp[i] + 1) << 9 | (place + i) : ~0u;
        if (held) newest = max(newest, since[i]);
    }
    newest = __reduce_max_sync(0xFFFFFFFF, newest);
    if (threadIdx.x % 32 == 0) q.listed[threadIdx.x / 32] = newest;
    sync_named(CONTROL, CONTROL_THREADS);
    newest = __reduce_max_sync(0xFFFFFFFF, q.listed[threadIdx.x % CONTROL_WARPS]);
    if (newest < 32) turns_by_counting(s, since, newest + 1, turn);
    else turns_by_comparing(s, key, turn);
    sync_named(CONTROL, CONTROL_THREADS);
    if (sorts) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (key[i] == ~0u) turn[i] = place + i;
            s.sort_key()[turn[i]] = key[i];
            s.next_slot()[turn[i]] = static_cast<u16>(next.slot(i));
        }
    }
    sync_named(CONTROL, CONTROL_THREADS);
    if (!sorts) return;
    next.slots = reinterpret_cast<const u32*>(s.next_slot())[threadIdx.x];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 sorted = s.sort_key()[place + i];
        next.stamp[i] = next.then[i] = sorted == ~0u ? MUST_STAY : static_cast<i32>(sorted >> 9) - 1;
    }
}

}  // namespace hisparse

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

// The last control threads, each with two neighbours of the list: those that have no entries where blocks are many.
constexpr u32 NEXT_THREADS = NEXT_SLOTS / 2;
static_assert(NEXT_THREADS <= CONTROL_THREADS && NEXT_THREADS % 32 == 0, "whole control warps");
static_assert(CONTEXT_MAX_TOKENS < 1 << 22 && NEXT_SLOTS <= 1 << 9, "a stamp and a place are one word");

constexpr i32 NOT_LOADED = -2;  // in place of a token

struct NextSlots {
    u32 slots = ~0u;  // two of 16 bits
    i32 then[2] = {-1, -1}, stamp[2] = {MUST_STAY, MUST_STAY};  // when listed, and now
    i32 old[2] = {NOT_LOADED, NOT_LOADED};                      // tokens that the slots hold

    __device__ __forceinline__ static u32 number() { return threadIdx.x - (CONTROL_THREADS - NEXT_THREADS); }
    __device__ __forceinline__ static bool has_some() { return number() < NEXT_THREADS; }
    __device__ __forceinline__ static u32 place(const Seat& at) {
        return static_cast<u32>(at.seat) * NEXT_THREADS + number();
    }
    __device__ __forceinline__ u32 slot(int i) const { return i == 0 ? slots & 0xFFFF : slots >> 16; }

    // What the list says; what the stamps of its slots are now.
    __device__ __forceinline__ void load(const State& state, const Seat& at) {
        if (!has_some()) return;
        slots = reinterpret_cast<const u32*>(state.next_slot)[place(at)];
        const int2 stamps = reinterpret_cast<const int2*>(state.next_stamp)[place(at)];
        then[0] = stamps.x, then[1] = stamps.y;
    }
    __device__ __forceinline__ void load_stamps(const Shared& s, const i32* stamps, const i32* tokens) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            stamp[i] = MUST_STAY;
            if (slot(i) == SLOT_ABSENT) continue;
            const i32 device_row = slot_row(s, slot(i));
            if (device_row < 0) continue;
            stamp[i] = stamps[device_row];
            if (tokens != nullptr) old[i] = tokens[device_row];
        }
    }
    __device__ __forceinline__ void mark(Shared& s) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            set_bits_if(slot(i) != SLOT_ABSENT, &s.next[slot(i) % LISTED_SLOTS / 32], 1u << slot(i) % 32);
    }
    // Leaves those in the list whose turn it still is. Waits for the stamps.
    __device__ __forceinline__ void drop_used() {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (stamp[i] != then[i]) stamp[i] = MUST_STAY;
    }
    __device__ __forceinline__ void store(const State& state, const Seat& at) const {
        if (!has_some()) return;
        reinterpret_cast<u32*>(state.next_slot)[place(at)] = slots;
        reinterpret_cast<int2*>(state.next_stamp)[place(at)] = {stamp[0], stamp[1]};
    }
};

// The first `total` of the list that this step does not use go, if it has so many: number `before` and the `own` that
// follow to this block's misses. Returns how many it has.
__device__ __forceinline__ u32 take_next(Shared& s, const NextSlots& next, u32 total, u32 before, u32 own) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, earlier = (1u << lane) - 1;
    bool goes[2];
    u32 in_warp[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 slot = min(next.slot(i), SLOTS_MAX - 1);
        goes[i] = next.stamp[i] != MUST_STAY && !(s.stay[slot / 32] >> slot % 32 & 1);
        in_warp[i] = __ballot_sync(0xFFFFFFFF, goes[i]);
    }
    if (lane == 0) s.listed[warp] = __popc(in_warp[0]) + __popc(in_warp[1]);
    sync_named(CONTROL, CONTROL_THREADS);
    const u32 count = lane < CONTROL_WARPS ? s.listed[lane] : 0;
    const u32 all = __reduce_add_sync(0xFFFFFFFF, count);
    u32 rank = __reduce_add_sync(0xFFFFFFFF, lane < warp ? count : 0);
    if (all < total) return all;
    rank += __popc(in_warp[0] & earlier) + __popc(in_warp[1] & earlier);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (goes[i] && rank - before < own) {
            s.miss[s.order[rank - before]].victim = static_cast<u16>(next.slot(i));
            s.old[rank - before] = next.old[i];
        }
        rank += goes[i];
    }
    return all;
}

// The turns of two neighbours among all listed, by counting, where stamps are of fewer than 32 steps: `since` of each, in
// steps from the oldest, is 32 or more for what is not listed.
__device__ __forceinline__ void turns_by_counting(Shared& s, const u32 (&since)[2], u32 (&turn)[2]) {
    constexpr u32 WARPS = NEXT_THREADS / 32;
    const u32 warp = NextSlots::number() / 32, lane = threadIdx.x % 32, earlier = (1u << lane) - 1;
    u32* const lanes = s.sort_key;  // [warps, 2, 32]: which lanes' first, and second, slots are of a step
    if (NextSlots::has_some()) {
        u32 *const first = lanes + warp * 64, *const second = first + 32;
        first[lane] = second[lane] = 0;
        __syncwarp();
        set_bits_if(since[0] < 32, first + since[0], 1u << lane);
        set_bits_if(since[1] < 32, second + since[1], 1u << lane);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (since[i] < 32)
                turn[i] = __popc(first[since[i]] & earlier) + __popc(second[since[i]] & earlier) +
                          (i == 1 && since[0] == since[1]);
        const u32 in_warp = __popc(first[lane]) + __popc(second[lane]);
        __syncwarp();
        first[lane] = in_warp;
    }
    sync_named(CONTROL, CONTROL_THREADS);
    u32 all = 0, before = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
        const u32 count = lanes[w * 64 + lane];
        all += count;
        if (w < warp) before += count;
    }
    before += warp_inclusive_sum(all) - all;
#pragma unroll
    for (int i = 0; i < 2; ++i) turn[i] += __shfl_sync(0xFFFFFFFF, before, since[i]);
}
static_assert(NEXT_THREADS * 2 <= NEXT_SLOTS, "two words per warp and step");

// Likewise, for any stamps: the number of lower keys.
__device__ __forceinline__ void turns_by_comparing(Shared& s, const u32 (&key)[2], u32 (&turn)[2]) {
    if (NextSlots::has_some())
        for (int i = 0; i < 2; ++i) s.sort_key[2 * NextSlots::number() + i] = key[i];
    sync_named(CONTROL, CONTROL_THREADS);
    if (!NextSlots::has_some()) return;
    const uint4* const keys = reinterpret_cast<const uint4*>(s.sort_key);
#pragma unroll 4
    for (u32 i = 0; i < NEXT_SLOTS / 4; ++i) {
        const uint4 other = keys[i];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            turn[j] += (other.x < key[j]) + (other.y < key[j]) + (other.z < key[j]) + (other.w < key[j]);
    }
}

// Lists the slots anew that go next, in every block of the request alike.
__device__ __forceinline__ void list_next(const Seat& at, Shared& s, const i32* stamp, NextSlots& next) {
    const u32 listed = choose(at, s, stamp, NEXT_SLOTS, 0, NEXT_SLOTS,
                              [&](u32 number, u32 slot) { s.next_slot[number] = static_cast<u16>(slot); });
    sync_named(CONTROL, CONTROL_THREADS);
    // They came in slot order, in which those of one stamp go.
    const u32 place = 2 * NextSlots::number();
    const bool sorts = NextSlots::has_some();
    next = NextSlots();
    if (sorts && place < listed) next.slots = s.next_slot[place] | ~0u << 16;
    if (sorts && place + 1 < listed) next.slots = next.slots & 0xFFFF | s.next_slot[place + 1] << 16;
    next.load_stamps(s, stamp, nullptr);
    const i32 oldest = __reduce_min_sync(0xFFFFFFFF, s.oldest[threadIdx.x % CONTROL_WARPS]);
    u32 since[2], key[2], turn[2] = {0, 0}, newest = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const bool held = next.stamp[i] != MUST_STAY;
        since[i] = held ? static_cast<u32>(next.stamp[i] - oldest) : ~0u;
        key[i] = held ? static_cast<u32>(next.stamp[i] + 1) << 9 | (place + i) : ~0u;
        if (held) newest = max(newest, since[i]);
    }
    newest = __reduce_max_sync(0xFFFFFFFF, newest);
    if (threadIdx.x % 32 == 0) s.listed[threadIdx.x / 32] = newest;
    sync_named(CONTROL, CONTROL_THREADS);
    newest = __reduce_max_sync(0xFFFFFFFF, s.listed[threadIdx.x % CONTROL_WARPS]);
    if (newest < 32) turns_by_counting(s, since, turn);
    else turns_by_comparing(s, key, turn);
    sync_named(CONTROL, CONTROL_THREADS);
    if (sorts) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (key[i] == ~0u) turn[i] = place + i;
            s.sort_key[turn[i]] = key[i];
            s.next_slot[turn[i]] = static_cast<u16>(next.slot(i));
        }
    }
    sync_named(CONTROL, CONTROL_THREADS);
    if (!sorts) return;
    next.slots = reinterpret_cast<const u32*>(s.next_slot)[NextSlots::number()];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 sorted = s.sort_key[place + i];
        next.stamp[i] = next.then[i] = sorted == ~0u ? MUST_STAY : static_cast<i32>(sorted >> 9) - 1;
    }
}

}  // namespace hisparse

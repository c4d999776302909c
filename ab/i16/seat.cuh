// seat: the tables of one managed hot buffer, set up or resized. Contract: kernels/seat.py.
//
// Two kernels in a row. Each block of change_slots first checks by itself whether the caller's sizes agree with the device,
// from entries that the kernel does not change, and then changes its slots and pages. close_change checks again, counts the
// tripwire, and changes the entries that were checked.
#pragma once

#include "memory.cuh"

namespace hisparse {

constexpr int SEAT_WARP = 32;
constexpr u32 EVERY_LANE = 0xFFFFFFFF;

__device__ __forceinline__ const i32* chunks_of(const SeatChange& p) {
    return p.state.chunk_table + p.seat * static_cast<i64>(p.state.max_chunks);
}
__device__ __forceinline__ const i32* pages_of(const SeatChange& p) {
    return p.state.index_table + p.seat * static_cast<i64>(p.state.max_pages);
}
__device__ __forceinline__ i64 row_of(const i32* chunks, i32 slot) {
    return static_cast<i64>(chunks[slot / PAGE_TOKENS]) * PAGE_TOKENS + slot % PAGE_TOKENS;
}
__device__ __forceinline__ u32 slot_of_token(const SeatChange& p, i32 token) {
    const i32 slot = token - p.first_token;
    return 0 <= slot && slot < p.tokens ? static_cast<u32>(slot) : SLOT_ABSENT;
}

// Whether all chunks, and all pages of the tokens that the buffer begins with, are granted. Same answer in every thread.
__device__ __forceinline__ bool is_granted(const SeatChange& p) {
    bool granted = true;
    for (i32 i = threadIdx.x; i < p.chunks; i += SEAT_THREADS) granted &= chunks_of(p)[i] >= 0;
    const i32 first = p.first_token / PAGE_TOKENS, held = (p.tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
    for (i32 i = threadIdx.x; i < held; i += SEAT_THREADS) granted &= pages_of(p)[first + i] >= 0;
    return __syncthreads_and(granted);
}
__device__ __forceinline__ bool is_sized(const SeatChange& p) {
    return p.kind == INIT || p.state.hot_slots[p.seat] == p.old_slots;
}

// Writes slot_of in all granted pages of the context: the tokens that the buffer begins with, all others absent.
__device__ void write_slot_map(const SeatChange& p, u16* slot_of) {
    const int lane = threadIdx.x % SEAT_WARP;
    const int warp = (blockIdx.x * SEAT_THREADS + threadIdx.x) / SEAT_WARP, warps = gridDim.x * SEAT_THREADS / SEAT_WARP;
    for (i32 begin = warp * SEAT_WARP; begin < p.state.max_pages; begin += warps * SEAT_WARP) {
        const i32 mine = begin + lane < p.state.max_pages ? pages_of(p)[begin + lane] : -1;
        for (u32 left = __ballot_sync(EVERY_LANE, mine >= 0); left != 0; left &= left - 1) {
            const int source = __ffs(left) - 1;
            const i64 page = __shfl_sync(EVERY_LANE, mine, source);
            const i32 token = (begin + source) * PAGE_TOKENS + 2 * lane;
            reinterpret_cast<u32*>(slot_of + page * PAGE_TOKENS)[lane] =
                slot_of_token(p, token) | slot_of_token(p, token + 1) << 16;
        }
    }
}

__device__ __forceinline__ void forget(const SeatChange& p, u16* slot_of, i32 token) {
    if (token < 0 || token / PAGE_TOKENS >= p.state.max_pages) return;
    const i64 page = pages_of(p)[token / PAGE_TOKENS];
    if (page >= 0) slot_of[page * PAGE_TOKENS + token % PAGE_TOKENS] = static_cast<u16>(SLOT_ABSENT);
}

}  // namespace hisparse

// grid: (tiles, groups)
extern "C" __global__ void __launch_bounds__(hisparse::SEAT_THREADS)
    change_slots(const __grid_constant__ hisparse::SeatChange p) {
    using namespace hisparse;
    const State& s = p.state;
    if (!is_granted(p) || !is_sized(p)) return;
    const i64 group = blockIdx.y;
    const i32* const chunks = chunks_of(p);
    u16* const slot_of = s.slot_of + group * s.key_rows;
    i32* const slot_token = s.slot_token + group * s.arena_rows;
    i32* const stamp = s.stamp + group * s.arena_rows;
    const i32 thread = blockIdx.x * SEAT_THREADS + threadIdx.x;
    for (i32 slot = p.first_slot + thread; slot < p.chunks * PAGE_TOKENS; slot += gridDim.x * SEAT_THREADS) {
        const i64 row = row_of(chunks, slot);
        if (p.kind == SHRINK) forget(p, slot_of, slot_token[row]);
        slot_token[row] = slot < p.tokens ? p.first_token + slot : -1;
        stamp[row] = slot < p.tokens ? 0 : -1;
    }
    if (thread == 0) s.eviction_queue[group * s.seats + p.seat] = {-1, -1, -1, -1, -1, -1, -1, -1};
    if (p.kind == INIT) write_slot_map(p, slot_of);
    if (p.kind == SHRINK && thread < s.tail_slots) {
        const i32 slot = s.tail[(group * s.seats + p.seat) * s.tail_slots + thread];
        if (0 <= slot && slot < p.hot_slots) stamp[row_of(chunks, slot)] = s.now[p.seat];
    }
}

// One block, behind change_slots.
extern "C" __global__ void __launch_bounds__(hisparse::SEAT_THREADS)
    close_change(const __grid_constant__ hisparse::SeatChange p) {
    using namespace hisparse;
    const State& s = p.state;
    const bool granted = is_granted(p), sized = is_sized(p);
    __syncthreads();
    if (!granted || !sized) {
        if (threadIdx.x == 0) trip(s, sized ? UNGRANTED : SEAT, 1);
        return;
    }
    if (threadIdx.x == 0) {
        s.hot_slots[p.seat] = p.hot_slots;
        if (p.kind == INIT) s.now[p.seat] = 0;
    }
    if (p.kind == GROW) return;
    for (i32 i = threadIdx.x; i < s.groups * s.tail_slots; i += SEAT_THREADS)
        s.tail[(static_cast<i64>(i / s.tail_slots) * s.seats + p.seat) * s.tail_slots + i % s.tail_slots] = -1;
}

// begin_step: open a decode step. Rules: kernels/begin_step.py.
//
// Two kernels, since `now` advances once per seat and each group's tail rotates by itself. open_rows decides which rows
// take part and where their keys and host rows lie; rotate_tail, one block per row and group, gives the new token its
// device row, evicting the LRU victim of the ordinary slots by one minimum over (stamp + 1) << 16 | slot. One
// block more per row leaves the seat's tables in the order of the batch (OpenedRow).
//
// DRAFTS: a seat may bring several rows, and take a position again that was rejected. open_rows then has a thread for
// each seat, which fills in its rows at all depths; rotate_tail is launched once for each depth, on its slice.
#pragma once

#include "memory.cuh"

namespace hisparse {

constexpr u64 NEVER = ~0ull;

__device__ __forceinline__ i32 begin_entry(const i32* table, i32 width, i64 seat, i64 place) {
    return place < width ? table[seat * width + place] : -1;
}

__device__ __forceinline__ bool may_stay(const State& s, i32 hot, const i32* tail, i32 slot) {
    for (int r = 0; r < s.tail_slots; ++r)
        if (slot == (tail[r] < 0 ? hot + r : tail[r])) return false;
    return true;
}

// The LRU victim among ordinary slots. `minima` holds one word per warp.
__device__ i32 find_victim(const State& s, const i32* chunks, const i32* tail, const i32* stamp, i32 hot, i32 now,
                           u64* minima) {
    u64 best = NEVER;
    for (i32 slot = threadIdx.x; slot < hot + s.tail_slots; slot += ROTATE_THREADS) {
        const i32 chunk = chunks[slot / PAGE_TOKENS];
        const i32 used = chunk < 0 ? now : stamp[chunk * PAGE_TOKENS + slot % PAGE_TOKENS];
        const u64 key = static_cast<u64>(used + 1) << 16 | slot;
        if (used < now && key < best && may_stay(s, hot, tail, slot)) best = key;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) best = min(best, __shfl_xor_sync(0xFFFFFFFF, best, step));
    if (threadIdx.x % 32 == 0) minima[threadIdx.x / 32] = best;
    __syncthreads();
    for (int w = 0; w < ROTATE_THREADS / 32; ++w) best = min(best, minima[w]);
    return best == NEVER ? -1 : static_cast<i32>(best & 0xFFFF);
}

// Leaves what swap_in loads first of a row that it will resolve, even if the row's new token found no page.
__device__ __forceinline__ void leave_tables(const BeginStep& p, int row) {
    const State& s = p.state;
    OpenedRow& to = p.opened[row];
    i64 seat = -1, length = 0;
    i32 hot = -1;
    if (row < *p.batch.num_real) {
        seat = read_id(p.batch.seats, row, p.batch.wide_seats);
        length = read_id(p.batch.lengths, row, p.batch.wide_lengths);
        if (seat >= 0 && seat < s.seats && length >= 1) hot = s.hot_slots[seat];
    }
    if (threadIdx.x == 0) {
        to.hot = hot;
        to.seat = static_cast<i32>(seat);
        to.length = static_cast<i32>(min(length, static_cast<i64>(CONTEXT_MAX_TOKENS)));
        if (hot >= 0) to.now = s.now[seat];
    }
    if (hot <= 0) return;
    const i64 pages = min((length + PAGE_TOKENS - 1) / PAGE_TOKENS, static_cast<i64>(OPENED_PAGES));
    for (i64 i = threadIdx.x; i < pages; i += ROTATE_THREADS)
        to.page[i] = begin_entry(s.index_table, s.max_pages, seat, i);
    for (i64 i = threadIdx.x; i < OPENED_CHUNKS; i += ROTATE_THREADS)
        to.chunk[i] = begin_entry(s.chunk_table, s.max_chunks, seat, i);
}

// Where the key and the host row of a row's new token lie; false, and trips, when they have no place.
__device__ __forceinline__ bool open_row(const BeginStep& p, int row, i64 seat, i64 length) {
    const State& s = p.state;
    const i64 page = (length - 1) / PAGE_TOKENS, offset = (length - 1) % PAGE_TOKENS;
    const i32 index_page = begin_entry(s.index_table, s.max_pages, seat, page);
    const i32 host_page = begin_entry(s.host_table, s.max_pages, seat, page);
    const bool placed = s.hot_slots[seat] > 0 || begin_entry(s.chunk_table, s.max_chunks, seat, page) >= 0;
    if (index_page < 0 || host_page < 0 || !placed) {
        trip(s, UNGRANTED, 1);
        return false;
    }
    p.new_index_rows[row] = p.index_row[row] = static_cast<i32>(index_page * PAGE_TOKENS + offset);
    p.host_page[row] = host_page;
    p.host_offset[row] = static_cast<i32>(offset);
    return true;
}

__device__ __forceinline__ bool is_seated(const State& s, i64 seat, i64 length) {
    return seat >= 0 && seat < s.seats && length >= 1 && s.hot_slots[seat] >= 0;
}

#if DRAFTS

__device__ __forceinline__ void write_id(const void* ids, int place, int wide, i64 value) {
    if (wide) static_cast<i64*>(const_cast<void*>(ids))[place] = value;
    else static_cast<i32*>(const_cast<void*>(ids))[place] = static_cast<i32>(value);
}

// The rows of the i-th seat at all depths, from its first row.
__device__ void open_seat(const BeginStep& p, int i) {
    const State& s = p.state;
    const int step_seats = p.batch.size / p.seat_rows;
    if (i >= step_seats) return;
    const i64 seat = read_id(p.batch.seats, i, p.batch.wide_seats);
    const i64 length = read_id(p.batch.lengths, i, p.batch.wide_lengths);
    const bool real = i < *p.batch.num_real, seated = is_seated(s, seat, length);
    if (real && !seated) trip(s, SEAT, 1);
    const i64 granted = real && seated ? p.granted_rows[seat] : 0;
    bool any = false;
    for (int depth = 0; depth < p.seat_rows; ++depth) {
        const int row = depth * step_seats + i;
        const i64 its = real && seated && length + depth <= granted ? length + depth : 0;
        p.new_index_rows[row] = p.index_row[row] = p.host_page[row] = p.host_offset[row] = -1;
        write_id(p.batch.seats, row, p.batch.wide_seats, seat);
        write_id(p.batch.lengths, row, p.batch.wide_lengths, its);
        const bool placed = its > 0 && open_row(p, row, seat, its);
        p.rejected[row] = !placed;
        any |= placed;
    }
    if (any) s.now[seat] += 1;
}

// The slot of a managed seat that holds `token` already, or -1. slot_of may hold anything for a token that was never
// written; a slot of the seat that holds it may not.
__device__ __forceinline__ i32 slot_holding(const State& s, int group, const i32* chunks, i32 key, i64 token, i32 hot) {
    const i32 slot = s.slot_of[group * s.key_rows + key];
    if (slot >= hot + s.tail_slots) return -1;
    const i32 chunk = chunks[slot / PAGE_TOKENS];
    const i32 held = chunk < 0 ? -1 : s.slot_token[group * s.arena_rows + chunk * PAGE_TOKENS + slot % PAGE_TOKENS];
    return held == token ? slot : -1;
}

#endif

}  // namespace hisparse

extern "C" __global__ void open_rows(const __grid_constant__ hisparse::BeginStep p) {
    using namespace hisparse;
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
#if DRAFTS
    open_seat(p, row);
#else
    const State& s = p.state;
    if (row >= p.batch.size) return;
    p.new_index_rows[row] = p.index_row[row] = p.host_page[row] = p.host_offset[row] = -1;
    if (row >= *p.batch.num_real) return;
    const i64 seat = read_id(p.batch.seats, row, p.batch.wide_seats);
    const i64 length = read_id(p.batch.lengths, row, p.batch.wide_lengths);
    if (!is_seated(s, seat, length)) return trip(s, SEAT, 1);
    if (open_row(p, row, seat, length)) s.now[seat] += 1;
#endif
}

extern "C" __global__ void __launch_bounds__(hisparse::ROTATE_THREADS, 4)
    rotate_tail(const __grid_constant__ hisparse::BeginStep p) {
    using namespace hisparse;
    __shared__ u64 minima[ROTATE_THREADS / 32];
    const State& s = p.state;
    const int row = blockIdx.x, group = blockIdx.y;
    if (group == s.groups) return leave_tables(p, row);
    const i64 place = static_cast<i64>(group) * p.batch.size + row;
    const i32 key = p.new_index_rows[row];
    if (key < 0) {
        if (threadIdx.x == 0) p.new_rows[place] = p.device_row[place] = -1;
        return;
    }
    const i64 seat = read_id(p.batch.seats, row, p.batch.wide_seats);
    const i64 token = read_id(p.batch.lengths, row, p.batch.wide_lengths) - 1;
    const i32* const chunks = s.chunk_table + seat * s.max_chunks;
    const i32 hot = s.hot_slots[seat], now = s.now[seat];
    i32 slot = static_cast<i32>(token);
    i32* const tail = s.tail + (group * static_cast<i64>(s.seats) + seat) * s.tail_slots;
    i32* const stamp = s.stamp + group * s.arena_rows;
    const int ring = static_cast<int>(token % s.tail_slots);
    i32 retiring = -1;
    bool starts_anew = false;  // the slot reserved for the place is ordinary from here on, and older than what is queued
    if (hot > 0) {
        retiring = tail[ring];
#if DRAFTS
        const i32 held = slot_holding(s, group, chunks, key, token, hot);
#else
        constexpr i32 held = -1;
#endif
        __syncthreads();  // the first thread writes these: the others have read them, and go the same way
        if (held < 0) slot = retiring < 0 ? hot + ring : find_victim(s, chunks, tail, stamp, hot, now, minima);
        else slot = held, starts_anew = retiring < 0, retiring = retiring == held ? -1 : retiring;
    }
    if (threadIdx.x > 0) return;
    const i32 device_row = slot < 0 ? -1 : chunks[slot / PAGE_TOKENS] * PAGE_TOKENS + slot % PAGE_TOKENS;
    p.new_rows[place] = p.device_row[place] = device_row;
    if (hot == 0) return;
    if (slot < 0) return trip(s, VICTIMS, 1);
    u16* const slot_of = s.slot_of + group * s.key_rows;
    i32& held = s.slot_token[group * s.arena_rows + device_row];
    if (retiring >= 0) stamp[chunks[retiring / PAGE_TOKENS] * PAGE_TOKENS + retiring % PAGE_TOKENS] = now - 1;
    if (held >= 0) {
        const i32 page = begin_entry(s.index_table, s.max_pages, seat, held / PAGE_TOKENS);
        if (page >= 0) slot_of[page * PAGE_TOKENS + held % PAGE_TOKENS] = static_cast<u16>(SLOT_ABSENT);
    }
    if (starts_anew) s.eviction_queue[group * static_cast<i64>(s.seats) + seat] = {-1, -1, -1, -1, -1, -1, -1, -1};
    tail[ring] = slot;
    held = static_cast<i32>(token);
    stamp[device_row] = now;
    slot_of[key] = static_cast<u16>(slot);
}

// The first half of a swap_in, by all warps of a block: finds the slots of its entries' tokens, and the misses. Padding
// and resident requests end here.
//
// A load is written where it can be issued early, and its value is used as late as possible: a use that the compiler moves
// forward, or a scoreboard shared with a slower load, costs a round trip.
#pragma once

#include "swap_in_block.cuh"

namespace hisparse {

struct Entry {
    i32 token;
    u32 page;       // of the context; NO_PAGE without a token, or beyond the length
    i32 key;        // place in slot_of; -1 without an index page
    u32 code;       // entry of slot_of; NOTHING when it was not loaded
    i32 host_page;  // loaded ahead of a miss, from SPECULATIVE blocks on
};
constexpr u32 NO_PAGE = ~0u;

__device__ __forceinline__ bool none_in_warp(const SwapIn& p, int place) { return (place & ~31) >= p.k; }

// Entries of a thread from `place` on, `step` apart.
__device__ __forceinline__ void read_tokens(const SwapIn& p, int row, int place, int step, Entry (&entry)[ENTRIES]) {
    const u32 begin = static_cast<u32>(row) * static_cast<u32>(p.k);
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        entry[j] = {-1, NO_PAGE, -1, NOTHING, -1};
        if (place + j * step < p.k) load_now(entry[j].token, p.topk + (begin + static_cast<u32>(place + j * step)));
    }
}

// Waits for the tokens, in all threads alike. A later first use would wait for all loads that its scoreboard counts by
// then: for slots, where the next loads to issue are those of host pages.
__device__ __forceinline__ void settle_tokens(const Seat& at, Entry (&entry)[ENTRIES]) {
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        entry[j].page = used_page_of(entry[j].token);
        if (static_cast<u32>(entry[j].token) >= static_cast<u32>(at.length)) entry[j].page = NO_PAGE;
    }
}

// Index pages of entries beyond the pages in shared memory.
__device__ __forceinline__ void read_pages(const SwapIn& p, const Seat& at, Entry (&entry)[ENTRIES]) {
    if (at.length <= OPENED_PAGES * PAGE_TOKENS) return;
    const TableRow pages(p.state.index_table, p.state.max_pages, at.seat);
    i32 page[ENTRIES];
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) page[j] = entry[j].page < OPENED_PAGES ? -1 : pages[entry[j].page];
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) entry[j].key = key_in(page[j], entry[j].token);
}

// Slots of the entries, by pages loaded already or in shared memory.
__device__ __forceinline__ void read_slots(const SwapIn& p, const Shared& s, int place, int step, Entry (&entry)[ENTRIES]) {
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        if (j > 0 && none_in_warp(p, place + j * step)) break;
        const i32 page = s.index[min(entry[j].page, static_cast<u32>(OPENED_PAGES - 1))];
        if (entry[j].page < OPENED_PAGES) entry[j].key = key_in(page, entry[j].token);
        load_if(entry[j].key >= 0, entry[j].code, p.state.slot_of + entry[j].key);
    }
}

// Host pages from SPECULATIVE blocks on, before misses are known: while slots are on their way.
__device__ __forceinline__ void read_host_pages(const SwapIn& p, const Seat& at, int place, int step,
                                                Entry (&entry)[ENTRIES]) {
    if (RANKS < SPECULATIVE) return;
    const u32 begin = static_cast<u32>(at.seat) * static_cast<u32>(p.state.max_pages);
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j) {
        if (j > 0 && none_in_warp(p, place + j * step)) break;
        const u32 page = entry[j].page;
        load_if(page < static_cast<u32>(p.state.max_pages), entry[j].host_page, p.state.host_table + (begin + page));
    }
}
static_assert(MISSING == SLOT_ABSENT, "an entry of slot_of is a code");

// True, once every load of these has ended, whatever it loaded: p.zero is 0, which the compiler does not know. A load that
// is never awaited is awaited where its register is used again: if a host load uses it, that wait is for the host loads
// ahead of it, too.
__device__ __forceinline__ bool is_settled(const SwapIn& p, const Entry (&entry)[ENTRIES]) {
    u32 loaded = 0;
#pragma unroll
    for (int j = 0; j < ENTRIES; ++j)
        loaded |= entry[j].code | (RANKS < SPECULATIVE ? 0 : static_cast<u32>(entry[j].host_page));
    return (loaded & p.zero) == 0;
}

// By the copy warps, while tables are on their way: clears what is needed before the next barrier.
__device__ __forceinline__ void clear_bits(const SwapIn& p, Shared& s, const Part& part) {
    const u32 thread = threadIdx.x - CONTROL_THREADS;
    const uint4 zero = {0, 0, 0, 0};
    if (thread * 128 < p.slots_limit) {
        reinterpret_cast<uint4*>(s.stay)[thread] = zero;
        if (part.ranks < SCATTERED) reinterpret_cast<uint4*>(s.hit)[thread] = zero;
    }
}
static_assert(SLOTS_MAX <= 128 * COPY_THREADS, "a vector of bits per thread");

// By the copy warps without entries, or by all copy warps if each has some: fetches the whole top-k and empties the hash
// set, for when misses are known.
__device__ __forceinline__ void prepare_misses(const SwapIn& p, Shared& s, int row, const Part& part) {
    const u32 first = part.entries < BLOCK_THREADS ? max(part.entries, static_cast<u32>(CONTROL_THREADS)) : CONTROL_THREADS;
    const u32 thread = threadIdx.x - first, threads = BLOCK_THREADS - first;
    if (threadIdx.x < first) return;
    const i32* const topk = p.topk + static_cast<u32>(row) * static_cast<u32>(p.k);
    const u32 words = (reinterpret_cast<u64>(topk) | static_cast<u64>(p.k) * 4) % 16 == 0 ? 4 : 1;
#pragma unroll 1
    for (u32 place = thread * words; place < static_cast<u32>(p.k); place += threads * words)
        if (words == 4) fetch_words<4>(s.token + place, topk + place);
        else fetch_words<1>(s.token + place, topk + place);
    const uint4 none = {NOT_SEEN, NOT_SEEN, NOT_SEEN, NOT_SEEN};
#pragma unroll 1
    for (u32 i = thread; i < SEEN / 4; i += threads) reinterpret_cast<uint4*>(s.seen)[i] = none;
}

// By the copy warps: fetches the seat's tables to shared memory.
__device__ __forceinline__ void fetch_tables(const SwapIn& p, Shared& s, int row) {
    constexpr u32 PAGES = OPENED_PAGES / 4;
    const u32 vectors = PAGES + (p.slots_limit / PAGE_TOKENS + 3) / 4;
    const OpenedRow& from = p.opened[row];
#pragma unroll 1
    for (u32 i = threadIdx.x - CONTROL_THREADS; i < vectors; i += COPY_THREADS)
        if (i < PAGES) fetch_words<4>(s.index + 4 * i, from.page + 4 * i);
        else fetch_words<4>(s.chunk + 4 * (i - PAGES), from.chunk + 4 * (i - PAGES));
}

// By the last copy warp: the slots of the tail, which are never victims.
struct Tail {
    i32 slot = -1;

    __device__ __forceinline__ static u32 place() { return BLOCK_THREADS - 1 - threadIdx.x; }

    __device__ __forceinline__ void load(const SwapIn& p, const Seat& at) {
        if (place() < p.state.tail_slots)
            load_now(slot, p.state.tail + (static_cast<u32>(at.seat) * static_cast<u32>(p.state.tail_slots) + place()));
    }
    // After a barrier behind `clear_bits`.
    __device__ __forceinline__ void keep(const SwapIn& p, const Seat& at, Shared& s) const {
        if (place() < p.state.tail_slots) {
            const u32 its = slot < 0 ? at.hot + place() : slot;
            atomicOr(&s.stay[its / 32], 1u << its % 32);
        }
        if (place() == TAIL_SLOTS_MAX && at.limit % 32 > 0) atomicOr(&s.stay[at.limit / 32], ~0u << at.limit % 32);
    }
};
static_assert(TAIL_SLOTS_MAX < 32, "a lane each, and one more");

// ---- padding and resident requests

__device__ void write_padding(const SwapIn& p, int row, const Part& part) {
    if (part.rank == 0 && threadIdx.x == 0) p.plan.count[row] = 0;
#pragma unroll 1
    for (int e = part.rank * BLOCK_THREADS + threadIdx.x; e < p.k; e += part.ranks * BLOCK_THREADS)
        p.out_rows[static_cast<i64>(row) * p.k + e] = -1;
}

__device__ void resolve_resident(const SwapIn& p, const Seat& at, int row, const Part& part) {
    if (part.rank == 0 && threadIdx.x == 0) p.plan.count[row] = 0;
    const TableRow chunks(p.state.chunk_table, p.state.max_chunks, at.seat);
    u32 hits = 0;
    int ungranted = 0, foreign = 0;
#pragma unroll 1
    for (int e = part.rank * BLOCK_THREADS + threadIdx.x; e < p.k; e += part.ranks * BLOCK_THREADS) {
        const i64 place = static_cast<i64>(row) * p.k + e;
        const u32 token = p.topk[place];
        const bool inside = token < static_cast<u32>(at.length);
        const i32 chunk = inside ? chunks[token / PAGE_TOKENS] : -1;
        p.out_rows[place] = chunk < 0 ? -1 : chunk * PAGE_TOKENS + static_cast<i32>(token % PAGE_TOKENS);
        foreign += !inside && token != ~0u;
        ungranted += inside && chunk < 0;
        hits += chunk >= 0;
    }
    trip(p.state, POSITION, foreign);
    trip(p.state, UNGRANTED, ungranted);
    hits = __reduce_add_sync(0xFFFFFFFF, hits);
    if (threadIdx.x % 32 == 0) add_to_seat(p, at, p.state.hits, hits);
}

// ---- managed requests

// Lists a missing entry; false when its host page is not granted.
__device__ __forceinline__ bool list_missing(Shared& s, u32 place, u32 token, i32 page) {
    if (page < 0) return false;
    const u32 m = take(&s.misses);
    s.miss[m].host_row = static_cast<u32>(page) * PAGE_TOKENS + token % PAGE_TOKENS;
    s.miss[m].place = static_cast<u16>(place);
    s.miss[m].victim = static_cast<u16>(SLOT_ABSENT);
    s.order[m] = static_cast<u16>(m);
    return true;
}

// Sends the codes of a warp of entries to all peers, with its counts of misses and hits: no warp waits for the rest of its
// block.
__device__ __forceinline__ void send_codes(Shared& s, const Part& part, u32 position, bool missing, bool hit) {
    constexpr u32 VECTORS = 32 / VECTOR_CODES;
    const u32 lane = threadIdx.x % 32;
    const u32 found = __popc(__ballot_sync(0xFFFFFFFF, missing)) | __popc(__ballot_sync(0xFFFFFFFF, hit)) << 16;
    u32& count = s.count[position / 32];
    if (lane == part.rank) count = found;
    if (part.ranks == 1) return;
    __syncwarp();  // codes are written
    if (part.ranks >= SCATTERED && lane == part.rank) open_gate(&s.codes_arrived);
    uint4& codes = *reinterpret_cast<uint4*>(&s.code[position - lane + lane % VECTORS * VECTOR_CODES]);
    const uint4 words = codes;
#pragma unroll 1
    for (u32 peer = lane / VECTORS; peer < part.ranks; peer += 32 / VECTORS)
        if (peer != part.rank) send(&codes, words, &s.codes_arrived, peer);
    if (lane < part.ranks && lane != part.rank) send(&count, found, &s.codes_arrived, lane);
}

// Writes outputs and stamps of hits, the list of misses, and a code for each entry, here and at the peers. `entry` comes
// with its code. One piece of code for all entries of a thread: fetching three takes longer than they save.
__device__ __forceinline__ void resolve_managed(const SwapIn& p, const Seat& at, Shared& s, int row, const Part& part,
                                                Entry (&entry)[ENTRIES]) {
    i32* const out = p.out_rows + static_cast<u32>(row) * static_cast<u32>(p.k);
    const int step = BLOCK_THREADS * part.ranks;
    const u32 begin = part.rank * part.entries, end = begin + part.entries;
    int place = part.place(threadIdx.x);
    u32 which = 0;
#pragma unroll 1
    for (u32 position = begin + threadIdx.x; position < end; position += BLOCK_THREADS, place += step, ++which) {
        if (which == ENTRIES) {
            which = 0;
            read_tokens(p, row, place, step, entry);
            settle_tokens(at, entry);
            read_pages(p, at, entry);
            read_slots(p, s, place, step, entry);
            read_host_pages(p, at, place, step, entry);
        }
        u32 code = entry[0].code;
        i32 token = entry[0].token, host_page = entry[0].host_page;
#pragma unroll
        for (u32 j = 1; j < ENTRIES; ++j)
            if (which == j) code = entry[j].code, token = entry[j].token, host_page = entry[j].host_page;
        const i32 found = code < at.limit ? slot_row(s, code) : -1;
        if (!__all_sync(0xFFFFFFFF, found >= 0)) {  // in most warps all hit: the rest is not fetched
            if (code == MISSING && part.ranks < SPECULATIVE)
                host_page = TableRow(p.state.host_table, p.state.max_pages, at.seat)[static_cast<u32>(token) / PAGE_TOKENS];
            if (code == MISSING ? !list_missing(s, place, token, host_page) : found < 0) {
                code = NOTHING;
                if (place < p.k) out[place] = -1;
                if (token != -1)
                    trip(p.state, static_cast<u32>(token) < static_cast<u32>(at.length) ? UNGRANTED : POSITION, 1);
            }
        }
        const bool hit = found >= 0;
        if (part.ranks >= SCATTERED && position + BLOCK_THREADS >= end) open_gate(&s.found);  // copies may begin
        if (hit) {
            out[place] = found;
            if (part.ranks >= SCATTERED) p.state.stamp[found] = at.now;
            else atomicOr(&s.hit[code / 32], 1u << code % 32);
        }
        s.code[position] = static_cast<u16>(code);
        send_codes(s, part, position, code == MISSING, hit);
    }
}

}  // namespace hisparse

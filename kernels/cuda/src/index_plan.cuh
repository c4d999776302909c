// Which pages of keys a block of index_scores has on Hopper (index_hopper.cuh): an equal share of all, mostly of one row.
//
// A block that is launched before the kernel ahead has ended has its first pages brought to L2 meanwhile, by the rows as they
// stand then. All that is read ahead is read again: only a wrong page may be brought.
#pragma once

#include "index_rows.cuh"

namespace hisparse {

constexpr int TEAM_THREADS = 128, TEAMS = WARPS / 4, SCORE_THREADS = 32 * WARPS + 32;
constexpr int KEY_ROW = DIM + 4, PAGE_BYTES = PAGE_TOKENS * KEY_ROW;
constexpr int STEPS = DIM / 32, TILES = HEADS / 8;
constexpr int HOT_MAX = 1024;
constexpr int FEW_ROWS = 64, AHEAD_PAGES = 16;  // of a plan by one warp; brought to L2
static_assert(STAGES % TEAMS == 0, "a stage is one team's: parity tells it one round from the next alone");
static_assert(DIM == 128 && KEY_BYTES == 1 && QUERY_BYTES == 2 && (HEADS == 64 || HEADS == 32), "as written here");
static_assert(PAGE_TOKENS == 64 && PAGE_BYTES % 16 == 0, "a page is the rows of a product, and one copy");
static_assert(FEW_ROWS == 64 && AHEAD_PAGES <= 32, "two rows and one page a lane");
static_assert(WARPS % 4 == 0 && WARPS >= TILES / 2, "whole teams");

struct ScoreShared {
    u8 pages[STAGES][PAGE_BYTES];
    u32 queries[PARTS][STEPS][2][TILES][32];  // of 8 heads x 16 places: word 4 g + t of a block is head g, places 4 t..
    float2 weights[TILES][4];                 // of heads 8 n + 2 t and 8 n + 2 t + 1, with the scales
    u32 bins[BINS];
    u64 sums[SCORE_THREADS / 32];
    u64 full[STAGES], empty[STAGES];
    u64 first[BATCH_MAX + 1];  // pages << 32 | units of the rows before
    int2 rows[BATCH_MAX];      // seat and length
    i32 hot_slots[HOT_MAX];    // of the first seats
    u32 blocks;                // that have a share
};

__device__ __forceinline__ u32 pages_before(const ScoreShared& s, int row) { return static_cast<u32>(s.first[row] >> 32); }
__device__ __forceinline__ u32 units_before(const ScoreShared& s, int row) { return static_cast<u32>(s.first[row]); }

// Blocks that have a share: rows of one length are then cut at their ends, so that few blocks have parts of two.
__device__ __forceinline__ u32 blocks_for(u32 scored) {
    const u32 over = scored > 0 && scored <= gridDim.x ? gridDim.x % scored : 0;
    return gridDim.x - (over <= gridDim.x / 16 ? over : 0);
}

// Pages and units of a row, as in ScoreShared::first.
__device__ __forceinline__ u64 work_of(const IndexRow& at) {
    return at.kind == SCORED ? static_cast<u64>((at.length + PAGE_TOKENS - 1) / PAGE_TOKENS) << 32 | units_of(at) : 0;
}

// The plan of up to FEW_ROWS rows by one warp, a pair of neighbours a lane. hot_slots(j, seat): for row j of the pair.
template <class HotSlots>
__device__ __forceinline__ void plan_few(const IndexTopk& p, ScoreShared& s, const NamedRow (&pair)[2], HotSlots hot_slots) {
    const int lane = threadIdx.x % 32;
    u64 work[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int row = 2 * lane + j;
        if (row >= p.batch.size) continue;
        const IndexRow at = index_row(p, pair[j], [&](i64 seat) { return hot_slots(j, seat); });
        s.rows[row] = make_int2(at.seat, at.length);
        work[j] = work_of(at);
    }
    const u32 even = __ballot_sync(0xFFFFFFFF, work[0] != 0), odd = __ballot_sync(0xFFFFFFFF, work[1] != 0);
    u64 behind = work[0] + work[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u64 left = __shfl_up_sync(0xFFFFFFFF, behind, step);
        if (lane >= step) behind += left;
    }
    const u64 before = behind - work[0] - work[1];
    if (2 * lane < p.batch.size) s.first[2 * lane] = before;
    if (2 * lane + 1 < p.batch.size) s.first[2 * lane + 1] = before + work[0];
    if (lane == 31) s.first[p.batch.size] = behind;
    if (lane == 0) s.blocks = blocks_for(__popc(even) + __popc(odd));
    __syncwarp();
}

// A block's share: pages [begin, end) of all, the first of them in row `row`.
struct Share {
    u32 begin, end;
    int row;
};
__device__ __forceinline__ Share share_of_block(const IndexTopk& p, const ScoreShared& s) {
    if (blockIdx.x >= s.blocks) return {};
    const u32 total = pages_before(s, p.batch.size);
    const u32 begin = share(total, blockIdx.x, s.blocks), end = share(total, blockIdx.x + 1, s.blocks);
    int low = 0, high = p.batch.size;  // the last row that begins at or before the share
    while (low + 1 < high) {
        const int middle = (low + high) / 2;
        if (pages_before(s, middle) <= begin)
            low = middle;
        else
            high = middle;
    }
    return {begin, end, low};
}

// Calls f(row, first page, page behind the last, pages of the share before) for each row of the block's share, in order.
template <class Each> __device__ __forceinline__ void each_part(const IndexTopk& p, const ScoreShared& s, Each f) {
    const Share own = share_of_block(p, s);
    int row = own.row;
    for (u32 at = own.begin; at < own.end; ++row) {
        const u32 stop = min(own.end, pages_before(s, row + 1));
        if (at >= stop) continue;
        f(row, at - pages_before(s, row), stop - pages_before(s, row), at - own.begin);
        at = stop;
    }
}

// An id that the kernel ahead may be writing: of L2, so that L1 holds none that is old.
__device__ __forceinline__ i64 read_ahead(const void* ids, int row, i32 wide) {
    return wide ? __ldcg(static_cast<const long long*>(ids) + row) : __ldcg(static_cast<const i32*>(ids) + row);
}

// Has the first pages of the share brought to L2, a page a lane, as far as they are of the share's first row; by one warp,
// before the kernel ahead has ended. What that still writes to them is written there. Its plan is made anew behind a barrier.
__device__ __forceinline__ void ask_for_pages(const IndexTopk& p, ScoreShared& s) {
    const int lane = threadIdx.x % 32;
    const i32 real = __ldcg(p.batch.num_real);
    NamedRow pair[2];
    i32 hot[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int row = min(2 * lane + j, p.batch.size - 1);
        pair[j] = {row, real, read_ahead(p.batch.seats, row, p.batch.wide_seats),
                   read_ahead(p.batch.lengths, row, p.batch.wide_lengths)};
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const i64 seat = pair[j].seat;
        hot[j] = seat >= 0 && seat < p.state.seats ? __ldcg(p.state.hot_slots + seat) : -1;
    }
    plan_few(p, s, pair, [&](int j, i64) { return hot[j]; });
    const Share own = share_of_block(p, s);
    const u32 at = own.begin + lane;
    if (lane >= AHEAD_PAGES || at >= own.end || at >= pages_before(s, own.row + 1)) return;
    const i64 table = static_cast<i64>(s.rows[own.row].x) * p.state.max_pages;
    const u32 page = __ldcg(p.state.index_table + table + (at - pages_before(s, own.row)));
    if (page >= static_cast<u32>(p.state.key_rows / PAGE_TOKENS)) return;
    const u8* const from = p.state.index_keys + (p.group * p.state.key_rows + static_cast<i64>(page) * PAGE_TOKENS) * KEY_ROW;
    bring_to_l2(from, PAGE_BYTES);
}

// The plan: first, rows and blocks of `s`, by all threads; ends with a barrier. The kernel ahead has ended then.
__device__ __forceinline__ void plan_share(const IndexTopk& p, ScoreShared& s) {
    const bool few = p.batch.size <= FEW_ROWS;
    if (few && p.batch.size > 0 && threadIdx.x >= 32 * WARPS) ask_for_pages(p, s);
    await_last();
    let_next_begin();
    // Hot slots of all seats are asked for beside the rows', not behind them.
    const int seats = min(p.state.seats, HOT_MAX), mine = few ? 2 * threadIdx.x : threadIdx.x;
    NamedRow pair[2] = {};
    if (mine < p.batch.size) pair[0] = named_row(p, mine);
    if (few && mine + 1 < p.batch.size) pair[1] = named_row(p, mine + 1);
    for (int i = threadIdx.x; i < seats; i += SCORE_THREADS) s.hot_slots[i] = p.state.hot_slots[i];
    const auto hot_slots = [&](i64 seat) { return seat < HOT_MAX ? s.hot_slots[seat] : p.state.hot_slots[seat]; };
    __syncthreads();
    if (few) {
        if (threadIdx.x < 32) plan_few(p, s, pair, [&](int, i64 seat) { return hot_slots(seat); });
    } else {
        u64 carry = 0;
        u32 scored = 0;
        for (int base = 0; base < p.batch.size; base += SCORE_THREADS) {
            const int row = base + static_cast<int>(threadIdx.x);
            u64 work = 0, total;
            if (row < p.batch.size) {
                if (base > 0) pair[0] = named_row(p, row);
                const IndexRow at = index_row(p, pair[0], hot_slots);
                s.rows[row] = make_int2(at.seat, at.length);
                work = work_of(at);
            }
            scored += __syncthreads_count(work != 0);
            const u64 before = sum_before<SCORE_THREADS, u64>(work, s.sums, total);
            if (row < p.batch.size) s.first[row] = carry + before;
            carry += total;
        }
        if (threadIdx.x == 0) s.first[p.batch.size] = carry, s.blocks = blocks_for(scored);
    }
    __syncthreads();
}

}  // namespace hisparse

// Which pages of keys a block of index_scores has on Hopper (index_hopper.cuh): an equal share of all, mostly of one row.
//
// A block that is launched before the kernel ahead has ended plans its share meanwhile, by the rows as they stand, and has its
// first pages brought to L2. Then it reads again what the plan was made from: where the kernel ahead has changed that, and
// where a step has more than AHEAD_ROWS rows, the plan is made then.
#pragma once

#include "index_rows.cuh"

namespace hisparse {

constexpr int TEAM_THREADS = 128, TEAMS = WARPS / 4, SCORE_THREADS = 32 * WARPS + 32;
constexpr int KEY_ROW = FP4 ? DIM / 2 + DIM / 32 : DIM + 4, PAGE_BYTES = PAGE_TOKENS * KEY_ROW;
constexpr int STEPS = DIM / 32, TILES = HEADS / 8;
constexpr int HOT_MAX = 1024;
constexpr int AHEAD_ROWS = 64, AHEAD_PAGES = 16;  // of the plan ahead; brought to L2
static_assert(STAGES % TEAMS == 0, "a stage is one team's: parity tells it one round from the next alone");
static_assert(DIM == 128 && KEY_BYTES == 1 && QUERY_BYTES == 2 && (HEADS == 64 || HEADS == 32), "as written here");
static_assert(PAGE_TOKENS == 64 && PAGE_BYTES % 16 == 0, "a page is the rows of a product, and one copy");
static_assert(AHEAD_ROWS == 64 && AHEAD_PAGES <= 32, "two rows and one page a lane");
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
    u32 lowest, highest;       // of the bins that hold anything
    i32 real;                  // rows, as read ahead
    i64 seats[AHEAD_ROWS], lengths[AHEAD_ROWS];
    i32 hot[AHEAD_ROWS];
};

__device__ __forceinline__ u32 pages_before(const ScoreShared& s, int row) { return static_cast<u32>(s.first[row] >> 32); }
__device__ __forceinline__ u32 units_before(const ScoreShared& s, int row) { return static_cast<u32>(s.first[row]); }

// Blocks that have a share: rows of one length are then cut at their ends, so that few blocks have parts of two.
__device__ __forceinline__ u32 blocks_for(u32 scored) {
    const u32 over = scored > 0 && scored <= gridDim.x ? gridDim.x % scored : 0;
    return gridDim.x - (over <= gridDim.x / 16 ? over : 0);
}

// A block's share: pages [begin, end) of all, the first of them in row `row`.
struct Share {
    u32 begin, end;
    int row;
};
__device__ __forceinline__ Share share_of_block(const IndexTopk& p, const ScoreShared& s) {
    if (blockIdx.x >= s.blocks) return {};
    const u32 total = pages_before(s, p.batch.size), each = total / s.blocks, longer = total % s.blocks;
    const u32 begin = blockIdx.x * each + min(blockIdx.x, longer), end = begin + each + (blockIdx.x < longer);
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
template <class Each> __device__ __forceinline__ void each_part(const ScoreShared& s, const Share& own, Each f) {
    int row = own.row;
    for (u32 at = own.begin; at < own.end; ++row) {
        const u32 stop = min(own.end, pages_before(s, row + 1));
        if (at >= stop) continue;
        f(row, at - pages_before(s, row), stop - pages_before(s, row), at - own.begin);
        at = stop;
    }
}

// Pages and units of a row, as in ScoreShared::first.
__device__ __forceinline__ u64 work_of(const IndexRow& at) {
    return at.kind == SCORED ? static_cast<u64>((at.length + PAGE_TOKENS - 1) / PAGE_TOKENS) << 32 | units_of(at) : 0;
}

// Two rows a lane, as they stand in L2.
struct RowPair {
    i32 real, hot[2];
    i64 seats[2], lengths[2];

    static __device__ __forceinline__ int row(const IndexTopk& p, int j) {
        return min(2 * static_cast<int>(threadIdx.x % 32) + j, p.batch.size - 1);
    }
    static __device__ __forceinline__ i64 id(const void* ids, int row, i32 wide) {
        return wide ? __ldcg(static_cast<const long long*>(ids) + row) : __ldcg(static_cast<const i32*>(ids) + row);
    }
    __device__ __forceinline__ void load(const IndexTopk& p) {
        real = __ldcg(p.batch.num_real);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            seats[j] = id(p.batch.seats, row(p, j), p.batch.wide_seats);
            lengths[j] = id(p.batch.lengths, row(p, j), p.batch.wide_lengths);
        }
    }
    __device__ __forceinline__ void load_hot(const IndexTopk& p, i64 even, i64 odd) {
        hot[0] = even >= 0 && even < p.state.seats ? __ldcg(p.state.hot_slots + even) : -1;
        hot[1] = odd >= 0 && odd < p.state.seats ? __ldcg(p.state.hot_slots + odd) : -1;
    }
};

// The plan of up to AHEAD_ROWS rows as they stand, by one warp.
__device__ __forceinline__ void plan_ahead(const IndexTopk& p, ScoreShared& s) {
    const int lane = threadIdx.x % 32;
    RowPair pair;
    pair.load(p);
    pair.load_hot(p, pair.seats[0], pair.seats[1]);
    u64 work[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int row = 2 * lane + j;
        if (row >= p.batch.size) continue;
        const IndexRow at = index_row(p, NamedRow{row, pair.real, pair.seats[j], pair.lengths[j]}, [&](i64) { return pair.hot[j]; });
        s.rows[row] = make_int2(at.seat, at.length);
        s.seats[row] = pair.seats[j], s.lengths[row] = pair.lengths[j], s.hot[row] = pair.hot[j];
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
    if (lane == 0) s.blocks = blocks_for(__popc(even) + __popc(odd)), s.real = pair.real;
}

// Whether rows still are what the plan was made from: a row a thread, all threads of the block.
__device__ __forceinline__ bool plan_holds(const IndexTopk& p, const ScoreShared& s) {
    const int row = threadIdx.x;
    bool same = true;
    if (row < p.batch.size) {
        const i64 kept = s.seats[row];
        const i32 hot = kept >= 0 && kept < p.state.seats ? __ldcg(p.state.hot_slots + kept) : -1;
        same = RowPair::id(p.batch.seats, row, p.batch.wide_seats) == kept &&
               RowPair::id(p.batch.lengths, row, p.batch.wide_lengths) == s.lengths[row] && hot == s.hot[row];
    }
    if (row == AHEAD_ROWS) same = __ldcg(p.batch.num_real) == s.real;
    return __syncthreads_and(same);
}

// The plan, by all threads; ends with a barrier.
__device__ __forceinline__ void plan(const IndexTopk& p, ScoreShared& s) {
    // Hot slots of all seats are asked for beside the rows', not behind them.
    const int seats = min(p.state.seats, HOT_MAX);
    NamedRow named = {};
    if (threadIdx.x < p.batch.size) named = named_row(p, threadIdx.x);
    for (int i = threadIdx.x; i < seats; i += SCORE_THREADS) s.hot_slots[i] = p.state.hot_slots[i];
    __syncthreads();
    u64 carry = 0;
    u32 scored = 0;
    for (int base = 0; base < p.batch.size; base += SCORE_THREADS) {
        const int row = base + static_cast<int>(threadIdx.x);
        u64 work = 0, total;
        if (row < p.batch.size) {
            if (base > 0) named = named_row(p, row);
            const IndexRow at = index_row(
                p, named, [&](i64 seat) { return seat < HOT_MAX ? s.hot_slots[seat] : p.state.hot_slots[seat]; });
            s.rows[row] = make_int2(at.seat, at.length);
            work = work_of(at);
        }
        scored += __syncthreads_count(work != 0);
        const u64 before = sum_before<SCORE_THREADS, u64>(work, s.sums, total);
        if (row < p.batch.size) s.first[row] = carry + before;
        carry += total;
    }
    if (threadIdx.x == 0) s.first[p.batch.size] = carry, s.blocks = blocks_for(scored);
    __syncthreads();
}

// Where the table names this lane's page of the share, one of its first 32; null beyond those of the share's first row.
__device__ __forceinline__ const i32* first_entry(const IndexTopk& p, const ScoreShared& s, const Share& own) {
    const u32 at = own.begin + threadIdx.x % 32;
    if (at >= min(own.end, pages_before(s, own.row + 1))) return nullptr;
    return p.state.index_table + static_cast<i64>(s.rows[own.row].x) * p.state.max_pages + (at - pages_before(s, own.row));
}

// Has the key page that `entry` names brought to L2. What the kernel ahead still writes to it is written there.
__device__ __forceinline__ void ask_for_page(const IndexTopk& p, const i32* entry) {
    const u32 page = __ldcg(entry);
    if (page >= static_cast<u32>(p.state.key_rows / PAGE_TOKENS)) return;
    const u8* const from = p.state.index_keys + (p.group * p.state.key_rows + static_cast<i64>(page) * PAGE_TOKENS) * KEY_ROW;
    bring_to_l2(from, PAGE_BYTES);
}

// A block's share, and the table's entries of its first pages, one a lane of the warp that brings pages, where they are known.
struct PlannedShare {
    Share own;
    bool known;
    i32 first;
};
// By all threads; rows of `s` may be read then. The kernel ahead has ended.
__device__ __forceinline__ PlannedShare plan_share(const IndexTopk& p, ScoreShared& s) {
    const bool brings = threadIdx.x >= 32 * WARPS;
    PlannedShare made = {{}, p.batch.size >= 1 && p.batch.size <= AHEAD_ROWS, -1};
    const i32* entry = nullptr;
    if (made.known) {
        if (brings) plan_ahead(p, s);
        __syncthreads();
        made.own = share_of_block(p, s);
        if (brings) entry = first_entry(p, s, made.own);
        if (entry != nullptr && threadIdx.x % 32 < AHEAD_PAGES) ask_for_page(p, entry);
    }
    await_last();
    let_next_begin();
    if (made.known) {
        if (entry != nullptr) made.first = __ldcg(entry);
        made.known = plan_holds(p, s);
    }
    if (!made.known) {
        __syncthreads();  // the plan ahead has been read
        plan(p, s);
        made.own = share_of_block(p, s);
    }
    return made;
}

}  // namespace hisparse

// attend_rows on Hopper: 64 heads of one batch row over one span of its entries, by two warp groups and a third that
// gathers. The contract of kernels/attention.py for 512 latents and 64 rope values, queries in bfloat16, rows in
// bfloat16 or fp8.
//
//     gatherers    the rows of each block of 32 into one of four stages; fp8 ones become bfloat16 on the way
//     group W      scores of every second block, W, W + 2, ..., and their shares into shared memory;
//                  latents 256 W .. 256 W + 255 of the sum over all blocks
//
// The groups take turns: one forms shares while the other's products keep the tensor cores busy. Blocks are summed in
// order. A block of rows is key and value: nine tiles of 64 dimensions, 32 rows x 128 bytes each, in wgmma's 128-byte
// swizzle. As keys its rows are B by columns, as values the first eight tiles are B by rows. Sums stay in registers.
//
// Shares are exp2(score - level) with a level per head that lags behind the highest score by up to SLACK: shares then
// stay below 2**SLACK, and sums need rescaling only where a block passes that (the first one, and few after). Levels
// go from block to block, so from group to group, and follow from the scores alone.
//
// The splits of a result form a cluster. Each leaves its sums in its own shared memory; then every block adds up a share
// of the result over all of them. Partial results in global memory, and a second kernel that adds them up, took 30 us of
// 53 for 16 requests.
//
// Where rows are decoded (fp8) and blocks of heads make pairs, a pair is in the cluster too: each of the two decodes half
// of the rows of a block, and writes them to both (attend_gather.cuh).
//
// Rejected: both groups at the same block of 64 rows, half of its scores each (products stand still while shares are
// formed and exchanged); queries in registers (no faster in that form); bulk copies (rows must be swizzled on arrival,
// which only tiled copies of a tensor map do, a tile of a row at a time); eight gathering warps (128 registers a thread
// are fewer than an instruction of 256 sums takes).
#pragma once

#include "attend_gather.cuh"

namespace hisparse {

constexpr bool PAIRS = KEY_BYTES == 1;  // rows in bfloat16 are copied as they are, which no other block can do

__device__ __forceinline__ float none() { return __int_as_float(0xFF800000); }
__device__ __forceinline__ float exp2_of(float v) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}

// What a thread holds: heads g and g + 8 of its warp's 16, as wgmma lays accumulators out.
struct Attention {
    float sums[128];   // part i: head i / 2 % 2, latents 8 (i / 4) + 2 t + i % 2 of the group's
    float scores[16];  // likewise, rows of a block of the group's
    float level[2], weight[2];
    float fade[2];     // by which a block lowers sums
};

// Shares of the block into shared memory, added to `added`; true when one is beyond 2**SLACK.
template <int W>
__device__ __forceinline__ bool write_shares(const Attention& a, float scale, float (&added)[2], u8* shares) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % GROUP / 32;
    bool beyond = false;
    added[0] = added[1] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float level = a.level[half] == none() ? 0.0f : a.level[half], limit = a.level[half] + SLACK;
        u8* const line = shares + (warp * 16 + half * 8 + g) * 128 + 4 * t;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float x = a.scores[4 * j + 2 * half], y = a.scores[4 * j + 2 * half + 1];
            beyond |= x * scale > limit || y * scale > limit;
            const float p = exp2_of(fmaf(x, scale, -level)), q = exp2_of(fmaf(y, scale, -level));
            added[half] += p + q;
            *reinterpret_cast<u32*>(line + (((4 * W + j) ^ g) << 4)) = pair_of(p, q);
        }
    }
    publish_shared();
    return beyond;
}

// New levels, and what they make of the sums of blocks before.
__device__ __forceinline__ void raise_to(Attention& a, int half, float raised) {
    a.fade[half] = raised == none() ? 1.0f : exp2_of(a.level[half] - raised);
    a.level[half] = raised;
    a.weight[half] *= a.fade[half];
}
__device__ __forceinline__ void rescale(Attention& a) {
#pragma unroll
    for (int i = 0; i < 128; ++i) a.sums[i] *= a.fade[i / 2 % 2];
}
// To the highest scores of the block.
template <int W> __device__ __forceinline__ void raise_levels(Attention& a, float scale, Shared& s) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % GROUP / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float highest = none();
#pragma unroll
        for (int j = 0; j < 8; ++j) highest = fmaxf(highest, a.scores[j / 2 * 4 + 2 * half + j % 2] * scale);
        highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFF, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFF, highest, 2));
        raise_to(a, half, fmaxf(a.level[half], highest));
        if (t == 0) s.levels[W][warp * 16 + half * 8 + g] = a.level[half];
    }
}
// To those of the other group's block.
template <int W> __device__ __forceinline__ void follow_levels(Attention& a, const Shared& s) {
    const int g = threadIdx.x % 32 / 4, warp = threadIdx.x % GROUP / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) raise_to(a, half, s.levels[1 - W][warp * 16 + half * 8 + g]);
}

// The blocks of group W, and the other's between them. Group and stage are compile-time constants: descriptors are then
// constants too, instead of a few instructions and a wait ahead of each product.
template <int W> struct Turns {
    const AttendRows& p;
    const i32* entries;
    int begin, end, blocks;
    Shared& s;

    template <int STAGE> __device__ __forceinline__ void issue_scores(Attention& a, int i) const {
        const u32 queries = operand(s.queries), rows = operand(s.rows[STAGE]);
        await(s.full[STAGE], i / STAGES & 1);
        publish_shared();
        __syncwarp();
        open_products();
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int step = 0; step < 4; ++step)
                multiply_keys(a.scores, describe(queries, tile * QUERY_TILE_BYTES + 32 * step),
                              describe(rows, tile * TILE_BYTES + 32 * step), tile + step);
        commit_products();
    }
    // This warp has read a stage.
    __device__ __forceinline__ void leave(int stage) const {
        if (threadIdx.x % 32 != 0) return;
        arrive(s.empty[stage]);
        if (PAIRS && p.sides == 2) open_remote_gate(&s.freed[stage], cluster_rank() ^ 1);
    }
    // Of a block of group OF, whose shares are there.
    template <int STAGE, int OF> __device__ __forceinline__ void issue_sums(Attention& a) const {
        const u32 shares = operand(s.shares + 64 * OF), rows = operand(s.rows[STAGE] + W * (4 * TILE_BYTES));
        __syncwarp();
        open_products();
#pragma unroll
        for (int step = 0; step < BLOCK / 16; ++step)
            multiply_latents(a.sums, describe(shares, 32 * step), describe(rows, step * 2048, TILE_BYTES));
        commit_products();
    }
    // Bit j: column j of this thread's scores is of an entry that is held.
    __device__ __forceinline__ u32 held_columns(int i) const {
        u32 held = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int entry = begin + i * BLOCK + 8 * (j / 2) + 2 * static_cast<int>(threadIdx.x % 4) + j % 2;
            held |= place_of(entries, entry, end) >= 0 ? 1u << j : 0u;
        }
        return held;
    }
    // The shares of block i, whose scores are there, for both groups; returns whether levels were raised.
    __device__ __forceinline__ bool share_out(Attention& a, u32 held) const {
#pragma unroll
        for (int j = 0; j < 16; ++j)
            if (!(held >> (j / 4 * 2 + j % 2) & 1)) a.scores[j] = none();
        float added[2];
        const bool raised = any_of_group<W>(write_shares<W>(a, p.scale, added, s.shares));
        if (raised) {
            raise_levels<W>(a, p.scale, s);
            write_shares<W>(a, p.scale, added, s.shares);
        }
        a.weight[0] += added[0], a.weight[1] += added[1];
        if (threadIdx.x % GROUP == 0) s.raised[W] = raised;
        arrive(s.shared[W]);  // each thread for what it wrote and read
        return raised;
    }
    // Wait for the shares of the other group's block i, and take over the levels that it raised.
    __device__ __forceinline__ void follow(Attention& a, int i) const {
        await(s.shared[1 - W], i / 2 & 1);
        if (!s.raised[1 - W]) return;
        follow_levels<W>(a, s);
        rescale(a);
    }
    // Sum the other group's block in STAGE.
    template <int STAGE> __device__ __forceinline__ void sum_other(Attention& a) const {
        issue_sums<STAGE, 1 - W>(a);
        await_products<0>();
        leave(STAGE);
    }
    // Block i of this group, in STAGE, whose scores are there, the other group's before it, and scores of the next.
    template <int STAGE> __device__ __forceinline__ void turn(Attention& a, int i, u32& held) const {
        constexpr int BEFORE = (STAGE + STAGES - 1) % STAGES, NEXT = (STAGE + 2) % STAGES;
        if (i > 0) follow(a, i - 1);
        if (i >= 2) await(s.empty[NEXT], (i - 2) / STAGES & 1);  // both groups have read this one's last shares
        const bool raised = share_out(a, held);
        if (i > 0) sum_other<BEFORE>(a);
        await(s.shared[W], i / 2 & 1);
        if (raised) rescale(a);
        issue_sums<STAGE, W>(a);
        if (i + 2 < blocks) {
            issue_scores<NEXT>(a, i + 2);
            held = held_columns(i + 2);
            await_products<1>();
        }
        if (i + 2 >= blocks) await_products<0>();
        leave(STAGE);
        await_products<0>();
    }
    __device__ __forceinline__ void run(Attention& a) const {
        if (W < blocks) {
            issue_scores<W>(a, W);
            u32 held = held_columns(W);
            await_products<0>();
            for (int i = W; i < blocks; i += 4) {
                turn<W>(a, i, held);
                if (i + 2 < blocks) turn<W + 2>(a, i + 2, held);
            }
        }
        const int last = blocks - 1;
        if (last % 2 == W || last < 0) return;
        follow(a, last);
        if (last % STAGES < 2)
            sum_other<1 - W>(a);
        else
            sum_other<3 - W>(a);
    }
};

__device__ __forceinline__ void load_queries(const AttendRows& p, int row, int first_head, u8* to) {
    const u8* const from = static_cast<const u8*>(p.queries) + static_cast<i64>(row) * p.heads * (2 * VALUES);
    for (int i = threadIdx.x; i < HEADS * TILES * 8; i += CONSUMERS) {
        const int place = i / (TILES * 8), head = first_head + place, chunk = i % (TILES * 8);
        copy_chunk(shared_address(to) + chunk / 8 * QUERY_TILE_BYTES + swizzled(place, chunk % 8),
                   from + (head < p.heads ? head * (2 * VALUES) + 16 * chunk : 0), head < p.heads);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    publish_shared();
    sync_consumers();
}

// Sums of a head and group are put together in shared memory, which nothing reads by then. Those of a whole result leave
// it in one piece; parts of one stay until all blocks of the cluster have theirs, and are added up across it. Lines of the
// pitches below keep a quad's words, and eight heads', in different banks.
constexpr int WHOLE_BYTES = 2 * LATENT / 2, WHOLE_PITCH = WHOLE_BYTES + 16;   // bfloat16
constexpr int PART_BYTES = 4 * LATENT / 2, PART_PITCH = PART_BYTES + 32;      // float32
static_assert(HEADS * PART_PITCH <= STAGES / 2 * TILES * TILE_BYTES, "two stages hold a group's sums");
static_assert(sizeof(Account) <= TILES * QUERY_TILE_BYTES, "where the queries were");

__device__ __forceinline__ float inverse_of(float weight) {
    return weight > 0 ? 1.0f / weight : weight == 0 ? 1.0f : weight;
}

template <int W>
__device__ __forceinline__ void write_sums(const AttendRows& p, int row, int first_head, Attention& a, Shared& s) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % GROUP / 32;
    const bool whole = p.splits == 1;
    const int pitch = whole ? WHOLE_PITCH : PART_PITCH;
    u8* const lines = s.rows[STAGES / 2 * W] + warp * 16 * pitch;
    meet_consumers(s, BLOCKS_SUMMED);  // levels, rows and queries have been read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        a.weight[half] += __shfl_xor_sync(0xFFFFFFFF, a.weight[half], 1);
        a.weight[half] += __shfl_xor_sync(0xFFFFFFFF, a.weight[half], 2);
        if (t == 0) s.levels[W][warp * 16 + half * 8 + g] = a.weight[half];
    }
    meet_consumers(s, WEIGHTS_TOLD);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int place = half * 8 + g;
        const float total = s.levels[0][warp * 16 + place] + s.levels[1][warp * 16 + place];
        if (whole) {
            const float factor = inverse_of(total);
#pragma unroll
            for (int j = 0; j < 32; ++j)
                *reinterpret_cast<u32*>(lines + place * pitch + 16 * j + 4 * t) =
                    pair_of(a.sums[4 * j + 2 * half] * factor, a.sums[4 * j + 2 * half + 1] * factor);
        } else {
#pragma unroll
            for (int j = 0; j < 32; ++j)
                *reinterpret_cast<float2*>(lines + place * pitch + 32 * j + 8 * t) =
                    make_float2(a.sums[4 * j + 2 * half], a.sums[4 * j + 2 * half + 1]);
            Account& account = account_of(s);
            if (W == 0 && t == 0)
                account.peaks[warp * 16 + place] = a.level[half], account.totals[warp * 16 + place] = total;
        }
    }
    if (!whole) return;
    const i64 first = static_cast<i64>(row) * p.heads + first_head + warp * 16;
    const int heads = p.heads - first_head - warp * 16;  // of this warp
    publish_shared();
    __syncwarp();
    if (lane < 16 && lane < heads) {
        u8* const to = static_cast<u8*>(p.out) + (2 * (first + lane) + W) * WHOLE_BYTES;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                     "r"(shared_address(lines + lane * pitch)), "n"(WHOLE_BYTES)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

// The rank of a split's block for these heads.
__device__ __forceinline__ int rank_of(const AttendRows& p, int split) {
    return split * p.sides + cluster_rank() % p.sides;
}
// What each split's sums count for in the result, for all heads, in the order of splits.
__device__ __forceinline__ void weigh_parts(const AttendRows& p, Shared& s) {
    Account& account = account_of(s);
    const int head = threadIdx.x;
    if (head < HEADS) {
        float level = none(), weight = 0;
        for (int split = 0; split < p.splits; ++split) level = fmaxf(level, peer_word(&account.peaks[head], rank_of(p, split)));
        level = level == none() ? 0.0f : level;
        for (int split = 0; split < p.splits; ++split) {
            const float fade = exp2_of(peer_word(&account.peaks[head], rank_of(p, split)) - level);
            weight += fade * peer_word(&account.totals[head], rank_of(p, split));
            account.factors[split][head] = fade;
        }
        account.inverse[head] = inverse_of(weight);
    }
    meet_consumers(s, PARTS_WEIGHED);
}

// This block's share of the result, four latents of a head at a time, from the sums of all blocks of the cluster.
__device__ __forceinline__ void add_parts(const AttendRows& p, int row, int split, int first_head, Shared& s) {
    constexpr int QUADS = LATENT / 4, TOGETHER = 4;
    const Account& account = account_of(s);
    meet_cluster();
    weigh_parts(p, s);
    const int heads = min(HEADS, p.heads - first_head);
    u8* const out = static_cast<u8*>(p.out) + (static_cast<i64>(row) * p.heads + first_head) * (2 * LATENT);
#pragma unroll 2
    for (int i = split * CONSUMERS + threadIdx.x; i < heads * QUADS; i += p.splits * CONSUMERS) {
        const int head = i / QUADS, quad = i % QUADS;
        const u8* const part = s.rows[quad / (QUADS / 2) * (STAGES / 2)] + head * PART_PITCH + quad % (QUADS / 2) * 16;
        float4 sum = make_float4(0, 0, 0, 0);
        for (int begin = 0; begin < p.splits; begin += TOGETHER) {
            float4 held[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
                if (begin + j < p.splits) held[j] = peer_quad(part, rank_of(p, begin + j));
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
                if (begin + j >= p.splits) break;
                const float factor = account.factors[begin + j][head];
                sum.x += held[j].x * factor, sum.y += held[j].y * factor;
                sum.z += held[j].z * factor, sum.w += held[j].w * factor;
            }
        }
        const float factor = account.inverse[head];
        *reinterpret_cast<uint2*>(out + i * 8) =
            make_uint2(pair_of(sum.x * factor, sum.y * factor), pair_of(sum.z * factor, sum.w * factor));
    }
    meet_cluster();  // a block ends only when its sums have been read
}

template <int W>
__device__ __forceinline__ void attend(const AttendRows& p, const i32* entries, int begin, int end, int blocks, int row,
                                       int first_head, Shared& s) {
    Attention a;
#pragma unroll
    for (int i = 0; i < 128; ++i) a.sums[i] = 0;
    a.level[0] = a.level[1] = none();
    a.weight[0] = a.weight[1] = 0;
    Turns<W>{p, entries, begin, end, blocks, s}.run(a);
    write_sums<W>(p, row, first_head, a, s);
}

}  // namespace hisparse

// grid (head blocks x splits, batch), the splits of a result in a cluster, and those of a pair of head blocks
extern "C" __global__ void __launch_bounds__(hisparse::THREADS, 1)
    attend_rows(const __grid_constant__ hisparse::AttendRows p) {
    using namespace hisparse;
    extern __shared__ __align__(1024) u8 dynamic[];
    Shared& s = *reinterpret_cast<Shared*>(dynamic);
    const int row = blockIdx.y, side = blockIdx.x % p.sides, split = blockIdx.x / p.sides % p.splits;
    const int first_head = (blockIdx.x / (p.sides * p.splits) * p.sides + side) * HEADS;
    const bool paired = PAIRS && p.sides == 2;
    const int begin = split * p.span, end = min(begin + p.span, p.k);
    const int blocks = end > begin ? (end - begin + BLOCK - 1) / BLOCK : 0;
    const i32* const entries = p.entries + static_cast<i64>(row) * p.k;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            open_barrier(s.full[i], paired ? GROUP : FILL_ARRIVALS);
            open_barrier(s.empty[i], CONSUMERS / 32);
            open_barrier(s.freed[i], CONSUMERS / 32);
        }
        for (int i = 0; i < 2; ++i) open_barrier(s.shared[i], GROUP);
        open_barrier(s.met, CONSUMERS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (paired) meet_cluster();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GATHER_REGISTERS));
#if KEY_BYTES == 1
        if (paired)
            gather<PairGatherer, true>(p.rows, entries, begin, end, blocks, cluster_rank() ^ 1, s);
        else
#endif
            gather<Gatherer, false>(p.rows, entries, begin, end, blocks, 0, s);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(PRODUCT_REGISTERS));
        load_queries(p, row, first_head, s.queries);
        if (threadIdx.x < GROUP)
            attend<0>(p, entries, begin, end, blocks, row, first_head, s);
        else
            attend<1>(p, entries, begin, end, blocks, row, first_head, s);
        if (p.splits > 1)
            add_parts(p, row, split, first_head, s);
        else if (paired)
            meet_cluster();  // a block ends only when its peer has arrived at its gates
    }
}

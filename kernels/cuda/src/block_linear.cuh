// hidden @ weight.T of a block-FP8 weight, decoded in registers, by Hopper's matrix instruction. Units: block_linear.
//
//     DENSE     one weight
//     GROUPED   weights of experts: a tile of tokens is of the expert that tile_expert names; rows of the result by `slots`
//     GATED     silu(gate x) * up x of experts: half a tile's rows are of gate, half of up, sums of both in the same lane
//
// Weights are the left operand: out.T[rows of weights, tokens] = weight @ hidden.T. A block of threads is one producer warp,
// which copies stages (128 values of K: codes of ROWS rows, TOKENS tokens) to shared memory by the tensor copy engine, and
// TEAMS teams of four warps. A team multiplies 64 rows of weights: it reads codes as the matrix instruction wants them in
// registers, two to a lane, decodes them and rounds them to bfloat16.
//
// Work is the line of all units (tile of rows, tile of tokens, block of K), cut into one equal range for each block of
// threads, as in stream-K (Osama et al., 2023). A range may begin or end inside of a tile. A range that begins inside gives
// its sums away, in `partial`, and raises its flag; the range that holds the tile's first unit and not its last adds them
// in ascending order and lowers the flags. Ranges are dealt in descending order, so that blocks wait only for blocks that
// were launched earlier, and these give before they wait. Flags are zero between launches; who may share them is said in
// kernels/cuda/block_linear.py. kernels/cuda/block_plans.py has the same arithmetic, and its tests. Ranges of GROUPED and GATED
// are whole tiles: how many there are depends on the routing, and a split would let the bits of a row depend on it.
//
// Neighbouring rows of weights, 2r and 2r + 1, are rows r of two boxes: a lane's sums are of neighbours. GATED: boxes are of
// the same rows of gate and of up.
//
// CLUSTER 2: the blocks of a cluster take neighbouring tiles of rows, by the same tokens and in the same range. Each copies
// half of a stage's activations to both.
#pragma once

#include "block_hopper.cuh"

namespace hisparse {

constexpr int TURNS = 8 / CHUNK / 2;  // of a stage's 8 matrix instructions: two chunks, each decoded together
constexpr int SUMS = COLUMNS * 128;  // of a team, in vectors of four
constexpr int GIVERS = COLUMNS <= 4 ? 8 / COLUMNS : 1;  // whose sums are in flight at once: registers are short
static_assert(TEAMS >= 2 && TEAMS <= 4 && TURNS * CHUNK * 2 == 8, "whole turns");

// Two codes, scaled and rounded once: the first in the lower half.
__device__ __forceinline__ u32 decoded_pair(u32 at, int offset, float scale) {
    u16 codes;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(codes) : "r"(at + offset));
    float low, high;
    asm("{ .reg .b32 both; .reg .b16 l, h;\n"
        "cvt.rn.f16x2.e4m3x2 both, %2; mov.b32 {l, h}, both; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high) : "h"(codes));
    const float second = __fmul_rn(high, scale);
    return pair_of(__fmul_rn(low, scale), second);
}

struct Team {
    int number, thread;
    u32 lane_at;  // of this lane's first code in a stage, before the swizzle of the step
    u32 stages, full, empty;
    int stage = 0;
    u32 parity = 0;

    // 64 rows of codes by one stage. Two sets of registers take turns: one is decoded while the other multiplies. The
    // compiler keeps products asynchronous where a loop's body has just two groups of them.
    __device__ __forceinline__ void multiply_stage(float (&c)[COLUMNS][4], u32 (&a)[2][CHUNK][4], float scale, float other, bool release) {
        await_phase(full + 8 * stage, parity);
        const u32 codes = stages + stage * STAGE_BYTES + lane_at;
        const u32 hidden = describe(stages + stage * STAGE_BYTES + CODE_BYTES);
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
            for (int set = 0; set < 2; ++set) {
                const int first = (turn * 2 + set) * CHUNK;
#pragma unroll
                for (int step = 0; step < CHUNK; ++step) {
                    const u32 at = codes ^ (first + step) << 4;
                    u32(&to)[4] = a[set][step];
                    to[0] = decoded_pair(at, 0, scale);
                    to[1] = decoded_pair(at, CODE_BYTES / 2, other);
                    to[2] = decoded_pair(at, 8, scale);
                    to[3] = decoded_pair(at, CODE_BYTES / 2 + 8, other);
                }
                open_products();
#pragma unroll
                for (int step = 0; step < CHUNK; ++step) {
                    const u32 b = hidden + (first + step) / 4 * (HALF_BYTES >> 4) + (first + step) % 4 * 2;
                    multiply(c, a[set][step], b);
                }
                commit_products();
                await_products<1>();
                if (set == 0 && turn == 0 && release) release_stage(stage ? stage - 1 : STAGES - 1);
            }
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void release_stage(int which) {
        __syncwarp();
        if (CLUSTER == 1) {
            if (thread % 32 == 0) arrive(empty + 8 * which);
        } else if (thread % 32 < CLUSTER) {
            arrive_at(empty + 8 * which, thread % 32);
        }
    }
    __device__ __forceinline__ void sync() { sync_named(1 + number, 128); }
};

// Where a tile lies: rows of the weight, first row of the activations. Grouped forms: `jobs`, the experts of all tiles of
// activations, in shared memory; tiles of one expert that read the same weights follow each other.
struct Place {
    int row, token, expert;
};
__device__ __forceinline__ Place place_of(const BlockLinear& p, const i32* jobs, int count, int tile, int rank) {
    if (FORM == DENSE)
        return {(tile / p.token_tiles * CLUSTER + rank) * TILE_ROWS, tile % p.token_tiles * TOKENS, 0};
    const int job = tile / p.row_tiles, expert = jobs[job];
    int first = job, end = job + 1;
    while (first > 0 && jobs[first - 1] == expert) --first;
    while (end < count && jobs[end] == expert) ++end;
    const int number = tile - first * p.row_tiles;
    return {(number / (end - first) * CLUSTER + rank) * TILE_ROWS, (first + number % (end - first)) * TOKENS, expert};
}
__device__ __forceinline__ void add(float (&sums)[4], const float4& v) {
    sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
}
__device__ __forceinline__ u16 bfloat16_of(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
// The smaller of both; no number stays none.
__device__ __forceinline__ float below(float value, float limit) { return value > limit ? limit : value; }
__device__ __forceinline__ float rounded(float x) { return __uint_as_float(u32(bfloat16_of(x)) << 16); }

extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void block_linear(const __grid_constant__ BlockLinear p) {
    extern __shared__ u8 shared[];
    __shared__ volatile int range_begin, range_end;  // registers are short: read again where needed
    const u32 stages = (shared_address(shared) + 1023) & ~1023u;
    const u32 full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    const int rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
    const int thread = threadIdx.x, ranges = gridDim.x / CLUSTER, range = ranges - 1 - blockIdx.x / CLUSTER;
    i32* jobs = nullptr;
    int count = 0;  // of jobs
    if (FORM != DENSE) {
        jobs = reinterpret_cast<i32*>(shared + (stages - shared_address(shared)) + STAGES * (STAGE_BYTES + 16));
        for (int first = 0; first < p.jobs_max; first += THREADS) {
            const int job = first + thread, expert = job < p.jobs_max ? p.tile_expert[job] : -1;
            if (job < p.jobs_max) jobs[job] = expert;
            count += __syncthreads_count(expert >= 0);
        }
    }
    if (thread == 0) {
        // By experts ranges are whole tiles: else what a row's sums are would depend on how others are routed.
        const int whole = FORM == DENSE ? 1 : p.blocks, parts = FORM == DENSE ? p.units : count * p.row_tiles;
        range_begin = int(i64(parts) * range / ranges) * whole, range_end = int(i64(parts) * (range + 1) / ranges) * whole;
        for (int stage = 0; stage < STAGES; ++stage) {
            open_barrier(full + 8 * stage, 1);
            open_barrier(empty + 8 * stage, CLUSTER * CONSUMERS / 32);
        }
        publish_barriers();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive();

    if (thread >= CONSUMERS) {
        give_registers<PRODUCER_REGISTERS>();
        const int begin = range_begin, end = range_end;
        const bool fetches = thread == CONSUMERS;
        int block, tile;
        Place at_tile;
        auto start = [&] {
            block = begin % p.blocks, tile = begin / p.blocks;
            if (begin < end) at_tile = place_of(p, jobs, count, tile, rank);
        };
        auto step = [&](int number) {
            if (++block < p.blocks) return;
            block = 0, ++tile;
            if (begin + number + 1 < end) at_tile = place_of(p, jobs, count, tile, rank);
        };
        auto fetch_weights = [&](int stage) {
            const u32 at = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
            arrive_expecting(barrier, STAGE_BYTES);
            for (int odd = 0; odd < 2; ++odd) {
                const TensorMap* map = FORM == GATED && odd ? &p.others : &p.codes;
                const int line = FORM == GATED ? at_tile.expert * p.n + at_tile.row : (at_tile.expert * p.n + at_tile.row) / 2;
                fetch_codes(at + odd * (CODE_BYTES / 2), map, block * 128, FORM == GATED ? 0 : odd, line, barrier);
            }
        };
        // The weights of the first stages do not wait for the kernel ahead.
        const int ahead = min(STAGES, end - begin);
        if (fetches) {
            start();
            for (int number = 0; number < ahead; ++number) {
                fetch_weights(number);
                step(number);
            }
        }
        if (CLUSTER > 1) cluster_wait();
        if (!fetches) return;
        await_last();
        int stage = 0;
        u32 parity = 1;
        start();
        for (int number = 0; number < end - begin; ++number) {
            const u32 at = stages + stage * STAGE_BYTES + CODE_BYTES, barrier = full + 8 * stage;
            if (number >= STAGES) {
                await_phase(empty + 8 * stage, parity);
                fetch_weights(stage);
            }
            for (int half = 0; half < 2; ++half) {
                if (CLUSTER == 1)
                    fetch_hidden(at + half * HALF_BYTES, &p.hidden, block * 128 + 64 * half, at_tile.token, barrier);
                else if (half == rank)
                    fetch_hidden_for_both(at + half * HALF_BYTES, &p.hidden, block * 128 + 64 * half, at_tile.token, barrier);
            }
            step(number);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        // The other block may still arrive here: shared memory must stay until it has released every stage.
        if (CLUSTER > 1)
            for (int number = 0; number < STAGES; ++number) {
                await_phase(empty + 8 * stage, parity);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        return;
    }

    take_registers<REGISTERS>();
    const int team = thread / 128, lane = thread % 32, group = lane / 4, within = lane % 4, warp = thread / 32 % 4;
    const u32 pair = team * 32 + warp * 8 + group;
    Team self{team, thread % 128, (pair * 128 | within * 2) ^ (group << 4), stages, full, empty};
    if (CLUSTER > 1) cluster_wait();
    await_last();
    let_next_begin();  // not before: what is launched early may rely on all kernels before the one ahead of it
    bool release = false;
    for (int unit = range_begin; unit < range_end;) {
        const int tile = unit / p.blocks, first = unit % p.blocks;
        const int last = min(p.blocks, first + range_end - unit);
        const Place place = place_of(p, jobs, count, tile, rank);
        const int row = place.row + team * (TILE_ROWS / TEAMS);
        const i64 line = (i64(place.expert) * ((p.n + 127) / 128) + min(row, p.n - 1) / 128) * p.blocks;
        const float* scales = p.scales + line;
        const float* other_scales = p.other_scales + line;
        float c[COLUMNS][4] = {};
        u32 a[2][CHUNK][4];
        float next = __ldg(scales + first), next_other = FORM == GATED ? __ldg(other_scales + first) : 0;
        for (int block = first; block < last; ++block) {
            const float scale = next, other = FORM == GATED ? next_other : next;
            next = __ldg(scales + min(block + 1, last - 1));
            if (FORM == GATED) next_other = __ldg(other_scales + min(block + 1, last - 1));
            self.multiply_stage(c, a, scale, other, release);
            release = true;
        }
        await_products<0>();
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[j][e])::"memory");
        self.release_stage(self.stage ? self.stage - 1 : STAGES - 1);
        release = false;
        unit += last - first;

        auto begin_of = [&](int number) { return int(i64(p.units) * number / ranges); };
        auto partial_of = [&](int number) { return (number * CLUSTER + rank) * TEAMS + team; };
        if (FORM == DENSE && first > 0) {  // given to the range that has the tile's begin
            float4* to = reinterpret_cast<float4*>(p.partial) + i64(partial_of(range)) * SUMS + self.thread;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) __stcg(to + j * 128, make_float4(c[j][0], c[j][1], c[j][2], c[j][3]));
            self.sync();
            if (self.thread == 0) store_release(p.flags + partial_of(range), 1);
            continue;
        }
        if (FORM == DENSE && last < p.blocks) {
            const int whole = (tile + 1) * p.blocks;
            for (int giver = range + 1 + self.thread; giver < ranges && begin_of(giver) < whole; giver += 128) {
                i32* flag = p.flags + partial_of(giver);
                while (!load_acquire(flag)) {}
                *flag = 0;
            }
            self.sync();
            const float4* partial = reinterpret_cast<float4*>(p.partial) + self.thread;
            auto gives = [&](int giver) { return giver < ranges && begin_of(giver) < whole; };
#pragma unroll 1
            for (int giver = range + 1; gives(giver); giver += GIVERS) {
                float4 v[GIVERS][COLUMNS];
#pragma unroll
                for (int g = 0; g < GIVERS; ++g)
                    if (g == 0 || gives(giver + g))
#pragma unroll
                        for (int j = 0; j < COLUMNS; ++j) {
                            v[g][j] = __ldcg(partial + i64(partial_of(giver + g)) * SUMS + j * 128);
                            if (GIVERS == 1) add(c[j], v[g][j]);
                        }
#pragma unroll
                for (int g = 0; g < GIVERS; ++g)
                    if (GIVERS > 1 && (g == 0 || gives(giver + g)))
#pragma unroll
                        for (int j = 0; j < COLUMNS; ++j) add(c[j], v[g][j]);
            }
        }
        if (FORM == GATED) {  // sums of gate and up lie in the same lane
            const int at = row + warp * 8 + group;
            if (at >= p.n) continue;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const float x = below(rounded(c[j][odd]), p.limit), opened = rounded(x / (1.0f + __expf(-x)));
                    const float factor = -below(-below(rounded(c[j][2 + odd]), p.limit), p.limit);
                    const i64 to = place.token + 8 * j + within * 2 + odd;
                    p.out[to * p.n + at] = bfloat16_of(opened * factor);
                }
            continue;
        }
        const int token = place.token + within * 2, at = row + 2 * (warp * 8 + group);
        if (at >= p.n) continue;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                int to = token + 8 * j + odd;
                const u32 both = pair_of(c[j][odd], c[j][2 + odd]);
                if (FORM == GROUPED) to = __ldg(p.slots + to);
                if (FORM == GROUPED ? to >= 0 : to < p.tokens) *reinterpret_cast<u32*>(p.out + i64(to) * p.n + at) = both;
            }
    }
}

}  // namespace hisparse

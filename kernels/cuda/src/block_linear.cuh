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

#include "ptx.cuh"

namespace hisparse {

constexpr int ROWS = TEAMS * 64, CONSUMERS = TEAMS * 128, THREADS = CONSUMERS + 128;
constexpr int REGISTERS = RESIDENT == 2 ? 104 : TEAMS == 2 ? 232 : TEAMS == 3 ? 160 : 112;  // of a consumer's thread
constexpr int PRODUCER_REGISTERS = TEAMS == 2 && RESIDENT == 1 ? 40 : 32;
constexpr int DENSE = 0, GROUPED = 1, GATED = 2;
constexpr int TILE_ROWS = FORM == GATED ? ROWS / 2 : ROWS;  // of one weight
constexpr int CODE_BYTES = ROWS * 128, HALF_BYTES = TOKENS * 128, STAGE_BYTES = CODE_BYTES + 2 * HALF_BYTES;
constexpr int COLUMNS = TOKENS / 8;     // of sums, each of 8 tokens
constexpr int TURNS = 8 / CHUNK / 2;    // of a stage's 8 matrix instructions: two chunks, each decoded together
constexpr int SUMS = COLUMNS * 128;     // of a team, in vectors of four
constexpr int GIVERS = COLUMNS <= 4 ? 8 / COLUMNS : 1;  // whose sums are in flight at once: registers are short
static_assert(TEAMS >= 2 && TEAMS <= 4 && TURNS * CHUNK * 2 == 8, "whole turns");
static_assert(1024 + STAGES * (STAGE_BYTES + 16) <= (RESIDENT == 2 ? 115712 : 232448), "shared memory of a block");
static_assert(RESIDENT == 1 || TEAMS == 2 && RESIDENT == 2, "registers of two blocks");
static_assert(CLUSTER == 1 || CLUSTER == 2, "halves of a stage's activations");
constexpr u64 READ_ONCE = 0x12F0000000000000ull, READ_OFTEN = 0x14F0000000000000ull;  // L2 cache policies

__device__ __forceinline__ void await_phase(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra done;\n"
        "bra again;\n"
        "done: }" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the same barrier of block `rank` of the cluster.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [at]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
__device__ __forceinline__ void fetch_codes(u32 to, const TensorMap* map, int k, int odd, int pair, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(k), "r"(odd), "r"(pair), "r"(barrier), "l"(READ_ONCE)
        : "memory");
}
__device__ __forceinline__ void fetch_hidden(u32 to, const TensorMap* map, int k, int token, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(k), "r"(token), "r"(barrier), "l"(READ_OFTEN)
        : "memory");
}
// To the same place of both blocks of a cluster, whose barriers count the bytes.
__device__ __forceinline__ void fetch_hidden_for_both(u32 to, const TensorMap* map, int k, int token, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to), "l"(map), "r"(k), "r"(token), "r"(barrier), "h"(u16(3)),
        "l"(READ_OFTEN)
        : "memory");
}

__device__ __forceinline__ u32 decoded_pair(u32 at, int offset, float scale) {
    u16 codes;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(codes) : "r"(at + offset));
    float low, high;
    asm("{ .reg .b32 both; .reg .b16 l, h;\n"
        "cvt.rn.f16x2.e4m3x2 both, %2; mov.b32 {l, h}, both; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high) : "h"(codes));
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(__fmul_rn(high, scale)), "f"(__fmul_rn(low, scale)));
    return pair;
}

// The upper word of a description is constant: where the compiler sees both, it adds 64 bits ahead of every product.
#define DESCRIBED(low) "{ .reg .b64 d; mov.b64 d, {%" low ", 0x40000040};\n"
#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
__device__ __forceinline__ void multiply(float (&c)[COLUMNS][4], const u32 (&a)[4], u32 b) {
#if TOKENS == 16
    asm volatile(
        DESCRIBED("12") "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, d, 1, 1, 1, 0; }"
        : FOUR(0), FOUR(1)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
#if TOKENS == 32
    asm volatile(
        DESCRIBED("20") "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, d, 1, 1, 1, 0; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
#if TOKENS == 64
    asm volatile(
        DESCRIBED("36") "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, d, 1, 1, 1, 0; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
#if TOKENS == 128
    asm volatile(
        DESCRIBED("68") "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, d, 1, 1, 1, 0; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7),
          FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
#if TOKENS == 256
    asm volatile(
        DESCRIBED("132") "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, d, 1, 1, 1, 0; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7),
          FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15),
          FOUR(16), FOUR(17), FOUR(18), FOUR(19), FOUR(20), FOUR(21), FOUR(22), FOUR(23),
          FOUR(24), FOUR(25), FOUR(26), FOUR(27), FOUR(28), FOUR(29), FOUR(30), FOUR(31)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
}
#undef FOUR
#undef DESCRIBED
__device__ __forceinline__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// A tile of TOKENS rows of 128 bytes, swizzled, for the matrix instruction: the lower word of its description. The upper one
// says that groups of eight rows are 1,024 bytes apart, and the swizzle. A step along K is 2 further.
__device__ __forceinline__ u32 describe(u32 at) {
    return (at >> 4 & 0x3FFF) | 1 << 16;
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
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * stage) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * stage), "r"(CLUSTER * CONSUMERS / 32)
                         : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive();

    if (thread >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
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
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(STAGE_BYTES) : "memory");
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

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
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
                    const float x = rounded(c[j][odd]), opened = rounded(x / (1.0f + __expf(-x)));
                    const i64 to = place.token + 8 * j + within * 2 + odd;
                    p.out[to * p.n + at] = bfloat16_of(opened * rounded(c[j][2 + odd]));
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
                u32 both;
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(c[j][2 + odd]), "f"(c[j][odd]));
                if (FORM == GROUPED) to = __ldg(p.slots + to);
                if (FORM == GROUPED ? to >= 0 : to < p.tokens) *reinterpret_cast<u32*>(p.out + i64(to) * p.n + at) = both;
            }
    }
}

}  // namespace hisparse

// Scores of 16 bfloat16 or fp8 keys for bfloat16 queries, by one warp on tensor cores (mma.m16n8k16).
//
// Keys are the rows of A, heads the columns of B: a lane then holds a few heads of two keys, sums them by itself in
// head order, and two shuffles end the sum: no score of a single head leaves its register. Which dimension stands in
// which of the 16 places of a product is free as long as A and B agree, so lanes read whole words, 16 bytes of a
// bfloat16 key, 4 of an fp8 one, without bank conflicts and without ldmatrix.
//
// Queries of a row stay in registers (128 of them at 64 heads x 128), so that a unit of keys costs no shared memory
// traffic but its own bytes; with WGMMA (Hopper, index_wgmma.cuh) they are read where they were staged.
//
// fp8 keys become float16 (every e4m3 is one) and so do the queries, after each head is scaled by the power of two that
// brings its largest magnitude to 2**14: exact but for values 2**-28 times smaller than that. The inverse goes into the
// head's weight, and the key's scale is applied to the sum, being positive.
#pragma once

#include "index_rows.cuh"
#include "index_keys.cuh"

namespace hisparse {

constexpr int TILES = (HEADS + 7) / 8;
constexpr int STEPS = DIM / 16;
constexpr int TEAM = WGMMA ? 4 : 1;  // warps that score together
static_assert(WARPS % TEAM == 0, "whole teams");

}  // namespace hisparse

#if WGMMA
#include "index_wgmma.cuh"
#endif

namespace hisparse {

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if KEY_BYTES == 1
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// The queries of a row as its warps read them: part i of lane 4g+t of tile n, eight dimensions of head 8n+g.
struct Queries {
#if WGMMA
    u32 blocks[STEPS][2][TILES][32];  // of 8 heads x 8 places: word 4g+t of a block is lane 4g+t's pair of places
#else
    uint4 parts[TILES][STEPS / 2][32];
#endif
    float2 weights[TILES][4];  // of heads 8n+2t and 8n+2t+1, with the scale
};

struct Scorer {
#if !WGMMA
    u32 queries[TILES][STEPS][2];
#endif
    const Queries& held;

    // Queries of a row into shared memory, by the whole block; a barrier must follow.
    static __device__ __forceinline__ void stage(const IndexTopk& p, int row, Queries& held) {
        const u16* const from = static_cast<const u16*>(p.queries) + static_cast<i64>(row) * HEADS * DIM;
        const int lane = threadIdx.x % 32, t = lane % 4;
        for (int n = threadIdx.x / 32; n < TILES; n += WARPS) {
            const int head = 8 * n + lane / 4;
            uint4 parts[STEPS / 2];
#pragma unroll
            for (int i = 0; i < STEPS / 2; ++i) {
                const int dim = KEY_BYTES == 1 ? t * (DIM / 4) + 8 * i : 32 * i + 8 * t;
                parts[i] = make_uint4(0, 0, 0, 0);
                if (head < HEADS) parts[i] = *reinterpret_cast<const uint4*>(from + head * DIM + dim);
            }
            const float factor = KEY_BYTES == 1 ? to_float16(parts) : 1.0f;
#pragma unroll
            for (int i = 0; i < STEPS / 2; ++i) {
#if WGMMA
                held.blocks[2 * i][0][n][lane] = parts[i].x, held.blocks[2 * i][1][n][lane] = parts[i].y;
                held.blocks[2 * i + 1][0][n][lane] = parts[i].z, held.blocks[2 * i + 1][1][n][lane] = parts[i].w;
#else
                held.parts[n][i][lane] = parts[i];
#endif
            }
            const float weight = head < HEADS ? p.weights[static_cast<i64>(row) * HEADS + head] : 0.0f;
            if (t == 0) reinterpret_cast<float*>(held.weights[n])[lane / 4] = weight * p.scale * factor;
        }
#if WGMMA
        publish_shared();
#endif
    }

    __device__ __forceinline__ explicit Scorer(const Queries& held) : held(held) {
#if !WGMMA
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < STEPS / 2; ++i) {
                const uint4 part = held.parts[n][i][threadIdx.x % 32];
                queries[n][2 * i][0] = part.x, queries[n][2 * i][1] = part.y;
                queries[n][2 * i + 1][0] = part.z, queries[n][2 * i + 1][1] = part.w;
            }
#endif
    }

    // Turns this lane's quarter of a head into float16; returns the factor that undoes the head's scaling.
    static __device__ __forceinline__ float to_float16(uint4 (&parts)[STEPS / 2]) {
        u32(&pairs)[2 * STEPS] = reinterpret_cast<u32(&)[2 * STEPS]>(parts);
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i)
            largest = fmaxf(largest, fmaxf(fabsf(low_bf16(pairs[i])), fabsf(high_bf16(pairs[i]))));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
        u32 exponent = __float_as_uint(largest) >> 23;  // biased; 141 is 2**14
        if (exponent == 255 || exponent == 0) exponent = 141;
        exponent = max(exponent, 15u);
        const float factor = __uint_as_float((268 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i)
            asm("cvt.rn.f16x2.f32 %0, %1, %2;"
                : "=r"(pairs[i]) : "f"(high_bf16(pairs[i]) * factor), "f"(low_bf16(pairs[i]) * factor));
        return __uint_as_float((exponent - 14) << 23);
    }

    // The score of key `key` of the staged unit, valid in lanes whose t is 0 or 1.
#if WGMMA
    __device__ __forceinline__ float score(const u8* unit, int& key, bool& mine) const {
        u32 a[STEPS][4];
        float c[TILES][4];
#pragma unroll
        for (int s = 0; s < STEPS; s += 2) read_keys(unit, threadIdx.x % 32 / 4, threadIdx.x % 4, s, a[s], a[s + 1]);
        __syncwarp();
        open_products();
#pragma unroll
        for (int s = 0; s < STEPS; ++s) multiply_team(c, a[s], describe(held.blocks[s]), s);
        commit_products();
        await_products<0>();
        return sum_heads(c, key, mine);
    }
#else
    __device__ __forceinline__ float score(const u8* unit, int& key, bool& mine) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        float c[TILES][4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; s += 2) {
            u32 a[2][4];
            read_keys(unit, g, t, s, a[0], a[1]);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int n = 0; n < TILES; ++n) multiply(c[n], a[i], queries[n][s + i]);
        }
        const float sum = sum_heads(c, key, mine);
        return KEY_BYTES == 1 ? sum * key_scale(unit, key) : sum;
    }
#endif
    // From products with all heads to scores, not yet scaled, of key `key`; valid in lanes whose t is 0 or 1.
    __device__ __forceinline__ float sum_heads(const float (&c)[TILES][4], int& key, bool& mine) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        float low = 0, high = 0;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const float2 weight = held.weights[n][t];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool real = HEADS % 8 == 0 || 8 * n + 2 * t + i < HEADS;
                const float w = i ? weight.y : weight.x;
                low += real ? relu(c[n][i]) * w : 0.0f;
                high += real ? relu(c[n][2 + i]) * w : 0.0f;
            }
        }
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            low += __shfl_xor_sync(0xFFFFFFFF, low, step);
            high += __shfl_xor_sync(0xFFFFFFFF, high, step);
        }
        mine = t < 2;
        key = g + 8 * (t & 1);
        return t & 1 ? high : low;
    }

    // Fragments of steps s and s+1: keys g and g+8.
    static __device__ __forceinline__ void read_keys(const u8* unit, int g, int t, int s, u32 (&a)[4], u32 (&b)[4]) {
#if KEY_BYTES == 1
        const int word = t * (DIM / 16) + s;
        decode_e4m3(key_word(unit, g, word), a[0], a[2]);
        decode_e4m3(key_word(unit, g + 8, word), a[1], a[3]);
        decode_e4m3(key_word(unit, g, word + 1), b[0], b[2]);
        decode_e4m3(key_word(unit, g + 8, word + 1), b[1], b[3]);
#else
        const uint4 low = key_chunk(unit, g, 2 * s + t), high = key_chunk(unit, g + 8, 2 * s + t);
        a[0] = low.x, a[1] = high.x, a[2] = low.y, a[3] = high.y;
        b[0] = low.z, b[1] = high.z, b[2] = low.w, b[3] = high.w;
#endif
    }
};

}  // namespace hisparse

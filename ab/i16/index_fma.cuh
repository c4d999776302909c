// Scores of 16 float32 or fp8 keys for float32 queries, by one warp in true float32 (no TF32).
//
// A lane takes one key and half of the heads; queries come through L1, the same word for all lanes of a half. This is
// for comparing with other implementations, not for speed: a load from L1 for every four products of a lane bounds it.
#pragma once

#include "index_rows.cuh"
#include "index_keys.cuh"

namespace hisparse {

constexpr int TEAM = 1;                // warps that score together
constexpr int PART = (HEADS + 1) / 2;  // heads of one lane

struct Queries {
    const float4* vectors;
    const float* weights;
    float scale;
};

struct Scorer {
    const float4* queries;
    const float* weights;
    float scale;

    // Where the queries of a row lie, by the whole block; a barrier must follow.
    static __device__ __forceinline__ void stage(const IndexTopk& p, int row, Queries& held) {
        if (threadIdx.x > 0) return;
        held.vectors = static_cast<const float4*>(p.queries) + static_cast<i64>(row) * HEADS * (DIM / 4);
        held.weights = p.weights + static_cast<i64>(row) * HEADS;
        held.scale = p.scale;
    }

    __device__ __forceinline__ explicit Scorer(const Queries& held)
        : queries(held.vectors), weights(held.weights), scale(held.scale) {}

    // The score of key `key` of the staged unit, valid in lanes 0 to 15.
    __device__ __forceinline__ float score(const u8* unit, int& key, bool& mine) const {
        const int lane = threadIdx.x % 32, begin = lane / 16 * PART;
        key = lane % 16;
        mine = lane < 16;
        float dots[PART] = {};
#pragma unroll 1
        for (int d = 0; d < DIM / 4; ++d) {
            const float4 k = read_key(unit, key, d);
#pragma unroll
            for (int h = 0; h < PART; ++h) {
                const float4 q = queries[min(begin + h, HEADS - 1) * (DIM / 4) + d];
                dots[h] = fmaf(q.w, k.w, fmaf(q.z, k.z, fmaf(q.y, k.y, fmaf(q.x, k.x, dots[h]))));
            }
        }
        float sum = 0;
#pragma unroll
        for (int h = 0; h < PART; ++h)
            if (begin + h < HEADS) sum += relu(dots[h] * scale) * weights[begin + h];
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 16);
        return KEY_BYTES == 1 ? sum * key_scale(unit, key) : sum;
    }

    static __device__ __forceinline__ float4 read_key(const u8* unit, int key, int d) {
#if KEY_BYTES == 1
        u32 low, high;
        decode_e4m3(key_word(unit, key, d), low, high);
        return make_float4(widen(low), widen(low >> 16), widen(high), widen(high >> 16));
#else
        const uint4 v = key_chunk(unit, key, d);
        return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
#endif
    }
    static __device__ __forceinline__ float widen(u32 half) {
        float v;
        asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(v) : "r"(half));
        return v;
    }
};

}  // namespace hisparse

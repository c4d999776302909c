// Rows on their way to and from a library's products of FP8 by FP8 (kernels/cuda/deep_gemm.py): bfloat16 to e4m3 with a
// scale for each 128 values of a row, silu(gate) * up likewise, rows of experts, and their weighted sum.
//
// A *unit* is 128 values of a row: half a warp, eight values to a lane. Scales lie block by block, SPAN rows of one block
// side by side, as the library's copy engine reads them.
//
// A row of an expert is named by place_rows: experts have `span` rows each, or as many as were chosen, from the next
// multiple of `multiple` on. The order of an expert's rows differs from launch to launch. A row's product does not.
#pragma once

#include "ptx.cuh"

namespace hisparse {

constexpr int UNIT_LANES = 16;
constexpr int LANE_VALUES = 8;
constexpr int UNIT_VALUES = UNIT_LANES * LANE_VALUES;
constexpr u32 ALL_LANES = 0xFFFFFFFF;
constexpr float E4M3_MAX = 448.0f;

__device__ __forceinline__ float widened(u32 bits) { return __uint_as_float(bits << 16); }
// Nearest bfloat16, ties to even; no number stays none.
__device__ __forceinline__ u32 rounded(float value) {
    const u32 bits = __float_as_uint(value);
    if (value != value) return 0x7FC0;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
__device__ __forceinline__ void load_values(float (&x)[LANE_VALUES], const u16* at) {
    const uint4 words = *reinterpret_cast<const uint4*>(at);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = widened(pairs[i] & 0xFFFF), x[2 * i + 1] = widened(pairs[i] >> 16);
}
__device__ __forceinline__ void store_values(u16* at, const float (&x)[LANE_VALUES]) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = rounded(x[2 * i]) | rounded(x[2 * i + 1]) << 16;
    *reinterpret_cast<uint4*>(at) = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Largest magnitude / 448, of POWERS the next power of two from there on; of zeros 1.
__device__ __forceinline__ float scale_of(const float (&x)[LANE_VALUES], bool powers) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < LANE_VALUES; ++i) most = max(most, __float_as_uint(x[i]) & 0x7FFFFFFF);
#pragma unroll
    for (int by = UNIT_LANES / 2; by; by /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, by));
    const float scale = __uint_as_float(most) / E4M3_MAX;
    if (scale == 0) return 1;
    const u32 bits = __float_as_uint(scale);
    const u32 exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
    return powers ? __uint_as_float(min(max(exponent, 1u), 254u) << 23) : scale;
}

__device__ __forceinline__ uint2 codes_of(const float (&x)[LANE_VALUES], float scale) {
    return {pack_e4m3(x[0] / scale, x[1] / scale, x[2] / scale, x[3] / scale),
            pack_e4m3(x[4] / scale, x[5] / scale, x[6] / scale, x[7] / scale)};
}

__device__ __forceinline__ void store_unit(const QuantizeRows& p, i64 row, int block, int lane, uint2 codes, float scale) {
    *reinterpret_cast<uint2*>(p.values + row * p.k + block * UNIT_VALUES + lane * LANE_VALUES) = codes;
    const i64 group = row / p.span;
    if (lane == 0) p.scales[(group * p.blocks + block) * p.span + row % p.span] = scale;
}

struct Unit {
    int row, block, lane;
    bool real;
};
__device__ __forceinline__ Unit own_unit(const QuantizeRows& p) {
    const i64 number = (blockIdx.x * static_cast<i64>(QUANTIZE_THREADS) + threadIdx.x) / UNIT_LANES;
    const int row = static_cast<int>(number / p.blocks);
    return {row, static_cast<int>(number % p.blocks), static_cast<int>(threadIdx.x) % UNIT_LANES, row < p.count};
}

__device__ __forceinline__ int expert_of(const PlaceRows& p, int assignment) {
    const i64 chosen = p.wide ? static_cast<const i64*>(p.chosen)[assignment] : static_cast<const i32*>(p.chosen)[assignment];
    const i64 own = chosen - p.first;
    return own >= 0 && own < p.experts ? static_cast<int>(own) : -1;
}

}  // namespace hisparse

// A row for each assignment to an expert of this rank. One block.
extern "C" __global__ void __launch_bounds__(hisparse::PLACE_THREADS) place_rows(const __grid_constant__ hisparse::PlaceRows p) {
    using namespace hisparse;
    __shared__ i32 counts[EXPERTS_MAX], starts[EXPERTS_MAX];
    const int thread = threadIdx.x;
    for (int expert = thread; expert < p.experts; expert += PLACE_THREADS) counts[expert] = 0;
    __syncthreads();
    for (int i = thread; i < p.assignments; i += PLACE_THREADS) {
        const int expert = expert_of(p, i);
        p.rows[i] = expert < 0 ? -1 : atomicAdd(&counts[expert], 1);
    }
    __syncthreads();
    if (thread < 32) {
        i32 before = 0;
        for (int base = 0; base < p.experts; base += 32) {
            const int expert = base + thread;
            const i32 held = expert < p.experts ? counts[expert] : 0;
            const i32 taken = p.span ? p.span : (held + p.multiple - 1) / p.multiple * p.multiple;
            i32 sum = taken;
            for (int by = 1; by < 32; by *= 2) {
                const i32 lower = __shfl_up_sync(ALL_LANES, sum, by);
                if (thread >= by) sum += lower;
            }
            if (expert < p.experts) starts[expert] = before + sum - taken;
            before += __shfl_sync(ALL_LANES, sum, 31);
        }
    }
    __syncthreads();
    for (int expert = thread; expert < p.experts; expert += PLACE_THREADS)
        p.ends[expert] = counts[expert] + (p.span ? 0 : starts[expert]);
    for (int i = thread; i < p.assignments; i += PLACE_THREADS) {
        const int expert = expert_of(p, i);
        if (expert >= 0) p.rows[i] += starts[expert];
    }
}

// Rows of `hidden`, each to its own place, or to those of its choices.
extern "C" __global__ void __launch_bounds__(hisparse::QUANTIZE_THREADS)
    quantize_rows(const __grid_constant__ hisparse::QuantizeRows p) {
    using namespace hisparse;
    const Unit unit = own_unit(p);
    float x[LANE_VALUES] = {};
    if (unit.real) load_values(x, p.hidden + unit.row * p.stride + unit.block * UNIT_VALUES + unit.lane * LANE_VALUES);
    const float scale = scale_of(x, p.powers);
    if (!unit.real) return;
    const uint2 codes = codes_of(x, scale);
    if (p.rows == nullptr) return store_unit(p, unit.row, unit.block, unit.lane, codes, scale);
    for (int choice = 0; choice < p.choices; ++choice) {
        const i32 row = p.rows[static_cast<i64>(unit.row) * p.choices + choice];
        if (row >= 0) store_unit(p, row, unit.block, unit.lane, codes, scale);
    }
}

// silu(hidden) * factors, rounded to bfloat16 after each of both, of rows where they are.
extern "C" __global__ void __launch_bounds__(hisparse::QUANTIZE_THREADS)
    quantize_gated(const __grid_constant__ hisparse::QuantizeRows p) {
    using namespace hisparse;
    const Unit unit = own_unit(p);
    const i32 row = !unit.real ? -1 : p.rows == nullptr ? unit.row : p.rows[unit.row];
    float x[LANE_VALUES] = {}, factors[LANE_VALUES];
    if (row >= 0) {
        const i64 at = row * p.stride + unit.block * UNIT_VALUES + unit.lane * LANE_VALUES;
        load_values(x, p.hidden + at);
        load_values(factors, p.factors + at);
#pragma unroll
        for (int i = 0; i < LANE_VALUES; ++i) {
            const float opened = widened(rounded(x[i] / (1 + expf(-x[i]))));
            x[i] = widened(rounded(opened * factors[i]));
        }
    }
    const float scale = scale_of(x, p.powers);
    if (row >= 0) store_unit(p, row, unit.block, unit.lane, codes_of(x, scale), scale);
}

// out[token] = sum over its choices on this rank, in their order, of share * products[row].
extern "C" __global__ void __launch_bounds__(hisparse::SUM_THREADS) sum_rows(const __grid_constant__ hisparse::SumRows p) {
    using namespace hisparse;
    const i64 token = blockIdx.x;
    const int column = (blockIdx.y * SUM_THREADS + threadIdx.x) * LANE_VALUES;
    if (column >= p.width) return;
    float sums[LANE_VALUES] = {};
    for (int choice = 0; choice < p.choices; ++choice) {
        const i64 assignment = token * p.choices + choice;
        const i32 row = p.rows[assignment];
        if (row < 0) continue;
        float x[LANE_VALUES];
        load_values(x, p.products + static_cast<i64>(row) * p.width + column);
        const float share = p.wide_shares ? static_cast<const float*>(p.shares)[assignment]
                                          : widened(static_cast<const u16*>(p.shares)[assignment]);
#pragma unroll
        for (int i = 0; i < LANE_VALUES; ++i) {
            const float part = x[i] * share;
            sums[i] += p.wide_shares ? part : widened(rounded(part));
        }
    }
    store_values(p.out + token * p.width + column, sums);
}

// Rows on their way to and from a library's products of FP8 by FP8 (kernels/cuda/deep_gemm.py): bfloat16 to e4m3 with a
// scale for each 128 values of a row, silu(gate) * up likewise, rows of experts, and their weighted sum.
//
// A *unit* is 128 values of a row: half a warp, eight values to a lane. A half warp takes UNITS of them, whose loads are in
// flight together. Scales lie block by block, those of all rows of one block side by side, as the library's copy engine
// reads them.
//
// place_rows names a row for each choice of an expert: experts have as many rows as were chosen, from the next multiple of
// `multiple` on. Of many assignments each block takes a run, whose choices count_rows counts ahead of it. The order of an
// expert's rows differs from launch to launch. A row's product does not.
//
// All may begin before the kernel ahead has ended, and wait for it before they read.
#pragma once

#include "ptx.cuh"

namespace hisparse {

constexpr int UNITS = 4;
constexpr int UNIT_LANES = 16;
constexpr int LANE_VALUES = 8;
constexpr int UNIT_VALUES = UNIT_LANES * LANE_VALUES;
constexpr u32 ALL_LANES = 0xFFFFFFFF;
constexpr float E4M3_MAX = 448.0f;

__device__ __forceinline__ float widened(u32 bits) { return __uint_as_float(bits << 16); }
// The smaller of both; no number stays none.
__device__ __forceinline__ float below(float value, float limit) { return value > limit ? limit : value; }
// Nearest bfloat16, ties to even; no number stays none.
__device__ __forceinline__ u32 rounded(float value) {
    const u32 bits = __float_as_uint(value);
    if (value != value) return 0x7FC0;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
__device__ __forceinline__ void widen(float (&x)[LANE_VALUES], uint4 words) {
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

// By a power of two: times its reciprocal, which is exact but for the two largest.
__device__ __forceinline__ uint2 codes_of(float (&x)[LANE_VALUES], float scale, bool powers) {
    const u32 exponent = __float_as_uint(scale) >> 23;
    if (powers && exponent < 253) {
        const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < LANE_VALUES; ++i) x[i] *= inverse;
    } else {
#pragma unroll
        for (int i = 0; i < LANE_VALUES; ++i) x[i] /= scale;
    }
    return {pack_e4m3(x[0], x[1], x[2], x[3]), pack_e4m3(x[4], x[5], x[6], x[7])};
}

struct Unit {
    u32 row, block;
    int lane;
    bool real;
};
template <typename Parameters>
__device__ __forceinline__ Unit own_unit(const Parameters& p, int turn) {
    const u32 number = ((turn * gridDim.x + blockIdx.x) * QUANTIZE_THREADS + threadIdx.x) / UNIT_LANES;
    const u32 row = number / static_cast<u32>(p.blocks);
    const int lane = static_cast<int>(threadIdx.x) % UNIT_LANES;
    return {row, number - row * static_cast<u32>(p.blocks), lane, row < static_cast<u32>(p.count)};
}
__device__ __forceinline__ i64 column_of(const Unit& unit) { return unit.block * UNIT_VALUES + unit.lane * LANE_VALUES; }

template <typename Parameters>
__device__ __forceinline__ void store_unit(const Parameters& p, i64 row, const Unit& unit, uint2 codes, float scale) {
    *reinterpret_cast<uint2*>(p.values + row * p.k + column_of(unit)) = codes;
    if (unit.lane == 0) p.scales[unit.block * static_cast<i64>(p.span) + row] = scale;
}

__device__ __forceinline__ int expert_of(const PlaceRows& p, int assignment) {
    const i64 at = static_cast<i64>(assignment / p.choices) * p.stride + assignment % p.choices;
    const i64 chosen = p.wide ? static_cast<const i64*>(p.chosen)[at] : static_cast<const i32*>(p.chosen)[at];
    const i64 own = chosen - p.first;
    return own >= 0 && own < p.experts ? static_cast<int>(own) : -1;
}

// A unit to the places of its row's choices.
template <typename Parameters>
__device__ __forceinline__ void store_to_choices(const Parameters& p, const Unit& unit, uint2 codes, float scale) {
    for (int base = 0; base < p.choices; base += UNIT_LANES) {
        const int own = base + unit.lane;
        const bool chosen = unit.real && own < p.choices;
        const i32 place = chosen ? p.rows[static_cast<i64>(unit.row) * p.choices + own] : -1;
        const int half = static_cast<int>(threadIdx.x) / UNIT_LANES % 2 * UNIT_LANES;
        u32 left = __ballot_sync(ALL_LANES, place >= 0) >> half & ((1 << UNIT_LANES) - 1);
        for (; __any_sync(ALL_LANES, left != 0); left &= left - 1) {
            const i32 row = __shfl_sync(ALL_LANES, place, half + max(0, __ffs(left) - 1));
            if (left) store_unit(p, row, unit, codes, scale);
        }
    }
}

// Assignments of a block of threads: p.span of them.
struct Run {
    int first, stop;
};
__device__ __forceinline__ Run own_run(const PlaceRows& p) {
    const int first = static_cast<int>(blockIdx.x) * p.span;
    return {first, min(first + p.span, p.assignments)};
}

// Count the assignments of a run by expert. Each gets its number among those of its expert; -1: another rank's.
__device__ __forceinline__ void count_run(const PlaceRows& p, i32* counts) {
    for (int expert = threadIdx.x; expert < p.experts; expert += PLACE_THREADS) counts[expert] = 0;
    __syncthreads();
    const Run run = own_run(p);
    for (int i = run.first + static_cast<int>(threadIdx.x); i < run.stop; i += PLACE_THREADS) {
        const int expert = expert_of(p, i);
        p.rows[i] = expert < 0 ? -1 : atomicAdd(&counts[expert], 1);
    }
    __syncthreads();
}

}  // namespace hisparse

// Of many assignments: the counts of each run, and each assignment's number among those of its run and expert.
extern "C" __global__ void __launch_bounds__(hisparse::PLACE_THREADS) count_rows(const __grid_constant__ hisparse::PlaceRows p) {
    using namespace hisparse;
    __shared__ i32 counts[EXPERTS_MAX];
    await_last();
    let_next_begin();
    count_run(p, counts);
    for (int expert = threadIdx.x; expert < p.experts; expert += PLACE_THREADS)
        p.counts[static_cast<i64>(blockIdx.x) * p.experts + expert] = counts[expert];
}

// A row for each assignment to an expert of this rank. One block without counts of runs.
extern "C" __global__ void __launch_bounds__(hisparse::PLACE_THREADS) place_rows(const __grid_constant__ hisparse::PlaceRows p) {
    using namespace hisparse;
    __shared__ i32 counts[EXPERTS_MAX], starts[EXPERTS_MAX], before[EXPERTS_MAX];
    const int thread = threadIdx.x;
    await_last();
    let_next_begin();
    if (p.counts == nullptr) {
        count_run(p, counts);
        for (int expert = thread; expert < p.experts; expert += PLACE_THREADS) before[expert] = 0;
    } else {
        for (int expert = thread; expert < p.experts; expert += PLACE_THREADS) {
            i32 total = 0;
#pragma unroll 8
            for (int run = 0; run < static_cast<int>(gridDim.x); ++run) {
                if (run == static_cast<int>(blockIdx.x)) before[expert] = total;
                total += p.counts[static_cast<i64>(run) * p.experts + expert];
            }
            counts[expert] = total;
        }
    }
    __syncthreads();
    if (thread < 32) {
        i32 behind = 0;
        for (int base = 0; base < p.experts; base += 32) {
            const int expert = base + thread;
            const i32 held = expert < p.experts ? counts[expert] : 0;
            const i32 taken = (held + p.multiple - 1) / p.multiple * p.multiple;
            i32 sum = taken;
            for (int by = 1; by < 32; by *= 2) {
                const i32 lower = __shfl_up_sync(ALL_LANES, sum, by);
                if (thread >= by) sum += lower;
            }
            if (expert < p.experts) starts[expert] = behind + sum - taken;
            behind += __shfl_sync(ALL_LANES, sum, 31);
        }
    }
    __syncthreads();
    if (blockIdx.x == 0)
        for (int expert = thread; expert < p.experts; expert += PLACE_THREADS) p.ends[expert] = starts[expert] + counts[expert];
    const Run run = own_run(p);
    for (int i = run.first + thread; i < run.stop; i += PLACE_THREADS) {
        const int expert = expert_of(p, i);
        if (expert >= 0) p.rows[i] += starts[expert] + before[expert];
    }
}

// Rows of `hidden`, each to its own place, or to those of its choices.
extern "C" __global__ void __launch_bounds__(hisparse::QUANTIZE_THREADS)
    quantize_rows(const __grid_constant__ hisparse::QuantizeRows p) {
    using namespace hisparse;
    await_last();
    let_next_begin();
    uint4 words[UNITS];
#pragma unroll
    for (int turn = 0; turn < UNITS; ++turn) {
        const Unit unit = own_unit(p, turn);
        words[turn] = {0, 0, 0, 0};
        if (unit.real) words[turn] = *reinterpret_cast<const uint4*>(p.hidden + unit.row * p.stride + column_of(unit));
    }
#pragma unroll
    for (int turn = 0; turn < UNITS; ++turn) {
        const Unit unit = own_unit(p, turn);
        if (!__any_sync(ALL_LANES, unit.real)) return;
        float x[LANE_VALUES];
        widen(x, words[turn]);
        const float scale = scale_of(x, p.powers);
        const uint2 codes = codes_of(x, scale, p.powers);
        if (p.rows == nullptr) {
            if (unit.real) store_unit(p, unit.row, unit, codes, scale);
            continue;
        }
        store_to_choices(p, unit, codes, scale);
    }
}

// Quantized rows, each to the places of its choices.
extern "C" __global__ void __launch_bounds__(hisparse::QUANTIZE_THREADS)
    spread_rows(const __grid_constant__ hisparse::SpreadRows p) {
    using namespace hisparse;
    await_last();
    let_next_begin();
    uint2 codes[UNITS];
    float scales[UNITS];
#pragma unroll
    for (int turn = 0; turn < UNITS; ++turn) {
        const Unit unit = own_unit(p, turn);
        codes[turn] = {0, 0}, scales[turn] = 1;
        if (!unit.real) continue;
        codes[turn] = *reinterpret_cast<const uint2*>(p.codes + unit.row * p.stride + column_of(unit));
        if (unit.lane == 0) scales[turn] = p.given[unit.row * p.scale_stride + unit.block * p.block_stride];
    }
#pragma unroll
    for (int turn = 0; turn < UNITS; ++turn) {
        const Unit unit = own_unit(p, turn);
        if (!__any_sync(ALL_LANES, unit.real)) return;
        store_to_choices(p, unit, codes[turn], scales[turn]);
    }
}

// silu(hidden) * factors, rounded to bfloat16 after each of both, of rows where they are; of experts those that were chosen.
extern "C" __global__ void __launch_bounds__(hisparse::QUANTIZE_THREADS)
    quantize_gated(const __grid_constant__ hisparse::QuantizeRows p) {
    using namespace hisparse;
    await_last();
    let_next_begin();
    i32 rows[UNITS];
#pragma unroll
    for (int turn = 0; turn < UNITS; ++turn) {
        const Unit unit = own_unit(p, turn);
        rows[turn] = !unit.real ? -1 : p.rows == nullptr ? static_cast<i32>(unit.row) : p.rows[unit.row];
    }
    uint4 words[UNITS], factors[UNITS];
#pragma unroll
    for (int turn = 0; turn < UNITS; ++turn) {
        words[turn] = factors[turn] = {0, 0, 0, 0};
        if (rows[turn] < 0) continue;
        const i64 at = rows[turn] * p.stride + column_of(own_unit(p, turn));
        words[turn] = *reinterpret_cast<const uint4*>(p.hidden + at);
        factors[turn] = *reinterpret_cast<const uint4*>(p.factors + at);
    }
#pragma unroll
    for (int turn = 0; turn < UNITS; ++turn) {
        if (!__any_sync(ALL_LANES, rows[turn] >= 0)) continue;
        float x[LANE_VALUES], factor[LANE_VALUES];
        widen(x, words[turn]);
        widen(factor, factors[turn]);
#pragma unroll
        for (int i = 0; i < LANE_VALUES; ++i) {
            const float cut = below(x[i], p.limit), opened = widened(rounded(cut / (1 + expf(-cut))));
            x[i] = widened(rounded(opened * -below(-below(factor[i], p.limit), p.limit)));
        }
        const float scale = scale_of(x, p.powers);
        const uint2 codes = codes_of(x, scale, p.powers);
        if (rows[turn] >= 0) store_unit(p, rows[turn], own_unit(p, turn), codes, scale);
    }
}

// out[token] = sum over its choices on this rank, in their order, of share * products[row].
extern "C" __global__ void __launch_bounds__(hisparse::SUM_THREADS) sum_rows(const __grid_constant__ hisparse::SumRows p) {
    using namespace hisparse;
    const i64 token = blockIdx.x;
    const int column = (blockIdx.y * SUM_THREADS + threadIdx.x) * LANE_VALUES, lane = threadIdx.x % 32;
    await_last();
    let_next_begin();
    float sums[LANE_VALUES] = {};
    for (int base = 0; base < p.choices; base += 32) {
        const bool real = base + lane < p.choices;
        const i32 places = real ? p.rows[token * p.choices + base + lane] : -1;
        const i64 own = token * p.stride + base + lane;
        const u32 shares = !real ? 0
                           : p.wide_shares ? static_cast<const u32*>(p.shares)[own]
                                           : static_cast<u32>(static_cast<const u16*>(p.shares)[own]) << 16;
        for (u32 left = __ballot_sync(ALL_LANES, places >= 0); left; left &= left - 1) {
            const int choice = __ffs(left) - 1;
            const i64 row = __shfl_sync(ALL_LANES, places, choice);
            const float share = __uint_as_float(__shfl_sync(ALL_LANES, shares, choice));
            if (column >= p.width) continue;
            float x[LANE_VALUES];
            widen(x, *reinterpret_cast<const uint4*>(p.products + row * p.width + column));
#pragma unroll
            for (int i = 0; i < LANE_VALUES; ++i) {
                const float part = x[i] * share;
                sums[i] += p.wide_shares ? part : widened(rounded(part));
            }
        }
    }
    if (column < p.width) store_values(p.out + token * p.width + column, sums);
}

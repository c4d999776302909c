// index_scores on Hopper, for fp8 and fp4 keys of 128 values: the scores of every row longer than k, and histograms of them.
//
// Keys are multiplied as they are: queries become e4m3 as well, after each head is scaled by the power of two that brings
// its largest magnitude to 448 at most (as the authors of DeepSeek-V3.2 scale them), in PARTS parts: 1 their nearest e4m3,
// 2 also what that leaves, so that a bfloat16 is kept whole where it is not 2**-10 times smaller than the head's largest.
// The inverse of the scaling goes into the head's weight, and the key's scale is applied to the sum, being positive. Keys in
// fp4 become e4m3 with one scale a key in registers, a lane's 16 bytes of a key to its 32 values (fp4_keys.cuh).
//
//     A block's share is a run of pages of 64 keys, mostly of one row. A warp of its own brings them to shared memory, by
//     bulk copies into a ring of STAGES; teams of four warps take them in turn, and multiply a page's keys by all heads in
//     one product, 64 keys x HEADS columns. While one team sums its products, others multiply.
//
//     A lane holds a quarter of the heads for two keys: it sums them in head order, and two shuffles end the sum.
//
// Keys are multiplied from registers: their rows of 132 bytes are not what a matrix in shared memory may look like. Which
// dimension stands in which place of a product is free as long as both operands agree, so that a lane t reads words
// 8 t + i of a key, without conflicts of banks. Queries stand in blocks of 8 heads x 16 places.
#pragma once

#include "index_products.cuh"
#if FP4
#include "fp4_keys.cuh"
#endif

namespace hisparse {

// Of a head's weight: 8 exponents that queries were scaled up by, and with keys in fp4 those of the keys.
#if FP4
constexpr u32 WEIGHED_BY = 8 + FP4_KEY_EXPONENT;
#else
constexpr u32 WEIGHED_BY = 8;
#endif

// Queries and weights of a row into shared memory, by all teams together: four lanes have a head.
__device__ __forceinline__ void stage_row(const IndexTopk& p, int row, ScoreShared& s) {
    const u16* const from = static_cast<const u16*>(p.queries) + static_cast<i64>(row) * HEADS * DIM;
    const int lane = threadIdx.x % 32, t = lane % 4;
    for (int n = threadIdx.x / 32; n < TILES; n += WARPS) {
        const int head = 8 * n + lane / 4;
        u32 pairs[16];  // of dimensions 32 t..
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint4*>(pairs + 4 * i) = *reinterpret_cast<const uint4*>(from + head * DIM + 32 * t + 8 * i);
        const float weight = p.weights[static_cast<i64>(row) * HEADS + head] * p.scale;
        u32 largest = 0;  // magnitudes of bfloat16 compare as integers
#pragma unroll
        for (int i = 0; i < 16; ++i) largest = max(largest, max(pairs[i] << 16 & 0x7FFF0000u, pairs[i] & 0x7FFF0000u));
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
        // Biased exponents: 135 is 2**8, and 1.75 * 2**8 is 448.
        u32 exponent = (largest >> 23) + ((largest & 0x7FFFFF) > 0x600000);
        if (largest >= 0x7F800000u || exponent < 15) exponent = largest >= 0x7F800000u ? 135 : 15;
        const float factor = __uint_as_float((262 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float v[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                v[2 * j] = __uint_as_float(pairs[2 * i + j] << 16) * factor;
                v[2 * j + 1] = __uint_as_float(pairs[2 * i + j] & 0xFFFF0000u) * factor;
            }
#pragma unroll
            for (int part = 0; part < PARTS; ++part) s.queries[part][i / 2][i % 2][n][lane] = to_e4m3(v);
        }
        if (t == 0) reinterpret_cast<float*>(s.weights[n])[lane / 4] = weight * __uint_as_float((exponent - WEIGHED_BY) << 23);
    }
    publish_shared();
}

__device__ __forceinline__ void bring_pages(const IndexTopk& p, ScoreShared& s, const PlannedShare& plan) {
    const u8* const keys = p.state.index_keys + p.group * p.state.key_rows * KEY_ROW;
    const u32 held = static_cast<u32>(p.state.key_rows / PAGE_TOKENS);
    const int lane = threadIdx.x % 32;
    each_part(s, plan.own, [&](int row, u32 from, u32 stop, u32 before) {
        const i32* const table = p.state.index_table + static_cast<i64>(s.rows[row].x) * p.state.max_pages;
        i32 next = plan.known && before == 0 ? plan.first : from + lane < stop ? table[from + lane] : -1;
        for (u32 base = from; base < stop; base += 32) {
            const i32 pages = next;
            next = base + 32 + lane < stop ? table[base + 32 + lane] : -1;
            for (u32 i = 0; i < 32 && base + i < stop; ++i) {
                const u32 turn = before + base - from + i, slot = turn % STAGES;
                const u32 page = static_cast<u32>(__shfl_sync(0xFFFFFFFF, pages, i));
                await_together(shared_address(s.empty + slot), turn / STAGES & 1 ^ 1);
                if (lane == 0) {
                    const u32 full = shared_address(s.full + slot);
                    arrive_expecting(full, page < held ? PAGE_BYTES : 0);
                    if (page < held)
                        fetch_once(s.pages[slot], keys + static_cast<i64>(page) * PAGE_BYTES, PAGE_BYTES, full);
                    else
                        p.counters[row * COUNTERS + UNGRANTED_ROW] = 1;
                }
                __syncwarp();
            }
        }
    });
}

__device__ __forceinline__ void score_pages(const IndexTopk& p, ScoreShared& s, const Share& own) {
    const u32 warp = threadIdx.x % TEAM_THREADS / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 team = threadIdx.x / TEAM_THREADS;
    each_part(s, own, [&](int row, u32 from, u32 stop, u32 before) {
        u32 lowest = BINS - 1, highest = 0;
        const i64 place = static_cast<i64>(units_before(s, row)) * UNIT;
        const u32 length = static_cast<i64>(units_before(s, row + 1)) * UNIT <= p.capacity ? s.rows[row].y : 0;
        float* const scores = p.scores + place;
        stage_row(p, row, s);
        sync_named(1, 32 * WARPS);
        float2 weights[TILES];
#pragma unroll
        for (int n = 0; n < TILES; ++n) weights[n] = s.weights[n][t];
        const u32 skip = (team + TEAMS - before % TEAMS) % TEAMS;
#pragma unroll 1
        for (u32 i = from + skip; i < stop; i += TEAMS) {
            const u32 turn = before + i - from, slot = turn % STAGES;
            await_phase(shared_address(s.full + slot), turn / STAGES & 1);
            const u32* const words = reinterpret_cast<const u32*>(s.pages[slot] + (16 * warp + g) * KEY_ROW);
            u32 a[STEPS][4];
#if FP4
            const float near_scale = decode_quarter(words, t, [&](int step, u32 first, u32 second) {
                a[step][0] = first, a[step][2] = second;
            });
            const float far_scale = decode_quarter(words + 2 * KEY_ROW, t, [&](int step, u32 first, u32 second) {
                a[step][1] = first, a[step][3] = second;
            });
            const float scale = t & 1 ? far_scale : near_scale;
#else
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                a[step][0] = words[8 * t + 2 * step], a[step][2] = words[8 * t + 2 * step + 1];
                a[step][1] = words[2 * KEY_ROW + 8 * t + 2 * step];
                a[step][3] = words[2 * KEY_ROW + 8 * t + 2 * step + 1];
            }
            const float scale = __uint_as_float(words[(t & 1) * 2 * KEY_ROW + DIM / 4]);
#endif
            arrive_warp(shared_address(s.empty + slot));
            float c[TILES][4];
            if (FP4) settle_keys(a);
            open_products();
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
                    multiply_page(c, a[step], describe_heads(s.queries[part][step][0][0]), part + step);
            commit_products();
            await_products<0>();
            if (FP4) settle_keys(a);
            float near = 0, far = 0;
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const float2 weight = weights[n];
                near = fmaf(key_relu(c[n][0]), weight.x, near);
                near = fmaf(key_relu(c[n][1]), weight.y, near);
                far = fmaf(key_relu(c[n][2]), weight.x, far);
                far = fmaf(key_relu(c[n][3]), weight.y, far);
            }
            // An even lane ends with key g, an odd one with key g + 8.
            const bool odd = t & 1;
            float sum = (odd ? far : near) + __shfl_xor_sync(0xFFFFFFFF, odd ? near : far, 1);
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
            const float score = sum * scale + 0.0f;  // -0 becomes 0
            const u32 position = i * PAGE_TOKENS + 16 * warp + g + 8 * odd;
            if (t < 2 && position < length) {
                scores[position] = score;
                const u32 bin = order_key(score) >> BIN_SHIFT;
                count_shared(s.bins + bin);
                lowest = min(lowest, bin), highest = max(highest, bin);
            }
        }
        lowest = __reduce_min_sync(0xFFFFFFFF, lowest), highest = __reduce_max_sync(0xFFFFFFFF, highest);
        if (lane == 0) atomicMin(&s.lowest, lowest), atomicMax(&s.highest, highest);
        sync_named(1, 32 * WARPS);
        flush_bins<32 * WARPS>(s.bins, row_histogram(p, row), s.lowest, s.highest);
        if (before + stop - from == own.end - own.begin) return;
        sync_named(1, 32 * WARPS);
        if (threadIdx.x == 0) s.lowest = BINS - 1, s.highest = 0;
    });
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::SCORE_THREADS, 1)
    index_scores(const __grid_constant__ hisparse::IndexTopk p) {
    using namespace hisparse;
    extern __shared__ __align__(128) u8 dynamic[];
    ScoreShared& s = *reinterpret_cast<ScoreShared*>(dynamic);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            open_barrier(shared_address(s.full + i), 1);
            open_barrier(shared_address(s.empty + i), TEAM_THREADS / 32 * WARP_ARRIVALS);
        }
        publish_barriers();
    }
    for (int i = 4 * threadIdx.x; i < BINS; i += 4 * SCORE_THREADS)
        *reinterpret_cast<uint4*>(s.bins + i) = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) s.lowest = BINS - 1, s.highest = 0;
    const PlannedShare plan = plan_share(p, s);
    if (threadIdx.x >= 32 * WARPS)
        bring_pages(p, s, plan);
    else
        score_pages(p, s, plan.own);
}

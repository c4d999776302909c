// attend_rows: the warps that gather. This block's half of a block of rows goes to a stage of shared memory, tile by tile,
// swizzled, FETCH rows at a time; fp8 rows are decoded on the way. Entries of -1 become rows of zeros.
#pragma once

#include "attend_hopper.cuh"

namespace hisparse {

// Where row `row` of a stage has chunk `chunk` of its half of the rope part.
__device__ __forceinline__ u32 rope_chunk(Shared& s, int stage, int row, int chunk) {
    return shared_address(s.ropes[stage / 2]) + swizzled(row, stage % 2 * 4 + chunk);
}
// The thread's number in its group.
__device__ __forceinline__ int gatherer() { return renewed(static_cast<int>(threadIdx.x % GROUP)); }

#if KEY_BYTES == 2
// Eight lanes take a chunk of the same row each; a thread takes two rows of a fetch, and that chunk of each of their tiles.
constexpr int AHEAD = FETCHES;
struct Gatherer {
    static constexpr int EACH = 2;
    i32 places[EACH];

    static __device__ __forceinline__ int row_of(int i) { return gatherer() / 8 + FETCH / EACH * i; }
    __device__ __forceinline__ void look_up(const Task& task, int first) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) places[i] = task.place(first + row_of(i));
    }
    __device__ __forceinline__ Gatherer(const u8*, const Task& task) { look_up(task, task.begin); }
    template <int I>
    __device__ __forceinline__ void fill(const u8* rows, const Task& task, int first, int stage, Shared& s) {
        const int chunk = gatherer() % 8;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const bool real = places[i] >= 0;
            const int row = I * FETCH + row_of(i);
            const u8* const from = rows + static_cast<i64>(real ? places[i] : 0) * ROW_BYTES + 16 * chunk;
            const u32 to = shared_address(s.rows[stage]) + swizzled(row, chunk);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                copy_chunk(to + tile * TILE_BYTES, from + 2 * HALF * task.half + 128 * tile, real);
            if (chunk < 4) copy_chunk(rope_chunk(s, stage, row, chunk), from + 2 * LATENT + ROPE * task.half, real);
        }
        arrive_copied(shared_address(&s.full[stage]));
        look_up(task, first + FETCH);
    }
};
constexpr int GATHER_REGISTERS = 56, PRODUCT_REGISTERS = 224, FILL_ARRIVALS = GROUP;
#else
// Four lanes take 16 codes of the same row each; a thread takes one row, and those codes of each of its tiles. Codes of
// AHEAD fetches are in registers or under way: those of a fetch are loaded when the one AHEAD of it has left them.
#ifndef GATHER_FENCE
#define GATHER_FENCE 1
#endif
#ifndef FETCHES_AHEAD
#define FETCHES_AHEAD 2
#endif
constexpr int AHEAD = FETCHES_AHEAD;
struct Gatherer {
    i32 places[AHEAD], next_place;
    float2 scales[AHEAD];
    uint4 codes[AHEAD][TILES];

    __device__ __forceinline__ void look_up(const Task& task, int first) {
        next_place = task.place(first + gatherer() / 4);
    }
    __device__ __forceinline__ const u8* row_at(const u8* rows, int i) const {
        return rows + static_cast<i64>(max(places[i], 0)) * ROW_BYTES;
    }
    __device__ __forceinline__ void load(const u8* rows, const Task& task, int i) {
        places[i] = next_place;
        scales[i] = make_float2(0, 0);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) codes[i][tile] = make_uint4(0, 0, 0, 0);
        if (places[i] < 0) return;
        const u8* const row = row_at(rows, i);
        load_here(scales[i], row + LATENT + 8 * task.half);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            load_here(codes[i][tile], row + HALF * task.half + 64 * tile + 16 * (gatherer() % 4));
    }
    __device__ __forceinline__ Gatherer(const u8* rows, const Task& task) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            look_up(task, task.begin + i * FETCH);
            load(rows, task, i);
        }
        look_up(task, task.begin + AHEAD * FETCH);
    }
    template <int I>
    __device__ __forceinline__ void fill(const u8* rows, const Task& task, int first, int stage, Shared& s) {
        const int thread = gatherer(), quarter = thread % 4, row = I % FETCHES * FETCH + thread / 4;
        copy_chunk(rope_chunk(s, stage, row, quarter), row_at(rows, I) + LATENT + 16 + ROPE * task.half + 16 * quarter,
                   places[I] >= 0);
        arrive_copied(shared_address(&s.full[stage]));
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const float scale = tile < TILES / 2 ? scales[I].x : scales[I].y;
            const uint4 c = codes[I][tile];
            uint4 low, high;
            decode(c.x, scale, low.x, low.y), decode(c.y, scale, low.z, low.w);
            decode(c.z, scale, high.x, high.y), decode(c.w, scale, high.z, high.w);
            u8* const to = s.rows[stage] + tile * TILE_BYTES;
            *reinterpret_cast<uint4*>(to + swizzled(row, 2 * quarter)) = low;
            *reinterpret_cast<uint4*>(to + swizzled(row, 2 * quarter + 1)) = high;
        }
#if GATHER_FENCE
        publish_shared();  // before the next loads begin, which it would wait for
#endif
        arrive(s.full[stage]);
        load(rows, task, I);
        look_up(task, first + (AHEAD + 1) * FETCH);
    }
};
constexpr int GATHER_REGISTERS = AHEAD == 2 ? 88 : 104, PRODUCT_REGISTERS = AHEAD == 2 ? 208 : 200, FILL_ARRIVALS = 2 * GROUP;  // rope apart
#endif

// A block of rows, whose first fetch is number I of those ahead.
template <int I>
__device__ __forceinline__ void gather_block(Gatherer& gatherer, const AttendRows& p, const Task& task, int i, Shared& s) {
    const int stage = i % STAGES, first = task.begin + i * BLOCK;
    if (i >= STAGES) await(s.empty[stage], i / STAGES - 1);
    gatherer.fill<I>(p.rows, task, first, stage, s);
    gatherer.fill<I + 1>(p.rows, task, first + FETCH, stage, s);
}
__device__ __forceinline__ void gather(const AttendRows& p, const Task& task, Shared& s) {
    Gatherer gatherer(p.rows, task);
    for (int i = 0; i < task.blocks; i += AHEAD / FETCHES) {
        gather_block<0>(gatherer, p, task, i, s);
        if (AHEAD > FETCHES && i + 1 < task.blocks) gather_block<AHEAD - FETCHES>(gatherer, p, task, i + 1, s);
    }
}

}  // namespace hisparse

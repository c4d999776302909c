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
__device__ __forceinline__ int gatherer() { return renewed(static_cast<int>(threadIdx.x) - CONSUMERS); }

#if KEY_BYTES == 2
// Eight lanes take a chunk of the same row each; a thread takes two rows of a fetch, and that chunk of each of their tiles.
// Entries of a fetch are asked for two fetches ahead.
struct Gatherer {
    static constexpr int EACH = 2;
    i32 places[FETCHES][EACH];

    static __device__ __forceinline__ int row_of(int i) { return gatherer() / 8 + FETCH / EACH * i; }
    __device__ __forceinline__ void look_up(const Task& task, int fetch, int first) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) places[fetch][i] = task.place(first + row_of(i));
    }
    __device__ __forceinline__ Gatherer(const u8*, const Task& task) {
#pragma unroll
        for (int fetch = 0; fetch < FETCHES; ++fetch) look_up(task, fetch, task.begin + fetch * FETCH);
    }
    template <int I>
    __device__ __forceinline__ void fill(const u8* rows, const Task& task, int first, int stage, Shared& s) {
        const int chunk = gatherer() % 8;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i32 place = places[I][i];
            const int row = I * FETCH + row_of(i);
            const u8* const from = rows + static_cast<i64>(max(place, 0)) * ROW_BYTES + 16 * chunk;
            const u32 to = shared_address(s.rows[stage]) + swizzled(row, chunk);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                copy_chunk(to + tile * TILE_BYTES, from + 2 * HALF * task.half + 128 * tile, place >= 0);
            if (chunk < 4) copy_chunk(rope_chunk(s, stage, row, chunk), from + 2 * LATENT + ROPE * task.half, place >= 0);
        }
        arrive_copied(shared_address(&s.full[stage]));
        look_up(task, I, first + FETCHES * FETCH);
    }
};
constexpr int GATHER_REGISTERS = 40, PRODUCT_REGISTERS = 216, FILL_ARRIVALS = GATHERERS;
#else
// Four lanes take 16 codes of the same row each; a thread takes one row, and those codes of each of its tiles. Codes of two
// fetches are in registers or under way: those of a fetch are loaded when the one two ahead of it has left them. Entries
// are asked for two fetches before that.
struct Gatherer {
    i32 places[FETCHES], next[FETCHES];
    float2 scales[FETCHES];
    uint4 codes[FETCHES][TILES];

    static __device__ __forceinline__ i32 look_up(const Task& task, int first) { return task.place(first + gatherer() / 4); }
    __device__ __forceinline__ const u8* row_at(const u8* rows, int i) const {
        return rows + static_cast<i64>(max(places[i], 0)) * ROW_BYTES;
    }
    // Fetch i, of the entry that was asked for; then ask for that of the fetch that begins at entry `later`.
    __device__ __forceinline__ void load(const u8* rows, const Task& task, int i, int later) {
        places[i] = next[i];
        scales[i] = make_float2(0, 0);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) codes[i][tile] = make_uint4(0, 0, 0, 0);
        next[i] = look_up(task, later);
        if (places[i] < 0) return;
        const u8* const row = row_at(rows, i);
        load_here(scales[i], row + LATENT + 8 * task.half);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            load_here(codes[i][tile], row + HALF * task.half + 64 * tile + 16 * (gatherer() % 4));
    }
    __device__ __forceinline__ Gatherer(const u8* rows, const Task& task) {
#pragma unroll
        for (int i = 0; i < FETCHES; ++i) next[i] = look_up(task, task.begin + i * FETCH);
#pragma unroll
        for (int i = 0; i < FETCHES; ++i) load(rows, task, i, task.begin + (FETCHES + i) * FETCH);
    }
    template <int I>
    __device__ __forceinline__ void fill(const u8* rows, const Task& task, int first, int stage, Shared& s) {
        const int thread = gatherer(), quarter = thread % 4, row = I * FETCH + thread / 4;
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
        arrive(s.full[stage]);  // who multiplies publishes what was written, as it must what was copied
        load(rows, task, I, first + 2 * FETCHES * FETCH);
    }
};
constexpr int GATHER_REGISTERS = 48, PRODUCT_REGISTERS = 208, FILL_ARRIVALS = 2 * GATHERERS;  // rope apart
#endif

__device__ __forceinline__ void gather(const AttendRows& p, const Task& task, Shared& s) {
    Gatherer gatherer(p.rows, task);
    for (int i = 0; i < task.blocks; ++i) {
        const int stage = i % STAGES, first = task.begin + i * BLOCK;
        if (i >= STAGES) await(s.empty[stage], i / STAGES - 1);
        gatherer.fill<0>(p.rows, task, first, stage, s);
        if constexpr (FETCHES == 2) gatherer.fill<FETCHES - 1>(p.rows, task, first + FETCH, stage, s);
    }
}

}  // namespace hisparse

// attend_rows: the warps that gather. This block's half of each block of rows goes to a stage of shared memory, tile by tile,
// swizzled; fp8 rows are decoded on the way. Entries of -1 become rows of zeros. Who multiplies publishes what was copied and
// written, since a copy's own thread cannot.
#pragma once

#include "attend_hopper.cuh"

namespace hisparse {

// Where row `row` of a stage has chunk `chunk` of its half of the rope part.
__device__ __forceinline__ u32 rope_chunk(Shared& s, int stage, int row, int chunk) {
    return shared_address(s.ropes[stage / 2]) + swizzled(row, stage % 2 * 4 + chunk);
}
// The thread's number among those that gather, which the compiler takes for a new value each time.
__device__ __forceinline__ int gatherer() { return renewed(static_cast<int>(threadIdx.x) - CONSUMERS); }

#if KEY_BYTES == 2
// Eight lanes take a chunk of the same row each; a thread takes EACH rows, and that chunk of each of their tiles. Entries are
// asked for a block of rows ahead.
struct Gatherer {
    static constexpr int EACH = 8 * BLOCK / GATHERERS;
    i32 places[EACH];

    static __device__ __forceinline__ int row_of(int i) { return gatherer() / 8 + BLOCK / EACH * i; }
    __device__ __forceinline__ void look_up(const Task& task, int first) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) places[i] = task.place(first + row_of(i));
    }
    __device__ __forceinline__ Gatherer(const u8*, const Task& task) { look_up(task, task.begin); }
    __device__ __forceinline__ void fill(const u8* rows, const Task& task, int first, int stage, Shared& s) {
        const int chunk = gatherer() % 8;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i32 place = places[i];
            const int row = row_of(i);
            const u8* const from = rows + static_cast<i64>(max(place, 0)) * ROW_BYTES + 16 * chunk;
            const u32 to = shared_address(s.rows[stage]) + swizzled(row, chunk);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                copy_chunk(to + tile * TILE_BYTES, from + 2 * HALF * task.half + 128 * tile, place >= 0);
            if (chunk < 4) copy_chunk(rope_chunk(s, stage, row, chunk), from + 2 * LATENT + ROPE * task.half, place >= 0);
        }
        arrive_copied(shared_address(&s.full[stage]));
        look_up(task, first + BLOCK);
    }
};
constexpr int FILL_ARRIVALS = GATHERERS;
#else
// Four lanes take 16 codes of the same row each; a thread takes EACH rows in turn, and those codes of each of a row's tiles.
// Codes of its next row are under way; that row's entry was asked for a row before.
struct Gatherer {
    static constexpr int EACH = 4 * BLOCK / GATHERERS, ROWS = BLOCK / EACH;
    i32 place, next;
    float2 scales;
    uint4 codes[TILES];

    static __device__ __forceinline__ i32 look_up(const Task& task, int first) { return task.place(first + gatherer() / 4); }
    __device__ __forceinline__ const u8* row_at(const u8* rows) const {
        return rows + static_cast<i64>(max(place, 0)) * ROW_BYTES;
    }
    // Codes of the entry that was asked for; then ask for that of the rows that begin at entry `later`.
    __device__ __forceinline__ void load(const u8* rows, const Task& task, int later) {
        place = next;
        scales = make_float2(0, 0);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) codes[tile] = make_uint4(0, 0, 0, 0);
        next = look_up(task, later);
        if (place < 0) return;
        const u8* const row = row_at(rows);
        load_here(scales, row + LATENT + 8 * task.half);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            load_here(codes[tile], row + HALF * task.half + 64 * tile + 16 * (gatherer() % 4));
    }
    __device__ __forceinline__ Gatherer(const u8* rows, const Task& task) {
        next = look_up(task, task.begin);
        load(rows, task, task.begin + ROWS);
    }
    __device__ __forceinline__ void fill(const u8* rows, const Task& task, int first, int stage, Shared& s) {
        const int thread = gatherer(), quarter = thread % 4;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int row = thread / 4 + ROWS * i;
            copy_chunk(rope_chunk(s, stage, row, quarter), row_at(rows) + LATENT + 16 + ROPE * task.half + 16 * quarter,
                       place >= 0);
            if (i + 1 == EACH) arrive_copied(shared_address(&s.full[stage]));
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const float scale = tile < TILES / 2 ? scales.x : scales.y;
                const uint4 c = codes[tile];
                uint4 low, high;
                decode(c.x, scale, low.x, low.y), decode(c.y, scale, low.z, low.w);
                decode(c.z, scale, high.x, high.y), decode(c.w, scale, high.z, high.w);
                u8* const to = s.rows[stage] + tile * TILE_BYTES;
                *reinterpret_cast<uint4*>(to + swizzled(row, 2 * quarter)) = low;
                *reinterpret_cast<uint4*>(to + swizzled(row, 2 * quarter + 1)) = high;
            }
            if (i + 1 == EACH) arrive(s.full[stage]);
            load(rows, task, first + (i + 2) * ROWS);
        }
    }
};
constexpr int FILL_ARRIVALS = 2 * GATHERERS;  // rope apart
#endif

__device__ __forceinline__ void gather(const AttendRows& p, const Task& task, Shared& s) {
    Gatherer gatherer(p.rows, task);
    for (int i = 0; i < task.blocks; ++i) {
        const int stage = i % STAGES, first = task.begin + i * BLOCK;
        if (i >= STAGES) await(s.empty[stage], i / STAGES - 1);
        gatherer.fill(p.rows, task, first, stage, s);
    }
}

}  // namespace hisparse

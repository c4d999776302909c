// attend_rows: the warps that gather. This block's half of each block of rows goes to a stage of shared memory, tile by tile,
// swizzled; fp8 and fp4 rows are decoded on the way. Entries of -1 become rows of zeros. Who multiplies publishes what was copied and
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
#if FP4
// Eight codes of e2m1 to bfloat16, times a pair of their scale: upper and lower bytes of magnitudes by permutes, three bits of
// a code each, signs from the fourth.
__device__ __forceinline__ void decode_codes(u32 codes, u32 by, uint4& values) {
    constexpr u32 UPPER[2] = {0x3F3F3F00, 0x40404040}, LOWER[2] = {0xC0800000, 0xC0804000};  // 0 to 1.5, 2 to 6
    const u32 sizes = codes & 0x77777777, even = codes << 4;  // whose upper halves of bytes are codes 0, 2, 4, 6
    const u32 lower[2] = {__byte_perm(LOWER[0], LOWER[1], sizes), __byte_perm(LOWER[0], LOWER[1], sizes >> 16)};
    const u32 upper[2] = {
        __byte_perm(UPPER[0], UPPER[1], sizes) | (__byte_perm(even, codes, 0x5140) & 0x80808080),
        __byte_perm(UPPER[0], UPPER[1], sizes >> 16) | (__byte_perm(even, codes, 0x7362) & 0x80808080)};
    values.x = multiplied(__byte_perm(lower[0], upper[0], 0x5140), by);
    values.y = multiplied(__byte_perm(lower[0], upper[0], 0x7362), by);
    values.z = multiplied(__byte_perm(lower[1], upper[1], 0x5140), by);
    values.w = multiplied(__byte_perm(lower[1], upper[1], 0x7362), by);
}
// What a thread has of a row in fp4: a byte of codes is two values, sixteen of them have a scale, and rope values are e4m3.
// Code and scale have six bits together, so that bfloat16 holds every product as it is.
struct RowCodes {
    static constexpr bool COPIES_ROPE = false;
    uint4 scales;  // of all lanes of the row: byte `quarter` of each word is this thread's
    uint2 codes[TILES], rope;

    __device__ __forceinline__ void clear() {
        scales = make_uint4(0, 0, 0, 0), rope = make_uint2(0, 0);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) codes[tile] = make_uint2(0, 0);
    }
    __device__ __forceinline__ void load(const u8* row, int half) {
        const int quarter = gatherer() % 4;
        load_here(scales, row + LATENT / 2 + LATENT / 32 * half);
        load_here(rope, row + LATENT / 2 + LATENT / 16 + ROPE / 2 * half + 8 * quarter);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) load_here(codes[tile], row + HALF / 2 * half + 32 * tile + 8 * quarter);
    }
    __device__ __forceinline__ void put_rope(u32 to, const u8*, bool) const {
        uint4 chunk;
        decode(rope.x, 1.0f, chunk.x, chunk.y), decode(rope.y, 1.0f, chunk.z, chunk.w);
        store_chunk(to, chunk);
    }
    // A pair of the scale of each tile.
    struct Scales {
        u32 pairs[TILES];
    };
    __device__ __forceinline__ Scales own_scales(int quarter) const {
        const u32 own = quarter | (quarter + 4) << 4;
        const u32 bytes = __byte_perm(__byte_perm(scales.x, scales.y, own), __byte_perm(scales.z, scales.w, own), 0x5410);
        u32 low, high;
        decode(bytes, 1.0f, low, high);
        return {{__byte_perm(low, 0, 0x1010), __byte_perm(low, 0, 0x3232), __byte_perm(high, 0, 0x1010),
                 __byte_perm(high, 0, 0x3232)}};
    }
    __device__ __forceinline__ void decode_tile(int tile, const Scales& by, uint4& low, uint4& high) const {
        decode_codes(codes[tile].x, by.pairs[tile], low), decode_codes(codes[tile].y, by.pairs[tile], high);
    }
};
static_assert(TILES == 4, "as many words of scales");
#else
// Likewise in fp8. Rope values are copied as they are.
struct RowCodes {
    static constexpr bool COPIES_ROPE = true;
    float2 scales;
    uint4 codes[TILES];

    __device__ __forceinline__ void clear() {
        scales = make_float2(0, 0);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) codes[tile] = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void load(const u8* row, int half) {
        load_here(scales, row + LATENT + 8 * half);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            load_here(codes[tile], row + HALF * half + 64 * tile + 16 * (gatherer() % 4));
    }
    __device__ __forceinline__ void put_rope(u32 to, const u8* half_rope, bool real) const { copy_chunk(to, half_rope, real); }
    using Scales = float2;
    __device__ __forceinline__ Scales own_scales(int) const { return scales; }
    __device__ __forceinline__ void decode_tile(int tile, const Scales& by, uint4& low, uint4& high) const {
        const float scale = tile < TILES / 2 ? by.x : by.y;
        const uint4 c = codes[tile];
        decode(c.x, scale, low.x, low.y), decode(c.y, scale, low.z, low.w);
        decode(c.z, scale, high.x, high.y), decode(c.w, scale, high.z, high.w);
    }
};
#endif
// Four lanes take 16 codes of the same row each; a thread takes EACH rows in turn, and those codes of each of a row's tiles.
// Codes of its next row are under way; that row's entry was asked for a row before.
struct Gatherer {
    static constexpr int EACH = 4 * BLOCK / GATHERERS, ROWS = BLOCK / EACH;
    i32 place, next;
    RowCodes held;

    static __device__ __forceinline__ i32 look_up(const Task& task, int first) { return task.place(first + gatherer() / 4); }
    __device__ __forceinline__ const u8* row_at(const u8* rows) const {
        return rows + static_cast<i64>(max(place, 0)) * ROW_BYTES;
    }
    // Codes of the entry that was asked for; then ask for that of the rows that begin at entry `later`.
    __device__ __forceinline__ void load(const u8* rows, const Task& task, int later) {
        place = next;
        held.clear();
        next = look_up(task, later);
        if (place < 0) return;
        held.load(row_at(rows), task.half);
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
            held.put_rope(rope_chunk(s, stage, row, quarter), row_at(rows) + LATENT + 16 + ROPE * task.half + 16 * quarter,
                          place >= 0);
            if (RowCodes::COPIES_ROPE && i + 1 == EACH) arrive_copied(shared_address(&s.full[stage]));
            const RowCodes::Scales scales = held.own_scales(quarter);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                uint4 low, high;
                held.decode_tile(tile, scales, low, high);
                u8* const to = s.rows[stage] + tile * TILE_BYTES;
                *reinterpret_cast<uint4*>(to + swizzled(row, 2 * quarter)) = low;
                *reinterpret_cast<uint4*>(to + swizzled(row, 2 * quarter + 1)) = high;
            }
            if (i + 1 == EACH) arrive(s.full[stage]);
            load(rows, task, first + (i + 2) * ROWS);
        }
    }
};
constexpr int FILL_ARRIVALS = RowCodes::COPIES_ROPE ? 2 * GATHERERS : GATHERERS;  // copies apart
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

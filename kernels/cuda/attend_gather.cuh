// attend_rows: the warps that gather. A block of rows goes to a stage of shared memory, tile by tile, swizzled; fp8 rows
// are decoded on the way. Entries of -1 become rows of zeros.
#pragma once

#include "attend_hopper.cuh"

namespace hisparse {

// Where chunk `chunk` (16 bytes) of row `row` of a tile lies.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

__device__ __forceinline__ void copy_chunk(u32 to, const u8* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

__device__ __forceinline__ i32 place_of(const i32* entries, int entry, int end) {
    return entry < end ? __ldg(entries + entry) : -1;
}

#if KEY_BYTES == 2
// Eight lanes take a chunk of the same row each; a thread takes two rows, and that chunk of each of their tiles.
struct Gatherer {
    static constexpr int EACH = 2;
    i32 places[EACH];

    static __device__ __forceinline__ int row_of(int i) {
        const int thread = threadIdx.x % GROUP;
        return thread / 32 * 8 + thread % 32 / 8 + 4 * i;
    }
    __device__ __forceinline__ void look_up(const i32* entries, int begin, int end) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) places[i] = place_of(entries, begin + row_of(i), end);
    }
    __device__ __forceinline__ Gatherer(const u8*, const i32* entries, int begin, int end) {
        look_up(entries, begin, end);
    }
    template <int>
    __device__ __forceinline__ void fill(const u8* rows, const i32* entries, int begin, int end, u8* stage, u64& full) {
        const int chunk = threadIdx.x % 8;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const bool real = places[i] >= 0;
            const u8* const from = rows + static_cast<i64>(real ? places[i] : 0) * ROW_BYTES + 16 * chunk;
            const u32 to = shared_address(stage) + swizzled(row_of(i), chunk);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) copy_chunk(to + tile * TILE_BYTES, from + 128 * tile, real);
        }
        arrive_copied(full);
        look_up(entries, begin + BLOCK, end);
    }
};
constexpr int GATHER_REGISTERS = 40, PRODUCT_REGISTERS = 232;
#else
// Four lanes take 16 codes of the same row each; a thread takes one row, and those codes of each of its tiles. Codes of
// two blocks are in registers or under way: those of a block are loaded when the one two ahead of it has left them.
struct Gatherer {
    static constexpr int AHEAD = 2;
    i32 places[AHEAD], next_place;
    uint4 scales[AHEAD];
    uint4 codes[AHEAD][LATENT_TILES];

    // The thread's number in its group, which the compiler takes for a new value each time: what follows from it does
    // not stay in registers from block to block.
    static __device__ __forceinline__ int own() {
        int thread = threadIdx.x % GROUP;
        asm volatile("mov.b32 %0, %0;" : "+r"(thread));
        return thread;
    }
    static __device__ __forceinline__ int row_of(int thread) { return thread / 4; }
    __device__ __forceinline__ void look_up(const i32* entries, int begin, int end) {
        next_place = place_of(entries, begin + row_of(own()), end);
    }
    // A load that stays where it is written.
    static __device__ __forceinline__ void load_here(uint4& v, const u8* at) {
        asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    }
    __device__ __forceinline__ const u8* row_at(const u8* rows, int i) const {
        return rows + static_cast<i64>(max(places[i], 0)) * ROW_BYTES;
    }
    __device__ __forceinline__ void load(const u8* rows, int i) {
        places[i] = next_place;
        const u8* const row = row_at(rows, i);
        scales[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int tile = 0; tile < LATENT_TILES; ++tile) codes[i][tile] = make_uint4(0, 0, 0, 0);
        if (places[i] < 0) return;
        load_here(scales[i], row + LATENT);
#pragma unroll
        for (int tile = 0; tile < LATENT_TILES; ++tile) load_here(codes[i][tile], row + 64 * tile + 16 * (own() % 4));
    }
    __device__ __forceinline__ Gatherer(const u8* rows, const i32* entries, int begin, int end) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            look_up(entries, begin + i * BLOCK, end);
            load(rows, i);
        }
        look_up(entries, begin + AHEAD * BLOCK, end);
    }
    // Four codes to two words of bfloat16.
    static __device__ __forceinline__ void decode(u32 word, float scale, u32& low, u32& high) {
        u32 halves[2];
        asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
            : "=r"(halves[0]), "=r"(halves[1]) : "r"(word));
        u32 words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float a, b;
            asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
                : "=f"(a), "=f"(b) : "r"(halves[i]));
            words[i] = pair_of(a * scale, b * scale);
        }
        low = words[0], high = words[1];
    }
    template <int I>
    __device__ __forceinline__ void fill(const u8* rows, const i32* entries, int begin, int end, u8* stage, u64& full) {
        const int thread = own(), quarter = thread % 4, row = row_of(thread);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int chunk = 2 * quarter + half;
            copy_chunk(shared_address(stage) + LATENT_TILES * TILE_BYTES + swizzled(row, chunk),
                       row_at(rows, I) + LATENT + 16 + 16 * chunk, places[I] >= 0);
        }
        const u32 by_group[4] = {scales[I].x, scales[I].y, scales[I].z, scales[I].w};
#pragma unroll
        for (int tile = 0; tile < LATENT_TILES; ++tile) {
            const float scale = __uint_as_float(by_group[tile / 2]);
            const uint4 c = codes[I][tile];
            uint4 low, high;
            decode(c.x, scale, low.x, low.y), decode(c.y, scale, low.z, low.w);
            decode(c.z, scale, high.x, high.y), decode(c.w, scale, high.z, high.w);
            u8* const to = stage + tile * TILE_BYTES;
            *reinterpret_cast<uint4*>(to + swizzled(row, 2 * quarter)) = low;
            *reinterpret_cast<uint4*>(to + swizzled(row, 2 * quarter + 1)) = high;
        }
        load(rows, I);
        look_up(entries, begin + (AHEAD + 1) * BLOCK, end);
        asm volatile("cp.async.wait_all;" ::: "memory");
        publish_shared();
        arrive(full);
    }
};
constexpr int GATHER_REGISTERS = 104, PRODUCT_REGISTERS = 200;
#endif

// Block i of the gatherers, in a half of two.
template <int I>
__device__ __forceinline__ void gather_block(Gatherer& gatherer, const u8* rows, const i32* entries, int i, int begin,
                                             int end, Shared& s) {
    const int stage = i % STAGES;
    if (i >= STAGES) await(s.empty[stage], (i / STAGES - 1) & 1);
    gatherer.fill<I>(rows, entries, begin + i * BLOCK, end, s.rows[stage], s.full[stage]);
}
__device__ __forceinline__ void gather(const u8* rows, const i32* entries, int begin, int end, int blocks, Shared& s) {
    Gatherer gatherer(rows, entries, begin, end);
    for (int i = 0; i < blocks; i += 2) {
        gather_block<0>(gatherer, rows, entries, i, begin, end, s);
        if (i + 1 < blocks) gather_block<1>(gatherer, rows, entries, i + 1, begin, end, s);
    }
}

}  // namespace hisparse

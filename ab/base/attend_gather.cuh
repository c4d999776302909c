// attend_rows: the warps that gather. A block of rows goes to a stage of shared memory, tile by tile, swizzled; fp8
// rows are decoded on the way. Entries of -1 become rows of zeros.
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
    __device__ __forceinline__ Gatherer(const u8*, const i32* entries, int begin, int end, int) {
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
constexpr int GATHER_REGISTERS = 40, PRODUCT_REGISTERS = 232, FILL_ARRIVALS = GROUP;
#else
    // Four codes to two words of bfloat16.
    __device__ __forceinline__ void decode(u32 word, float scale, u32& low, u32& high) {
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
// A load that stays where it is written.
__device__ __forceinline__ void load_here(uint4& v, const u8* at) {
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
}
__device__ __forceinline__ void load_here(uint2& v, const u8* at) {
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
}
// The thread's number in its group, which the compiler takes for a new value each time: what follows from it does not
// stay in registers from block to block.
__device__ __forceinline__ int gatherer() {
    int thread = threadIdx.x % GROUP;
    asm volatile("mov.b32 %0, %0;" : "+r"(thread));
    return thread;
}

// Four lanes take 16 codes of the same row each; a thread takes one row, and those codes of each of its tiles. Codes of
// two blocks are in registers or under way: those of a block are loaded when the one two ahead of it has left them.
struct Gatherer {
    static constexpr int AHEAD = 2;
    i32 places[AHEAD], next_place;
    uint4 scales[AHEAD];
    uint4 codes[AHEAD][LATENT_TILES];

    static __device__ __forceinline__ int row_of(int thread) { return thread / 4; }
    __device__ __forceinline__ void look_up(const i32* entries, int begin, int end) {
        next_place = place_of(entries, begin + row_of(gatherer()), end);
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
        for (int tile = 0; tile < LATENT_TILES; ++tile) load_here(codes[i][tile], row + 64 * tile + 16 * (gatherer() % 4));
    }
    __device__ __forceinline__ Gatherer(const u8* rows, const i32* entries, int begin, int end, int = 0) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            look_up(entries, begin + i * BLOCK, end);
            load(rows, i);
        }
        look_up(entries, begin + AHEAD * BLOCK, end);
    }
    template <int I>
    __device__ __forceinline__ void fill(const u8* rows, const i32* entries, int begin, int end, u8* stage, u64& full) {
        const int thread = gatherer(), quarter = thread % 4, row = row_of(thread);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int chunk = 2 * quarter + half;
            copy_chunk(shared_address(stage) + LATENT_TILES * TILE_BYTES + swizzled(row, chunk),
                       row_at(rows, I) + LATENT + 16 + 16 * chunk, places[I] >= 0);
        }
        arrive_copied(full);
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
        publish_shared();  // before the next loads begin, which it would wait for
        arrive(full);
        load(rows, I);
        look_up(entries, begin + (AHEAD + 1) * BLOCK, end);
    }
};
// Two blocks that attend to the same entries gather half of each block's rows for both. Eight lanes take 8 codes of the
// same row each; a thread takes one row, those codes of each of its tiles and 8 values of its rope part.
struct PairGatherer {
    static constexpr int AHEAD = 2;
    i32 places[AHEAD], next_place;
    int peer;  // rank of the other block
    uint4 scales[AHEAD], rope[AHEAD];
    uint2 codes[AHEAD][LATENT_TILES];

    __device__ __forceinline__ int row_of(int thread) const { return BLOCK / 2 * (1 - peer % 2) + thread / 8; }
    __device__ __forceinline__ void look_up(const i32* entries, int begin, int end) {
        next_place = place_of(entries, begin + row_of(gatherer()), end);
    }
    __device__ __forceinline__ void load(const u8* rows, int i) {
        places[i] = next_place;
        scales[i] = rope[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int tile = 0; tile < LATENT_TILES; ++tile) codes[i][tile] = make_uint2(0, 0);
        if (places[i] < 0) return;
        const u8* const row = rows + static_cast<i64>(places[i]) * ROW_BYTES;
        const int chunk = gatherer() % 8;
        load_here(scales[i], row + LATENT);
#pragma unroll
        for (int tile = 0; tile < LATENT_TILES; ++tile) load_here(codes[i][tile], row + 64 * tile + 8 * chunk);
        load_here(rope[i], row + LATENT + 16 + 16 * chunk);
    }
    __device__ __forceinline__ PairGatherer(const u8* rows, const i32* entries, int begin, int end, int peer)
        : peer(peer) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            look_up(entries, begin + i * BLOCK, end);
            load(rows, i);
        }
        look_up(entries, begin + AHEAD * BLOCK, end);
    }
    // To the same place in both blocks.
    static __device__ __forceinline__ void put(u32 here, u32 there, u32 full_there, const uint4& v) {
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(here), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there),
            "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(full_there)
            : "memory");
    }
    template <int I>
    __device__ __forceinline__ void fill(const u8* rows, const i32* entries, int begin, int end, u8* stage, u64& full) {
        const int thread = gatherer();
        const u8* const at = stage + swizzled(row_of(thread), thread % 8);
        const u32 here = shared_address(at), there = peer_address(at, peer), full_there = peer_address(&full, peer);
        const u32 by_group[4] = {scales[I].x, scales[I].y, scales[I].z, scales[I].w};
#pragma unroll
        for (int tile = 0; tile < LATENT_TILES; ++tile) {
            const float scale = __uint_as_float(by_group[tile / 2]);
            uint4 values;
            decode(codes[I][tile].x, scale, values.x, values.y), decode(codes[I][tile].y, scale, values.z, values.w);
            put(here + tile * TILE_BYTES, there + tile * TILE_BYTES, full_there, values);
        }
        put(here + LATENT_TILES * TILE_BYTES, there + LATENT_TILES * TILE_BYTES, full_there, rope[I]);
        publish_shared();  // before the next loads begin, which it would wait for
        if (thread == 0)
            expect_bytes(&full, TILES * TILE_BYTES / 2);
        else
            arrive(full);
        load(rows, I);
        look_up(entries, begin + (AHEAD + 1) * BLOCK, end);
    }
};
constexpr int GATHER_REGISTERS = 104, PRODUCT_REGISTERS = 200, FILL_ARRIVALS = 2 * GROUP;  // rope apart
#endif

// Block i of the gatherers, in a half of two.
template <int I, bool PAIRED, class Gatherer>
__device__ __forceinline__ void gather_block(Gatherer& gatherer, const u8* rows, const i32* entries, int i, int begin,
                                             int end, Shared& s) {
    const int stage = i % STAGES;
    if (i >= STAGES) await(s.empty[stage], (i / STAGES - 1) & 1);
    if (PAIRED && i >= STAGES) await(s.freed[stage], (i / STAGES - 1) & 1);
    gatherer.template fill<I>(rows, entries, begin + i * BLOCK, end, s.rows[stage], s.full[stage]);
}
template <class Gatherer, bool PAIRED>
__device__ __forceinline__ void gather(const u8* rows, const i32* entries, int begin, int end, int blocks, int peer,
                                       Shared& s) {
    Gatherer gatherer(rows, entries, begin, end, peer);
    for (int i = 0; i < blocks; i += 2) {
        gather_block<0, PAIRED>(gatherer, rows, entries, i, begin, end, s);
        if (i + 1 < blocks) gather_block<1, PAIRED>(gatherer, rows, entries, i + 1, begin, end, s);
    }
}

}  // namespace hisparse

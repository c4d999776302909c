// copy_rows: rows between device memory and host pages, all layers and index keys in one launch; replay_misses: the
// copies of a miss plan, for another layer. Contracts: kernels/copy_rows.py, kernels/swap_in.py.
//
// Rows are split on the lines of host memory, whichever direction they take: partial lines cost a PCIe request each.
// Where a whole tile of the list lies back to back on both sides, as staging and resume have it, rows do not matter:
// the tile is one run of bytes. Planes are sections of their own, like layers.
//
// Neighbouring lines stay in one thread block, and neighbouring rows too: dealt out to all blocks in turn, the same
// requests reach the host in an order that halves their bandwidth (24 against 45 GB/s).
#pragma once

#include "planes.cuh"

namespace hisparse {

using Keys = RowShape<INDEX_ROW_BYTES, INDEX_ROW_ALIGN>;

constexpr int COPY_FLIGHT = 4;
constexpr int TILE_ROWS = PAGE_TOKENS;
constexpr int RUN_FLIGHT = 4;  // words of 16 bytes in flight per thread

// Addresses of a tile's rows on both sides; a null host address is skipped.
struct Tile {
    u8* host[TILE_ROWS];
    u8* device[TILE_ROWS];
};

__device__ __forceinline__ void move_run(u8* to, const u8* from, int bytes) {
    const int words = bytes / sizeof(uint4);
#pragma unroll 1
    for (int begin = threadIdx.x; begin < words; begin += COPY_ROWS_THREADS * RUN_FLIGHT) {
        uint4 held[RUN_FLIGHT];
#pragma unroll
        for (int i = 0; i < RUN_FLIGHT; ++i)
            if (begin + i * COPY_ROWS_THREADS < words)
                load_once(held[i], from + (begin + i * COPY_ROWS_THREADS) * sizeof(uint4));
#pragma unroll
        for (int i = 0; i < RUN_FLIGHT; ++i)
            if (begin + i * COPY_ROWS_THREADS < words)
                reinterpret_cast<uint4*>(to)[begin + i * COPY_ROWS_THREADS] = held[i];
    }
}

template <class Shape> __device__ __forceinline__ void move_rows(const Tile& tile, int rows, bool to_host) {
    const auto host = [&](u32 i) { return tile.host[i]; };
    const auto source = [&](u32 i) { return tile.host[i] == nullptr || !to_host ? tile.host[i] : tile.device[i]; };
    const auto target = [&](u32 i) { return to_host ? tile.host[i] : tile.device[i]; };
    constexpr u32 GROUPS = COPY_ROWS_THREADS / Shape::LANES;
    const u32 tasks = rows * Shape::LINES;
#pragma unroll 1
    for (u32 begin = threadIdx.x / Shape::LANES; begin < tasks; begin += GROUPS * COPY_FLIGHT) {
        Lines<Shape, COPY_FLIGHT> lines;
        lines.load(begin, GROUPS, tasks, host, source);
        lines.store(begin, GROUPS, target);
    }
}

// A plane of one layer, or keys of one group: `device` is its section of the arena, `section` its byte offset in a page.
template <class Shape>
__device__ __forceinline__ void copy_section(const CopyRows& p, Tile& tile, u8* device, i64 section, const void* rows,
                                             i64 first_row, int wide) {
#pragma unroll 1
    for (int begin = blockIdx.x * TILE_ROWS; begin < p.n; begin += gridDim.x * TILE_ROWS) {
        const int here = min(TILE_ROWS, p.n - begin), i = threadIdx.x;
        __syncthreads();
        if (i < here) {
            const i64 page = read_id(p.host_page, begin + i, p.wide_host_page);
            const i64 offset = read_id(p.host_offset, begin + i, p.wide_host_offset);
            tile.host[i] =
                page < 0 ? nullptr : p.state.host + page * p.state.page_bytes + section + offset * Shape::ROW;
            tile.device[i] = device + read_id(rows, first_row + begin + i, wide) * Shape::ROW;
        }
        __syncthreads();
        u8* const host = tile.host[0];
        u8* const row = tile.device[0];
        const bool follows = i >= here || (host != nullptr && tile.host[i] == host + i * Shape::ROW &&
                                           tile.device[i] == row + i * Shape::ROW);
        const u64 bits = reinterpret_cast<u64>(host) | reinterpret_cast<u64>(row) | here * Shape::ROW;
        if (__syncthreads_and(follows) && bits % sizeof(uint4) == 0)
            move_run(p.to_host ? host : row, p.to_host ? row : host, here * Shape::ROW);
        else
            move_rows<Shape>(tile, here, p.to_host);
    }
}

template <class P> __device__ __forceinline__ void copy_plane(const CopyRows& p, Tile& tile, i64 layer) {
    copy_section<typename P::Shape>(p, tile, arena_of<P>(p.state, layer), section_of<P>(layer), p.device_row,
                                    p.group_of_layer[layer] * p.n, p.wide_device_row);
}

// Copies first..last-1 of a plan, counted through all its rows; `ends` has each row's count and those before it.
template <class P>
__device__ __forceinline__ void replay_plane(const ReplayMisses& p, const u32* ends, u32 first, u32 last) {
    using Shape = typename P::Shape;
    constexpr u32 GROUPS = COPY_ROWS_THREADS / Shape::LANES;
    u8* const arena = arena_of<P>(p.state, p.layer);
    const auto place = [&](u32 i) {
        u32 low = 0, high = p.rows - 1;
        while (low < high) {
            const u32 middle = (low + high) / 2;
            if (ends[middle] > first + i) high = middle;
            else low = middle + 1;
        }
        return static_cast<i64>(low) * p.k + first + i - (low > 0 ? ends[low - 1] : 0);
    };
    const auto host = [&](u32 i) {
        const i64 at = place(i);
        return host_place<P>(p.state, p.plan.host_page[at], p.plan.host_offset[at], p.layer);
    };
    const auto target = [&](u32 i) { return arena + static_cast<i64>(p.plan.device_row[place(i)]) * Shape::ROW; };
    const u32 tasks = (last - first) * Shape::LINES;
#pragma unroll 1
    for (u32 begin = threadIdx.x / Shape::LANES; begin < tasks; begin += GROUPS * COPY_FLIGHT) {
        Lines<Shape, COPY_FLIGHT> lines;
        lines.load(begin, GROUPS, tasks, host, host);
        lines.store(begin, GROUPS, target);
    }
}

// Inclusive prefix sums of a plan's counts.
__device__ __forceinline__ void sum_counts(const ReplayMisses& p, u32* ends, u32* warp_sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 before = 0;
#pragma unroll 1
    for (int begin = 0; begin < p.rows; begin += COPY_ROWS_THREADS) {
        const int row = begin + threadIdx.x;
        u32 through = row < p.rows ? p.plan.count[row] : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 left = __shfl_up_sync(0xFFFFFFFF, through, step);
            if (lane >= step) through += left;
        }
        if (lane == 31) warp_sums[warp] = through;
        __syncthreads();
        u32 all = 0;
        for (int w = 0; w < COPY_ROWS_THREADS / 32; ++w) {
            if (w == warp && row < p.rows) ends[row] = before + all + through;
            all += warp_sums[w];
        }
        before += all;
        __syncthreads();
    }
}

}  // namespace hisparse

// grid: (tiles, PLANES * layers + groups), or (tiles, groups) when there are no rows to copy, or without keys.
extern "C" __global__ void __launch_bounds__(hisparse::COPY_ROWS_THREADS, 4)
    copy_rows(const __grid_constant__ hisparse::CopyRows p) {
    using namespace hisparse;
    __shared__ Tile tile;
    const State& s = p.state;
    const int sections = PLANES * s.layers;
    const int section = p.device_row == nullptr ? blockIdx.y + sections : blockIdx.y;
    if (section < sections) {
        if (section % PLANES == 0) copy_plane<Plane<0>>(p, tile, section / PLANES);
        else copy_plane<LastPlane>(p, tile, section / PLANES);
    } else {
        const i64 group = section - sections;
        const i64 before = static_cast<i64>(s.layers) * PAGE_TOKENS * ROW_BYTES;
        copy_section<Keys>(p, tile, s.index_keys + group * s.key_rows * INDEX_ROW_BYTES,
                           before + group * PAGE_TOKENS * INDEX_ROW_BYTES, p.index_row, 0, p.wide_index_row);
    }
}

// Any grid: each block has an equal share of all copies. Dynamic shared memory: 4 bytes per row of the plan.
extern "C" __global__ void __launch_bounds__(hisparse::COPY_ROWS_THREADS, 4)
    replay_misses(const __grid_constant__ hisparse::ReplayMisses p) {
    using namespace hisparse;
    extern __shared__ u32 ends[];
    __shared__ u32 warp_sums[COPY_ROWS_THREADS / 32];
    sum_counts(p, ends, warp_sums);
    const u64 copies = ends[p.rows - 1];
    const u32 first = static_cast<u32>(copies * blockIdx.x / gridDim.x);
    const u32 last = static_cast<u32>(copies * (blockIdx.x + 1) / gridDim.x);
    replay_plane<Plane<0>>(p, ends, first, last);
    if (PLANES == 2) replay_plane<LastPlane>(p, ends, first, last);
}

extern "C" __global__ void null_kernel() {}

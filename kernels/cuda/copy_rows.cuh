// copy_rows: rows between device memory and host pages, all layers and index keys in one launch; replay_misses: the
// copies of a miss plan, for another layer. Contracts: kernels/copy_rows.py, kernels/swap_in.py.
//
// Both sides of a copy are split on the lines of host memory, whichever direction it takes: partial lines cost a PCIe
// request each. Planes are sections of their own, like layers.
#pragma once

#include "planes.cuh"

namespace hisparse {

using Keys = RowShape<INDEX_ROW_BYTES, INDEX_ROW_ALIGN>;

constexpr int COPY_ROWS_THREADS = 256;
constexpr int COPY_FLIGHT = 4;

// A plane of one layer, or keys of one group: `device` is its section of the arena, `section` its byte offset in a page.
template <class Shape>
__device__ void copy_section(const CopyRows& p, u8* device, i64 section, const void* rows, i64 first_row, int wide) {
    const auto at_host = [&](int i) -> u8* {
        const i64 page = read_id(p.host_page, i, p.wide_host_page);
        if (page < 0) return nullptr;
        return p.state.host + page * p.state.page_bytes + section +
               read_id(p.host_offset, i, p.wide_host_offset) * Shape::ROW;
    };
    const auto at_device = [&](int i) { return device + read_id(rows, first_row + i, wide) * Shape::ROW; };
    const int groups = blockDim.x / Shape::LANES, tasks = p.n * Shape::LINES;
    for (int begin = blockIdx.x * groups * COPY_FLIGHT + threadIdx.x / Shape::LANES; begin < tasks;
         begin += gridDim.x * groups * COPY_FLIGHT) {
        Lines<Shape, COPY_FLIGHT> lines;
        lines.load(begin, groups, tasks, at_host, [&](int i) {
            u8* const host = at_host(i);
            return host == nullptr ? nullptr : p.to_host ? at_device(i) : host;
        });
        lines.store(begin, groups, [&](int i) {
            u8* const host = at_host(i);
            return host == nullptr ? nullptr : p.to_host ? host : at_device(i);
        });
    }
}

template <class P> __device__ void copy_plane(const CopyRows& p, i64 layer) {
    copy_section<typename P::Shape>(p, arena_of<P>(p.state, layer), section_of<P>(layer), p.device_row,
                                    p.group_of_layer[layer] * p.n, p.wide_device_row);
}

template <class P> __device__ void replay_plane(const ReplayMisses& p, int row, int part) {
    using Shape = typename P::Shape;
    const i64 base = static_cast<i64>(row) * p.k;
    u8* const arena = arena_of<P>(p.state, p.layer);
    const auto host = [&](int i) {
        return host_place<P>(p.state, p.plan.host_page[base + i], p.plan.host_offset[base + i], p.layer);
    };
    const auto target = [&](int i) { return arena + static_cast<i64>(p.plan.device_row[base + i]) * Shape::ROW; };
    const int groups = blockDim.x / Shape::LANES, tasks = p.plan.count[row] * Shape::LINES;
    const int stride = p.parts * groups;  // neighbouring lines go to different multiprocessors
    for (int begin = threadIdx.x / Shape::LANES * p.parts + part; begin < tasks; begin += stride * COPY_FLIGHT) {
        Lines<Shape, COPY_FLIGHT> lines;
        lines.load(begin, stride, tasks, host, host);
        lines.store(begin, stride, target);
    }
}

}  // namespace hisparse

// grid: (tiles, PLANES * layers + groups), or (tiles, groups) when there are no rows to copy, or without keys.
extern "C" __global__ void __launch_bounds__(hisparse::COPY_ROWS_THREADS, 4)
    copy_rows(const __grid_constant__ hisparse::CopyRows p) {
    using namespace hisparse;
    const State& s = p.state;
    const int sections = PLANES * s.layers;
    const int section = p.device_row == nullptr ? blockIdx.y + sections : blockIdx.y;
    if (section < sections) {
        if (section % PLANES == 0) copy_plane<Plane<0>>(p, section / PLANES);
        else copy_plane<LastPlane>(p, section / PLANES);
    } else {
        const i64 group = section - sections;
        const i64 before = static_cast<i64>(s.layers) * PAGE_TOKENS * ROW_BYTES;
        copy_section<Keys>(p, s.index_keys + group * s.key_rows * INDEX_ROW_BYTES,
                           before + group * PAGE_TOKENS * INDEX_ROW_BYTES, p.index_row, 0, p.wide_index_row);
    }
}

// grid: batch * parts blocks; a block of a row without misses ends at once.
extern "C" __global__ void __launch_bounds__(hisparse::COPY_ROWS_THREADS, 4)
    replay_misses(const __grid_constant__ hisparse::ReplayMisses p) {
    using namespace hisparse;
    const int row = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
    replay_plane<Plane<0>>(p, row, part);
    if (PLANES == 2) replay_plane<LastPlane>(p, row, part);
}

extern "C" __global__ void null_kernel() {}

// Moving rows.
//
// A row is moved in *lines* of 128 bytes of host memory, each by one group of lanes with one load per lane: PCIe then sees
// whole-line requests, which carry 46-47 GB/s where a warp per row carries 44 (measured; bulk copies: 24, cp.async: less
// than half). Rows start anywhere, so the first and last line of a row are masked. Lanes move the widest word that
// divides every row address: 16 bytes where rows allow, down to single bytes.
#pragma once

#include "ptx.cuh"

namespace hisparse {

template <int BYTES> struct WordOf;
template <> struct WordOf<16> { using type = uint4; };
template <> struct WordOf<8> { using type = uint2; };
template <> struct WordOf<4> { using type = u32; };
template <> struct WordOf<2> { using type = u16; };
template <> struct WordOf<1> { using type = u8; };

// How rows of BYTES bytes, all at multiples of ALIGN (a power of two up to 128), split into lines.
template <int BYTES, int ALIGN> struct RowShape {
    static constexpr int WORD = ALIGN < 16 ? ALIGN : 16;
    static constexpr int LANES = 128 / WORD < 32 ? 128 / WORD : 32;
    static constexpr int LINE = LANES * WORD;
    static constexpr int FIRST_MAX = ALIGN < LINE ? LINE - ALIGN : 0;  // bytes of a first line that precede the row
    static constexpr int LINES = (FIRST_MAX + BYTES + LINE - 1) / LINE;
    static constexpr int ROW = BYTES;
    using Word = typename WordOf<WORD>::type;

    // Where in the row this lane's word of line `line` lies; outside [0, ROW) when the line does not reach so far.
    static __device__ __forceinline__ int offset(const void* host_row, int line) {
        const int before = static_cast<int>(reinterpret_cast<u64>(host_row)) & (LINE - 1);
        return line * LINE + static_cast<int>(threadIdx.x % LANES) * WORD - before;
    }
};

// FLIGHT lines per group of lanes, loaded together and held in registers until stored. `source(i)` and `target(i)` give
// the addresses of row i, `host(i)` the one of them that lies in host memory; a null address is skipped. Task t is line
// t % LINES of row t / LINES.
template <class Shape, int FLIGHT> struct Lines {
    typename Shape::Word held[FLIGHT];
    int offset[FLIGHT];  // in the row; -1: nothing held

    template <class Host, class Source>
    __device__ __forceinline__ void load(u32 first, u32 stride, u32 tasks, Host host, Source source) {
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            const u32 task = first + i * stride, row = task / Shape::LINES;
            offset[i] = -1;
            if (task >= tasks) continue;
            const u8* from = source(row);
            const int at = Shape::offset(host(row), static_cast<int>(task % Shape::LINES));
            if (from == nullptr || at < 0 || at >= Shape::ROW) continue;
            offset[i] = at;
            load_once(held[i], from + at);
        }
    }

    template <class Target> __device__ __forceinline__ void store(u32 first, u32 stride, Target target) {
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            if (offset[i] < 0) continue;
            u8* to = target((first + i * stride) / Shape::LINES);
            if (to != nullptr) *reinterpret_cast<typename Shape::Word*>(to + offset[i]) = held[i];
        }
    }

    // Likewise, where tasks are few at times: the code for many is not even fetched then. All rows are looked up before
    // any is loaded or stored, so that nothing in between waits. `source(i)` lies in host memory.
    template <class Source>
    __device__ __forceinline__ void load_few(u32 first, u32 stride, u32 tasks, Source source) {
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) offset[i] = -1;
        if (first < tasks) load_part<0, 1>(first, stride, tasks, source);
        if (first + stride < tasks) load_part<1, 4>(first, stride, tasks, source);
        if (first + 4 * stride < tasks) load_part<4, FLIGHT>(first, stride, tasks, source);
    }
    template <class Target> __device__ __forceinline__ void store_few(u32 first, u32 stride, u32 tasks, Target target) {
        if (first < tasks) store_part<0, 1>(first, stride, tasks, target);
        if (first + stride < tasks) store_part<1, 4>(first, stride, tasks, target);
        if (first + 4 * stride < tasks) store_part<4, FLIGHT>(first, stride, tasks, target);
    }

   private:
    template <int BEGIN, int END, class Source>
    __device__ __forceinline__ void load_part(u32 first, u32 stride, u32 tasks, Source source) {
        const u8* from[END - BEGIN];
        int at[END - BEGIN];
#pragma unroll
        for (int i = BEGIN; i < END; ++i) {
            const u32 task = END == 1 ? first : min(first + i * stride, tasks - 1);
            from[i - BEGIN] = source(task / Shape::LINES);
            at[i - BEGIN] = Shape::offset(from[i - BEGIN], static_cast<int>(task % Shape::LINES));
        }
#pragma unroll
        for (int i = BEGIN; i < END; ++i) {
            const int in_row = at[i - BEGIN];
            if (first + i * stride >= tasks || in_row < 0 || in_row >= Shape::ROW) continue;
            load_once(held[i], from[i - BEGIN] + in_row);
            offset[i] = in_row;
        }
    }
    template <int BEGIN, int END, class Target>
    __device__ __forceinline__ void store_part(u32 first, u32 stride, u32 tasks, Target target) {
        u8* to[END - BEGIN];
#pragma unroll
        for (int i = BEGIN; i < END; ++i) to[i - BEGIN] = target(min(first + i * stride, tasks - 1) / Shape::LINES);
#pragma unroll
        for (int i = BEGIN; i < END; ++i)
            if (offset[i] >= 0 && to[i - BEGIN] != nullptr)
                *reinterpret_cast<typename Shape::Word*>(to[i - BEGIN] + offset[i]) = held[i];
    }
};

__device__ __forceinline__ i64 read_id(const void* ids, int place, int wide) {
    return wide ? static_cast<const i64*>(ids)[place] : static_cast<const i32*>(ids)[place];
}

__device__ __forceinline__ void trip(const State& s, Tripwire wire, int times) {
    if (times) atomicAdd(reinterpret_cast<u64*>(s.tripwires + wire), static_cast<u64>(times));
}

}  // namespace hisparse

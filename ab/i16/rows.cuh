// rows: a model's reads and writes of rows and index keys. Contract: kernels/rows.py.
//
// One thread per word of a row, neighbouring threads on neighbouring words: a step writes a few rows, and a prompt's
// rows are as many as the device moves at its own pace. A place is a device row, named by a list (-1: none) or by a
// position through a seat's table of pages. A position whose page is not granted has none either, and trips.
#pragma once

#include "planes.cuh"

namespace hisparse {

// The widest word that divides rows of BYTES bytes, which lie back to back from an aligned base.
template <int BYTES> struct PackedRow {
    static constexpr int WORD = (BYTES & -BYTES) < 16 ? (BYTES & -BYTES) : 16;
    static constexpr int WORDS = BYTES / WORD;
    using Word = typename WordOf<WORD>::type;
};

__device__ __forceinline__ i64 place_of(const MoveRows& p, int row, bool counts_tripwire) {
    if (p.places != nullptr) return p.places[row];
    const i64 position = p.start + row;
    const i32 page = p.table[position / PAGE_TOKENS];
    if (page < 0 && counts_tripwire) atomicAdd(reinterpret_cast<u64*>(p.tripwires + UNGRANTED), 1ull);
    return page < 0 ? -1 : static_cast<i64>(page) * PAGE_TOKENS + position % PAGE_TOKENS;
}

template <int BYTES> __device__ __forceinline__ void store(const MoveRows& p) {
    using Row = PackedRow<BYTES>;
    using Word = typename Row::Word;
    const i64 words = static_cast<i64>(p.n) * Row::WORDS;
    for (i64 i = blockIdx.x * static_cast<i64>(ROWS_THREADS) + threadIdx.x; i < words; i += gridDim.x * ROWS_THREADS) {
        const int row = static_cast<int>(i / Row::WORDS), word = static_cast<int>(i % Row::WORDS);
        const i64 place = place_of(p, row, word == 0);
        if (place >= 0) reinterpret_cast<Word*>(p.section)[place * Row::WORDS + word] = static_cast<Word*>(p.data)[i];
    }
}

template <int BYTES> __device__ __forceinline__ void fetch(const MoveRows& p) {
    using Row = PackedRow<BYTES>;
    using Word = typename Row::Word;
    const i64 words = static_cast<i64>(p.n) * Row::WORDS;
    for (i64 i = blockIdx.x * static_cast<i64>(ROWS_THREADS) + threadIdx.x; i < words; i += gridDim.x * ROWS_THREADS) {
        const int row = static_cast<int>(i / Row::WORDS), word = static_cast<int>(i % Row::WORDS);
        const i64 place = place_of(p, row, word == 0);
        static_cast<Word*>(p.data)[i] =
            place >= 0 ? reinterpret_cast<const Word*>(p.section)[place * Row::WORDS + word] : Word{};
    }
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::ROWS_THREADS)
    store_rows(const __grid_constant__ hisparse::MoveRows p) {
    using namespace hisparse;
    if (p.plane == 0) store<Plane<0>::Shape::ROW>(p);
    else if (PLANES == 2) store<LastPlane::Shape::ROW>(p);
}

extern "C" __global__ void __launch_bounds__(hisparse::ROWS_THREADS)
    fetch_rows(const __grid_constant__ hisparse::MoveRows p) {
    using namespace hisparse;
    if (p.plane == 0) fetch<Plane<0>::Shape::ROW>(p);
    else if (PLANES == 2) fetch<LastPlane::Shape::ROW>(p);
}

extern "C" __global__ void __launch_bounds__(hisparse::ROWS_THREADS)
    store_keys(const __grid_constant__ hisparse::MoveRows p) {
    hisparse::store<INDEX_ROW_BYTES>(p);
}

extern "C" __global__ void __launch_bounds__(hisparse::ROWS_THREADS)
    fetch_keys(const __grid_constant__ hisparse::MoveRows p) {
    hisparse::fetch<INDEX_ROW_BYTES>(p);
}

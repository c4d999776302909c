// Where the planes of a row lie: the twin of kernels/layout.py's diagrams. A row has one plane or two, each an array of
// its own with its own alignment, so rows are moved plane by plane, each in the widest words that it allows:
//
//     move<Plane<0>>(...);  // arena_of<P>, host_place<P>; P::Shape splits the plane's rows into lines
//     if (PLANES == 2) move<LastPlane>(...);
#pragma once

#include "memory.cuh"

namespace hisparse {

// BEFORE: bytes of a row that lie in earlier planes.
template <int NUMBER> struct Plane;
template <> struct Plane<0> {
    static constexpr int INDEX = 0;
    static constexpr int BEFORE = 0;
    using Shape = RowShape<PLANE0_BYTES, PLANE0_ALIGN>;
};
#if PLANES == 2
template <> struct Plane<1> {
    static constexpr int INDEX = 1;
    static constexpr int BEFORE = PLANE0_BYTES;
    using Shape = RowShape<PLANE1_BYTES, PLANE1_ALIGN>;
};
#endif

using LastPlane = Plane<PLANES - 1>;

// First row of a layer's arena.
template <class P> __device__ __forceinline__ u8* arena_of(const State& s, i64 layer) {
    return s.rows + (layer * ROW_BYTES + P::BEFORE) * s.arena_rows;
}

// First row of a layer in a host page, as an offset into the page.
template <class P> __device__ __forceinline__ i64 section_of(i64 layer) {
    return (layer * ROW_BYTES + P::BEFORE) * PAGE_TOKENS;
}

template <class P> __device__ __forceinline__ u8* host_place(const State& s, i64 page, i64 offset, i64 layer) {
    return s.host + page * s.page_bytes + section_of<P>(layer) + offset * P::Shape::ROW;
}

}  // namespace hisparse

// Index keys of four bits (MXFP4) as products of e4m3 take them: each key as 128 e4m3 with one scale.
//
// A key is 64 bytes of codes and four scales, powers of two: value = e2m1 * 2**(scale - 127). With the largest of its scales,
// value = e * 2**(largest - 127 - 6), where e = e2m1 * 2**(6 + scale - largest) is an e4m3, exactly, as long as a scale is at
// most 2**11 times smaller than the largest. A group under a smaller one, whose values are all less than 2**-11 of the key's
// largest magnitude, becomes zeros; queries, rounded to e4m3, are off by more than it adds. A scale of 255 makes a key no
// number: so is its factor.
//
// A lane's quarter of a key is a group. Its eight magnitudes as e4m3 are two words, those of the largest scale less an exponent
// in each byte; codes choose from them by byte permutes, three bits each, and their signs go where signs are.
#pragma once

#include "layout.cuh"

namespace hisparse {

constexpr int FP4_KEY_EXPONENT = 6;  // 6 * 2**6 is the largest such e4m3
constexpr u32 FP4_KEY_GAP = 11;      // the smallest, 2**-1 * 2**(6 - 11), is the least normal one

struct Magnitudes {
    u32 low, high;  // e4m3 of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6
};
__device__ __forceinline__ Magnitudes magnitudes_below(u32 gap) {
    if (gap > FP4_KEY_GAP) return {0, 0};
    return {0x6C686000 - gap * 0x08080800, 0x7C787470 - gap * 0x08080808};
}

// Eight codes as two words of e4m3.
__device__ __forceinline__ void decode_codes(u32 codes, const Magnitudes& of, u32& first, u32& second) {
    const u32 sizes = codes & 0x77777777, even = codes << 4;  // whose upper halves of bytes are codes 0, 2, 4, 6
    first = __byte_perm(of.low, of.high, sizes) | (__byte_perm(even, codes, 0x5140) & 0x80808080);
    second = __byte_perm(of.low, of.high, sizes >> 16) | (__byte_perm(even, codes, 0x7362) & 0x80808080);
}

__device__ __forceinline__ u32 largest_scale(u32 scales) {
    const u32 pairs = __vmaxu2(scales & 0x00FF00FF, scales >> 8 & 0x00FF00FF);
    return max(pairs & 0xFFFF, pairs >> 16);
}
// Calls put(i, first, second) for words 2 i and 2 i + 1 of lane t's quarter of the key at `key`. Returns the key's factor,
// times 2**FP4_KEY_EXPONENT.
template <class Put> __device__ __forceinline__ float decode_quarter(const u32* key, int t, Put put) {
    const u32 scales = key[16], largest = largest_scale(scales);
    const Magnitudes of = magnitudes_below(largest - __byte_perm(scales, 0, 0x4440 | t));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 first, second;
        decode_codes(key[4 * t + i], of, first, second);
        put(i, first, second);
    }
    return __uint_as_float(largest << 23 | (largest == 255));
}

}  // namespace hisparse

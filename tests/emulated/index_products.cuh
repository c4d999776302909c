// What kernels/cuda/src/index_products.cuh has, on a CPU. Registers of the keys and blocks of the queries are laid out as the
// instruction wants them; sums are float32, in order of steps.
#pragma once

#include <cmath>

#include "barriers.cuh"
#include "index_plan.cuh"

namespace hisparse {

inline float key_relu(float v) { return v != v ? v : std::fmax(v, 0.0f); }
inline void await_together(u32 barrier, u32 parity) {
    if (threadIdx.x % 32 == 0) await_phase(barrier, parity);
    __syncwarp();
}
inline void fetch_once(void* to, const void* from, u32 bytes, u32 barrier) { fetch_bytes(to, from, bytes, barrier); }
inline u32 to_e4m3(float (&v)[4]) {
    static_assert(PARTS == 1, "one part of a query");
    return pack_e4m3(v[0], v[1], v[2], v[3]);
}
inline float e4m3_value(u32 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 127) == 127) return NAN;
    const float size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return code >> 7 & 1 ? -size : size;
}
inline u64 describe_heads(const u32* block) {
    const u64 along_places = TILES * 128 >> 4, along_heads = 128 >> 4;
    return static_cast<u64>(shared_address(block) >> 4) | along_places << 16 | along_heads << 32;
}

inline void settle_keys(u32 (&)[STEPS][4]) {}

struct Operand { u32 a[128][4]; };
// Two rows of keys a thread, by all heads. The descriptor: start, distance of the next 16 bytes of a row, distance of the next
// eight rows, each in 16 bytes.
inline void multiply_page(float (&c)[TILES][4], const u32 (&a)[4], u64 b, int step) {
    static Operand operands[TEAMS];
    static float known[256];
    if (known[8] == 0)
        for (u32 code = 0; code < 256; ++code) known[code] = e4m3_value(code);
    const int thread = threadIdx.x % 128, team = threadIdx.x / 128, t = thread % 4;
    Operand& operand = operands[team];
    for (int i = 0; i < 4; ++i) operand.a[thread][i] = a[i];
    emulated::meet(8 + team, 128);
    const u8* const start = at_address(static_cast<u32>(b & 0x3FFF) << 4);
    const u64 apart = (b >> 16 & 0x3FFF) << 4, rows_apart = (b >> 32 & 0x3FFF) << 4;
    float keys[2][32];
    for (int far = 0; far < 2; ++far)
        for (int i = 0; i < 32; ++i) {
            const u32 word = operand.a[thread - t + i % 16 / 4][i / 16 * 2 + far];
            keys[far][i] = known[word >> i % 4 * 8 & 0xFF];
        }
    for (int tile = 0; tile < TILES; ++tile)
        for (int odd = 0; odd < 2; ++odd)
            for (int far = 0; far < 2; ++far) {
                float sum = 0;
                for (int i = 0; i < 32; ++i)
                    sum += keys[far][i] * known[start[tile * rows_apart + i / 16 * apart + 16 * (2 * t + odd) + i % 16]];
                float& to = c[tile][2 * far + odd];
                to = step == 0 ? sum : to + sum;
            }
    emulated::meet(8 + team, 128);
}

}  // namespace hisparse

// What kernels/cuda/src/prompt_products.cuh has, on a CPU. Registers of the keys and blocks of the queries are laid out as
// the instruction wants them; sums are float32, in order of steps.
#pragma once

#include <cmath>

#include "barriers.cuh"

namespace hisparse {

constexpr int TEAM = 4, HALF = TEAM / 2;
constexpr int DIM = 128, WORDS = DIM * KEY_BYTES / 4;
constexpr int STEPS = WORDS / 8, TILES = TEAM * HEADS / 8, HALF_TILES = TILES / 2;
typedef float Products[HALF_TILES][4];

inline float e4m3_value(u32 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 127) == 127) return NAN;
    const float size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return code >> 7 & 1 ? -size : size;
}
// Of halfway values the even one.
inline u32 e4m3_code(float value) {
    if (value != value) return 127;
    const float size = std::fabs(value);
    const u32 sign = std::signbit(value) ? 128 : 0;
    if (size >= 448) return sign | 126;
    u32 code = 0;
    while (e4m3_value(code + 1) <= size) ++code;
    const float below = size - e4m3_value(code), above = e4m3_value(code + 1) - size;
    return sign | (code + (above < below || (above == below && code % 2) ? 1 : 0));
}
inline u32 e4m3_of(float a, float b, float c, float d) {
    return e4m3_code(a) | e4m3_code(b) << 8 | e4m3_code(c) << 16 | e4m3_code(d) << 24;
}
inline float prompt_relu(float v) { return v != v ? v : std::fmax(v, 0.0f); }

inline void receive(Products&) {}
inline void load_shared(float4& v, const float4* at) { v = *at; }

struct Operand { u32 a[128][4]; };
constexpr int VALUES = KEY_BYTES == 1 ? 32 : 16;  // of a row in 32 bytes

// 32 bytes of a row as values.
inline void unpack(const u8* bytes, float (&values)[VALUES]) {
    static float known[256];
    if (known[8] == 0)
        for (u32 code = 0; code < 256; ++code) known[code] = e4m3_value(code);
    for (int i = 0; i < VALUES; ++i)
        if (KEY_BYTES == 1) values[i] = known[bytes[i]];
        else values[i] = __uint_as_float((bytes[2 * i] | bytes[2 * i + 1] << 8) << 16);
}

inline u64 describe_queries(const u32* block) {
    const u64 along_places = TILES * 128 >> 4, along_heads = 128 >> 4;
    return static_cast<u64>(shared_address(block) >> 4) | along_places << 16 | along_heads << 32;
}

// The descriptor: start, distance of the next 16 bytes of a row, distance of the next eight rows, each in 16 bytes.
inline void multiply_page(Products& c, const u32 (&a)[4], u64 b, int step) {
    static Operand operands[16];
    const int thread = threadIdx.x % 128, team = threadIdx.x / 128, t = thread % 4, g = thread % 32 / 4;
    Operand& operand = operands[team];
    for (int i = 0; i < 4; ++i) operand.a[thread][i] = a[i];
    emulated::meet(8 + team, 128);
    const u8* const start = at_address(static_cast<u32>(b & 0x3FFF) << 4);
    const u64 apart = (b >> 16 & 0x3FFF) << 4, rows_apart = (b >> 32 & 0x3FFF) << 4;
    float keys[2][VALUES];
    for (int far = 0; far < 2; ++far) {
        u32 words[8];
        for (int lane = 0; lane < 4; ++lane)
            for (int half = 0; half < 2; ++half) words[4 * half + lane] = operand.a[thread - t + lane][2 * half + far];
        unpack(reinterpret_cast<const u8*>(words), keys[far]);
    }
    for (int tile = 0; tile < HALF_TILES; ++tile)
        for (int odd = 0; odd < 2; ++odd) {
            u8 bytes[32];
            for (int half = 0; half < 2; ++half)
                std::memcpy(bytes + 16 * half, start + tile * rows_apart + half * apart + 16 * (2 * t + odd), 16);
            float query[VALUES];
            unpack(bytes, query);
            for (int far = 0; far < 2; ++far) {
                float sum = 0;
                for (int i = 0; i < VALUES; ++i) sum += keys[far][i] * query[i];
                float& to = c[tile][2 * far + odd];
                to = step == 0 ? sum : to + sum;
            }
        }
    emulated::meet(8 + team, 128);
}

}  // namespace hisparse

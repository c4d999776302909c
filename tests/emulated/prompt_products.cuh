// What kernels/cuda/src/prompt_products.cuh has, on a CPU. Registers of the keys and blocks of the queries are laid out as
// the instruction wants them; sums are float32, in order of steps.
#pragma once

#include <cmath>

#include "barriers.cuh"
#include "prompt_job.cuh"

namespace hisparse {

constexpr int DIM = 128, WORDS = DIM * KEY_BYTES / 4;
constexpr int STEPS = WORDS / 8, TILES = GROUP * HEADS / 8;
constexpr int CHUNK = KEY_BYTES == 1 ? 128 : 64, CHUNK_TOKENS = CHUNK / HEADS, CHUNKS = GROUP / CHUNK_TOKENS;
typedef u32 Products[32];
constexpr float QUERY_MOST = 0.875f;

inline float e4m3_value(u32 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 127) == 127) return NAN;
    const float size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return code >> 7 & 1 ? -size : size;
}
inline float float16_value(u32 code) {
    const int exponent = code >> 10 & 31, mantissa = code & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                       : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                      : std::ldexp(mantissa, -24);
    return code >> 15 ? -size : size;
}
// Of halfway values the even one.
inline u32 float16_code(float value) {
    const u32 sign = std::signbit(value) ? 0x8000 : 0;
    if (value != value) return 0x7FFF;
    const float size = std::fabs(value);
    if (size >= 65520) return sign | 0x7C00;
    if (size < std::ldexp(1.0f, -14)) return sign | static_cast<u32>(std::nearbyint(std::ldexp(size, 24)));
    const int exponent = std::ilogb(size);
    return sign | (static_cast<u32>(exponent + 14) * 1024 + static_cast<u32>(std::nearbyint(std::ldexp(size, 10 - exponent))));
}
inline u32 float16_pair(float first, float second) { return float16_code(first) | float16_code(second) << 16; }
inline u32 tf32_of(float value) { return (__float_as_uint(value) + 0x1000) & ~0x1FFFu; }
inline float relu(float v) { return v != v ? v : std::fmax(v, 0.0f); }

inline void receive(Products&) {}
inline void hold_registers(const u32 (&)[4]) {}

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
    for (int tile = 0; tile < CHUNK / 8; ++tile)
        for (int odd = 0; odd < 2; ++odd) {
            u8 bytes[32];
            for (int half = 0; half < 2; ++half)
                std::memcpy(bytes + 16 * half, start + tile * rows_apart + half * apart + 16 * (2 * t + odd), 16);
            float query[VALUES];
            unpack(bytes, query);
            for (int far = 0; far < 2; ++far) {
                float sum = 0;
                for (int i = 0; i < VALUES; ++i) sum += keys[far][i] * query[i];
                if (KEY_BYTES == 1) {
                    u32& to = c[2 * tile + far];
                    const int shift = 16 * odd;
                    const u32 code = float16_code(step == 0 ? sum : float16_value(to >> shift & 0xFFFF) + sum);
                    to = (to & ~(0xFFFFu << shift)) | code << shift;
                } else {
                    u32& to = c[4 * tile + 2 * far + odd];
                    to = __float_as_uint(step == 0 ? sum : __uint_as_float(to) + sum);
                }
            }
        }
    emulated::meet(8 + team, 128);
}

inline void load_shared(uint4& v, const void* at) { std::memcpy(&v, at, sizeof v); }
inline void add_weighed(u32& sum, u32 v, u32 weight) {
    u32 pair = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const auto part = [&](u32 of) { return static_cast<double>(float16_value(of >> shift & 0xFFFF)); };
        const double first = part(v) > 0 ? part(v) : 0;
        pair |= float16_code(static_cast<float>(first * part(weight) + part(sum))) << shift;
    }
    sum = pair;
}
inline u32 relu_of(u32 v) { return __float_as_uint(relu(__uint_as_float(v))); }

// Rows g and g + 8, columns 2 t and 2 t + 1; in words of `a` the two rows' first depths, then their second ones.
inline void add_product(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    constexpr int DEPTH = KEY_BYTES == 1 ? 16 : 8, EACH = DEPTH / 8;  // values in a word
    const int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    const auto value_of = [](u64 word, int odd) {
        const u32 bits = static_cast<u32>(word);
        return KEY_BYTES == 1 ? float16_value(bits >> 16 * odd & 0xFFFF) : __uint_as_float(bits & ~0x1FFFu);
    };
    float first[2][DEPTH], second[DEPTH][2];
    const u32 as[4] = {a0, a1, a2, a3}, bs[2] = {b0, b1};
    for (int word = 0; word < 4; ++word) {
        const uint64_t* said = emulated::exchange(as[word]);
        for (int i = 0; i < 4 * EACH; ++i)
            first[word % 2][word / 2 * DEPTH / 2 + i] = value_of(said[4 * g + i / EACH], i % EACH);
    }
    for (int word = 0; word < 2; ++word) {
        const uint64_t* said = emulated::exchange(bs[word]);
        for (int column = 0; column < 2; ++column)
            for (int i = 0; i < 4 * EACH; ++i)
                second[word * DEPTH / 2 + i][column] = value_of(said[4 * (2 * t + column) + i / EACH], i % EACH);
    }
    for (int n = 0; n < 4; ++n)
        for (int i = 0; i < DEPTH; ++i) sums[n] += first[n / 2][i] * second[i][n % 2];
}

}  // namespace hisparse

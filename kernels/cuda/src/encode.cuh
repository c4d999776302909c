// encode_fp4: values of KV rows or index keys to rows of four bits. The bytes are those of kernels/row_format.py on a CPU.
//
// Compiled for one form: SCALED values in groups of GROUP (16: a scale of e4m3; 32: one of powers of two), PLAIN behind them
// in e4m3, VALUE_BYTES of each value given. A thread has one group, or PLAIN_EACH plain values: each reads neighbours and
// writes whole words, and no two threads wait for each other.
//
// Every step is rounded as IEEE has it: a scale is divided by 6, not multiplied by its inverse, and quotients are compared with
// the middles between neighbouring magnitudes. Signs of what is no number are those that a CPU keeps.
#pragma once

#include "ptx.cuh"

namespace hisparse {

constexpr int GROUPS = SCALED / GROUP, PLAIN_EACH = 16, PARTS = GROUPS + PLAIN / PLAIN_EACH;
constexpr int SCALES_AT = SCALED / 2, PLAIN_AT = SCALES_AT + GROUPS, FP4_ROW = PLAIN_AT + PLAIN;
static_assert(GROUP == 16 || GROUP == 32, "rows and keys");
static_assert(SCALED % GROUP == 0 && PLAIN % PLAIN_EACH == 0 && GROUPS % 4 == 0, "whole words of every part");
static_assert(VALUE_BYTES == 2 || VALUE_BYTES == 4, "bfloat16 or float32");

constexpr u32 INFINITE = 0x7F800000;

// COUNT values from `at` on, a multiple of 16 bytes.
template <int COUNT> __device__ __forceinline__ void read_values(float (&x)[COUNT], const u8* at) {
#pragma unroll
    for (int i = 0; i < COUNT * VALUE_BYTES / 16; ++i) {
        uint4 four;
        load_once(four, at + 16 * i);
        const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (VALUE_BYTES == 4) x[4 * i + j] = __uint_as_float(words[j]);
            else x[(8 * i + 2 * j) % COUNT] = __uint_as_float(words[j] << 16),
                 x[(8 * i + 2 * j + 1) % COUNT] = __uint_as_float(words[j] & 0xFFFF0000);
        }
    }
}

// The nearest e4m3, which keeps the sign of what is no number.
__device__ __forceinline__ u32 e4m3_code(float value) {
    const u32 bits = __float_as_uint(value);
    return value != value ? bits >> 24 & 0x80 | 0x7F : pack_e4m3(value, 0, 0, 0) & 0xFF;
}

// The code of a quotient: the nearest magnitude of 0, 0.5, 1, 1.5, 2, 3, 4, 6, of halfway values the even code. `sign`: 0 or 8.
__device__ __forceinline__ u32 e2m1_code(float quotient, u32 sign) {
    const float size = fabsf(quotient);
    return sign + (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) +
           (size > 5.0f);
}

// A scale as it is kept, of the largest magnitude; its value.
struct Scale {
    u32 code;
    float factor;
};
__device__ __forceinline__ Scale scale_of(u32 most) {
    if (GROUP == 32) {
        const u32 exponent = most >> 23;
        const u32 code = exponent == 255 ? 255 : max(exponent, 3u) - 2;
        return {code, __uint_as_float(code == 255 ? INFINITE | 1 : code << 23)};
    }
    if (most >= INFINITE) return {0x7F, __uint_as_float(INFINITE | 1)};
    const float scale = fminf(fmaxf(__fdiv_rn(__uint_as_float(most), 6.0f), 0.001953125f), 448.0f);
    const u32 code = e4m3_code(scale);
    return {code, __uint_as_float(code << 20) * 1.329227995784916e36f};  // 2**120, by which the biases differ
}

__device__ __forceinline__ void encode_group(const u8* from, u8* to, int group, float by) {
    float x[GROUP];
    read_values(x, from + group * GROUP * VALUE_BYTES);
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) x[i] *= by, most = max(most, __float_as_uint(x[i]) & 0x7FFFFFFF);
    const Scale scale = scale_of(most);
    const bool number = scale.factor == scale.factor;
    u32* const words = reinterpret_cast<u32*>(to + group * (GROUP / 2));
#pragma unroll
    for (int i = 0; i < GROUP / 8; ++i) {
        u32 word = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float value = x[8 * i + j];
            const bool keeps = number || value != value;
            const u32 sign = keeps ? __float_as_uint(value) >> 28 & 8 : 0;
            word |= e2m1_code(number ? __fdiv_rn(value, scale.factor) : 0.0f, sign) << 4 * j;
        }
        words[i] = word;
    }
    to[SCALES_AT + group] = static_cast<u8>(scale.code);
}

__device__ __forceinline__ void encode_plain(const u8* from, u8* to, int part) {
    float x[PLAIN_EACH];
    read_values(x, from + (SCALED + part * PLAIN_EACH) * VALUE_BYTES);
    u32* const words = reinterpret_cast<u32*>(to + PLAIN_AT + part * PLAIN_EACH);
#pragma unroll
    for (int i = 0; i < PLAIN_EACH / 4; ++i) {
        u32 word = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) word |= e4m3_code(x[4 * i + j]) << 8 * j;
        words[i] = word;
    }
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::ENCODE_THREADS)
    encode_fp4(const __grid_constant__ hisparse::EncodeRows p) {
    using namespace hisparse;
    await_last();
    let_next_begin();
    const i64 number = blockIdx.x * static_cast<i64>(ENCODE_THREADS) + threadIdx.x, row = number / PARTS;
    const int part = static_cast<int>(number % PARTS);
    if (row >= p.n) return;
    const i64 place = p.places == nullptr ? row : p.places[row];
    if (place < 0) return;
    const u8* const from = p.values + row * ((SCALED + PLAIN) * VALUE_BYTES);
    u8* const to = p.out + place * FP4_ROW;
    if (part < GROUPS) encode_group(from, to, part, p.scale);
    else encode_plain(from, to, part - GROUPS);
}

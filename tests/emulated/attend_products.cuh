// What kernels/cuda/src/attend_products.cuh has, on a CPU. Copies arrive when a barrier is to know of them; a product is done
// when it is asked for, from shared memory as its descriptors lay it out.
#pragma once

#include <cmath>

#include "barriers.cuh"

namespace hisparse {

inline float bfloat16_value(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 bfloat16_bits(float value) {
    const u32 bits = __float_as_uint(value);
    if (value != value) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u32 pair_of(float first, float second) { return bfloat16_bits(first) | bfloat16_bits(second) << 16; }
inline float exp2_of(float v) { return std::exp2(v); }

inline void copy_chunk(u32 to, const u8* from, bool real) {
    static const u8 zeros[16] = {};
    if (reinterpret_cast<uintptr_t>(from) % 16 || to % 16) emulated::complain("a copy is not of a whole chunk");
    emulated::self->copies.push_back({at_address(to), real ? from : zeros, 16});
}
inline void await_copies() { await_words(); }
inline void arrive_copied(u32 barrier) {
    emulated::may_be_overtaken();
    await_words();
    arrive(barrier);
}
template <class T> void load_here(T& v, const u8* at) { std::memcpy(&v, at, sizeof v); }
inline void store_chunk(u32 to, const uint4& v) { std::memcpy(at_address(to), &v, sizeof v); }
inline u32 multiplied(u32 pair, u32 by) {
    return pair_of(bfloat16_value(pair & 0xFFFF) * bfloat16_value(by & 0xFFFF), bfloat16_value(pair >> 16) * bfloat16_value(by >> 16));
}
inline int renewed(int value) { return value; }
inline u32 loaded(const u32& word) { return word; }
inline void decode(u32 word, float scale, u32& low, u32& high) {
    float values[4];
    for (int i = 0; i < 4; ++i) {
        const u32 code = word >> 8 * i & 0xFF;
        const int exponent = code >> 3 & 15, mantissa = code & 7;
        const float size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
        values[i] = ((code & 127) == 127 ? NAN : code >> 7 ? -size : size) * scale;
    }
    low = pair_of(values[0], values[1]), high = pair_of(values[2], values[3]);
}

// An address of a peer's shared memory has the peer's rank above the address of its own.
inline u32 peer_address(u32 here, int peer) { return here | static_cast<u32>(peer + 1) << 24; }
inline u8* at_peer_address(u32 there) {
    return (*emulated::self->block->peers)[(there >> 24) - 1]->shared + (there & 0xFFFFFF);
}
inline void leave_cluster() { sync_cluster(); }
inline void arrive_there(u32 barrier_there) {
    emulated::may_be_overtaken();
    Phases& of = *reinterpret_cast<Phases*>(at_peer_address(barrier_there));
    --of.missing;
    turn_if_over(of);
}
inline void send_there(u32 there, const u32* words, u32 barrier_there) {
    emulated::may_be_overtaken();
    std::memcpy(at_peer_address(there), words, 16);
    Phases& of = *reinterpret_cast<Phases*>(at_peer_address(barrier_there));
    of.bytes -= 16;
    turn_if_over(of);
}

inline u32 operand(const void* at) { return shared_address(at) >> 4; }
inline u32 describe(u32 place, int bytes, int along = 0) {
    if (bytes % 16) emulated::complain("an operand begins inside of a chunk");
    return static_cast<u32>(along >> 4) << 16 | (place + (bytes >> 4));
}
// Swizzled: the 16-byte chunk of an address is changed by the number of its 128 bytes.
inline float value_at(u32 address) {
    u16 bits;
    std::memcpy(&bits, at_address(address ^ (address >> 7 & 7) << 4), sizeof bits);
    return bfloat16_value(bits);
}
// Value `k` of line `line` of an operand by columns; eight lines are 1024 bytes.
inline float by_columns(u32 operand, int line, int k) {
    return value_at(((operand & 0x3FFF) << 4) + line * 128 + 2 * k);
}
// Value `k` of column `column` of an operand by rows.
inline float by_rows(u32 operand, int column, int k) {
    const u32 along = operand >> 16 << 4;
    return value_at(((operand & 0x3FFF) << 4) + column / 64 * along + k * 128 + column % 64 * 2);
}
// Values of two lines, those of this thread's sums, by those of each column.
template <int SIZE, class Value> void multiply(float (&c)[SIZE], const float (&lines)[2][16], Value value, bool more) {
    const int t = threadIdx.x % 4;
    for (int n = 0; n < SIZE / 4; ++n)
        for (int odd = 0; odd < 2; ++odd) {
            float sum[2] = {0, 0};
            for (int k = 0; k < 16; ++k) {
                const float v = value(8 * n + 2 * t + odd, k);
                sum[0] += lines[0][k] * v, sum[1] += lines[1][k] * v;
            }
            for (int half = 0; half < 2; ++half) {
                float& to = c[4 * n + 2 * half + odd];
                to = more ? to + sum[half] : sum[half];
            }
        }
}
inline void multiply_keys(float (&c)[32], u32 a, u32 b, int more) {
    const int line = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float lines[2][16];
    for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 16; ++k) lines[half][k] = by_columns(a, line + half * 8, k);
    multiply(c, lines, [=](int column, int k) { return by_columns(b, column, k); }, more != 0);
}
// Registers of a quad have the 16 values of a line: two words each, of columns 2 t and 8 + 2 t.
template <int SIZE> void multiply_latents(float (&c)[SIZE], const u32* a, u32 b) {
    const int quad = threadIdx.x % 32 & ~3;
    float lines[2][16];
    for (int i = 0; i < 4; ++i)
        for (int t = 0; t < 4; ++t) {
            const u32 word = __shfl_sync(0xFFFFFFFF, a[i], quad + t);
            for (int odd = 0; odd < 2; ++odd)
                lines[i % 2][i / 2 * 8 + 2 * t + odd] = bfloat16_value(word >> 16 * odd & 0xFFFF);
        }
    multiply(c, lines, [=](int column, int k) { return by_rows(b, column, k); }, true);
}
inline void hold_shares(u32 (&)[16]) {}
inline void take_scores(float*) {}

}  // namespace hisparse

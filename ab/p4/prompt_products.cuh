// Products of prompt_index: 64 keys in registers by CHUNK columns of queries in shared memory, and their sums by weights.
// tests/emulated/prompt_products.cuh is the CPU form.
//
// A product of e4m3 keys is float16: QUERY_MOST bounds it. One of bfloat16 keys is float32. Either stands in a thread's
// registers as a product of sums over heads wants its first operand: as float16, or as tf32, whose lower bits are unread.
#pragma once

#include "prompt_job.cuh"
#include "wgmma.cuh"

namespace hisparse {

constexpr int DIM = 128, WORDS = DIM * KEY_BYTES / 4;  // words of a key's values, and of a query's
constexpr int STEPS = WORDS / 8, TILES = GROUP * HEADS / 8;
constexpr int CHUNK = KEY_BYTES == 1 ? 128 : 64, CHUNK_TOKENS = CHUNK / HEADS, CHUNKS = GROUP / CHUNK_TOKENS;
typedef u32 Products[32];  // of each eight columns, in order: keys g and g + 8 of the warp's 16, columns 2 t and 2 t + 1
static_assert(HEADS == 64 || HEADS == 32, "as wide as the products written here");
static_assert(KEY_BYTES == 1 || KEY_BYTES == 2, "as the products written here");
// The largest value of a quantized query: 448 times it, DIM times, is less than 65,504. Values are e4m3 down to a 50th of
// it, and lie at most 1/896 of it from their code below that.
constexpr float QUERY_MOST = 0.875f;
static_assert(KEY_BYTES != 1 || 448 * QUERY_MOST * DIM < 65504, "a product is float16");

#define FOUR(n) "+r"(c[n]), "+r"(c[n + 1]), "+r"(c[n + 2]), "+r"(c[n + 3])
#define SIXTEEN(n) FOUR(n), FOUR(n + 4), FOUR(n + 8), FOUR(n + 12)
#if KEY_BYTES == 1
#define KIND "m64n128k32.f16.e4m3.e4m3"
#define PLAIN "p, 1, 1"
#else
#define KIND "m64n64k16.f32.bf16.bf16"
#define PLAIN "p, 1, 1, 0"
#endif
// c = A * B of step 0, += in the others. Nothing of `c` and `a` may be touched until they are awaited.
__device__ __forceinline__ void multiply_page(Products& c, const u32 (&a)[4], u64 b, int step) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned." KIND " {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31}, {%32, %33, %34, %35}, %36, " PLAIN "; }"
        : SIXTEEN(0), SIXTEEN(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
}
// Products that were awaited are read behind this only.
__device__ __forceinline__ void receive(Products& c) {
    asm volatile("" : SIXTEEN(0), SIXTEEN(16)::"memory");
}
__device__ __forceinline__ void hold_registers(const u32 (&a)[4]) {
    asm volatile("" ::"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}
#undef PLAIN
#undef KIND
#undef SIXTEEN
#undef FOUR

// The descriptor of a block of 8 heads x 16 bytes; the next 16 bytes lie TILES blocks on, the next 8 heads one.
__device__ __forceinline__ u64 describe_queries(const u32* block) {
    const u64 address = shared_address(block) >> 4, along_places = TILES * 128 >> 4, along_heads = 128 >> 4;
    return address | along_places << 16 | along_heads << 32;
}

// Two float16, `first` in the lower half.
__device__ __forceinline__ u32 float16_pair(float first, float second) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ __forceinline__ u32 tf32_of(float value) {
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
}
// sum + relu(v) * weight, of pairs; no number is 0 behind relu.
__device__ __forceinline__ void add_weighed(u32& sum, u32 v, u32 weight) {
    asm("{ .reg .b32 r; max.f16x2 r, %1, %3; fma.rn.f16x2 %0, r, %2, %0; }" : "+r"(sum) : "r"(v), "r"(weight), "r"(0));
}
__device__ __forceinline__ u32 relu_of(u32 v) {
    float value = __uint_as_float(v);
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(value));
    return __float_as_uint(value);
}

// sums += A * B of one warp, of 16 rows of keys by 8 columns: float16, 16 deep, or tf32, 8 deep.
__device__ __forceinline__ void add_product(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if KEY_BYTES == 1
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A load that stays where it is written, ahead of what is awaited.
__device__ __forceinline__ void load_shared(uint4& v, const void* at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(at)));
}

}  // namespace hisparse

// Products of prompt_index: 64 keys in registers by the queries of half a team's tokens in shared memory, and what C++ lacks
// around them. tests/emulated/prompt_products.cuh is the CPU form.
#pragma once

#include "wgmma.cuh"

namespace hisparse {

constexpr int TEAM = 4, HALF = TEAM / 2;  // tokens; those whose products are awaited together
constexpr int DIM = 128, WORDS = DIM * KEY_BYTES / 4;  // words of a key's values, and of a query's
constexpr int STEPS = WORDS / 8, TILES = TEAM * HEADS / 8, HALF_TILES = TILES / 2;
typedef float Products[HALF_TILES][4];
static_assert(HEADS == 64 || HEADS == 32, "as wide as the products written here");
static_assert(KEY_BYTES == 1 || KEY_BYTES == 2, "as the products written here");

#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define EIGHT(n) FOUR(n), FOUR(n + 1)
#define THIRTYTWO(n) EIGHT(n), EIGHT(n + 2), EIGHT(n + 4), EIGHT(n + 6)
#if KEY_BYTES == 1
#define KIND "k32.f32.e4m3.e4m3"
#define PLAIN "p, 1, 1"
#else
#define KIND "k16.f32.bf16.bf16"
#define PLAIN "p, 1, 1, 0"
#endif
// c = A * B of step 0, += in the others. Nothing of `c` and `a` may be touched until they are awaited.
__device__ __forceinline__ void multiply_page(Products& c, const u32 (&a)[4], u64 b, int step) {
#if HEADS == 64
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128" KIND " {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"
        "%57,%58,%59,%60,%61,%62,%63}, {%64, %65, %66, %67}, %68, " PLAIN "; }"
        : THIRTYTWO(0), THIRTYTWO(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
#else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64" KIND " {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31}, {%32, %33, %34, %35}, %36, " PLAIN "; }"
        : THIRTYTWO(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
#endif
}
// Products that were awaited are read behind this only.
__device__ __forceinline__ void receive(Products& c) {
#pragma unroll
    for (int n = 0; n < HALF_TILES; ++n) asm volatile("" : FOUR(n)::"memory");
}
#undef PLAIN
#undef KIND
#undef THIRTYTWO
#undef EIGHT
#undef FOUR

// The descriptor of a block of 8 heads x 16 bytes; the next 16 bytes lie TILES blocks on, the next 8 heads one.
__device__ __forceinline__ u64 describe_queries(const u32* block) {
    const u64 address = shared_address(block) >> 4, along_places = TILES * 128 >> 4, along_heads = 128 >> 4;
    return address | along_places << 16 | along_heads << 32;
}

// Four values as e4m3, the first one lowest.
__device__ __forceinline__ u32 e4m3_of(float a, float b, float c, float d) {
    u32 four;
    asm("{ .reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high}; }"
        : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
    return four;
}

// A load that stays where it is written, ahead of what is awaited.
__device__ __forceinline__ void load_shared(float4& v, const float4* at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared_address(at)));
}

__device__ __forceinline__ float prompt_relu(float v) {
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(v));
    return v;
}

}  // namespace hisparse

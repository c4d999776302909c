// Products of index_hopper: 64 keys in registers by all heads, and what leads up to them. tests/emulated/index_products.cuh is the
// CPU form.
#pragma once

#include "barriers.cuh"
#include "index_plan.cuh"

namespace hisparse {

__device__ __forceinline__ float key_relu(float v) {
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(v));
    return v;
}

// By all lanes of a warp, which see the phase pass at once: nothing keeps it from passing again before a lane that is late.
__device__ __forceinline__ void await_together(u32 barrier, u32 parity) { await_phase(barrier, parity); }

// Keys are read once: scores stay in L2 instead.
__device__ __forceinline__ void fetch_once(void* to, const void* from, u32 bytes, u32 barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Four values as e4m3; `left`: what that takes from them.
__device__ __forceinline__ u32 to_e4m3(float (&v)[4]) {
    u32 four;
    asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;"
        "mov.b32 %0, {l, h}; }"
        : "=r"(four) : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));
    if (PARTS == 1) return four;
    float held[4];
    asm("{ .reg .b16 l, h, a, b, c, d; .reg .b32 low, high; mov.b32 {l, h}, %4; cvt.rn.f16x2.e4m3x2 low, l;"
        "cvt.rn.f16x2.e4m3x2 high, h; mov.b32 {a, b}, low; mov.b32 {c, d}, high;"
        "cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; cvt.f32.f16 %2, c; cvt.f32.f16 %3, d; }"
        : "=f"(held[0]), "=f"(held[1]), "=f"(held[2]), "=f"(held[3]) : "r"(four));
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] -= held[i];
    return four;
}

// Keys are in their registers ahead of this place, and stay there up to it. Behind a product nothing else keeps what decodes the
// next keys, or ends in the same registers, from running before the product has read them.
__device__ __forceinline__ void settle_keys(u32 (&a)[STEPS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        asm volatile("" : "+r"(a[step][0]), "+r"(a[step][1]), "+r"(a[step][2]), "+r"(a[step][3])::"memory");
}

// Of a block of 8 heads x 16 places; the next 16 places lie TILES blocks on, the next 8 heads one.
__device__ __forceinline__ u64 describe_heads(const u32* block) {
    const u64 address = shared_address(block) >> 4, along_places = TILES * 128 >> 4, along_heads = 128 >> 4;
    return address | along_places << 16 | along_heads << 32;
}

#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
// c = A * B of the first step, += in the others. Nothing of `c` and `a` may be touched until they are awaited.
__device__ __forceinline__ void multiply_page(float (&c)[TILES][4], const u32 (&a)[4], u64 b, int step) {
#if HEADS == 64
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
#else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
#endif
}
#undef FOUR

}  // namespace hisparse

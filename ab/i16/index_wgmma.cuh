// Hopper's matrix instruction for index_mma.cuh: four warps, a team, multiply 64 keys by all heads at once.
//
// A warp's 16 keys are its rows of A, in registers as for mma.m16n8k16, and the sums come out alike. B stands in shared
// memory as blocks of 8 heads x 8 places (128 bytes, a word per lane of the fragments of mma.m16n8k16), step by step,
// first the lower 8 places of a step for all heads, then the upper. So queries take no registers, and more warps fit.
#pragma once

#include "index_rows.cuh"
#include "wgmma.cuh"

namespace hisparse {

__device__ __forceinline__ u64 describe(const void* block) {
    const u64 address = shared_address(block) >> 4, along_places = TILES * 128 >> 4, along_heads = 128 >> 4;
    return address | along_places << 16 | along_heads << 32;
}

static_assert(KEY_BYTES == 2, "fp8 keys: index_hopper.cuh");
#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])

// c += A * B of one step, or = in the first. Nothing of `c` and `a` may be touched until they are awaited.
__device__ __forceinline__ void multiply_team(float (&c)[TILES][4], const u32 (&a)[4], u64 b, int step) {
#if HEADS == 64
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
#else
    static_assert(HEADS == 32, "as wide as the instructions written here");
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
#endif
}

#undef FOUR

}  // namespace hisparse

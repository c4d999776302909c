// block_linear: sizes, and the instructions of Hopper that C++ has no words for: barriers and tensor copies to shared memory,
// matrix products of a team.
#pragma once

#include "barriers.cuh"

namespace hisparse {

constexpr int ROWS = TEAMS * 64, CONSUMERS = TEAMS * 128, THREADS = CONSUMERS + 128;
constexpr int REGISTERS = RESIDENT == 2 ? 104 : TEAMS == 2 ? 232 : TEAMS == 3 ? 160 : 112;  // of a consumer's thread
constexpr int PRODUCER_REGISTERS = TEAMS == 2 && RESIDENT == 1 ? 40 : 32;
constexpr int DENSE = 0, GROUPED = 1, GATED = 2;
constexpr int TILE_ROWS = FORM == GATED ? ROWS / 2 : ROWS;  // of one weight
constexpr int CODE_BYTES = ROWS * 128, HALF_BYTES = TOKENS * 128, STAGE_BYTES = CODE_BYTES + 2 * HALF_BYTES;
constexpr int COLUMNS = TOKENS / 8;  // of sums, each of 8 tokens
static_assert(1024 + STAGES * (STAGE_BYTES + 16) <= (RESIDENT == 2 ? 115712 : 232448), "shared memory of a block");
static_assert(RESIDENT == 1 || TEAMS == 2 && RESIDENT == 2, "registers of two blocks");
static_assert(CLUSTER == 1 || CLUSTER == 2, "halves of a stage's activations");

// ---- barriers of a cluster

// At the same barrier of block `rank` of the cluster.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [at]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// ---- tensor copies

constexpr u64 READ_ONCE = 0x12F0000000000000ull, READ_OFTEN = 0x14F0000000000000ull;  // L2 cache policies

__device__ __forceinline__ void fetch_codes(u32 to, const TensorMap* map, int k, int odd, int pair, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(k), "r"(odd), "r"(pair), "r"(barrier), "l"(READ_ONCE)
        : "memory");
}
__device__ __forceinline__ void fetch_hidden(u32 to, const TensorMap* map, int k, int token, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(k), "r"(token), "r"(barrier), "l"(READ_OFTEN)
        : "memory");
}
// To the same place of both blocks of a cluster, whose barriers count the bytes.
__device__ __forceinline__ void fetch_hidden_for_both(u32 to, const TensorMap* map, int k, int token, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to), "l"(map), "r"(k), "r"(token), "r"(barrier), "h"(u16(3)),
        "l"(READ_OFTEN)
        : "memory");
}

// ---- matrix products

// The upper word of a description is constant: where the compiler sees both, it adds 64 bits ahead of every product.
#define DESCRIBED(low) "{ .reg .b64 d; mov.b64 d, {%" low ", 0x40000040};\n"
#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
__device__ __forceinline__ void multiply(float (&c)[COLUMNS][4], const u32 (&a)[4], u32 b) {
#if TOKENS == 16
    asm volatile(
        DESCRIBED("12") "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, d, 1, 1, 1, 0; }"
        : FOUR(0), FOUR(1)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
#if TOKENS == 32
    asm volatile(
        DESCRIBED("20") "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, d, 1, 1, 1, 0; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
#if TOKENS == 64
    asm volatile(
        DESCRIBED("36") "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, d, 1, 1, 1, 0; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
#if TOKENS == 128
    asm volatile(
        DESCRIBED("68") "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, d, 1, 1, 1, 0; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7),
          FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
#if TOKENS == 256
    asm volatile(
        DESCRIBED("132") "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, d, 1, 1, 1, 0; }"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7),
          FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15),
          FOUR(16), FOUR(17), FOUR(18), FOUR(19), FOUR(20), FOUR(21), FOUR(22), FOUR(23),
          FOUR(24), FOUR(25), FOUR(26), FOUR(27), FOUR(28), FOUR(29), FOUR(30), FOUR(31)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
}
#undef FOUR
#undef DESCRIBED

// A tile of TOKENS rows of 128 bytes, swizzled, for the matrix instruction: the lower word of its description. The upper one
// says that groups of eight rows are 1,024 bytes apart, and the swizzle. A step along K is 2 further.
__device__ __forceinline__ u32 describe(u32 at) {
    return (at >> 4 & 0x3FFF) | 1 << 16;
}

}  // namespace hisparse

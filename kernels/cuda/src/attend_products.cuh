// attend_rows: the instructions of Hopper that C++ has no words for. Copies to shared memory, exchange between the blocks of a
// cluster, matrix products of warp groups. tests/emulated/attend_products.cuh is their CPU form.
#pragma once

#include "barriers.cuh"

namespace hisparse {

// ---- rows on their way to shared memory

// 16 bytes, or as many zeros.
__device__ __forceinline__ void copy_chunk(u32 to, const u8* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Arrives when this thread's copies so far have.
__device__ __forceinline__ void arrive_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// Loads that stay where they are written.
__device__ __forceinline__ void load_here(uint4& v, const u8* at) {
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
}
__device__ __forceinline__ void load_here(float2& v, const u8* at) {
    asm volatile("ld.global.nc.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(at));
}
__device__ __forceinline__ void load_here(uint2& v, const u8* at) {
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
}
__device__ __forceinline__ void store_chunk(u32 to, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// The value, which the compiler takes for a new one each time: what follows from it does not stay in registers.
__device__ __forceinline__ int renewed(int value) {
    asm volatile("mov.b32 %0, %0;" : "+r"(value));
    return value;
}
// A word of shared memory, loaded where it is written.
__device__ __forceinline__ u32 loaded(const u32& word) {
    u32 value;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared_address(&word)));
    return value;
}
// Four codes of e4m3 to two words of bfloat16.
__device__ __forceinline__ void decode(u32 word, float scale, u32& low, u32& high) {
    u32 halves[2];
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(halves[0]), "=r"(halves[1]) : "r"(word));
    u32 words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float a, b;
        asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
            : "=f"(a), "=f"(b) : "r"(halves[i]));
        words[i] = pair_of(a * scale, b * scale);
    }
    low = words[0], high = words[1];
}
// Products of two bfloat16 by two.
__device__ __forceinline__ u32 multiplied(u32 pair, u32 by) {
    u32 products;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(pair), "r"(by));
    return products;
}

// ---- the other blocks of a cluster

// What lies at the same place in block `peer`.
__device__ __forceinline__ u32 peer_address(u32 here, int peer) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(peer));
    return there;
}
// Until all threads of the cluster that have not ended are here; nothing is published.
__device__ __forceinline__ void leave_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
// Relaxed: it says that values have been read, and publishes nothing.
__device__ __forceinline__ void arrive_there(u32 barrier_there) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier_there) : "memory");
}
// 16 bytes to another block, whose barrier counts them.
__device__ __forceinline__ void send_there(u32 there, const u32* words, u32 barrier_there) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier_there)
                 : "memory");
}

// ---- matrix products

__device__ __forceinline__ float exp2_of(float v) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}
// Shared memory as descriptors count it: sixteen bytes at a time, without the rank in the cluster, which stands above
// the 256 KiB of a block. A new value each time, or dozens of sums with it would stay in registers.
__device__ __forceinline__ u32 operand(const void* at) {
    return static_cast<u32>(renewed(static_cast<int>((shared_address(at) & 0x3FFFF) >> 4)));
}
// The lower word that describes a tile of 128-byte rows, swizzled, `bytes` behind `place`; `along`: the distance of
// neighbouring tiles, for operands by rows. The upper word is constant, 1024 bytes to the next eight rows: where the compiler
// sees both, it adds 64 bits ahead of every product.
__device__ __forceinline__ u32 describe(u32 place, int bytes, int along = 0) {
    return (place + (bytes >> 4)) | static_cast<u32>(along >> 4) << 16;
}
#define DESCRIBED(name, low) ".reg .b64 " name "; mov.b64 " name ", {%" low ", 0x40000040};\n"

#define FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SIXTEEN(x, i) FOUR(x, i), FOUR(x, i + 4), FOUR(x, i + 8), FOUR(x, i + 12)

// scores (64 heads x 64 rows) = or += queries * keys of 16 dimensions.
__device__ __forceinline__ void multiply_keys(float (&c)[32], u32 a, u32 b, int more) {
    asm volatile(
        "{ " DESCRIBED("a", "32") DESCRIBED("b", "33") ".reg .pred p; setp.ne.b32 p, %34, 0;"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, a, b, p, 1, 1, 0, 0; }"
        : SIXTEEN(c, 0), SIXTEEN(c, 16)
        : "r"(a), "r"(b), "r"(more));
}
// sums (64 heads x COLUMNS latents) += shares * latents of 16 rows. Shares must stay in their registers until the products are
// awaited, which nothing but hold_shares says to the compiler.
__device__ __forceinline__ void multiply_latents(float (&c)[64], const u32* a, u32 b) {
    asm volatile(
        "{ " DESCRIBED("b", "68") "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, {%64, %65, %66, %67}, b, 1, 1, 1, 1; }"
        : SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
__device__ __forceinline__ void multiply_latents(float (&c)[128], const u32* a, u32 b) {
    asm volatile(
        "{ " DESCRIBED("b", "132") "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, {%128, %129, %130, %131}, b, 1, 1, 1, 1; }"
        : SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48), SIXTEEN(c, 64), SIXTEEN(c, 80),
          SIXTEEN(c, 96), SIXTEEN(c, 112)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
// Sums are there: nothing is computed from these sixteen ahead of this place.
__device__ __forceinline__ void take_scores(float* c) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(c[i]));
}
__device__ __forceinline__ void hold_shares(u32 (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i]));
}
#undef DESCRIBED
#undef FOUR
#undef SIXTEEN

}  // namespace hisparse

// attend_rows: sizes, shared memory, and the few instructions of Hopper that C++ has no words for: barriers in shared
// memory, matrix products of warp groups.
#pragma once

#include "memory.cuh"
#include "wgmma.cuh"

namespace hisparse {

constexpr int TILES = 9, LATENT_TILES = 8;  // of 64 dimensions
constexpr int HEADS = 64, BLOCK = 32, STAGES = 4;  // BLOCK rows
constexpr int LATENT = 64 * LATENT_TILES, VALUES = 64 * TILES;
constexpr int TILE_BYTES = BLOCK * 128, QUERY_TILE_BYTES = HEADS * 128;
constexpr int GROUP = 128, CONSUMERS = 2 * GROUP, THREADS = 3 * GROUP;
constexpr int SPLITS_MAX = 16;  // blocks of a cluster
constexpr float SLACK = 8.0f;
constexpr int ROW_BYTES = KEY_BYTES == 1 ? LATENT + 16 + 128 : 2 * VALUES;

struct Shared {
    u8 queries[TILES * QUERY_TILE_BYTES];
    u8 rows[STAGES][TILES * TILE_BYTES];
    u8 shares[HEADS * 128];  // of a block of each group, side by side
    float levels[2][HEADS];  // after the last block of a group, if that raised them
    u32 raised[2];
    u64 full[STAGES], empty[STAGES];
    u64 freed[STAGES];  // by the other block of a pair
    u64 shared[2];  // shares of a group's next block are there
    u64 met;  // all consumers are here
};

// What the blocks of a cluster, a split each, tell one another in the end.
struct Account {
    float peaks[HEADS], totals[HEADS];  // of this block
    float factors[SPLITS_MAX][HEADS], inverse[HEADS];
};
__device__ __forceinline__ Account& account_of(Shared& s) { return *reinterpret_cast<Account*>(s.queries); }

// ---- barriers in shared memory

__device__ __forceinline__ void open_barrier(u64& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(u64& barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// When this thread's copies so far have arrived.
__device__ __forceinline__ void arrive_copied(u64& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
__device__ __forceinline__ void await(u64& barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(shared_address(&barrier)), "r"(parity) : "memory");
    } while (!done);
}
// Until all consumers are here, while both groups run the same code.
__device__ __forceinline__ void sync_consumers() { sync_named(1, CONSUMERS); }
// Likewise, in this order, once each group runs code of its own. A gate, since compute-sanitizer does not recognise a named
// barrier whose arrivals are different instructions. Every thread arrives for itself. (The first meeting too: a spill.)
enum Meeting : u32 { BLOCKS_SUMMED, WEIGHTS_TOLD, PARTS_WEIGHED };
__device__ __forceinline__ void meet_consumers(Shared& s, Meeting meeting) {
    arrive(s.met);
    await(s.met, meeting % 2);
}
// Whether it holds for any thread of group W, whose four warps are at the same place in the code.
template <int W> __device__ __forceinline__ bool any_of_group(bool holds) {
    u32 found;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred.aligned q, %2, %3, p;"
        " selp.u32 %0, 1, 0, q; }"
        : "=r"(found) : "r"(static_cast<u32>(holds)), "n"(2 + W), "n"(GROUP) : "memory");
    return found;
}

// ---- clusters

// Until all threads of the cluster that have not ended are here; what they wrote to shared memory is then seen by all.
__device__ __forceinline__ void meet_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What lies at the same place in block `peer`.
__device__ __forceinline__ u32 peer_address(const void* at, int peer) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(peer));
    return there;
}
__device__ __forceinline__ float peer_word(const float* at, int peer) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(peer_address(at, peer)));
    return v;
}
__device__ __forceinline__ float4 peer_quad(const u8* at, int peer) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(peer_address(at, peer)));
    return v;
}

// ---- matrix products

// Shared memory as descriptors count it: sixteen bytes at a time, without the rank in the cluster, which stands above
// the 256 KiB of a block. The compiler takes the result for a new value each time, or it would keep dozens of sums with it
// in registers.
__device__ __forceinline__ u32 operand(const void* at) {
    u32 place = (shared_address(at) & 0x3FFFF) >> 4;
    asm volatile("mov.b32 %0, %0;" : "+r"(place));
    return place;
}
// A tile of 128-byte rows, swizzled, `bytes` behind `place`. `along` is the distance of neighbouring tiles, for
// operands by rows.
__device__ __forceinline__ u64 describe(u32 place, int bytes, int along = 0) {
    constexpr u64 SWIZZLED_128 = 1ull << 62 | 1024ull >> 4 << 32;  // 1024 bytes to the next eight rows
    return SWIZZLED_128 | static_cast<u64>(along >> 4) << 16 | (place + (bytes >> 4));
}

#define FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SIXTEEN(x, i) FOUR(x, i), FOUR(x, i + 4), FOUR(x, i + 8), FOUR(x, i + 12)

// scores (64 heads x 32 rows) = or += queries * keys of 16 dimensions.
__device__ __forceinline__ void multiply_keys(float (&c)[16], u64 a, u64 b, int more) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %18, 0;"
        " wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0; }"
        : SIXTEEN(c, 0)
        : "l"(a), "l"(b), "r"(more));
}

// sums (64 heads x 256 latents) += shares * latents of 16 rows.
__device__ __forceinline__ void multiply_latents(float (&c)[128], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129, 1, 1, 1, 0, 1;"
        : SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48), SIXTEEN(c, 64), SIXTEEN(c, 80),
          SIXTEEN(c, 96), SIXTEEN(c, 112)
        : "l"(a), "l"(b));
}
#undef FOUR
#undef SIXTEEN

}  // namespace hisparse

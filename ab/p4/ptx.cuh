// PTX instructions that C++ cannot express, for swap_in and its neighbours. tests/emulated/ptx.cuh is their CPU form.
#pragma once

#include "layout.cuh"

namespace hisparse {

__device__ __forceinline__ u32 shared_address(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}

// Rows are read once: they must not evict what L1 holds. Nothing else writes them while a kernel reads them.
__device__ __forceinline__ void load_once(uint4& v, const void* at) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
}
__device__ __forceinline__ void load_once(uint2& v, const void* at) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
}
__device__ __forceinline__ void load_once(u32& v, const void* at) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
}
__device__ __forceinline__ void load_once(u16& v, const void* at) {
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(at));
}
__device__ __forceinline__ void load_once(u8& v, const void* at) {
    u32 wide;
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(wide) : "l"(at));
    v = static_cast<u8>(wide);
}

// Loads that stay where they are written, ahead of branches that their values do not decide.
__device__ __forceinline__ void load_now(int4& v, const int4* at) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
}
__device__ __forceinline__ void load_now(i32& v, const i32* at) {
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(at));
}
// Stores a word where `wanted`, without a branch.
__device__ __forceinline__ void store_if(bool wanted, u32* at, u32 value) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u32 [%1], %2; }" ::"r"(static_cast<u32>(wanted)), "l"(at),
                 "r"(value)
                 : "memory");
}
// Loads `v` from `at` where `wanted`, without a branch.
__device__ __forceinline__ void load_if(bool wanted, i32& v, const i32* at) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.u32 %0, [%1]; }"
                 : "+r"(v) : "l"(at), "r"(static_cast<u32>(wanted)));
}
__device__ __forceinline__ void load_if(bool wanted, u32& v, const u16* at) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
                 : "+r"(v) : "l"(at), "r"(static_cast<u32>(wanted)));
}

// Between blocks of one launch: a load_acquire that sees a store_release sees all stores before it.
__device__ __forceinline__ i32 load_acquire(const i32* at) {
    i32 v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(i32* at, i32 v) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// Has `bytes` at `from`, both multiples of 16, brought to L2; nothing waits for them.
__device__ __forceinline__ void bring_to_l2(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Words from global to shared memory that no thread holds meanwhile; there once `await_words` and a barrier are passed.
template <int WORDS> __device__ __forceinline__ void fetch_words(i32* to, const i32* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(to))),
                 "l"(from), "n"(4 * WORDS)
                 : "memory");
}
__device__ __forceinline__ void await_words() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four nearest e4m3, the first in the lowest byte; beyond 448 they are 448.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
    u32 codes = 0;
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high}; }" : "=r"(codes) : "f"(a), "f"(b), "f"(c), "f"(d));
#endif
    return codes;
}

// Page of a token, computed where it is written: a use of the token there.
__device__ __forceinline__ u32 used_page_of(i32 token) {
    static_assert(PAGE_TOKENS == 64, "6 bits");
    u32 page;
    asm volatile("shr.u32 %0, %1, 6;" : "=r"(page) : "r"(token));
    return page;
}

// 0 from 32 on, unlike C++.
__device__ __forceinline__ u32 shift_left(u32 value, u32 by) {
    u32 shifted;
    asm("shl.b32 %0, %1, %2;" : "=r"(shifted) : "r"(value), "r"(by));
    return shifted;
}

// A named barrier of `threads` threads of the block. Barrier 0 is __syncthreads().
__device__ __forceinline__ void sync_named(int barrier, int threads) {
    __syncwarp();
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// The same address in a register: else the compiler computes the shared window's base again at every use.
__device__ __forceinline__ void* settled(void* shared) {
    u32 at = shared_address(shared);
    asm volatile("" : "+r"(at));
    return __cvta_shared_to_generic(at);
}

// Lets the next kernel's blocks begin, on Hopper and later, as far as there is room beside this one's.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the kernel ahead has ended and its writes are visible.
__device__ __forceinline__ void await_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next number, below 65,536, of a counter in shared memory. Few threads of a warp ask: combining their requests, as the
// compiler does where it finds an addition, would take longer.
__device__ __forceinline__ u32 take(u32* counter) {
    u32 number;
    asm volatile("atom.shared::cta.inc.u32 %0, [%1], 0xFFFF;" : "=r"(number) : "r"(shared_address(counter)) : "memory");
    return number;
}

// One more in a word of shared memory; nothing waits for the sum.
__device__ __forceinline__ void count_shared(u32* word) {
    asm volatile("red.shared::cta.add.u32 [%0], 1;" ::"r"(shared_address(word)) : "memory");
}

// Likewise where `condition` holds, without a branch.
__device__ __forceinline__ void count_shared_if(bool condition, u32* word) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p red.shared::cta.add.u32 [%1], 1; }" ::"r"(
                     static_cast<u32>(condition)),
                 "r"(shared_address(word))
                 : "memory");
}

// Sets bits of a word in shared memory, without a branch.
__device__ __forceinline__ void set_bits_if(bool condition, u32* word, u32 bits) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p red.shared::cta.or.b32 [%1], %2; }" ::"r"(
                     static_cast<u32>(condition)),
                 "r"(shared_address(word)), "r"(bits)
                 : "memory");
}

// A gate: an mbarrier in shared memory, of one use. `calls` threads arrive (open_gate), any thread may wait (await_gate).
// Unlike at a named barrier, a thread that arrives need not wait, and arrivals may stand at different places of the code.
__device__ __forceinline__ void close_gate(u64* gate, u32 calls) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(calls) : "memory");
}
__device__ __forceinline__ void open_gate(u64* gate) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(shared_address(gate))
                 : "memory");
}
// Block scope: what a gate orders lies in the block's own shared memory. An acquire of cluster scope would empty L1.
__device__ __forceinline__ void await_gate(u64* gate) {
    u32 open = 0;
    while (!open) {
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
            : "=r"(open) : "r"(shared_address(gate)) : "memory");
#else
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
            : "=r"(open) : "r"(shared_address(gate)) : "memory");
#endif
    }
}

// Clusters: blocks of one request, scheduled together, that write into each other's shared memory. Absent below sm_90.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// The cluster's barrier, used once: all threads arrive when gates are initialised, and wait before they write to a peer.
__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier of all threads of the cluster, after which each sees what all wrote to shared memory before it.
__device__ __forceinline__ void sync_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What block `peer` has at this place of its shared memory.
template <class T> __device__ __forceinline__ const T* at_peer(const T* here, u32 peer) {
    u64 there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(peer));
    return reinterpret_cast<const T*>(there);
}

// Makes this block's gates visible to its peers, after the cluster's barrier: peers arrive at them, too.
__device__ __forceinline__ void publish_gates() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// An arrival that adds `bytes` to wait for, which peers write through `send`.
__device__ __forceinline__ void expect_bytes(u64* gate, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(gate)), "r"(bytes)
                 : "memory");
}
// Arrives at the same gate of block `peer`. Relaxed: it says that values have been read, and publishes nothing.
__device__ __forceinline__ void open_remote_gate(u64* gate, int peer) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(gate)), "r"(peer));
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
// Writes 16 bytes to the same place in block `peer`; its gate counts them.
__device__ __forceinline__ void send(const void* at, const uint4& v, u64* gate, int peer) {
    u32 to, remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(at)), "r"(peer));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(gate)), "r"(peer));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote) : "memory");
}
__device__ __forceinline__ void send(u32* at, u32 v, u64* gate, int peer) {  // likewise, 4 bytes
    u32 to, remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(at)), "r"(peer));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(gate)), "r"(peer));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(remote)
                 : "memory");
}
#else
__device__ __forceinline__ u32 cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void sync_cluster() {}
template <class T> __device__ __forceinline__ const T* at_peer(const T* here, u32) { return here; }
__device__ __forceinline__ void expect_bytes(u64*, u32) {}
__device__ __forceinline__ void publish_gates() {}
__device__ __forceinline__ void open_remote_gate(u64*, int) {}
__device__ __forceinline__ void send(const void*, const uint4&, u64*, int) {}
__device__ __forceinline__ void send(u32*, u32, u64*, int) {}
#endif

}  // namespace hisparse

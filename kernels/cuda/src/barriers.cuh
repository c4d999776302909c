// Barriers in shared memory of many phases, by which copies and products of Hopper wait for each other; shares of registers.
#pragma once

#include "wgmma.cuh"

namespace hisparse {

// Registers of a thread: all warps of a team call it.
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

__device__ __forceinline__ void open_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// What was opened by now is seen by the cluster and by tensor copies.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    publish_shared();
}
__device__ __forceinline__ void await_phase(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra done;\n"
        "bra again;\n"
        "done: }" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The arrivals of a warp: one, of a lane behind what all have done. The racecheck of compute-sanitizer does not follow that
// order, and gets one of each lane (tests/gpu/memcheck.py).
#ifndef WARP_ARRIVALS
#define WARP_ARRIVALS 1
#endif
__device__ __forceinline__ void arrive_warp(u32 barrier) {
    __syncwarp();
    if (WARP_ARRIVALS == 32 || threadIdx.x % 32 == 0) arrive(barrier);
}
// Arrives, and has the barrier wait for `bytes` of copies too.
__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// As sync_named: whether any of the threads says so.
__device__ __forceinline__ bool any_named(int barrier, int threads, bool mine) {
    u32 any;
    asm volatile(
        "{ .reg .pred p, q;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "barrier.cta.red.or.aligned.pred q, %2, %3, p;\n"
        "selp.u32 %0, 1, 0, q; }"
        : "=r"(any)
        : "r"(static_cast<u32>(mine)), "r"(barrier), "r"(threads)
        : "memory");
    return any != 0;
}
// `bytes` from global to shared memory, both at multiples of 16; the barrier counts them.
__device__ __forceinline__ void fetch_bytes(void* to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

}  // namespace hisparse

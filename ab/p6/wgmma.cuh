// What all users of Hopper's matrix instruction share: groups of products, and operands in shared memory and registers.
#pragma once

#include "ptx.cuh"

namespace hisparse {

// Two bfloat16, `first` in the lower half.
__device__ __forceinline__ u32 pair_of(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
// What was written to shared memory by now is seen by products and by tensor copies.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Products of a team (four warps at the same place in the code) are formed from open_products on, those up to
// commit_products are a group, and all but the last LEFT groups are done behind await_products.
__device__ __forceinline__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

}  // namespace hisparse

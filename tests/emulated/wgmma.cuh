// What kernels/cuda/src/wgmma.cuh has, as far as prompt_index uses it, on a CPU: a product is done when it is asked for.
#pragma once

#include "ptx.cuh"

namespace hisparse {

inline void publish_shared() {}
inline void open_products() {}
inline void commit_products() {}
template <int LEFT> void await_products() { __syncwarp(); }

}  // namespace hisparse

#include "cuda.hpp"

#include "swap_in.cuh"

// One launch, with the grid that the launcher gives it. Returns whether all went well; `said` has what did not.
extern "C" bool emulate(const hisparse::SwapIn* p, unsigned ranks, unsigned clusters, unsigned seed, char* said, int room) {
    const std::string wrong = emulated::launch([=] { swap_in(*p); }, {ranks, clusters, 1}, hisparse::BLOCK_THREADS,
                                               hisparse::SWAP_IN_SHARED_BYTES, seed);
    std::snprintf(said, static_cast<std::size_t>(room), "%s", wrong.c_str());
    return wrong.empty();
}

// What kernels/cuda/src/barriers.cuh has, on a CPU. A barrier of many phases lies in shared memory: arrivals of a phase, those
// that are still missing, bytes that are still on their way, and the parity of the phase.
#pragma once

#include "wgmma.cuh"

namespace hisparse {

struct Phases {
    u64 arrivals : 12, missing : 12;
    long long bytes : 39;  // below 0 where they came before they were expected
    u64 parity : 1;
};
static_assert(sizeof(Phases) == 8, "as wide as the barrier");

template <int COUNT> void take_registers() {}
template <int COUNT> void give_registers() {}

inline u8* at_address(u32 address) { return emulated::self->block->shared + address; }
inline u32 shared_address(const void* at) {
    return static_cast<u32>(static_cast<const u8*>(at) - emulated::self->block->shared);
}
inline Phases& phases(u32 barrier) { return *reinterpret_cast<Phases*>(at_address(barrier)); }
inline void turn_if_over(Phases& of) {
    if (of.missing != 0 || of.bytes != 0) return;
    of.missing = of.arrivals, of.parity ^= 1;
}
inline void open_barrier(u32 barrier, int arrivals) {
    Phases& of = phases(barrier);
    of.arrivals = of.missing = static_cast<u64>(arrivals), of.bytes = 0, of.parity = 0;
}
inline void publish_barriers() {}
inline void await_phase(u32 barrier, u32 parity) {
    emulated::may_be_overtaken();
    emulated::wait([](const emulated::Fiber& f) { return static_cast<const Phases*>(f.on)->parity != (f.while_it_is & 1); },
                   &phases(barrier), parity);
}
inline void arrive(u32 barrier) {
    emulated::may_be_overtaken();
    Phases& of = phases(barrier);
    --of.missing;
    turn_if_over(of);
}
#ifndef WARP_ARRIVALS
#define WARP_ARRIVALS 1
#endif
inline void arrive_warp(u32 barrier) {
    __syncwarp();
    if (WARP_ARRIVALS == 32 || threadIdx.x % 32 == 0) arrive(barrier);
}
inline void arrive_expecting(u32 barrier, u32 bytes) {
    phases(barrier).bytes += bytes;
    arrive(barrier);
}
inline bool any_named(int barrier, int threads, bool mine) {
    emulated::Block& block = *emulated::self->block;
    const unsigned turn = block.barriers[barrier].turn;
    bool& any = block.any[barrier][turn % 2];
    if (block.barriers[barrier].came == 0) any = false;
    any |= mine;
    emulated::meet(barrier, static_cast<unsigned>(threads));
    return any;
}
inline void fetch_bytes(void* to, const void* from, u32 bytes, u32 barrier) {
    if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16)
        emulated::complain("a bulk copy is not of whole lines of 16 bytes");
    emulated::may_be_overtaken();
    std::memcpy(to, from, bytes);
    Phases& of = phases(barrier);
    if (of.bytes < static_cast<long long>(bytes)) emulated::complain("a barrier got more bytes than it was to expect");
    of.bytes -= bytes;
    turn_if_over(of);
}

}  // namespace hisparse

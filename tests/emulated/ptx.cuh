// What kernels/cuda/src/ptx.cuh has, on a CPU (cuda.hpp). Words on their way to shared memory get there when they are awaited.
#pragma once

#include "layout.cuh"

namespace hisparse {

template <class T> void load_once(T& v, const void* at) { std::memcpy(&v, at, sizeof v); }
inline void load_now(int4& v, const int4* at) { v = *at; }
inline void load_now(i32& v, const i32* at) { v = *at; }
inline void load_if(bool wanted, i32& v, const i32* at) { if (wanted) v = *at; }
inline void load_if(bool wanted, u32& v, const u16* at) {
    emulated::may_be_overtaken();
    if (wanted) v = *at;
}
inline i32 load_acquire(const i32* at) {
    emulated::may_be_overtaken();
    return *at;
}
inline void store_release(i32* at, i32 v) {
    emulated::may_be_overtaken();
    *at = v;
}
template <int WORDS> void fetch_words(i32* to, const i32* from) { emulated::self->copies.push_back({to, from, 4 * WORDS}); }
inline void await_words() {
    for (const auto& copy : emulated::self->copies) std::memcpy(copy.to, copy.from, copy.bytes);
    emulated::self->copies.clear();
}
inline std::vector<const void*> brought;  // to L2
inline void bring_to_l2(const void* from, u32 bytes) {
    if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulated::complain("a bulk copy is not of whole lines of 16 bytes");
    emulated::may_be_overtaken();
    brought.push_back(from);
}
inline u32 e4m3_of(float value) {
    const u32 bits = __float_as_uint(value), sign = bits >> 24 & 0x80;
    if (value != value) return sign | 0x7F;
    const float size = std::min(std::fabs(value), 448.0f);
    if (size < 0.015625f) return sign | static_cast<u32>(std::nearbyint(size * 512));  // 2**-6: below, steps of 2**-9
    const int exponent = std::ilogb(size);
    return sign | (static_cast<u32>(exponent + 6) * 8 + static_cast<u32>(std::nearbyint(std::ldexp(size, 3 - exponent))));
}
inline u32 pack_e4m3(float a, float b, float c, float d) {
    return e4m3_of(a) | e4m3_of(b) << 8 | e4m3_of(c) << 16 | e4m3_of(d) << 24;
}
inline u32 used_page_of(i32 token) { return static_cast<u32>(token) / PAGE_TOKENS; }
inline u32 shift_left(u32 value, u32 by) { return by < 32 ? value << by : 0; }
inline u32 take(u32* counter) {
    emulated::may_be_overtaken();
    return (*counter)++;
}
inline void sync_named(int barrier, int threads) { emulated::meet(barrier, static_cast<unsigned>(threads)); }
inline void* settled(void* shared) { return shared; }
inline void let_next_begin() { emulated::may_be_overtaken(); }
inline std::function<void()> ends;  // what the kernel ahead writes last
inline void await_last() {
    if (ends) ends();
}
inline void store_if(bool wanted, u32* at, u32 value) {
    if (wanted) *at = value;
}
inline void count_shared(u32* word) { ++*word; }
inline void count_shared_if(bool condition, u32* word) { *word += condition; }
inline void set_bits_if(bool condition, u32* word, u32 bits) { if (condition) *word |= bits; }

// A gate is calls that are wanted, and from 32 bits on bytes: open when it is 0, for good.
inline void close_gate(u64* gate, u32 calls) {
    emulated::may_be_overtaken();
    *gate = calls;
}
inline void open_gate(u64* gate) {
    emulated::may_be_overtaken();
    if ((*gate & 0xFFFFFFFF) == 0) emulated::complain("a gate was opened more often than it was to be");
    --*gate;
}
inline void await_gate(u64* gate) {
    emulated::wait([](const emulated::Fiber& f) { return *static_cast<const u64*>(f.on) == 0; }, gate, 0);
}

inline u32 cluster_rank() { return blockIdx.x % emulated::self->block->peers->size(); }
inline void cluster_arrive() { ++emulated::self->block->cluster->arrived; }
inline void cluster_wait() {
    emulated::wait([](const emulated::Fiber& f) { return f.block->cluster->arrived == f.while_it_is; }, nullptr,
                   emulated::cluster_threads());
}
inline void sync_cluster() { emulated::meet(emulated::self->block->cluster->barrier, emulated::cluster_threads()); }
template <class T> const T* at_peer(const T* here, u32 peer) {
    emulated::may_be_overtaken();
    return emulated::at_peer(here, static_cast<int>(peer));
}
inline void publish_gates() {}
inline void expect_bytes(u64* gate, u32 bytes) {
    *gate += static_cast<u64>(bytes) << 32;
    open_gate(gate);
}
inline void open_remote_gate(u64* gate, int peer) { open_gate(emulated::at_peer(gate, peer)); }
template <class T> void send(T* at, const T& v, u64* gate, int peer) {
    emulated::may_be_overtaken();
    u64& remote = *emulated::at_peer(gate, peer);
    if (remote >> 32 < sizeof v) emulated::complain("a gate got more bytes than it was to expect");
    *emulated::at_peer(at, peer) = v;
    remote -= static_cast<u64>(sizeof v) << 32;
}

}  // namespace hisparse

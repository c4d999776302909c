// CUDA C++ on a CPU, as far as the kernels that move rows use it: every thread is a fiber. The next fiber to run is drawn at
// random, from some warps and blocks far more seldom than from others, so that a missing wait shows. Memory is sequentially
// consistent: a missing fence does not show.
//
//    blocks of a launch    eight clusters of them at work at once, in any order, or one block that forms none
//    shared memory         begins as random bytes, or as the block before left it (static: one block at a time has it)
//    warps                 collectives of all 32 lanes; a warp of which some never come is reported as stuck
//    ptx.cuh               what the kernel writes as PTX
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
struct dim3 { unsigned x, y, z; };

namespace emulated {

constexpr unsigned LANES = 32;
constexpr std::size_t STACK_BYTES = 64 << 10;
constexpr std::size_t CLUSTERS_AT_ONCE = 8;

struct Warp {
    double idles = 0;  // how often it does nothing in its turn
    uint64_t said[2][LANES];  // by each lane, in this collective and the one before
    unsigned came = 0, turn = 0;
    unsigned left = LANES;  // threads that have not ended
};
struct Barrier { unsigned came = 0, turn = 0; };
struct Cluster {
    unsigned arrived = 0;
    Barrier barrier;
};
struct Block {
    dim3 at;
    unsigned threads;
    Cluster* cluster;
    std::vector<Block*>* peers;
    Barrier barriers[16];
    bool any[16][2];  // at each barrier: of the meeting that comes, and of the one before
    int all;  // of __syncthreads_and and __syncthreads_count
    uint8_t* shared;
};
struct Copy { void* to; const void* from; unsigned bytes; };
struct Fiber {
    ucontext_t start;
    jmp_buf context;
    dim3 thread;
    Block* block;
    Warp* warp;
    std::vector<Copy> copies;  // on their way to shared memory
    bool (*may_go_on)(const Fiber&) = nullptr;
    const void* on = nullptr;  // what it waits for, and how that is now
    uint64_t while_it_is = 0;
    bool done = false;
    std::unique_ptr<uint8_t[]> stack;
};

inline Fiber* self;
inline std::mt19937 random;
inline jmp_buf scheduler;
inline dim3 grid, block;
inline std::string wrong;  // what a kernel must not do, the first time

inline void complain(const char* what) {
    if (wrong.empty()) wrong = what;
}

// On to `to`, until something goes on to `from`. swapcontext would do so with a system call each time, for signals' sake.
__attribute__((noinline)) inline void go_on(jmp_buf& from, jmp_buf& to) {
    if (!_setjmp(from)) _longjmp(to, 1);
}
inline void rest() { go_on(self->context, scheduler); }

// Into the thread of `fiber`, until it rests or ends.
__attribute__((noinline)) inline void enter(Fiber& fiber, void (*body)()) {
    self = &fiber;
    if (fiber.stack) return go_on(scheduler, fiber.context);
    fiber.stack.reset(new uint8_t[STACK_BYTES]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.start, body, 0);
    if (!_setjmp(scheduler)) setcontext(&fiber.start);
}

inline void wait(bool (*may_go_on)(const Fiber&), const void* on, uint64_t while_it_is) {
    self->may_go_on = may_go_on, self->on = on, self->while_it_is = while_it_is;
    if (!may_go_on(*self)) rest();
    self->may_go_on = nullptr;
}

// Lets others go first, now and then: where memory that others see is read or written.
inline void may_be_overtaken() {
    if (random() % 4 == 0) rest();
}

inline bool has_turned(const Fiber& f) { return *static_cast<const unsigned*>(f.on) != f.while_it_is; }

// All lanes' values of one collective.
inline const uint64_t* exchange(uint64_t value) {
    Warp& warp = *self->warp;
    const unsigned turn = warp.turn;
    warp.said[turn % 2][self->thread.x % LANES] = value;
    if (++warp.came == LANES) warp.came = 0, ++warp.turn;
    else wait(has_turned, &warp.turn, turn);
    return warp.said[turn % 2];
}

inline void meet(Barrier& barrier, unsigned threads) {
    const unsigned turn = barrier.turn;
    if (++barrier.came == threads) barrier.came = 0, ++barrier.turn;
    else wait(has_turned, &barrier.turn, turn);
}

inline void meet(int number, unsigned threads) { meet(self->block->barriers[number], threads); }
inline unsigned cluster_threads() { return static_cast<unsigned>(self->block->peers->size()) * self->block->threads; }

template <class T> T* at_peer(T* here, int peer) {
    const auto offset = reinterpret_cast<const uint8_t*>(here) - self->block->shared;
    return reinterpret_cast<T*>((*self->block->peers)[peer]->shared + offset);
}

// Runs `kernel()` in every thread of `places`, blocks of `threads` in clusters of `cluster`.
template <class Kernel>
void run_together(Kernel kernel, const std::vector<dim3>& places, unsigned threads, unsigned cluster, std::size_t shared_bytes) {
    static Kernel* running;
    running = &kernel;
    const double paces[] = {0, 0, 0, 0.9, 0.99};
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Cluster>> clusters;
    std::vector<std::unique_ptr<std::vector<Block*>>> peers;
    std::vector<std::unique_ptr<uint8_t[]>> memory;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (std::size_t begin = 0; begin < places.size(); begin += cluster) {
        clusters.push_back(std::make_unique<Cluster>());
        peers.push_back(std::make_unique<std::vector<Block*>>());
        for (unsigned x = 0; x < cluster; ++x) {
            memory.push_back(std::make_unique<uint8_t[]>(shared_bytes + 128));
            auto* shared = memory.back().get();
            for (std::size_t i = 0; i < shared_bytes + 128; ++i) shared[i] = static_cast<uint8_t>(random());
            shared += 128 - reinterpret_cast<uintptr_t>(shared) % 128;
            blocks.push_back(std::make_unique<Block>());
            Block& block = *blocks.back();
            block.at = places[begin + x], block.threads = threads, block.shared = shared;
            block.cluster = clusters.back().get(), block.peers = peers.back().get();
            peers.back()->push_back(&block);
            const double idles = paces[random() % 5];
            for (unsigned t = 0; t < threads; ++t) {
                if (t % LANES == 0) {
                    warps.push_back(std::make_unique<Warp>());
                    warps.back()->idles = std::max(idles, paces[random() % 5]);
                }
                fibers.push_back(std::make_unique<Fiber>());
                Fiber& fiber = *fibers.back();
                fiber.thread = {t, 0, 0}, fiber.block = &block, fiber.warp = warps.back().get();
            }
        }
    }
    std::vector<unsigned> all(warps.size()), turns, could;
    for (unsigned i = 0; i < all.size(); ++i) all[i] = i;
    turns = all;
    while (!all.empty()) {
        bool ran = false;
        could.clear();
        std::shuffle(turns.begin(), turns.end(), random);
        for (const unsigned warp : turns) {
            const bool idles = random() < warps[warp]->idles * std::mt19937::max();
            for (unsigned lane = 0; lane < LANES; ++lane) {
                Fiber& fiber = *fibers[warp * LANES + lane];
                if (fiber.done || (fiber.may_go_on && !fiber.may_go_on(fiber))) continue;
                if (idles) {
                    could.push_back(warp);
                    break;
                }
                ran = true;
                enter(fiber, +[] {
                    (*running)();
                    self->done = true;
                    _longjmp(scheduler, 1);
                });
                if (fiber.done) --warps[warp]->left, fiber.stack.reset();
            }
        }
        if (ran) {
            all.erase(std::remove_if(all.begin(), all.end(), [&](unsigned i) { return !warps[i]->left; }), all.end());
            turns = all;
        } else if (could.empty()) {
            complain("stuck: threads wait for what never comes");
            break;
        } else {
            turns = could;  // nothing has changed for the others
        }
    }
}

// One launch of `kernel` with the parameter block at `p`. Returns what went wrong.
template <class Block>
std::string run(void (*kernel)(Block), const void* p, dim3 extent, unsigned threads, unsigned cluster,
                std::size_t shared_bytes, unsigned seed) {
    grid = extent, block = {threads, 1, 1};
    wrong.clear();
    random.seed(seed);
    std::vector<dim3> places;
    for (unsigned y = 0; y < extent.y; ++y)
        for (unsigned x = 0; x < extent.x; ++x) places.push_back({x, y, 0});
    const auto body = [=] { kernel(*static_cast<const Block*>(p)); };
    std::vector<std::vector<dim3>> clusters;
    for (std::size_t i = 0; i < places.size(); i += cluster)
        clusters.emplace_back(places.begin() + i, places.begin() + i + cluster);
    std::shuffle(clusters.begin(), clusters.end(), random);
    const std::size_t at_once = cluster > 1 ? CLUSTERS_AT_ONCE : 1;
    for (std::size_t i = 0; i < clusters.size() && wrong.empty(); i += at_once) {
        std::vector<dim3> now;
        for (std::size_t j = i; j < clusters.size() && j < i + at_once; ++j)
            now.insert(now.end(), clusters[j].begin(), clusters[j].end());
        run_together(body, now, threads, cluster, shared_bytes);
    }
    return wrong;
}

}  // namespace emulated

#define threadIdx (emulated::self->thread)
#define blockIdx (emulated::self->block->at)
#define gridDim (emulated::grid)
#define blockDim (emulated::block)

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }

inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

inline unsigned __float_as_uint(float v) {
    unsigned bits;
    std::memcpy(&bits, &v, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned v) {
    float bits;
    std::memcpy(&bits, &v, sizeof bits);
    return bits;
}
template <class T> T __ldcg(const T* at) { return *at; }
template <class T> T __ldg(const T* at) { return *at; }
template <class T> void __stcg(T* at, const T& v) { *at = v; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline void __threadfence() {}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __clzll(unsigned long long v) { return v ? __builtin_clzll(v) : 64; }
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __ffsll(unsigned long long v) { return __builtin_ffsll(static_cast<long long>(v)); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    unsigned v = 0;
    for (unsigned i = 0; i < 4; ++i) v |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return v;
}
template <class Of> unsigned of_halves(unsigned a, unsigned b, Of of) {
    return of(a & 0xFFFF, b & 0xFFFF) | of(a >> 16, b >> 16) << 16;
}
inline unsigned __vsub2(unsigned a, unsigned b) {
    return of_halves(a, b, [](unsigned x, unsigned y) { return (x - y) & 0xFFFF; });
}
inline unsigned __vminu2(unsigned a, unsigned b) {
    return of_halves(a, b, [](unsigned x, unsigned y) { return x < y ? x : y; });
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return of_halves(a, b, [](unsigned x, unsigned y) { return x > y ? x : y; });
}
inline unsigned __vcmpeq2(unsigned a, unsigned b) {
    return of_halves(a, b, [](unsigned x, unsigned y) { return x == y ? 0xFFFFu : 0u; });
}

inline void __syncthreads() { emulated::meet(0, emulated::self->block->threads); }
inline bool __syncthreads_and(bool value) {
    int& all = emulated::self->block->all;
    __syncthreads();
    if (emulated::self->thread.x == 0) all = 1;
    __syncthreads();
    if (!value) all = 0;
    __syncthreads();
    return all != 0;
}
inline int __syncthreads_count(bool value) {
    int& all = emulated::self->block->all;
    __syncthreads();
    if (emulated::self->thread.x == 0) all = 0;
    __syncthreads();
    all += value;
    __syncthreads();
    return all;
}
inline void __syncwarp() { emulated::exchange(0); }

// Collectives name all lanes.
inline unsigned __ballot_sync(unsigned, bool value) {
    const uint64_t* said = emulated::exchange(value);
    unsigned bits = 0;
    for (unsigned i = 0; i < emulated::LANES; ++i) bits |= static_cast<unsigned>(said[i]) << i;
    return bits;
}
inline bool __any_sync(unsigned all, bool value) { return __ballot_sync(all, value) != 0; }
inline bool __all_sync(unsigned all, bool value) { return __ballot_sync(all, value) == ~0u; }
template <class T, class Fold> T reduced(T value, Fold fold) {
    const uint64_t* said = emulated::exchange(static_cast<uint32_t>(value));
    T result = static_cast<T>(static_cast<uint32_t>(said[0]));
    for (unsigned i = 1; i < emulated::LANES; ++i) result = fold(result, static_cast<T>(static_cast<uint32_t>(said[i])));
    return result;
}
template <class T> T __reduce_add_sync(unsigned, T v) { return reduced(v, [](T a, T b) { return static_cast<T>(a + b); }); }
template <class T> T __reduce_min_sync(unsigned, T v) { return reduced(v, [](T a, T b) { return a < b ? a : b; }); }
template <class T> T __reduce_max_sync(unsigned, T v) { return reduced(v, [](T a, T b) { return a > b ? a : b; }); }
template <class T> T __reduce_or_sync(unsigned, T v) { return reduced(v, [](T a, T b) { return a | b; }); }
template <class T> T __shfl_up_sync(unsigned, T value, unsigned by) {
    const uint64_t* said = emulated::exchange(value);
    const unsigned lane = emulated::self->thread.x % emulated::LANES;
    return static_cast<T>(said[lane >= by ? lane - by : lane]);
}

template <class T> T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    return static_cast<T>(emulated::exchange(value)[emulated::self->thread.x % emulated::LANES ^ mask]);
}
inline float __shfl_xor_sync(unsigned all, float value, unsigned mask) {
    return __uint_as_float(__shfl_xor_sync(all, __float_as_uint(value), mask));
}
template <class T> T __shfl_sync(unsigned, T value, int lane) { return static_cast<T>(emulated::exchange(value)[lane]); }

template <class T, class V> T atomicAdd(T* at, V v) { const T old = *at; *at = static_cast<T>(old + v); return old; }
template <class T, class V> T atomicOr(T* at, V v) { const T old = *at; *at = static_cast<T>(old | v); return old; }
template <class T> T atomicMin(T* at, T v) { const T old = *at; *at = old < v ? old : v; return old; }
template <class T> T atomicMax(T* at, T v) { const T old = *at; *at = old > v ? old : v; return old; }
template <class T> T atomicCAS(T* at, T was, T v) { const T old = *at; if (old == was) *at = v; return old; }

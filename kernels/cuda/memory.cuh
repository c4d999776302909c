// Moving rows, and the few PTX instructions that C++ has no words for.
//
// A row is moved in *lines* of 128 bytes of host memory, each by one group of lanes with one load per lane: PCIe then sees
// whole-line requests, which carry 46-47 GB/s where a warp per row carries 44 (measured; bulk copies: 24, cp.async: less
// than half). Rows start anywhere, so the first and last line of a row are masked. Lanes move the widest word that
// divides every row address: 16 bytes where rows allow, down to single bytes.
#pragma once

#include "layout.cuh"

namespace hisparse {

template <int BYTES> struct WordOf;
template <> struct WordOf<16> { using type = uint4; };
template <> struct WordOf<8> { using type = uint2; };
template <> struct WordOf<4> { using type = u32; };
template <> struct WordOf<2> { using type = u16; };
template <> struct WordOf<1> { using type = u8; };

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
// Loads `v` from `at` where `wanted`, without a branch.
__device__ __forceinline__ void load_if(bool wanted, i32& v, const i32* at) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.u32 %0, [%1]; }"
                 : "+r"(v) : "l"(at), "r"(static_cast<u32>(wanted)));
}
__device__ __forceinline__ void load_if(bool wanted, u32& v, const u16* at) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
                 : "+r"(v) : "l"(at), "r"(static_cast<u32>(wanted)));
}

// How rows of BYTES bytes, all at multiples of ALIGN (a power of two up to 128), split into lines.
template <int BYTES, int ALIGN> struct RowShape {
    static constexpr int WORD = ALIGN < 16 ? ALIGN : 16;
    static constexpr int LANES = 128 / WORD < 32 ? 128 / WORD : 32;
    static constexpr int LINE = LANES * WORD;
    static constexpr int FIRST_MAX = ALIGN < LINE ? LINE - ALIGN : 0;  // bytes of a first line that precede the row
    static constexpr int LINES = (FIRST_MAX + BYTES + LINE - 1) / LINE;
    static constexpr int ROW = BYTES;
    using Word = typename WordOf<WORD>::type;

    // Where in the row this lane's word of line `line` lies; outside [0, ROW) when the line does not reach so far.
    static __device__ __forceinline__ int offset(const void* host_row, int line) {
        const int before = static_cast<int>(reinterpret_cast<u64>(host_row)) & (LINE - 1);
        return line * LINE + static_cast<int>(threadIdx.x % LANES) * WORD - before;
    }
};

// FLIGHT lines per group of lanes, loaded together and held in registers until stored. `source(i)` and `target(i)` give
// the addresses of row i, `host(i)` the one of them that lies in host memory; a null address is skipped. Task t is line
// t % LINES of row t / LINES.
template <class Shape, int FLIGHT> struct Lines {
    typename Shape::Word held[FLIGHT];
    int offset[FLIGHT];  // in the row; -1: nothing held

    template <class Host, class Source>
    __device__ __forceinline__ void load(u32 first, u32 stride, u32 tasks, Host host, Source source) {
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            const u32 task = first + i * stride, row = task / Shape::LINES;
            offset[i] = -1;
            if (task >= tasks) continue;
            const u8* from = source(row);
            const int at = Shape::offset(host(row), static_cast<int>(task % Shape::LINES));
            if (from == nullptr || at < 0 || at >= Shape::ROW) continue;
            offset[i] = at;
            load_once(held[i], from + at);
        }
    }

    template <class Target> __device__ __forceinline__ void store(u32 first, u32 stride, Target target) {
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            if (offset[i] < 0) continue;
            u8* to = target((first + i * stride) / Shape::LINES);
            if (to != nullptr) *reinterpret_cast<typename Shape::Word*>(to + offset[i]) = held[i];
        }
    }

    // Likewise, where tasks are few at times: the code for many is not even fetched then. All rows are looked up before
    // any is loaded or stored, so that nothing in between waits. `source(i)` lies in host memory.
    template <class Source>
    __device__ __forceinline__ void load_few(u32 first, u32 stride, u32 tasks, Source source) {
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) offset[i] = -1;
        if (first < tasks) load_part<0, 1>(first, stride, tasks, source);
        if (first + stride < tasks) load_part<1, 4>(first, stride, tasks, source);
        if (first + 4 * stride < tasks) load_part<4, FLIGHT>(first, stride, tasks, source);
    }
    template <class Target> __device__ __forceinline__ void store_few(u32 first, u32 stride, u32 tasks, Target target) {
        if (first < tasks) store_part<0, 1>(first, stride, tasks, target);
        if (first + stride < tasks) store_part<1, 4>(first, stride, tasks, target);
        if (first + 4 * stride < tasks) store_part<4, FLIGHT>(first, stride, tasks, target);
    }

   private:
    template <int BEGIN, int END, class Source>
    __device__ __forceinline__ void load_part(u32 first, u32 stride, u32 tasks, Source source) {
        const u8* from[END - BEGIN];
        int at[END - BEGIN];
#pragma unroll
        for (int i = BEGIN; i < END; ++i) {
            const u32 task = END == 1 ? first : min(first + i * stride, tasks - 1);
            from[i - BEGIN] = source(task / Shape::LINES);
            at[i - BEGIN] = Shape::offset(from[i - BEGIN], static_cast<int>(task % Shape::LINES));
        }
#pragma unroll
        for (int i = BEGIN; i < END; ++i) {
            const int in_row = at[i - BEGIN];
            if (first + i * stride >= tasks || in_row < 0 || in_row >= Shape::ROW) continue;
            load_once(held[i], from[i - BEGIN] + in_row);
            offset[i] = in_row;
        }
    }
    template <int BEGIN, int END, class Target>
    __device__ __forceinline__ void store_part(u32 first, u32 stride, u32 tasks, Target target) {
        u8* to[END - BEGIN];
#pragma unroll
        for (int i = BEGIN; i < END; ++i) to[i - BEGIN] = target(min(first + i * stride, tasks - 1) / Shape::LINES);
#pragma unroll
        for (int i = BEGIN; i < END; ++i)
            if (offset[i] >= 0 && to[i - BEGIN] != nullptr)
                *reinterpret_cast<typename Shape::Word*>(to[i - BEGIN] + offset[i]) = held[i];
    }
};

// Between blocks of one launch: who sees what was stored sees all that came before it.
__device__ __forceinline__ i32 load_acquire(const i32* at) {
    i32 v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(i32* at, i32 v) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// Words from global to shared memory that no thread holds meanwhile; there once `await_words` and a barrier are passed.
template <int WORDS> __device__ __forceinline__ void fetch_words(i32* to, const i32* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(to))),
                 "l"(from), "n"(4 * WORDS)
                 : "memory");
}
__device__ __forceinline__ void await_words() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ i64 read_id(const void* ids, int place, int wide) {
    return wide ? static_cast<const i64*>(ids)[place] : static_cast<const i32*>(ids)[place];
}

__device__ __forceinline__ void trip(const State& s, Tripwire wire, int times) {
    if (times) atomicAdd(reinterpret_cast<u64*>(s.tripwires + wire), static_cast<u64>(times));
}

// A named barrier of `threads` threads of the block. Barrier 0 is __syncthreads().
__device__ __forceinline__ void sync_named(int barrier, int threads) {
    __syncwarp();
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ u32 shared_address(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}

// The same place in shared memory, in a register: else the compiler asks anew for the block's part of it at every use.
__device__ __forceinline__ void* settled(void* shared) {
    u32 at = shared_address(shared);
    asm volatile("" : "+r"(at));
    return __cvta_shared_to_generic(at);
}

// From here on the next kernel's blocks may begin, on Hopper and later, as far as there is room beside this one's.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the kernel ahead has ended and all that it wrote is seen.
__device__ __forceinline__ void await_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Sets bits of a word in shared memory, without a branch.
__device__ __forceinline__ void set_bits_if(bool condition, u32* word, u32 bits) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p red.shared::cta.or.b32 [%1], %2; }" ::"r"(
                     static_cast<u32>(condition)),
                 "r"(shared_address(word)), "r"(bits)
                 : "memory");
}

// A gate in shared memory (an mbarrier), of one use: `calls` threads open it, any may wait for that. Unlike a barrier of
// warps it asks nobody who only opens it to wait, and may be met at different places of the code.
__device__ __forceinline__ void close_gate(u64* gate, u32 calls) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(calls) : "memory");
}
__device__ __forceinline__ void open_gate(u64* gate) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(shared_address(gate))
                 : "memory");
}
// Of the block's scope: what has arrived lies in its own shared memory. An acquire of the cluster's scope would empty L1.
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
// The cluster's one barrier: all threads arrive once, mailboxes being set up; who is about to write to a peer waits.
__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Mailboxes are gates that peers open, too. To the peers, who see them once the cluster's barrier is passed.
__device__ __forceinline__ void publish_mailboxes() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// `bytes` will be written by peers, through `send`, before the gate opens. This is its one call.
__device__ __forceinline__ void expect_bytes(u64* mailbox, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mailbox)), "r"(bytes)
                 : "memory");
}
// Relaxed: it tells that values have been read, and publishes nothing.
__device__ __forceinline__ void knock(u64* mailbox, int peer) {
    u32 box;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(box) : "r"(shared_address(mailbox)), "r"(peer));
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(box) : "memory");
}
// 16 bytes to the same place in block `peer`, counted by its mailbox.
__device__ __forceinline__ void send(const void* at, const uint4& v, u64* mailbox, int peer) {
    u32 to, box;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(at)), "r"(peer));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(box) : "r"(shared_address(mailbox)), "r"(peer));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(box) : "memory");
}
__device__ __forceinline__ void send(u32* at, u32 v, u64* mailbox, int peer) {  // likewise, 4 bytes
    u32 to, box;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(at)), "r"(peer));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(box) : "r"(shared_address(mailbox)), "r"(peer));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(box)
                 : "memory");
}
#else
__device__ __forceinline__ u32 cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void expect_bytes(u64*, u32) {}
__device__ __forceinline__ void publish_mailboxes() {}
__device__ __forceinline__ void knock(u64*, int) {}
__device__ __forceinline__ void send(const void*, const uint4&, u64*, int) {}
__device__ __forceinline__ void send(u32*, u32, u64*, int) {}
#endif

}  // namespace hisparse

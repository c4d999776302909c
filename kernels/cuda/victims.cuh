// Which slots go: exact LRU over the slots of one seat, by the control warps of a block. All blocks of a request choose
// alike, each for itself, from the same stamps and the same map of used slots.
//
//    encode_ages      stamps -> one 16-bit code per slot in shared memory, and a histogram of ages
//    find_cut         the age at which victims end
//    refine_cut       the same among ages that share the last bin (rare)
//    assign_victims   ranks in slot order; the block's share of them to its misses
#pragma once

#include "swap_in_block.cuh"

namespace hisparse {

// Four neighbouring slots' stamps; slots without a chunk read as used in this step.
__device__ __forceinline__ int4 read_stamps(const Seat& at, const Shared& s, const i32* stamp, int quad) {
    if (quad * 4 >= at.limit) return {at.now, at.now, at.now, at.now};
    const i32 row = slot_row(s.chunks, quad * 4);
    if (row < 0) return {at.now, at.now, at.now, at.now};
    return *reinterpret_cast<const int4*>(stamp + row);
}

// Ages of the candidates among them; negative for slots that must stay: used in this step, tail, or beyond the limit.
struct Ages {
    i32 of[4];

    __device__ __forceinline__ Ages(const Seat& at, const Shared& s, int quad, const int4& stamps) {
        const bool inside = quad * 4 < at.limit;
        const u32 used = inside ? reinterpret_cast<const u32*>(s.used)[quad] : ~0u;
        const i32 four[4] = {stamps.x, stamps.y, stamps.z, stamps.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool free = (used >> i * 8 & 0xFF) == 0 && quad * 4 + i < at.limit;
            of[i] = free ? min(at.now - 1 - four[i], AGE_MAX) : -1;
        }
    }
};

struct Stamps {
    int4 quad[STAMP_QUADS];

    __device__ __forceinline__ void load(const Seat& at, const Shared& s, const i32* stamp, int begin) {
#pragma unroll
        for (int j = 0; j < STAMP_QUADS; ++j)
            quad[j] = read_stamps(at, s, stamp, begin + j * CONTROL_THREADS + static_cast<int>(threadIdx.x));
    }
};

// One per candidate into the histogram. Slots that were filled in one step have one age and lie side by side, so a warp
// often counts into one bin: then once for all.
__device__ __forceinline__ void count_codes(const Shared& s, const i32 (&code)[4]) {
    i32 low = AGE_BINS + 1, high = 0;
    u32 candidates = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (code[i] == 0) continue;
        low = min(low, code[i]), high = max(high, code[i]);
        ++candidates;
    }
    const i32 lowest = __reduce_min_sync(0xFFFFFFFF, low), highest = __reduce_max_sync(0xFFFFFFFF, high);
    if (lowest == highest) {
        const u32 all = __reduce_add_sync(0xFFFFFFFF, candidates);
        if (threadIdx.x % 32 == 0) atomicAdd(s.histogram + lowest - 1, all);
    } else if (low == high) {
        atomicAdd(s.histogram + low - 1, candidates);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (code[i] > 0) atomicAdd(s.histogram + code[i] - 1, 1u);
    }
}

__device__ __forceinline__ void write_codes(const Seat& at, const Shared& s, int quad, const i32 (&code)[4]) {
    if (quad * 4 >= (at.limit + 7) / 8 * 8) return;
    const uint2 packed = {static_cast<u32>(code[0] | code[1] << 16), static_cast<u32>(code[2] | code[3] << 16)};
    reinterpret_cast<uint2*>(s.codes)[quad] = packed;
}

// codes and histogram of all slots. `early` holds the first stamps.
__device__ void encode_ages(const Seat& at, const Shared& s, const i32* stamp, Stamps& early) {
    const int quads = (at.limit + 7) / 8 * 2;
#pragma unroll 1
    for (int begin = 0; begin < quads; begin += STAMP_QUADS * CONTROL_THREADS) {
        if (begin > 0) early.load(at, s, stamp, begin);
#pragma unroll
        for (int j = 0; j < STAMP_QUADS; ++j) {
            if (begin + j * CONTROL_THREADS >= quads) break;
            const int quad = begin + j * CONTROL_THREADS + threadIdx.x;
            const Ages ages(at, s, quad, early.quad[j]);
            i32 code[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) code[i] = max(min(ages.of[i], OLD) + 1, 0);
            count_codes(s, code);
            write_codes(at, s, quad, code);
        }
    }
    sync_named(CONTROL, CONTROL_THREADS);
}

// From the oldest bin down: `cut` is the bin where `wanted` is reached, `above` how many lie in older bins. Returns the
// sum of all bins. When it is less than `wanted`, cut is 0 and above leaves the whole of bin 0 wanted.
__device__ u32 find_cut(const Shared& s, Scalars& q, u32 wanted) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int top = AGE_BINS - static_cast<int>(threadIdx.x) * BINS_PER_THREAD;
    u32 bins[BINS_PER_THREAD], sum = 0;
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(s.histogram + top - 4 - i);
        bins[i] = four.w, bins[i + 1] = four.z, bins[i + 2] = four.y, bins[i + 3] = four.x;
        sum += four.x + four.y + four.z + four.w;
    }
    const u32 through = warp_inclusive_sum(sum);
    if (lane == 31) q.warp_sums[warp] = through;
    sync_named(CONTROL, CONTROL_THREADS);
    u32 before = through - sum, total = 0;
#pragma unroll
    for (int w = 0; w < CONTROL_WARPS; ++w) {
        total += q.warp_sums[w];
        if (w < warp) before += q.warp_sums[w];
    }
    if (total < wanted) {
        if (threadIdx.x == CONTROL_THREADS - 1) {
            q.cut = 0;
            q.above = static_cast<i32>(before + sum - bins[BINS_PER_THREAD - 1]);
        }
    } else if (before < wanted && wanted <= before + sum) {
#pragma unroll
        for (int i = 0; i < BINS_PER_THREAD; ++i) {
            if (before < wanted && wanted <= before + bins[i]) {
                q.cut = top - 1 - i;
                q.above = static_cast<i32>(before);
            }
            before += bins[i];
        }
    }
    sync_named(CONTROL, CONTROL_THREADS);
    return total;
}

__device__ void clear_histogram(const Shared& s) {
    for (int i = threadIdx.x; i < AGE_BINS; i += CONTROL_THREADS) s.histogram[i] = 0;
    sync_named(CONTROL, CONTROL_THREADS);
}

// The cut-off lies among ages that share the last bin: two finer histograms over them find it. Afterwards codes are 2 for
// older slots, 1 at the cut-off. Returns how many are older.
__device__ u32 refine_cut(const Seat& at, const Shared& s, Scalars& q, const i32* stamp, u32 wanted) {
    const int quads = (at.limit + 7) / 8 * 2;
    i32 coarse = 0, cut = 0;
    u32 older = 0;
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
        clear_histogram(s);
#pragma unroll 1
        for (int quad = threadIdx.x; quad < quads; quad += CONTROL_THREADS) {
            const Ages ages(at, s, quad, read_stamps(at, s, stamp, quad));
            i32 code[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const i32 age = ages.of[i], high = age >> OLD_SHIFT;
                code[i] = (age > cut) + (age >= cut);
                if (pass == 2 || age < OLD || (pass == 1 && high != coarse)) continue;
                atomicAdd(s.histogram + (pass == 0 ? high : age & (1 << OLD_SHIFT) - 1), 1u);
            }
            if (pass == 2) write_codes(at, s, quad, code);
        }
        sync_named(CONTROL, CONTROL_THREADS);
        if (pass == 2) break;
        find_cut(s, q, wanted - older);
        older += q.above;
        cut = coarse << OLD_SHIFT | q.cut;
        coarse = q.cut;
    }
    return older;
}

// Code at which victims end, how many are older, and how many there are in all (fewer than `wanted` only when slots run
// out). The histogram is clear on entry.
__device__ u32 choose_cut(const Seat& at, const Shared& s, Scalars& q, const i32* stamp, Stamps& early, u32 wanted,
                          u32& cut, u32& older) {
    encode_ages(at, s, stamp, early);
    const u32 victims = min(find_cut(s, q, wanted), wanted);
    cut = q.cut + 1;
    older = q.above;
    if (cut == AGE_BINS) {
        older = refine_cut(at, s, q, stamp, wanted);
        cut = 1;
    }
    return victims;
}

// Gives victims before..before+winners-1, in slot order, to this block's winners. Slots are dealt to warps in order, so
// that a rank is a sum over lanes, then over warps.
__device__ void assign_victims(const Seat& at, const Shared& s, Scalars& q, u32 cut, u32 ties, u32 before,
                               u32 winners) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int octets = (at.limit + 7) / 8, share = octets / CONTROL_WARPS;
    const int start = warp * share, stop = warp == CONTROL_WARPS - 1 ? octets : start + share;
    const uint4* const codes = reinterpret_cast<const uint4*>(s.codes);
    const u32 cuts = cut << 16 | cut;
    const auto count = [&](int octet) -> u32 {  // older << 16 | at the cut-off
        if (octet >= stop) return 0;
        const uint4 c = codes[octet];
        const u32 above = __popc(__vsetgtu2(c.x, cuts)) + __popc(__vsetgtu2(c.y, cuts)) +
                          __popc(__vsetgtu2(c.z, cuts)) + __popc(__vsetgtu2(c.w, cuts));
        const u32 level = __popc(__vseteq2(c.x, cuts)) + __popc(__vseteq2(c.y, cuts)) +
                          __popc(__vseteq2(c.z, cuts)) + __popc(__vseteq2(c.w, cuts));
        return above << 16 | level;
    };
    u32 sum = 0;
#pragma unroll 2
    for (int begin = start; begin < stop; begin += 32) sum += count(begin + lane);
    sum = __reduce_add_sync(0xFFFFFFFF, sum);
    if (lane == 0) q.warp_sums[warp] = sum;
    sync_named(CONTROL, CONTROL_THREADS);
    u32 left = 0;
    for (int w = 0; w < warp; ++w) left += q.warp_sums[w];
#pragma unroll 1
    for (int begin = start; begin < stop; begin += 32) {
        const u32 own = count(begin + lane), through = warp_inclusive_sum(own);
        u32 sofar = left + through - own;
        left += __shfl_sync(0xFFFFFFFF, through, 31);
        if (own == 0) continue;
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
            const u32 slot = (begin + lane) * 8 + i, code = s.codes[slot];
            const u32 tied = sofar & 0xFFFF, rank = (sofar >> 16) + min(tied, ties) - before;
            const bool older = code > cut, tie = code == cut;
            if ((older || (tie && tied < ties)) && rank < winners)
                s.record_slot[s.winner_record[rank]] = static_cast<u16>(slot);
            sofar += older << 16 | tie;
        }
    }
}

}  // namespace hisparse

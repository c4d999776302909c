// The work of prompt_index: jobs of neighbouring tokens, and what each of their tokens selects.
#pragma once

#include "memory.cuh"
#include "prompt_list.cuh"

namespace hisparse {

constexpr int GROUP = 8;        // tokens of a job
constexpr int SPLITS_MAX = 32;  // blocks that share the keys of a job

// Neighbouring tokens of one prompt, and a share of the keys.
struct Job {
    i32 number, row, tokens, seat, start;  // first row of the block, how many, their seat, position of the first
    i32 share;                             // of `splits`
    __device__ __forceinline__ i32 length(i32 token) const { return token < tokens ? start + token + 1 : 0; }
    // Pages whose keys are scored: none where all tokens take all positions.
    __device__ __forceinline__ i32 pages(i32 k) const {
        return length(tokens - 1) <= k ? 0 : (length(tokens - 1) + PAGE_TOKENS - 1) / PAGE_TOKENS;
    }
    __device__ __forceinline__ i32 first_page(const PromptIndex& p) const { return page_of_share(p, share); }
    __device__ __forceinline__ i32 end_page(const PromptIndex& p) const { return page_of_share(p, share + 1); }

   private:
    __device__ __forceinline__ i32 page_of_share(const PromptIndex& p, i32 of) const {
        return pages(p.k) * of / p.splits;
    }
};

// parts[part] = {first job, row, tokens, seat, start}; jobs of a part are its GROUPs in order.
__device__ __forceinline__ Job job_at(const PromptIndex& p, i32 unit) {
    const i32 number = unit / p.splits;
    i32 low = 0, high = p.parts;
    while (low + 1 < high) {
        const i32 middle = (low + high) / 2;
        if (p.part[middle].first_job <= number)
            low = middle;
        else
            high = middle;
    }
    const IndexPart at = p.part[low];
    const i32 before = GROUP * (number - at.first_job);
    return {number, at.row + before, min(GROUP, at.tokens - before), at.seat, at.start + before, unit % p.splits};
}

// Calls f(number) for each job of this block, or share of one: job_at.
template <class Each> __device__ __forceinline__ void each_unit(const PromptIndex& p, Each f) {
    for (i32 unit = p.jobs * p.splits - 1 - static_cast<i32>(blockIdx.x); unit >= 0; unit -= gridDim.x) f(unit);
}

__device__ __forceinline__ bool is_granted(const PromptIndex& p, i32 page) {
    return static_cast<u32>(page) < static_cast<u32>(p.state.key_rows / PAGE_TOKENS);
}
__device__ __forceinline__ const i32* table_of(const PromptIndex& p, const Job& job) {
    return p.state.index_table + static_cast<i64>(job.seat) * p.state.max_pages;
}

// One token of a job, which one warp selects for.
struct Selecting {
    const PromptIndex& p;
    const Job& job;
    i32 token, length;

    __device__ __forceinline__ bool chooses() const { return length > p.k; }
    __device__ __forceinline__ ListOut out() const {
        const i64 place = static_cast<i64>(job.row + token) * p.k;
        return {p.topk_out + place, p.rows_out == nullptr ? nullptr : p.rows_out + place,
                p.slab_table + static_cast<i64>(job.seat) * p.slab_pages};
    }

    // In all lanes of a warp: whether the context's pages are there.
    __device__ __forceinline__ bool granted() const {
        const i32 pages = (length + PAGE_TOKENS - 1) / PAGE_TOKENS;
        const i32* const table = table_of(p, job);
        bool all = pages <= p.state.max_pages;
        const i32 held = min(pages, p.state.max_pages);
#pragma unroll 4
        for (i32 i = threadIdx.x % 32; i < held; i += 32) all &= is_granted(p, table[i]);
        return __all_sync(0xFFFFFFFF, all);
    }
    // One warp writes all positions where those are at most k; none where a page is not granted.
    __device__ __forceinline__ void take_all() const {
        const bool all = granted();
        for (i32 i = threadIdx.x % 32; i < p.k; i += 32) out().put(i, all && i < length ? i : -1);
        if (threadIdx.x % 32 == 0 && !all) trip(p.state, UNGRANTED, 1);
    }
};

}  // namespace hisparse

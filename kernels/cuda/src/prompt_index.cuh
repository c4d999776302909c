// prompt_index: the top-k positions of every token of a block of prompts, scores and selection in one launch (Hopper).
//
// Keys and queries are e4m3 with a scale each (as the authors of DeepSeek-V3.2 quantize queries, by token and head).
//
//     GROUP tokens of one prompt, neighbours, are a job of a block of threads; blocks take jobs in turn, long contexts
//     first. Two teams of four warps have TEAM tokens each; a page of 64 keys is brought to shared memory once for both
//     by a warp of its own (bulk copies into a ring), and multiplied by all heads of a team's tokens in one product:
//     64 keys x half of a team's columns. While a half is summed, the products of the other half are formed.
//
//     Each thread has two keys of its warp's 16 and two heads of eight: it sums them with relu and weights, four lanes
//     divide the sums of two tokens among them, and a warp then takes the 64 scores of the one token that it selects for
//     (prompt_list.cuh), while it sums the next page. So no score leaves the multiprocessor but those that may be among
//     the best. Lists of a team are shortened together: its warps wait for each other.
//
// Keys are multiplied from registers: their rows of 132 bytes are not what a matrix in shared memory may look like. Which
// dimension stands in which place of a product is free as long as both operands agree, so that a lane t reads words
// 8 t + i of a key, without conflicts of banks. Queries stand in blocks of 8 heads x 16 places.
//
// Rejected: keys decoded to float16 (half the rate of products), a job of 4 tokens (twice the reads of keys), a launch for
// each prompt of a block, all columns of a team in one product (4.0 ms where halves take 2.8, 4,096 tokens at 32k), four
// teams of two tokens (3.1 ms: each of them reads the keys), relu by a saturating product on the other pipe (2.8 ms).
#pragma once

#include "barriers.cuh"
#include "memory.cuh"
#include "prompt_list.cuh"

namespace hisparse {

constexpr int TEAMS = 2, TEAM = 4, GROUP = TEAMS * TEAM;
constexpr int CONSUMER_THREADS = 128 * TEAMS, PROMPT_THREADS = CONSUMER_THREADS + 128;
constexpr int DIM = 128, KEY_ROW = DIM + 4, PAGE_BYTES = PAGE_TOKENS * KEY_ROW;
constexpr int STEPS = DIM / 32, TILES = TEAM * HEADS / 8, HEAD_TILES = HEADS / 8;
constexpr int HALF = TEAM / 2, HALF_TILES = TILES / 2;  // tokens whose products are awaited together
constexpr int SCORE_STRIDE = 80;  // of a token: lanes of two tokens write to banks of their own
typedef float Products[HALF_TILES][4];
static_assert(HEADS == 64 || HEADS == 32, "as wide as the products written here");
static_assert(PAGE_TOKENS == 64 && PAGE_BYTES % 16 == 0, "a page is the rows of a product, and one copy");

struct Team {
    u32 queries[STEPS][2][TILES][32];  // of 8 heads x 16 places: word 4 g + t of a block is head g, places 4 t..
    float4 weights[TEAM][HEAD_TILES / 2][4];  // of heads 16 n + 2 t, + 1, + 8 and + 9, with both scales
    u32 scores[2][TEAM][SCORE_STRIDE];    // order keys of a page, for two pages in turn
    u32 bins[TEAM][RANGE_BINS];
};

struct PromptShared {
    u8 pages[STAGES][PAGE_BYTES];
    Team teams[TEAMS];
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(PromptShared) <= 150 << 10, "as the launcher asks for");

// Neighbouring tokens of one prompt.
struct Job {
    i32 row, tokens, seat, start;  // first row of the block, how many, their seat, position of the first
    __device__ __forceinline__ i32 length(i32 token) const { return token < tokens ? start + token + 1 : 0; }
    // Pages whose keys are scored: none where all tokens take all positions.
    __device__ __forceinline__ i32 pages(i32 k) const {
        return length(tokens - 1) <= k ? 0 : (length(tokens - 1) + PAGE_TOKENS - 1) / PAGE_TOKENS;
    }
};

// parts[part] = {first job, row, tokens, seat, start}; jobs of a part are its GROUPs in order.
__device__ __forceinline__ Job job_at(const PromptIndex& p, i32 number) {
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
    return {at.row + before, min(GROUP, at.tokens - before), at.seat, at.start + before};
}

__device__ __forceinline__ void bring_pages(const PromptIndex& p, PromptShared& s) {
    const u8* const keys = p.state.index_keys + p.group * p.state.key_rows * KEY_ROW;
    const i32 held = static_cast<i32>(p.state.key_rows / PAGE_TOKENS);
    u32 turn = 0;
    for (i32 number = p.jobs - 1 - static_cast<i32>(blockIdx.x); number >= 0; number -= gridDim.x) {
        const Job job = job_at(p, number);
        const i32* const table = p.state.index_table + static_cast<i64>(job.seat) * p.state.max_pages;
        const i32 pages = job.pages(p.k);
        for (i32 i = 0; i < pages; ++i, ++turn) {
            const u32 slot = turn % STAGES;
            const i32 page = table[i];
            await_phase(shared_address(s.empty + slot), turn / STAGES & 1 ^ 1);
            const bool granted = page >= 0 && page < held;  // else write_token finds it
            const u32 full = shared_address(s.full + slot);
            arrive_expecting(full, granted ? PAGE_BYTES : 0);
            if (granted) fetch_bytes(s.pages[slot], keys + static_cast<i64>(page) * PAGE_BYTES, PAGE_BYTES, full);
        }
    }
}

#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define EIGHT(n) FOUR(n), FOUR(n + 1)
#define THIRTYTWO(n) EIGHT(n), EIGHT(n + 2), EIGHT(n + 4), EIGHT(n + 6)
// c = A * B of step 0, += in the others. Nothing of `c` and `a` may be touched until they are awaited.
__device__ __forceinline__ void multiply_page(Products& c, const u32 (&a)[4], u64 b, int step) {
#if HEADS == 64
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"
        "%57,%58,%59,%60,%61,%62,%63}, {%64, %65, %66, %67}, %68, p, 1, 1; }"
        : THIRTYTWO(0), THIRTYTWO(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
#else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31}, {%32, %33, %34, %35}, %36, p, 1, 1; }"
        : THIRTYTWO(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
#endif
}
// Products that were awaited are read behind this only.
__device__ __forceinline__ void receive(Products& c) {
#pragma unroll
    for (int n = 0; n < HALF_TILES; ++n) asm volatile("" : FOUR(n)::"memory");
}
#undef THIRTYTWO
#undef EIGHT
#undef FOUR

// Of a block of 8 heads x 16 places; the next 16 places lie TILES blocks on, the next 8 heads one.
__device__ __forceinline__ u64 describe_queries(const u32* block) {
    const u64 address = shared_address(block) >> 4, along_places = TILES * 128 >> 4, along_heads = 128 >> 4;
    return address | along_places << 16 | along_heads << 32;
}

// A team's queries and weights into shared memory. `first` is the team's first token in the job.
__device__ __forceinline__ void stage_queries(const PromptIndex& p, const Job& job, i32 first, Team& team) {
    constexpr int WORDS = DIM / 4, AHEAD = 16;
    const int thread = threadIdx.x % 128, word = thread % WORDS;
    const int t = word / 8, step = word % 8 / 2, half = word % 2;  // as lanes read keys
    static_assert(TEAM * HEADS * WORDS % (128 * AHEAD) == 0, "whole rounds");
    for (int from = thread / WORDS; from < TEAM * HEADS; from += 128 / WORDS * AHEAD) {
        u32 fours[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int column = from + 128 / WORDS * i, token = first + column / HEADS;
            const i64 row = static_cast<i64>(job.row + token) * HEADS + column % HEADS;
            fours[i] = token < job.tokens ? *reinterpret_cast<const u32*>(p.queries + row * KEY_ROW + 4 * word) : 0;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int column = from + 128 / WORDS * i;
            team.queries[step][half][column / 8][4 * (column % 8) + t] = fours[i];
        }
    }
    for (int i = thread; i < TEAM * HEADS; i += 128) {
        const int head = i % HEADS, token = first + i / HEADS;
        float weight = 0;
        if (token < job.tokens) {
            const i64 row = static_cast<i64>(job.row + token) * HEADS + head;
            weight = p.weights[row] * p.scale * *reinterpret_cast<const float*>(p.queries + row * KEY_ROW + DIM);
        }
        float4& four = team.weights[i / HEADS][head / 16][head % 8 / 2];
        reinterpret_cast<float*>(&four)[head / 8 % 2 * 2 + head % 2] = weight;
    }
}

__device__ __forceinline__ float prompt_relu(float v) {
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(v));
    return v;
}

// Products of a half with its heads, summed: scores of its two tokens, as order keys of keys g and g + 8 of each warp's 16.
__device__ __forceinline__ void sum_half(const Products& c, const Team& team, int half, float2 scales,
                                         u32 (&scores)[TEAM][SCORE_STRIDE]) {
    static_assert(HALF == 2, "four lanes divide two keys of two tokens");
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % 128 / 32;
    float near[HALF][2] = {}, far[HALF][2] = {};  // each in two parts: sums wait for themselves less
#pragma unroll
    for (int pair = 0; pair < HEAD_TILES / 2; ++pair)
#pragma unroll
        for (int token = 0; token < HALF; ++token) {
            const float4 weight = team.weights[half * HALF + token][pair][t];
            const float(&one)[4] = c[token * HEAD_TILES + 2 * pair], (&two)[4] = c[token * HEAD_TILES + 2 * pair + 1];
            near[token][0] = fmaf(prompt_relu(one[0]), weight.x, near[token][0]);
            far[token][0] = fmaf(prompt_relu(one[2]), weight.x, far[token][0]);
            near[token][0] = fmaf(prompt_relu(one[1]), weight.y, near[token][0]);
            far[token][0] = fmaf(prompt_relu(one[3]), weight.y, far[token][0]);
            near[token][1] = fmaf(prompt_relu(two[0]), weight.z, near[token][1]);
            far[token][1] = fmaf(prompt_relu(two[2]), weight.z, far[token][1]);
            near[token][1] = fmaf(prompt_relu(two[1]), weight.w, near[token][1]);
            far[token][1] = fmaf(prompt_relu(two[3]), weight.w, far[token][1]);
        }
    float nears[HALF], fars[HALF];
#pragma unroll
    for (int token = 0; token < HALF; ++token)
        nears[token] = near[token][0] + near[token][1], fars[token] = far[token][0] + far[token][1];
    const bool upper = t & 2, odd = t & 1;
    const float low = (upper ? nears[1] : nears[0]) + __shfl_xor_sync(0xFFFFFFFF, upper ? nears[0] : nears[1], 2);
    const float high = (upper ? fars[1] : fars[0]) + __shfl_xor_sync(0xFFFFFFFF, upper ? fars[0] : fars[1], 2);
    const float sum = (odd ? high : low) + __shfl_xor_sync(0xFFFFFFFF, odd ? low : high, 1);
    scores[half * HALF + t / 2][16 * warp + g + 8 * odd] = prompt_order(sum * (odd ? scales.y : scales.x));
}

// The result of a token: of its list where it has one, else all positions. None where a page is not granted.
__device__ __forceinline__ void write_token(const PromptIndex& p, const Job& job, i32 token, const PromptList& list) {
    const i32 lane = threadIdx.x % 32, length = job.length(token);
    const i32* const table = p.state.index_table + static_cast<i64>(job.seat) * p.state.max_pages;
    bool granted = true;
    for (i32 i = lane; i < (length + PAGE_TOKENS - 1) / PAGE_TOKENS; i += 32)
        granted &= static_cast<u32>(table[i]) < static_cast<u32>(p.state.key_rows / PAGE_TOKENS);
    granted = __all_sync(0xFFFFFFFF, granted);
    i32* const out = p.topk_out + static_cast<i64>(job.row + token) * p.k;
    if (granted && length > p.k) {
        list.finish(out);
        return;
    }
    for (i32 i = lane; i < p.k; i += 32) out[i] = granted && i < length ? i : -1;
    if (lane == 0 && !granted) trip(p.state, UNGRANTED, 1);
}

// A lane's keys of a page: two rows of its warp's 16, as products take them.
struct PageKeys {
    u32 a[STEPS][4];
    float2 scales;
};

// A team of four warps: their products, and one list a warp.
struct Selector {
    const PromptIndex& p;
    PromptShared& s;
    Team& team;
    const int barrier;
    u64 queries;   // descriptor of the first step, first half
    u32 turn = 0;  // of the ring of pages, at the first page of a job
    Products c[2];

    __device__ __forceinline__ void await_page(i32 i) const {
        const u32 at = turn + i;
        await_phase(shared_address(s.full + at % STAGES), at / STAGES & 1);
    }
    __device__ __forceinline__ void release_page(i32 i) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared_address(s.empty + (turn + i) % STAGES));
    }

    __device__ __forceinline__ void read_page(i32 i, PageKeys& keys) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % 128 / 32;
        await_page(i);
        const u8* const page = s.pages[(turn + i) % STAGES];
        const u32* const words = reinterpret_cast<const u32*>(page + (16 * warp + g) * KEY_ROW);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            keys.a[step][0] = words[8 * t + 2 * step], keys.a[step][2] = words[8 * t + 2 * step + 1];
            keys.a[step][1] = words[2 * KEY_ROW + 8 * t + 2 * step];
            keys.a[step][3] = words[2 * KEY_ROW + 8 * t + 2 * step + 1];
        }
        keys.scales = make_float2(__uint_as_float(words[DIM / 4]), __uint_as_float(words[2 * KEY_ROW + DIM / 4]));
        release_page(i);
    }

    template <int HALF_NUMBER> __device__ __forceinline__ void multiply(const PageKeys& keys) {
        open_products();
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            multiply_page(c[HALF_NUMBER], keys.a[step],
                          queries + (HALF_NUMBER * HALF_TILES * 128 >> 4) + step * (2 * TILES * 128 >> 4), step);
        commit_products();
    }

    // The scores of page `i`, all of which the team has written, into this warp's list.
    __device__ __forceinline__ void list_page(i32 i, PromptList& list, i32 length) const {
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        const u32* const scores = team.scores[i & 1][warp];
        const i32 base = i * PAGE_TOKENS;
        list.take(scores[lane], scores[lane + 32], base + lane < length, base + 32 + lane < length, base);
    }

    // Page `i`, of which the first half's products are done. Those of the second are formed while the first is summed,
    // and those of the next page's first half while the second is. Without a next page (`is_last`) they are formed of
    // what `next` holds and not read. The scores of the page before are listed meanwhile, which the team has written by
    // then. Returns whether a list of the team was crowded before that.
    __device__ __forceinline__ bool take_page(i32 i, bool is_first, bool is_last, const PageKeys& keys, PageKeys& next,
                                              PromptList& list, i32 length) {
        u32(&scores)[TEAM][SCORE_STRIDE] = team.scores[i & 1];
        if (!is_last) read_page(i + 1, next);
        const bool crowded = any_named(barrier, 128, list.crowded());
        multiply<1>(keys);
        list_page(i - 1, list, is_first ? -PAGE_TOKENS : length);
        sum_half(c[0], team, 0, keys.scales, scores);
        await_products<0>();
        receive(c[1]);
        multiply<0>(next);
        sum_half(c[1], team, 1, keys.scales, scores);
        await_products<0>();
        receive(c[0]);
        return crowded;
    }

    // Pages from `i` on, until there are no more or a list is crowded. Returns the first page that was not taken.
    __device__ __forceinline__ i32 take_pages(i32 i, i32 pages, PromptList& list, i32 length) {
        PageKeys even, odd;
        read_page(i, even);
        odd = even;
        multiply<0>(even);
        await_products<0>();
        receive(c[0]);
        bool is_first = true, is_last = i + 1 == pages;
        while (true) {
            bool crowded = take_page(i, is_first, is_last, even, odd, list, length);
            ++i, is_first = false;
            if (is_last) break;
            is_last = crowded || i + 1 == pages;
            crowded = take_page(i, false, is_last, odd, even, list, length);
            ++i;
            if (is_last) break;
            is_last = crowded || i + 1 == pages;
        }
        sync_named(barrier, 128);
        list_page(i - 1, list, length);
        return i;
    }
};

// All jobs of a team's tokens.
__device__ __forceinline__ void select_tokens(const PromptIndex& p, PromptShared& s) {
    const int number_of_team = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32;
    Team& team = s.teams[number_of_team];
    Selector selector{p, s, team, 1 + number_of_team, describe_queries(team.queries[0][0][0])};
    for (i32 number = p.jobs - 1 - static_cast<i32>(blockIdx.x); number >= 0; number -= gridDim.x) {
        const Job job = job_at(p, number);
        const i32 first = number_of_team * TEAM, token = first + warp, length = job.length(token);
        const i32 pages = job.pages(p.k);
        const u32 place = (blockIdx.x * GROUP + threadIdx.x / 32) * LISTED;
        PromptList list{{p.keys + place, p.positions + place, team.bins[warp]}, static_cast<u32>(p.k)};
        if (first < job.tokens && pages > 0) {
            sync_named(selector.barrier, 128);  // the products of the job before have read its queries
            stage_queries(p, job, first, team);
            publish_shared();
            sync_named(selector.barrier, 128);
            for (i32 i = 0; i < pages;) {
                i = selector.take_pages(i, pages, list, length > p.k ? length : 0);
                list.relieve();
            }
        } else {
            for (i32 i = 0; i < pages; ++i) {
                selector.await_page(i);
                selector.release_page(i);
            }
        }
        selector.turn += pages;
        const Job same = job_at(p, number);  // read again: registers are scarce while products are formed
        if (token < same.tokens) write_token(p, same, token, list);
    }
}

}  // namespace hisparse

extern "C" __global__ void __launch_bounds__(hisparse::PROMPT_THREADS, 1)
    prompt_index(const __grid_constant__ hisparse::PromptIndex p) {
    using namespace hisparse;
    extern __shared__ __align__(128) u8 dynamic[];
    PromptShared& s = *reinterpret_cast<PromptShared*>(dynamic);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            open_barrier(shared_address(s.full + i), 1);
            open_barrier(shared_address(s.empty + i), CONSUMER_THREADS / 32);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < CONSUMER_THREADS) {
        take_registers<240>();
        select_tokens(p, s);
    } else {
        give_registers<24>();
        if (threadIdx.x == CONSUMER_THREADS) bring_pages(p, s);
    }
}

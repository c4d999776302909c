// prompt_index: the top-k positions of every token of a block of prompts, scores and selection in one launch (Hopper).
//
// Keys are e4m3 with a scale each, or bfloat16 (KEY_BYTES 1, 2). Queries are bfloat16; for e4m3 keys they are quantized
// as keys are, by token and head (as the authors of DeepSeek-V3.2 quantize them), when a job begins.
//
//     GROUP tokens of one prompt, neighbours, are a job of a block of threads; blocks take jobs in turn, long contexts
//     first. Two teams of four warps have TEAM tokens each; a page of 64 keys is brought to shared memory once for both
//     by a warp of its own (bulk copies into a ring), and multiplied by all heads of a team's tokens in two products:
//     64 keys x half of a team's columns. While a half is summed, the products of the other half are formed.
//
//     Each thread has two keys of its warp's 16 and two heads of eight: it sums them with relu and weights, four lanes
//     divide the sums of two tokens among them, and a warp then takes the 64 scores of the one token that it selects for
//     (prompt_list.cuh), while it sums the next page. So no score leaves the multiprocessor but those that may be among
//     the best. Lists of a team are shortened together: its warps wait for each other.
//
//     Where jobs are fewer than multiprocessors, `splits` blocks share the keys of a job, in order of positions. The one
//     that ends last continues the list of the first with those of the others: the same scores, the same selection.
//
// Keys are multiplied from registers: their rows of 132 bytes are not what a matrix in shared memory may look like. Which
// dimension stands in which place of a product is free as long as both operands agree: a lane t reads words 8 t + i of
// an e4m3 key, and pairs of words of a bfloat16 key, whose row has a padding of 32 bytes, both without conflicts of banks.
// Queries stand in blocks of 8 heads x 16 bytes.
//
// Rejected: keys decoded to float16 (half the rate of products), a job of 4 tokens (twice the reads of keys), a launch for
// each prompt of a block, all columns of a team in one product (4.0 ms where halves take 2.8, 4,096 tokens at 32k), four
// teams of two tokens (3.1 ms: each of them reads the keys), relu by a saturating product on the other pipe (2.8 ms), a
// launch that quantizes queries (the bytes twice more), keys of the next page in registers of their own and weights read
// when they are needed (3.0 ms where this takes 2.85), products of a half kept together by a branch behind them (3.0 ms).
#pragma once

#include "barriers.cuh"
#include "memory.cuh"
#include "prompt_list.cuh"
#include "prompt_products.cuh"

namespace hisparse {

constexpr int TEAMS = 2, GROUP = TEAMS * TEAM;
constexpr int CONSUMER_THREADS = 128 * TEAMS, PROMPT_THREADS = CONSUMER_THREADS + 128;
constexpr int ALL_TEAMS = 1 + TEAMS;  // the named barrier of all consumers; those of each team are before
constexpr int KEY_ROW = 4 * WORDS + (KEY_BYTES == 1 ? 4 : 0);
constexpr int KEY_WORDS = KEY_BYTES == 1 ? WORDS + 1 : WORDS + 8;  // from one key to the next in shared memory
constexpr int PAGE_BYTES = PAGE_TOKENS * KEY_ROW, PAGE_COPIES = KEY_BYTES == 1 ? 1 : PAGE_TOKENS;
constexpr int HEAD_TILES = HEADS / 8;
constexpr int SCORE_STRIDE = 80;  // of a token: lanes of two tokens write to banks of their own
static_assert(PAGE_TOKENS == 64 && PAGE_BYTES % (16 * PAGE_COPIES) == 0, "a page is the rows of a product");

struct Team {
    u32 queries[STEPS][2][TILES][32];  // of 8 heads x 16 bytes: word 4 g + t of a block is head g, lane t's of the keys
    float4 weights[TEAM][HEAD_TILES / 2][4];  // of heads 16 n + 2 t, + 1, + 8 and + 9, with all scales but those of keys
    u32 scores[2][TEAM][SCORE_STRIDE];    // order keys of a page, for two pages in turn
    u32 bins[TEAM][RANGE_BINS];
};

struct PromptShared {
    u32 pages[STAGES][PAGE_TOKENS * KEY_WORDS];
    Team teams[TEAMS];
    u64 full[STAGES], empty[STAGES];
    i32 merges;
};
static_assert(sizeof(PromptShared) <= SHARED_BYTES, "as the launcher asks for");

// Where word `word` of a query stands, among the steps of the products and the halves of a step; the lane that has it.
struct QueryPlace {
    int step, half, t;
    __device__ __forceinline__ explicit QueryPlace(int word)
        : step(KEY_BYTES == 1 ? word % 8 / 2 : word / 8), half(word % 2), t(KEY_BYTES == 1 ? word / 8 : word % 8 / 2) {}
};

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

// One warp. A page that is not granted leaves in the ring what it held: its tokens select nothing in the end.
__device__ __forceinline__ void bring_pages(const PromptIndex& p, PromptShared& s) {
    const u8* const keys = p.state.index_keys + p.group * p.state.key_rows * KEY_ROW;
    const i32 lane = threadIdx.x % 32;
    u32 turn = 0;
    each_unit(p, [&](i32 unit) {
        const Job job = job_at(p, unit);
        const i32* const table = table_of(p, job);
        const i32 first = job.first_page(p), end = job.end_page(p);
        for (i32 base = first; base < end; base += 32) {
            const i32 held = base + lane < end ? table[base + lane] : -1;
            for (i32 i = 0; i < min(32, end - base); ++i, ++turn) {
                const i32 page = __shfl_sync(0xFFFFFFFF, held, i);
                const u32 slot = turn % STAGES, full = shared_address(s.full + slot);
                const bool granted = is_granted(p, page);
                if (lane == 0) {
                    await_phase(shared_address(s.empty + slot), turn / STAGES & 1 ^ 1);
                    arrive_expecting(full, granted ? PAGE_BYTES : 0);
                }
                __syncwarp();
                constexpr int BYTES = PAGE_BYTES / PAGE_COPIES, APART = 4 * PAGE_TOKENS * KEY_WORDS / PAGE_COPIES;
                for (i32 copy = lane; granted && copy < PAGE_COPIES; copy += 32)
                    fetch_bytes(reinterpret_cast<u8*>(s.pages[slot]) + copy * APART,
                                keys + static_cast<i64>(page) * PAGE_BYTES + copy * BYTES, BYTES, full);
            }
        }
    });
}

// A team's queries and weights into shared memory: eight lanes take a head of a token, each 16 of its values. `first` is
// the team's first token in the job.
__device__ __forceinline__ void stage_queries(const PromptIndex& p, const Job& job, i32 first, Team& team) {
    const int thread = threadIdx.x % 128, part = thread % 8;
    for (int column = thread / 8; column < TEAM * HEADS; column += 128 / 8) {
        const int token = first + column / HEADS, head = column % HEADS;
        const i64 row = static_cast<i64>(job.row + token) * HEADS + head;
        uint4 pairs[2] = {};
        float weight = 0;
        if (token < job.tokens) {
            const uint4* const from = static_cast<const uint4*>(p.queries) + row * (DIM / 8) + 2 * part;
            load_once(pairs[0], from), load_once(pairs[1], from + 1);
            weight = p.weights[row] * p.scale;
        }
        const u32 held[8] = {pairs[0].x, pairs[0].y, pairs[0].z, pairs[0].w,
                             pairs[1].x, pairs[1].y, pairs[1].z, pairs[1].w};
        const auto put = [&](int word, u32 value) {
            const QueryPlace at(word);
            team.queries[at.step][at.half][column / 8][4 * (column % 8) + at.t] = value;
        };
#if KEY_BYTES == 1
        float values[16], most = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            values[2 * i] = __uint_as_float(held[i] << 16);
            values[2 * i + 1] = __uint_as_float(held[i] & 0xFFFF0000u);
            most = fmaxf(most, fmaxf(fabsf(values[2 * i]), fabsf(values[2 * i + 1])));
        }
#pragma unroll
        for (int step = 1; step < 8; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, step));
        const float scale = most == 0 ? 1.0f : most * (1.0f / 448.0f);  // as kernels/cuda/encode_triton.py has it
#pragma unroll
        for (int i = 0; i < 4; ++i)
            put(4 * part + i, e4m3_of(__fdiv_rn(values[4 * i], scale), __fdiv_rn(values[4 * i + 1], scale),
                                      __fdiv_rn(values[4 * i + 2], scale), __fdiv_rn(values[4 * i + 3], scale)));
        weight *= scale;
#else
#pragma unroll
        for (int i = 0; i < 8; ++i) put(8 * part + i, held[i]);
#endif
        if (part == 0) {
            float4& four = team.weights[column / HEADS][head / 16][head % 8 / 2];
            reinterpret_cast<float*>(&four)[head / 8 % 2 * 2 + head % 2] = weight;
        }
    }
}

// A lane's weights of half a team: of its two heads of each eight.
struct Weights {
    float4 of[HALF][HEAD_TILES / 2];
    __device__ __forceinline__ void read(const Team& team, int half) {
#pragma unroll
        for (int token = 0; token < HALF; ++token)
#pragma unroll
            for (int pair = 0; pair < HEAD_TILES / 2; ++pair)
                load_shared(of[token][pair], &team.weights[half * HALF + token][pair][threadIdx.x % 4]);
    }
};

// Products of a half with its heads, summed: scores of its two tokens, as order keys of keys g and g + 8 of each warp's 16.
__device__ __forceinline__ void sum_half(const Products& c, const Weights& weights, int half, float2 scales,
                                         u32 (&scores)[TEAM][SCORE_STRIDE]) {
    static_assert(HALF == 2, "four lanes divide two keys of two tokens");
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % 128 / 32;
    float near[HALF][2] = {}, far[HALF][2] = {};  // each in two parts: sums wait for themselves less
#pragma unroll
    for (int pair = 0; pair < HEAD_TILES / 2; ++pair)
#pragma unroll
        for (int token = 0; token < HALF; ++token) {
            const float4 weight = weights.of[token][pair];
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
    scores[half * HALF + t / 2][16 * warp + g + 8 * odd] =
        prompt_order(KEY_BYTES == 1 ? sum * (odd ? scales.y : scales.x) : sum);
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

    // The best of `list`; all positions where those are at most k; none where a page is not granted.
    __device__ __forceinline__ void finish(const PromptList& list) const {
        if (length == 0) return;
        const i32 lane = threadIdx.x % 32, pages = (length + PAGE_TOKENS - 1) / PAGE_TOKENS;
        const i32* const table = table_of(p, job);
        bool granted = pages <= p.state.max_pages;
        for (i32 i = lane; granted && i < pages; i += 32) granted = is_granted(p, table[i]);
        granted = __all_sync(0xFFFFFFFF, granted);
        if (granted && chooses()) {
            list.finish(out());
            return;
        }
        for (i32 i = lane; i < p.k; i += 32) out().put(i, granted && i < length ? i : -1);
        if (lane == 0 && !granted) trip(p.state, UNGRANTED, 1);
    }
};

// Whether all other blocks of the job have saved their lists: the same in all consumers of a block.
__device__ __forceinline__ bool merges_job(const PromptIndex& p, const Job& job, PromptShared& s) {
    sync_named(ALL_TEAMS, CONSUMER_THREADS);
    if (threadIdx.x == 0) {
        __threadfence();
        s.merges = atomicAdd(p.arrived + job.number, 1) == p.splits - 1;
        if (s.merges) p.arrived[job.number] = 0;
        __threadfence();
    }
    sync_named(ALL_TEAMS, CONSUMER_THREADS);
    return s.merges;
}

// The list of a token over the lists of all blocks of its job. Those are jobs' `splits` in order of blocks, last first.
__device__ __forceinline__ PromptList merged(const PromptIndex& p, const Job& job, u32* bins) {
    const auto place_of = [&](i32 share) {
        const i32 block = p.jobs * p.splits - 1 - (job.number * p.splits + share);
        return static_cast<i64>(block) * GROUP + threadIdx.x / 32;
    };
    const uint4* const heads = reinterpret_cast<const uint4*>(p.heads);
    const i64 first = place_of(0);
    const ListPlace at{p.keys + first * LISTED, p.positions + first * LISTED, bins};
    const uint4 head = heads[first];
    PromptList list{at, static_cast<u32>(p.k), {head.x, head.y}, head.z, head.w};
    for (i32 share = 1; share < p.splits; ++share) {
        const i64 other = place_of(share);
        list.take_list(p.keys + other * LISTED, p.positions + other * LISTED, heads[other].x);
    }
    return list;
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
    u32 turn = 0;  // of the ring of pages, at page 0 of a job
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
        const u32* const near = s.pages[(turn + i) % STAGES] + (16 * warp + g) * KEY_WORDS;
        const u32* const far = near + 8 * KEY_WORDS;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#if KEY_BYTES == 1
            keys.a[step][0] = near[8 * t + 2 * step], keys.a[step][2] = near[8 * t + 2 * step + 1];
            keys.a[step][1] = far[8 * t + 2 * step], keys.a[step][3] = far[8 * t + 2 * step + 1];
#else
            const uint2 low = *reinterpret_cast<const uint2*>(near + 8 * step + 2 * t);
            const uint2 high = *reinterpret_cast<const uint2*>(far + 8 * step + 2 * t);
            keys.a[step][0] = low.x, keys.a[step][2] = low.y, keys.a[step][1] = high.x, keys.a[step][3] = high.y;
#endif
        }
#if KEY_BYTES == 1
        keys.scales = make_float2(__uint_as_float(near[WORDS]), __uint_as_float(far[WORDS]));
#endif
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
        const i32 near = i * PAGE_TOKENS + lane, far = near + 32;
        list.take(scores[lane], scores[lane + 32], near < length, far < length, near, far);
    }

    // Page `i`, of which `keys` are, and whose first half's products are being formed. Those of the second half are formed
    // while the first is summed, and those of the next page's first half while the second is. Without a next page
    // (`is_last`) these are formed of the same keys again, and not read. The scores of the page before are listed
    // meanwhile, which the team has written by then. Returns whether a list of the team was crowded before that.
    __device__ __forceinline__ bool take_page(i32 i, bool is_first, bool is_last, PageKeys& keys, PromptList& list,
                                              i32 length) {
        u32(&scores)[TEAM][SCORE_STRIDE] = team.scores[i & 1];
        const float2 scales = keys.scales;
        Weights weights;
        weights.read(team, 0);  // ahead of what is awaited: a load takes as long as some thirty sums
        const bool crowded = any_named(barrier, 128, list.crowded());
        await_products<0>();
        receive(c[0]);
        multiply<1>(keys);
        list_page(i - 1, list, is_first ? -PAGE_TOKENS : length);
        sum_half(c[0], weights, 0, scales, scores);
        weights.read(team, 1);
        await_products<0>();
        receive(c[1]);
        if (!is_last) read_page(i + 1, keys);
        multiply<0>(keys);
        sum_half(c[1], weights, 1, scales, scores);
        return crowded;
    }

    // Pages from `i` on, until there are no more or a list is crowded. Returns the first page that was not taken.
    __device__ __forceinline__ i32 take_pages(i32 i, i32 pages, PromptList& list, i32 length) {
        PageKeys keys;
        read_page(i, keys);
        multiply<0>(keys);
        bool is_first = true, is_last = i + 1 == pages;
        while (true) {
            const bool crowded = take_page(i, is_first, is_last, keys, list, length);
            ++i, is_first = false;
            if (is_last) break;
            is_last = crowded || i + 1 == pages;
        }
        await_products<0>();
        receive(c[0]);
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
    const u32 place = blockIdx.x * GROUP + threadIdx.x / 32;
    each_unit(p, [&](i32 unit) {
        const Job job = job_at(p, unit);
        const i32 first = number_of_team * TEAM, token = first + warp, length = job.length(token);
        const i32 begin = job.first_page(p), end = job.end_page(p);
        PromptList list{{p.keys + place * LISTED, p.positions + place * LISTED, team.bins[warp]}, static_cast<u32>(p.k)};
        selector.turn -= begin;
        if (first < job.tokens && begin < end) {
            sync_named(selector.barrier, 128);  // the products of the job before have read its queries
            stage_queries(p, job, first, team);
            publish_shared();
            sync_named(selector.barrier, 128);
            for (i32 i = begin; i < end;) {
                i = selector.take_pages(i, end, list, length > p.k ? length : 0);
                if (i < end) list.relieve();
            }
        } else {
            for (i32 i = begin; i < end; ++i) {
                selector.await_page(i);
                selector.release_page(i);
            }
        }
        selector.turn += end;
        const Job same = job_at(p, unit);  // read again: registers are scarce while products are formed
        const Selecting selecting{p, same, token, same.length(token)};
        if (p.splits > 1) {
            list.save(reinterpret_cast<uint4*>(p.heads) + place);
            if (!merges_job(p, same, s)) return;
            if (selecting.chooses()) list = merged(p, same, team.bins[warp]);
        }
        selecting.finish(list);
    });
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
        take_registers<232>();
        select_tokens(p, s);
    } else {
        give_registers<40>();
        if (threadIdx.x < CONSUMER_THREADS + 32) bring_pages(p, s);
    }
}

// prompt_index: the top-k positions of every token of a block of prompts, scores and selection in one launch (Hopper).
//
// Keys are e4m3 with a scale each, or bfloat16 (KEY_BYTES 1, 2); those of four bits (FP4) become e4m3 in registers, each with
// one scale (fp4_keys.cuh). Queries are bfloat16; for e4m3 keys they are quantized
// to e4m3, by token and head (as the authors of DeepSeek-V3.2 quantize them), when a job begins.
//
//     GROUP tokens of one prompt, neighbours, are a job of a block of threads; blocks take jobs in turn, long contexts
//     first. A block has warps of three kinds:
//
//     one warp    brings pages of 64 keys into a ring in shared memory (bulk copies)
//     TEAMS of 4  multiply. Each team takes every other page, by all heads of all tokens, CHUNK columns at a time, with
//                 keys in registers. While a chunk is summed, the products of the next one are formed. Scores go to a
//                 second ring, in pairs of pages
//     LISTERS     take the scores of a token each from there, 128 at a time, into its list (prompt_list.cuh). The ring
//                 is deep: products go on while lists are shortened and finished
//
//     No score leaves the multiprocessor but those that may be among the best.
//
// Products of e4m3 keys are float16: the scale of a query bounds them (prompt_products.cuh). Relu and a weight then take
// one instruction each for two heads, and a thread sums eight products in float16. A product with ones adds up the four
// lanes of a key in float32, and moves each token into its column. Products of bfloat16 keys are float32; behind relu they
// are multiplied by weights as tf32. Scores of a token are compared with each other alone: a factor of all is left out.
//
// Where jobs are fewer than multiprocessors, `splits` blocks share the keys of a job, in order of positions, and
// prompt_merge selects from their lists: the same scores, the same selection.
//
// Keys are multiplied from registers: their rows of 132 bytes are not what a matrix in shared memory may look like. A
// product reads them until it is awaited, and nothing protects them (PageKeys::hold). Which dimension stands in which
// place of a product is free as long as both operands agree: a lane t reads words 8 t + i of an e4m3 key, and words
// t + 4 i of a bfloat16 key, whose row has a padding of 16 bytes, both without conflicts of banks. Queries stand in
// blocks of 8 heads x 16 bytes.
//
// Rejected (4,096 tokens at 32k): keys decoded to float16 (half the rate of products), a job of 4 tokens (twice the reads
// of keys), a launch for each prompt of a block, a launch that quantizes queries (the bytes twice more), lists kept by the
// warps that multiply, with float32 products (2.9 ms where this takes 2.1), three teams, or lists of two tokens a warp
// (2.4), chunks of 256 columns (2.5), half as deep a ring of scores (2.4).
#pragma once

#include "barriers.cuh"
#include "prompt_job.cuh"
#include "prompt_products.cuh"
#if FP4
#include "fp4_keys.cuh"
#endif

namespace hisparse {

constexpr int TEAMS = 2, TEAM_THREADS = 128 * TEAMS;
constexpr int LISTERS = GROUP, LISTER_THREADS = 32 * LISTERS;
constexpr int PROMPT_THREADS = TEAM_THREADS + LISTER_THREADS + 128;  // registers are given and taken by four warps
constexpr int ALL_TEAMS = 1;                                         // a named barrier
constexpr int KEY_ROW = FP4 ? DIM / 2 + 4 : 4 * WORDS + (KEY_BYTES == 1 ? 4 : 0);
constexpr int KEY_WORDS = FP4 ? KEY_ROW / 4 : KEY_BYTES == 1 ? WORDS + 1 : WORDS + 4;  // from one key to the next in shared memory
constexpr int PAGE_BYTES = PAGE_TOKENS * KEY_ROW, PAGE_COPIES = KEY_BYTES == 1 ? 1 : PAGE_TOKENS;
constexpr int SCORE_STRIDE = TEAMS * PAGE_TOKENS + 4;  // of a token: lanes of a warp write to banks of their own
constexpr int HEADS_AHEAD = KEY_BYTES == 1 ? 4 : 1;  // whose queries a thread reads together
static_assert(PAGE_TOKENS == 64 && PAGE_BYTES % (16 * PAGE_COPIES) == 0, "a page is the rows of a product");

struct PromptShared {
    u32 pages[STAGES][PAGE_TOKENS * KEY_WORDS];
    u32 queries[STEPS][2][TILES][32];  // of 8 heads x 16 bytes: word 4 g + t of a block is head g, lane t's of the keys
    float weights[GROUP][HEADS + 8];   // with scales of queries, and without those of keys; for bfloat16 keys tf32
    uint4 pairs[GROUP][4][HEADS / 32];        // for e4m3 keys: weights of heads 8 n + 2 t and + 1, of lane t, as float16
    u32 scores[SCORED][GROUP][SCORE_STRIDE];  // order keys of TEAMS neighbouring pages
    u32 bins[LISTERS][RANGE_BINS];
    u64 full[STAGES], empty[STAGES], scored[SCORED], listed[SCORED];
};
static_assert(sizeof(PromptShared) <= SHARED_BYTES, "as the launcher asks for");

// Where word `word` of a query stands, among the steps of the products and the halves of a step; the lane that has it.
struct QueryPlace {
    int step, half, t;
    __device__ __forceinline__ explicit QueryPlace(int word)
        : step(KEY_BYTES == 1 ? word % 8 / 2 : word / 8),
          half(KEY_BYTES == 1 ? word % 2 : word % 8 / 4),
          t(KEY_BYTES == 1 ? word / 8 : word % 4) {}
};

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
                if (WARP_ARRIVALS == 32 || lane == 0) await_phase(shared_address(s.empty + slot), turn / STAGES & 1 ^ 1);
                if (lane == 0) arrive_expecting(full, granted ? PAGE_BYTES : 0);
                __syncwarp();
                constexpr int BYTES = PAGE_BYTES / PAGE_COPIES, APART = 4 * PAGE_TOKENS * KEY_WORDS / PAGE_COPIES;
                for (i32 copy = lane; granted && copy < PAGE_COPIES; copy += 32)
                    fetch_bytes(reinterpret_cast<u8*>(s.pages[slot]) + copy * APART,
                                keys + static_cast<i64>(page) * PAGE_BYTES + copy * BYTES, BYTES, full);
            }
        }
    });
}

// Sixteen values of a head of a query into their places; `weight` gets the scale, if they are quantized.
__device__ __forceinline__ void put_query(PromptShared& s, int column, int part, const uint4 (&pairs)[2], float& weight) {
    const u32 held[8] = {pairs[0].x, pairs[0].y, pairs[0].z, pairs[0].w, pairs[1].x, pairs[1].y, pairs[1].z, pairs[1].w};
    const auto put = [&](int word, u32 value) {
        const QueryPlace at(word);
        s.queries[at.step][at.half][column / 8][4 * (column % 8) + at.t] = value;
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
    const float scale = most == 0 ? 1.0f : most * (1.0f / QUERY_MOST), inverse = __fdiv_rn(1.0f, scale);
#pragma unroll
    for (int i = 0; i < 16; i += 4)
        put(4 * part + i / 4, pack_e4m3(values[i] * inverse, values[i + 1] * inverse, values[i + 2] * inverse,
                                        values[i + 3] * inverse));
    weight *= scale;
#else
#pragma unroll
    for (int i = 0; i < 8; ++i) put(8 * part + i, held[i]);
    weight = __uint_as_float(tf32_of(weight));
#endif
}

// A job's queries and weights into shared memory: eight lanes take a head of a token, each 16 of its values.
__device__ __forceinline__ void stage_queries(const PromptIndex& p, const Job& job, PromptShared& s) {
    constexpr int APART = TEAM_THREADS / 8;
    static_assert(GROUP * HEADS % (APART * HEADS_AHEAD) == 0, "as many for each thread");
    const int part = threadIdx.x % 8;
#pragma unroll 1
    for (int first = threadIdx.x / 8; first < GROUP * HEADS; first += APART * HEADS_AHEAD) {
        uint4 pairs[HEADS_AHEAD][2] = {};
        float weights[HEADS_AHEAD] = {};
#pragma unroll
        for (int n = 0; n < HEADS_AHEAD; ++n) {
            const int column = first + n * APART;
            const i64 row = static_cast<i64>(job.row + column / HEADS) * HEADS + column % HEADS;
            const uint4* const from = static_cast<const uint4*>(p.queries) + row * (DIM / 8) + 2 * part;
            if (column / HEADS < job.tokens) {
                load_once(pairs[n][0], from), load_once(pairs[n][1], from + 1);
                weights[n] = p.weights[row] * p.scale;
            }
        }
#pragma unroll
        for (int n = 0; n < HEADS_AHEAD; ++n) {
            const int column = first + n * APART;
            put_query(s, column, part, pairs[n], weights[n]);
            if (part == 0) s.weights[column / HEADS][column % HEADS] = weights[n];
        }
    }
}

#if KEY_BYTES == 1
// Each warp of the teams packs weights of a token, times a power of two that takes the largest to [1/16, 1/8): eight
// products by such weights are summed in float16. An infinite one, or no number, counts as 0.
__device__ __forceinline__ void pack_weights(PromptShared& s) {
    const int lane = threadIdx.x % 32, t = lane % 4, n = lane / 4, token = threadIdx.x / 32;
    static_assert(TEAM_THREADS / 32 == GROUP && HEADS <= 64, "a warp has a token, a lane a pair");
    const auto weight_of = [&](int head) {
        const float weight = head < HEADS ? s.weights[token][head] : 0;
        return fabsf(weight) < 1e38f ? weight : 0;
    };
    const float one = weight_of(8 * n + 2 * t), two = weight_of(8 * n + 2 * t + 1);
    const u32 most = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(fmaxf(fabsf(one), fabsf(two))));
    const float factor = __uint_as_float((250 - min(most >> 23, 249u)) << 23);
    if (n < HEADS / 8) reinterpret_cast<u32*>(s.pairs[token][t])[n] = float16_pair(one * factor, two * factor);
}
// Weights with which a lane sums the products of a chunk.
struct ChunkWeights {
    u32 of[CHUNK_TOKENS][HEADS / 8];
    __device__ __forceinline__ void read(const PromptShared& s, int chunk) {
#pragma unroll
        for (int i = 0; i < CHUNK_TOKENS; ++i)
#pragma unroll
            for (int n = 0; n < HEADS / 32; ++n) {
                uint4 four;
                load_shared(four, &s.pairs[chunk * CHUNK_TOKENS + i][threadIdx.x % 4][n]);
                of[i][4 * n] = four.x, of[i][4 * n + 1] = four.y, of[i][4 * n + 2] = four.z, of[i][4 * n + 3] = four.w;
            }
    }
};
#else
struct ChunkWeights {
    __device__ __forceinline__ void read(const PromptShared&, int) {}
};
#endif

// A lane's keys of a page: two rows of its warp's 16, as products take them.
struct PageKeys {
    u32 a[STEPS][4];
    float2 scales;
    // They stay in their registers up to here: products that are not awaited yet read them.
    __device__ __forceinline__ void hold() const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) hold_registers(a[step]);
    }
};

// A team of four warps: products of each TEAMS-th page of a job, and their scores.
struct Scorer {
    const PromptIndex& p;
    PromptShared& s;
    u32 turn = 0;    // of the ring of keys, at the first page of a job
    u32 scored = 0;  // of the ring of scores
    Products c[2];

    __device__ __forceinline__ void read_page(i32 i, PageKeys& keys) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % 128 / 32;
        const u32 at = turn + i;
        await_phase(shared_address(s.full + at % STAGES), at / STAGES & 1);
        const u32* const near = s.pages[at % STAGES] + (16 * warp + g) * KEY_WORDS;
        const u32* const far = near + 8 * KEY_WORDS;
#if FP4
        keys.scales.x = decode_quarter(near, t, [&](int step, u32 first, u32 second) {
            keys.a[step][0] = first, keys.a[step][2] = second;
        });
        keys.scales.y = decode_quarter(far, t, [&](int step, u32 first, u32 second) {
            keys.a[step][1] = first, keys.a[step][3] = second;
        });
#else
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int word = KEY_BYTES == 1 ? 8 * t + 2 * step + half : 8 * step + 4 * half + t;
                keys.a[step][2 * half] = near[word], keys.a[step][2 * half + 1] = far[word];
            }
#if KEY_BYTES == 1
        keys.scales = make_float2(__uint_as_float(near[WORDS]), __uint_as_float(far[WORDS]));
#endif
#endif
        arrive_warp(shared_address(s.empty + at % STAGES));
    }

    template <int CHUNK_NUMBER> __device__ __forceinline__ void multiply(const PageKeys& keys) {
        const u64 queries = describe_queries(s.queries[0][0][0]);
        open_products();
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            multiply_page(c[CHUNK_NUMBER % 2], keys.a[step],
                          queries + (CHUNK_NUMBER * (CHUNK / 8) * 128 >> 4) + step * (2 * TILES * 128 >> 4), step);
        commit_products();
    }

    // Products of a chunk into scores of its tokens: of keys g and g + 8 of the warp's 16, of tokens 2 t and 2 t + 1.
    __device__ __forceinline__ void sum_chunk(int chunk, const ChunkWeights& weights, float (&scores)[4]) const {
        const Products& of = c[chunk % 2];
#if KEY_BYTES == 1
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int pair = 0; pair < CHUNK_TOKENS; pair += 2) {
            u32 near[2] = {}, far[2] = {};
#pragma unroll
            for (int n = 0; n < HEADS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int tile = (pair + i) * HEADS / 8 + n;
                    add_weighed(near[i], of[2 * tile], weights.of[pair + i][n]);
                    add_weighed(far[i], of[2 * tile + 1], weights.of[pair + i][n]);
                }
            // Over the four lanes of a key, each token into its column.
            constexpr u32 ONES = 0x3C003C00;
            const int token = chunk * CHUNK_TOKENS + pair;
            add_product(scores, near[0], far[0], near[1], far[1], g == token ? ONES : 0, g == token + 1 ? ONES : 0);
        }
#else
#pragma unroll
        for (int i = 0; i < CHUNK_TOKENS; ++i) {
            const int token = chunk * CHUNK_TOKENS + i;
            const float* const weight = s.weights[threadIdx.x % 32 / 4] + 2 * (threadIdx.x % 4);
            float sums[4] = {};
#pragma unroll
            for (int n = 0; n < HEADS / 8; ++n) {
                const u32* const at = of + 4 * (i * HEADS / 8 + n);
                const uint2 two = *reinterpret_cast<const uint2*>(weight + 8 * n);
                add_product(sums, relu_of(at[0]), relu_of(at[2]), relu_of(at[1]), relu_of(at[3]), two.x, two.y);
            }
            if (static_cast<int>(threadIdx.x % 4) == token / 2)
                scores[token % 2] = sums[token % 2], scores[2 + token % 2] = sums[2 + token % 2];
        }
#endif
    }

    template <int CHUNK_NUMBER>
    __device__ __forceinline__ void take_chunks(const PageKeys& keys, ChunkWeights& weights, float (&scores)[4]) {
        if constexpr (CHUNK_NUMBER + 1 < CHUNKS) {
            weights.read(s, CHUNK_NUMBER);
            await_products<0>();
            receive(c[CHUNK_NUMBER % 2]);
            multiply<CHUNK_NUMBER + 1>(keys);
            sum_chunk(CHUNK_NUMBER, weights, scores);
            take_chunks<CHUNK_NUMBER + 1>(keys, weights, scores);
        }
    }

    template <class Put> __device__ __forceinline__ void put_scores(u32 at, Put put) const {
        const u32 slot = at % SCORED;
        await_phase(shared_address(s.listed + slot), at / SCORED & 1 ^ 1);
        put(s.scores[slot]);
        arrive_warp(shared_address(s.scored + slot));
    }
    // Scores of this team's page among the pages `at`.
    __device__ __forceinline__ void put_page(u32 at, float2 scales, const float (&scores)[4]) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, key = threadIdx.x / 32 * 16 + g;
        put_scores(at, [&](u32(&to)[GROUP][SCORE_STRIDE]) {
#pragma unroll
            for (int n = 0; n < 4; ++n)
                to[2 * t + n % 2][key + n / 2 * 8] =
                    prompt_order(KEY_BYTES == 1 ? scores[n] * (n / 2 ? scales.y : scales.x) : scores[n]);
        });
    }

    // Page `i`, of which `keys` are, and whose first chunk's products are being formed; behind it, those of page `next`,
    // if there is one: else they are formed of the same keys again, and not read.
    __device__ __forceinline__ void take_page(i32 i, i32 next, i32 end, PageKeys& keys, ChunkWeights& weights) {
        float scores[4] = {};
        const float2 scales = keys.scales;
        take_chunks<0>(keys, weights, scores);
        weights.read(s, CHUNKS - 1);
#if KEY_BYTES == 1
        PageKeys later = keys;
        if (next < end) read_page(next, later);
        await_products<0>();
        keys.hold();
        keys = later;
#else  // registers allow no second set
        await_products<0>();
        if (next < end) read_page(next, keys);
#endif
        receive(c[(CHUNKS - 1) % 2]);
        multiply<0>(keys);
        sum_chunk(CHUNKS - 1, weights, scores);
        put_page(scored++, scales, scores);
    }

    __device__ __forceinline__ void take_pages(i32 i, i32 end) {
        if (i < end) {
            PageKeys keys;
            ChunkWeights weights;
            read_page(i, keys);
            multiply<0>(keys);
#pragma unroll 1
            for (; i < end; i += TEAMS) take_page(i, i + TEAMS, end, keys, weights);
            await_products<0>();
            receive(c[0]);
        }
    }
};

// All jobs of the teams.
__device__ __forceinline__ void score_pages(const PromptIndex& p, PromptShared& s) {
    Scorer scorer{p, s};
    each_unit(p, [&](i32 unit) {
        const Job job = job_at(p, unit);
        const i32 begin = job.first_page(p), pages = job.end_page(p) - begin;
        if (pages == 0) return;
        sync_named(ALL_TEAMS, TEAM_THREADS);  // the products of the job before have read its queries
        stage_queries(p, job, s);
        publish_shared();
        sync_named(ALL_TEAMS, TEAM_THREADS);
#if KEY_BYTES == 1
        pack_weights(s);
        sync_named(ALL_TEAMS, TEAM_THREADS);
#endif
        scorer.take_pages(__shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0), pages);
        if (static_cast<i32>(threadIdx.x / 128) > (pages - 1) % TEAMS)  // no page is left for this team
            scorer.put_scores(scorer.scored++, [](auto&) {});
        scorer.turn += pages;
    });
}

// The end of a token's list, whose best `put` writes, unless the token takes all positions, or a page is not granted.
template <class Put> __device__ __forceinline__ void finish(const PromptIndex& p, i32 unit, int token, Put put) {
    const Job job = job_at(p, unit);  // read again: registers are scarce
    const Selecting selecting{p, job, token, job.length(token)};
    if (selecting.chooses() && selecting.granted())
        put(selecting.out());
    else if (selecting.length > 0)
        selecting.take_all();
}

// All jobs of the warps that list, each for a token.
__device__ __forceinline__ void list_scores(const PromptIndex& p, PromptShared& s) {
    static_assert(32 * TAKEN == TEAMS * PAGE_TOKENS, "scores of as many pages are taken together");
    const i32 lane = threadIdx.x % 32;
    const int number = (threadIdx.x - TEAM_THREADS) / 32;
    u32 turn = 0;
    each_unit(p, [&](i32 unit) {
        const Job job = job_at(p, unit);
        const i32 end = PAGE_TOKENS * job.end_page(p), length = job.length(number), last = length > p.k ? min(length, end) : 0;
        const u32 place = blockIdx.x * GROUP + number;
        PromptList<LIST_READS> list{{p.lists + static_cast<u64>(place) * (2 * LISTED), s.bins[number]}, static_cast<u32>(p.k)};
#pragma unroll 1
        for (i32 first = PAGE_TOKENS * job.first_page(p);; first += 32 * TAKEN, ++turn) {
            const bool is_over = first >= end;
            if (is_over ? last > 0 && p.splits == 1 : list.crowded()) {
                const Cut cut = list.cut(is_over);
                if (is_over)
                    finish(p, unit, number, [&](const ListOut& out) { list.put(cut, out); });
                else
                    list.keep(cut);
            }
            if (is_over) break;
            const u32 slot = turn % SCORED;
            await_phase(shared_address(s.scored + slot), turn / SCORED & 1);
            u32 keys[TAKEN];
#pragma unroll
            for (int i = 0; i < TAKEN; ++i) keys[i] = s.scores[slot][number][lane + 32 * i];
            arrive_warp(shared_address(s.listed + slot));
            list.take(keys, first + lane, last);
        }
        if (p.splits > 1) {
            list.save(reinterpret_cast<uint4*>(p.heads) + place);
            return;
        }
        if (last == 0) finish(p, unit, number, [](const ListOut&) {});
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
            open_barrier(shared_address(s.empty + i), 4 * WARP_ARRIVALS);
        }
        for (int i = 0; i < SCORED; ++i) {
            open_barrier(shared_address(s.scored + i), TEAM_THREADS / 32 * WARP_ARRIVALS);
            open_barrier(shared_address(s.listed + i), LISTERS * WARP_ARRIVALS);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < TEAM_THREADS) {
        take_registers<TEAM_REGISTERS>();
        score_pages(p, s);
    } else if (threadIdx.x < TEAM_THREADS + LISTER_THREADS) {
        give_registers<LISTER_REGISTERS>();
        list_scores(p, s);
    } else {
        give_registers<32>();
        if (threadIdx.x < TEAM_THREADS + LISTER_THREADS + 32) bring_pages(p, s);
    }
}

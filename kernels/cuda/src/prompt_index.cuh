// prompt_index: the top-k positions of every token of a block of prompts, scores and selection in one launch (Hopper).
//
// Keys and queries are e4m3 with a scale each (as the authors of DeepSeek-V3.2 quantize queries, by token and head).
//
//     GROUP tokens of one prompt, neighbours, are a job of a block of threads; blocks take jobs in turn, long contexts
//     first. Two teams of four warps have TEAM tokens each; a page of 64 keys is brought to shared memory once for both
//     by a warp of its own (bulk copies into a ring), and multiplied by all heads of a team's tokens in one product:
//     64 keys x TEAM * HEADS columns. While one team sums its products, the other multiplies.
//
//     Each thread has two keys of its warp's 16 and two heads of eight: it sums them with relu and weights, four lanes
//     divide the tokens among them, and a warp then takes the 64 scores of the one token that it selects for
//     (prompt_list.cuh). So no score leaves the multiprocessor but those that may be among the best.
//
// Keys are multiplied from registers: their rows of 132 bytes are not what a matrix in shared memory may look like. Which
// dimension stands in which place of a product is free as long as both operands agree, so that a lane t reads words
// 8 t + i of a key, without conflicts of banks. Queries stand in blocks of 8 heads x 16 places.
//
// Rejected: keys decoded to float16 (half the rate of products), a job of 4 tokens (twice the reads of keys), a launch for
// each prompt of a block.
#pragma once

#include "barriers.cuh"
#include "memory.cuh"
#include "prompt_list.cuh"

namespace hisparse {

constexpr int TEAMS = 2, TEAM = 4, GROUP = TEAMS * TEAM;
constexpr int CONSUMER_THREADS = 128 * TEAMS, PROMPT_THREADS = CONSUMER_THREADS + 128;
constexpr int DIM = 128, KEY_ROW = DIM + 4, PAGE_BYTES = PAGE_TOKENS * KEY_ROW;
constexpr int STEPS = DIM / 32, TILES = TEAM * HEADS / 8, HEAD_TILES = HEADS / 8;
constexpr int SCORE_STRIDE = 72;  // of a token: lanes of four tokens write to banks of their own
static_assert(HEADS == 64 || HEADS == 32, "as wide as the products written here");
static_assert(PAGE_TOKENS == 64 && PAGE_BYTES % 16 == 0, "a page is the rows of a product, and one copy");

struct Team {
    u32 queries[STEPS][2][TILES][32];  // of 8 heads x 16 places: word 4 g + t of a block is head g, places 4 t..
    float2 weights[TEAM][HEAD_TILES][4];  // of heads 8 n + 2 t and 8 n + 2 t + 1, with both scales
    u32 scores[2][TEAM][SCORE_STRIDE];    // order keys of a page, for two pages in turn
    u32 bins[TEAM][RANGE_BINS];
};

struct PromptShared {
    u8 pages[STAGES][PAGE_BYTES];
    Team teams[TEAMS];
    u64 full[STAGES], empty[STAGES];
    i32 granted[STAGES];
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
            const bool granted = page >= 0 && page < held;
            s.granted[slot] = granted;
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
__device__ __forceinline__ void multiply_page(float (&c)[TILES][4], const u32 (&a)[4], u64 b, int step) {
#if HEADS == 64
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"
        "%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,"
        "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,"
        "%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, {%128, %129, %130, %131}, %132, p, 1, 1; }"
        : THIRTYTWO(0), THIRTYTWO(8), THIRTYTWO(16), THIRTYTWO(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
#else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"
        "%57,%58,%59,%60,%61,%62,%63}, {%64, %65, %66, %67}, %68, p, 1, 1; }"
        : THIRTYTWO(0), THIRTYTWO(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(step));
#endif
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
    constexpr int WORDS = DIM / 4;
    const int thread = threadIdx.x % 128;
    for (int i = thread; i < TEAM * HEADS * WORDS; i += 128) {
        const int word = i % WORDS, column = i / WORDS, token = first + column / HEADS;
        const int t = word / 8, step = word % 8 / 2, half = word % 2;  // as lanes read keys
        u32 four = 0;
        if (token < job.tokens) {
            const i64 row = static_cast<i64>(job.row + token) * HEADS + column % HEADS;
            four = *reinterpret_cast<const u32*>(p.queries + row * KEY_ROW + 4 * word);
        }
        team.queries[step][half][column / 8][4 * (column % 8) + t] = four;
    }
    for (int i = thread; i < TEAM * HEADS; i += 128) {
        const int head = i % HEADS, token = first + i / HEADS;
        float weight = 0;
        if (token < job.tokens) {
            const i64 row = static_cast<i64>(job.row + token) * HEADS + head;
            weight = p.weights[row] * p.scale * *reinterpret_cast<const float*>(p.queries + row * KEY_ROW + DIM);
        }
        reinterpret_cast<float*>(team.weights[i / HEADS][head / 8])[head % 8] = weight;
    }
}

__device__ __forceinline__ float prompt_relu(float v) {
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(v));
    return v;
}

// Products of a page with a team's heads as scores: order keys of token t, keys g and g + 8 of each warp's 16.
__device__ __forceinline__ void sum_page(const float (&c)[TILES][4], const float2& scales, const Team& team,
                                         u32 (&scores)[TEAM][SCORE_STRIDE]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % 128 / 32;
    float near[TEAM] = {}, far[TEAM] = {};
#pragma unroll
    for (int token = 0; token < TEAM; ++token)
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) {
            const float2 weight = team.weights[token][n][t];
            const float(&four)[4] = c[token * HEAD_TILES + n];
            near[token] = fmaf(prompt_relu(four[0]), weight.x, near[token]);
            near[token] = fmaf(prompt_relu(four[1]), weight.y, near[token]);
            far[token] = fmaf(prompt_relu(four[2]), weight.x, far[token]);
            far[token] = fmaf(prompt_relu(four[3]), weight.y, far[token]);
        }
    // Four lanes hold parts of four tokens: each ends with the sums of one.
    const bool upper = t & 2, odd = t & 1;
    float low[2], high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        low[i] = (upper ? near[2 + i] : near[i]) +
                 __shfl_xor_sync(0xFFFFFFFF, upper ? near[i] : near[2 + i], 2);
        high[i] = (upper ? far[2 + i] : far[i]) + __shfl_xor_sync(0xFFFFFFFF, upper ? far[i] : far[2 + i], 2);
    }
    const float first = (odd ? low[1] : low[0]) + __shfl_xor_sync(0xFFFFFFFF, odd ? low[0] : low[1], 1);
    const float second = (odd ? high[1] : high[0]) + __shfl_xor_sync(0xFFFFFFFF, odd ? high[0] : high[1], 1);
    scores[t][16 * warp + g] = prompt_order(first * scales.x);
    scores[t][16 * warp + g + 8] = prompt_order(second * scales.y);
}

// A token that takes all positions, or one of whose pages is not granted.
__device__ __forceinline__ void write_plain(const PromptIndex& p, const Job& job, i32 token, bool granted) {
    const i32 lane = threadIdx.x % 32, length = job.length(token);
    if (granted) {
        const i32* const table = p.state.index_table + static_cast<i64>(job.seat) * p.state.max_pages;
        bool sound = true;
        for (i32 i = lane; i < (length + PAGE_TOKENS - 1) / PAGE_TOKENS; i += 32)
            sound &= static_cast<u32>(table[i]) < static_cast<u32>(p.state.key_rows / PAGE_TOKENS);
        granted = __all_sync(0xFFFFFFFF, sound);
    }
    i32* const out = p.topk_out + static_cast<i64>(job.row + token) * p.k;
    for (i32 i = lane; i < p.k; i += 32) out[i] = granted && i < length ? i : -1;
    if (lane == 0 && !granted) trip(p.state, UNGRANTED, 1);
}

// All jobs of a team's tokens.
__device__ __forceinline__ void select_tokens(const PromptIndex& p, PromptShared& s) {
    const int number_of_team = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4, barrier = 1 + number_of_team;
    Team& team = s.teams[number_of_team];
    const i64 place = static_cast<i64>(blockIdx.x) * GROUP + threadIdx.x / 32;
    u32 turn = 0;
    for (i32 number = p.jobs - 1 - static_cast<i32>(blockIdx.x); number >= 0; number -= gridDim.x) {
        const Job job = job_at(p, number);
        const i32 first = number_of_team * TEAM, token = first + warp, length = job.length(token);
        const i32 pages = job.pages(p.k);
        const bool works = first < job.tokens;
        i32 missing = pages;  // first page that is not granted
        PromptList list{{p.keys + place * LISTED, p.positions + place * LISTED, team.bins[warp]},
                        static_cast<u32>(p.k), {0, 0}, 0xFFFFFFFF, 0};
        sync_named(barrier, 128);  // the products of the job before have read its queries
        if (pages > 0 && works) stage_queries(p, job, first, team);
        publish_shared();
        sync_named(barrier, 128);
        for (i32 i = 0; i < pages; ++i, ++turn) {
            const u32 slot = turn % STAGES;
            await_phase(shared_address(s.full + slot), turn / STAGES & 1);
            const u32* const words = reinterpret_cast<const u32*>(s.pages[slot] + (16 * warp + g) * KEY_ROW);
            u32 a[STEPS][4];
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                a[step][0] = words[8 * t + 2 * step], a[step][2] = words[8 * t + 2 * step + 1];
                a[step][1] = words[2 * KEY_ROW + 8 * t + 2 * step];
                a[step][3] = words[2 * KEY_ROW + 8 * t + 2 * step + 1];
            }
            const float2 scales = make_float2(__uint_as_float(words[DIM / 4]), __uint_as_float(words[2 * KEY_ROW + DIM / 4]));
            if (!s.granted[slot]) missing = min(missing, i);
            __syncwarp();
            if (lane == 0) arrive(shared_address(s.empty + slot));
            if (!works) continue;
            float c[TILES][4];
            open_products();
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                multiply_page(c, a[step], describe_queries(team.queries[step][0][0]), step);
            commit_products();
            await_products<0>();
            sum_page(c, scales, team, team.scores[turn & 1]);
            sync_named(barrier, 128);
            const i32 base = i * PAGE_TOKENS;
            const u32* const scores = team.scores[turn & 1][warp];
            if (length > p.k)
                list.take(scores[lane], scores[lane + 32], base + lane < length, base + 32 + lane < length, base);
        }
        if (token < job.tokens) {
            const bool granted = pages == 0 || missing * PAGE_TOKENS >= length;
            if (length > p.k && granted)
                list.finish(p.topk_out + static_cast<i64>(job.row + token) * p.k);
            else
                write_plain(p, job, token, granted);
        }
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
        take_registers<232>();
        select_tokens(p, s);
    } else {
        give_registers<40>();
        if (threadIdx.x == CONSUMER_THREADS) bring_pages(p, s);
    }
}

// attend_rows on Hopper: HEADS heads of one batch row over one span of its entries, by a pair of thread blocks. The contract
// of kernels/attention.py for 512 latents and 64 rope values, queries in bfloat16, rows in bfloat16 or fp8.
//
//     block H of a pair    latents 256 H .. 256 H + 255 and rope values 32 H .. 32 H + 31 of queries and rows: half of each
//                          product of a query and a key, and half of the sum
//     gatherers            that half of each 64 rows into a stage; fp8 ones become bfloat16 on the way
//     group W              HEADS = 128: heads 64 W .. 64 W + 63 over all blocks of 64 rows
//                          HEADS = 64: all heads over blocks W, W + 2, ...
//
// Each row is so read and decoded once a pair. A group sends its half of a block's scores to the same group of the other
// block, thread to thread, and adds what it gets: both have the same scores, bit for bit, and form the same shares. Groups of
// a block do not wait for each other: while one's scores are on their way the other's products keep the tensor cores busy.
// Where scores are AHEAD, a group's own products of the next scores do so too.
//
// A block of rows is key and value: four tiles of 64 dimensions, 64 rows x 128 bytes each, in wgmma's 128-byte swizzle, and
// half of a fifth. As keys its rows are B by columns, as values the four tiles are B by rows. Shares go from registers into
// the product, sums stay in registers.
//
// Shares are exp2(score - level) with a level per head that lags behind the highest score by up to SLACK: shares then
// stay below 2**SLACK, and sums need rescaling only where a block passes that (the first one, and few after).
//
// SINKS: a head has one more logit, which no row has. Its share joins the weight behind the loop, once a result: who divides by
// the weight adds it. The loop is the same with sinks and without.
//
// The splits of a result are pairs of the same cluster. Its parts (by split and, where groups have rows, by group) stay in
// shared memory; then every block adds up a share of its half of the result over all of them.
//
// Rejected: whole rows in each block, 64 heads each, blocks of 32 rows for two groups in turn (a product of 32 columns of
// scores takes longer to read its queries than to multiply; each row is read twice, or decoded halves of rows are exchanged,
// as many bytes as scores are); partial results in global memory and a second kernel that adds them up (30 us of 53 for 16
// requests); bulk copies (rows must be swizzled on arrival, which only tiled copies of a tensor map do, a tile of a row at a
// time); pairs that go from one result to the next (a fifth slower).
#pragma once

#include "attend_gather.cuh"

namespace hisparse {

__device__ __forceinline__ float none() { return __uint_as_float(0xFF800000); }

// What a thread holds: heads g and g + 8 of its warp's 16, as wgmma lays accumulators out.
struct Attention {
    // part i of all: head i / 2 % 2, latents 8 (i / 4) + 2 t + i % 2 of the block's
    float sums[HALF / COLUMNS][COLUMNS / 2];
    float scores[32];  // likewise, rows of a block of rows; before scaling
    u32 own[AHEAD ? SENT_WORDS : 1];  // this block's half of scores, as it is sent
    float level[2], weight[2];
    u32 shares[16];    // four for each 16 rows, as wgmma wants an operand

    __device__ __forceinline__ float& sum(int i) { return sums[i / (COLUMNS / 2)][i % (COLUMNS / 2)]; }
    __device__ __forceinline__ const float& sum(int i) const { return sums[i / (COLUMNS / 2)][i % (COLUMNS / 2)]; }
};

// Sixteen scores as they are sent: the upper 24 bits of four in three words.
constexpr u32 SENT = 0xFFFFFF00;
__device__ __forceinline__ void pack(u32 (&words)[16], const float* scores) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const u32 a = __float_as_uint(scores[i]), b = __float_as_uint(scores[i + 1]);
        const u32 c = __float_as_uint(scores[i + 2]), d = __float_as_uint(scores[i + 3]);
        u32* const to = words + i / 4 * 3;
        to[0] = __byte_perm(a, b, 0x5321), to[1] = __byte_perm(b, c, 0x6532), to[2] = __byte_perm(c, d, 0x7653);
    }
}
__device__ __forceinline__ void unpack(u32 (&scores)[4], const u32* words) {
    scores[0] = words[0] << 8, scores[1] = __byte_perm(words[0], words[1], 0x5430) & SENT;
    scores[2] = __byte_perm(words[1], words[2], 0x4320) & SENT, scores[3] = words[2] & SENT;
}
// Sixteen scores from both halves, as they were sent: both blocks of a pair add the same.
__device__ __forceinline__ void add_packed(float* scores, const u32* own, const u32* words) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        u32 ours[4], others[4];
        unpack(ours, own + i / 4 * 3), unpack(others, words + i / 4 * 3);
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[i + j] = __uint_as_float(ours[j]) + __uint_as_float(others[j]);
    }
}
// Likewise, to this block's half.
__device__ __forceinline__ void add_packed(float* scores, const u32* words) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const u32* const from = words + i / 4 * 3;
        const u32 others[4] = {from[0] << 8, __byte_perm(from[0], from[1], 0x5430), __byte_perm(from[1], from[2], 0x4320),
                               from[2]};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            scores[i + j] = __uint_as_float(__float_as_uint(scores[i + j]) & SENT) + __uint_as_float(others[j] & SENT);
    }
}

// To the highest scores of the block of rows; `highest`: of this thread's.
__device__ __forceinline__ void raise_levels(Attention& a, const float (&highest)[2]) {
    float fade[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float all = fmaxf(highest[half], __shfl_xor_sync(0xFFFFFFFF, highest[half], 1));
        all = fmaxf(all, __shfl_xor_sync(0xFFFFFFFF, all, 2));
        const float raised = fmaxf(a.level[half], all);
        fade[half] = raised == none() ? 1.0f : exp2_of(a.level[half] - raised);
        a.level[half] = raised;
        a.weight[half] *= fade[half];
    }
#pragma unroll
    for (int i = 0; i < HALF / 2; ++i) a.sum(i) *= fade[i / 2 % 2];
}

// Operands of the products of a turn's scores.
struct Operands {
    u32 queries, rows, rope_queries, ropes;
};

// The blocks of rows of group W. Group and stage are compile-time constants: descriptors are then constants too, instead of a
// few instructions and a wait ahead of each product. Not so where scores are AHEAD: what ptxas keeps of such constants from
// turn to turn leaves too few registers for two turns' scores, so that stages are counted, and descriptors start from memory.
template <int W> struct Turns {
    static constexpr int FIRST = ROW_GROUPS == 2 ? W : 0, ROUND = STAGES / ROW_GROUPS;  // turns until a stage is used again
    static constexpr int HEAD_GROUP = HEAD_GROUPS == 2 ? W : 0;
    const AttendRows& p;
    const Task& task;
    Shared& s;
    int turns;

    template <int N> static constexpr int STAGE = FIRST + N % ROUND * ROW_GROUPS;  // of turn N

    __device__ __forceinline__ void await_rows(int stage, int round) const {
        await(s.full[stage], round);
        publish_shared();
        __syncwarp();
    }
    __device__ __forceinline__ void multiply_keys_by(const Operands& by, float (&scores)[32]) const {
        open_products();
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int step = 0; step < 4; ++step)
                multiply_keys(scores, describe(by.queries, tile * TILE_BYTES + 32 * step),
                              describe(by.rows, tile * TILE_BYTES + 32 * step), tile + step);
#pragma unroll
        for (int step = 0; step < 2; ++step)
            multiply_keys(scores, describe(by.rope_queries, 32 * step), describe(by.ropes, 32 * step), 1);
        commit_products();
    }
    __device__ __forceinline__ void multiply_latents_of(u32 rows, Attention& a) const {
        open_products();
#pragma unroll
        for (int step = 0; step < BLOCK / 16; ++step)
#pragma unroll
            for (int i = 0; i < HALF / COLUMNS; ++i)
                multiply_latents(a.sums[i], a.shares + 4 * step, describe(rows, step * 2048 + i * (2 * TILE_BYTES), TILE_BYTES));
        commit_products();
    }
    template <int N> __device__ __forceinline__ void issue_scores(Attention& a, int n) const {
        await_rows(STAGE<N>, n / ROUND);
        const u32 queries = operand(s.queries[HEAD_GROUP]), rows = operand(s.rows[STAGE<N>]);
        const u32 rope_queries = operand(s.rope_queries), ropes = operand(s.ropes[STAGE<N> / 2]);
        multiply_keys_by({queries, rows, rope_queries + HEAD_GROUP * (64 >> 4), ropes + STAGE<N> % 2 * (64 >> 4)}, a.scores);
    }
    template <int N> __device__ __forceinline__ void issue_sums(Attention& a) const {
        multiply_latents_of(operand(s.rows[STAGE<N>]), a);
    }
    // This warp has read a stage.
    template <int N> __device__ __forceinline__ void leave() const {
        if (threadIdx.x % 32 == 0) arrive(s.empty[STAGE<N>]);
    }
    // Two entries of turn n's block of rows, those of this lane.
    __device__ __forceinline__ int2 look_up(int n) const {
        const int first = task.begin + (FIRST + n * ROW_GROUPS) * BLOCK + threadIdx.x % 32;
        return {task.place(first), task.place(first + 32)};
    }
    // This block's half of the scores of turn n, which are there, to the other block.
    __device__ __forceinline__ void send(Attention& a, int n) const {
        const int thread = threadIdx.x % GROUP;
        if (n > 0) await(s.taken[W], n - 1);
        if (thread == 0) arrive_expecting(shared_address(&s.sent[W]), SENT_BYTES);
        const u32 there = peer_address(shared_address(s.scores[W]) + 16 * thread, task.peer());
        const u32 sent_there = peer_address(shared_address(&s.sent[W]), task.peer());
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            take_scores(a.scores + 16 * half);
            u32 words[16];
            pack(words, a.scores + 16 * half);
            if constexpr (AHEAD)
#pragma unroll
                for (int i = 0; i < SENT_WORDS / 2; ++i) a.own[SENT_WORDS / 2 * half + i] = words[i];
#pragma unroll
            for (int i = 0; i < SENT_WORDS / 8; ++i)
                send_there(there + (SENT_WORDS / 8 * half + i) * (16 * GROUP), words + 4 * i, sent_there);
        }
    }
    // The scores of turn n: this block's half, which is sent, and the other block's.
    __device__ __forceinline__ void receive(Attention& a, float (&scores)[32], int n) const {
        await(s.sent[W], n);
        const uint4* const from = reinterpret_cast<const uint4*>(s.scores[W]) + threadIdx.x % GROUP;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 words[16];
#pragma unroll
            for (int i = 0; i < SENT_WORDS / 8; ++i) {
                const uint4 v = from[(SENT_WORDS / 8 * half + i) * GROUP];
                words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
            }
            if constexpr (AHEAD) add_packed(scores + 16 * half, a.own + SENT_WORDS / 2 * half, words);
            else add_packed(scores + 16 * half, words);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive_there(peer_address(shared_address(&s.taken[W]), task.peer()));
    }
    // Shares from scores; sums of blocks before are there.
    __device__ __forceinline__ void share_out(Attention& a, float (&scores)[32], const int2& entries) const {
        const u32 low = __ballot_sync(0xFFFFFFFF, entries.x >= 0), high = __ballot_sync(0xFFFFFFFF, entries.y >= 0);
        if (~(low & high)) {
            const int t = threadIdx.x % 4;
            const u32 held[2] = {low >> 2 * t, high >> 2 * t};
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (!(held[i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1)) scores[i] = none();
        }
        float highest[2] = {none(), none()};
#pragma unroll
        for (int i = 0; i < 32; ++i) highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], scores[i]);
        highest[0] *= p.scale, highest[1] *= p.scale;
        const bool beyond = highest[0] > a.level[0] + SLACK || highest[1] > a.level[1] + SLACK;
        if (__any_sync(0xFFFFFFFF, beyond)) raise_levels(a, highest);
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float level = a.level[half] == none() ? 0.0f : a.level[half];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float x = exp2_of(fmaf(scores[4 * j + 2 * half], p.scale, -level));
                const float y = exp2_of(fmaf(scores[4 * j + 2 * half + 1], p.scale, -level));
                a.weight[half] += x + y;
                a.shares[2 * j + half] = pair_of(x, y);
            }
        }
    }
    // Turn n, whose half scores are sent, and scores of the next.
    template <int N> __device__ __forceinline__ void turn(Attention& a, int n) const {
        const int2 entries = look_up(n);
        receive(a, a.scores, n);
        share_out(a, a.scores, entries);
        if (n + 1 < turns) {  // each way with products of its own, or ptxas waits for every one
            issue_scores<N + 1>(a, n + 1);
            issue_sums<N>(a);
            await_products<1>();
            send(a, n + 1);
            await_products<0>();
        } else {
            issue_sums<N>(a);
            await_products<0>();
        }
        hold_shares(a.shares);
        leave<N>();
    }
    // Where a part of Shared lies, as descriptors count. Dozens of sums with what is not loaded anew would stay in registers.
    __device__ __forceinline__ u32 place_of(const void* part) const {
        return static_cast<u32>(static_cast<const u8*>(part) - reinterpret_cast<const u8*>(&s)) >> 4;
    }
    __device__ __forceinline__ void issue_scores_ahead(Attention& a, int n) const {
        const int round = n / STAGES, stage = n - STAGES * round;
        const u32 begin = loaded(s.begin), rows = begin + stage * (TILES * TILE_BYTES >> 4) + place_of(s.rows);
        const u32 queries = begin + place_of(s.queries[HEAD_GROUP]);
        const u32 ropes = begin + place_of(s.ropes) + stage / 2 * (TILE_BYTES >> 4) + stage % 2 * (64 >> 4);
        const Operands by{queries, rows, begin + place_of(s.rope_queries) + HEAD_GROUP * (64 >> 4), ropes};
        await_rows(stage, round);
        multiply_keys_by(by, a.scores);
    }
    // Turn n, whose half scores are sent. Those of the next are formed from the beginning.
    template <bool LAST> __device__ __forceinline__ void turn_ahead(Attention& a, int n) const {
        const int2 entries = look_up(n);
        if constexpr (!LAST) issue_scores_ahead(a, n + 1);
        float scores[32];
        receive(a, scores, n);
        share_out(a, scores, entries);
        multiply_latents_of(loaded(s.begin) + n % STAGES * (TILES * TILE_BYTES >> 4) + place_of(s.rows), a);
        if constexpr (!LAST) {
            await_products<1>();
            send(a, n + 1);
        }
        await_products<0>();
        hold_shares(a.shares);
        if (threadIdx.x % 32 == 0) arrive(s.empty[n % STAGES]);  // this warp has read it
    }
    __device__ __forceinline__ void run_ahead(Attention& a) const {
        issue_scores_ahead(a, 0);
        await_products<0>();
        send(a, 0);
        int n = 0;
#pragma unroll 1
        for (; n + 1 < turns; ++n) turn_ahead<false>(a, n);
        turn_ahead<true>(a, n);
    }
    __device__ __forceinline__ void run(Attention& a) const {
        if (turns == 0) return;
        if constexpr (AHEAD) return run_ahead(a);
        issue_scores<0>(a, 0);
        await_products<0>();
        send(a, 0);
        for (int n = 0; n < turns; n += ROUND) {
            turn<0>(a, n);
            if (n + 1 < turns) turn<1>(a, n + 1);
            if (ROUND == 3 && n + 2 < turns) turn<ROUND - 1>(a, n + 2);
        }
    }
};

__device__ __forceinline__ void load_queries(const AttendRows& p, const Task& task, Shared& s) {
    constexpr int CHUNKS = 8 * TILES, ALL = CHUNKS + 4;
    const u8* const from = static_cast<const u8*>(p.queries) + static_cast<i64>(task.row) * p.heads * (2 * VALUES);
    for (int i = threadIdx.x; i < HEADS * ALL; i += CONSUMERS) {
        const int place = i / ALL, chunk = i % ALL, head = task.first_head + place;
        const bool rope = chunk >= CHUNKS;
        const u32 to = rope ? shared_address(s.rope_queries) + swizzled(place % 64, place / 64 * 4 + chunk - CHUNKS)
                            : shared_address(s.queries[place / 64]) + chunk / 8 * TILE_BYTES + swizzled(place % 64, chunk % 8);
        const int at = rope ? 2 * LATENT + ROPE * task.half + 16 * (chunk - CHUNKS) : 2 * HALF * task.half + 16 * chunk;
        copy_chunk(to, from + (head < p.heads ? head * (2 * VALUES) + at : 0), head < p.heads);
    }
    await_copies();
    publish_shared();
    sync_named(1, CONSUMERS);
}

__device__ __forceinline__ float inverse_of(float weight) {
    return weight > 0 ? 1.0f / weight : weight == 0 ? 1.0f : weight;
}
// Share of the sink of head `head` of all, where shares count from `level`.
__device__ __forceinline__ float sink_of(const AttendRows& p, int head, float level) {
    constexpr float LOG2_E = 1.44269504f;
    if (!SINKS || head >= p.heads) return 0.0f;
    return exp2_of(fmaf(__ldg(p.sinks + head), LOG2_E, level == none() ? 0.0f : -level));
}
__device__ __forceinline__ u8* result_of(const AttendRows& p, const Task& task, int head) {
    return static_cast<u8*>(p.out) + ((static_cast<i64>(task.row) * p.heads + task.first_head + head) * LATENT + task.half * HALF) * 2;
}

// Whole results of a group, by way of its queries' place: lines of 512 bytes, chunks swizzled by head.
template <int W> __device__ __forceinline__ void write_result(const AttendRows& p, const Task& task, const Attention& a, Shared& s) {
    const int thread = renewed(threadIdx.x % GROUP), lane = thread % 32, g = lane / 4, t = lane % 4, warp = thread / 32;
    u8* const lines = s.queries[HEAD_GROUPS == 2 ? W : 0] + warp * (16 * 2 * HALF);
    any_named(2 + W, GROUP, false);  // all warps of the group have read its queries
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weight = a.weight[half];
        if (SINKS) weight += sink_of(p, task.first_head + W * 64 + warp * 16 + half * 8 + g, a.level[half]);
        const float factor = inverse_of(weight);
#pragma unroll
        for (int j = 0; j < 32; ++j)
            *reinterpret_cast<u32*>(lines + (half * 8 + g) * (2 * HALF) + ((j ^ g) << 4) + 4 * t) =
                pair_of(a.sum(4 * j + 2 * half) * factor, a.sum(4 * j + 2 * half + 1) * factor);
    }
    __syncwarp();
    const int heads = p.heads - task.first_head - W * 64 - warp * 16;  // of this warp
#pragma unroll 4
    for (int i = 0; i < min(16, heads); ++i)
        reinterpret_cast<uint4*>(result_of(p, task, W * 64 + warp * 16 + i))[lane] =
            *reinterpret_cast<const uint4*>(lines + i * (2 * HALF) + ((lane ^ (i & 7)) << 4));
}

template <int W> __device__ __forceinline__ void write_part(const Attention& a, Shared& s) {
    const int thread = renewed(threadIdx.x % GROUP), lane = thread % 32, g = lane / 4, t = lane % 4, warp = thread / 32;
    Account& account = account_of(s);
    arrive(s.met);
    await(s.met, 0);  // rows and queries have been read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = warp * 16 + half * 8 + g;
        u8* const line = part_line(s, W, head) + 8 * t;
#pragma unroll
        for (int j = 0; j < 32; ++j)
            *reinterpret_cast<float2*>(line + 32 * j) = make_float2(a.sum(4 * j + 2 * half), a.sum(4 * j + 2 * half + 1));
        if (t == 0) account.peaks[W][head] = a.level[half], account.totals[W][head] = a.weight[half];
    }
}
// Of part `part` of a result: the rank of its block, and the group of its heads `64 head_group ...` there.
__device__ __forceinline__ int rank_of(const Task& task, int part) { return part / ROW_GROUPS * 2 + task.half; }
__device__ __forceinline__ int group_of(int part, int head) { return ROW_GROUPS == 2 ? part % 2 : head / 64; }

// What each part's sums count for in the result, for all heads, in the order of parts.
__device__ __forceinline__ void weigh_parts(const AttendRows& p, const Task& task, int parts, Shared& s) {
    Account& account = account_of(s);
    const int head = threadIdx.x;
    if (head < HEADS) {
        float level = none(), weight = 0;
        for (int i = 0; i < parts; ++i)
            level = fmaxf(level, *at_peer(&account.peaks[group_of(i, head)][head % 64], rank_of(task, i)));
        level = level == none() ? 0.0f : level;
        for (int i = 0; i < parts; ++i) {
            const int group = group_of(i, head);
            const float fade = exp2_of(*at_peer(&account.peaks[group][head % 64], rank_of(task, i)) - level);
            weight += fade * *at_peer(&account.totals[group][head % 64], rank_of(task, i));
            account.factors[i][head] = fade;
        }
        if (SINKS) weight += sink_of(p, task.first_head + head, level);
        account.inverse[head] = inverse_of(weight);
    }
    sync_named(1, CONSUMERS);
}
// This block's share of its half of the result, four latents of a head at a time, from the sums of all parts.
__device__ __forceinline__ void add_parts(const AttendRows& p, const Task& task, Shared& s) {
    constexpr int QUADS = HALF / 4, TOGETHER = 4;
    const Account& account = account_of(s);
    const int parts = p.splits * ROW_GROUPS, heads = min(HEADS, p.heads - task.first_head);
    weigh_parts(p, task, parts, s);
#pragma unroll 2
    for (int i = task.split * CONSUMERS + threadIdx.x; i < heads * QUADS; i += p.splits * CONSUMERS) {
        const int head = i / QUADS, quad = i % QUADS;
        float4 sum = make_float4(0, 0, 0, 0);
        for (int first = 0; first < parts; first += TOGETHER) {
            float4 held[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
                if (first + j < parts) {
                    const u8* const line = part_line(s, group_of(first + j, head), head % 64);
                    held[j] = *at_peer(reinterpret_cast<const float4*>(line) + quad, rank_of(task, first + j));
                }
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
                if (first + j >= parts) break;
                const float factor = account.factors[first + j][head];
                sum.x += held[j].x * factor, sum.y += held[j].y * factor;
                sum.z += held[j].z * factor, sum.w += held[j].w * factor;
            }
        }
        const float factor = account.inverse[head];
        reinterpret_cast<uint2*>(result_of(p, task, head))[quad] =
            make_uint2(pair_of(sum.x * factor, sum.y * factor), pair_of(sum.z * factor, sum.w * factor));
    }
}

template <int W> __device__ __forceinline__ void attend(const AttendRows& p, const Task& task, Shared& s) {
    Attention a;
#pragma unroll
    for (int i = 0; i < HALF / 2; ++i) a.sum(i) = 0;
    a.level[0] = a.level[1] = none();
    a.weight[0] = a.weight[1] = 0;
    const int first = ROW_GROUPS == 2 ? W : 0;
    Turns<W>{p, task, s, (task.blocks - first + ROW_GROUPS - 1) / ROW_GROUPS}.run(a);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        a.weight[half] += __shfl_xor_sync(0xFFFFFFFF, a.weight[half], 1);
        a.weight[half] += __shfl_xor_sync(0xFFFFFFFF, a.weight[half], 2);
    }
    if (ROW_GROUPS == 1 && p.splits == 1)
        write_result<W>(p, task, a, s);
    else
        write_part<W>(a, s);
}

}  // namespace hisparse

// grid (blocks of heads x splits x 2, batch), all blocks of a result in a cluster
extern "C" __global__ void __launch_bounds__(hisparse::THREADS, 1)
    attend_rows(const __grid_constant__ hisparse::AttendRows p) {
    using namespace hisparse;
    extern __shared__ __align__(1024) u8 dynamic[];
    Shared& s = *reinterpret_cast<Shared*>(dynamic);
    const Task task(p);
    let_next_begin();
    if (threadIdx.x == 0) {
        if (AHEAD) s.begin = operand(&s);
        for (int i = 0; i < STAGES; ++i) {
            set_up(s.full[i], FILL_ARRIVALS);
            set_up(s.empty[i], 4 * HEAD_GROUPS);
        }
        for (int i = 0; i < GROUPS; ++i) {
            set_up(s.sent[i], 1);
            set_up(s.taken[i], 4);
        }
        set_up(s.met, CONSUMERS);
        publish_barriers();
    }
    __syncthreads();
    cluster_arrive();
    await_last();
    if (threadIdx.x >= CONSUMERS) {
        give_registers<GATHER_REGISTERS>();
        gather(p, task, s);
        cluster_wait();
    } else {
        take_registers<PRODUCT_REGISTERS>();
        load_queries(p, task, s);
        cluster_wait();  // the other block's barriers are open
        if (threadIdx.x < GROUP)
            attend<0>(p, task, s);
        else
            attend<1>(p, task, s);
    }
    if (ROW_GROUPS == 2 || p.splits > 1) {
        sync_cluster();
        if (threadIdx.x < CONSUMERS) add_parts(p, task, s);
    }
    leave_cluster();  // a block ends only when its peers have read its parts, and arrived at its barriers
}

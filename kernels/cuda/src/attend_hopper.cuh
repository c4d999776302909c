// attend_rows: sizes, shared memory, and who does what.
#pragma once

#include "attend_products.cuh"

namespace hisparse {

constexpr int LATENT = 512, ROPE = 64, VALUES = LATENT + ROPE;
constexpr int HALF = LATENT / 2, TILES = HALF / 64;  // latents of a block, and their tiles of 64
constexpr int BLOCK = 64, TILE_BYTES = 64 * 128;       // rows of a stage; a tile of 64 heads or rows
// Four warps gather enough for 128 heads, and leave registers for products of all latents of a block at once.
constexpr int GATHERERS = HEADS == 128 ? 128 : 256, COLUMNS = GATHERERS == 128 ? HALF : HALF / 2;
constexpr int GATHER_REGISTERS = GATHERERS == 128 ? 56 : 48, PRODUCT_REGISTERS = GATHERERS == 128 ? 224 : 208;
constexpr int GROUP = 128, GROUPS = 2, CONSUMERS = GROUPS * GROUP, THREADS = CONSUMERS + GATHERERS;
constexpr int HEAD_GROUPS = HEADS / 64;  // 2: each group has 64 heads; 1: every second block of rows
constexpr int ROW_GROUPS = GROUPS / HEAD_GROUPS;
constexpr int STAGES = HEADS == 128 ? 3 : 4;
// Whether a turn's products of scores begin ahead of the turn before. Rows are to be there by then: bfloat16 ones, on their way
// from memory, are not, and two stages of 64 heads are too few.
constexpr bool AHEAD = HEADS == 128 && KEY_BYTES == 1;
constexpr int PARTS_MAX = 16;  // of a result: by the row groups of each of its splits
// 24 bits of a score are sent: three words for four of a thread's 32
constexpr int SENT_WORDS = 24, SENT_BYTES = GROUP * 4 * SENT_WORDS;  // a thread's scores, and a group's
constexpr float SLACK = 8.0f;
constexpr int ROW_BYTES = FP4              ? LATENT / 2 + LATENT / 16 + ROPE
                          : KEY_BYTES == 1 ? LATENT + 16 + 2 * ROPE
                                           : 2 * VALUES;
static_assert(HEADS == 64 || HEADS == 128, "one group's products are of 64 heads");
static_assert(STAGES % ROW_GROUPS == 0, "a stage is always of the same group");

struct Shared {
    u8 queries[HEAD_GROUPS][TILES * TILE_BYTES];
    u8 rope_queries[TILE_BYTES];  // those of heads 64 i .. 64 i + 63 in half i of each line
    u8 rows[STAGES][TILES * TILE_BYTES];
    u8 ropes[2][TILE_BYTES];      // of stages 2 i and 2 i + 1 side by side
    u8 scores[GROUPS][SENT_BYTES];  // what the other block adds
    u64 full[STAGES], empty[STAGES];
    u64 sent[GROUPS], taken[GROUPS];  // the other block's scores are here; the other block has read ours
    u64 met;                          // all consumers are here
    u32 begin;                        // where this lies, as descriptors count
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "as the launcher asks for");

// What the parts of a result tell one another in the end.
struct Account {
    float peaks[GROUPS][64], totals[GROUPS][64];  // of this block
    float factors[PARTS_MAX][HEADS], inverse[HEADS];
};
static_assert(sizeof(Account) <= TILES * TILE_BYTES, "where the queries were");
__device__ __forceinline__ Account& account_of(Shared& s) { return *reinterpret_cast<Account*>(s.queries); }

// A part's sums in the end, where rows and scores were. The pitch keeps a quad's words, and eight heads', in different banks.
constexpr int PART_PITCH = 4 * HALF + 32;
static_assert(GROUPS * 64 * PART_PITCH <= STAGES * TILES * TILE_BYTES + 2 * TILE_BYTES + GROUPS * SENT_BYTES, "as said");
__device__ __forceinline__ u8* part_line(Shared& s, int group, int head) {
    return s.rows[0] + (group * 64 + head) * PART_PITCH;
}

__device__ __forceinline__ void set_up(u64& barrier, int arrivals) { open_barrier(shared_address(&barrier), arrivals); }
__device__ __forceinline__ void arrive(u64& barrier) { arrive(shared_address(&barrier)); }
__device__ __forceinline__ void await(u64& barrier, u32 parity) { await_phase(shared_address(&barrier), parity & 1); }

// Where chunk `chunk` (16 bytes) of row `row` of a tile lies.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// What a block of threads does: one half of the latents for HEADS heads of a batch row, over one span of its entries.
struct Task {
    int half, split, row, first_head;
    const i32* entries;
    int begin, end, blocks;  // entries, and their blocks of rows

    __device__ __forceinline__ explicit Task(const AttendRows& p) {
        half = blockIdx.x % 2, split = blockIdx.x / 2 % p.splits;
        row = blockIdx.y, first_head = blockIdx.x / (2 * p.splits) * HEADS;
        entries = p.entries + static_cast<i64>(row) * p.k;
        begin = split * p.span, end = min(begin + p.span, p.k);
        blocks = end > begin ? (end - begin + BLOCK - 1) / BLOCK : 0;
    }
    __device__ __forceinline__ int peer() const { return (split * 2 + half) ^ 1; }
    __device__ __forceinline__ i32 place(int entry) const { return entry < end ? __ldg(entries + entry) : -1; }
};

}  // namespace hisparse

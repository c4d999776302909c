// Generated from kernels/cuda/structures.py by `python -m kernels.cuda.header`: change it there.
//
// What host and device share: constants, enumerations, tables and kernel parameters.
#pragma once

namespace hisparse {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr int PAGE_TOKENS = 64;
constexpr u32 SLOT_ABSENT = 65535;  // greater than any slot
constexpr int SLOTS_MAX = 32832;  // largest hot buffer and its tail chunk
constexpr int TAIL_SLOTS_MAX = 16;
constexpr int TOPK_MAX = 4096;
constexpr int CONTEXT_MAX_TOKENS = 1048576;
constexpr int QUEUE_SLOTS = 512;  // of an eviction queue's first ring
constexpr int QUEUE_RESERVE = 1024;  // of its second ring
constexpr int QUEUE_RING = 1536;  // of both
constexpr int OPENED_PAGES = 1024;  // index pages of a context in an OpenedRow
constexpr int OPENED_CHUNKS = 516;  // hot chunks likewise, in whole vectors
constexpr int ROTATE_THREADS = 256;  // of a block of rotate_tail
constexpr int COPY_ROWS_THREADS = 256;  // of a block of copy_rows
constexpr int ROWS_THREADS = 256;  // of a block of store_rows, fetch_rows, store_keys, fetch_keys
constexpr int SEAT_THREADS = 256;  // of a block of change_slots, close_change
constexpr int ENCODE_THREADS = 256;  // of a block of encode_fp4
constexpr int SWAP_IN_SHARED_BYTES = 99568;  // of a block of swap_in
constexpr int QUANTIZE_THREADS = 256;  // of a block of quantize_rows, quantize_gated
constexpr int SUM_THREADS = 128;  // of a block of sum_rows
constexpr int PLACE_THREADS = 1024;  // of a block of place_rows
constexpr int EXPERTS_MAX = 1024;  // of one rank: place_rows counts them in shared memory
constexpr int UNIT = 16;  // index keys that a warp scores together
constexpr int BATCH_MAX = 1024;  // rows of index_topk
constexpr int BINS = 8192;  // of a row's histogram of scores: a power of two
constexpr int COARSE_BINS = 256;  // behind them: sums of neighbours
constexpr int COUNTERS = 4;  // of a row, in words: UNGRANTED_ROW

enum Tripwire { POSITION = 0, UNGRANTED = 1, VICTIMS = 2, SEAT = 3 };
enum SeatChangeKind { INIT = 0, SHRINK = 1, GROW = 2 };

// Cursors of a seat's eviction queue (src/eviction_queue.cuh): two rings, of QUEUE_SLOTS places and, behind it, of
// QUEUE_RESERVE. All -1: empty.
struct EvictionQueue {
    i32 begin, count;                  // of the first ring: a multiple of a warp's places; places in use
    i32 reserve_begin;                 // slots that were ever moved out of the reserve
    i32 reserve_end;                   // slots that were ever added to the reserve
    i32 stamp, slot;                   // all older slots, and those of this stamp up to `slot`, are or have been queued
    i32 refills_wanted, refills_done;  // refills ever asked for; value of refills_wanted at the last refill
};
static_assert(sizeof(EvictionQueue) == 32, "as ctypes lays it out");

// What begin_step leaves of a batch row, so that a swap_in need not wait for the seat's number before it asks for
// the seat's tables.
struct alignas(16) OpenedRow {
    i32 seat, length, hot, now;  // hot -1: padding, or a seat that was refused
    i32 page[OPENED_PAGES];      // index pages of the context's beginning, as far as it goes; -1 not granted
    i32 chunk[OPENED_CHUNKS];    // of the hot buffer, likewise
};
static_assert(sizeof(OpenedRow) == 6176, "as ctypes lays it out");

// Tables of a device (kernels/state.py has their shapes, and what each value means).
struct State {
    u8* rows;
    u8* index_keys;
    u16* slot_of;
    i32* slot_token;
    i32* stamp;
    EvictionQueue* eviction_queue;  // [groups, seats]
    u16* queue_slot;                // [groups, seats, QUEUE_RING]
    i32* queue_stamp;               // their stamps when they were queued
    const i32* index_table;
    const i32* host_table;
    const i32* chunk_table;
    i32* hot_slots;
    i32* tail;
    i32* now;
    i64* hits;
    i64* misses;
    i64* tripwires;
    u8* host;
    i64 arena_rows, key_rows, page_bytes;
    i32 seats, max_pages, max_chunks, tail_slots, layers, groups;
};
static_assert(sizeof(State) == 192, "as ctypes lays it out");

// A StepBatch.
struct Batch {
    const void* seats;             // int32 or int64 [batch]
    const void* lengths;           // likewise
    const i32* num_real;
    i32 size;
    i32 wide_seats, wide_lengths;  // 1 when int64
    i32 unused;
};
static_assert(sizeof(Batch) == 40, "as ctypes lays it out");

// A MissPlan.
struct Plan {
    i32* device_row;   // [batch*k]: row b's copies begin at b*k
    i32* host_page;    // likewise
    i32* host_offset;  // likewise
    i32* count;        // [batch]
};
static_assert(sizeof(Plan) == 32, "as ctypes lays it out");

// What is read first lies together: parameters come by cache lines, too.
struct SwapIn {
    const OpenedRow* opened;  // [rows]
    const i32* topk;          // [rows, k]
    i32* out_rows;            // [rows, k]
    i32 rows, k;
    i32 slots_limit;          // slots that a seat can have
    u32 block_entries;        // top-k entries of one block: a power of two, whole warps
    i32 copies;               // 0: everything but the copies
    u32 page_bytes;           // as in state
    i32 refill_blocks;        // 1: blocks behind those of the rows refill eviction queues
    u32 zero;                 // always 0, which the compiler does not know
    const u8* host_rows[2];   // of the anchor layer, by plane: in host page 0
    u8* device_rows[2];       // likewise: in its arena
    State state;              // slot_of, slot_token, stamp, queues, tail, hits and misses of one group
    Plan plan;
    i32* rejected;            // [rows]: of the rows of a draft
};
static_assert(sizeof(SwapIn) == 320, "as ctypes lays it out");

struct BeginStep {
    State state;
    Batch batch;
    i32* new_rows;            // [groups, batch]
    i32* new_index_rows;      // [batch]
    OpenedRow* opened;        // [batch]
    i32* device_row;          // [groups, batch]
    i32* index_row;           // [batch]
    i32* host_page;           // [batch]
    i32* host_offset;         // [batch]
    const i32* granted_rows;  // [seats]
    i32* rejected;            // [batch]
    i32 seat_rows, unused;    // rows of a seat in this batch
};
static_assert(sizeof(BeginStep) == 312, "as ctypes lays it out");

struct ReplayMisses {
    State state;
    Plan plan;
    i32 k, layer, rows, unused;
};
static_assert(sizeof(ReplayMisses) == 240, "as ctypes lays it out");

struct CopyRows {
    State state;
    const i64* group_of_layer;
    const void* device_row;                // int32 or int64 [groups, n]; null: index keys alone
    const void* index_row;                 // [n]; null: rows alone
    const void* host_page;                 // [n]
    const void* host_offset;               // [n]
    i32 n;
    i32 wide_device_row, wide_index_row;   // 1 when int64
    i32 wide_host_page, wide_host_offset;  // likewise
    i32 to_host;
};
static_assert(sizeof(CopyRows) == 256, "as ctypes lays it out");

struct MoveRows {
    u8* section;        // rows of one layer, or keys of one group
    void* data;         // [n, bytes]
    const i32* places;  // [n] rows of the section, -1: none; null: by table
    const i32* table;   // pages of one seat
    i64* tripwires;
    i64 start;          // position of the first row
    i32 n, plane;
};
static_assert(sizeof(MoveRows) == 56, "as ctypes lays it out");

struct SeatChange {
    State state;
    i32 seat, kind;
    i32 old_slots, hot_slots;
    i32 first_slot, chunks;   // slots from here to the end of the last chunk are set
    i32 first_token, tokens;  // what slots 0.. hold from now on
};
static_assert(sizeof(SeatChange) == 224, "as ctypes lays it out");

struct IndexTopk {
    State state;
    Batch batch;
    const void* queries;   // [batch, heads, dim]
    const float* weights;  // [batch, heads]
    i32* topk_out;         // [batch, k]
    float* scores;         // [capacity]
    u32* histogram;        // [rows, BINS + COARSE_BINS]
    i32* counters;         // [rows, COUNTERS]
    i64 capacity;
    float scale;
    i32 k, group, rows;
};
static_assert(sizeof(IndexTopk) == 304, "as ctypes lays it out");

// Neighbouring rows of a block, of one prompt.
struct IndexPart {
    i32 first_job;    // number of its first job, of those of all parts
    i32 row, tokens;  // first row of the block; how many
    i32 seat, start;  // position of the first row
};
static_assert(sizeof(IndexPart) == 20, "as ctypes lays it out");

struct PromptIndex {
    State state;
    const void* queries;    // bfloat16 [rows, heads, dim]
    const float* weights;   // [rows, heads]
    const IndexPart* part;  // [parts], in order of their jobs
    const i32* slab_table;  // [seats, slab_pages]
    i32* topk_out;          // [rows, k]: positions
    i32* rows_out;          // likewise: their rows in the slab; null: none
    u32* lists;             // [blocks, 8, 2, 4096]: keys and positions (prompt_list.cuh)
    u32* heads;             // [blocks, 8, 4]: count, bar, least and most of each list, where splits > 1
    float scale;
    i32 k, group, parts, jobs;
    i32 splits;             // blocks that share the keys of a job; above 1, jobs * splits in all, then prompt_merge
    i32 slab_pages, unused;
};
static_assert(sizeof(PromptIndex) == 288, "as ctypes lays it out");

struct AttendRows {
    const u8* rows;       // of one layer
    const void* queries;  // [batch, heads, dim]
    const i32* entries;   // [batch, k]
    void* out;            // [batch, heads, latent]
    float scale;          // times log2(e)
    i32 heads, k, splits;
    i32 span;             // entries of a split
    const float* sinks;   // [heads]; null without SINKS
};
static_assert(sizeof(AttendRows) == 64, "as ctypes lays it out");

// A CUtensorMap, as the driver encodes it.
struct alignas(64) TensorMap {
    u32 words[32];
};
static_assert(sizeof(TensorMap) == 128, "as ctypes lays it out");

// A product with block-FP8 weights: out [tokens, n] of one weight, or by experts (kernels/cuda/block_linear.py).
struct BlockLinear {
    TensorMap codes;            // [n / 2, 2, K], of all experts
    TensorMap others;           // gate and up: up, and `codes` is gate, both [n, 1, K] of all experts
    TensorMap hidden;           // [tokens, K]
    const float* scales;        // [ceil(n / 128), blocks], of all experts
    const float* other_scales;  // of `others`
    u16* out;                   // [tokens, n]
    float* partial;             // [ranges, rows, tokens] of tiles; null where no range begins inside of a tile
    i32* flags;                 // [ranges, teams]: zero between launches
    const i32* tile_expert;     // [jobs_max] of tiles of tokens, -1 behind them; dense: null
    const i32* slots;           // [jobs_max, tokens of a tile] rows of `out`, -1: none; unless down: null
    i32 tokens, n;
    i32 blocks;                 // of K
    i32 units;                  // tiles * blocks; by experts: known to the device
    i32 token_tiles;            // dense
    i32 row_tiles, jobs_max;    // by experts
    float limit;                // gate and up: of both products, of gate from above
    i32 unused[10];
};
static_assert(sizeof(BlockLinear) == 512, "as ctypes lays it out");

struct EncodeRows {
    const u8* values;   // [n, values], bfloat16 or float32
    u8* out;            // rows of four bits
    const i32* places;  // [n] rows of `out`; -1: none; null: their numbers
    i64 n;
    float scale;        // of values that are scaled: a power of two
};
static_assert(sizeof(EncodeRows) == 40, "as ctypes lays it out");

struct PlaceRows {
    const void* chosen;  // [tokens, choices] experts: int32, or int64; tokens `stride` apart
    i32* rows;           // [assignments]; -1: no expert of this rank
    i32* ends;           // [experts] behind the last row of each
    i32* counts;         // [blocks, experts] of the run of each block; null: one block has all
    i32 assignments, first, experts;
    i32 multiple;        // an expert's rows begin at a multiple
    i32 wide;            // 1: `chosen` is int64
    i32 stride, choices;
    i32 span;            // assignments of a run
};
static_assert(sizeof(PlaceRows) == 64, "as ctypes lays it out");

struct QuantizeRows {
    const u16* hidden;   // [rows, k] bfloat16, `stride` values apart
    const u16* factors;  // of quantize_gated: likewise
    const i32* rows;     // [count, choices] where each row goes, -1: nowhere; of quantize_gated where it is; null: its number
    u8* values;          // [rows, k] e4m3
    float* scales;       // [blocks, span]
    i64 stride;
    i32 count, choices;
    i32 k, blocks;       // 128 * blocks values of a row
    i32 span;            // at least as many as there are rows
    i32 powers;          // 1: scales are powers of two
    float limit;         // of quantize_gated: of both, of hidden from above
};
static_assert(sizeof(QuantizeRows) == 80, "as ctypes lays it out");

struct SpreadRows {
    const u8* codes;     // [count, k] e4m3, `stride` bytes apart
    const float* given;  // [count, blocks] their scales, rows and blocks of any distance
    const i32* rows;     // [count, choices] places of a row; -1: none
    u8* values;          // [rows, k] e4m3
    float* scales;       // [blocks, span]
    i64 stride, scale_stride, block_stride;
    i32 count, choices;
    i32 k, blocks;       // 128 * blocks values of a row
    i32 span;            // at least as many as there are rows
    i32 unused;
};
static_assert(sizeof(SpreadRows) == 88, "as ctypes lays it out");

struct SumRows {
    const u16* products;  // [rows, width] bfloat16
    const i32* rows;      // [tokens, choices]; -1: none
    const void* shares;   // [tokens, choices] float32, or bfloat16; tokens `stride` apart
    u16* out;             // [tokens, width] bfloat16
    i32 choices, width;
    i32 wide_shares;      // 1: float32
    i32 stride;
};
static_assert(sizeof(SumRows) == 48, "as ctypes lays it out");

}  // namespace hisparse

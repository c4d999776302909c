// A unit of index keys in shared memory: how it gets there, and how lanes read it.
//
// Formats (KEY_BYTES): 4 float32, 2 bfloat16, 1 e4m3 with one float32 scale behind the DIM values. Chunks of 16 bytes
// are laid out so that the reads of index_mma.cuh and index_fma.cuh hit every bank once:
//
//     bfloat16   chunk ^ 4 * (key & 1) where keys are multiples of 128 bytes: two keys, four neighbouring chunks each
//     float32    chunk ^ (key & 7): eight keys at the same chunk
//     fp8        as in global memory: keys are DIM/4 + 1 words apart, an odd stride
#pragma once

#include "memory.cuh"

namespace hisparse {

constexpr int KEY_ROW = KEY_BYTES == 1 ? DIM + 4 : DIM * KEY_BYTES;
constexpr int UNIT_BYTES = 16 * KEY_ROW;
constexpr int CHUNKS = DIM * KEY_BYTES / 16;  // per key
static_assert(DIM % 32 == 0 && DIM <= 128 && HEADS >= 1 && HEADS <= 64, "what the scorers are written for");

__device__ __forceinline__ float relu(float v) {
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(v));
    return v;
}

__device__ __forceinline__ int chunk_place(int key, int chunk) {
    if (KEY_BYTES == 4) return key * CHUNKS + (chunk ^ (key & 7));
    return key * CHUNKS + (CHUNKS % 8 == 0 ? chunk ^ 4 * (key & 1) : chunk);
}

// Start copying the 16 keys at `from` (a multiple of 16 bytes) into `unit`; all lanes of a warp together.
__device__ __forceinline__ void stage_unit(u8* unit, const u8* from) {
#pragma unroll
    for (int base = 0; base < UNIT_BYTES / 16; base += 32) {
        const int chunk = base + static_cast<int>(threadIdx.x % 32);
        if (base + 32 > UNIT_BYTES / 16 && chunk >= UNIT_BYTES / 16) return;
        const int place = KEY_BYTES == 1 ? chunk : chunk_place(chunk / CHUNKS, chunk % CHUNKS);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(unit + 16 * place)),
                     "l"(from + 16 * chunk)
                     : "memory");
    }
}
__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all stages but the newest `LATER` have arrived, in every lane.
template <int LATER> __device__ __forceinline__ void await_stage() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
    __syncwarp();
}

__device__ __forceinline__ uint4 key_chunk(const u8* unit, int key, int chunk) {
    return *reinterpret_cast<const uint4*>(unit + 16 * chunk_place(key, chunk));
}
__device__ __forceinline__ u32 key_word(const u8* unit, int key, int word) {
    return *reinterpret_cast<const u32*>(unit + key * KEY_ROW + 4 * word);
}

// Four e4m3 as two pairs of float16. Before sm_89 they come out 2**-8 times too small: exponent biases differ by 8.
#if __CUDA_ARCH__ >= 890
constexpr float E4M3_UNIT = 1.0f;
__device__ __forceinline__ void decode_e4m3(u32 word, u32& low, u32& high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(word));
}
#else
constexpr float E4M3_UNIT = 256.0f;
__device__ __forceinline__ u32 widen_e4m3(u32 bytes) {  // the high byte of each half
    const u32 nan = ((bytes >> 8 & 0x007F007Fu) + 0x00010001u) & 0x00800080u;  // code 0x7F
    return (bytes & 0x80008000u) | (bytes >> 1 & 0x3F803F80u) | nan << 7;
}
__device__ __forceinline__ void decode_e4m3(u32 word, u32& low, u32& high) {
    low = widen_e4m3(__byte_perm(word, 0, 0x1404));
    high = widen_e4m3(__byte_perm(word, 0, 0x3424));
}
#endif

__device__ __forceinline__ float key_scale(const u8* unit, int key) {
    return __uint_as_float(key_word(unit, key, DIM / 4)) * E4M3_UNIT;
}

}  // namespace hisparse

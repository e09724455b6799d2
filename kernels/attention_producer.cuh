// Warpgroup 2 of attention.cu: gathers the named rows into the ring of slots.
#pragma once
#include "attention_instructions.cuh"

// Where an entry's row lies; 0 = nowhere.
__device__ inline u64 find_row(i32 row, i32 host_row, const Args& a) {
    if (row >= 0) return (u64)(a.rows + (row + a.row_delta) * ROW_BYTES);
    if (host_row >= 0) return (u64)(a.host + (i64)host_row * ROW_BYTES);
    return 0;
}

// The low words of the ids: 2^31 rows would be over a terabyte. No arithmetic on them here, which would wait for them.
__device__ inline void load_entry(i32& row, i32& host_row, const Args& a, u32 i) {
    row = host_row = -1;
    if (i < a.k) row = a.ids[(u64)i << a.wide_ids];
    if (i < a.k && a.host_ids != nullptr) host_row = a.host_ids[(u64)i << a.wide_host_ids];
}

// Each warp gathers 16 rows of a tile; lane i and i + 16 know row i.
__device__ inline void produce_bf16(const Args& a, u8* smem, Notes& notes, u32 first, u32 tiles) {
    const u32 lane = threadIdx.x & 31, base = (threadIdx.x >> 5 & 3) * 16;
    i32 row, host_row;
    load_entry(row, host_row, a, first + base + (lane & 15));
    for (u32 turn = 0; turn < tiles; ++turn) {
        const u32 slot = turn & 1, to = shared(smem) + SLOT * (1 + slot), parity = (turn >> 1 & 1) ^ 1;
        const u64 mine = find_row(row, host_row, a);
        load_entry(row, host_row, a, first + (turn + 1) * TILE + base + (lane & 15));
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            wait(&notes.empty[slot][half], parity);
#pragma unroll 4
            for (u32 r = 0; r < 16; ++r) {
                const u64 found = __shfl_sync(~0u, mine, r);
                copy16(to + (4 * half + (lane >> 3)) * PANEL + swizzled(base + r, lane & 7),
                       (found ? found : (u64)a.rows) + half * 512 + lane * 16, found ? 16 : 0);
            }
            if (half == 1) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u32 r = i * 4 + (lane >> 3);
                    const u64 found = __shfl_sync(~0u, mine, r);
                    copy16(to + ROPE_PANEL + swizzled(base + r, lane & 7),
                           (found ? found : (u64)a.rows) + 2 * LATENT + (lane & 7) * 16, found ? 16 : 0);
                }
                if (lane < 16) notes.bias[slot][base + lane] = mine ? 0.0f : NONE;
            }
            arrive_with_copies(&notes.full[slot][half]);
            __syncwarp();
            if (lane == 0) arrive(&notes.full[slot][half]);
        }
    }
}

// Four e4m3 values times `ratio` (two equal float16) as four float16.
__device__ inline uint2 widen(u32 raw, u32 ratio) {
    uint2 v;
    asm("{\n.reg .b16 a, b;\n.reg .b32 x, y;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 x, a;\ncvt.rn.f16x2.e4m3x2 y, b;\n"
        "mul.rn.f16x2 %0, x, %3;\nmul.rn.f16x2 %1, y, %3;\n}" : "=r"(v.x), "=r"(v.y) : "r"(raw), "r"(ratio));
    return v;
}

// 16 bytes of a row, zeros where there is none; without a branch, so that many are in flight.
__device__ inline uint4 load_part(u64 row, u32 offset) {
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %4, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%5];\n}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(row), "l"(row + offset));
    return v;
}

// A warp's 8 rows on their way through registers. Two rows at a time: lanes 0-3, 8-11, ... the first, so that writes to shared
// memory have no bank conflicts.
constexpr u32 WARP_ROWS = TILE / (PRODUCERS / 32);
struct Raw {
    uint4 latents[2][WARP_ROWS / 2];  // 16 e4m3 of each half of the latents
    uint4 ropes[WARP_ROWS / 4];
    uint4 scales;  // of the lane's row
};

__device__ inline void load_half(Raw& raw, u64 mine, u32 lane, u32 half, u32 i) {
    const u64 row = __shfl_sync(~0u, mine, 2 * i + (lane >> 2 & 1));
    raw.latents[half][i] = load_part(row, half * 256 + ((lane >> 3) * 4 + (lane & 3)) * 16);
}

__device__ inline void load_ropes(Raw& raw, u64 mine, u32 lane, u32 i) {
    const u64 row = __shfl_sync(~0u, mine, 4 * i + (lane >> 3));
    raw.ropes[i] = load_part(row, LATENT + 16 + (lane & 7) * 16);
}

// Each warp gathers 8 rows of a tile; lane i, i + 8, ... know row i. While a tile's rows become float16, the next tile's set out.
__device__ inline void produce_fp8(const Args& a, u8* smem, Notes& notes, u32 first, u32 tiles) {
    const u32 lane = threadIdx.x & 31, base = (threadIdx.x - CONSUMERS >> 5) * WARP_ROWS, own = lane & (WARP_ROWS - 1);
    const u32 second = lane >> 2 & 1, pick = lane < 16 ? 0x1010 : 0x3232;
    // of the first row in a slot; row r + n lies 128 * n on, its chunks trade places by n
    const u32 latents_at = (lane >> 3) * PANEL + swizzled(base + second, (lane & 3) * 2);
    const u32 ropes_at = ROPE_PANEL + swizzled(base + (lane >> 3), lane & 7);
    i32 row, host_row;
    load_entry(row, host_row, a, first + base + own);
    u64 mine = find_row(row, host_row, a);
    load_entry(row, host_row, a, first + TILE + base + own);
    Raw raw;
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
#pragma unroll
        for (u32 i = 0; i < WARP_ROWS / 2; ++i) load_half(raw, mine, lane, half, i);
#pragma unroll
    for (u32 i = 0; i < WARP_ROWS / 4; ++i) load_ropes(raw, mine, lane, i);
    raw.scales = load_part(mine, LATENT);
    for (u32 turn = 0; turn < tiles; ++turn) {
        const u32 slot = turn & 1, to = shared(smem) + SLOT * (1 + slot), parity = (turn >> 1 & 1) ^ 1;
        const bool named = mine != 0;
        mine = turn + 1 < tiles ? find_row(row, host_row, a) : 0;
        load_entry(row, host_row, a, first + (turn + 2) * TILE + base + own);
        const float s0 = bits_to_float(raw.scales.x), s1 = bits_to_float(raw.scales.y), s2 = bits_to_float(raw.scales.z),
                    s3 = bits_to_float(raw.scales.w);
        const u32 greatest = __float_as_uint(fmaxf(fmaxf(s0, s1), fmaxf(s2, s3))) >> 23 & 255;
        const u32 exponent = min(max(greatest, LEAST_EXPONENT), 253u);
        const float inverse = bits_to_float((254 - exponent) << 23);
        const u32 ratios[2] = {pack(s0 * inverse, s1 * inverse), pack(s2 * inverse, s3 * inverse)};
        raw.scales = load_part(mine, LATENT);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            wait(&notes.empty[slot][half], parity);
#pragma unroll
            for (u32 i = 0; i < WARP_ROWS / 2; ++i) {
                const u32 ratio = __byte_perm(__shfl_sync(~0u, ratios[half], 2 * i + second), 0, pick);
                const u32 at = (latents_at + to + half * 4 * PANEL ^ (i & 3) << 5) + i * 256;
                const uint4 v = raw.latents[half][i];
                const uint2 a0 = widen(v.x, ratio), a1 = widen(v.y, ratio), b0 = widen(v.z, ratio), b1 = widen(v.w, ratio);
                load_half(raw, mine, lane, half, i);
                store_shared(at, make_uint4(a0.x, a0.y, a1.x, a1.y));
                store_shared(at ^ 16, make_uint4(b0.x, b0.y, b1.x, b1.y));
            }
            if (half == 1) {
#pragma unroll
                for (u32 i = 0; i < WARP_ROWS / 4; ++i) {
                    const u32 factor = __shfl_sync(~0u, ((254 - exponent) << 7) * 0x10001u, 4 * i + (lane >> 3));
                    const uint4 v = raw.ropes[i];
                    store_shared((ropes_at + to ^ (i & 1) << 6) + i * 512,
                                 make_uint4(mul_bf16x2(v.x, factor), mul_bf16x2(v.y, factor), mul_bf16x2(v.z, factor),
                                            mul_bf16x2(v.w, factor)));
                    load_ropes(raw, mine, lane, i);
                }
                if (lane < WARP_ROWS) {
                    notes.factor[slot][base + lane] = bits_to_float(exponent << 23);
                    notes.bias[slot][base + lane] = named ? (float)(i32)(exponent - 127) : NONE;
                }
            }
            __syncwarp();
            if (lane == 0) arrive(&notes.full[slot][half]);  // no fence: the consumers have it
        }
    }
}

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

__device__ inline void copy16(u32 to, u64 from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}

// Each warp gathers 16 rows of a tile; lane i and i + 16 know row i.
__device__ inline void produce_bf16(const Args& a, u8* smem, Notes& notes, u32 first, u32 tiles) {
    const u32 lane = threadIdx.x & 31, base = (threadIdx.x >> 5 & 3) * 16;
    i32 row, host_row;
    load_entry(row, host_row, a, first + base + (lane & 15));
    for (u32 turn = 0; turn < tiles; ++turn) {
        const u32 slot = turn & 1, to = shared(smem) + SLOT * (1 + slot);
        const u64 mine = find_row(row, host_row, a);
        load_entry(row, host_row, a, first + (turn + 1) * TILE + base + (lane & 15));
        wait(&notes.empty[slot], (turn >> 1 & 1) ^ 1);
#pragma unroll 4
        for (u32 r = 0; r < 16; ++r) {
            const u64 found = __shfl_sync(~0u, mine, r);
            const u64 from = (found ? found : (u64)a.rows) + lane * 16;
            const u32 at = to + (lane >> 3) * PANEL + swizzled(base + r, lane & 7), bytes = found ? 16 : 0;
            copy16(at, from, bytes);
            copy16(at + 4 * PANEL, from + 512, bytes);
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 r = i * 4 + (lane >> 3);
            const u64 found = __shfl_sync(~0u, mine, r);
            copy16(to + ROPE_PANEL + swizzled(base + r, lane & 7), (found ? found : (u64)a.rows) + 2 * LATENT + (lane & 7) * 16,
                   found ? 16 : 0);
        }
        if (lane < 16) notes.bias[slot][base + lane] = mine ? 0.0f : NONE;
        arrive_with_copies(&notes.full[slot]);
        __syncwarp();
        if (lane == 0) arrive(&notes.full[slot]);
    }
}

// Four e4m3 values times `ratio` (two equal float16) as four float16.
__device__ inline uint2 widen(u32 raw, u32 ratio) {
    uint2 v;
    asm("{\n.reg .b16 a, b;\n.reg .b32 x, y;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 x, a;\ncvt.rn.f16x2.e4m3x2 y, b;\n"
        "mul.rn.f16x2 %0, x, %3;\nmul.rn.f16x2 %1, y, %3;\n}" : "=r"(v.x), "=r"(v.y) : "r"(raw), "r"(ratio));
    return v;
}

// Chunk `chunk` of 16 e4m3 of row `row`, in the place of the row's upper latents. Reads and writes have no bank conflicts.
__device__ inline u32 raw_at(u32 row, u32 chunk) {
    return (4 + (chunk >> 3)) * PANEL + row * 128 + (((chunk & 7) ^ (row & 1) << 2) << 4);
}

// Starts the copies of a warp's 16 rows, e4m3 and rope parts as they are.
__device__ inline void start_rows(const Args& a, u32 to, u32 base, u32 lane, u64 mine) {
#pragma unroll 4
    for (u32 r = 0; r < 16; ++r) {
        const u64 found = __shfl_sync(~0u, mine, r);
        copy16(to + raw_at(base + r, lane), (found ? found : (u64)a.rows) + lane * 16, found ? 16 : 0);
    }
#pragma unroll 2
    for (u32 r = lane >> 3; r < 16; r += 4) {
        const u64 found = __shfl_sync(~0u, mine, r);
        copy16(to + ROPE_PANEL + swizzled(base + r, lane & 7), (found ? found : (u64)a.rows) + LATENT + 16 + (lane & 7) * 16,
               found ? 16 : 0);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Brings a warp's 16 rows, which have arrived, to float16 over 2^(exponent - 127), in place. Two rows at a time: lanes 0-3, 8-11,
// ... the first. Loops stay rolled: four warps that each walk through long code wait for instructions.
__device__ inline void widen_rows(u32 to, u32 base, u32 lane, uint2 ratios, u32 rope_factor) {
    const u32 second = lane >> 2 & 1, piece = (lane >> 3) * 4 + (lane & 3), pick = lane < 16 ? 0x1010 : 0x3232;
#pragma unroll 2
    for (u32 i = 0; i < 16; i += 2) {
        const u32 r = base + i + second;
        const uint4 v[2] = {load_shared(to + raw_at(r, piece)), load_shared(to + raw_at(r, 16 + piece))};
        const u32 pairs[2] = {__shfl_sync(~0u, ratios.x, i + second), __shfl_sync(~0u, ratios.y, i + second)};
        __syncwarp();  // both rows are in registers
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 ratio = __byte_perm(pairs[half], 0, pick), panel = to + (half * 4 + (lane >> 3)) * PANEL;
            const uint2 a0 = widen(v[half].x, ratio), a1 = widen(v[half].y, ratio), b0 = widen(v[half].z, ratio),
                        b1 = widen(v[half].w, ratio);
            store_shared(panel + swizzled(r, (lane & 3) * 2), make_uint4(a0.x, a0.y, a1.x, a1.y));
            store_shared(panel + swizzled(r, (lane & 3) * 2 + 1), make_uint4(b0.x, b0.y, b1.x, b1.y));
        }
    }
#pragma unroll 2
    for (u32 r = lane >> 3; r < 16; r += 4) {
        const u32 at = to + ROPE_PANEL + swizzled(base + r, lane & 7), factor = __shfl_sync(~0u, rope_factor, r);
        const uint4 v = load_shared(at);
        store_shared(at, make_uint4(mul_bf16x2(v.x, factor), mul_bf16x2(v.y, factor), mul_bf16x2(v.z, factor),
                                    mul_bf16x2(v.w, factor)));
    }
}

// As for bfloat16, but rows arrive as they are and each warp brings its own to float16, while the next tile's are on their way if
// their slot is free.
__device__ inline void produce_fp8(const Args& a, u8* smem, Notes& notes, u32 first, u32 tiles) {
    const u32 lane = threadIdx.x & 31, base = (threadIdx.x >> 5 & 3) * 16;
    i32 row, host_row;
    load_entry(row, host_row, a, first + base + (lane & 15));
    u64 mine = find_row(row, host_row, a), now = 0;
    load_entry(row, host_row, a, first + TILE + base + (lane & 15));
    uint4 scales = load_or_zero(mine, LATENT), next_scales = make_uint4(0, 0, 0, 0);
    for (u32 turn = 0; turn <= tiles; ++turn) {
        const u32 slot = turn & 1, to = shared(smem) + SLOT * (1 + slot), parity = (turn >> 1 & 1) ^ 1;
        bool started = turn == tiles || __all_sync(~0u, is_complete(&notes.empty[slot], parity));
        if (started && turn < tiles) start_rows(a, to, base, lane, mine);
        if (turn > 0) {  // the tile before
            const u32 before = slot ^ 1, at = shared(smem) + SLOT * (1 + before);
            const float s0 = bits_to_float(scales.x), s1 = bits_to_float(scales.y), s2 = bits_to_float(scales.z),
                        s3 = bits_to_float(scales.w);
            const u32 greatest = __float_as_uint(fmaxf(fmaxf(s0, s1), fmaxf(s2, s3))) >> 23 & 255;
            const u32 exponent = min(max(greatest, LEAST_EXPONENT), 253u);
            const float inverse = bits_to_float((254 - exponent) << 23);
            if (lane < 16) {
                notes.factor[before][base + lane] = bits_to_float(exponent << 23);
                notes.bias[before][base + lane] = now ? (float)(i32)(exponent - 127) : NONE;
            }
            if (started && turn < tiles)
                asm volatile("cp.async.wait_group 1;" ::: "memory");
            else
                asm volatile("cp.async.wait_group 0;" ::: "memory");
            __syncwarp();
            widen_rows(at, base, lane, make_uint2(pack(s0 * inverse, s1 * inverse), pack(s2 * inverse, s3 * inverse)),
                       ((254 - exponent) << 7) * 0x10001u);
            __syncwarp();
            if (lane == 0) arrive(&notes.full[before]);  // no fence: the consumers have it
            scales = next_scales;
        }
        if (!started) {
            wait(&notes.empty[slot], parity);
            start_rows(a, to, base, lane, mine);
        }
        now = mine;
        mine = find_row(row, host_row, a);
        next_scales = load_or_zero(mine, LATENT);
        load_entry(row, host_row, a, first + (turn + 2) * TILE + base + (lane & 15));
    }
}

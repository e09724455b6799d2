// The end of attention.cu: the parts of a cluster's CTAs become one result.
#pragma once
#include "attention_instructions.cuh"

// 16 bytes of CTA `cta`'s shared memory. Without a memory clobber, so that several are in flight; the barriers around have one.
__device__ inline float4 read_part(const void* p, u32 cta) {
    float4 v;
    if (CLUSTER == 1)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared(p)));
    else
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote(p, cta)));
    return v;
}

// Leaves this warpgroup's half of the CTA's sum for the cluster: float16 over a power of two of each head, so that half the bytes
// go between CTAs. Its rounding, 2^-12 of a part, is a tenth of what the result has from its own and from the probabilities'.
__device__ inline void leave_part(const float (&o)[128], u8* sum, Notes& notes) {
    const u32 warpgroup = threadIdx.x >> 7, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    if (warp * 16 >= BLOCK_HEADS) return;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 h = warp * 16 + (lane >> 2) + 8 * i;
        float most = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 32; ++j) most = fmaxf(most, fmaxf(fabsf(o[4 * j + 2 * i]), fabsf(o[4 * j + 2 * i + 1])));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const u32 exponent = min(max(__float_as_uint(most) >> 23, LEAST_PART_EXPONENT), 253u);
        const float inverse = bits_to_float((254 + PART_SHIFT - exponent) << 23);
        if ((lane & 3) == 0) ((float*)&notes.scale[h])[warpgroup] = bits_to_float((exponent - PART_SHIFT) << 23);
        const u32 to = shared(sum) + h * PART_BYTES + (warpgroup * 256 + (lane & 3) * 2) * 2;
#pragma unroll
        for (u32 j = 0; j < 32; ++j)
            asm volatile("st.shared.u32 [%0], %1;" :: "r"(to + 16 * j),
                         "r"(pack_f16(o[4 * j + 2 * i] * inverse, o[4 * j + 2 * i + 1] * inverse)) : "memory");
    }
}

// Adds up the parts of this CTA's heads and writes them. Every CTA's part, scales and stats are complete.
__device__ inline void combine(const Args& a, Notes& notes, const u8* sum) {
    const u32 rank = cluster_rank(), first = BLOCK_HEADS * rank / CLUSTER, heads = BLOCK_HEADS * (rank + 1) / CLUSTER - first;
    const u32 i = threadIdx.x, part = i % CLUSTER, mine = i / CLUSTER;
    // everything that comes from other CTAs is on its way at once
    constexpr u32 Pieces = LATENT / 8, Rounds = ((BLOCK_HEADS + CLUSTER - 1) / CLUSTER * Pieces + CONSUMERS - 1) / CONSUMERS;
    float4 stats = make_float4(0.0f, 0.0f, 0.0f, 0.0f), scale = stats, v[Rounds][CLUSTER];
    if (mine < heads) {
        stats = read_part(&notes.stats[first + mine], part);
        scale = read_part(&notes.scale[first + mine & ~1u], part);
    }
#pragma unroll
    for (u32 n = 0; n < Rounds; ++n) {
        const u32 piece = i + n * CONSUMERS;
        if (piece < heads * Pieces && a.first_head + first + piece / Pieces < a.heads) {
#pragma unroll
            for (u32 c = 0; c < CLUSTER; ++c)
                v[n][c] = read_part(sum + (first + piece / Pieces) * PART_BYTES + piece % Pieces * 16, c);
        }
    }
    if (mine < heads) {
        const float top = fmaxf(stats.x, stats.z);
        notes.parts[i] = make_float2(top, stats.y * exp2_of(stats.x - top) + stats.w * exp2_of(stats.z - top));
    }
    named_barrier<1, CONSUMERS>();
    if (mine < heads) {
        float all = LOWEST, total = 0.0f;
#pragma unroll
        for (u32 c = 0; c < CLUSTER; ++c) all = fmaxf(all, notes.parts[mine * CLUSTER + c].x);
#pragma unroll
        for (u32 c = 0; c < CLUSTER; ++c)
            total += notes.parts[mine * CLUSTER + c].y * exp2_of(notes.parts[mine * CLUSTER + c].x - all);
        // no entry: 0 / 1; a total that is NaN has a sum that is NaN
        const float share = exp2_of(notes.parts[i].x - all) * (total > 0.0f ? 1.0f / total : 1.0f);
        const bool odd = first + mine & 1;
        notes.weight[i] = make_float2(share * (odd ? scale.z : scale.x), share * (odd ? scale.w : scale.y));
    }
    named_barrier<1, CONSUMERS>();
#pragma unroll
    for (u32 n = 0; n < Rounds; ++n) {
        const u32 piece = i + n * CONSUMERS, head = piece / Pieces, column = piece % Pieces * 8;
        if (piece < heads * Pieces && a.first_head + first + head < a.heads) {
            float result[8] = {};
#pragma unroll
            for (u32 c = 0; c < CLUSTER; ++c) {
                const float2 weights = notes.weight[head * CLUSTER + c];
                const float weight = column < 256 ? weights.x : weights.y;
                const float words[4] = {v[n][c].x, v[n][c].y, v[n][c].z, v[n][c].w};
#pragma unroll
                for (u32 w = 0; w < 4; ++w) {
                    const float2 pair = unpack_f16(__float_as_uint(words[w]));
                    result[2 * w] += weight * pair.x, result[2 * w + 1] += weight * pair.y;
                }
            }
            u8* to = a.out + (a.first_head + first + head) * a.out_head_bytes;
            if (a.wide_q) {
                *(float4*)(to + column * 4) = make_float4(result[0], result[1], result[2], result[3]);
                *(float4*)(to + column * 4 + 16) = make_float4(result[4], result[5], result[6], result[7]);
            } else {
                *(uint4*)(to + column * 2) = make_uint4(pack_bf16(result[0], result[1]), pack_bf16(result[2], result[3]),
                                                        pack_bf16(result[4], result[5]), pack_bf16(result[6], result[7]));
            }
        }
    }
}

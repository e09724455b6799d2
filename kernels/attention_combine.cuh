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

// Adds up the parts of this CTA's heads and writes them. Every CTA's sum and stats are complete.
__device__ inline void combine(const Args& a, Notes& notes, const float* sum, u32 h0, u8* out, i64 out_head_bytes) {
    const u32 rank = cluster_rank(), first = HEADS * rank / CLUSTER, heads = HEADS * (rank + 1) / CLUSTER - first;
    const u32 i = threadIdx.x, part = i % CLUSTER, mine = i / CLUSTER;
    if (mine < heads) {
        const float4 v = read_part(&notes.stats[first + mine], part);
        const float top = fmaxf(v.x, v.z);
        notes.parts[i] = make_float2(top, v.y * exp2_of(v.x - top) + v.w * exp2_of(v.z - top));
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
        notes.weight[i] = exp2_of(notes.parts[i].x - all) * (total > 0.0f ? 1.0f / total : 1.0f);
    }
    named_barrier<1, CONSUMERS>();
    constexpr u32 Pieces = LATENT / 4, Batch = CLUSTER >= 8 ? 1 : 8 / CLUSTER;
    for (u32 start = threadIdx.x; start < heads * Pieces; start += Batch * CONSUMERS) {
        float4 v[Batch][CLUSTER];
#pragma unroll
        for (u32 n = 0; n < Batch; ++n) {
            const u32 piece = min(start + n * CONSUMERS, heads * Pieces - 1);
#pragma unroll
            for (u32 c = 0; c < CLUSTER; ++c)
                v[n][c] = read_part(&sum[(first + piece / Pieces) * PITCH + piece % Pieces * 4], c);
        }
#pragma unroll
        for (u32 n = 0; n < Batch; ++n) {
            const u32 piece = start + n * CONSUMERS, head = piece / Pieces, column = piece % Pieces * 4;
            if (piece >= heads * Pieces || h0 + first + head >= a.heads) continue;
            float4 result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (u32 c = 0; c < CLUSTER; ++c) {
                const float weight = notes.weight[head * CLUSTER + c];
                result.x += weight * v[n][c].x, result.y += weight * v[n][c].y;
                result.z += weight * v[n][c].z, result.w += weight * v[n][c].w;
            }
            u8* to = out + (h0 + first + head) * out_head_bytes;
            if (a.wide_q)
                *(float4*)(to + column * 4) = result;
            else
                *(uint2*)(to + column * 2) = make_uint2(pack_bf16(result.x, result.y), pack_bf16(result.z, result.w));
        }
    }
}

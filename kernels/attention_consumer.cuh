// Warpgroups 0 and 1 of attention.cu: queries, scores, probabilities, the running sum.
#pragma once
#include "attention_combine.cuh"

// Two bfloat16 of a query over the head's power of two, in the latents' format.
__device__ inline u32 scale_query(u32 v, float inverse) {
    return pack(bits_to_float(v << 16) * inverse, bits_to_float(v & 0xffff0000u) * inverse);
}

// Values 8 * chunk ... of a query as bfloat16. `from` 0: zeros.
template <bool Wide> __device__ inline uint4 load_query(u64 from, u32 chunk) {
    if (!Wide) return load_or_zero(from, chunk * 16);
    const uint4 low = load_or_zero(from, chunk * 32), high = load_or_zero(from, chunk * 32 + 16);
    return make_uint4(pack_bf16(bits_to_float(low.x), bits_to_float(low.y)), pack_bf16(bits_to_float(low.z), bits_to_float(low.w)),
                      pack_bf16(bits_to_float(high.x), bits_to_float(high.y)),
                      pack_bf16(bits_to_float(high.z), bits_to_float(high.w)));
}

// Each of the 8 warps brings 8 heads to shared memory; heads behind the last are zeros.
template <bool Wide> __device__ inline void load_queries(const Args& a, u8* smem, Notes& notes, u32 h0) {
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, to = shared(smem);
    uint4 latents[8][2], ropes[2];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 h = h0 + warp * 8 + i;
        const u64 from = h < a.heads ? (u64)(a.q + h * a.q_head_bytes) : 0;
        latents[i][0] = load_query<Wide>(from, lane);
        latents[i][1] = load_query<Wide>(from, 32 + lane);
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 h = h0 + warp * 8 + i * 4 + (lane >> 3);
        ropes[i] = load_query<Wide>(h < a.heads ? (u64)(a.q + h * a.q_head_bytes) : 0, LATENT / 8 + (lane & 7));
    }
    u32 rope_factor = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 h = warp * 8 + i;
        uint4 v[2] = {latents[i][0], latents[i][1]};
        if (FP8) {
            u32 most = 0;
#pragma unroll
            for (u32 j = 0; j < 2; ++j) {
                const u32 words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
                for (u32 w = 0; w < 4; ++w) most = max(most, max(words[w] & 0x7fff, words[w] >> 16 & 0x7fff));
            }
            most = __reduce_max_sync(~0u, most);
            const u32 exponent = min(max((most >> 7) + 1, LEAST_Q_EXPONENT), 253u);
            const float inverse = bits_to_float((254 - exponent) << 23);
            if (lane == 0) notes.query[h] = a.scale2 * bits_to_float(exponent << 23);
            if (lane == i) rope_factor = ((254 - exponent) << 7) * 0x10001u;
#pragma unroll
            for (u32 j = 0; j < 2; ++j)
                v[j] = make_uint4(scale_query(v[j].x, inverse), scale_query(v[j].y, inverse), scale_query(v[j].z, inverse),
                                  scale_query(v[j].w, inverse));
        }
        store_shared(to + (lane >> 3) * PANEL + swizzled(h, lane & 7), v[0]);
        store_shared(to + (4 + (lane >> 3)) * PANEL + swizzled(h, lane & 7), v[1]);
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 h = i * 4 + (lane >> 3);
        uint4 v = ropes[i];
        if (FP8) {
            const u32 factor = __shfl_sync(~0u, rope_factor, h);
            v = make_uint4(mul_bf16x2(v.x, factor), mul_bf16x2(v.y, factor), mul_bf16x2(v.z, factor), mul_bf16x2(v.w, factor));
        }
        store_shared(to + ROPE_PANEL + swizzled(warp * 8 + h, lane & 7), v);
    }
    fence_async();
    named_barrier<1, CONSUMERS>();
}

// Queues the scores of a tile once its rows are there.
__device__ inline void start_scores(float (&s)[32], u8* smem, Notes& notes, u32 turn) {
    const u32 slot = turn & 1;
    wait(&notes.full[slot], turn >> 1 & 1);
    fence_async();
    const u64 q = descriptor(shared(smem)), rows = descriptor(shared(smem) + SLOT * (1 + slot));
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < 4; ++i) multiply_rope(s, q + 8 * PANEL_STEP + i * STEP, rows + 8 * PANEL_STEP + i * STEP, i > 0);
#pragma unroll
    for (u32 panel = 0; panel < 8; ++panel)
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            multiply_latents(s, q + panel * PANEL_STEP + i * STEP, rows + panel * PANEL_STEP + i * STEP, true);
    wgmma_commit();
}

// What a thread knows of its two heads, over the tiles whose scores its warpgroup computes.
struct Running {
    float top[2] = {LOWEST, LOWEST};
    float total[2] = {0.0f, 0.0f};
};

// Scores to probabilities, in the place of the tile's rope parts. The tile before has its probabilities.
__device__ inline void publish(float (&s)[32], Running& run, u8* smem, Notes& notes, u32 turn, float scale2) {
    const u32 slot = turn & 1, warpgroup = threadIdx.x >> 7, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    const u32 h = warp * 16 + (lane >> 2), column = (lane & 3) * 2;
    float before[2], top[2], factor[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        before[i] = turn > 0 ? notes.top[slot ^ 1][h + 8 * i] : LOWEST;
        factor[i] = FP8 ? notes.query[h + 8 * i] : scale2;
        top[i] = before[i];
    }
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        const float2 bias = *(const float2*)&notes.bias[slot][8 * j + column];
        float2 row = make_float2(1.0f, 1.0f);
        if (FP8) row = *(const float2*)&notes.factor[slot][8 * j + column];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            float& x = s[4 * j + 2 * i];
            float& y = s[4 * j + 2 * i + 1];
            x = bias.x == NONE ? NONE : FP8 ? x * (factor[i] * row.x) + bias.x : x * factor[i];
            y = bias.y == NONE ? NONE : FP8 ? y * (factor[i] * row.y) + bias.y : y * factor[i];
            top[i] = fmaxf(top[i], fmaxf(x, y));
        }
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2));
        run.total[i] *= exp2_of(run.top[i] - top[i]);
        run.top[i] = top[i];
    }
    warpgroup_barrier(warpgroup);  // every warp's scores are complete: nobody reads the rope parts any more
    const u32 to = shared(smem) + SLOT * (1 + slot) + ROPE_PANEL;
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        float2 inverse = make_float2(1.0f, 1.0f);
        if (FP8) {
            const uint2 row = *(const uint2*)&notes.factor[slot][8 * j + column];
            inverse = make_float2(bits_to_float((254u << 23) - row.x), bits_to_float((254u << 23) - row.y));
        }
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const float x = exp2_of(s[4 * j + 2 * i] - top[i]), y = exp2_of(s[4 * j + 2 * i + 1] - top[i]);
            run.total[i] += FP8 ? x * inverse.x + y * inverse.y : x + y;
            asm volatile("st.shared.u32 [%0], %1;" :: "r"(to + swizzled(h + 8 * i, j) + column * 2), "r"(pack(x, y)) : "memory");
        }
    }
    if ((lane & 3) == 0) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            notes.top[slot][h + 8 * i] = top[i];
            notes.shrink[slot][h + 8 * i] = exp2_of(before[i] - top[i]);
        }
    }
    fence_async();
    __syncwarp();
    if (lane == 0) arrive(&notes.probs[slot]);
}

// Queues sum * shrink + probabilities @ values of a tile, for this warpgroup's latents.
__device__ inline void start_values(float (&o)[128], u8* smem, Notes& notes, u32 turn) {
    const u32 slot = turn & 1, warpgroup = threadIdx.x >> 7, h = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7);
    wait(&notes.probs[slot], turn >> 1 & 1);
    wait(&notes.full[slot], turn >> 1 & 1);  // complete: the tile's owner has seen it, and this warpgroup must too
    fence_async();
    const float low = notes.shrink[slot][h], high = notes.shrink[slot][h + 8];
#pragma unroll
    for (u32 j = 0; j < 32; ++j) o[4 * j] *= low, o[4 * j + 1] *= low, o[4 * j + 2] *= high, o[4 * j + 3] *= high;
    const u32 at = shared(smem) + SLOT * (1 + slot);
    const u64 probs = descriptor(at + ROPE_PANEL), values = transposed_descriptor(at + 4 * PANEL * warpgroup);
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < 4; ++i) multiply_values(o, probs + i * STEP, values + i * TRANSPOSED_STEP);
    wgmma_commit();
}

__device__ inline void release(Notes& notes, u32 turn) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(&notes.empty[turn & 1]);
}

__device__ inline void consume(const Args& a, u8* smem, Notes& notes, u32 h0, u32 tiles, u8* out, i64 out_head_bytes) {
    const u32 warpgroup = threadIdx.x >> 7, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    if (a.wide_q)
        load_queries<true>(a, smem, notes, h0);
    else
        load_queries<false>(a, smem, notes, h0);
    float o[128], s[32];
#pragma unroll
    for (u32 i = 0; i < 128; ++i) o[i] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 32; ++i) s[i] = 0.0f;
    Running run;
    u32 turn = 0;
    if (warpgroup == 0 && tiles > 0) {
        start_scores(s, smem, notes, 0);
        wgmma_wait<0>();
        settle(s);
        publish(s, run, smem, notes, 0, a.scale2);
        start_values(o, smem, notes, 0);
        wgmma_wait<0>();
        settle(o);
        release(notes, 0);
        turn = 1;
    }
    // `turn` has the other warpgroup's scores, turn + 1 ours: these first if their rows are there, so that the tensor cores have
    // work during a softmax; else this tile's values, which free its slot
    for (; turn + 1 < tiles; turn += 2) {
        if (all_agree(warpgroup, is_complete(&notes.full[(turn + 1) & 1], (turn + 1) >> 1 & 1))) {
            start_scores(s, smem, notes, turn + 1);
            start_values(o, smem, notes, turn);
            wgmma_wait<1>();
            settle(s);
            publish(s, run, smem, notes, turn + 1, a.scale2);
            wgmma_wait<0>();
            settle(o);
            release(notes, turn);
        } else {
            start_values(o, smem, notes, turn);
            wgmma_wait<0>();
            settle(o);
            release(notes, turn);
            start_scores(s, smem, notes, turn + 1);
            wgmma_wait<0>();
            settle(s);
            publish(s, run, smem, notes, turn + 1, a.scale2);
        }
        start_values(o, smem, notes, turn + 1);
        wgmma_wait<0>();
        settle(o);
        release(notes, turn + 1);
    }
    if (turn < tiles) {
        start_values(o, smem, notes, turn);
        wgmma_wait<0>();
        settle(o);
    }
    named_barrier<1, CONSUMERS>();  // nobody reads rows any more: the sum takes their place
    float* sum = (float*)(smem + SLOT);
    const u32 h = warp * 16 + (lane >> 2);
#pragma unroll
    for (u32 j = 0; j < 32; ++j) {
        const u32 column = warpgroup * 256 + 8 * j + (lane & 3) * 2;
        *(float2*)&sum[h * PITCH + column] = make_float2(o[4 * j], o[4 * j + 1]);
        *(float2*)&sum[(h + 8) * PITCH + column] = make_float2(o[4 * j + 2], o[4 * j + 3]);
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        run.total[i] += __shfl_xor_sync(~0u, run.total[i], 1);
        run.total[i] += __shfl_xor_sync(~0u, run.total[i], 2);
        if ((lane & 3) == 0) ((float2*)&notes.stats[h + 8 * i])[warpgroup] = make_float2(run.top[i], run.total[i]);
    }
    if (CLUSTER == 1) {
        named_barrier<1, CONSUMERS>();
    } else {
        cluster_arrive();
        cluster_wait();
    }
    combine(a, notes, sum, h0, out, out_head_bytes);
    if (CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    }
}

// Warpgroups 0 and 1 of attention.cu: queries, scores, probabilities, the running sum.
#pragma once
#include "attention_combine.cuh"

// Two bfloat16 of a query over the head's power of two, in the latents' format.
__device__ inline u32 scale_query(u32 v, float inverse) {
    return pack(bits_to_float(v << 16) * inverse, bits_to_float(v & 0xffff0000u) * inverse);
}

// Brings a head's query to float16 over its power of two (rope parts bfloat16 over the same one), in place.
__device__ inline void scale_head(const Args& a, Notes& notes, u32 to, u32 h, u32 lane) {
    const u32 at[3] = {to + (lane >> 3) * PANEL + swizzled(h, lane & 7), to + (4 + (lane >> 3)) * PANEL + swizzled(h, lane & 7),
                       to + ROPE_PANEL + swizzled(h, lane & 7)};
    u32 most = 0;
    uint4 v[2];
#pragma unroll
    for (u32 j = 0; j < 2; ++j) {
        v[j] = load_shared(at[j]);
        const u32 words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
        for (u32 w = 0; w < 4; ++w) most = max(most, max(words[w] & 0x7fff, words[w] >> 16 & 0x7fff));
    }
    most = __reduce_max_sync(~0u, most);
    const u32 exponent = min(max((most >> 7) + 1, LEAST_Q_EXPONENT), 253u);
    const float inverse = bits_to_float((254 - exponent) << 23);
    if (lane == 0) notes.query[h] = a.scale2 * bits_to_float(exponent << 23);
#pragma unroll
    for (u32 j = 0; j < 2; ++j)
        store_shared(at[j], make_uint4(scale_query(v[j].x, inverse), scale_query(v[j].y, inverse), scale_query(v[j].z, inverse),
                                       scale_query(v[j].w, inverse)));
    if (lane < 8) {
        const u32 factor = ((254 - exponent) << 7) * 0x10001u;
        const uint4 r = load_shared(at[2]);
        store_shared(at[2], make_uint4(mul_bf16x2(r.x, factor), mul_bf16x2(r.y, factor), mul_bf16x2(r.z, factor),
                                       mul_bf16x2(r.w, factor)));
    }
}

// Each of the 8 warps brings 8 heads to shared memory, as bfloat16; heads behind the last are zeros. Loops stay short: a cold
// start waits for instructions, too.
__device__ inline void load_queries(const Args& a, u8* smem, Notes& notes) {
    constexpr u32 Chunks = (LATENT + 64) / 8;
    const u32 first = (threadIdx.x >> 5) * 8, lane = threadIdx.x & 31, to = shared(smem);
#pragma unroll 6
    for (u32 i = lane; i < 8 * Chunks; i += 32) {
        const u32 h = first + i / Chunks, chunk = i % Chunks, at = to + (chunk >> 3) * PANEL + swizzled(h, chunk & 7);
        const bool real = a.first_head + h < a.heads;
        const u64 from = (u64)(a.q + (a.first_head + h) * a.q_head_bytes);
        if (a.wide_q) {
            const uint4 low = load_or_zero(real ? from : 0, chunk * 32), high = load_or_zero(real ? from : 0, chunk * 32 + 16);
            store_shared(at, make_uint4(pack_bf16(bits_to_float(low.x), bits_to_float(low.y)),
                                        pack_bf16(bits_to_float(low.z), bits_to_float(low.w)),
                                        pack_bf16(bits_to_float(high.x), bits_to_float(high.y)),
                                        pack_bf16(bits_to_float(high.z), bits_to_float(high.w))));
        } else {
            copy16(at, real ? from + chunk * 16 : (u64)a.q, real ? 16 : 0);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    if (FP8) {
#pragma unroll 1
        for (u32 i = 0; i < 8; ++i) scale_head(a, notes, to, first + i, lane);
    }
    fence_async();
    named_barrier<1, CONSUMERS>();
}

// Queues the scores of a tile as its rows come.
__device__ inline void start_scores(float (&s)[32], u8* smem, Notes& notes, u32 turn) {
    const u32 slot = turn & 1;
    const u64 q = descriptor(shared(smem)), rows = descriptor(shared(smem) + SLOT * (1 + slot));
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        wait(&notes.full[slot][half], turn >> 1 & 1);
        fence_async();
        wgmma_fence();
#pragma unroll
        for (u32 panel = 4 * half; panel < 4 * half + 4; ++panel)
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                multiply_latents(s, q + panel * PANEL_STEP + i * STEP, rows + panel * PANEL_STEP + i * STEP, panel + i > 0);
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) multiply_rope(s, q + 8 * PANEL_STEP + i * STEP, rows + 8 * PANEL_STEP + i * STEP, true);
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
        if (top[i] - before[i] <= SLACK) top[i] = before[i];
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

// Queues sum * shrink + probabilities @ values of a tile, for this warpgroup's latents. Always: no branch around the shrink, for
// with scores in flight the compiler would wait for them there.
template <bool Always = false> __device__ inline void start_values(float (&o)[128], u8* smem, Notes& notes, u32 turn) {
    const u32 slot = turn & 1, warpgroup = threadIdx.x >> 7, h = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7);
    wait(&notes.probs[slot], turn >> 1 & 1);
    wait(&notes.full[slot][warpgroup], turn >> 1 & 1);  // complete: the tile's owner has seen it, and this warpgroup must too
    fence_async();
    const float low = notes.shrink[slot][h], high = notes.shrink[slot][h + 8];
    if (Always || __any_sync(~0u, low != 1.0f || high != 1.0f)) {
#pragma unroll
        for (u32 j = 0; j < 32; ++j) o[4 * j] *= low, o[4 * j + 1] *= low, o[4 * j + 2] *= high, o[4 * j + 3] *= high;
    }
    const u32 at = shared(smem) + SLOT * (1 + slot);
    const u64 probs = descriptor(at + ROPE_PANEL), values = transposed_descriptor(at + 4 * PANEL * warpgroup);
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < 4; ++i) multiply_values(o, probs + i * STEP, values + i * TRANSPOSED_STEP);
    wgmma_commit();
}

// Writes the sum of the only CTA of a query row. Lanes of a row trade places, so that each has 8 latents that adjoin.
__device__ inline void write_alone(const float (&o)[128], const Args& a, const Notes& notes) {
    const u32 warpgroup = threadIdx.x >> 7, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, quarter = lane & 3;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 h = warp * 16 + (lane >> 2) + 8 * i;
        const float4 v = notes.stats[h];
        const float top = fmaxf(v.x, v.z), total = v.y * exp2_of(v.x - top) + v.w * exp2_of(v.z - top);
        const float weight = total > 0.0f ? 1.0f / total : 1.0f;  // no entry: 0 / 1; a total that is NaN has a sum that is NaN
        u8* to = a.out + (a.first_head + h) * a.out_head_bytes;
        const bool wanted = a.first_head + h < a.heads;
#pragma unroll
        for (u32 j = 0; j < 32; j += 4) {
            if (a.wide_q) {
#pragma unroll
                for (u32 n = 0; n < 4; ++n) {
                    const u32 at = 4 * (j + n) + 2 * i;
                    if (wanted)
                        *(float2*)(to + (warpgroup * 256 + 8 * (j + n) + quarter * 2) * 4) =
                            make_float2(o[at] * weight, o[at + 1] * weight);
                }
            } else {
                u32 w[4];
#pragma unroll
                for (u32 n = 0; n < 4; ++n) w[n] = pack_bf16(o[4 * (j + n) + 2 * i] * weight, o[4 * (j + n) + 2 * i + 1] * weight);
                const bool odd = quarter & 1, upper = quarter & 2;
#pragma unroll
                for (u32 n = 0; n < 4; n += 2) {
                    const u32 got = __shfl_xor_sync(~0u, odd ? w[n] : w[n + 1], 1);
                    if (odd) w[n] = got;
                    else w[n + 1] = got;
                }
                const u32 x = __shfl_xor_sync(~0u, upper ? w[0] : w[2], 2), y = __shfl_xor_sync(~0u, upper ? w[1] : w[3], 2);
                if (upper) w[0] = x, w[1] = y;
                else w[2] = x, w[3] = y;
                if (wanted)
                    *(uint4*)(to + (warpgroup * 256 + 8 * (j + quarter)) * 2) = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
}

__device__ inline void release(Notes& notes, u32 turn) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(&notes.empty[turn & 1][threadIdx.x >> 7]);
}

__device__ inline void consume(const Args& a, u8* smem, Notes& notes, u32 tiles) {
    const u32 warpgroup = threadIdx.x >> 7, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    load_queries(a, smem, notes);
    float o[128], s[32];
#pragma unroll
    for (u32 i = 0; i < 128; ++i) o[i] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 32; ++i) s[i] = 0.0f;
    Running run;
    u32 turn = 0;
    if (warpgroup == 0 && tiles > 0) {  // apart: in the loop, ptxas would serialise the products
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
    // work during a softmax; else its values, which free a slot
    for (; turn + 1 < tiles; turn += 2) {
        bool early;
        do {
            early = all_agree(warpgroup, is_complete(&notes.full[(turn + 1) & 1][1], (turn + 1) >> 1 & 1));
        } while (AWAIT_ROWS && turn < 2 && !early && !all_agree(warpgroup, is_complete(&notes.probs[turn & 1], turn >> 1 & 1)));
        if (early) {
            start_scores(s, smem, notes, turn + 1);
            start_values<true>(o, smem, notes, turn);
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
    const u32 h = warp * 16 + (lane >> 2);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        run.total[i] += __shfl_xor_sync(~0u, run.total[i], 1);
        run.total[i] += __shfl_xor_sync(~0u, run.total[i], 2);
        if ((lane & 3) == 0) ((float2*)&notes.stats[h + 8 * i])[warpgroup] = make_float2(run.top[i], run.total[i]);
    }
    named_barrier<1, CONSUMERS>();  // nobody reads rows any more, and stats are complete
    if (CLUSTER == 1) {
        write_alone(o, a, notes);
        return;
    }
    leave_part(o, smem + SLOT, notes);  // where the rows were
    cluster_arrive();
    cluster_wait();
    combine(a, notes, smem + SLOT);
    cluster_arrive_relaxed();  // has read what it needs of the others
    cluster_wait();
}

// What every part of attention.cu knows: sizes, the notes in shared memory, what names the rows of a query.
#pragma once
#include "cluster.cuh"

#ifndef FP8
#define FP8 0
#endif

constexpr int THREADS = 384, CONSUMERS = 256;
constexpr int HEADS = 64, TILE = 64, LATENT = 512;
constexpr int ROW_BYTES = FP8 ? 656 : 1152;
constexpr u32 PANEL = 8192, SLOT = 9 * PANEL, ROPE_PANEL = 8 * PANEL;
constexpr int PITCH = LATENT + 8;  // floats of a row of the sum in shared memory: no bank conflicts
constexpr u32 ALL_ROWS = 3 * SLOT;
constexpr float LOWEST = -1.0e30f;
#define NONE __int_as_float((int)0xff800000)  // -inf
constexpr u32 LEAST_EXPONENT = 127 - 100;   // smaller scales of fp8_ds_mla count as 2^-100
constexpr u32 LEAST_Q_EXPONENT = 127 - 10;  // smaller queries are not brought to 1: keeps scores in float32's range
static_assert(HEADS * PITCH * 4 <= 2 * SLOT, "the sum fits where the rows were");
static_assert((HEADS / CLUSTER + 1) * CLUSTER <= 96, "a cluster's parts of a CTA's heads");

struct Notes {
    float factor[2][TILE];  // fp8_ds_mla: the row's power of two
    float bias[2][TILE];    // its log2; -inf where masked
    float top[2][HEADS];    // running maximum behind a slot's tile
    float shrink[2][HEADS]; // factor of the sum before that tile is added
    float query[HEADS];     // factor of a head's scores
    float4 stats[HEADS];    // (maximum, total) of warpgroup 0's tiles and of warpgroup 1's
    float2 parts[96];       // combination: (maximum, total) of each head of this CTA and CTA of the cluster
    float weight[96];       // and the factor of that part
    u64 full[2], probs[2], empty[2];
};

struct Args {
    const u8* q;  // of this query row
    const u8* rows;
    const u8* host;
    const i32* ids;  // of this query row
    const i32* host_ids;
    i64 row_delta, q_head_bytes;
    u32 k, heads, wide_ids, wide_host_ids, wide_q;
    float scale2;
};

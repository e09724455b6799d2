// What every part of attention.cu knows: sizes, the notes in shared memory, what names the rows of a query.
#pragma once
#include "cluster.cuh"

#ifndef FP8
#define FP8 0
#endif
#ifndef BLOCK_HEADS
#define BLOCK_HEADS 64
#endif

constexpr int THREADS = 384, CONSUMERS = 256, PRODUCERS = 128;
constexpr int CONSUMER_REGISTERS = FP8 ? 192 : 216, PRODUCER_REGISTERS = FP8 ? 120 : 72;
constexpr int HEADS = 64, TILE = 64, LATENT = 512;
constexpr int ROW_BYTES = FP8 ? 656 : 1152;
constexpr u32 PANEL = 8192, SLOT = 9 * PANEL, ROPE_PANEL = 8 * PANEL;
constexpr u32 PART_BYTES = LATENT * 2 + 16;         // of a head's part of the sum in shared memory: no bank conflicts
constexpr u32 PART_SHIFT = 14;                      // its greatest value lies below 2^(PART_SHIFT + 1)
constexpr u32 LEAST_PART_EXPONENT = PART_SHIFT + 2; // of that value; smaller ones are not brought up
constexpr u32 ALL_ROWS = 3 * SLOT;
constexpr float LOWEST = -1.0e30f;
constexpr float SLACK = 8.0f;  // the maximum that counts stays until it is exceeded by this much: probabilities reach 2^8
// Both slots fill at once at the start, so a warpgroup's first scores are worth waiting for their rows, unless the other's
// probabilities come before. Later such a wait keeps the values' slot, and so the rows after them, which costs more than it
// gains. With the many tiles of a lone CTA of bfloat16 rows nothing is gained at the start either.
constexpr bool AWAIT_ROWS = FP8 || CLUSTER > 1;
#define NONE __int_as_float((int)0xff800000)  // -inf
constexpr u32 LEAST_EXPONENT = 127 - 100;   // smaller scales of fp8_ds_mla count as 2^-100
constexpr u32 LEAST_Q_EXPONENT = 127 - 10;  // smaller queries are not brought to 1: keeps scores in float32's range
// setmaxnreg waits for ever for registers that the CTA did not have at its launch
static_assert(CONSUMERS * CONSUMER_REGISTERS + PRODUCERS * PRODUCER_REGISTERS <= 65536 / THREADS / 8 * 8 * THREADS, "registers");
static_assert(HEADS * PART_BYTES <= 2 * SLOT, "the sum fits where the rows were");
static_assert((BLOCK_HEADS / CLUSTER + 1) * CLUSTER <= 96, "a cluster's parts of a CTA's heads");

struct Notes {
    float factor[2][TILE];  // fp8_ds_mla: the row's power of two
    float bias[2][TILE];    // its log2; -inf where masked
    float top[2][HEADS];    // the maximum that counts behind a slot's tile
    float shrink[2][HEADS]; // factor of the sum before that tile is added
    float query[HEADS];     // factor of a head's scores
    float4 stats[HEADS];    // (maximum, total) of warpgroup 0's tiles and of warpgroup 1's
    float2 scale[HEADS];    // powers of two that its float16 are over, for warpgroup 0's latents and for warpgroup 1's
    float2 parts[96];       // combination: (maximum, total) of each head of this CTA and CTA of the cluster
    float2 weight[96];      // and that part's factor, for warpgroup 0's latents and for warpgroup 1's
    u64 full[2][2], empty[2][2];  // of a slot's halves: latents 0-255; the others and the rope parts
    u64 probs[2];
};
static_assert(sizeof(Notes) <= 6144, "attention_cluster.SHARED_BYTES");

// Of a query row and a block of heads.
struct Args {
    const u8* q;
    const u8* rows;
    const u8* host;
    const i32* ids;
    const i32* host_ids;
    u8* out;
    i64 row_delta, q_head_bytes, out_head_bytes;
    u32 k, first_head, heads;  // heads: the end of the block
    u32 wide_ids, wide_host_ids, wide_q;
    float scale2;
};

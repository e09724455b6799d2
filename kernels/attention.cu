// Sparse MLA for Hopper at the real widths (latent 512, rope 64): bfloat16 or fp8_ds_mla rows.
//
// Geometry: one cluster of CLUSTER CTAs per (query row, block of BLOCK_HEADS heads); each CTA takes a share of the entries in
// tiles of 64, one CTA per SM. Warpgroups 0 and 1 consume: each owns 256 latents of the [64, 512] float32 sum in registers,
// and the scores and probabilities of every second tile. Warpgroup 2 produces: it gathers the named rows into a ring of two
// slots.
// A slot: rows as wgmma operands (panels of 64 values x 64 rows, 128-byte swizzle), 8 panels of latents and one of rope, a
// factor and a bias per row. When a tile is scored, its rope panel takes its probabilities. fp8_ds_mla rows pass through
// registers, where they become float16 over a power of two of their own (rope parts bfloat16 over the same one, which is
// exact), so that latents and rope add up in one sum; the power of two is applied to scores and, through the running maximum,
// to probabilities.
// Ordering, of a slot s and the halves h of its latents (the rope parts go with the second): full[s][h] the producer filled
// it; probs[s] its owner wrote probabilities, maximum and shrink; empty[s][h] the four warps of warpgroup h, whose values they
// are, have used it. Tiles are added in order, so a row's sum is a function of inputs, CLUSTER and BLOCK_HEADS alone: no
// atomics on data.
// Combination: each CTA leaves its sum (float16 over a power of two per head and half), maxima and totals in shared memory;
// behind a cluster barrier each CTA adds up the parts of its share of the result, in rank order, and writes it. A second
// barrier keeps shared memory alive for readers. BLOCK_HEADS < 64 (the other rows of an operand are zeros): more CTAs share
// the combination of few query rows, each with a smaller part. A lone CTA writes its sum itself.
// Sentinels: an id below 0 loads nothing (zeros in the slot, score -inf, whatever the query is). No entry at all gives 0.
// Preconditions: q, out, rows and their strides 16-byte aligned; an entry is named by `ids` or `host_ids`, never by both.
#include "attention_consumer.cuh"
#include "attention_producer.cuh"

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

// q [n, heads, 576] and out [n, heads, 512], both bfloat16 or both float32; rows [R, ROW_BYTES]; ids [n, k]. Strides of q and out
// in bytes, of ids in elements; scale2 = scaling * log2(e).
// Grid: n * ceil(heads / BLOCK_HEADS) * CLUSTER CTAs of 384 threads, attention_cluster.SHARED_BYTES of shared memory.
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) sparse_mla(
    const u8* q, const u8* rows, const u8* host, const i32* ids, const i32* host_ids, u8* out, float scale2, i64 row_delta,
    i64 k, i64 heads, i64 q_row_bytes, i64 q_head_bytes, i64 id_stride, i64 host_id_stride, i64 out_row_bytes, i64 out_head_bytes,
    i64 wide_ids, i64 wide_host_ids, i64 wide_q) {
    extern __shared__ u8 unaligned[];
    u8* smem = unaligned + (-shared(unaligned) & 1023);
    Notes& notes = *(Notes*)(smem + ALL_ROWS);
    const u32 head_blocks = ((u32)heads + BLOCK_HEADS - 1) / BLOCK_HEADS, program = blockIdx.x / CLUSTER;
    const u32 h0 = program % head_blocks * BLOCK_HEADS;
    const i64 n = program / head_blocks;
    const Args a{q + n * q_row_bytes, rows, host, ids + (n * id_stride << wide_ids),
                 host_ids == nullptr ? nullptr : host_ids + (n * host_id_stride << wide_host_ids), out + n * out_row_bytes,
                 row_delta, q_head_bytes, out_head_bytes, (u32)k, h0, min((u32)heads, h0 + BLOCK_HEADS), (u32)wide_ids,
                 (u32)wide_host_ids, (u32)wide_q, scale2};
    const u32 all_tiles = (u32)((k + TILE - 1) / TILE), rank = cluster_rank();
    const u32 first_tile = all_tiles * rank / CLUSTER, tiles = all_tiles * (rank + 1) / CLUSTER - first_tile;
    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < 2; ++slot) {
            barrier_init(&notes.probs[slot], 4);
            for (u32 half = 0; half < 2; ++half) {
                barrier_init(&notes.full[slot][half], FP8 ? PRODUCERS / 32 : PRODUCERS + PRODUCERS / 32);
                barrier_init(&notes.empty[slot][half], 4);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
        if (FP8)
            produce_fp8(a, smem, notes, first_tile * TILE, tiles);
        else
            produce_bf16(a, smem, notes, first_tile * TILE, tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
        consume(a, smem, notes, tiles);
    }
}

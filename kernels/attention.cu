// Sparse MLA for Hopper at the real widths (latent 512, rope 64): bfloat16 or fp8_ds_mla rows.
//
// Geometry: one cluster of CLUSTER CTAs per (query row, block of 64 heads); each CTA takes a share of the entries in tiles of 64,
// one CTA per SM. Warpgroups 0 and 1 consume: each owns 256 latents of the [64, 512] float32 sum in registers, and the scores and
// probabilities of every second tile. Warpgroup 2 produces: it gathers the named rows into a ring of two slots.
// A slot: rows as wgmma operands (panels of 64 values x 64 rows, 128-byte swizzle), 8 panels of latents and one of rope, a factor
// and a bias per row. When a tile is scored, its rope panel takes its probabilities. fp8_ds_mla rows pass through registers, where
// they become float16 over a power of two of their own (rope parts bfloat16 over the same one, which is exact), so that latents and
// rope add up in one sum; the power of two is applied to scores and, through the running maximum, to probabilities.
// Ordering: full[s] the producer filled slot s; probs[s] its owner wrote probabilities, maximum and shrink; empty[s] all 8 consumer
// warps have used it. Tiles are added in order, so a row's sum is a function of inputs and CLUSTER alone: no atomics on data.
// Combination: each CTA leaves its sum, maxima and totals in shared memory; behind a cluster barrier each CTA adds up the
// parts of its share of the result, in rank order, and writes it. A second barrier keeps shared memory alive for readers.
// Sentinels: an id below 0 loads nothing (zeros in the slot, score -inf, whatever the query is). No entry at all gives 0.
// Preconditions: q, out, rows and their strides 16-byte aligned; an entry is named by `ids` or `host_ids`, never by both.
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

__device__ inline u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ inline void barrier_init(u64* b, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared(b)), "r"(count) : "memory");
}

__device__ inline void arrive(u64* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared(b)) : "memory");
}

__device__ inline void arrive_with_copies(u64* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(shared(b)) : "memory");
}

__device__ inline bool is_complete(u64* b, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(shared(b)), "r"(parity) : "memory");
    return done != 0;
}

__device__ inline void wait(u64* b, u32 parity) {
    asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\n"
                 "DONE:\n}" :: "r"(shared(b)), "r"(parity) : "memory");
}

__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int Id, int Count> __device__ inline void named_barrier() {
    asm volatile("bar.sync %0, %1;" :: "n"(Id), "n"(Count) : "memory");
}

// Of the 128 threads of a warpgroup: whether all say yes.
__device__ inline bool all_agree(u32 warpgroup, bool yes) {
    u32 all;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %2, 0;\nbar.red.and.pred q, %1, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(all) : "r"(warpgroup + 4), "r"((u32)yes) : "memory");
    return all != 0;
}

__device__ inline void warpgroup_barrier(u32 warpgroup) {
    asm volatile("bar.sync %0, 128;" :: "r"(warpgroup + 2) : "memory");
}

__device__ inline float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float bits_to_float(u32 x) { return __uint_as_float(x); }

// (low, high) -> two halves of the format that latents and probabilities have.
__device__ inline u32 pack(float low, float high) {
    u32 v;
    if (FP8)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

__device__ inline u32 pack_bf16(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

__device__ inline u32 mul_bf16x2(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

// 16-byte chunk `chunk` of row `row` of a panel: its offset.
__device__ inline u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// wgmma: matrix descriptors. Rows of 128 bytes, groups of 8 rows 1,024 bytes apart; transposed also panels PANEL bytes apart.
__device__ inline u64 descriptor(u32 at) { return 0x4000004000000000ull | ((at >> 4) & 0x3fff); }
__device__ inline u64 transposed_descriptor(u32 at) { return descriptor(at) | ((u64)(PANEL >> 4) << 16); }
constexpr u64 STEP = 32 >> 4, TRANSPOSED_STEP = 16 * 128 >> 4, PANEL_STEP = PANEL >> 4;

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(Pending) : "memory");
}

// Keeps the compiler from reading sums of products ahead of the wait for them.
template <int N> __device__ inline void settle(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F64(d, i) F16(d, i), F16(d, i + 16), F16(d, i + 32), F16(d, i + 48)

#define SCORES_OF(TYPE)                                                                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"                                             \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                     \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                          \
                 "%32, %33, p, 1, 1, 0, 0;\n}"                                                                                \
                 : F16(s, 0), F16(s, 16) : "l"(a), "l"(b), "r"((u32)add))

__device__ inline void multiply_rope(float (&s)[32], u64 a, u64 b, bool add) { SCORES_OF("bf16"); }

#if FP8
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif
__device__ inline void multiply_latents(float (&s)[32], u64 a, u64 b, bool add) { SCORES_OF(ELEMENT); }

__device__ inline void multiply_values(float (&o)[128], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT "." ELEMENT " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "%128, %129, 1, 1, 1, 0, 1;"
                 : F64(o, 0), F64(o, 64) : "l"(a), "l"(b));
}

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

// ---------------------------------------------------------------------------------------------------------------- producer

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

__device__ inline void store_shared(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ inline uint4 load_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ inline uint4 load_or_zero(u64 row, u32 offset) {
    return row ? load16((const u8*)row + offset) : make_uint4(0, 0, 0, 0);
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

// --------------------------------------------------------------------------------------------------------------- consumers

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

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

// q [n, heads, 576] and out [n, heads, 512], both bfloat16 or both float32; rows [R, ROW_BYTES]; ids [n, k]. Strides of q and out
// in bytes, of ids in elements; scale2 = scaling * log2(e).
// Grid: n * ceil(heads / 64) * CLUSTER CTAs of 384 threads, attention_cluster.SHARED_BYTES of shared memory.
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) sparse_mla(
    const u8* q, const u8* rows, const u8* host, const i32* ids, const i32* host_ids, u8* out, float scale2, i64 row_delta,
    i64 k, i64 heads, i64 q_row_bytes, i64 q_head_bytes, i64 id_stride, i64 host_id_stride, i64 out_row_bytes, i64 out_head_bytes,
    i64 wide_ids, i64 wide_host_ids, i64 wide_q) {
    extern __shared__ u8 unaligned[];
    u8* smem = unaligned + (-shared(unaligned) & 1023);
    Notes& notes = *(Notes*)(smem + ALL_ROWS);
    const u32 head_blocks = ((u32)heads + HEADS - 1) / HEADS, program = blockIdx.x / CLUSTER, h0 = program % head_blocks * HEADS;
    const i64 n = program / head_blocks;
    const Args a{q + n * q_row_bytes, rows, host, ids + (n * id_stride << wide_ids),
                 host_ids == nullptr ? nullptr : host_ids + (n * host_id_stride << wide_host_ids), row_delta, q_head_bytes,
                 (u32)k, (u32)heads, (u32)wide_ids, (u32)wide_host_ids, (u32)wide_q, scale2};
    const u32 all_tiles = (u32)((k + TILE - 1) / TILE), rank = cluster_rank();
    const u32 first_tile = all_tiles * rank / CLUSTER, tiles = all_tiles * (rank + 1) / CLUSTER - first_tile;
    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < 2; ++slot) {
            barrier_init(&notes.full[slot], FP8 ? 4 : 128 + 4);
            barrier_init(&notes.probs[slot], 4);
            barrier_init(&notes.empty[slot], 8);
        }
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(72));
        if (FP8)
            produce_fp8(a, smem, notes, first_tile * TILE, tiles);
        else
            produce_bf16(a, smem, notes, first_tile * TILE, tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(216));
        consume(a, smem, notes, h0, tiles, out + n * out_row_bytes, out_head_bytes);
    }
}

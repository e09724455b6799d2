// Copies of rows named by lists in shared memory, and the order they are made in.
#pragma once
#include "common.cuh"

constexpr int BUCKETS = 1024;  // of host addresses: 16 GiB in 16 MiB each
constexpr int SORT_FROM = 16;  // fewer rows hardly share a translation

// Copies `count` rows named by lists in shared memory with all threads of the CTA, many loads in flight.
// A list entry below 0 in `dst` is skipped. `skip`: 16-byte parts at the front that are copied already.
template <int RowBytes, int Threads, int Unroll>
__device__ inline void copy_rows(const u8* src_rows, u8* dst_rows, const i32* src, const i32* dst, i32 dst_delta, i32 count,
                                 i32 skip = 0) {
    constexpr int Parts = RowBytes / 16;
    static_assert(RowBytes % 16 == 0, "a row is a multiple of 16 bytes");
    const i32 total = count * Parts;
    for (i32 first = threadIdx.x + skip; first < total; first += Threads * Unroll) {
        uint4 v[Unroll];
#pragma unroll
        for (int u = 0; u < Unroll; ++u) {
            const i32 i = first + u * Threads;
            if (i < total) v[u] = load16(src_rows + (i64)src[i / Parts] * RowBytes + (i % Parts) * 16);
        }
#pragma unroll
        for (int u = 0; u < Unroll; ++u) {
            const i32 i = first + u * Threads;
            if (i < total && dst[i / Parts] >= 0)
                store16(dst_rows + ((i64)dst[i / Parts] + dst_delta) * RowBytes + (i % Parts) * 16, v[u]);
        }
    }
}

// Orders `count` (src, dst) pairs in shared memory by which of Buckets equal ranges of addresses src is in; within a range
// they are in any order. Rows in the order of their host addresses need fewer address translations. Every thread calls it.
// Items * Threads >= count. `scratch`: [Buckets + 64] in shared memory.
template <int Threads, int Items, int Buckets>
__device__ inline void order_by_source(i32* src, i32* dst, i32 count, i32* scratch) {
    constexpr int Warps = Threads / 32, Each = Buckets / Threads;
    static_assert(Buckets % Threads == 0 && Warps <= 32, "every thread adds up some buckets");
    i32* sums = scratch + Buckets;  // of warps
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i32 key[Items], value[Items], bucket[Items], place[Items];
    i32 low = 0x7fffffff, high = 0;
#pragma unroll
    for (int n = 0; n < Items; ++n) {
        const i32 i = threadIdx.x + n * Threads;
        if (i >= count) break;
        key[n] = src[i], value[n] = dst[i];
        low = min(low, key[n]), high = max(high, key[n]);
    }
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (lane == 0) sums[warp] = low, sums[32 + warp] = high;
#pragma unroll
    for (int b = 0; b < Each; ++b) scratch[threadIdx.x * Each + b] = 0;
    __syncthreads();
    low = __reduce_min_sync(~0u, sums[lane % Warps]), high = __reduce_max_sync(~0u, sums[32 + lane % Warps]);
    const float scale = __fdividef((float)Buckets, (float)(high - low) + 1.0f);
#pragma unroll
    for (int n = 0; n < Items; ++n) {
        if ((i32)threadIdx.x + n * Threads >= count) break;
        bucket[n] = min((i32)((float)(key[n] - low) * scale), Buckets - 1);
        place[n] = atomicAdd(&scratch[bucket[n]], 1);
    }
    __syncthreads();
    i32 held[Each], mine = 0;
#pragma unroll
    for (int b = 0; b < Each; ++b) held[b] = scratch[threadIdx.x * Each + b], mine += held[b];
    i32 upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const i32 other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    i32 before = upto - mine + __reduce_add_sync(~0u, lane < warp ? sums[lane] : 0);
#pragma unroll
    for (int b = 0; b < Each; ++b) scratch[threadIdx.x * Each + b] = before, before += held[b];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < Items; ++n) {
        if ((i32)threadIdx.x + n * Threads >= count) break;
        const i32 i = scratch[bucket[n]] + place[n];
        src[i] = key[n], dst[i] = value[n];
    }
    __syncthreads();
}

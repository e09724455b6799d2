// Lists of misses: each CTA's in (row, column) order, their ranks among all, and the share that each CTA copies.
#pragma once
#include "request.cuh"

// Place of each flagged entry in the CTA's list, in (row, column) order, from the ballots and counts of all warps; counts
// by row.
__device__ inline void order(const i32* warp_counts, const u32 (&ballots)[ROUNDS], i32 (&place)[ROUNDS],
                             i32 (&rows)[QUERY_ROWS]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i32 running = 0;
#pragma unroll
    for (int row = 0; row < QUERY_ROWS; ++row) {
        const i32 before_row = running;
#pragma unroll
        for (int k = 0; k < ROUNDS_PER_ROW; ++k) {
            const int r = row * ROUNDS_PER_ROW + k;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (w == warp) place[r] = running + __popc(ballots[r] & ((1u << lane) - 1u));
                running += warp_counts[r * WARPS + w];
            }
        }
        rows[row] = running - before_row;
    }
}

// first_rank of each cell, and behind them the number of misses; `first_misses(cell)` of them are the first of their position.
template <class FirstMisses>
__device__ inline void rank_misses(Shared& s, const FirstMisses& first_misses) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp == 0) {
        i32 before = 0;
#pragma unroll
        for (int row = 0; row < QUERY_ROWS; ++row) {
            const i32 mine = lane < CLUSTER ? first_misses(row * CLUSTER + lane) : 0;
            i32 upto = mine;
#pragma unroll
            for (int d = 1; d < CLUSTER; d *= 2) {
                const i32 other = __shfl_up_sync(~0u, upto, d);
                if (lane >= d) upto += other;
            }
            if (lane < CLUSTER) s.first_rank[row * CLUSTER + lane] = before + upto - mine;
            before += __shfl_sync(~0u, upto, CLUSTER - 1);
        }
        if (lane == 0) s.first_rank[CELLS] = before;
    }
}

// Ranks [from, from + count) from the lists of the CTAs that found them.
template <class FirstMisses>
__device__ inline void deal_misses(const Shared& s, const Memory& m, const FirstMisses& first_misses, i32 from, i32 count) {
    for (i32 i = threadIdx.x; i < count; i += THREADS) {
        const i32 rank = from + i;
        int cell = 0, beyond = CELLS;  // the last cell that starts at or before the rank
        while (cell + 1 < beyond) {
            const int middle = (cell + beyond) / 2;
            if (s.first_rank[middle] <= rank) cell = middle;
            else beyond = middle;
        }
        const u32 owner_cta = cell % CLUSTER;
        i32 index = rank - s.first_rank[cell];
        for (int row = 0; row < cell / CLUSTER; ++row) index += first_misses(row * CLUSTER + owner_cta);
        const uint4 miss = read16_from(&m.list[index], owner_cta);  // a Miss
        m.share[i] = make_int2(miss.x, miss.z);  // position, entry
        m.copy_src[i] = miss.y;
        m.copy_dst[i] = i;
    }
}

// Slots that misses take: a clock with two-bit use counters, by one scan of all counters. hisparse/ops/clock.py has the rules.
#pragma once
#include "request.cuh"

// The first `misses` slots by (counter, ring distance from the hand) of those that this launch does not use go to m.victims,
// the last of them to s.last_slot. Every CTA finds all of them, which costs less than being told.
// Returns the last victim's counter. Every thread of the CTA calls it.
__device__ inline int find_victims(Shared& s, const Memory& m, const Planes (&counters)[GROUPS_PER_THREAD], i32 size, i32 start,
                                   i32 misses) {
    const int t = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int level = -1;
    u64 mine = 0;
    u32 eligible[GROUPS_PER_THREAD];
#pragma unroll
    for (int g = 0; g < GROUPS_PER_THREAD; ++g) {
        const i32 first = (t * GROUPS_PER_THREAD + g) * GROUP;
        eligible[g] = ~from_slot(first, size) & 0xffffu;
        if (eligible[g]) eligible[g] &= ~(m.used[first >> 5] >> (first & 16));
        mine += counters[g].counts(eligible[g]);
    }
    u64 upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u64 other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == 31) s.warp_levels[warp] = upto;
    if (start / GROUP / GROUPS_PER_THREAD == t) {  // the thread that holds the hand's group
        u64 passed = upto - mine;
#pragma unroll
        for (int g = 0; g < GROUPS_PER_THREAD; ++g)
            passed += counters[g].counts(eligible[g] & ~from_slot((t * GROUPS_PER_THREAD + g) * GROUP, start));
        s.passed = passed;
        s.hand_warp = warp;
    }
    __syncthreads();
    u64 before = upto - mine, total = 0, skipped = s.passed;  // skipped: eligible slots before the hand, by level
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += s.warp_levels[w];
        if (w < s.hand_warp) skipped += s.warp_levels[w];
        total += s.warp_levels[w];
    }
    i32 base[4];
    i32 below = 0;
#pragma unroll
    for (int l = 0; l < 4; ++l) {
        base[l] = below;
        const i32 n = (i32)((total >> (16 * l)) & 0xffff);
        if (level < 0 && below + n >= misses) level = l;
        below += n;
    }
    u64 reached = before;
#pragma unroll
    for (int g = 0; g < GROUPS_PER_THREAD; ++g) {
        const i32 first = (t * GROUPS_PER_THREAD + g) * GROUP;
        for (int l = 0; l <= level; ++l) {
            const i32 ahead = (i32)((skipped >> (16 * l)) & 0xffff), in_level = (i32)((total >> (16 * l)) & 0xffff);
            i32 n = (i32)((reached >> (16 * l)) & 0xffff);
            for (u32 left = counters[g].at(l) & eligible[g]; left; left &= left - 1, ++n) {
                const i32 where = first + __ffs(left) - 1;
                const i32 rank = base[l] + n - ahead + (where >= start ? 0 : in_level);
                if (rank < misses) m.victims[rank] = (u16)where;
                if (rank == misses - 1) s.last_slot = where;
            }
        }
        reached += counters[g].counts(eligible[g]);
    }
    __syncthreads();
    return level;
}

// What a search that ended at `last_slot` and `level` does to the counters of a group; its hits are raised afterwards.
__device__ inline void age(Planes& counters, i32 first, u32 hit, i32 size, i32 start, i32 last_slot, int level) {
    const Planes before = counters;
    const u32 among = ~from_slot(first, size) & ~hit & 0xffffu, past = from_slot(first, last_slot + 1);
    const u32 ahead = from_slot(first, start);
    const u32 passed = (last_slot >= start ? ahead & ~past : ahead | ~past) & 0xffffu;
    u32 taken = before.at(level) & passed;
    for (int l = 0; l < level; ++l) taken |= before.at(l);
    taken &= among;
    for (int l = 0; l < level; ++l) counters.decrease(among);
    counters.decrease(among & passed);
    counters.set_one(taken);
}

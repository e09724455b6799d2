// The exact top_k of every row's scores: positions ascending, equal scores to the lower position, -1 behind the last.
//
// Geometry: one cluster of CLUSTER CTAs of THREADS threads per row, grid n * CLUSTER. A CTA owns a contiguous share of the row's
//   positions, cut by the actual length; a share of up to THREADS * HELD is read once and held in registers, a longer one is
//   read four times. Three histograms (11, 11 and 10 bits of the order-preserving integer of a score), summed over the cluster
//   through distributed shared memory where the search for the rank goes, give the least selected score and how many of its
//   equals are; the last one only where not all scores of the second one's bin are selected (equals, or nearly). Then the
//   positions are written in order. A row of at most top_k positions is written without reading scores.
// Ownership: every element of out [n, top_k] is written once, by one thread.
// Preconditions: scores of positions [0, min(length, max_len)) of a row longer than top_k are written; rows start at multiples
//   of 16 bytes and may be read up to the next such multiple; top_k >= 1; no NaN.
// Sentinels: seat -1 = padding row: all -1. A row longer than max_len is cut and reported in status.
// Ordering: a CTA leaves only after its cluster has read its shared memory.
// Determinism: the result is a function of the scores alone (histogram sums commute; -0 counts as 0).
//
// Defines: CLUSTER, THREADS, LONG_SEATS, LONG_LENGTHS (1: int64).

#include "cluster.cuh"
#include "indexer.cuh"

constexpr int WARPS = THREADS / 32, HELD = 16, UNROLL = 4;
constexpr int HIGH_BINS = 2048, LOW_BINS = 1024;
static_assert(WARPS <= 32, "a warp scans one number per warp");

struct Shared {
    u32 bins[3][HIGH_BINS];         // the third has LOW_BINS
    u32 coarse[3][HIGH_BINS / 32];  // sums of 32 bins
    u32 bin[3], rest[3], whole;  // whole: of the last bin that was searched, all are wanted
    u32 above, equal;  // of this CTA
    u32 counts[2][WARPS];
};

// The order of these integers is that of the scores; -0 and 0 are one value. Integer arithmetic, for denormals must stay.
__device__ __forceinline__ u32 ordered(float score) {
    const u32 bits = __float_as_uint(score), u = bits ^ (bits >> 31 ? ~0u : 1u << 31);
    return u == 0x7fffffffu ? 0x80000000u : u;
}

// Behind a barrier, so a plain load: read_from orders more than these need.
__device__ __forceinline__ u32 value_in(const u32* p, u32 rank) {
    if (CLUSTER == 1) return *p;
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote(p, rank)) : "memory");
    return value;
}

__device__ __forceinline__ u32 sum_of_cluster(const u32* p) {
    u32 sum = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) sum += value_in(p, r);
    return sum;
}

__device__ __forceinline__ u32 scan(u32 value) {  // inclusive, over the lanes
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 v = __shfl_up_sync(~0u, value, d);
        if ((threadIdx.x & 31) >= d) value += v;
    }
    return value;
}

// f(score as integer) for every position of [low, high); low is a multiple of 4.
template <class F>
__device__ __forceinline__ void stream(const float* scores, int low, int high, F f) {
    for (int base = low + threadIdx.x * 4; base < high; base += THREADS * 4 * UNROLL) {
        float4 v[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            const int i = base + j * THREADS * 4;
            v[j] = i < high ? *(const float4*)(scores + i) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            const int left = high - (base + j * THREADS * 4);
            if (left > 0) f(ordered(v[j].x));
            if (left > 1) f(ordered(v[j].y));
            if (left > 2) f(ordered(v[j].z));
            if (left > 3) f(ordered(v[j].w));
        }
    }
}

// The bin that holds the need-th greatest of the cluster's histogram, and how many of that bin are wanted: to s.bin and s.rest,
// the same in every CTA, known to warp 0 on return.
template <int BINS>
__device__ __forceinline__ void find(Shared& s, int pass, u32 need) {
    constexpr int EACH = BINS / 1024;  // coarse bins of a lane
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __syncthreads();
#pragma unroll
    for (int c = warp; c < BINS / 32; c += WARPS) {
        const u32 sum = __reduce_add_sync(~0u, s.bins[pass][c * 32 + lane]);
        if (lane == 0) s.coarse[pass][c] = sum;
    }
    cluster_sync();
    if (warp == 0) {
        u32 count[EACH], sum = 0;  // from the greatest down
#pragma unroll
        for (int j = 0; j < EACH; j++) sum += count[j] = sum_of_cluster(&s.coarse[pass][BINS / 32 - 1 - (lane * EACH + j)]);
        u32 before = scan(sum) - sum, coarse = 0, rest = 0;
        bool found = false;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (before < need && need <= before + count[j]) found = true, coarse = BINS / 32 - 1 - (lane * EACH + j), rest = need - before;
            before += count[j];
        }
        const int owner = __ffs(__ballot_sync(~0u, found)) - 1;
        coarse = __shfl_sync(~0u, coarse, owner), rest = __shfl_sync(~0u, rest, owner);
        const int bin = coarse * 32 + 31 - lane;
        sum = sum_of_cluster(&s.bins[pass][bin]);
        before = scan(sum) - sum;
        if (before < rest && rest <= before + sum) s.bin[pass] = bin, s.rest[pass] = rest - before, s.whole = rest == before + sum;
        __syncwarp();
    }
}

// How many of this CTA's scores lie in a bin above `bin`; warp 0.
template <int BINS>
__device__ __forceinline__ u32 above(const Shared& s, int pass, u32 bin) {
    const u32 lane = threadIdx.x & 31;
    u32 sum = (bin & ~31u) + lane > bin ? s.bins[pass][(bin & ~31u) + lane] : 0;
#pragma unroll
    for (u32 c = lane; c < BINS / 32; c += 32) sum += c > bin / 32 ? s.coarse[pass][c] : 0;
    return sum;
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, 1)
indexer_topk(const float* __restrict__ scores, i64 stride, const seat_t* seats, const length_t* lengths, i64 top_k,
             i64 max_len, int* out, int* status) {
    __shared__ Shared s;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, k = (int)top_k;
    const i64 seat = seats[row], bound = lengths[row], given = seat < 0 ? 0 : bound;
    const int length = (int)(given < 0 ? 0 : given > max_len ? max_len : given);
    if (given > max_len && rank == 0 && tid == 0 && status && atomicOr(&status[0], NO_INDEXER_PAGE) == 0) {
        status[1] = (int)seat;
        status[2] = (int)given - 1;
        status[3] = row;
    }
    out += (i64)row * k;
    if (length <= k) {  // the same for the whole cluster
        for (int i = rank * THREADS + tid; i < k; i += CLUSTER * THREADS) out[i] = i < length ? i : -1;
        return;
    }
    scores += row * stride;
    const int share = ((length + CLUSTER - 1) / CLUSTER + 31) & ~31;
    const int low = min(rank * share, length), high = min(low + share, length);
    // a warp owns `each` words of 32 neighbouring positions
    const bool holds = share <= THREADS * HELD;
    const int each = holds ? (share / 32 + WARPS - 1) / WARPS : 32;
    u32 held[HELD];  // 0 = none: less than every score
    if (holds) {
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            const int i = low + (warp * each + j) * 32 + lane;
            held[j] = j < each && i < high ? ordered(scores[i]) : 0;
        }
    }
    for (int i = tid; i < 3 * HIGH_BINS; i += THREADS) s.bins[0][i] = 0;
    __syncthreads();
    const auto visit = [&](auto f) {
        if (holds) {
#pragma unroll
            for (int j = 0; j < HELD; j++)
                if (j < each) f(held[j]);
        } else {
            stream(scores, low, high, f);
        }
    };
    visit([&](u32 u) { if (u) atomicAdd(&s.bins[0][u >> 21], 1); });
    find<HIGH_BINS>(s, 0, k);
    __syncthreads();
    u32 prefix = s.bin[0];
    visit([&](u32 u) { if (u >> 21 == prefix) atomicAdd(&s.bins[1][u >> 10 & 2047], 1); });
    find<HIGH_BINS>(s, 1, s.rest[0]);
    __syncthreads();
    prefix = prefix << 11 | s.bin[1];
    const bool whole = s.whole;  // the same in every CTA
    if (!whole) {
        visit([&](u32 u) { if (u >> 10 == prefix) atomicAdd(&s.bins[2][u & 1023], 1); });
        find<LOW_BINS>(s, 2, s.rest[1]);
    }
    if (CLUSTER > 1 && warp == 0) {
        u32 sum = above<HIGH_BINS>(s, 0, s.bin[0]) + above<HIGH_BINS>(s, 1, s.bin[1]);
        if (!whole) sum += above<LOW_BINS>(s, 2, s.bin[2]);
        else if (lane == 0) sum += s.bins[1][s.bin[1]];
        const u32 total = __reduce_add_sync(~0u, sum);
        if (lane == 0) s.above = total, s.equal = whole ? 0 : s.bins[2][s.bin[2]];
    }
    cluster_sync();
    // Selected are all above `least`, and the first `wanted` equal to it.
    const u32 least = whole ? (prefix << 10) - 1 : prefix << 10 | s.bin[2], wanted = whole ? 0 : s.rest[2];

    u32 above_before = 0, equal_before = 0;  // in the shares of lower ranks
    if (CLUSTER > 1) {
        if (lane < rank) above_before = value_in(&s.above, lane), equal_before = value_in(&s.equal, lane);
        above_before = __reduce_add_sync(~0u, above_before);
        equal_before = __reduce_add_sync(~0u, equal_before);
        // Nothing of another CTA is read any more. A release, so that these reads come before it; it waits for no store,
        // as positions are written behind it.
        cluster_arrive();
    }
    for (int base = low, parity = 0; base < high; base += WARPS * each * 32, parity ^= 1) {
        const int first = base + warp * each * 32;  // lane j of a warp owns the warp's j-th word
        u32 greater = 0, equal = 0;
        const auto take = [&](int j, u32 u, bool inside) {
            const u32 a = __ballot_sync(~0u, inside && u > least), e = __ballot_sync(~0u, inside && u == least);
            if (lane == j) greater = a, equal = e;
        };
        if (holds) {
#pragma unroll
            for (int j = 0; j < HELD; j++)
                if (j < each) take(j, held[j], held[j] != 0);
        } else {
#pragma unroll 8
            for (int j = 0; j < 32; j++) {
                const int i = first + j * 32 + lane;
                const bool inside = i < high;
                take(j, inside ? ordered(scores[i]) : 0, inside);
            }
        }
        const u32 own = __popc(greater) | __popc(equal) << 16;  // at most 32,768 of either in all
        u32 sums = scan(own);
        if (lane == 31) s.counts[parity][warp] = sums;
        __syncthreads();
        const u32 count = lane < WARPS ? s.counts[parity][lane] : 0;
        const u32 lower = __reduce_add_sync(~0u, lane < warp ? count : 0), all = __reduce_add_sync(~0u, count);
        sums += lower - own;
        const u32 above_here = above_before + (sums & 0xffff), equal_here = equal_before + (sums >> 16);
        for (int extra = (int)(equal_here + __popc(equal)) - (int)wanted; extra > 0 && equal; extra--)
            equal &= ~(1u << (31 - __clz(equal)));  // the lower positions stay
        int* to = out + above_here + min(equal_here, wanted);
        const int position = first + lane * 32;
        for (u32 rest = greater | equal; rest; rest &= rest - 1) *to++ = position + __ffs(rest) - 1;
        above_before += all & 0xffff;
        equal_before += all >> 16;
    }
    cluster_wait();
}

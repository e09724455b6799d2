// The exact top_k of every row's scores: positions ascending, equal scores to the lower position, -1 behind the last.
//
// Geometry: one cluster of CLUSTER CTAs of THREADS threads per row, grid n * CLUSTER. A CTA owns a contiguous share of the row's
//   positions, cut by the actual length. Three histograms (11, 11 and 10 bits of the order-preserving integer of a score),
//   summed over the cluster through distributed shared memory, give the least selected score and how many of its equals
//   are; a fourth walk writes the positions in order. A row of at most top_k positions is written without reading scores.
// Ownership: every element of out [n, top_k] is written once, by one thread.
// Preconditions: scores of positions [0, min(length, max_len)) of a row longer than top_k are written; top_k >= 1; no NaN.
// Sentinels: seat -1 = padding row: all -1. A row longer than max_len is cut and reported in status.
// Ordering: a CTA leaves only after its cluster has read its shared memory.
// Determinism: the result is a function of the scores alone (histogram sums commute; -0 counts as 0).
//
// Defines: CLUSTER, THREADS, LONG_SEATS, LONG_LENGTHS (1: int64).

typedef unsigned int u32;
typedef long long i64;
#if LONG_SEATS
typedef i64 seat_t;
#else
typedef int seat_t;
#endif
#if LONG_LENGTHS
typedef i64 length_t;
#else
typedef int length_t;
#endif

constexpr int WARPS = THREADS / 32, UNROLL = 8;
constexpr int NO_INDEXER_PAGE = 16;
constexpr int HIGH_BINS = 2048, LOW_BINS = 1024;
static_assert(HIGH_BINS % (2 * THREADS) == 0 && LOW_BINS % THREADS == 0, "every thread owns as many bins");

struct Shared {
    __align__(16) u32 high[HIGH_BINS];
    u32 middle[HIGH_BINS], low[LOW_BINS];
    u32 partial[3][WARPS], bin[3], rest[3];
    u32 above, equal;  // of this CTA
    u32 counts[2][WARPS];
};

// The order of these integers is that of the scores; -0 and 0 are one value.
__device__ __forceinline__ u32 ordered(float score) {
    const u32 u = __float_as_uint(score + 0.f);
    return u ^ (u >> 31 ? ~0u : 1u << 31);
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() {
    if (CLUSTER == 1) __syncthreads();
    else cluster_arrive(), cluster_wait();
}

__device__ __forceinline__ u32 remote(const u32* p, u32 rank) {
    if (CLUSTER == 1) return *p;
    u32 address, value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// Walks over this CTA's share, f(score as integer) for each.
template <class F>
__device__ __forceinline__ void walk(const float* scores, int low, int high, F f) {
    for (int base = low; base < high; base += THREADS * UNROLL) {
        float v[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            const int i = base + j * THREADS + threadIdx.x;
            v[j] = i < high ? scores[i] : 0.f;
        }
#pragma unroll
        for (int j = 0; j < UNROLL; j++)
            if (base + j * THREADS + (int)threadIdx.x < high) f(ordered(v[j]));
    }
}

// The bin that holds the need-th greatest of the cluster's histogram, and how many of that bin are wanted. Every CTA finds the same.
template <int BINS>
__device__ __forceinline__ void find(Shared& s, const u32* histogram, int pass, u32 need) {
    constexpr int EACH = BINS / THREADS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    cluster_barrier();
    u32 count[EACH], sum = 0;  // of bins from the greatest down: thread 0 owns the greatest
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        count[j] = 0;
#pragma unroll
        for (int r = 0; r < CLUSTER; r++) count[j] += remote(&histogram[BINS - 1 - (j + EACH * threadIdx.x)], r);
        sum += count[j];
    }
    u32 before = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 v = __shfl_up_sync(~0u, before, d);
        if (lane >= d) before += v;
    }
    if (lane == 31) s.partial[pass][warp] = before;
    __syncthreads();
    before += __reduce_add_sync(~0u, lane < warp ? s.partial[pass][lane] : 0) - sum;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        if (before < need && need <= before + count[j]) {
            s.bin[pass] = BINS - 1 - (j + EACH * threadIdx.x);
            s.rest[pass] = need - before;
        }
        before += count[j];
    }
    __syncthreads();
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
    const i64 given = seats[row] < 0 ? 0 : lengths[row];
    const int length = (int)(given < 0 ? 0 : given > max_len ? max_len : given);
    if (given > max_len && rank == 0 && tid == 0 && status && atomicOr(&status[0], NO_INDEXER_PAGE) == 0) {
        status[1] = (int)seats[row];
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

    for (int i = tid; i < HIGH_BINS; i += THREADS) s.high[i] = 0, s.middle[i] = 0;
    for (int i = tid; i < LOW_BINS; i += THREADS) s.low[i] = 0;
    if (tid == 0) s.above = s.equal = 0;
    __syncthreads();
    walk(scores, low, high, [&](u32 u) { atomicAdd(&s.high[u >> 21], 1); });
    find<HIGH_BINS>(s, s.high, 0, k);
    u32 prefix = s.bin[0];
    walk(scores, low, high, [&](u32 u) { if (u >> 21 == prefix) atomicAdd(&s.middle[u >> 10 & 2047], 1); });
    find<HIGH_BINS>(s, s.middle, 1, s.rest[0]);
    prefix = prefix << 11 | s.bin[1];
    walk(scores, low, high, [&](u32 u) { if (u >> 10 == prefix) atomicAdd(&s.low[u & 1023], 1); });
    find<LOW_BINS>(s, s.low, 2, s.rest[1]);
    const u32 least = prefix << 10 | s.bin[2], wanted = s.rest[2];  // all above `least`, and the first `wanted` equal to it

    u32 above_before = 0, equal_before = 0;  // in the shares of lower ranks
    if (CLUSTER > 1) {
        u32 sum = 0;
        for (int i = tid; i < HIGH_BINS; i += THREADS) sum += (i > s.bin[0] ? s.high[i] : 0) + (i > s.bin[1] ? s.middle[i] : 0);
        for (int i = tid; i < LOW_BINS; i += THREADS) sum += i > s.bin[2] ? s.low[i] : 0;
        sum = __reduce_add_sync(~0u, sum);
        if (lane == 0) atomicAdd(&s.above, sum);
        if (tid == 0) s.equal = s.low[s.bin[2]];
        cluster_barrier();
        if (lane < rank) above_before = remote(&s.above, lane), equal_before = remote(&s.equal, lane);
        above_before = __reduce_add_sync(~0u, above_before);
        equal_before = __reduce_add_sync(~0u, equal_before);
        cluster_arrive();  // nothing of another CTA is read any more
    }
    for (int base = low, parity = 0; base < high; base += THREADS * 32, parity ^= 1) {
        const int words = (min(high - base, THREADS * 32) + 31) / 32, each = (words + WARPS - 1) / WARPS;
        const int first = base + warp * each * 32;  // lane j of a warp owns the j-th word of 32 positions of the warp
        u32 above = 0, equal = 0;
#pragma unroll 8
        for (int j = 0; j < each; j++) {
            const int i = first + j * 32 + lane;
            const bool inside = i < high && warp * each + j < words;
            const u32 u = inside ? ordered(scores[i]) : 0;
            const u32 a = __ballot_sync(~0u, inside && u > least), e = __ballot_sync(~0u, inside && u == least);
            if (lane == j) above = a, equal = e;
        }
        u32 sums = __popc(above) | __popc(equal) << 16;  // at most 32,768 of either
        const u32 own = sums;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const u32 v = __shfl_up_sync(~0u, sums, d);
            if (lane >= d) sums += v;
        }
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
        for (u32 rest = above | equal; rest; rest &= rest - 1) *to++ = position + __ffs(rest) - 1;
        above_before += all & 0xffff;
        equal_before += all >> 16;
    }
    if (CLUSTER > 1) cluster_wait();
}

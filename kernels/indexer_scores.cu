// Scores of the lightning indexer: out[row][p] = sum_h weights[row][h] * relu((q[row][h] . key(p)) * scale), float32.
//
// Geometry: a persistent grid of any size, 256 threads. An item is TILE = 256 consecutive positions of a segment: a run of at
//   most RUN rows that name the same seat, so that a prefill chunk or the rows of a verification read a key once per RUN rows.
//   Every CTA derives the same list of items from seats and lengths, weighs an item by its work, and takes an equal,
//   contiguous share of it. So the grid depends on shapes alone (a captured graph), and the work on the lengths alone.
// Ownership: a CTA owns its items and writes out[row][p] once, for p < length(row), of rows whose length exceeds top_k; nothing
//   else of `out` is written. bfloat16: a warp holds 32 keys in registers as the A operand of mma.m16n8k16 and walks
//   over the rows' queries, double-buffered in shared memory. fp8 (128 e4m3, then a float32 scale: 132 bytes) is the same
//   after the warp has staged its 32 keys and made bfloat16 of them. float32: a thread holds one key, plain FMA, no TF32.
// Preconditions: n <= MAX_ROWS; q and weights contiguous, 16-byte aligned; a page's rows start at multiples of 16 bytes
//   (fp8: pages do, and hold their rows without gaps);
//   max_len <= pages * BLOCK_SIZE (a longer row is cut; the selection reports it); DIM % 32 == 0.
// Sentinels: seat -1 = padding row; block 0 = no page: reported in status, its positions score -inf. A key at or beyond the
//   length, or of a missing page, is never loaded (fp8: what lies behind a length in its 32 keys is loaded, and has no effect).
// Determinism: a score is a function of its row and key alone; only which error is reported first depends on timing.
//
// Defines: HEADS, DIM, BLOCK_SIZE, KEYS (0 bfloat16, 1 float32, 2 fp8 with bfloat16 queries), LONG_SEATS, LONG_LENGTHS
//   (1: int64).

#include "indexer.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, TILE = 256, RUN = 16, MAX_ROWS = 1024;
constexpr int WARP_KEYS = TILE / WARPS;
constexpr int LOAD_COST = 3;  // loading a tile's keys costs about as much as scoring this many rows
constexpr bool FLOAT32 = KEYS == 1, FP8 = KEYS == 2;
constexpr int PADDED_HEADS = (HEADS + 7) / 8 * 8;
constexpr int ITEM = FLOAT32 ? 4 : 2;
constexpr int Q_BYTES = DIM * ITEM;
// 16-byte reads of two neighbouring heads must fall into different halves of the banks
constexpr int Q_STRIDE = FLOAT32 ? Q_BYTES : (Q_BYTES % 128 ? Q_BYTES : Q_BYTES + 64);
constexpr int Q_BUFFER = PADDED_HEADS * Q_STRIDE;
static_assert(DIM % 32 == 0 && HEADS >= 1 && PADDED_HEADS * 2 <= THREADS, "unsupported shape");
static_assert(!FP8 || (DIM == 128 && BLOCK_SIZE % WARP_KEYS == 0), "an fp8 key has 128 values; 32 neighbours lie in one page");
static_assert(THREADS * 4 == MAX_ROWS, "the scan gives every thread four rows");

extern __shared__ __align__(16) char shared[];  // queries [2][Q_BUFFER], then staged fp8 keys

struct Shared {
    int seat[MAX_ROWS], length[MAX_ROWS], ends[MAX_ROWS];  // ends: inclusive sum of costs
    short rows[MAX_ROWS];                                  // of the segment that starts here, 0 = none does
    int longest[MAX_ROWS];                                 // of the segment
    int partial[WARPS];
    float weights[2][PADDED_HEADS];
};

__device__ __forceinline__ void report(int* status, int seat, i64 position, int row) {
    if (status && atomicOr(&status[0], NO_INDEXER_PAGE) == 0) {
        status[1] = seat;
        status[2] = (int)position;
        status[3] = row;
    }
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_async16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ uint4 load_key(const char* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ int tiles_of(int length) { return (length + TILE - 1) / TILE; }

// Fills the list of segments and the inclusive sum of their costs.
__device__ __forceinline__ void list_segments(Shared& s, const seat_t* seats, const length_t* lengths, int n, i64 top_k,
                                              i64 max_len) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    for (int i = tid; i < MAX_ROWS; i += THREADS) {
        int seat = -1, length = 0;
        if (i < n) {
            seat = (int)seats[i];
            i64 l = lengths[i];
            if (l > max_len) l = max_len;
            length = seat >= 0 && l > top_k ? (int)l : 0;
        }
        s.seat[i] = seat;
        s.length[i] = length;
    }
    __syncthreads();
    int costs[4], sum = 0;
    for (int j = 0; j < 4; j++) {
        const int i = tid * 4 + j;
        int rows = 0, longest = 0, cost = 0;
        if (i < n && (i % RUN == 0 || s.seat[i] != s.seat[i - 1])) {
            do longest = max(longest, s.length[i + rows]), rows++;
            while ((i + rows) % RUN && i + rows < n && s.seat[i + rows] == s.seat[i]);
            cost = tiles_of(longest) * (rows + LOAD_COST);
        }
        s.rows[i] = (short)rows;
        s.longest[i] = longest;
        costs[j] = cost;
        sum += cost;
    }
    int ends = sum;
    for (int d = 1; d < 32; d *= 2) {
        const int v = __shfl_up_sync(~0u, ends, d);
        if (lane >= d) ends += v;
    }
    if (lane == 31) s.partial[warp] = ends;
    __syncthreads();
    for (int w = 0; w < warp; w++) ends += s.partial[w];
    ends -= sum;
    for (int j = 0; j < 4; j++) s.ends[tid * 4 + j] = ends += costs[j];
    __syncthreads();
}

__device__ __forceinline__ void load_query(char* buffer, float* w, const char* q, const float* weights, i64 row) {
    const char* from = q + row * (HEADS * Q_BYTES);
    for (int i = threadIdx.x; i < HEADS * Q_BYTES / 16; i += THREADS) {
        const int head = i / (Q_BYTES / 16), part = i % (Q_BYTES / 16);
        const int place = FP8 ? part % 4 * 4 + part / 4 : part;  // fp8: lane t of a quad holds values 32t to 32t + 31
        copy_async16(shared_address(buffer + head * Q_STRIDE + place * 16), from + i * 16);
    }
    if (threadIdx.x < HEADS) copy_async4(shared_address(w + threadIdx.x), weights + row * HEADS + threadIdx.x);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

#if KEYS == 1
struct Keys {
    float4 part[DIM / 4];
    u32 missing;

    __device__ __forceinline__ void load(const char* pages, i64 block_bytes, i64 row_bytes, const int* blocks, int first,
                                         int longest, int seat, int row, int* status) {
        const int p = first + threadIdx.x;
        missing = 0;
        const int block = p < longest ? blocks[p / BLOCK_SIZE] : 0;
        if (p < longest && block <= 0) report(status, seat, p, row), missing = 1;
        const float4* from = (const float4*)(pages + block * block_bytes + p % BLOCK_SIZE * row_bytes);
#pragma unroll
        for (int c = 0; c < DIM / 4; c++) part[c] = block > 0 ? from[c] : make_float4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void score(const char* query, const float* weights, float scale, float* out, int first,
                                          int length) const {
        float total = 0;
#pragma unroll 1
        for (int h = 0; h < HEADS; h++) {
            const float4* q = (const float4*)(query + h * Q_STRIDE);
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int c = 0; c < DIM / 4; c++) {
                const float4 v = q[c];
                sum.x = fmaf(v.x, part[c].x, sum.x), sum.y = fmaf(v.y, part[c].y, sum.y);
                sum.z = fmaf(v.z, part[c].z, sum.z), sum.w = fmaf(v.w, part[c].w, sum.w);
            }
            total = fmaf(weights[h], fmaxf(((sum.x + sum.y) + (sum.z + sum.w)) * scale, 0.f), total);
        }
        const int p = first + threadIdx.x;
        if (p < length) out[p] = missing ? -__int_as_float(0x7f800000) : total;
    }
};
#else
// Lane (g, t) = (lane / 4, lane % 4) holds of keys g, g + 8, ... the 16 bytes at 64c + 16t. The order of the products
// over DIM is free as long as both operands share it: 16 bytes of a key and of a head are two k-steps of an mma.
struct Keys {
    static constexpr int GROUPS = WARP_KEYS / 8;
    uint4 part[GROUPS][DIM / 32];
    u32 missing;

#if KEYS == 2
    static constexpr int KEY_BYTES = DIM + 4, WARP_BYTES = WARP_KEYS * KEY_BYTES;
    float key_scale[GROUPS];

    // Two e4m3 codes in the high bytes of each half, as bfloat16.
    static __device__ __forceinline__ u32 to_bfloat16(u32 codes) {
        u32 shifted = codes >> 4 & 0x07f007f0, out;  // the fields of a bfloat16 whose value is 2^-120 of the code's
        shifted |= codes & 0x80008000;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(shifted), "r"(0x7b807b80));  // 2^120
        return out;
    }

    // The keys of a warp lie in one page.
    __device__ __forceinline__ void load(const char* pages, i64 block_bytes, i64 row_bytes, const int* blocks, int first,
                                         int longest, int seat, int row, int* status) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
        char* staged = shared + 2 * Q_BUFFER + warp * WARP_BYTES;
        const int p = first + warp * WARP_KEYS;
        missing = 0;
        int block = 0;
        if (p < longest) {
            block = blocks[p / BLOCK_SIZE];
            if (block <= 0) {
                missing = ~0u;
                if (lane == 0) report(status, seat, p, row);
            }
        }
        __syncwarp();  // the codes of the tile before are read
        if (block > 0) {
            const char* from = pages + block * block_bytes + p % BLOCK_SIZE * KEY_BYTES;
            for (int i = lane; i < WARP_BYTES / 16; i += 32) copy_async16(shared_address(staged + i * 16), from + i * 16);
        }
        asm volatile("cp.async.commit_group;\n cp.async.wait_all;" ::: "memory");
        __syncwarp();
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            const u32* key = (const u32*)(staged + (j * 8 + g) * KEY_BYTES);
            key_scale[j] = __uint_as_float(key[DIM / 4]);
#pragma unroll
            for (int c = 0; c < DIM / 32; c++) {
                const u32 low = key[t * 8 + c * 2], high = key[t * 8 + c * 2 + 1];
                part[j][c].x = to_bfloat16(__byte_perm(low, 0, 0x1404)), part[j][c].y = to_bfloat16(__byte_perm(low, 0, 0x3424));
                part[j][c].z = to_bfloat16(__byte_perm(high, 0, 0x1404)), part[j][c].w = to_bfloat16(__byte_perm(high, 0, 0x3424));
            }
        }
    }
#else
    __device__ __forceinline__ void load(const char* pages, i64 block_bytes, i64 row_bytes, const int* blocks, int first,
                                         int longest, int seat, int row, int* status) {
        const int lane = threadIdx.x & 31, t = lane & 3;
        const int p0 = first + (threadIdx.x >> 5) * WARP_KEYS + (lane >> 2);
        int block[GROUPS];
        missing = 0;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            const int p = p0 + j * 8;
            block[j] = p < longest ? blocks[p / BLOCK_SIZE] : 0;
        }
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            const int p = p0 + j * 8;
            const char* from = pages + block[j] * block_bytes + p % BLOCK_SIZE * row_bytes + t * 16;
#pragma unroll
            for (int c = 0; c < DIM / 32; c++) part[j][c] = block[j] > 0 ? load_key(from + c * 64) : make_uint4(0, 0, 0, 0);
            if (p < longest && block[j] <= 0) {
                missing |= 1u << j;
                if (t == 0) report(status, seat, p, row);
            }
        }
    }
#endif

    static __device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }

    __device__ __forceinline__ void score(const char* query, const float* weights, float scale, float* out, int first,
                                          int length) const {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        float total[GROUPS] = {};
        constexpr int STEP = PADDED_HEADS % 16 ? 1 : 2;  // blocks of 8 heads at once: independent chains of mma
#pragma unroll
        for (int b = 0; b < PADDED_HEADS / 8; b += STEP) {
            float dots[STEP][GROUPS / 2][4] = {};
#pragma unroll
            for (int c = 0; c < DIM / 32; c++) {
#pragma unroll
                for (int i = 0; i < STEP; i++) {
                    const uint4 v = *(const uint4*)(query + ((b + i) * 8 + g) * Q_STRIDE + c * 64 + t * 16);
#pragma unroll
                    for (int m = 0; m < GROUPS / 2; m++) {
                        const uint4 &low = part[2 * m][c], &high = part[2 * m + 1][c];
                        mma(dots[i][m], low.x, high.x, low.y, high.y, v.x, v.y);
                        mma(dots[i][m], low.z, high.z, low.w, high.w, v.z, v.w);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                const float2 w = *(const float2*)(weights + (b + i) * 8 + t * 2);
#pragma unroll
                for (int j = 0; j < GROUPS; j++) {
                    const float* d = &dots[i][j / 2][j % 2 * 2];
                    total[j] = fmaf(w.x, fmaxf(d[0] * scale, 0.f), total[j]);
                    total[j] = fmaf(w.y, fmaxf(d[1] * scale, 0.f), total[j]);
                }
            }
        }
        float mine = 0;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            total[j] += __shfl_xor_sync(~0u, total[j], 1);
            total[j] += __shfl_xor_sync(~0u, total[j], 2);
#if KEYS == 2
            total[j] *= key_scale[j];
#endif
            if (missing >> j & 1) total[j] = -__int_as_float(0x7f800000);
            if (t == j) mine = total[j];
        }
        const int p = first + (threadIdx.x >> 5) * WARP_KEYS + t * 8 + g;
        if (p < length) out[p] = mine;
    }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, FLOAT32 ? 1 : 2)
indexer_scores(const char* q, const float* weights, const char* pages, i64 block_bytes, i64 row_bytes, const int* table,
               i64 table_stride, const seat_t* seats, const length_t* lengths, i64 n, i64 top_k, float scale, i64 max_len,
               float* out, i64 out_stride, int* status) {
    char* const queries = shared;
    __shared__ Shared s;
    for (int h = HEADS; h < PADDED_HEADS; h++)  // padding heads add 0 * 0
        for (int i = threadIdx.x; i < Q_STRIDE / 2; i += THREADS)
            ((int*)(queries + h * Q_STRIDE + i / (Q_STRIDE / 4) * Q_BUFFER))[i % (Q_STRIDE / 4)] = 0;
    if (threadIdx.x < 2 * PADDED_HEADS) s.weights[threadIdx.x / PADDED_HEADS][threadIdx.x % PADDED_HEADS] = 0;
    list_segments(s, seats, lengths, (int)n, top_k, max_len);

    const int total = s.ends[MAX_ROWS - 1], share = total / (int)gridDim.x, more = total % (int)gridDim.x, cta = blockIdx.x;
    const int low = cta * share + min(cta, more), high = low + share + (cta < more);
    if (low >= high) return;
    int row = 0;  // the first row whose costs end beyond `low`: it starts the segment that `low` falls into
    for (int step = MAX_ROWS / 2; step; step /= 2)
        if (s.ends[row + step - 1] <= low) row += step;
    int rows = s.rows[row], tiles = tiles_of(s.longest[row]), begin = s.ends[row] - tiles * (rows + LOAD_COST);
    int tile = (low - begin + rows + LOAD_COST - 1) / (rows + LOAD_COST);  // an item is of the CTA that its start falls into
    int now = 0, last = -1, ahead = -1;  // the buffer in use holds the query of row `last`, the other that of `ahead`
    while (true) {
        while (tile >= tiles) {
            row += rows;
            if (row >= n) return;
            rows = s.rows[row], tiles = tiles_of(s.longest[row]), begin = s.ends[row] - tiles * (rows + LOAD_COST), tile = 0;
        }
        if (begin + tile * (rows + LOAD_COST) >= high) return;
        const int seat = s.seat[row], first = tile * TILE;
        Keys keys;
        keys.load(pages, block_bytes, row_bytes, table + seat * table_stride, first, s.longest[row], seat, row, status);
        for (int r = row; r < row + rows; r++) {
            if (r != last) {
                now ^= 1;
                if (ahead != r) {
                    asm volatile("cp.async.wait_all;" ::: "memory");  // of a query that is not wanted after all
                    load_query(queries + now * Q_BUFFER, s.weights[now], q, weights, r);
                }
                asm volatile("cp.async.wait_all;" ::: "memory");
                __syncthreads();  // the query is there, and nobody reads the other buffer any more
                ahead = last;
                last = r;
                const int next = r + 1 < row + rows ? r + 1 : row;
                if (next != r && next != ahead) {
                    load_query(queries + (now ^ 1) * Q_BUFFER, s.weights[now ^ 1], q, weights, next);
                    ahead = next;
                }
            }
            if (first < s.length[r])
                keys.score(queries + now * Q_BUFFER, s.weights[now], scale, out + r * out_stride, first, s.length[r]);
        }
        tile++;
    }
}

// Scores of the lightning indexer: out[row][p] = sum_h weights[row][h] * scale * relu(q[row][h] . key(p)), float32.
//
// Geometry: a persistent grid of any size, WARPS warps. A unit is 32 consecutive positions of a segment: a run of at most RUN rows
//   that name the same seat, so that a prefill chunk or the rows of a verification read a key once per RUN rows. Every CTA
//   derives the same list of units from seats and lengths, weighs a unit by its work, and takes an equal, contiguous share of
//   it; its warps take the share's units one after the other, as they get done. So the grid depends on shapes alone (a
//   captured graph), and the work on the lengths alone.
// Ownership: a warp owns the units that it took and writes out[row][p] once, for p < length(row), of rows whose length exceeds
//   top_k; nothing else of `out` is written.
// Ordering: a warp has one unit's keys in registers, the next one's on their way to its slot of shared memory (one bulk copy a
//   page, an mbarrier each), and the page of the one after that looked up. The queries of a segment lie in shared memory; those
//   of the CTA's next one come meanwhile, and a barrier per segment separates them.
// Products: bfloat16: 32 keys are the A operand of mma.m16n8k16. fp8 (128 e4m3, then a float32 scale: 132 bytes) is the same
//   after bfloat16 has been made of the codes. float32: a lane holds one key, which it reads itself, plain FMA, no TF32.
// Preconditions: n <= MAX_ROWS; q and weights contiguous, 16-byte aligned; a page's rows start at multiples of 16 bytes
//   (fp8: pages do, and hold their rows without gaps);
//   max_len <= pages * BLOCK_SIZE (a longer row is cut; the selection reports it); DIM % 32 == 0; BLOCK_SIZE a power of two.
// Sentinels: seat -1 = padding row; block 0 = no page: reported in status, its positions score -inf. A key at or beyond the
//   length, or of a missing page, is never loaded (fp8: up to 12 bytes behind a length are, and have no effect).
// Determinism: a score is a function of its row and key alone; only which error is reported first depends on timing.
//
// Defines: HEADS, DIM, BLOCK_SIZE, KEYS (0 bfloat16, 1 float32, 2 fp8 with bfloat16 queries), WARPS, RUN, LONG_SEATS,
//   LONG_LENGTHS (1: int64).

#include "indexer.cuh"

constexpr int THREADS = WARPS * 32, UNIT = 32, MAX_ROWS = 1024;
constexpr int LOAD_COST = 3;  // loading a unit's keys costs about as much as scoring this many rows
constexpr bool FLOAT32 = KEYS == 1, FP8 = KEYS == 2;
constexpr int PADDED_HEADS = (HEADS + 7) / 8 * 8;
constexpr int ITEM = FLOAT32 ? 4 : 2;
constexpr int Q_BYTES = DIM * ITEM, Q_BUFFER = PADDED_HEADS * Q_BYTES;
constexpr bool SWIZZLED = !FLOAT32 && Q_BYTES % 128 == 0;  // odd heads: halves of 128 bytes change places, for the banks
constexpr int KEY_BYTES = FP8 ? DIM + 4 : Q_BYTES, SLOT_BYTES = FLOAT32 ? 0 : UNIT * KEY_BYTES;
constexpr int PIECE = BLOCK_SIZE < UNIT ? BLOCK_SIZE : UNIT;  // neighbouring keys of a unit that lie in one page
static_assert(DIM % 32 == 0 && HEADS >= 1 && (BLOCK_SIZE & (BLOCK_SIZE - 1)) == 0 && WARPS <= 32, "unsupported shape");
static_assert(!FP8 || (DIM == 128 && PIECE == UNIT), "an fp8 key has 128 values; 32 neighbours lie in one page");

extern __shared__ __align__(16) char shared[];  // a slot for each warp, then queries [2][RUN][Q_BUFFER]

struct Shared {
    int seat[MAX_ROWS], length[MAX_ROWS], ends[MAX_ROWS];  // ends: inclusive sum of costs
    short rows[MAX_ROWS];                                  // of the segment that starts here, 0 = none does
    int longest[MAX_ROWS];                                 // of the segment
    int partial[WARPS];
    int start;    // row whose segment the CTA's share starts in
    int claimed;  // units of the share that warps have taken
    float weights[2][RUN][PADDED_HEADS];
    u64 arrived[WARPS];  // an mbarrier of each slot
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

__device__ __forceinline__ int units_of(int length) { return (length + UNIT - 1) / UNIT; }

// Costs [low, high) are this CTA's.
struct Share {
    int low, high;
};

// Fills the list of segments and the inclusive sum of their costs; finds the share, and the segment that it starts in.
__device__ __forceinline__ Share list_segments(Shared& s, const seat_t* seats, const length_t* lengths, int n, i64 top_k,
                                               i64 max_len) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
#pragma unroll 1
    for (int i = tid; i < n; i += THREADS) {
        const int seat = (int)seats[i];
        i64 l = lengths[i];
        if (l > max_len) l = max_len;
        s.seat[i] = seat;
        s.length[i] = seat >= 0 && l > top_k ? (int)l : 0;
    }
    __syncthreads();
    const int rows_each = (n + THREADS - 1) / THREADS, from = tid * rows_each, to = min(from + rows_each, n);
    int sum = 0;
#pragma unroll 1
    for (int i = from; i < to; i++) {
        int rows = 0, longest = 0;
        if (i % RUN == 0 || s.seat[i] != s.seat[i - 1]) {
            do longest = max(longest, s.length[i + rows]), rows++;
            while ((i + rows) % RUN && i + rows < n && s.seat[i + rows] == s.seat[i]);
        }
        s.rows[i] = (short)rows;
        s.longest[i] = longest;
        sum += s.ends[i] = units_of(longest) * (rows + LOAD_COST);
    }
    int ends = sum;
    for (int d = 1; d < 32; d *= 2) {
        const int v = __shfl_up_sync(~0u, ends, d);
        if (lane >= d) ends += v;
    }
    if (lane == 31) s.partial[warp] = ends;
    __syncthreads();
    const int partial = lane < WARPS ? s.partial[lane] : 0, total = __reduce_add_sync(~0u, partial);
    ends += __reduce_add_sync(~0u, lane < warp ? partial : 0) - sum;
    const int each = total / (int)gridDim.x, more = total % (int)gridDim.x, cta = blockIdx.x;
    const int low = cta * each + min(cta, more), high = low + each + (cta < more);
#pragma unroll 1
    for (int i = from; i < to; i++) {
        const int before = ends;
        s.ends[i] = ends += s.ends[i];
        if (before <= low && low < ends) s.start = i;
    }
    __syncthreads();
    return {low, high};
}

// Units [first, end) of one segment, in front of which `before` units are this CTA's.
struct Part {
    int row, rows, first, end, before;

    __device__ __forceinline__ bool exists() const { return first < end; }

    // Those of the segment of `row` whose costs start in the share.
    static __device__ __forceinline__ Part of(const Shared& s, int row, Share share, int before) {
        const int rows = s.rows[row], units = units_of(s.longest[row]), cost = rows + LOAD_COST;
        const int begin = s.ends[row] - units * cost;
        return {row, rows, max(0, (share.low - begin + cost - 1) / cost), min(units, (share.high - begin + cost - 1) / cost),
                before};
    }

    // The next one that is not empty, or one that does not exist.
    __device__ __forceinline__ void advance(const Shared& s, int n, Share share) {
        before += end - first;
        do {
            row += rows;
            if (row >= n || s.ends[row - 1] >= share.high) {
                end = first;
                return;
            }
            *this = of(s, row, share, before);
        } while (!exists());
    }
};

// Queries and weights of a run of rows; not there before a wait and a barrier.
__device__ __forceinline__ void load_queries(char* queries, float* run_weights, const char* q, const float* weights, i64 row,
                                             int rows) {
    constexpr int PARTS = Q_BYTES / 16;
    const char* from = q + row * (HEADS * Q_BYTES);
#pragma unroll 2
    for (int i = threadIdx.x; i < rows * HEADS * PARTS; i += THREADS) {
        const int head = i / PARTS % HEADS, part = i % PARTS;
        const int place = FP8 ? part % 4 * 4 + part / 4 : part;  // fp8: lane t of a quad holds values 32t to 32t + 31
        const int swapped = SWIZZLED ? place ^ (head & 1) * 4 : place;
        copy_async16(shared_address(queries + i / (HEADS * PARTS) * Q_BUFFER + head * Q_BYTES + swapped * 16), from + i * 16);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * HEADS; i += THREADS)
        copy_async4(shared_address(run_weights + i / HEADS * PADDED_HEADS + i % HEADS), weights + row * HEADS + i);
}

// What is on its way to the warp's slot, and the page that is needed next. A lane knows the page of one key of a unit.
struct Feed {
    char* slot;
    u64* arrived;
    const char* pages;
    i64 block_bytes, row_bytes;
    int block;  // of the unit to be asked for next
    u32 parity;

    __device__ __forceinline__ void look_up(const int* blocks, int first, int longest) {
        const int p = first + (threadIdx.x & 31);
        block = p < longest ? blocks[p / BLOCK_SIZE] : 0;
    }

    // Asks for the unit that was looked up; nobody reads the slot any more. Returns its keys that have no page.
    __device__ __forceinline__ u32 ask(int first, int longest, int seat, int row, int* status) {
        const int lane = threadIdx.x & 31, p = first + lane;
        const bool dense = row_bytes == KEY_BYTES;
        const int keys = !dense ? p < longest : lane % PIECE ? 0 : min(max(longest - p, 0), PIECE);
        const u32 bytes = block > 0 ? (keys * KEY_BYTES + 15) & ~15 : 0;
        const u32 missing = __ballot_sync(~0u, p < longest && block <= 0);
        if (__builtin_expect(p < longest && block <= 0, 0)) report(status, seat, p, row);
        const u32 all = __reduce_add_sync(~0u, bytes), barrier = shared_address(arrived);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        if (lane == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(all) : "memory");
        __syncwarp();
        if (bytes) {
            const char* from = pages + block * block_bytes + p % BLOCK_SIZE * row_bytes;
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(shared_address(slot + lane * KEY_BYTES)), "l"(from), "r"(bytes), "r"(barrier) : "memory");
        }
        return missing;
    }

    __device__ __forceinline__ void wait() {
        u32 done = 0;
        while (!done)
            asm volatile("{\n\t.reg .pred p;\n\t"
                         "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                         "selp.u32 %0, 1, 0, p;\n\t}" : "=r"(done) : "r"(shared_address(arrived)), "r"(parity) : "memory");
        parity ^= 1;
    }
};

#if KEYS == 1
struct Keys {
    float4 part[DIM / 4];
    u32 missing;

    __device__ __forceinline__ void load(const char* pages, i64 block_bytes, i64 row_bytes, const int* blocks, int first,
                                         int longest, int seat, int row, int* status) {
        const int p = first + (threadIdx.x & 31);
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
            const float4* q = (const float4*)(query + h * Q_BYTES);
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int c = 0; c < DIM / 4; c++) {
                const float4 v = q[c];
                sum.x = fmaf(v.x, part[c].x, sum.x), sum.y = fmaf(v.y, part[c].y, sum.y);
                sum.z = fmaf(v.z, part[c].z, sum.z), sum.w = fmaf(v.w, part[c].w, sum.w);
            }
            total = fmaf(weights[h], fmaxf((sum.x + sum.y) + (sum.z + sum.w), 0.f), total);
        }
        const int p = first + (threadIdx.x & 31);
        if (p < length) out[p] = missing ? -__int_as_float(0x7f800000) : total * scale;
    }
};
#else
// Lane (g, t) = (lane / 4, lane % 4) holds of keys g, g + 8, ... the 16 bytes at 64c + 16t. The order of the products
// over DIM is free as long as both operands share it: 16 bytes of a key and of a head are two k-steps of an mma.
struct Keys {
    static constexpr int GROUPS = UNIT / 8;
    uint4 part[GROUPS][DIM / 32];
    u32 missing;

#if KEYS == 2
    float key_scale[GROUPS];

    // Two e4m3 codes in the high bytes of each half, as bfloat16.
    static __device__ __forceinline__ u32 to_bfloat16(u32 codes) {
        u32 shifted = codes >> 4 & 0x07f007f0, out;  // the fields of a bfloat16 whose value is 2^-120 of the code's
        shifted |= codes & 0x80008000;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(shifted), "r"(0x7b807b80));  // 2^120
        return out;
    }
#endif

    __device__ __forceinline__ void load(const char* slot) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            const char* key = slot + (j * 8 + g) * KEY_BYTES;
#if KEYS == 2
            const u32* codes = (const u32*)key + t * 8;
            key_scale[j] = *(const float*)(key + DIM);
#pragma unroll
            for (int c = 0; c < DIM / 32; c++) {
                const u32 low = codes[c * 2], high = codes[c * 2 + 1];
                part[j][c].x = to_bfloat16(__byte_perm(low, 0, 0x1404)), part[j][c].y = to_bfloat16(__byte_perm(low, 0, 0x3424));
                part[j][c].z = to_bfloat16(__byte_perm(high, 0, 0x1404)), part[j][c].w = to_bfloat16(__byte_perm(high, 0, 0x3424));
            }
#else
            const uint4* from = (const uint4*)key + t;
            if (SWIZZLED) {  // lanes of odd keys read the halves of 128 bytes the other way round, for the banks
                const bool odd = g & 1;
#pragma unroll
                for (int c = 0; c < DIM / 32; c += 2) {
                    const uint4 a = from[c * 4 + odd * 4], b = from[c * 4 + 4 - odd * 4];
                    part[j][c] = odd ? b : a, part[j][c + 1] = odd ? a : b;
                }
            } else {
#pragma unroll
                for (int c = 0; c < DIM / 32; c++) part[j][c] = from[c * 4];
            }
#endif
        }
    }

    static __device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }

    __device__ __forceinline__ void score(const char* query, const float* weights, float scale, float* out, int first,
                                          int length) const {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        float total[GROUPS] = {};
        constexpr int STEP = PADDED_HEADS % 16 ? 1 : 2;  // blocks of 8 heads at once: independent chains of mma
        const char* head = query + g * Q_BYTES + t * 16;
        const int swap = SWIZZLED ? (g & 1) * 64 : 0;
#pragma unroll 1
        for (int b = 0; b < PADDED_HEADS / 8; b += STEP, head += STEP * 8 * Q_BYTES) {
            float dots[STEP][GROUPS / 2][4] = {};
#pragma unroll
            for (int c = 0; c < DIM / 32; c++) {
#pragma unroll
                for (int i = 0; i < STEP; i++) {
                    const uint4 v = *(const uint4*)(head + i * 8 * Q_BYTES + (c & ~1) * 64 + (c & 1 ? 64 - swap : swap));
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
                    total[j] = fmaf(w.x, fmaxf(d[0], 0.f), total[j]);
                    total[j] = fmaf(w.y, fmaxf(d[1], 0.f), total[j]);
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
            if (t == j) mine = total[j];
        }
        const int key = t * 8 + g, p = first + key;
        if (p < length) out[p] = missing >> key & 1 ? -__int_as_float(0x7f800000) : mine * scale;
    }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
indexer_scores(const char* q, const float* weights, const char* pages, i64 block_bytes, i64 row_bytes, const int* table,
               i64 table_stride, const seat_t* seats, const length_t* lengths, i64 n, i64 top_k, float scale, i64 max_len,
               float* out, i64 out_stride, int* status) {
    char* const queries = shared + WARPS * SLOT_BYTES;
    __shared__ Shared s;
    const int warp = threadIdx.x / 32, num = (int)n;
    if (HEADS < PADDED_HEADS) {  // padding heads add 0 * 0
        for (int i = threadIdx.x; i < 2 * RUN * Q_BUFFER / 4; i += THREADS) ((int*)queries)[i] = 0;
        for (int i = threadIdx.x; i < 2 * RUN * PADDED_HEADS; i += THREADS) s.weights[0][0][i] = 0;
    }
    if (threadIdx.x < WARPS) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&s.arrived[threadIdx.x])) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x == 0) s.claimed = WARPS;
    const Share share = list_segments(s, seats, lengths, num, top_k, max_len);
    if (share.low >= share.high) return;
    Part here = Part::of(s, s.start, share, 0);
    if (!here.exists()) here.advance(s, num, share);
    if (here.exists()) load_queries(queries, s.weights[0][0], q, weights, here.row, here.rows);

    Feed feed{shared + warp * SLOT_BYTES, &s.arrived[warp], pages, block_bytes, row_bytes, 0, 0};
    Part ahead = here;  // where the unit that was claimed last lies
    int unit = 0;
    const auto claim = [&](int number) {
        while (ahead.exists() && number - ahead.before >= ahead.end - ahead.first) ahead.advance(s, num, share);
        unit = ahead.first + number - ahead.before;
        if (!FLOAT32 && ahead.exists())
            feed.look_up(table + s.seat[ahead.row] * table_stride, unit * UNIT, s.longest[ahead.row]);
    };
    int asked_row, asked_unit;  // row: of its part, -1 = none
    u32 asked_missing = 0;
    const auto ask = [&] {
        asked_row = -1;
        if (!ahead.exists()) return;
        if (!FLOAT32) asked_missing = feed.ask(unit * UNIT, s.longest[ahead.row], s.seat[ahead.row], ahead.row, status);
        asked_row = ahead.row, asked_unit = unit;
        int next = 0;
        if ((threadIdx.x & 31) == 0) next = atomicAdd(&s.claimed, 1);
        claim(__shfl_sync(~0u, next, 0));
    };
    claim(warp);
    ask();
    for (int now = 0; here.exists(); now ^= 1) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();  // the queries are there, and nobody reads the other ones any more
        const char* const run = queries + now * RUN * Q_BUFFER;
        Part next = here;
        next.advance(s, num, share);
        if (next.exists())
            load_queries(queries + (now ^ 1) * RUN * Q_BUFFER, s.weights[now ^ 1][0], q, weights, next.row, next.rows);
        while (asked_row == here.row) {
            const int first = asked_unit * UNIT;
            Keys keys;
#if KEYS == 1
            keys.load(pages, block_bytes, row_bytes, table + s.seat[here.row] * table_stride, first, s.longest[here.row],
                      s.seat[here.row], here.row, status);
            ask();
#else
            keys.missing = asked_missing;
            feed.wait();
            keys.load(feed.slot);
            __syncwarp();
            ask();
#endif
#pragma unroll 1
            for (int r = 0; r < here.rows; r++) {
                const i64 row = here.row + r;
                if (first < s.length[row])
                    keys.score(run + r * Q_BUFFER, s.weights[now][r], scale, out + row * out_stride, first, s.length[row]);
            }
        }
        here = next;
    }
}

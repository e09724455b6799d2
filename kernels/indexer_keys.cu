// Writes indexer keys to their pages: row i goes to pages[table[seat][position / BLOCK_SIZE]][position % BLOCK_SIZE].
//
// Geometry: one warp per row, 4 rows per CTA of 128 threads. Ownership: a warp writes its row's DIM elements.
// fp8: DIM e4m3 codes, then their float32 scale = max(absmax, FLT_MIN) / 448; a code is value / scale, to nearest even.
// Preconditions: two written rows name different (seat, position); keys contiguous.
// Sentinels: seat -1 or writes 0 = skipped; block 0 or a page beyond the table = reported in status and skipped.
// Determinism: the pages are; which error is reported first depends on timing.
//
// Defines: DIM, BLOCK_SIZE, FROM_FLOAT32 (0: bfloat16), TO (0 bfloat16, 1 float32, 2 fp8), LONG_SEATS, LONG_POSITIONS (1: int64).

#include "indexer.cuh"

#if LONG_POSITIONS
typedef i64 position_t;
#else
typedef int position_t;
#endif

__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ float load(const u16* p) { return __uint_as_float((u32)*p << 16); }
__device__ __forceinline__ void store(float* p, float v) { *p = v; }
__device__ __forceinline__ void store(u16* p, float v) {
    asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b16 %0, h; }" : "=h"(*p) : "f"(v));
}

#if FROM_FLOAT32
typedef float from_t;
#else
typedef u16 from_t;
#endif
#if TO == 1
typedef float to_t;
#elif TO == 0
typedef u16 to_t;
#else
typedef unsigned char to_t;
static_assert(DIM % 32 == 0, "every lane quantises as many values");

// A scale can be a denormal: not to be flushed to 0, whatever the compiler's options.
__device__ __forceinline__ float divide(float a, float b) {
    float c;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ void quantize(unsigned char* to, const from_t* key) {
    constexpr int EACH = DIM / 32;
    const int lane = threadIdx.x % 32;
    float value[EACH];
    u32 largest = 0;  // absolute values compare like their bits; a NaN is above all
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        value[i] = load(key + lane * EACH + i);
        largest = max(largest, __float_as_uint(value[i]) & 0x7fffffff);
    }
    largest = max(__reduce_max_sync(~0u, largest), 0x00800000u);
    const float scale = divide(__uint_as_float(largest), 448.f);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        u16 code;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(0.f), "f"(divide(value[i], scale)));
        to[lane * EACH + i] = (unsigned char)code;
    }
    if (lane < 4) to[DIM + lane] = (unsigned char)(__float_as_uint(scale) >> 8 * lane);
}
#endif

extern "C" __global__ void __launch_bounds__(128)
indexer_keys(const from_t* keys, to_t* pages, i64 block_stride, i64 row_stride, const int* table, i64 table_stride,
             i64 num_pages, const seat_t* seats, const position_t* positions, const unsigned char* writes, i64 n, int* status) {
    const i64 row = blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= n || !writes[row] || seats[row] < 0) return;
    const i64 seat = seats[row], position = positions[row], page = position / BLOCK_SIZE;
    const int block = position >= 0 && page < num_pages ? table[seat * table_stride + page] : 0;
    if (block <= 0) {
        if (threadIdx.x % 32 == 0 && status && atomicOr(&status[0], NO_INDEXER_PAGE) == 0) {
            status[1] = (int)seat;
            status[2] = (int)position;
            status[3] = (int)row;
        }
        return;
    }
    to_t* to = pages + block * block_stride + position % BLOCK_SIZE * row_stride;
#if TO == 2
    quantize(to, keys + row * DIM);
#else
    for (int i = threadIdx.x % 32; i < DIM; i += 32) store(to + i, load(keys + row * DIM + i));
#endif
}

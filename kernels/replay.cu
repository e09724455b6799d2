// Copies of a leader's miss plan in a layer that follows it: copy only, no lookup, no state.
//
// Geometry   grid = (PARTS, rows of the plan); CTA (j, n) copies entries [count * j / PARTS, count * (j + 1) / PARTS) of plan
//            row n, ordered by host address. `count` comes from the device, so one captured launch serves every step.
// Requires   plan entries name distinct device rows; a device row below 0 is skipped.
// Ordering   after the leader's resolve and before this layer's attention, on streams that say so.
// Determinism  bytes are copied, each row by one CTA.
#include "copies.cuh"

constexpr int MAX_COPIES = TOP_K / PARTS + 1;

extern "C" __global__ void __launch_bounds__(THREADS)
replay(const i32* plan_host, const i32* plan_device, const i32* plan_count, i64 stride, i64 row_delta, const u8* host_rows,
       u8* rows) {
    __shared__ i32 src[MAX_COPIES], dst[MAX_COPIES], scratch[BUCKETS + 64];
    const i64 n = blockIdx.y;
    const i32 all = plan_count[n], part = blockIdx.x;
    const i32 from = (i32)((i64)all * part / PARTS), count = (i32)((i64)all * (part + 1) / PARTS) - from;
    if (count <= 0) return;
    for (i32 i = threadIdx.x; i < count; i += THREADS) {
        src[i] = plan_host[n * stride + from + i];
        dst[i] = plan_device[n * stride + from + i];
    }
    __syncthreads();
    if (count >= SORT_FROM) order_by_source<THREADS, (MAX_COPIES + THREADS - 1) / THREADS, BUCKETS>(src, dst, count, scratch);
    copy_rows<ROW_BYTES, THREADS, UNROLL>(host_rows, rows, src, dst, (i32)row_delta, count);
}

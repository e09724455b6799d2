// Positions to rows through block tables alone: device rows where resident, host rows elsewhere. No state, no copy.
//
// Geometry   one CTA per row of `topk`. Every element of every output is written.
// Sentinels  topk -1 or outside [0, seq_len), seat -1: -1 in both. `source_table` null: everything must be resident.
// Errors     a position without a page: -1 in both and the status word.
#include "common.cuh"

constexpr int BLOCK = 1 << BLOCK_SHIFT;

extern "C" __global__ void __launch_bounds__(THREADS)
lookup(const i32* topk, i64 topk_row_stride, i64 topk_stride, i64 top_k, const i32* seats, const void* seq_len, i64 seq_is_64,
       const i32* resident_table, i64 resident_stride, const i32* source_table, i64 source_stride, i64 pages,
       i64 rows_per_block, i64 row_offset, i32* out_ids, i32* out_host, i32* out_valid, i32* out_resident, i32* status) {
    __shared__ i32 counts[2];
    const i64 n = blockIdx.x;
    const i32 seat = seats[n];
    const i64 length = seq_is_64 ? ((const i64*)seq_len)[n] : (i64)((const i32*)seq_len)[n];
    const i64 limit = seat < 0 ? 0 : length;
    if (threadIdx.x < 2) counts[threadIdx.x] = 0;
    __syncthreads();
    i32 resident = 0, valid = 0;
    for (i64 column = threadIdx.x; column < top_k; column += THREADS) {
        const i32 pos = topk[n * topk_row_stride + column * topk_stride];
        i32 id = -1, host = -1;
        if (pos >= 0 && pos < limit) {
            const i32 page = pos >> BLOCK_SHIFT;
            const i32 block = page < pages ? resident_table[(i64)seat * resident_stride + page] : 0;
            if (block > 0) {
                id = (i32)(block * rows_per_block + row_offset + (pos & (BLOCK - 1)));
                ++resident;
            } else {
                const i32 source = page < pages && source_table != nullptr ? source_table[(i64)seat * source_stride + page] : 0;
                if (source > 0) host = (source << BLOCK_SHIFT) + (pos & (BLOCK - 1));
                else report(status, NO_PAGE, seat, pos, source);
            }
            valid += id >= 0 || host >= 0;
        }
        out_ids[n * top_k + column] = id;
        if (out_host != nullptr) out_host[n * top_k + column] = host;
    }
    atomicAdd(&counts[0], resident);
    atomicAdd(&counts[1], valid);
    __syncthreads();
    if (threadIdx.x == 0) out_resident[n] = counts[0], out_valid[n] = counts[1];
}

// Mirrors of new rows: what a forward appended to resident pages, copied to the host pages behind them, many layers a launch.
//
// mirror_rows
//   Instance   UNITS: 16-byte units of a row.
//   Geometry   a few CTAs of WARPS warps, each of which does one row and layer after the other; rows of a layer side by side.
//   Ownership  a host row is written by its warp alone, consecutive lanes write consecutive units: full bursts on the bus.
//   Needs      the layers' appends are done, and nothing writes these resident rows until it is.
//              Distinct (seat, position) among writing rows; `block_size` a power of two.
//   Sentinels  seat < 0, writes = 0, mirror block 0: skipped. No resident page: skipped, the append said so. A host row outside
//              the pool: NO_TARGET, written nowhere.
//   Ordering   every unit of a row is read before the first is written. The host sees the rows once an event behind the launch
//              has happened.
//   Determinism  copies; same inputs, same bytes.
//
// Apart from append, and behind the last layer's, in one launch: stores to host memory that come faster than the bus takes them
// pile up in the memory system and hold up everybody's accesses, so nothing should run beside them. Alone they fill the bus: 23 MB
// in rows of 1,152 bytes take 0.46 ms on PCIe 5, from 6 CTAs on.

#include "common.cuh"

#ifndef UNITS
#define UNITS 41
#endif

constexpr int WARPS = 32, STEPS = (UNITS + 31) / 32;

struct Layer {
    i64 table;  // entry of the tables' allocation where its resident table begins
    i64 row_offset;
    i64 host_row;  // of the pool's body, where its rows begin
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
mirror_rows(const void* seats, i64 wide_seats, const void* positions, i64 wide_positions, const u8* writes, i64 num,
            const Layer* layers, i64 num_layers, const i32* tables, i64 resident_stride, i64 resident_seats, i64 resident_pages,
            const i32* mirror, i64 mirror_stride, i64 mirror_seats, i64 mirror_pages, i64 block_shift, i64 rows_per_block,
            const char* rows, i64 num_rows, char* host_body, i64 host_rows, i32* status) {
    const int lane = threadIdx.x % 32;
    const i64 shift = block_shift;
    for (i64 item = i64(blockIdx.x) * WARPS + threadIdx.x / 32; item < num * num_layers; item += i64(gridDim.x) * WARPS) {
        const i64 i = item % num;
        const Layer layer = layers[item / num];
        const i64 seat = load_index(seats, wide_seats, i), position = load_index(positions, wide_positions, i);
        if (seat < 0 || !writes[i]) continue;
        const i64 page = position >> shift, offset = position & ((i64(1) << shift) - 1);
        const i64 block = look_up({tables + layer.table, resident_stride, resident_seats, resident_pages}, seat, page);
        const i64 host_block = look_up({mirror, mirror_stride, mirror_seats, mirror_pages}, seat, page);
        if (block <= 0 || host_block <= 0) continue;
        const i64 id = block * rows_per_block + layer.row_offset + offset, host_id = (host_block << shift) + offset;
        if (id >= num_rows || host_id >= host_rows) {
            if (lane == 0) report(status, NO_TARGET, seat, position, host_block);
            continue;
        }
        const char* from = rows + id * (UNITS * 16);
        char* to = host_body + (layer.host_row + host_id) * (UNITS * 16);
        Unit units[STEPS];
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
            if (k * 32 + lane < UNITS) units[k] = load16(from + (k * 32 + lane) * 16);
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
            if (k * 32 + lane < UNITS) store16(to + (k * 32 + lane) * 16, units[k]);
    }
}

// New rows to their resident page. What they leave on the host is mirror.cu's, once all layers have appended.
//
// append_rows
//   Instance   LATENT, ROPE: values of a row. NEW_BYTES: of an incoming value, 4 = float32, 2 = bfloat16. FORMAT: 4 = float32,
//              2 = bfloat16, 1 = fp8_ds_mla. ALIGNED: both inputs may be read 16 bytes at a time. WARPS: of a CTA.
//   Geometry   one warp a row, WARPS rows a CTA; the grid depends on the number of rows only.
//   Ownership  a row is written by its warp alone, each 16-byte unit by one lane.
//   Needs      distinct (seat, position) among writing rows; rows of whole 16-byte units; `block_size` a power of two.
//   Sentinels  seat < 0 or writes = 0: skipped. Resident block 0, a page or seat outside its table, a row outside the pool:
//              NO_TARGET in the status word, and this row is written nowhere.
//   Ordering   inputs are read before tables (both latencies overlap).
//   Determinism  the bytes are those of hisparse.ops.reference.append_rows: IEEE divisions, to nearest even, one NaN.
//
// mark_rows: a thread per row sets the row's bit in its host page's mask; atomicOr commutes.

#include "common.cuh"

#ifndef LATENT
#define LATENT 512
#define ROPE 64
#define NEW_BYTES 4
#define FORMAT 1
#define ALIGNED 1
#define WARPS 1
#endif

constexpr int SCALED = 128;
constexpr int SCALE_UNITS = FORMAT == 1 ? (LATENT / SCALED + 3) / 4 : 0;
constexpr int VALUE_UNITS = FORMAT == 1 ? LATENT / 16 : (LATENT + ROPE) * FORMAT / 16;  // of fp8_ds_mla: e4m3 only
constexpr int ROPE_UNITS = FORMAT == 1 ? ROPE / 8 : 0;
constexpr i64 ROW_BYTES = 16 * (VALUE_UNITS + SCALE_UNITS + ROPE_UNITS);
static_assert(FORMAT == 1 || (LATENT + ROPE) * FORMAT % 16 == 0, "rows must be whole 16-byte units");
static_assert(FORMAT != 1 || (LATENT % SCALED == 0 && ROPE % 8 == 0), "128 latents share a scale, 8 rope values a unit");
static_assert(!ALIGNED || ROPE == 0 || LATENT * (FORMAT < NEW_BYTES ? NEW_BYTES : FORMAT) % 16 == 0,
              "an aligned unit must not reach from the latent part into the rope part");
static_assert(SCALE_UNITS <= 32, "one lane keeps one unit of scales");

struct Row {
    const char* latent;
    const char* rope;
};

__device__ __forceinline__ const char* value_at(Row row, int i) {
    return i < LATENT ? row.latent + i64(i) * NEW_BYTES : row.rope + i64(i - LATENT) * NEW_BYTES;
}

__device__ __forceinline__ unsigned scalar_bits(Row row, int i) {
    const char* at = value_at(row, i);
    return NEW_BYTES == 4 ? *reinterpret_cast<const unsigned*>(at) : *reinterpret_cast<const unsigned short*>(at);
}

// N values from the `first`-th on, as float32.
template <int N>
__device__ __forceinline__ void load_values(float (&out)[N], Row row, int first) {
    if constexpr (!ALIGNED) {
        for (int i = 0; i < N; ++i) out[i] = __uint_as_float(scalar_bits(row, first + i) << (NEW_BYTES == 4 ? 0 : 16));
    } else if constexpr (NEW_BYTES == 4) {
        for (int i = 0; i < N; i += 4) {
            Unit u = load16(value_at(row, first + i));
            out[i] = __uint_as_float(u.x), out[i + 1] = __uint_as_float(u.y);
            out[i + 2] = __uint_as_float(u.z), out[i + 3] = __uint_as_float(u.w);
        }
    } else {
        constexpr int STEP = N < 8 ? N : 8;
        for (int i = 0; i < N; i += STEP) {
            unsigned words[4] = {};
            if constexpr (STEP == 4) {
                uint2 half = *reinterpret_cast<const uint2*>(value_at(row, first + i));
                words[0] = half.x, words[1] = half.y;
            } else {
                Unit u = load16(value_at(row, first + i));
                words[0] = u.x, words[1] = u.y, words[2] = u.z, words[3] = u.w;
            }
            for (int j = 0; j < STEP; ++j) {
                unsigned bits = j & 1 ? words[j / 2] & 0xFFFF0000u : words[j / 2] << 16;
                out[i + j] = __uint_as_float(bits);
            }
        }
    }
}

// Two float32 to bfloat16, `low` in the lower half; to nearest even; every NaN becomes 0x7FFF.
__device__ __forceinline__ unsigned to_bf16x2(float low, float high) {
    unsigned out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ unsigned short to_e4m3x2(float low, float high) {
    unsigned short out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));  // the first source is the upper byte
    return out;
}

__device__ __forceinline__ float divide(float a, float b) {
    float out;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

// The greater one, NaN if either is.
__device__ __forceinline__ float greater(float a, float b) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

// 16 output bytes of a plain row, or 8 rope values of an fp8_ds_mla row, from the `first`-th value on.
template <int BYTES>
__device__ __forceinline__ Unit plain_unit(Row row, int first) {
    if constexpr (BYTES == NEW_BYTES && ALIGNED) {
        return load16(value_at(row, first));
    } else if constexpr (BYTES == NEW_BYTES) {  // as they are, NaN payloads included
        unsigned words[4];
        for (int i = 0; i < 4; ++i) {
            words[i] = BYTES == 4 ? scalar_bits(row, first + i)
                                  : scalar_bits(row, first + 2 * i) | scalar_bits(row, first + 2 * i + 1) << 16;
        }
        return {words[0], words[1], words[2], words[3]};
    } else if constexpr (BYTES == 4) {
        float v[4];
        load_values(v, row, first);
        return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
    } else {
        float v[8];
        load_values(v, row, first);
        return {to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3]), to_bf16x2(v[4], v[5]), to_bf16x2(v[6], v[7])};
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
append_rows(const char* latent, i64 latent_stride, const char* rope, i64 rope_stride,  // strides of rows in bytes
            const void* seats, i64 wide_seats, const void* positions, i64 wide_positions, const unsigned char* writes, i64 num,
            const int* resident, i64 resident_stride, i64 resident_seats, i64 resident_pages,
            i64 block_shift, i64 rows_per_block, i64 row_offset, char* rows, i64 num_rows, int* status) {
    const i64 i = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (i >= num) return;
    const Row row = {latent + i * latent_stride, rope + i * rope_stride};
    constexpr int ITERATIONS = (VALUE_UNITS + 31) / 32, TAIL = ROPE_UNITS + SCALE_UNITS, TAIL_ITERATIONS = (TAIL + 31) / 32;

    // 1. the new values, on their way before the table is asked
    float values[FORMAT == 1 ? ITERATIONS : 1][16];
    Unit units[ITERATIONS], tail[TAIL_ITERATIONS + 1];
#pragma unroll
    for (int k = 0; k < ITERATIONS; ++k) {
        const int unit = k * 32 + lane;
        if constexpr (FORMAT == 1) {
            for (int j = 0; j < 16; ++j) values[k][j] = 0;
            if (unit < VALUE_UNITS) load_values(values[k], row, unit * 16);
        } else if (unit < VALUE_UNITS) {
            units[k] = plain_unit<FORMAT == 1 ? 2 : FORMAT>(row, unit * (16 / FORMAT));
        }
    }
#pragma unroll
    for (int k = 0; k < TAIL_ITERATIONS; ++k) {
        const int unit = k * 32 + lane - SCALE_UNITS;
        if (unit >= 0 && unit < ROPE_UNITS) tail[k] = plain_unit<2>(row, LATENT + unit * 8);
    }

    // 2. where they go
    const i64 seat = load_index(seats, wide_seats, i), position = load_index(positions, wide_positions, i);
    const bool idle = seat < 0 || !writes[i];
    const i64 page = position >> block_shift, offset = position & ((i64(1) << block_shift) - 1);
    const i64 block = idle ? 0 : look_up({resident, resident_stride, resident_seats, resident_pages}, seat, page);

    // 3. quantise while the table answers
    if constexpr (FORMAT == 1) {
#pragma unroll
        for (int k = 0; k < ITERATIONS; ++k) {
            float most = 1.17549435e-38f;
            for (int j = 0; j < 16; ++j) most = greater(most, fabsf(values[k][j]));
            for (int step = 4; step; step /= 2) most = greater(most, __shfl_xor_sync(~0u, most, step));  // among 8 lanes
            const float scale = divide(most, 448.0f);
            unsigned words[4];
            for (int j = 0; j < 4; ++j) {
                const float* v = &values[k][4 * j];
                words[j] = to_e4m3x2(divide(v[0], scale), divide(v[1], scale)) |
                           unsigned(to_e4m3x2(divide(v[2], scale), divide(v[3], scale))) << 16;
            }
            units[k] = {words[0], words[1], words[2], words[3]};
            const unsigned bits = k * 32 + lane >= VALUE_UNITS ? 0 : scale == scale ? __float_as_uint(scale) : 0x7FC00000u;
            const Unit four = {__shfl_sync(~0u, bits, 0), __shfl_sync(~0u, bits, 8), __shfl_sync(~0u, bits, 16),
                               __shfl_sync(~0u, bits, 24)};
            if (lane == k) tail[0] = four;  // SCALE_UNITS <= 32: the scales are the first units of the tail
        }
    }

    // 4. write them
    if (idle) return;
    const i64 id = block * rows_per_block + row_offset + offset;
    if (block <= 0 || id >= num_rows) {
        if (lane == 0) report(status, NO_TARGET, seat, position, block);
        return;
    }
    char* const to = rows + id * ROW_BYTES;
#pragma unroll
    for (int k = 0; k < ITERATIONS; ++k)
        if (k * 32 + lane < VALUE_UNITS) store16(to + (k * 32 + lane) * 16, units[k]);
#pragma unroll
    for (int k = 0; k < TAIL_ITERATIONS; ++k)
        if (k * 32 + lane < TAIL) store16(to + (VALUE_UNITS + k * 32 + lane) * 16, tail[k]);
}

extern "C" __global__ void mark_rows(const void* seats, i64 wide_seats, const void* positions, i64 wide_positions,
                                     const unsigned char* writes, i64 num, const int* mirror, i64 mirror_stride,
                                     i64 mirror_seats, i64 mirror_pages, i64 block_shift, unsigned long long* row_masks,
                                     i64 num_host_blocks, int* status) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= num) return;
    const i64 seat = load_index(seats, wide_seats, i), position = load_index(positions, wide_positions, i);
    if (seat < 0 || !writes[i]) return;
    const i64 block = look_up({mirror, mirror_stride, mirror_seats, mirror_pages}, seat, position >> block_shift);
    if (block <= 0) return;
    if (block >= num_host_blocks) {
        report(status, NO_TARGET, seat, position, block);
        return;
    }
    atomicOr(&row_masks[block], 1ull << (position & ((i64(1) << block_shift) - 1)));
}

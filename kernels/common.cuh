// Helpers of every kernel. No CUDA header is included, so that NVRTC alone can compile.
#pragma once

using i16 = short;
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Flags of the status word; hisparse/ops/status.py has their meaning.
constexpr i32 NO_PAGE = 1;
constexpr i32 NO_HOT_BLOCK = 2;
constexpr i32 NO_TARGET = 4;
constexpr i32 NO_FIT = 8;
constexpr i32 NO_INDEXER_PAGE = 16;
constexpr i32 BAD_ROWS = 32;
constexpr i32 TABLE_FULL = 64;

// The first error of all keeps its details.
__device__ __noinline__ void report(i32* status, i32 bit, i64 seat, i64 position, i64 detail) {
    if (status != nullptr && atomicOr(&status[0], bit) == 0) {
        status[1] = (i32)seat;
        status[2] = (i32)position;
        status[3] = (i32)detail;
    }
}

using Unit = uint4;  // what one access moves

// 16 bytes that are read once: host memory, or rows on their way elsewhere. Keeps them out of L1. Volatile: stays ahead of the
// look-ups that it is written ahead of, so that both are in flight together.
__device__ inline Unit load16(const void* from) {
    Unit v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Index `i` of an int32 or int64 array.
__device__ inline i64 load_index(const void* array, i64 wide, i64 i) {
    return wide ? static_cast<const i64*>(array)[i] : static_cast<const i32*>(array)[i];
}

__device__ inline void store16(void* to, Unit v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// A block table [seats, pages], rows `stride` entries apart; 0 = no block.
struct BlockTable {
    const int* blocks;
    i64 stride, seats, pages;
};

__device__ inline i64 look_up(BlockTable table, i64 seat, i64 page) {
    return seat < table.seats && page >= 0 && page < table.pages ? table.blocks[seat * table.stride + page] : 0;
}

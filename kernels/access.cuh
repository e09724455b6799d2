// 16-byte accesses, conversions and the status word, shared by the kernels that move rows.
#pragma once

typedef long long i64;

struct __align__(16) Unit {
    unsigned x, y, z, w;
};

// Volatile: stays ahead of the table look-ups that it is written ahead of, so that both are in flight together.
__device__ __forceinline__ Unit load16(const void* from) {
    Unit u;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w) : "l"(from));
    return u;
}

__device__ __forceinline__ void store16(void* to, Unit u) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(u.x), "r"(u.y), "r"(u.z), "r"(u.w) : "memory");
}

// Index `i` of an int32 or int64 array.
__device__ __forceinline__ i64 load_index(const void* array, i64 wide, i64 i) {
    return wide ? static_cast<const i64*>(array)[i] : static_cast<const int*>(array)[i];
}

// The first error of a launch keeps the details. `status` may be null.
__device__ __forceinline__ void report(int* status, int bit, i64 seat, i64 position, i64 detail) {
    if (status != nullptr && atomicOr(&status[0], bit) == 0) {
        status[1] = static_cast<int>(seat);
        status[2] = static_cast<int>(position);
        status[3] = static_cast<int>(detail);
    }
}

constexpr int NO_PAGE = 1, NO_TARGET = 4;  // hisparse/ops/status.py

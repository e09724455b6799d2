// Two-bit use counters of the slots of a hot region, 16 at a time. hisparse/ops/clock.py has the rules.
#pragma once
#include "common.cuh"

constexpr int GROUP = 16;  // slots whose counters one thread loads at once, a byte each

// Two-bit counters of a group of 16 slots as two bit planes.
struct Planes {
    u32 low, high;

    __device__ static Planes of(const u32 (&word)[4]) {
        Planes p{0, 0};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            p.low |= (((word[w] & 0x01010101u) * 0x01020408u) >> 24 & 0xfu) << (4 * w);
            p.high |= ((((word[w] >> 1) & 0x01010101u) * 0x01020408u) >> 24 & 0xfu) << (4 * w);
        }
        return p;
    }
    __device__ u32 word(int w) const {  // four counters, a byte each
        const u32 l = ((low >> (4 * w)) & 0xfu) * 0x00204081u & 0x01010101u;
        const u32 h = ((high >> (4 * w)) & 0xfu) * 0x00204081u & 0x01010101u;
        return l | h << 1;
    }
    __device__ u32 at(int level) const { return (level & 1 ? low : ~low) & (level & 2 ? high : ~high) & 0xffffu; }
    __device__ u64 counts(u32 among) const {  // 16 bits a level
        return (u64)__popc(at(0) & among) | (u64)__popc(at(1) & among) << 16 | (u64)__popc(at(2) & among) << 32 |
               (u64)__popc(at(3) & among) << 48;
    }
    __device__ void decrease(u32 of) {  // not below 0
        const u32 l = high & ~low, h = high & low;
        low = (low & ~of) | (l & of), high = (high & ~of) | (h & of);
    }
    __device__ void increase_by_two(u32 of) {  // not above 3
        low |= high & of, high |= of;
    }
    __device__ void set_one(u32 of) { low |= of, high &= ~of; }
};

// Writes a group's counters after its hits, where they differ from what memory holds.
__device__ inline void store_counters(u8* to, Planes now, u32 hit, Planes held) {
    now.increase_by_two(hit);  // clock.py: USE_HIT
    if (now.low != held.low || now.high != held.high)
        *(uint4*)to = make_uint4(now.word(0), now.word(1), now.word(2), now.word(3));
}

// Bits of the slots at or beyond `slot` in the group that starts at `first`.
__device__ inline u32 from_slot(i32 first, i32 slot) {
    const i32 shift = slot - first;
    return shift <= 0 ? 0xffffu : shift >= GROUP ? 0u : (0xffffu << shift) & 0xffffu;
}

// Which slot of a request's hot region holds a position. Two kinds with one surface:
//   DirectTable  `pos_slot` int16 [positions] in global memory, kept from launch to launch: one load, 2 bytes a position.
//   HashTable    built anew from slot_tag in shared memory by each launch, spread over the CTAs of the cluster: no memory,
//                about 1 us more.
// A missing position is *claimed* by the entries that select it, with the code -2 - entry: the largest code, which is the
// lowest entry, wins whatever the order in time.
#pragma once
#include "cluster.cuh"

struct DirectTable {
    static constexpr bool BUILT = false, full = false;
    i16* pos_slot;

    __device__ void clear() {}
    __device__ bool build(const i32*, i32, u32) { return true; }
    __device__ i32 find(i32 position) const { return pos_slot[(u32)position]; }  // below 0: not hot (or claimed by now)

    // Whether another entry claimed the position before.
    __device__ bool claim(i32 position, i32 entry) {
        const i16 mine = (i16)(-2 - entry);
        i16 seen = -1;
        bool met = false;
        while (true) {
            const i16 old = (i16)atomicCAS((u16*)&pos_slot[position], (u16)seen, (u16)mine);
            if (old == seen) return met;
            seen = old;
            met = true;
            if (seen >= mine) return met;
        }
    }
    __device__ i32 read(i32 position) const {  // from L2, where claims are made
        i16 v;
        asm volatile("ld.global.cg.s16 %0, [%1];" : "=h"(v) : "l"(&pos_slot[position]) : "memory");
        return v;
    }
    __device__ void drop(i32 position) { pos_slot[position] = -1; }
    __device__ void settle(i32 old, i32 position, i32 slot) {
        if (old >= 0) pos_slot[old] = -1;
        pos_slot[position] = (i16)slot;
    }
};

struct HashTable {
    static constexpr bool BUILT = true;
    static constexpr i32 EMPTY = -1, UNCLAIMED = -0x7fffffff - 1;
    i32* keys;    // [CAPACITY] positions
    i32* values;  // [CAPACITY] slots, or claims
    i32 capacity; // of one CTA, a power of two; at most half of it is used on average
    bool full;    // this thread found no room for a claim

    __device__ static u32 mix(i32 position) {
        u32 h = (u32)position * 0x9e3779b1u;
        h ^= h >> 15;
        h *= 0x85ebca77u;
        return h ^ h >> 13;
    }
    __device__ static u32 home(u32 h) { return (h >> 20) % CLUSTER; }

    __device__ void clear() {
        for (i32 i = threadIdx.x; i < capacity; i += THREADS) keys[i] = EMPTY, values[i] = UNCLAIMED;
    }

    // Enters the tags that live in this CTA. False if they do not fit.
    __device__ bool build(const i32* slot_tag, i32 size, u32 cta) {
        bool fits = true;
        for (i32 slot = threadIdx.x; slot < size; slot += THREADS) {
            const i32 tag = slot_tag[slot];
            const u32 h = mix(tag);
            if (tag < 0 || home(h) != cta) continue;
            i32 tries = 0, i = h & (capacity - 1);
            while (tries < capacity && atomicCAS(&keys[i], EMPTY, tag) != EMPTY) i = (i + 1) & (capacity - 1), ++tries;
            if (tries < capacity) values[i] = slot;
            fits &= tries < capacity;
        }
        return fits;
    }

    // Place of a position in its CTA; -1 if it is not there, or, with `enter`, if there is no room.
    __device__ i32 place(i32 position, u32 h, bool enter) const {
        i32 i = h & (capacity - 1);
        for (i32 tries = 0; tries < capacity; ++tries, i = (i + 1) & (capacity - 1)) {
            const i32 key = enter ? swap_if(&keys[i], home(h), EMPTY, position) : read_from(&keys[i], home(h));
            if (key == position || (enter && key == EMPTY)) return i;
            if (key == EMPTY) return -1;
        }
        return -1;
    }
    __device__ i32 find(i32 position) const { return read(position); }
    __device__ bool claim(i32 position, i32 entry) {
        const u32 h = mix(position);
        const i32 i = place(position, h, true);
        full |= i < 0;
        return i >= 0 && raise_to(&values[i], home(h), -2 - entry) != UNCLAIMED;
    }
    __device__ i32 read(i32 position) const {
        const u32 h = mix(position);
        const i32 i = place(position, h, false);
        return i < 0 ? -1 : read_from(&values[i], home(h));
    }
    __device__ void drop(i32) {}
    __device__ void settle(i32, i32 position, i32 slot) {
        const u32 h = mix(position);
        const i32 i = place(position, h, false);
        if (i >= 0) write_to(&values[i], home(h), slot);
    }
};

// What the CTAs of a request tell each other after the look-up: how much each found, and which slots it hit.
#pragma once
#include "request.cuh"

// Word w of what all CTAs of the cluster hit in a row, in the CTA that owns the word: from what they sent.
__device__ inline u32 hits_here(const Memory& m, int row, int w) {
    if (CLUSTER == 1) return m.bitmap[row * WORDS + w];
    u32 all = 0;
#pragma unroll
    for (int sender = 0; sender < CLUSTER; ++sender) all |= m.inbox[(sender * QUERY_ROWS + row) * OWNED + w % OWNED];
    return all;
}

// Nothing is hit yet.
__device__ inline void clear_hits(const Memory& m) {
    constexpr u32 PIECES = QUERY_ROWS * WORDS / 4;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < PIECES; i += THREADS) {
        ((uint4*)m.bitmap)[i] = make_uint4(0, 0, 0, 0);
        if (PIECES <= THREADS) break;
    }
}

// A cell to everybody, the words of the bitmap to their owners.
__device__ inline void send_findings(Shared& s, const Memory& m, u32 cta) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < CELLS; i += THREADS) {
        const u32 row = i / CLUSTER;
        i32 seen = 0, missed = 0;
        for (int w = 0; w < ROUNDS_PER_ROW * WARPS; ++w) {
            seen += s.warp_seen[row * ROUNDS_PER_ROW * WARPS + w];
            missed += s.warp_misses[row * ROUNDS_PER_ROW * WARPS + w];
        }
        s.mailbox.send16(&s.cells[row * CLUSTER + cta], i % CLUSTER,
                         make_uint4(missed, Seen::resident(seen), Seen::needed(seen), Seen::met(seen)));  // a Cell
    }
    if (CLUSTER == 1) return;
#pragma unroll 1
    for (u32 i = THREADS - 1 - threadIdx.x; i < QUERY_ROWS * WORDS / 4; i += THREADS) {  // four words at a time
        const u32 row = i / (WORDS / 4), w = i % (WORDS / 4) * 4;
        u32* to = &m.inbox[(cta * QUERY_ROWS + row) * OWNED + w % OWNED];
        s.mailbox.send16(to, w / OWNED, *(const uint4*)&m.bitmap[row * WORDS + w]);
    }
}

// Of all CTAs. Every thread gets them.
struct Totals {
    i32 resident[QUERY_ROWS], needed[QUERY_ROWS];  // entries by tier; needed: hot or missing
    i32 misses, entries;                           // misses counts every entry of a position; entries: all that are needed
    bool duplicates;                               // several entries missed one position

    __device__ static Totals of(const Cell* cells) {
        const int lane = threadIdx.x % 32;
        Totals all;
        all.misses = all.entries = 0, all.duplicates = false;
#pragma unroll
        for (int row = 0; row < QUERY_ROWS; ++row) {
            const Cell c = lane < CLUSTER ? cells[row * CLUSTER + lane] : Cell{0, 0, 0, 0};
            all.resident[row] = __reduce_add_sync(~0u, c.resident);
            all.needed[row] = __reduce_add_sync(~0u, c.needed);
            all.misses += __reduce_add_sync(~0u, c.misses);
            all.entries += all.needed[row];
            all.duplicates |= __any_sync(~0u, c.met);
        }
        return all;
    }
};

// The owned words of the bitmap become those of all CTAs, which may read them behind a cluster barrier.
__device__ inline void merge_hits(const Memory& m, u32 cta) {
    if (CLUSTER == 1) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < QUERY_ROWS * OWNED; i += THREADS) {
        const int row = i / OWNED, w = cta * OWNED + i % OWNED;
        m.bitmap[row * WORDS + w] = hits_here(m, row, w);
    }
}

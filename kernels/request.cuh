// What the CTAs of one request have: constants of the launch, and shared memory.
#pragma once
#include "copies.cuh"
#include "mailbox.cuh"
#include "use_counters.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS = TOP_K / CLUSTER;                      // of one row, per CTA
constexpr int ROUNDS_PER_ROW = (COLUMNS + THREADS - 1) / THREADS;
constexpr int ROUNDS = QUERY_ROWS * ROUNDS_PER_ROW;
constexpr int BLOCK = 1 << BLOCK_SHIFT;
constexpr int PARTS = ROW_BYTES / 16;
constexpr int EARLY = CLUSTER >= 8 ? 4 : 0;                   // loads of a thread in flight during the victim search
constexpr int CELLS = QUERY_ROWS * CLUSTER;
constexpr int OWNED = GROUPS_PER_THREAD * THREADS / 2 / CLUSTER;  // words of a row's hit bitmap whose counters one CTA writes
constexpr int WORDS = OWNED * CLUSTER;
static_assert(OWNED % 4 == 0, "words of the bitmap are sent four at a time");
static_assert(TOP_K % CLUSTER == 0 && QUERY_ROWS * TOP_K <= 32766, "codes of claims are 16 bit");

struct alignas(16) Miss {
    i32 position, host_row, entry, unused;
};

struct alignas(16) Cell {  // what one CTA found in one row
    i32 misses, resident, needed, met;  // met: two of its entries claimed one position
};

// Counts of a warp or a CTA in one row in one word, so that they are added up at once.
struct Seen {
    static_assert(COLUMNS < 1 << 12, "12 bits a count");
    __device__ static i32 of(i32 resident, i32 needed, bool met) { return resident + (needed << 12) + (met << 24); }
    __device__ static i32 resident(i32 sum) { return sum & 0xfff; }
    __device__ static i32 needed(i32 sum) { return sum >> 12 & 0xfff; }
    __device__ static bool met(i32 sum) { return sum >> 24; }
};

struct Shared {
    Cell cells[CELLS];    // [row][CTA] of the whole cluster, sent by each
    Mailbox mailbox;
    i32 winners[CELLS];   // the same of misses that are the first of their position, after phase 2
    i32 first_rank[CELLS + 1];
    i32 warp_misses[ROUNDS * WARPS];
    i32 warp_seen[ROUNDS * WARPS];  // a Seen each
    u64 warp_levels[WARPS];
    u64 passed;           // eligible slots before the hand, in the hand's warp
    i32 hand_warp;
    i32 row_hits[QUERY_ROWS];
    i32 last_slot;
    i32 order[BUCKETS + 64];  // scratch of order_by_source
};

// Dynamic shared memory of a CTA; hisparse/ops/cuda/resolve.py adds up the same.
struct Memory {
    static constexpr int MAX_COPIES = QUERY_ROWS * COLUMNS + 1;  // ranks are split evenly, so no CTA has more than its columns
    int words;      // slots / 32
    Miss* list;     // [QUERY_ROWS * COLUMNS]: this CTA's misses in order
    u32* bitmap;    // [QUERY_ROWS][WORDS]: slots hit here; then by all, the owned words
    u32* inbox;     // [CLUSTER][QUERY_ROWS][OWNED]: of the owned words, from each CTA
    u32* used;      // [words]: of all CTAs
    int2* share;    // [MAX_COPIES]: position and entry of the misses dealt to this CTA
    i32* blocks;    // [hot_blocks]
    i32* copy_src;  // [MAX_COPIES]
    i32* copy_dst;  // [MAX_COPIES]
    i32* hash;      // [2 * HASH_CAPACITY]: keys, values
    u16* victims;   // [QUERY_ROWS * TOP_K]

    __device__ Memory(u8* raw, i64 slots, i64 hot_blocks) {
        words = (int)(slots / 32);
        list = (Miss*)raw;
        bitmap = (u32*)(list + QUERY_ROWS * COLUMNS);
        inbox = bitmap + QUERY_ROWS * WORDS;
        used = inbox + (CLUSTER > 1 ? QUERY_ROWS * WORDS : 0);
        share = (int2*)(used + words);
        blocks = (i32*)(share + MAX_COPIES);
        copy_src = blocks + hot_blocks;
        copy_dst = copy_src + MAX_COPIES;
        hash = copy_dst + MAX_COPIES;
        victims = (u16*)(hash + 2 * HASH_CAPACITY);
    }
};

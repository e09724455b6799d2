// Fused resolver: top-k positions of a request to flat device rows; misses are copied from host memory in the same launch.
//
// Geometry   grid = requests * CLUSTER CTAs of THREADS; the CLUSTER CTAs of a request form one cluster. A request has
//            QUERY_ROWS consecutive rows of `topk` (one transaction: their union is resolved). CTA j owns columns
//            [j, j + 1) * TOP_K / CLUSTER of each row: it looks them up and writes their row ids.
// Phases     0 clear the CTA's part of the hit bitmap; arrive at a cluster barrier, wait for it when the loads are back
//            1 look up: resident table and position table, both loads at once; a hit sets a bit in the bitmap of the CTA that
//              owns the slot's counters; a miss claims its position in the table with the code -2 - e,
//              e = row * TOP_K + column; the lowest e wins.
//            - cluster barrier; counts of all CTAs are known, no miss: update the own counters and return -
//            2 only if two entries missed one position: read the claims again, count the winners, barrier
//            3 rank = number of misses before it in (row, column) order. Ranks are split evenly over the CTAs; each orders its
//              share by host address and starts to load the first rows.
//            4 victims: each CTA scans all use counters by itself: (counter, ring distance from the hand), first m slots
//            5 rank i takes victim i: row ids, plan, state; then the rows are stored, and the others copied.
// Tables     HASH_CAPACITY = 0: DirectTable, else HashTable; position_table.cuh says what they are. Same results.
// State      slot_tag, pos_slot, use, hand of the request's seat are written by its own cluster only, behind the barrier;
//            everything before the barrier reads them (pos_slot: claims, which are replaced by a slot or by -1).
// Requires   rows of a request share a seat or are -1 (padding); no seat occurs in two requests; TOP_K >= top-k;
//            slots padded to 16; positions below 2^31; QUERY_ROWS * TOP_K <= 32,766; tables hold 0 where no page is.
// Sentinels  topk -1 or outside [0, seq_len): row id -1. Seat -1: all -1, no state is touched.
// Errors     a position without page, a slot without block, a first row that does not fit: row id -1 and the status word.
// Determinism  row ids, plan and state are functions of inputs and state. Atomics elect a claim (a minimum) or set bits.
#include "position_table.cuh"
#include "use_counters.cuh"

#if HASH_CAPACITY
using Table = HashTable;
#else
using Table = DirectTable;
#endif

constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS = TOP_K / CLUSTER;                      // of one row, per CTA
constexpr int ROUNDS_PER_ROW = (COLUMNS + THREADS - 1) / THREADS;
constexpr int ROUNDS = QUERY_ROWS * ROUNDS_PER_ROW;
constexpr int BLOCK = 1 << BLOCK_SHIFT;
constexpr int PARTS = ROW_BYTES / 16;
constexpr int EARLY = CLUSTER >= 8 ? 4 : 0;                   // loads of a thread in flight during the victim search
constexpr int SORT_FROM = 16;                                 // fewer rows hardly share a translation
constexpr int CELLS = QUERY_ROWS * CLUSTER;
static_assert(TOP_K % CLUSTER == 0 && QUERY_ROWS * TOP_K <= 32766, "codes of claims are 16 bit");

struct alignas(16) Miss {
    i32 position, host_row, entry, unused;
};

struct alignas(16) Cell {  // what one CTA found in one row
    i32 misses, resident, needed, met;  // met: two of its entries claimed one position
};

struct Shared {
    Cell cells[CELLS];    // [row][CTA] of the whole cluster
    i32 winners[CELLS];   // the same of misses that are the first of their position, after phase 2
    i32 first_rank[CELLS + 1];
    i32 warp_misses[ROUNDS * WARPS];
    i32 warp_seen[ROUNDS * WARPS];  // resident + (needed << 16)
    u64 warp_levels[WARPS];
    u64 passed;           // eligible slots before the hand, in the hand's warp
    i32 hand_warp;
    i32 row_hits[QUERY_ROWS];
    i32 last_slot;
};

// The CTA whose threads hold the counters of a slot, and so its bit of the hit bitmap.
__device__ inline u32 owner_of(i32 slot) {
    return slot / (GROUP * GROUPS_PER_THREAD) / (THREADS / CLUSTER);
}

// Word w of a row's bitmap, from its owner.
__device__ inline u32 hits_of_all(const u32* row_bitmap, int w) {
    static_assert(GROUPS_PER_THREAD * (THREADS / CLUSTER) % 2 == 0, "a CTA owns whole words of the bitmap");
    const u32 cta = owner_of(32 * w);
    return cta < CLUSTER ? read_from(row_bitmap + w, cta) : 0;
}

// Place of each flagged entry in the CTA's list, in (row, column) order, from the ballots and counts of all warps; counts by row.
__device__ inline void order(const i32* warp_counts, const u32 (&ballots)[ROUNDS], i32 (&place)[ROUNDS], i32 (&rows)[QUERY_ROWS]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i32 running = 0;
#pragma unroll
    for (int row = 0; row < QUERY_ROWS; ++row) {
        const i32 before_row = running;
#pragma unroll
        for (int k = 0; k < ROUNDS_PER_ROW; ++k) {
            const int r = row * ROUNDS_PER_ROW + k;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (w == warp) place[r] = running + __popc(ballots[r] & ((1u << lane) - 1u));
                running += warp_counts[r * WARPS + w];
            }
        }
        rows[row] = running - before_row;
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, CTAS_PER_SM)
resolve(const i32* topk, i64 topk_row_stride, i64 topk_stride, i64 top_k, const i32* seats, const void* seq_len, i64 seq_is_64,
        const i32* resident_table, i64 resident_stride, const i32* source_table, i64 source_stride, i64 pages,
        const i32* hot_table, i64 hot_stride, i64 hot_blocks, const i32* hot_rows,
        i32* slot_tag, i16* pos_slot, u8* use, i32* hand, i64 slots, i64 positions,
        i64 rows_per_block, i64 row_offset, u8* rows, const u8* host_rows,
        i32* out_ids, i32* out_valid, u8* out_fits, i32* plan_host, i32* plan_device, i32* out_resident, i32* out_hot,
        i32* out_miss, i32* status) {
    extern __shared__ __align__(16) u8 raw[];
    __shared__ Shared s;
    const int words = (int)(slots / 32);
    Miss* list = (Miss*)raw;                              // [QUERY_ROWS * COLUMNS]: this CTA's misses in order
    constexpr int MAX_COPIES = QUERY_ROWS * COLUMNS + 1;  // ranks are split evenly, so no CTA has more than its columns
    int2* share = (int2*)(list + QUERY_ROWS * COLUMNS);   // [MAX_COPIES]: position and entry of the misses dealt to this CTA
    u32* bitmap = (u32*)(share + MAX_COPIES);             // [QUERY_ROWS][words]: hit slots; owner_of(slot) has the bit
    u32* used = bitmap + QUERY_ROWS * words;              // [words]: of all CTAs
    i32* blocks = (i32*)(used + words);                   // [hot_blocks]
    i32* copy_src = blocks + hot_blocks;                  // [MAX_COPIES]
    i32* copy_dst = copy_src + MAX_COPIES;
    i32* hash = copy_dst + MAX_COPIES;                    // [2 * HASH_CAPACITY]: keys, values
    u16* victims = (u16*)(hash + 2 * HASH_CAPACITY);      // [QUERY_ROWS * TOP_K]

    const int t = threadIdx.x;
    const u32 cta = cluster_rank();
    const i64 request = blockIdx.x / CLUSTER, first_row = request * QUERY_ROWS;
#pragma unroll 1  // here and below: short loops, whose code would have to be fetched
    for (int i = t; i < QUERY_ROWS * words; i += THREADS) bitmap[i] = 0;
    if (!Table::BUILT) cluster_arrive();  // no shared memory of a CTA is written before that CTA runs and has cleared it
    i32 seat = -1;
#pragma unroll
    for (int row = 0; row < QUERY_ROWS; ++row) {
        const i32 other = seats[first_row + row];
        if (seat < 0) seat = other;
        if (other >= 0 && other != seat && t == 0 && cta == 0) report(status, BAD_ROWS, other, -1, (i32)request);
    }

    // ---- 1: look up
    i32 pos[ROUNDS], page_block[ROUNDS];
    i32 slot[ROUNDS];
    i32 limit[QUERY_ROWS];
#pragma unroll
    for (int row = 0; row < QUERY_ROWS; ++row) {
        const i64 n = first_row + row;
        const i64 length = seq_is_64 ? ((const i64*)seq_len)[n] : (i64)((const i32*)seq_len)[n];
        limit[row] = seats[n] != seat || seat < 0 ? 0 : (i32)(length < 0x7fffffff ? length : 0x7fffffff);
#pragma unroll
        for (int k = 0; k < ROUNDS_PER_ROW; ++k) {
            const int c = k * THREADS + t, column = cta * COLUMNS + c;
            const bool here = c < COLUMNS && column < top_k;
            pos[row * ROUNDS_PER_ROW + k] = here ? topk[n * topk_row_stride + column * topk_stride] : -1;
        }
    }
    const i32 size = seat < 0 ? 0 : hot_rows[seat];
    if (seat >= 0) {
        resident_table += (i64)seat * resident_stride;
        source_table += (i64)seat * source_stride;
        hot_table += (i64)seat * hot_stride;
        slot_tag += (i64)seat * slots;
        pos_slot += (i64)seat * positions;
        use += (i64)seat * slots;
    }
#if HASH_CAPACITY
    Table table{hash, hash + HASH_CAPACITY, HASH_CAPACITY, false};
    table.clear();
    __syncthreads();
    if (!table.build(slot_tag, size, cta)) report(status, TABLE_FULL, seat, -1, HASH_CAPACITY);
    cluster_sync();
#else
    Table table{pos_slot};
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const bool named = pos[r] >= 0 && pos[r] < limit[r / ROUNDS_PER_ROW];
        if (!named) pos[r] = -1;
        const bool inside = named && pos[r] < positions && (pos[r] >> BLOCK_SHIFT) < pages;
        page_block[r] = inside ? resident_table[pos[r] >> BLOCK_SHIFT] : 0;
        slot[r] = inside && (EAGER_LOOKUP || size > 0) ? table.find(pos[r]) : -1;
        if (named && !inside) {
            report(status, NO_PAGE, seat, pos[r], 0);
            pos[r] = -1;
        }
    }
    Planes counters[GROUPS_PER_THREAD];
#pragma unroll
    for (int g = 0; g < GROUPS_PER_THREAD; ++g) {
        const i32 first = (t * GROUPS_PER_THREAD + g) * GROUP;
        const uint4 v = seat >= 0 && first < (EAGER_LOOKUP ? (i32)slots : size) ? *(const uint4*)(use + first) : make_uint4(0, 0, 0, 0);
        counters[g] = Planes::of({v.x, v.y, v.z, v.w});
    }
    const i32 start = seat < 0 ? 0 : hand[seat];
    const i32 num_blocks = seat < 0 ? 0 : EAGER_LOOKUP ? (i32)hot_blocks : (size + BLOCK - 1) >> BLOCK_SHIFT;
#pragma unroll 1
    for (int i = t; i < num_blocks; i += THREADS) blocks[i] = hot_table[i];
    __syncthreads();
    if (!Table::BUILT) cluster_wait();

    bool miss[ROUNDS];
    i32 host_row[ROUNDS];
    u32 ballots[ROUNDS];
    bool met = false;
    const int lane = t % 32, warp = t / 32;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int row = r / ROUNDS_PER_ROW;
        const int c = (r % ROUNDS_PER_ROW) * THREADS + t, column = cta * COLUMNS + c;
        const bool resident = pos[r] >= 0 && page_block[r] > 0;
        const bool needed = pos[r] >= 0 && page_block[r] <= 0;
        i32 id = -1;
        miss[r] = false;
        if (resident) {
            id = (i32)(page_block[r] * rows_per_block + row_offset + (pos[r] & (BLOCK - 1)));
        } else if (needed && slot[r] >= 0) {
            set_bits(&bitmap[row * words + (slot[r] >> 5)], owner_of(slot[r]), 1u << (slot[r] & 31));
            const i32 block = blocks[slot[r] >> BLOCK_SHIFT];
            if (block > 0) id = (i32)(block * rows_per_block + row_offset + (slot[r] & (BLOCK - 1)));
            else report(status, NO_HOT_BLOCK, seat, pos[r], slot[r]);
        } else if (__builtin_expect(needed, 0)) {
            const i32 block = source_table[pos[r] >> BLOCK_SHIFT];
            if (block > 0) {
                miss[r] = true;
                host_row[r] = (block << BLOCK_SHIFT) + (pos[r] & (BLOCK - 1));
                if (size > 0) met |= table.claim(pos[r], row * TOP_K + column);
            } else {
                report(status, NO_PAGE, seat, pos[r], block);
            }
        }
        if (c < COLUMNS && column < top_k && !miss[r]) out_ids[(first_row + row) * top_k + column] = id;
        const i32 seen = __popc(__ballot_sync(~0u, resident)) + (__popc(__ballot_sync(~0u, needed)) << 16);
        ballots[r] = __ballot_sync(~0u, miss[r]);
        if (lane == 0) {
            s.warp_seen[r * WARPS + warp] = seen;
            s.warp_misses[r * WARPS + warp] = __popc(ballots[r]);
        }
    }
    if (table.full) report(status, TABLE_FULL, seat, -1, HASH_CAPACITY);
    const bool met_here = __syncthreads_or(met);
    i32 place[ROUNDS], row_misses[QUERY_ROWS];
    u32 any = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) any |= ballots[r];
    if (any) {
        order(s.warp_misses, ballots, place, row_misses);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int column = cta * COLUMNS + (r % ROUNDS_PER_ROW) * THREADS + t;
            if (miss[r]) list[place[r]] = Miss{pos[r], host_row[r], (r / ROUNDS_PER_ROW) * TOP_K + column, 0};
        }
    }
    for (int i = t; i < CELLS; i += THREADS) {
        const int row = i / CLUSTER;
        i32 seen = 0, missed = 0;
        for (int w = 0; w < ROUNDS_PER_ROW * WARPS; ++w) {
            seen += s.warp_seen[row * ROUNDS_PER_ROW * WARPS + w];
            missed += s.warp_misses[row * ROUNDS_PER_ROW * WARPS + w];
        }
        write16_to(&s.cells[row * CLUSTER + cta], i % CLUSTER,
                   make_uint4(missed, seen & 0xffff, seen >> 16, met_here));  // a Cell
    }
    cluster_sync();

    i32 row_found[QUERY_ROWS], row_resident[QUERY_ROWS], row_needed[QUERY_ROWS];  // misses (phase 1) and entries by tier
    i32 misses = 0, needed_entries = 0;
    bool duplicates = false;
#pragma unroll
    for (int row = 0; row < QUERY_ROWS; ++row) {
        const Cell c = lane < CLUSTER ? s.cells[row * CLUSTER + lane] : Cell{0, 0, 0, 0};
        row_found[row] = __reduce_add_sync(~0u, c.misses);
        row_resident[row] = __reduce_add_sync(~0u, c.resident);
        row_needed[row] = __reduce_add_sync(~0u, c.needed);
        duplicates |= __any_sync(~0u, c.met);
        misses += row_found[row];
        needed_entries += row_needed[row];
    }
    const bool tight = needed_entries > size;  // otherwise their union fits
    const bool my_groups = seat >= 0 && (u32)(t / (THREADS / CLUSTER)) == cta;  // whose counters this thread writes

    if (__builtin_expect(misses == 0 && !tight, 1)) {  // nothing to copy: counters go up, and that is all
        if (my_groups && needed_entries) {
#pragma unroll
            for (int g = 0; g < GROUPS_PER_THREAD; ++g) {
                const i32 first = (t * GROUPS_PER_THREAD + g) * GROUP;
                if (first >= size) continue;
                u32 hit = 0;
#pragma unroll
                for (int row = 0; row < QUERY_ROWS; ++row) hit |= bitmap[row * words + (first >> 5)];
                store_counters(use + first, counters[g], hit >> (first & 16) & 0xffffu, counters[g]);
            }
        }
        if (cta == 0 && t == 0) {
#pragma unroll
            for (int row = 0; row < QUERY_ROWS; ++row) {
                const i64 n = first_row + row;
                out_valid[n] = row_resident[row] + row_needed[row], out_fits[n] = 1;
                out_resident[n] = row_resident[row], out_hot[n] = row_needed[row], out_miss[n] = 0;
            }
        }
        return;  // nobody reads another CTA's shared memory
    }

    // ---- 2: several entries missed one position: only the first of them counts
    bool owner[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) owner[r] = miss[r];
    if (duplicates) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int column = cta * COLUMNS + (r % ROUNDS_PER_ROW) * THREADS + t;
            const i32 entry = (r / ROUNDS_PER_ROW) * TOP_K + column;
            if (miss[r]) owner[r] = table.read(pos[r]) == -2 - entry;
            ballots[r] = __ballot_sync(~0u, owner[r]);
            if (lane == 0) s.warp_misses[r * WARPS + warp] = __popc(ballots[r]);
        }
        __syncthreads();
        order(s.warp_misses, ballots, place, row_misses);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int column = cta * COLUMNS + (r % ROUNDS_PER_ROW) * THREADS + t;
            if (owner[r]) list[place[r]] = Miss{pos[r], host_row[r], (r / ROUNDS_PER_ROW) * TOP_K + column, 0};
        }
#pragma unroll
        for (int row = 0; row < QUERY_ROWS; ++row)
            if (t < CLUSTER) write_to(&s.winners[row * CLUSTER + cta], t, row_misses[row]);
        cluster_sync();
    }
    const auto first_misses = [&](int cell) { return duplicates ? s.winners[cell] : s.cells[cell].misses; };
    if (t <= CELLS) {
        i32 before = 0;
#pragma unroll 1
        for (int i = 0; i < t; ++i) before += first_misses(i);
        s.first_rank[t] = before;
    }
    if (t < QUERY_ROWS) s.row_hits[t] = 0;
    __syncthreads();
    misses = s.first_rank[CELLS];
    int rows_fit = QUERY_ROWS;

    // used slots, collected from their owners; with `tight` also the slots that each row is the first to use
#pragma unroll 1
    for (int w = t; w < words; w += THREADS) {
        u32 all = 0;
#pragma unroll
        for (int row = 0; row < QUERY_ROWS; ++row) {
            const u32 v = hits_of_all(bitmap + row * words, w);
            const i32 fresh = __popc(v & ~all);
            if (tight && fresh) atomicAdd(&s.row_hits[row], fresh);
            all |= v;
        }
        used[w] = all;
    }
    __syncthreads();
    if (tight) {
        i32 total = 0;
        rows_fit = 0;
        for (int row = 0; row < QUERY_ROWS; ++row) {
            total += s.row_hits[row] + s.first_rank[(row + 1) * CLUSTER] - s.first_rank[row * CLUSTER];
            if (total > size) break;
            rows_fit = row + 1;
        }
        if (rows_fit < QUERY_ROWS) {
            misses = s.first_rank[rows_fit * CLUSTER];
            for (int w = t; w < words; w += THREADS) {
                u32 all = 0;
                for (int row = 0; row < rows_fit; ++row) all |= hits_of_all(bitmap + row * words, w);
                used[w] = all;
            }
            if (t == 0 && cta == 0 && seat >= 0) {
                bool first = true;  // a later verification row may be refused, the first of a request must fit
                for (int row = 0; row < rows_fit; ++row) first &= seats[first_row + row] < 0;
                if (first) report(status, NO_FIT, seat, limit[rows_fit] - 1, size);
            }
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int row = r / ROUNDS_PER_ROW, c = (r % ROUNDS_PER_ROW) * THREADS + t, column = cta * COLUMNS + c;
                if (row < rows_fit) continue;
                if (owner[r] && size > 0) table.drop(pos[r]);
                if (c < COLUMNS && column < top_k) out_ids[(first_row + row) * top_k + column] = -1;
                miss[r] = owner[r] = false;
            }
            __syncthreads();
        }
    }

    // ---- 3: this CTA's share of the misses; the first rows are on their way before it is known where they go
    const i32 from = (i32)((i64)misses * cta / CLUSTER), count = (i32)((i64)misses * (cta + 1) / CLUSTER) - from;
    for (i32 i = t; i < count; i += THREADS) {
        const i32 rank = from + i;
        int cell = 0;
        while (s.first_rank[cell + 1] <= rank) ++cell;
        const u32 owner_cta = cell % CLUSTER;
        i32 index = rank - s.first_rank[cell];
        for (int row = 0; row < cell / CLUSTER; ++row) index += first_misses(row * CLUSTER + owner_cta);
        const uint4 m = read16_from(&list[index], owner_cta);  // a Miss
        share[i] = make_int2(m.x, m.z);                        // position, entry
        copy_src[i] = m.y;
        copy_dst[i] = i;
    }
    uint4 early[EARLY > 0 ? EARLY : 1];
    if (count > 0) {
        __syncthreads();
        if (count >= SORT_FROM) sort_by_source<THREADS, (MAX_COPIES + THREADS - 1) / THREADS>(copy_src, copy_dst, count);
#pragma unroll
        for (int u = 0; u < EARLY; ++u) {
            const i32 i = t + u * THREADS;
            if (i < count * PARTS) early[u] = load16(host_rows + (i64)copy_src[i / PARTS] * ROW_BYTES + (i % PARTS) * 16);
        }
    }

    // ---- 4: victims
    int level = -1;  // counter of the last victim
    if (misses > 0) {
        u64 mine = 0;
        u32 eligible[GROUPS_PER_THREAD];
#pragma unroll
        for (int g = 0; g < GROUPS_PER_THREAD; ++g) {
            const i32 first = (t * GROUPS_PER_THREAD + g) * GROUP;
            eligible[g] = ~from_slot(first, size) & 0xffffu;
            if (eligible[g]) eligible[g] &= ~(used[first >> 5] >> (first & 16));
            mine += counters[g].counts(eligible[g]);
        }
        u64 upto = mine;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const u64 other = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += other;
        }
        if (lane == 31) s.warp_levels[warp] = upto;
        if (start / GROUP / GROUPS_PER_THREAD == t) {  // the thread that holds the hand's group
            u64 passed = upto - mine;
#pragma unroll
            for (int g = 0; g < GROUPS_PER_THREAD; ++g)
                passed += counters[g].counts(eligible[g] & ~from_slot((t * GROUPS_PER_THREAD + g) * GROUP, start));
            s.passed = passed;
            s.hand_warp = warp;
        }
        __syncthreads();
        u64 before = upto - mine, total = 0, skipped = s.passed;  // skipped: eligible slots before the hand, by level
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) before += s.warp_levels[w];
            if (w < s.hand_warp) skipped += s.warp_levels[w];
            total += s.warp_levels[w];
        }
        i32 base[4];
        i32 below = 0;
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            base[l] = below;
            const i32 n = (i32)((total >> (16 * l)) & 0xffff);
            if (level < 0 && below + n >= misses) level = l;
            below += n;
        }
        u64 reached = before;
#pragma unroll
        for (int g = 0; g < GROUPS_PER_THREAD; ++g) {
            const i32 first = (t * GROUPS_PER_THREAD + g) * GROUP;
            for (int l = 0; l <= level; ++l) {
                const i32 ahead = (i32)((skipped >> (16 * l)) & 0xffff), in_level = (i32)((total >> (16 * l)) & 0xffff);
                i32 n = (i32)((reached >> (16 * l)) & 0xffff);
                for (u32 left = counters[g].at(l) & eligible[g]; left; left &= left - 1, ++n) {
                    const i32 where = first + __ffs(left) - 1;
                    const i32 rank = base[l] + n - ahead + (where >= start ? 0 : in_level);
                    if (rank < misses) victims[rank] = (u16)where;
                    if (rank == misses - 1) s.last_slot = where;
                }
            }
            reached += counters[g].counts(eligible[g]);
        }
        __syncthreads();
    }

    // ---- 5: every miss of the share gets its victim
    for (i32 k = THREADS - 1 - t; k < count; k += THREADS) {  // from the last warp on: the first ones copy
        const i32 i = copy_dst[k], rank = from + i, v = victims[rank];
        const i32 position = share[i].x, row = share[i].y / TOP_K, column = share[i].y % TOP_K;
        const i32 block = blocks[v >> BLOCK_SHIFT];
        const i32 id = block > 0 ? (i32)(block * rows_per_block + row_offset + (v & (BLOCK - 1))) : -1;
        if (block <= 0) report(status, NO_HOT_BLOCK, seat, position, v);
        copy_dst[k] = id;
        const i64 n = first_row + row;
        out_ids[n * top_k + column] = id;
        const i64 in_plan = n * top_k + rank - s.first_rank[row * CLUSTER];
        plan_host[in_plan] = copy_src[k];
        plan_device[in_plan] = id;
        table.settle(slot_tag[v], position, v);
        slot_tag[v] = position;
    }
    if (misses > 0 && duplicates) {
        cluster_sync();  // the winners' slots are in the table now
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            if (!miss[r] || owner[r]) continue;
            const int row = r / ROUNDS_PER_ROW, column = cta * COLUMNS + (r % ROUNDS_PER_ROW) * THREADS + t;
            const i32 v = table.read(pos[r]), block = v < 0 ? 0 : blocks[v >> BLOCK_SHIFT];
            out_ids[(first_row + row) * top_k + column] =
                block > 0 ? (i32)(block * rows_per_block + row_offset + (v & (BLOCK - 1))) : -1;
        }
    }

    if (my_groups) {
#pragma unroll
        for (int g = 0; g < GROUPS_PER_THREAD; ++g) {
            const i32 first = (t * GROUPS_PER_THREAD + g) * GROUP;
            if (first >= size) continue;
            const u32 hit = used[first >> 5] >> (first & 16) & 0xffffu;
            const Planes before = counters[g];
            if (misses > 0) {
                const u32 among = ~from_slot(first, size) & ~hit & 0xffffu, past = from_slot(first, s.last_slot + 1);
                const u32 ahead = from_slot(first, start);
                const u32 passed = (s.last_slot >= start ? ahead & ~past : ahead | ~past) & 0xffffu;
                u32 taken = before.at(level) & passed;
                for (int l = 0; l < level; ++l) taken |= before.at(l);
                taken &= among;
                for (int l = 0; l < level; ++l) counters[g].decrease(among);
                counters[g].decrease(among & passed);
                counters[g].set_one(taken);
            }
            store_counters(use + first, counters[g], hit, before);
        }
    }
    if (seat >= 0 && misses > 0 && cta == 0 && t == 0) hand[seat] = s.last_slot + 1 < size ? s.last_slot + 1 : 0;
    if (cta == 0 && t == 0) {
#pragma unroll
        for (int row = 0; row < QUERY_ROWS; ++row) {
            const bool fits = row < rows_fit;
            const i32 missed = fits ? s.first_rank[(row + 1) * CLUSTER] - s.first_rank[row * CLUSTER] : 0;
            const i64 n = first_row + row;
            out_valid[n] = fits ? row_resident[row] + row_needed[row] : 0;
            out_fits[n] = fits || seats[n] < 0;
            out_resident[n] = fits ? row_resident[row] : 0;
            out_hot[n] = fits ? row_needed[row] - missed : 0;
            out_miss[n] = missed;
        }
    }
    cluster_arrive();  // nobody looks into this CTA's shared memory any more once all have arrived
    if (count > 0) {
        __syncthreads();
#pragma unroll
        for (int u = 0; u < EARLY; ++u) {
            const i32 i = t + u * THREADS;
            if (i < count * PARTS && copy_dst[i / PARTS] >= 0)
                store16(rows + (i64)copy_dst[i / PARTS] * ROW_BYTES + (i % PARTS) * 16, early[u]);
        }
        copy_rows<ROW_BYTES, THREADS, UNROLL>(host_rows, rows, copy_src, copy_dst, 0, count, EARLY * THREADS);
    }
    cluster_wait();
}

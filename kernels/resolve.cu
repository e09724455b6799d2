// Fused resolver: top-k positions of a request to flat device rows; misses are copied from host memory in the same launch.
//
// Geometry   grid = requests * CLUSTER CTAs of THREADS; the CLUSTER CTAs of a request form one cluster. A request has
//            QUERY_ROWS consecutive rows of `topk` (one transaction: their union is resolved). CTA j owns columns
//            [j, j + 1) * TOP_K / CLUSTER of each row: it looks them up and writes their row ids.
// Phases     1 look up: resident table, position table, counters and blocks of the region, all loads at once; a hit sets a bit
//              in the CTA's bitmap; a miss claims its position in the table with the code -2 - e, e = row * TOP_K + column;
//              the lowest e wins. Every CTA sends the others its counts, and each word of its bitmap to the CTA that writes
//              those slots' counters (findings.cuh). All have come, no miss: update the own counters and return.
//            - cluster barrier -
//            2 only if two entries missed one position: read the claims again, count the winners, barrier
//            3 rank = number of misses before it in (row, column) order. Ranks are split evenly over the CTAs; each orders its
//              share by host address and starts to load the first rows (misses.cuh, copies.cuh).
//            4 victims: each CTA scans all use counters by itself: (counter, ring distance from the hand), first m slots
//            5 rank i takes victim i: row ids, plan, state; then the rows are stored, and the others copied.
// Tables     HASH_CAPACITY = 0: DirectTable, else HashTable; position_table.cuh says what they are. Same results.
// State      slot_tag, pos_slot, use, hand of the request's seat are written by its own cluster only, behind the barrier;
//            everything before the barrier reads them (pos_slot: claims, which are replaced by a slot or by -1). Without a
//            miss there is no barrier: `use` alone is written, by the owner of a counter, and nobody uses another's counters.
// Requires   rows of a request share a seat or are -1 (padding); no seat occurs in two requests; TOP_K >= top-k;
//            slots padded to 16; positions below 2^31; QUERY_ROWS * TOP_K <= 32,766; tables hold 0 where no page is.
// Sentinels  topk -1 or outside [0, seq_len): row id -1. Seat -1: all -1, no state is touched.
// Errors     a position without page, a slot without block, a first row that does not fit: row id -1 and the status word.
// Determinism  row ids, plan and state are functions of inputs and state. Atomics elect a claim (a minimum), set bits, or
//            place a row among those of nearby addresses, which only changes the order in time of the copies.
#include "copies.cuh"
#include "findings.cuh"
#include "misses.cuh"
#include "position_table.cuh"
#include "victims.cuh"

#if HASH_CAPACITY
using Table = HashTable;
#else
using Table = DirectTable;
#endif

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
    const int t = threadIdx.x;
    const u32 cta = cluster_rank();
    const i64 request = blockIdx.x / CLUSTER, first_row = request * QUERY_ROWS;

    // ---- 1: look up
    i32 pos[ROUNDS], seat_of[QUERY_ROWS];
    i64 length[QUERY_ROWS];
#pragma unroll
    for (int row = 0; row < QUERY_ROWS; ++row) {
        const i64 n = first_row + row;
        seat_of[row] = seats[n];
        length[row] = seq_is_64 ? ((const i64*)seq_len)[n] : (i64)((const i32*)seq_len)[n];
#pragma unroll
        for (int k = 0; k < ROUNDS_PER_ROW; ++k) {
            const int c = k * THREADS + t, column = cta * COLUMNS + c;
            const bool here = c < COLUMNS && column < (i32)top_k;
            pos[row * ROUNDS_PER_ROW + k] = here ? topk[n * topk_row_stride + column * topk_stride] : -1;
        }
    }
    if (t == 0) s.mailbox.open();
    if (!Table::BUILT) cluster_arrive_relaxed();  // nothing is sent to a CTA before it runs and has a mailbox
    const Memory m(raw, slots, hot_blocks);
    clear_hits(m);

    i32 seat = -1, limit[QUERY_ROWS];
#pragma unroll
    for (int row = 0; row < QUERY_ROWS; ++row) {
        if (seat < 0) seat = seat_of[row];
        if (seat_of[row] >= 0 && seat_of[row] != seat && t == 0 && cta == 0)
            report(status, BAD_ROWS, seat_of[row], -1, (i32)request);
    }
#pragma unroll
    for (int row = 0; row < QUERY_ROWS; ++row)
        limit[row] = seat_of[row] != seat || seat < 0 ? 0 : (i32)(length[row] < 0x7fffffff ? length[row] : 0x7fffffff);
    const u64 of_seat = seat < 0 ? 0u : (u32)seat;  // times strides below 2^32: one multiplication each
    const i32 size = seat < 0 ? 0 : hot_rows[of_seat];
    resident_table += of_seat * (u32)resident_stride;
    hot_table += of_seat * (u32)hot_stride;
    pos_slot += of_seat * (u32)positions;
    use += of_seat * (u32)slots;
#if HASH_CAPACITY
    Table table{m.hash, m.hash + HASH_CAPACITY, HASH_CAPACITY, false};
    table.clear();
    __syncthreads();
    slot_tag += of_seat * (u32)slots;
    if (!table.build(slot_tag, size, cta)) report(status, TABLE_FULL, seat, -1, HASH_CAPACITY);
    cluster_sync();
#else
    Table table{pos_slot};
#endif
    i32 page_block[ROUNDS], slot[ROUNDS];
    bool outside = false;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const bool named = pos[r] >= 0 && pos[r] < limit[r / ROUNDS_PER_ROW];
        if (!named) pos[r] = -1;
        const bool inside = named && pos[r] < (i32)positions && (pos[r] >> BLOCK_SHIFT) < (i32)pages;
        page_block[r] = inside ? resident_table[(u32)pos[r] >> BLOCK_SHIFT] : 0;
        slot[r] = inside && (EAGER_LOOKUP || size > 0) ? table.find(pos[r]) : -1;
        outside |= named && !inside;
    }
    uint4 use_bytes[GROUPS_PER_THREAD];
#pragma unroll
    for (int g = 0; g < GROUPS_PER_THREAD; ++g) {
        const i32 first = (t * GROUPS_PER_THREAD + g) * GROUP;
        const bool here = seat >= 0 && first < (EAGER_LOOKUP ? (i32)slots : size);
        use_bytes[g] = here ? *(const uint4*)(use + first) : make_uint4(0, 0, 0, 0);
    }
    const i32 start = seat < 0 ? 0 : hand[of_seat];
    const i32 num_blocks = seat < 0 ? 0 : EAGER_LOOKUP ? (i32)hot_blocks : (size + BLOCK - 1) >> BLOCK_SHIFT;
    const i32 my_block = t < num_blocks ? hot_table[threadIdx.x] : 0;
    // All loads are under way; nothing above waits for one of the tables.
    i32* const my_ids = out_ids + first_row * (i32)top_k + cta * COLUMNS + t;
    __syncwarp();
    if (t == 0) s.mailbox.expect(QUERY_ROWS * WORDS * sizeof(u32) + CELLS * sizeof(Cell));
    if (t < num_blocks) m.blocks[t] = my_block;
#pragma unroll 1  // here and below: short loops, whose code would have to be fetched
    for (int i = t + THREADS; i < num_blocks; i += THREADS) m.blocks[i] = hot_table[i];
    if (__builtin_expect(outside, 0)) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            if (pos[r] < 0 || (pos[r] < (i32)positions && (pos[r] >> BLOCK_SHIFT) < (i32)pages)) continue;
            report(status, NO_PAGE, seat, pos[r], 0);
            pos[r] = -1;
        }
    }
    __syncthreads();
    if (!Table::BUILT) cluster_wait();

    bool miss[ROUNDS];
    i32 host_row[ROUNDS];
    u32 ballots[ROUNDS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int row = r / ROUNDS_PER_ROW;
        const int c = (r % ROUNDS_PER_ROW) * THREADS + t, column = cta * COLUMNS + c;
        const bool resident = pos[r] >= 0 && page_block[r] > 0;
        const bool needed = pos[r] >= 0 && page_block[r] <= 0;
        bool met = false;
        i32 id = -1;
        miss[r] = false;
        if (resident) {
            id = page_block[r] * (i32)rows_per_block + (i32)row_offset + (pos[r] & (BLOCK - 1));
        } else if (needed && slot[r] >= 0) {
            atomicOr(&m.bitmap[row * WORDS + (slot[r] >> 5)], 1u << (slot[r] & 31));
            const i32 block = m.blocks[slot[r] >> BLOCK_SHIFT];
            if (block > 0) id = block * (i32)rows_per_block + (i32)row_offset + (slot[r] & (BLOCK - 1));
            else report(status, NO_HOT_BLOCK, seat, pos[r], slot[r]);
        } else if (__builtin_expect(needed, 0)) {
            const i32 block = source_table[of_seat * (u32)source_stride + (u32)(pos[r] >> BLOCK_SHIFT)];
            if (block > 0) {
                miss[r] = true;
                host_row[r] = (block << BLOCK_SHIFT) + (pos[r] & (BLOCK - 1));
                if (size > 0) met = table.claim(pos[r], row * TOP_K + column);
            } else {
                report(status, NO_PAGE, seat, pos[r], block);
            }
        }
        if (c < COLUMNS && column < (i32)top_k && !miss[r]) my_ids[row * (i32)top_k + (r % ROUNDS_PER_ROW) * THREADS] = id;
        const i32 seen =
            Seen::of(__popc(__ballot_sync(~0u, resident)), __popc(__ballot_sync(~0u, needed)), __any_sync(~0u, met));
        ballots[r] = __ballot_sync(~0u, miss[r]);
        if (lane == 0) {
            s.warp_seen[r * WARPS + warp] = seen;
            s.warp_misses[r * WARPS + warp] = __popc(ballots[r]);
        }
    }
    if (table.full) report(status, TABLE_FULL, seat, -1, HASH_CAPACITY);
    __syncthreads();
    send_findings(s, m, cta);
    s.mailbox.wait();
    const Totals found = Totals::of(s.cells);
    const bool duplicates = found.duplicates;
    i32 misses = found.misses;
    const bool tight = found.entries > size;  // otherwise their union fits
    const bool my_groups = seat >= 0 && (u32)(t / (THREADS / CLUSTER)) == cta;  // whose counters this thread writes

    if (__builtin_expect(misses == 0 && !tight, 1)) {  // nothing to copy: counters go up, and that is all
        if (my_groups && found.entries) {
#pragma unroll
            for (int g = 0; g < GROUPS_PER_THREAD; ++g) {
                const i32 first = (t * GROUPS_PER_THREAD + g) * GROUP;
                if (first >= size) continue;
                u32 hit = 0;
#pragma unroll
                for (int row = 0; row < QUERY_ROWS; ++row) hit |= hits_here(m, row, first >> 5);
                const Planes held = Planes::of({use_bytes[g].x, use_bytes[g].y, use_bytes[g].z, use_bytes[g].w});
                store_counters(use + first, held, hit >> (first & 16) & 0xffffu, held);
            }
        }
        if (cta == 0 && t == 0) {
#pragma unroll
            for (int row = 0; row < QUERY_ROWS; ++row) {
                const i64 n = first_row + row;
                out_valid[n] = found.resident[row] + found.needed[row], out_fits[n] = 1;
                out_resident[n] = found.resident[row], out_hot[n] = found.needed[row], out_miss[n] = 0;
            }
        }
        return;  // all that is sent to this CTA has come
    }

    // From here on state is written, and shared memory of other CTAs is read, behind a barrier that orders everything.
    if (!Table::BUILT) slot_tag += of_seat * (u32)slots;
    Planes counters[GROUPS_PER_THREAD];
#pragma unroll
    for (int g = 0; g < GROUPS_PER_THREAD; ++g)
        counters[g] = Planes::of({use_bytes[g].x, use_bytes[g].y, use_bytes[g].z, use_bytes[g].w});
    i32 place[ROUNDS], row_misses[QUERY_ROWS];
    order(s.warp_misses, ballots, place, row_misses);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int column = cta * COLUMNS + (r % ROUNDS_PER_ROW) * THREADS + t;
        if (miss[r]) m.list[place[r]] = Miss{pos[r], host_row[r], (r / ROUNDS_PER_ROW) * TOP_K + column, 0};
    }
    __syncthreads();  // the bitmap is sent, as the mailbox says already, but not to racecheck
    merge_hits(m, cta);
    cluster_sync();

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
            if (owner[r]) m.list[place[r]] = Miss{pos[r], host_row[r], (r / ROUNDS_PER_ROW) * TOP_K + column, 0};
        }
#pragma unroll
        for (int row = 0; row < QUERY_ROWS; ++row)
            if (t < CLUSTER) write_to(&s.winners[row * CLUSTER + cta], t, row_misses[row]);
        cluster_sync();
    }
    const auto first_misses = [&](int cell) { return duplicates ? s.winners[cell] : s.cells[cell].misses; };
    rank_misses(s, first_misses);
    if (t < QUERY_ROWS) s.row_hits[t] = 0;
    __syncthreads();
    misses = s.first_rank[CELLS];
    int rows_fit = QUERY_ROWS;

    // used slots, collected from their owners; with `tight` also the slots that each row is the first to use
#pragma unroll 1
    for (int w = t; w < m.words; w += THREADS) {
        u32 all = 0;
#pragma unroll
        for (int row = 0; row < QUERY_ROWS; ++row) {
            const u32 v = read_from(&m.bitmap[row * WORDS + w], w / OWNED);
            const i32 fresh = __popc(v & ~all);
            if (tight && fresh) atomicAdd(&s.row_hits[row], fresh);
            all |= v;
        }
        m.used[w] = all;
    }
    if (tight) {
        __syncthreads();
        i32 total = 0;
        rows_fit = 0;
        for (int row = 0; row < QUERY_ROWS; ++row) {
            total += s.row_hits[row] + s.first_rank[(row + 1) * CLUSTER] - s.first_rank[row * CLUSTER];
            if (total > size) break;
            rows_fit = row + 1;
        }
        if (rows_fit < QUERY_ROWS) {
            misses = s.first_rank[rows_fit * CLUSTER];
            for (int w = t; w < m.words; w += THREADS) {
                u32 all = 0;
                for (int row = 0; row < rows_fit; ++row) all |= read_from(&m.bitmap[row * WORDS + w], w / OWNED);
                m.used[w] = all;
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
    deal_misses(s, m, first_misses, from, count);
    uint4 early[EARLY > 0 ? EARLY : 1];
    __syncthreads();
    if (count > 0) {
        constexpr int ITEMS = (Memory::MAX_COPIES + THREADS - 1) / THREADS;
        if (count >= SORT_FROM) order_by_source<THREADS, ITEMS, BUCKETS>(m.copy_src, m.copy_dst, count, s.order);
#pragma unroll
        for (int u = 0; u < EARLY; ++u) {
            const i32 i = t + u * THREADS;
            if (i < count * PARTS) early[u] = load16(host_rows + (i64)m.copy_src[i / PARTS] * ROW_BYTES + (i % PARTS) * 16);
        }
    }

    // ---- 4: victims
    const int level = misses > 0 ? find_victims(s, m, counters, size, start, misses) : -1;  // counter of the last victim

    // ---- 5: every miss of the share gets its victim
    for (i32 k = THREADS - 1 - t; k < count; k += THREADS) {  // from the last warp on: the first ones copy
        const i32 i = m.copy_dst[k], rank = from + i, v = m.victims[rank];
        const i32 position = m.share[i].x, row = m.share[i].y / TOP_K, column = m.share[i].y % TOP_K;
        const i32 block = m.blocks[v >> BLOCK_SHIFT];
        const i32 id = block > 0 ? block * (i32)rows_per_block + (i32)row_offset + (v & (BLOCK - 1)) : -1;
        if (block <= 0) report(status, NO_HOT_BLOCK, seat, position, v);
        m.copy_dst[k] = id;
        const i64 n = first_row + row;
        out_ids[n * top_k + column] = id;
        const i64 in_plan = n * top_k + rank - s.first_rank[row * CLUSTER];
        plan_host[in_plan] = m.copy_src[k];
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
            const i32 v = table.read(pos[r]), block = v < 0 ? 0 : m.blocks[v >> BLOCK_SHIFT];
            out_ids[(first_row + row) * top_k + column] =
                block > 0 ? block * (i32)rows_per_block + (i32)row_offset + (v & (BLOCK - 1)) : -1;
        }
    }

    if (my_groups) {
#pragma unroll
        for (int g = 0; g < GROUPS_PER_THREAD; ++g) {
            const i32 first = (t * GROUPS_PER_THREAD + g) * GROUP;
            if (first >= size) continue;
            const u32 hit = m.used[first >> 5] >> (first & 16) & 0xffffu;
            const Planes before = counters[g];
            if (misses > 0) age(counters[g], first, hit, size, start, s.last_slot, level);
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
            out_valid[n] = fits ? found.resident[row] + found.needed[row] : 0;
            out_fits[n] = fits || seats[n] < 0;
            out_resident[n] = fits ? found.resident[row] : 0;
            out_hot[n] = fits ? found.needed[row] - missed : 0;
            out_miss[n] = missed;
        }
    }
    // Once all have arrived, nobody looks into this CTA's shared memory any more, or writes to the part of the table that it
    // holds. Relaxed is enough for reads: what was read lies in the own shared memory behind a __syncthreads; a release would
    // wait for row ids and plan to be stored.
    if (Table::BUILT) cluster_arrive();
    else cluster_arrive_relaxed();
    if (count > 0) {
        __syncthreads();
#pragma unroll
        for (int u = 0; u < EARLY; ++u) {
            const i32 i = t + u * THREADS;
            if (i < count * PARTS && m.copy_dst[i / PARTS] >= 0)
                store16(rows + (i64)m.copy_dst[i / PARTS] * ROW_BYTES + (i % PARTS) * 16, early[u]);
        }
        copy_rows<ROW_BYTES, THREADS, UNROLL>(host_rows, rows, m.copy_src, m.copy_dst, 0, count, EARLY * THREADS);
    }
    cluster_wait();
}

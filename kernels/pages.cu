// Copies of whole pages by a few CTAs, so that they run beside a forward: spill, restore, scatter of staged pages,
// copies for forks, and the gather of a seat's non-resident history.
//
// copy_pages, send_pages
//   Instance   LIST_WORDS of a list; copy_pages: THREADS of a CTA, UNROLL 16-byte loads of a thread in flight; send_pages:
//              STAGES pieces of a CTA in shared memory, AHEAD of them being loaded.
//   Geometry   any number of CTAs (the caller bounds it); CTA c takes items c, c + CTAs, ...; an item is one page of one part
//              (layer), for send_pages a piece of one. Parts are outermost: the CTAs work within one layer at a time, i.e. in
//              a short span of host addresses. send_pages: one thread of a CTA, which starts bulk copies and waits for them.
//   Operands   list int32 [pages, width], in the parameters: rows of the page, then ids. parts int64 [parts, 8]: source
//              address, its id's column, target address, its column, second target address, its column, most bytes, 0. Address
//              of a page: base + address + id * stride; column -1 = the page's place in the list. Column 0 = no such operand.
//   Needs      addresses, strides and bytes multiples of 16; ids checked on the host; no target is a source or twice a target.
//   Sentinels  id 0 by a column > 0 is the null block: as a target it is skipped, as a source the item is.
//   Ordering   none inside a launch. Host writes are visible to the host once an event behind the launch has happened.
//   Determinism  each byte is written once, by one thread.
//
// Why two: plain stores to the host are accepted faster than the link takes them and fill every queue on their way, where the
// memory traffic of all other processors then stands behind them: a forward beside them runs at a seventh of its speed, on few
// CTAs as on many. send_pages has a bounded number of bytes on their way, because it waits until a piece is written.
//
// gather_pages: the same copy loop, driven by one seat's rows of the block tables.
// read_pieces: the same copy loop over a list of addresses, LIST_PIECES at most, in the parameters; the sources may be another
// process's memory, mapped here.

#include "common.cuh"

#ifndef THREADS
#define THREADS 512
#endif
#ifndef UNROLL
#define UNROLL 6
#endif
#ifndef LIST_WORDS
#define LIST_WORDS 4
#endif
#ifndef LIST_PIECES
#define LIST_PIECES 1
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef AHEAD
#define AHEAD 1
#endif

struct List {
    int words[LIST_WORDS];
};

struct Pieces {
    i64 of[LIST_PIECES][3];
};

// All threads of the CTA; `second` may be null.
__device__ __forceinline__ void copy_bytes(const char* from, char* to, char* second, i64 bytes) {
    const int units = static_cast<int>(bytes / 16);
    for (int first = threadIdx.x; first < units; first += THREADS * UNROLL) {
        Unit held[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (first + k * THREADS < units) held[k] = load16(from + i64(first + k * THREADS) * 16);
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (first + k * THREADS >= units) continue;
            const i64 at = i64(first + k * THREADS) * 16;
            if (to != nullptr) store16(to + at, held[k]);
            if (second != nullptr) store16(second + at, held[k]);
        }
    }
}

// Address of an operand of one page, 0 = none.
__device__ __forceinline__ i64 operand(const i64* part, const int* page, i64 place, i64 base, i64 stride) {
    const i64 column = part[1];
    if (column == 0) return 0;
    const i64 id = column < 0 ? place : page[column];
    return column > 0 && id == 0 ? 0 : base + part[0] + id * stride;
}

extern "C" __global__ void __launch_bounds__(THREADS)
copy_pages(const __grid_constant__ List list, i64 width, i64 num_pages, const i64* parts, i64 num_parts, i64 row_bytes,
           i64 source_base, i64 source_stride, i64 target_stride, i64 second_stride) {
    for (i64 item = blockIdx.x; item < num_pages * num_parts; item += gridDim.x) {
        const i64 which = item / num_pages, place = item - which * num_pages;
        const i64* part = parts + which * 8;
        const int* page = list.words + place * width;
        const i64 most = part[6], wanted = page[0] * row_bytes;
        const i64 from = operand(part, page, place, source_base, source_stride);
        const i64 to = operand(part + 2, page, place, 0, target_stride);
        const i64 second = operand(part + 4, page, place, 0, second_stride);
        if (from == 0 || (to == 0 && second == 0)) continue;
        copy_bytes(reinterpret_cast<const char*>(from), reinterpret_cast<char*>(to), reinterpret_cast<char*>(second),
                   wanted < most ? wanted : most);
    }
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void load_bulk(void* to, const void* from, u32 bytes, u64* loaded) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(loaded)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(loaded)) : "memory");
}

__device__ __forceinline__ void wait_loaded(u64* loaded, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(loaded)), "r"(parity) : "memory");
}

__device__ __forceinline__ void store_bulk(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

struct Piece {
    char* to;
    char* second;
    u32 bytes;
};

// At most STAGES - AHEAD + 1 pieces of a CTA are being written. Shared memory: STAGES * piece_bytes.
extern "C" __global__ void __launch_bounds__(32)
send_pages(const __grid_constant__ List list, i64 width, i64 num_pages, const i64* parts, i64 num_parts, i64 row_bytes,
           i64 source_base, i64 source_stride, i64 target_stride, i64 second_stride, i64 page_pieces, i64 piece_bytes) {
    extern __shared__ __align__(128) char bytes_of[];
    __shared__ __align__(8) u64 loaded[STAGES];
    __shared__ Piece pieces[STAGES];
    if (threadIdx.x != 0) return;
    for (int i = 0; i < STAGES; ++i)
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&loaded[i])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");

    i64 next = blockIdx.x;
    u32 count = 0;
    auto load_next = [&] {
        for (; next < num_parts * num_pages * page_pieces; next += gridDim.x) {
            const i64 item = next / page_pieces, start = (next - item * page_pieces) * piece_bytes;
            const i64 which = item / num_pages, place = item - which * num_pages;
            const i64* part = parts + which * 8;
            const int* page = list.words + place * width;
            const i64 most = part[6], wanted = page[0] * row_bytes, rest = (wanted < most ? wanted : most) - start;
            const i64 from = operand(part, page, place, source_base, source_stride);
            const i64 to = operand(part + 2, page, place, 0, target_stride);
            const i64 second = operand(part + 4, page, place, 0, second_stride);
            if (rest <= 0 || from == 0 || (to == 0 && second == 0)) continue;
            const u32 stage = count % STAGES, size = static_cast<u32>(rest < piece_bytes ? rest : piece_bytes);
            pieces[stage] = {to == 0 ? nullptr : reinterpret_cast<char*>(to + start),
                             second == 0 ? nullptr : reinterpret_cast<char*>(second + start), size};
            load_bulk(bytes_of + stage * piece_bytes, reinterpret_cast<const char*>(from + start), size, &loaded[stage]);
            ++count;
            next += gridDim.x;
            return;
        }
    };
    for (int i = 0; i < AHEAD; ++i) load_next();
    for (u32 done = 0; done < count; ++done) {
        const u32 stage = done % STAGES;
        const Piece piece = pieces[stage];
        wait_loaded(&loaded[stage], done / STAGES & 1);
        if (piece.to != nullptr) store_bulk(piece.to, bytes_of + stage * piece_bytes, piece.bytes);
        if (piece.second != nullptr) store_bulk(piece.second, bytes_of + stage * piece_bytes, piece.bytes);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group %0;" ::"n"(STAGES - AHEAD) : "memory");  // written, not only read: the bound
        load_next();
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Pages first_page.. of one seat in one layer to workspace[page - first_page], each whole. Not resident: from the host. Resident:
// from their block if `copy_resident`, else left alone. A CTA a page, then the next. In neither tier, or outside a pool: NO_PAGE
// in the status word, the workspace page is left alone.
extern "C" __global__ void __launch_bounds__(THREADS)
gather_pages(const int* source, const int* resident, i64 first_page, i64 num_pages, const char* host, i64 num_host_blocks,
             const char* device, i64 num_blocks, i64 block_bytes, i64 layer_offset, char* workspace, i64 page_bytes,
             i64 copy_resident, i64 seat, i64 block_size, int* status) {
    for (i64 item = blockIdx.x; item < num_pages; item += gridDim.x) {
        const i64 page = first_page + item, block = resident[page], host_block = source == nullptr ? 0 : source[page];
        if (block > 0 && !copy_resident) continue;
        const bool found = block > 0 ? block < num_blocks : host_block > 0 && host_block < num_host_blocks;
        if (!found) {
            if (threadIdx.x == 0) report(status, NO_PAGE, seat, page * block_size, block > 0 ? block : host_block);
            continue;
        }
        copy_bytes(block > 0 ? device + block * block_bytes + layer_offset : host + host_block * page_bytes,
                   workspace + item * page_bytes, nullptr, page_bytes);
    }
}

// Each of the pieces: source address, target address, bytes, all multiples of 16; no target overlaps anything. A CTA takes every
// gridDim.x-th one. A source on another GPU is far away: what is in flight, CTAs * THREADS * UNROLL * 16 bytes, is the rate.
extern "C" __global__ void __launch_bounds__(THREADS)
read_pieces(const __grid_constant__ Pieces pieces, i64 num_pieces) {
    for (i64 item = blockIdx.x; item < num_pieces; item += gridDim.x) {
        const i64* piece = pieces.of[item];
        copy_bytes(reinterpret_cast<const char*>(piece[0]), reinterpret_cast<char*>(piece[1]), nullptr, piece[2]);
    }
}

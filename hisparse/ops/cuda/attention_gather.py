"""Producers of the Hopper attention kernel: 4 warps that gather named rows into a ring of slots in shared memory.

A slot holds BLOCK_N rows: latents [BLOCK_N, 512] and rope parts [BLOCK_N, 64] in wgmma's layout, and a mark per row. bfloat16
rows go there by cp.async as they are; mark 0, or -inf where masked. fp8_ds_mla rows pass through registers, where they become
float16 at their own greatest scale; mark = that scale, or 0 where masked.
Ordering: a slot is filled after `empty` of its last use. `full` counts one arrival of each thread, when its cp.async copies
have landed, and one of the warps together, after their other writes and (fp8) a fence for wgmma, which reads shared memory
through the asynchronous proxy. Consumers fence for the cp.async copies.
Look-ahead: entries one tile (bfloat16) or two (fp8), e4m3 bytes one (in registers: three quarters of a tile are always in
flight). Masked entries load nothing and leave zeros. Row ids of fp8 rows fit int32: 2^31 rows would be over a terabyte.
"""

# Kernels are Triton's language in Python's syntax: types are checked by its compiler.
# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
TILES = gl.constexpr(4)
FP8_ROW = gl.constexpr(656)
BLOCK_N = gl.constexpr(64)
CHUNK = gl.constexpr(16)
SLOTS = gl.constexpr(2)
PRODUCER_THREADS = gl.constexpr(128)
LEAST_SCALE = gl.constexpr(2.0**-100)


@gluon.jit
def _entries(ids, host_ids, at, end, HAS_HOST: gl.constexpr):
    """(row id, host row id) of the entries `at`, -1 = none or behind the end."""
    inside = at < end
    row = gl.load(ids + at, mask=inside, other=-1).to(gl.int64)
    host_row = row
    if HAS_HOST:
        host_row = gl.load(host_ids + at, mask=inside, other=-1).to(gl.int64)
    return row, host_row


@gluon.jit
def _starts(rows, host, row, host_row, row_delta, ROW: gl.constexpr, HAS_HOST: gl.constexpr):
    """Pointers to the rows, and which entries name one."""
    named = row >= 0
    start = rows + gl.where(named, row + row_delta, 0) * ROW
    if HAS_HOST:
        on_host = host_row >= 0
        start = gl.where(on_host, host + gl.where(on_host, host_row, 0) * ROW, start)
        named = named | on_host
    return start, named


@gluon.jit
def produce_bf16(rows, host, ids, host_ids, first, end, num_tiles, row_delta, k_lat, k_rope, marks, full, empty,
                 HAS_HOST: gl.constexpr):
    """Gathers bfloat16 rows by cp.async. Addresses are ready before the slot is free: its refill is what tiles wait for."""
    lat_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lat = gl.arange(0, LATENT, layout=gl.SliceLayout(0, lat_layout))
    rope = gl.arange(0, ROPE, layout=gl.SliceLayout(0, rope_layout))
    lat_lane = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, lat_layout))
    rope_lane = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, rope_layout))
    flat_lane = gl.arange(0, BLOCK_N, layout=flat)
    l_row, l_host = _entries(ids, host_ids, first + lat_lane, end, HAS_HOST)
    r_row, r_host = _entries(ids, host_ids, first + rope_lane, end, HAS_HOST)
    f_row, f_host = _entries(ids, host_ids, first + flat_lane, end, HAS_HOST)
    for turn in range(0, num_tiles):
        slot = turn % SLOTS
        l_start, l_named = _starts(rows, host, l_row, l_host, row_delta, LATENT + ROPE, HAS_HOST)
        r_start, r_named = _starts(rows, host, r_row, r_host, row_delta, LATENT + ROPE, HAS_HOST)
        f_named = f_row >= 0
        if HAS_HOST:
            f_named = f_named | (f_host >= 0)
        l_row, l_host = _entries(ids, host_ids, first + (turn + 1) * BLOCK_N + lat_lane, end, HAS_HOST)
        r_row, r_host = _entries(ids, host_ids, first + (turn + 1) * BLOCK_N + rope_lane, end, HAS_HOST)
        f_row, f_host = _entries(ids, host_ids, first + (turn + 1) * BLOCK_N + flat_lane, end, HAS_HOST)
        mbarrier.wait(empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(k_lat.index(slot), l_start[:, None] + lat[None, :], mask=l_named[:, None])
        async_copy.async_copy_global_to_shared(
            k_rope.index(slot), r_start[:, None] + LATENT + rope[None, :], mask=r_named[:, None])
        marks.index(slot).store(gl.where(f_named, 0.0, float("-inf")))
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _load_entries(ids, host_ids, at, end, row_delta, HAS_HOST: gl.constexpr):
    """int32 (device row, host row) of the entries `at`, -1 = none or behind the end."""
    inside = at < end
    row = gl.load(ids + at, mask=inside, other=-1)
    row = gl.where(row >= 0, row + row_delta, -1).to(gl.int32)
    host_row = row
    if HAS_HOST:
        host_row = gl.load(host_ids + at, mask=inside, other=-1).to(gl.int32)
    return row, host_row


@gluon.jit
def _named_starts(rows, host, entries, host_entries, layout: gl.constexpr, WIDTH: gl.constexpr, HAS_HOST: gl.constexpr):
    """`_starts` of the entries in shared memory."""
    row = entries.load(layout).to(gl.int64)
    host_row = row
    if HAS_HOST:
        host_row = host_entries.load(layout).to(gl.int64)
    return _starts(rows, host, row, host_row, 0, WIDTH, HAS_HOST)


@gluon.jit
def _load_chunk(words, host, entries, host_entries, HAS_HOST: gl.constexpr, layout: gl.constexpr):
    """Starts the loads of CHUNK rows' e4m3 values, four to a word: [CHUNK, TILES, 32]."""
    tile = gl.arange(0, TILES, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    word = gl.arange(0, LATENT // TILES // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    start, named = _named_starts(words, host, entries, host_entries, gl.SliceLayout(1, gl.SliceLayout(2, layout)), FP8_ROW // 4,
                           HAS_HOST)
    column = (tile * (LATENT // TILES // 4))[None, :, None] + word[None, None, :]
    return gl.load(start[:, None, None] + column, mask=named[:, None, None], other=0)


@gluon.jit
def _put_chunk(raw, ratios, k_words):
    """Brings CHUNK rows to their greatest scale in float16 and writes them to a slot.

    Words stay packed throughout: a byte or half would take a register each."""
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    ratio = ratios.load(gl.SliceLayout(2, raw.type.layout)).to(gl.int32)
    ratio = ratio | (ratio << 16)
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b;
        .reg .b32 low, high;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 low, a;
        cvt.rn.f16x2.e4m3x2 high, b;
        mul.rn.f16x2 $0, low, $3;
        mul.rn.f16x2 $1, high, $3;
        }""",
        "=r,=r,r,r", [raw, ratio[:, :, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    value = gl.join(low, high).reshape([CHUNK, LATENT // 2])
    k_words.store(gl.convert_layout(value, flat))


@gluon.jit
def _load_scales(words, host, row, host_row, layout: gl.constexpr, HAS_HOST: gl.constexpr):
    """Bits of the scales of the entries, [BLOCK_N, TILES]; 0 where none."""
    tile = gl.arange(0, TILES, layout=gl.SliceLayout(0, layout))
    start, named = _starts(words, host, row.to(gl.int64), host_row.to(gl.int64), 0, FP8_ROW // 4, HAS_HOST)
    return gl.load(start[:, None] + (LATENT // 4 + tile)[None, :], mask=named[:, None], other=0)


@gluon.jit
def produce_fp8(words, ropes, host, host_ropes, ids, host_ids, first, end, num_tiles, row_delta,
                 k_lat, k_rope, marks, entries, host_entries, ratios, full, empty, HAS_HOST: gl.constexpr):
    """Gathers fp8_ds_mla rows: latents through registers, one tile ahead; rope parts by cp.async; entries two tiles ahead."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 2, 16], [4, 1, 1], [2, 1, 0])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rope = gl.arange(0, ROPE, layout=gl.SliceLayout(0, rope_layout))
    lane = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, by_row))
    k_words = k_lat._reinterpret(gl.int32, [SLOTS, BLOCK_N, LATENT // 2], gl.NVMMASharedLayout(128, 32, 2))
    row, host_row = _load_entries(ids, host_ids, first + lane, end, row_delta, HAS_HOST)
    next_row, next_host_row = _load_entries(ids, host_ids, first + BLOCK_N + lane, end, row_delta, HAS_HOST)
    entries.index(0).store(row)
    if HAS_HOST:
        host_entries.index(0).store(host_row)
    now, host_now = entries.index(0), host_entries.index(0)
    raw0 = _load_chunk(words, host, now.slice(0, CHUNK), host_now.slice(0, CHUNK), HAS_HOST, layout)
    raw1 = _load_chunk(words, host, now.slice(CHUNK, CHUNK), host_now.slice(CHUNK, CHUNK), HAS_HOST, layout)
    raw2 = _load_chunk(words, host, now.slice(2 * CHUNK, CHUNK), host_now.slice(2 * CHUNK, CHUNK), HAS_HOST, layout)
    raw3 = _load_chunk(words, host, now.slice(3 * CHUNK, CHUNK), host_now.slice(3 * CHUNK, CHUNK), HAS_HOST, layout)
    scale_bits = _load_scales(words, host, row, host_row, by_row, HAS_HOST)
    for turn in range(0, num_tiles):
        slot = turn % SLOTS
        named = row >= 0
        if HAS_HOST:
            named = named | (host_row >= 0)
        scale = scale_bits.to(gl.float32, bitcast=True)
        greatest = gl.maximum(gl.max(scale, 1), LEAST_SCALE)
        ratio = (scale * (1.0 / greatest)[:, None]).to(gl.float16).to(gl.int16, bitcast=True)
        after = entries.index((turn + 1) % SLOTS)
        host_after = host_entries.index((turn + 1) % SLOTS)
        row, host_row = next_row, next_host_row
        after.store(row)
        if HAS_HOST:
            host_after.store(host_row)
        scale_bits = _load_scales(words, host, row, host_row, by_row, HAS_HOST)
        next_row, next_host_row = _load_entries(ids, host_ids, first + (turn + 2) * BLOCK_N + lane, end, row_delta, HAS_HOST)
        ratios.store(ratio)
        mbarrier.wait(empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
        start, is_named = _named_starts(ropes, host_ropes, entries.index(slot), host_entries.index(slot),
                                  gl.SliceLayout(1, rope_layout), FP8_ROW // 2, HAS_HOST)
        async_copy.async_copy_global_to_shared(
            k_rope.index(slot), start[:, None] + (LATENT // 2 + 2 * TILES) + rope[None, :], mask=is_named[:, None])
        marks.index(slot).store(gl.where(named, greatest, 0.0))
        lat = k_words.index(slot)
        _put_chunk(raw0, ratios.slice(0, CHUNK), lat.slice(0, CHUNK))
        raw0 = _load_chunk(words, host, after.slice(0, CHUNK), host_after.slice(0, CHUNK), HAS_HOST, layout)
        _put_chunk(raw1, ratios.slice(CHUNK, CHUNK), lat.slice(CHUNK, CHUNK))
        raw1 = _load_chunk(words, host, after.slice(CHUNK, CHUNK), host_after.slice(CHUNK, CHUNK), HAS_HOST, layout)
        _put_chunk(raw2, ratios.slice(2 * CHUNK, CHUNK), lat.slice(2 * CHUNK, CHUNK))
        raw2 = _load_chunk(words, host, after.slice(2 * CHUNK, CHUNK), host_after.slice(2 * CHUNK, CHUNK), HAS_HOST, layout)
        _put_chunk(raw3, ratios.slice(3 * CHUNK, CHUNK), lat.slice(3 * CHUNK, CHUNK))
        raw3 = _load_chunk(words, host, after.slice(3 * CHUNK, CHUNK), host_after.slice(3 * CHUNK, CHUNK), HAS_HOST, layout)
        fence_async_shared()
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        mbarrier.arrive(full.index(slot), count=1)

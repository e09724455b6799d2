"""Sparse MLA for Hopper at the real widths (latent 512, rope 64, 33 heads and more): one warp-specialised Gluon kernel.

Geometry: one CTA per (query row, split, block of 64 heads), heads fastest, one CTA per SM. 8 consumer warps (two warpgroups)
hold the [64, 512] float32 sum, each warpgroup half of the latents, and compute scores and values with wgmma. 4 producer
warps fill a ring of two slots of 64 rows in shared memory, one tile ahead: bfloat16 rows by cp.async; fp8_ds_mla rows through
registers, where they become float16 (three quarters of a tile are always in flight).
Ownership: a slot belongs to the producers between `empty` and `full`, to the consumers between `full` and `empty`. Each CTA
writes its own output elements, all of them, every time. No atomics: bit for bit a function of inputs and launch parameters.
Sentinels, preconditions and arithmetic: as in `attention_kernels`. Producers pass masks as a bias of -inf beside the rows.
"""

# Kernels are Triton's language in Python's syntax: types are checked by its compiler.
# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
TILES = gl.constexpr(4)
FP8_ROW = gl.constexpr(656)
BLOCK_H = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
CHUNK = gl.constexpr(16)
SLOTS = gl.constexpr(2)
PRODUCER_THREADS = gl.constexpr(128)
LOWEST = gl.constexpr(-1.0e30)
LEAST_SCALE = gl.constexpr(2.0**-60)


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
def _produce_bf16(rows, host, ids, host_ids, first, end, row_delta, k_lat, k_rope, bias, full, empty,
                  HAS_HOST: gl.constexpr):
    """Gathers bfloat16 rows by cp.async."""
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
    for i in range(first, end, BLOCK_N):
        turn = (i - first) // BLOCK_N
        slot = turn % SLOTS
        l_start, l_named = _starts(rows, host, l_row, l_host, row_delta, LATENT + ROPE, HAS_HOST)
        r_start, r_named = _starts(rows, host, r_row, r_host, row_delta, LATENT + ROPE, HAS_HOST)
        f_named = f_row >= 0
        if HAS_HOST:
            f_named = f_named | (f_host >= 0)
        l_row, l_host = _entries(ids, host_ids, i + BLOCK_N + lat_lane, end, HAS_HOST)
        r_row, r_host = _entries(ids, host_ids, i + BLOCK_N + rope_lane, end, HAS_HOST)
        f_row, f_host = _entries(ids, host_ids, i + BLOCK_N + flat_lane, end, HAS_HOST)
        mbarrier.wait(empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(k_lat.index(slot), l_start[:, None] + lat[None, :], mask=l_named[:, None])
        async_copy.async_copy_global_to_shared(
            k_rope.index(slot), r_start[:, None] + LATENT + rope[None, :], mask=r_named[:, None])
        bias.index(slot).store(gl.where(f_named, 0.0, float("-inf")))
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _load_chunk(words, host, ids, host_ids, at, end, row_delta, HAS_HOST: gl.constexpr, layout: gl.constexpr):
    """Starts the loads of CHUNK rows: (e4m3, four to a word [CHUNK, TILES, 32]; scales [CHUNK, TILES]; named [CHUNK])."""
    tile = gl.arange(0, TILES, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    word = gl.arange(0, LATENT // TILES // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    lane = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row, host_row = _entries(ids, host_ids, at + lane, end, HAS_HOST)
    start, named = _starts(words, host, row, host_row, row_delta, FP8_ROW // 4, HAS_HOST)
    column = (tile * (LATENT // TILES // 4))[None, :, None] + word[None, None, :]
    raw = gl.load(start[:, None, None] + column, mask=named[:, None, None], other=0)
    scale = gl.load(start[:, None] + (LATENT // 4 + tile)[None, :], mask=named[:, None], other=0)
    return raw, scale, named


@gluon.jit
def _put_chunk(raw, scale_bits, named, k_words, bias, greatest_scale, at: gl.constexpr):
    """Brings CHUNK rows to their greatest scale in float16 and writes them to rows at .. at + CHUNK of a slot.

    Words stay packed throughout: a byte or half would take a register each."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    scale = scale_bits.to(gl.float32, bitcast=True)
    greatest = gl.maximum(gl.max(scale, 1), LEAST_SCALE)
    ratio = (scale * (1.0 / greatest)[:, None]).to(gl.float16).to(gl.uint16, bitcast=True).to(gl.int32)
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
    k_words.slice(at, CHUNK).store(gl.convert_layout(value, flat))
    greatest_scale.slice(at, CHUNK).store(greatest)
    bias.slice(at, CHUNK).store(gl.where(named, gl.log2(greatest), float("-inf")))


@gluon.jit
def _produce_fp8(words, ropes, host, host_ropes, ids, host_ids, first, end, row_delta,
                 k_lat, k_rope, bias, greatest_scale, full, empty, HAS_HOST: gl.constexpr):
    """Gathers fp8_ds_mla rows: latents through registers, rope parts by cp.async."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [4, 1, 1], [2, 1, 0])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rope = gl.arange(0, ROPE, layout=gl.SliceLayout(0, rope_layout))
    rope_lane = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, rope_layout))
    k_words = k_lat._reinterpret(gl.int32, [SLOTS, BLOCK_N, LATENT // 2], gl.NVMMASharedLayout(128, 32, 2))
    raw0, scale0, named0 = _load_chunk(words, host, ids, host_ids, first, end, row_delta, HAS_HOST, layout)
    raw1, scale1, named1 = _load_chunk(words, host, ids, host_ids, first + CHUNK, end, row_delta, HAS_HOST, layout)
    raw2, scale2, named2 = _load_chunk(words, host, ids, host_ids, first + 2 * CHUNK, end, row_delta, HAS_HOST, layout)
    raw3, scale3, named3 = _load_chunk(words, host, ids, host_ids, first + 3 * CHUNK, end, row_delta, HAS_HOST, layout)
    row, host_row = _entries(ids, host_ids, first + rope_lane, end, HAS_HOST)
    for i in range(first, end, BLOCK_N):
        turn = (i - first) // BLOCK_N
        slot = turn % SLOTS
        start, named = _starts(ropes, host_ropes, row, host_row, row_delta, FP8_ROW // 2, HAS_HOST)
        row, host_row = _entries(ids, host_ids, i + BLOCK_N + rope_lane, end, HAS_HOST)
        mbarrier.wait(empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(
            k_rope.index(slot), start[:, None] + (LATENT // 2 + 2 * TILES) + rope[None, :], mask=named[:, None])
        lat, low, big = k_words.index(slot), bias.index(slot), greatest_scale.index(slot)
        after = i + BLOCK_N
        _put_chunk(raw0, scale0, named0, lat, low, big, 0)
        raw0, scale0, named0 = _load_chunk(words, host, ids, host_ids, after, end, row_delta, HAS_HOST, layout)
        _put_chunk(raw1, scale1, named1, lat, low, big, CHUNK)
        raw1, scale1, named1 = _load_chunk(words, host, ids, host_ids, after + CHUNK, end, row_delta, HAS_HOST, layout)
        _put_chunk(raw2, scale2, named2, lat, low, big, 2 * CHUNK)
        raw2, scale2, named2 = _load_chunk(words, host, ids, host_ids, after + 2 * CHUNK, end, row_delta, HAS_HOST, layout)
        _put_chunk(raw3, scale3, named3, lat, low, big, 3 * CHUNK)
        raw3, scale3, named3 = _load_chunk(words, host, ids, host_ids, after + 3 * CHUNK, end, row_delta, HAS_HOST, layout)
        fence_async_shared()
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _consume(q, out, part_lse, h0, split, n, splits, scale2, heads, q_stride_n, q_stride_h, out_stride_n, out_stride_h,
             first, end, q_lat_smem, q_rope_smem, k_lat, k_rope, bias, greatest_scale, prob_smem, full, empty,
             IS_SPLIT: gl.constexpr, IS_FP8: gl.constexpr):
    """Scores, softmax and values of this CTA's tiles, and the output."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    element: gl.constexpr = k_lat.dtype
    h = h0 + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, q_layout))
    lat = gl.arange(0, LATENT, layout=gl.SliceLayout(0, q_layout))
    rope = gl.arange(0, ROPE, layout=gl.SliceLayout(0, q_layout))
    q_at = q + n * q_stride_n + h[:, None] * q_stride_h
    is_head = (h < heads)[:, None]
    q_lat = gl.load(q_at + lat[None, :], mask=is_head, other=0.0).to(gl.float32)
    q_rope = gl.load(q_at + LATENT + rope[None, :], mask=is_head, other=0.0)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q_scale = gl.full([BLOCK_H], 1.0, gl.float32, layout=row_layout) * scale2
    if IS_FP8:
        q_max = gl.maximum(gl.max(gl.abs(q_lat), 1), 1.0e-30)
        q_lat = q_lat / q_max[:, None]
        q_scale = q_scale * gl.convert_layout(q_max, row_layout)
    q_lat_smem.store(q_lat.to(element))
    q_rope_smem.store(q_rope.to(gl.bfloat16))
    fence_async_shared()
    top = gl.full([BLOCK_H], LOWEST, gl.float32, layout=row_layout)
    total = gl.full([BLOCK_H, BLOCK_N], 0.0, gl.float32, layout=s_layout)
    acc = gl.full([BLOCK_H, LATENT], 0.0, gl.float32, layout=o_layout)
    zero = gl.full([BLOCK_H, BLOCK_N], 0.0, gl.float32, layout=s_layout)
    for i in range(first, end, BLOCK_N):
        turn = (i - first) // BLOCK_N
        slot = turn % SLOTS
        mbarrier.wait(full.index(slot), (turn // SLOTS) & 1)
        fence_async_shared()
        values = k_lat.index(slot)
        low = bias.index(slot).load(gl.SliceLayout(0, s_layout))
        pending = warpgroup_mma(q_rope_smem, k_rope.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        if IS_FP8:
            pending_lat = warpgroup_mma(q_lat_smem, values.permute((1, 0)), zero, use_acc=False, is_async=True)
            score_rope, score_lat = warpgroup_mma_wait(0, deps=(pending, pending_lat))
            greatest = greatest_scale.index(slot).load(gl.SliceLayout(0, s_layout))
            score = score_rope * scale2 + score_lat * q_scale[:, None] * greatest[None, :]
        else:
            pending_sum = warpgroup_mma(q_lat_smem, values.permute((1, 0)), pending, is_async=True)
            score = warpgroup_mma_wait(0, deps=(pending_sum,)) * scale2
        # a masked entry's score may be NaN (a NaN query times zeros): replaced, not only biased
        score = gl.where((low == float("-inf"))[None, :], float("-inf"), score + low[None, :])
        new_top = gl.maximum(top, gl.max(score, 1))
        shrink = gl.exp2(top - new_top)
        prob = gl.exp2(score - new_top[:, None])
        if IS_FP8:
            total = total * shrink[:, None] + prob * (1.0 / greatest)[None, :]
        else:
            total = total * shrink[:, None] + prob
        top = new_top
        prob_smem.store(prob.to(element))
        fence_async_shared()
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        pending_values = warpgroup_mma(prob_smem, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(pending_values,))
        mbarrier.arrive(empty.index(slot), count=1)
    sums = gl.sum(total, 1)
    some = sums > 0
    divisor = gl.where(some, sums, 1.0)
    acc = acc * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, o_layout))[:, None]
    o_h = h0 + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, o_layout))
    o_lat = gl.arange(0, LATENT, layout=gl.SliceLayout(0, o_layout))
    if not IS_SPLIT:
        out_at = out + n * out_stride_n + o_h[:, None] * out_stride_h + o_lat[None, :]
        gl.store(out_at, acc.to(out.dtype.element_ty), mask=(o_h < heads)[:, None])
    else:
        part = (n * splits + split) * heads
        out_at = out + (part + o_h)[:, None] * LATENT + o_lat[None, :]
        gl.store(out_at, acc.to(out.dtype.element_ty), mask=(o_h < heads)[:, None])
        s_h = h0 + gl.arange(0, BLOCK_H, layout=row_layout)
        gl.store(part_lse + part + s_h, gl.where(some, top + gl.log2(divisor), LOWEST), mask=s_h < heads)


@gluon.jit(do_not_specialize=["row_delta", "k", "splits", "per_split"])
def attend_rows(
    q, rows, ropes, host, host_ropes, ids, host_ids, out, part_lse,
    scale2, row_delta, k, splits, per_split, heads,
    q_stride_n, q_stride_h, id_stride, host_id_stride, out_stride_n, out_stride_h,
    IS_SPLIT: gl.constexpr, IS_FP8: gl.constexpr, HAS_HOST: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):
    """As `attention_kernels.attend_rows`. fp8_ds_mla: rows and ropes are the same bytes as int32 [R, 164] and
    bfloat16 [R, 328]; else both are the bfloat16 rows. Launch with 8 warps."""
    pid = gl.program_id(0)
    head_blocks = gl.cdiv(heads, BLOCK_H)
    h0 = (pid % head_blocks) * BLOCK_H
    split = pid // head_blocks % splits
    n = (pid // head_blocks // splits).to(gl.int64)
    first = split * per_split
    end = gl.minimum(first + per_split, k)
    row_ids = ids + n * id_stride
    host_row_ids = host_ids + n * host_id_stride
    element: gl.constexpr = gl.float16 if IS_FP8 else gl.bfloat16
    lat_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, LATENT], element)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], gl.bfloat16)
    flat_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_lat_smem = gl.allocate_shared_memory(element, [BLOCK_H, LATENT], lat_layout)
    q_rope_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, ROPE], rope_layout)
    prob_smem = gl.allocate_shared_memory(element, [BLOCK_H, BLOCK_N], rope_layout)
    k_lat = gl.allocate_shared_memory(element, [SLOTS, BLOCK_N, LATENT], lat_layout)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK_N, ROPE], rope_layout)
    bias = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_N], flat_layout)
    greatest_scale = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_N], flat_layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=PRODUCER_THREADS + 1)
        mbarrier.init(empty.index(slot), count=1)
    if IS_FP8:
        gl.warp_specialize([
            (_consume, (q, out, part_lse, h0, split, n, splits, scale2, heads, q_stride_n, q_stride_h,
                        out_stride_n, out_stride_h, first, end, q_lat_smem, q_rope_smem, k_lat, k_rope, bias,
                        greatest_scale, prob_smem, full, empty, IS_SPLIT, IS_FP8)),
            (_produce_fp8, (rows, ropes, host, host_ropes, row_ids, host_row_ids, first, end, row_delta,
                            k_lat, k_rope, bias, greatest_scale, full, empty, HAS_HOST)),
        ], [4], [PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([
            (_consume, (q, out, part_lse, h0, split, n, splits, scale2, heads, q_stride_n, q_stride_h,
                        out_stride_n, out_stride_h, first, end, q_lat_smem, q_rope_smem, k_lat, k_rope, bias,
                        greatest_scale, prob_smem, full, empty, IS_SPLIT, IS_FP8)),
            (_produce_bf16, (rows, host, row_ids, host_row_ids, first, end, row_delta, k_lat, k_rope, bias, full, empty,
                             HAS_HOST)),
        ], [4], [PRODUCER_REGISTERS])

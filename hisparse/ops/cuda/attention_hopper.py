"""Sparse MLA for Hopper at the real widths (latent 512, rope 64): one warp-specialised Gluon kernel.

Geometry: one CTA per (query row, split, block of 64 heads), heads fastest, one CTA per SM. 8 consumer warps (two warpgroups)
hold the [64, 512] float32 sum, each warpgroup half of the latents, and compute scores and values with wgmma. 4 producer
warps (`attention_gather`) fill a ring of two slots of 64 rows in shared memory.
Ownership: a slot belongs to the producers between `empty` and `full`, to the consumers between `full` and `empty`. Each CTA
writes its own output elements, all of them, every time. No atomics: bit for bit a function of inputs and launch parameters.
Sentinels, preconditions and arithmetic: as in `attention_kernels`.
"""

# Kernels are Triton's language in Python's syntax: types are checked by its compiler.
# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from hisparse.ops.cuda.attention_gather import (
    BLOCK_N,
    LATENT,
    LEAST_SCALE,
    PRODUCER_THREADS,
    ROPE,
    SLOTS,
    TILES,
    produce_bf16,
    produce_fp8,
)

BLOCK_H = gl.constexpr(64)
LOWEST = gl.constexpr(-1.0e30)


@gluon.jit
def _start_scores(q_lat_smem, q_rope_smem, k_lat, k_rope, full, turn, zero, IS_FP8: gl.constexpr):
    """Waits for a tile and queues its scores: (rope part, latent part), or for bfloat16 the sum as the second."""
    slot = turn % SLOTS
    mbarrier.wait(full.index(slot), (turn // SLOTS) & 1)
    fence_async_shared()
    keys = k_lat.index(slot).permute((1, 0))
    rope = warpgroup_mma(q_rope_smem, k_rope.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    if IS_FP8:
        return rope, warpgroup_mma(q_lat_smem, keys, zero, use_acc=False, is_async=True)
    else:
        return rope, warpgroup_mma(q_lat_smem, keys, rope, is_async=True)


@gluon.jit
def _start_values(prob, shrink, acc, prob_smem, values, o_layout: gl.constexpr):
    """Queues acc * shrink + prob @ values."""
    prob_smem.store(prob.to(prob_smem.dtype))
    fence_async_shared()
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    return warpgroup_mma(prob_smem, values, acc, is_async=True)


@gluon.jit
def _softmax(score_rope, score_lat, mark, scale2, q_scale, top, total, IS_FP8: gl.constexpr):
    """(probabilities, factor of what was summed before, running maximum, running sums)."""
    if IS_FP8:
        score = score_rope * scale2 + score_lat * q_scale[:, None] * mark[None, :]
        bias = gl.log2(mark)
    else:
        score = score_lat * scale2
        bias = mark
    # a masked entry's score may be NaN (a NaN query times zeros): replaced, not only biased
    score = gl.where((bias == float("-inf"))[None, :], float("-inf"), score + bias[None, :])
    new_top = gl.maximum(top, gl.max(score, 1))
    shrink = gl.exp2(top - new_top)
    prob = gl.exp2(score - new_top[:, None])
    if IS_FP8:
        total = total * shrink[:, None] + prob * (1.0 / gl.maximum(mark, LEAST_SCALE))[None, :]
    else:
        total = total * shrink[:, None] + prob
    return prob, shrink, new_top, total


@gluon.jit
def _consume(q, out, part_lse, h0, split, n, splits, scale2, heads, q_stride_n, q_stride_h, out_stride_n, out_stride_h,
             num_tiles, q_lat_smem, q_rope_smem, k_lat, k_rope, marks, prob_smem, full, empty,
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
    mark_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    if IS_FP8:
        # the next tile's scores queue up behind this tile's values: its rows are ready early, in the producers' registers
        pending, pending_lat = _start_scores(q_lat_smem, q_rope_smem, k_lat, k_rope, full, 0, zero, IS_FP8)
        rope_score, score = warpgroup_mma_wait(0, deps=(pending, pending_lat))
        for turn in range(0, num_tiles - 1):
            slot = turn % SLOTS
            prob, shrink, top, total = _softmax(
                rope_score, score, marks.index(slot).load(mark_layout), scale2, q_scale, top, total, IS_FP8)
            pending_values = _start_values(prob, shrink, acc, prob_smem, k_lat.index(slot), o_layout)
            pending, pending_lat = _start_scores(q_lat_smem, q_rope_smem, k_lat, k_rope, full, turn + 1, zero, IS_FP8)
            acc = warpgroup_mma_wait(2, deps=(pending_values,))
            mbarrier.arrive(empty.index(slot), count=1)
            rope_score, score = warpgroup_mma_wait(0, deps=(pending, pending_lat))
        slot = (num_tiles - 1) % SLOTS
        prob, shrink, top, total = _softmax(
            rope_score, score, marks.index(slot).load(mark_layout), scale2, q_scale, top, total, IS_FP8)
        pending_values = _start_values(prob, shrink, acc, prob_smem, k_lat.index(slot), o_layout)
        acc = warpgroup_mma_wait(0, deps=(pending_values,))
    else:
        # in order: a slot is free as early as it can be, for its refill from memory is what a tile waits for
        for turn in range(0, num_tiles):
            slot = turn % SLOTS
            pending, pending_both = _start_scores(q_lat_smem, q_rope_smem, k_lat, k_rope, full, turn, zero, IS_FP8)
            mark = marks.index(slot).load(mark_layout)
            score = warpgroup_mma_wait(0, deps=(pending_both,))
            prob, shrink, top, total = _softmax(score, score, mark, scale2, q_scale, top, total, IS_FP8)
            pending_values = _start_values(prob, shrink, acc, prob_smem, k_lat.index(slot), o_layout)
            acc = warpgroup_mma_wait(0, deps=(pending_values,))
            mbarrier.arrive(empty.index(slot), count=1)
    sums = gl.sum(total, 1)
    some = sums > 0
    divisor = gl.where(some, sums, 1.0)
    acc = acc * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, o_layout))[:, None]
    # through shared memory, which the tiles have left, to coalesce the stores
    out_type: gl.constexpr = out.dtype.element_ty
    staged = k_lat._reinterpret(out_type, [BLOCK_H, LATENT], gl.NVMMASharedLayout.get_default_for([BLOCK_H, LATENT], out_type))
    staged.store(acc.to(out_type))
    wide: gl.constexpr = 128 // out_type.primitive_bitwidth
    o_layout_flat: gl.constexpr = gl.BlockedLayout([1, wide], [1, 32], [8, 1], [1, 0])
    o_h = h0 + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, o_layout_flat))
    o_lat = gl.arange(0, LATENT, layout=gl.SliceLayout(0, o_layout_flat))
    result = staged.load(o_layout_flat)
    part = (n * splits + split) * heads
    if IS_SPLIT:
        out_at = out + (part + o_h)[:, None] * LATENT + o_lat[None, :]
        s_h = h0 + gl.arange(0, BLOCK_H, layout=row_layout)
        gl.store(part_lse + part + s_h, gl.where(some, top + gl.log2(divisor), LOWEST), mask=s_h < heads)
    else:
        out_at = out + n * out_stride_n + o_h[:, None] * out_stride_h + o_lat[None, :]
    gl.store(out_at, result, mask=(o_h < heads)[:, None])


@gluon.jit(do_not_specialize=["row_delta", "k", "splits", "per_split"])
def attend_rows(
    q, rows, ropes, host, host_ropes, ids, host_ids, out, part_lse,
    scale2, row_delta, k, splits, per_split, heads,
    q_stride_n, q_stride_h, id_stride, host_id_stride, out_stride_n, out_stride_h,
    IS_SPLIT: gl.constexpr, IS_FP8: gl.constexpr, HAS_HOST: gl.constexpr, PDL: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """As `attention_kernels.attend_rows`. fp8_ds_mla: rows and ropes are the same bytes as int32 [R, 164] and
    bfloat16 [R, 328]; else both are the bfloat16 rows. Launch with 8 warps."""
    if PDL:
        gdc_launch_dependents()
    pid = gl.program_id(0)
    head_blocks = gl.cdiv(heads, BLOCK_H)
    h0 = (pid % head_blocks) * BLOCK_H
    split = pid // head_blocks % splits
    n = (pid // head_blocks // splits).to(gl.int64)
    first = split * per_split
    end = gl.minimum(first + per_split, k)
    num_tiles = gl.maximum(gl.cdiv(end - first, BLOCK_N), 1)
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
    marks = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_N], flat_layout)
    entries = gl.allocate_shared_memory(gl.int32, [SLOTS, BLOCK_N], flat_layout)
    host_entries = gl.allocate_shared_memory(gl.int32, [SLOTS, BLOCK_N], flat_layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=PRODUCER_THREADS + 1)
        mbarrier.init(empty.index(slot), count=1)
    if IS_FP8:
        ratios = gl.allocate_shared_memory(gl.int16, [BLOCK_N, TILES], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        gl.warp_specialize([
            (_consume, (q, out, part_lse, h0, split, n, splits, scale2, heads, q_stride_n, q_stride_h,
                        out_stride_n, out_stride_h, num_tiles, q_lat_smem, q_rope_smem, k_lat, k_rope, marks,
                        prob_smem, full, empty, IS_SPLIT, IS_FP8)),
            (produce_fp8, (rows, ropes, host, host_ropes, row_ids, host_row_ids, first, end, num_tiles, row_delta,
                            k_lat, k_rope, marks, entries, host_entries, ratios, full, empty, HAS_HOST)),
        ], [4], [PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([
            (_consume, (q, out, part_lse, h0, split, n, splits, scale2, heads, q_stride_n, q_stride_h,
                        out_stride_n, out_stride_h, num_tiles, q_lat_smem, q_rope_smem, k_lat, k_rope, marks,
                        prob_smem, full, empty, IS_SPLIT, IS_FP8)),
            (produce_bf16, (rows, host, row_ids, host_row_ids, first, end, num_tiles, row_delta, k_lat, k_rope, marks,
                            full, empty, HAS_HOST)),
        ], [4], [PRODUCER_REGISTERS])

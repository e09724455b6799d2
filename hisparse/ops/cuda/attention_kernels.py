"""Triton kernels of sparse MLA: split-K flash-decoding over flat row ids, and the combination of the splits.

Geometry: `attend_rows` has one program per (query row, split, block of BLOCK_H heads), heads fastest, so that the programs
that read the same rows run side by side and share them in L2. A program walks its split's entries in tiles of BLOCK_N:
gathers the rows, scores them, and keeps a running maximum, sum and [BLOCK_H, LATENT] sum of values in float32 registers.
With one split it writes the result; else it writes its normalised part and log2-sum-exp, and `combine_splits` (one program
per query row, head and block of latents) adds the parts in split order; with PDL it is launched while they are still
being written, and waits.
Ownership: every program writes its own elements, all of them, every time. No atomics; the result is a function of the
inputs and of the launch parameters, bit for bit.
Sentinels: an id of -1 is a masked entry: nothing is loaded for it, its score is -inf and its values are 0, so NaN in rows
that nobody names has no effect. A query row without entries gives 0.
Preconditions: ids are -1 or inside the rows; an entry is named by `ids` or by `host_ids`, never by both; row starts are
16-byte aligned (rows of a layout are multiples of 16 bytes). Byte offsets are computed in int64.

Arithmetic per row format. float32: products in float32 ("ieee"). bfloat16: products of bfloat16 in float32.
fp8_ds_mla: e4m3 is exact in float16. A row is brought to its own greatest scale, `value * (scale of its tile / greatest)`,
with a relative error of 2^-11, and that greatest scale is applied to scores and probabilities instead of values: the
running maximum is that of score + log2(greatest), so that float16 probabilities stay at or below 1 whatever the scales are.
Queries are brought to [-1, 1] per head before they become float16.
"""

# Kernels are Triton's language in Python's syntax: types are checked by its compiler.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FLOAT32 = tl.constexpr(0)
FP8_DS_MLA = tl.constexpr(2)
"""FORMAT; 1 is bfloat16."""
LOWEST = tl.constexpr(-1.0e30)
"""Start of the running maximum: below every score, and finite, so that differences of two maxima are never NaN."""
LEAST_SCALE = tl.constexpr(2.0**-100)
"""Smaller scales of fp8_ds_mla count as this one beside the running maximum: keeps the sum of probabilities finite."""


@triton.jit
def _starts(rows, host, ids, host_ids, at, end, row_delta, ROW: tl.constexpr, HAS_HOST: tl.constexpr):
    """Pointers to the rows of the entries `at`, and which entries name one."""
    inside = at < end
    row = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
    named = row >= 0
    start = rows + tl.where(named, row + row_delta, 0) * ROW
    if HAS_HOST:
        host_row = tl.load(host_ids + at, mask=inside, other=-1).to(tl.int64)
        on_host = host_row >= 0
        start = tl.where(on_host, host + tl.where(on_host, host_row, 0) * ROW, start)
        named = named | on_host
    return start, named


@triton.jit
def _gather(start, named, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr):
    """`WIDTH` elements from `start` on of each named row; zeros for the others."""
    d = tl.arange(0, WIDTH_P)
    mask = named[:, None]
    if WIDTH_P != WIDTH:
        mask = mask & (d < WIDTH)[None, :]
    return tl.load(start[:, None] + d[None, :], mask=mask, other=0)


@triton.jit(do_not_specialize=["row_delta", "k", "splits", "per_split"])
def attend_rows(
    q, rows, host, ids, host_ids, out, part_lse,
    scale2, row_delta, k, splits, per_split, heads,
    q_stride_n, q_stride_h, id_stride, host_id_stride, out_stride_n, out_stride_h,
    IS_SPLIT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_P: tl.constexpr, ROPE_P: tl.constexpr,
    ROW: tl.constexpr, FORMAT: tl.constexpr, HAS_HOST: tl.constexpr, PDL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):
    """q [n, heads, LATENT + ROPE], ids [n, k] -> out [n, heads, LATENT], or if IS_SPLIT the parts
    out float32 [n, splits, heads, LATENT] and part_lse float32 [n, splits, heads]. scale2 = scaling * log2(e)."""
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    head_blocks = tl.cdiv(heads, BLOCK_H)
    h = (pid % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = pid // head_blocks % splits
    n = (pid // head_blocks // splits).to(tl.int64)
    lat = tl.arange(0, LATENT_P)
    rope = tl.arange(0, ROPE_P)
    is_head = h < heads
    q_at = q + n * q_stride_n + h[:, None] * q_stride_h
    q_lat = tl.load(q_at + lat[None, :], mask=is_head[:, None] & (lat < LATENT)[None, :], other=0.0)
    q_rope = tl.load(q_at + LATENT + rope[None, :], mask=is_head[:, None] & (rope < ROPE)[None, :], other=0.0)
    q_scale = tl.full([BLOCK_H], 1.0, tl.float32) * scale2
    if FORMAT == FP8_DS_MLA:
        q_max = tl.maximum(tl.max(tl.abs(q_lat.to(tl.float32)), 1), 1.0e-30)
        q_lat = (q_lat.to(tl.float32) / q_max[:, None]).to(tl.float16)
        q_rope = q_rope.to(tl.bfloat16)
        q_scale = q_scale * q_max
    else:
        q_lat = q_lat.to(rows.dtype.element_ty)
        q_rope = q_rope.to(rows.dtype.element_ty)
    TILES: tl.constexpr = LATENT // 128
    ids += n * id_stride
    host_ids += n * host_id_stride
    first = split * per_split
    end = tl.minimum(first + per_split, k)
    top = tl.full([BLOCK_H], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, LATENT_P], tl.float32)
    for i in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        start, named = _starts(rows, host, ids, host_ids, i + tl.arange(0, BLOCK_N), end, row_delta, ROW, HAS_HOST)
        if FORMAT == FP8_DS_MLA:
            scale_start = start.to(tl.pointer_type(tl.float32), bitcast=True) + LATENT // 4
            scale = tl.load(scale_start[:, None] + tl.arange(0, TILES)[None, :], mask=named[:, None], other=0.0)
            greatest = tl.maximum(tl.max(scale, 1), LEAST_SCALE)
            ratio = (scale / greatest[:, None]).to(tl.float16)
            rope_start = start.to(tl.pointer_type(tl.bfloat16), bitcast=True) + ROW // 2 - ROPE
            k_rope = _gather(rope_start, named, ROPE, ROPE_P)
            k_lat = _gather(start, named, LATENT, LATENT_P).to(tl.float8e4nv, bitcast=True).to(tl.float16)
            k_lat = k_lat.reshape(BLOCK_N, TILES, LATENT // TILES) * ratio[:, :, None]
            k_lat = k_lat.reshape(BLOCK_N, LATENT)
            score = tl.dot(q_rope, tl.trans(k_rope)) * scale2
            score += tl.dot(q_lat, tl.trans(k_lat)) * q_scale[:, None] * greatest[None, :]
            score += tl.log2(greatest)[None, :]
        else:
            k_rope = _gather(start + LATENT, named, ROPE, ROPE_P)
            k_lat = _gather(start, named, LATENT, LATENT_P)
            if FORMAT == FLOAT32:
                score = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
                score = tl.dot(q_lat, tl.trans(k_lat), score, input_precision="ieee") * scale2
            else:
                score = tl.dot(q_rope, tl.trans(k_rope))
                score = tl.dot(q_lat, tl.trans(k_lat), score) * scale2
        score = tl.where(named[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        prob = tl.exp2(score - new_top[:, None])
        acc = acc * shrink[:, None]
        if FORMAT == FP8_DS_MLA:
            total = total * shrink + tl.sum(prob * (1.0 / greatest)[None, :], 1)
            acc = tl.dot(prob.to(tl.float16), k_lat, acc)
        else:
            total = total * shrink + tl.sum(prob, 1)
            if FORMAT == FLOAT32:
                acc = tl.dot(prob, k_lat, acc, input_precision="ieee")
            else:
                acc = tl.dot(prob.to(tl.bfloat16), k_lat, acc)
        top = new_top
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    acc = acc / divisor[:, None]
    is_out = is_head[:, None] & (lat < LATENT)[None, :]
    if not IS_SPLIT:
        out_at = out + n * out_stride_n + h[:, None] * out_stride_h + lat[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=is_out)
    else:
        part = (n * splits + split) * heads + h
        tl.store(out + part[:, None] * LATENT + lat[None, :], acc, mask=is_out)
        tl.store(part_lse + part, tl.where(some, top + tl.log2(divisor), LOWEST), mask=is_head)


@triton.jit(do_not_specialize=["splits"])
def combine_splits(
    part, part_lse, out, splits, heads, out_stride_n, out_stride_h,
    SPLITS_P: tl.constexpr, LATENT: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):
    """part float32 [n, splits, heads, LATENT], part_lse float32 [n, splits, heads] (log2) -> out [n, heads, LATENT]."""
    n = tl.program_id(0).to(tl.int64) // heads
    h = tl.program_id(0) % heads
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.arange(0, SPLITS_P)
    at = (n * splits + split) * heads + h
    is_split = split < splits
    if PDL:
        gdc_wait()
    lse = tl.load(part_lse + at, mask=is_split, other=LOWEST)
    weight = tl.where(is_split, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    weight = weight / tl.sum(weight, 0)
    values = tl.load(part + at[:, None] * LATENT + d[None, :], mask=is_split[:, None] & (d < LATENT)[None, :], other=0.0)
    result = tl.sum(values * weight[:, None], 0)
    tl.store(out + n * out_stride_n + h * out_stride_h + d, result.to(out.dtype.element_ty), mask=d < LATENT)

"""Rotary embedding of the front of each head in one launch; the contract is `hisparse.ops.reference.rotate_heads`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.errors import InvariantError

_BLOCK_HEADS = 8


# Grid: (rows, blocks of BLOCK_H heads). A program owns its heads of one row and writes every value of them once, to other
# memory than it reads. Preconditions: values of a head adjacent, cos and sin with adjacent columns. Products and sums are
# rounded one by one (and not fused), so the bits are those of separate torch operations; deterministic.
@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, out, heads, x_stride_n, x_stride_h, cos_stride, sin_stride,
    DIM: tl.constexpr, DIM_P: tl.constexpr, ROPE: tl.constexpr, HALF_P: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i, d = tl.arange(0, HALF_P), tl.arange(0, DIM_P)
    half: tl.constexpr = ROPE // 2
    at = x + n * x_stride_n + h[:, None] * x_stride_h
    to = out + (n * heads + h[:, None]) * DIM
    pair = (h < heads)[:, None] & (i < half)[None, :]
    if INTERLEAVED:
        first, second = tl.load(at + 2 * i[None, :], mask=pair), tl.load(at + 2 * i[None, :] + 1, mask=pair)
    else:
        first, second = tl.load(at + i[None, :], mask=pair), tl.load(at + half + i[None, :], mask=pair)
    kind = first.dtype
    c = tl.load(cos + n * cos_stride + i, mask=i < half).to(tl.float32)[None, :]
    s = tl.load(sin + n * sin_stride + i, mask=i < half).to(tl.float32)[None, :]
    first, second = first.to(tl.float32), second.to(tl.float32)
    first_c, second_s = (first * c).to(kind).to(tl.float32), (second * s).to(kind).to(tl.float32)
    second_c, first_s = (second * c).to(kind).to(tl.float32), (first * s).to(kind).to(tl.float32)
    tl.store(to + i[None, :], (first_c - second_s).to(kind), mask=pair)
    tl.store(to + half + i[None, :], (second_c + first_s).to(kind), mask=pair)
    rest = (h < heads)[:, None] & ((d >= ROPE) & (d < DIM))[None, :]
    tl.store(to + d[None, :], tl.load(at + d[None, :], mask=rest), mask=rest)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """`x` [n, heads, dim] with its first `rope` values rotated.

    Args:
        x: float32 or bfloat16, values of a head adjacent. cos, sin: [n, rope] in x's dtype, columns adjacent.
    Returns:
        [n, heads, dim], contiguous; the same bits as the reference.
    Stream: the current one; no synchronisation; may be captured after a first call of the same shape.
    Raises:
        InvariantError: shapes, dtypes or strides differ from the above.
    """
    n, heads, dim = x.shape
    rope = cos.shape[-1]
    fits = cos.shape == (n, rope) == sin.shape and rope % 2 == 0 and rope <= dim
    if not fits or cos.dtype != x.dtype or sin.dtype != x.dtype:
        raise InvariantError(f"cos and sin must be {x.dtype} [{n}, even, at most {dim}], got {cos.dtype} {list(cos.shape)}, "
                             f"{sin.dtype} {list(sin.shape)}")
    if x.dtype not in (torch.float32, torch.bfloat16) or x.stride(2) != 1 or cos.stride(1) != 1 or sin.stride(1) != 1:
        raise InvariantError(f"x must be float32 or bfloat16 with adjacent values, got {x.dtype} with strides {x.stride()}")
    out = torch.empty((n, heads, dim), dtype=x.dtype, device=x.device)
    if n and heads:
        kernel: Any = _rotate[n, triton.cdiv(heads, _BLOCK_HEADS)]
        kernel(
            x, cos, sin, out, heads, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), DIM=dim,
            DIM_P=triton.next_power_of_2(dim), ROPE=rope, HALF_P=triton.next_power_of_2(rope // 2), INTERLEAVED=interleaved,
            BLOCK_H=_BLOCK_HEADS, num_warps=4, enable_fp_fusion=False,
        )
    return out

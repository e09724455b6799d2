"""Rotary embedding of the front of each head, as Hugging Face's models compute it."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """`x` with its first `rope` values rotated, the rest as they are.

    Pair i is values (2i, 2i + 1) if `interleaved`, else (i, rope / 2 + i); the rotated pair lies at (i, rope / 2 + i) either
    way. Every product and sum is rounded to the dtype, as separate operations of torch would.

    Args:
        x: [n, heads, dim], any strides. cos, sin: [n, rope] in x's dtype, of which the first rope / 2 columns are read.
    Returns:
        [n, heads, dim], contiguous.

    Example: rope 4, interleaved: (a, b, c, d, e) -> (a cos0 - b sin0, c cos1 - d sin1, b cos0 + a sin0, d cos1 + c sin1, e).
    """
    rope = cos.shape[-1]
    half = rope // 2
    first, second = (x[..., :rope:2], x[..., 1:rope:2]) if interleaved else (x[..., :half], x[..., half:rope])
    c, s = cos[:, None, :half], sin[:, None, :half]
    return torch.cat([first * c - second * s, second * c + first * s, x[..., rope:]], dim=-1)

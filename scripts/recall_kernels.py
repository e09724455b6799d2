"""Triton kernels of the training pass: fused index scores, and a top-k mask without sorting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
MAX_TOKENS = 16_384  # a row of scores is held in one program's registers


@triton.jit
def _scores_kernel(
    q_ptr,
    w_ptr,
    k_ptr,
    out_ptr,
    num_tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """One program: ROWS x COLS scores of one document, -inf above the diagonal. Sizes divide `num_tokens`."""
    row0 = tl.program_id(0) * ROWS
    col0 = tl.program_id(1) * COLS
    doc = tl.program_id(2).to(tl.int64)
    rows = row0 + tl.arange(0, ROWS)
    cols = col0 + tl.arange(0, COLS)
    dims = tl.arange(0, DIM)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    if col0 <= row0 + ROWS - 1:
        k = tl.load(k_ptr + (doc * num_tokens + cols[None, :]) * DIM + dims[:, None])
        for head in range(HEADS):
            row_head = (doc * num_tokens + rows) * HEADS + head
            q = tl.load(q_ptr + row_head[:, None] * DIM + dims[None, :])
            w = tl.load(w_ptr + row_head)
            acc += tl.maximum(tl.dot(q, k), 0.0) * w[:, None]
    acc = tl.where(cols[None, :] <= rows[:, None], acc, float("-inf"))
    tl.store(out_ptr + (doc * num_tokens + rows[:, None]) * num_tokens + cols[None, :], acc)


@triton.jit
def _mask_kernel(scores_ptr, mask_ptr, num_tokens, top_k, WIDTH: tl.constexpr):
    """One program: one row. Finds the top_k-th largest score bit by bit, then marks what is above it and,
    from the left, as many equals as there is room for."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    scores = tl.load(scores_ptr + row * num_tokens + cols, mask=cols < num_tokens, other=float("-inf"))
    bits = scores.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed integers in the order of the floats
    threshold = tl.full((), -2147483648, tl.int32)
    threshold = tl.where(tl.sum((keys >= 0).to(tl.int32)) >= top_k, 0, threshold)
    for i in range(31):
        candidate = threshold + (tl.full((), 1, tl.int32) << (30 - i))
        threshold = tl.where(tl.sum((keys >= candidate).to(tl.int32)) >= top_k, candidate, threshold)
    causal = cols <= row % num_tokens
    above = (keys > threshold) & causal
    tied = (keys == threshold) & causal
    room = top_k - tl.sum(above.to(tl.int32))
    chosen = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    tl.store(mask_ptr + row * num_tokens + cols, chosen, mask=cols < num_tokens)


def causal_top_k_mask(queries: Tensor, weights: Tensor, keys: Tensor, top_k: int) -> Tensor:
    """The `top_k` best-scored positions of every row, among itself and earlier ones.

    Of equal scores the earlier positions win (rectified scores are often exactly 0).

    Args:
        queries: `[batch, tokens, heads, dim]` bf16, cuda.
        weights: `[batch, tokens, heads]` fp32, with every scale in it.
        keys: `[batch, tokens, dim]` bf16.
        top_k: positions kept a row.

    Returns:
        `[batch, tokens, tokens]` bool.
    """
    batch, num_tokens, heads, dim = queries.shape
    if num_tokens % TILE or num_tokens > MAX_TOKENS:
        raise ValueError(f"documents must be a multiple of {TILE} tokens, at most {MAX_TOKENS}, got {num_tokens}")
    scores = torch.empty(batch, num_tokens, num_tokens, dtype=torch.float32, device=queries.device)
    mask = torch.empty(batch, num_tokens, num_tokens, dtype=torch.bool, device=queries.device)
    blocks, tile = num_tokens // TILE, (TILE, TILE)
    operands = queries.contiguous(), weights.contiguous(), keys.contiguous()
    _scores_kernel[(blocks, blocks, batch)](*operands, scores, num_tokens, heads, dim, *tile, num_warps=8)
    width = triton.next_power_of_2(num_tokens)
    _mask_kernel[(batch * num_tokens,)](scores, mask, num_tokens, top_k, width, num_warps=8 if width > 2_048 else 4)
    return mask

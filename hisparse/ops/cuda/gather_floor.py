"""The reads of sparse attention without its arithmetic: a Triton kernel that benchmarks compare ours with."""

# Kernels are Triton's language in Python's syntax: types are checked by its compiler.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather(words, ids, out, k, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, ROWS: tl.constexpr):
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(ids + tl.program_id(1) * k + entry).to(tl.int64)
    d = tl.arange(0, WIDTH_P)
    value = tl.load(words + row[:, None] * WIDTH + d[None, :], mask=(d < WIDTH)[None, :], other=0)
    tl.store(out + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)), tl.sum(tl.sum(value, 1), 0))


def gather_sums(words: Tensor, ids: Tensor, out: Tensor, *, rows: int, warps: int) -> None:
    """Adds up the named rows, `rows` of them a program.

    Args:
        words: int32 [num_rows, width], cuda. ids: int32 [batch, k], k a multiple of `rows`. out: int32 [batch * k / rows].
    """
    width, (batch, k) = words.shape[1], ids.shape
    _gather[(k // rows, batch)](words, ids, out, k, WIDTH=width, WIDTH_P=triton.next_power_of_2(width), ROWS=rows,
                                num_warps=warps)

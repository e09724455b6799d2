"""Exact top-k of rows of scores, positions ascending (kernels/indexer_topk.cu)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.ops.cuda.module import Instance, Kernel, kernel

THREADS = 1024
_HELD_SHARE = 16 * THREADS
"""Positions that a CTA holds in registers; a longer share is read four times."""
_CLUSTER_SHARES = {2: 1.0, 4: 0.75, 8: 0.75}
"""Share of the processors that clusters of a size can count on: a cluster lies within one group of processors."""


def instance(*, cluster: int, threads: int = THREADS, long_seats: bool, long_lengths: bool) -> Instance:
    """The variant for rows shared by `cluster` CTAs; `long_*`: int64 seats, lengths."""
    defines = {"CLUSTER": cluster, "THREADS": threads, "LONG_SEATS": int(long_seats), "LONG_LENGTHS": int(long_lengths)}
    return Instance("indexer_topk.cu", "indexer_topk", defines)


INSTANCES = tuple(
    instance(cluster=cluster, long_seats=False, long_lengths=long) for cluster in (1, 2, 4, 8) for long in (False, True)
)


def select_topk(scores: Tensor, seats: Tensor, lengths: Tensor, top_k: int, *, max_len: int, out: Tensor,
                status: Tensor | None = None, cluster: int | None = None) -> Tensor:
    """The `top_k` best positions of every row, ascending; equal scores go to the lower position.

    Args:
        scores: float32 [n, >= max_len], rows contiguous, at multiples of 16 bytes; used at positions [0, length) of rows
            longer than top_k. No NaN among them.
        seats: int32 or int64 [n], -1 = padding row. lengths: int32 or int64 [n], at most max_len.
        out: int32 [n, top_k], contiguous, written completely: -1 behind the last position.
        status: int32 [4]; NO_INDEXER_PAGE is set where a length exceeds max_len, and the row is cut.
        cluster: CTAs per row (1, 2, 4, 8); default by shape.
    Returns:
        `out`.
    Stream: torch's current stream; no synchronisation; may be captured after a first call of the same shape.
    Raises:
        InvariantError: shapes or dtypes differ from the above.
    """
    num = seats.shape[0]
    if out.shape != (num, top_k) or out.dtype != torch.int32 or not out.is_contiguous():
        raise InvariantError(f"out must be contiguous int32 [{num}, {top_k}], got {out.dtype} {list(out.shape)}")
    if scores.dtype != torch.float32 or scores.shape[0] < num or (max_len > top_k and scores.shape[1] < max_len):
        raise InvariantError(f"scores must be float32 [{num}, >= {max_len}], got {scores.dtype} {list(scores.shape)}")
    if scores.stride(1) != 1 or scores.stride(0) % 4 or scores.data_ptr() % 16:
        raise InvariantError(f"rows of scores must be contiguous at multiples of 16 bytes, got strides {scores.stride()}")
    if not num:
        return out
    if cluster is None:
        cluster = _cluster(num, max_len, out.device)
    run = _kernel(cluster, seats.dtype == torch.int64, lengths.dtype == torch.int64, torch.cuda.current_device())
    run((num * cluster,), THREADS, [scores, scores.stride(0), seats, lengths, top_k, max_len, out, status])
    return out


def _cluster(num: int, max_len: int, device: torch.device) -> int:
    """CTAs per row: the fewest that hold a row in registers, else the most that run at once."""
    cluster = 1
    for larger, share in _CLUSTER_SHARES.items():
        if max_len > cluster * _HELD_SHARE and larger * num <= share * num_processors(device):
            cluster = larger
    return cluster


@functools.cache
def _kernel(cluster: int, long_seats: bool, long_lengths: bool, device: int) -> Kernel:
    made = instance(cluster=cluster, long_seats=long_seats, long_lengths=long_lengths)
    return kernel(made.source, made.function, **made.defines)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

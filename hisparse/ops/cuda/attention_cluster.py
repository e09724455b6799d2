"""Launches of `kernels/attention.cu`: sparse MLA for Hopper at the real widths, the parts of a query row in one cluster."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from hisparse.ops.cuda.module import Instance, Kernel, compile_ahead, load
from hisparse.ops.cuda.room import PORTABLE_CLUSTER, find_room

ARCHITECTURE = "sm_90a"
HEADS, TILE, THREADS = 64, 64, 384
LATENT, ROPE = 512, 64
SHARED_BYTES = 3 * 9 * 8192 + 6144 + 1024
"""Queries and two slots of rows; what is known of them; alignment of the first."""
RESIDENT = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15, 16: 7}
"""Clusters of each size that an H200 of 132 multiprocessors runs at once (cuOccupancyMaxActiveClusters): a GPU processing
cluster has 16 to 18 multiprocessors, so that larger ones leave some idle."""
SHAPES = (*((cluster, HEADS) for cluster in RESIDENT), (16, 32), (16, 16))
"""Clusters, and the heads of a block that each is compiled for: few query rows leave multiprocessors idle, which can take a
part of the combination each."""
_H200_PROCESSORS = 132
_TILE_US, _FIXED_US, _COMBINE_US, _RANK_US = 1.7, 5.0, 1.5, 0.1
"""Of a tile; of a CTA's start and end; of the combination of a cluster, and of each of its CTAs."""


def instance(cluster: int, block_heads: int, is_fp8: bool) -> Instance:
    return Instance("attention.cu", "sparse_mla", {"CLUSTER": cluster, "BLOCK_HEADS": block_heads, "FP8": int(is_fp8)},
                    ARCHITECTURE)


def suits(q: Tensor, rows: Tensor, out: Tensor) -> bool:
    """Whether the kernel reads and writes these as they are: heads start on 16 bytes. All else is checked already."""
    starts = (q.data_ptr(), out.data_ptr(), *_stride_bytes(q), *_stride_bytes(out))
    return rows.dtype != torch.float32 and not any(start % 16 for start in starts)


def _stride_bytes(x: Tensor) -> tuple[int, int]:
    return x.stride(0) * x.element_size(), x.stride(1) * x.element_size()


def plan_cluster(num: int, heads: int, k: int, processors: int) -> tuple[int, int]:
    """(CTAs of a cluster, heads of its block): the least estimated time.

    Examples: 16 query rows, 64 heads, k 2048 on 132 multiprocessors -> 6 CTAs, each 320 or 384 entries, for all 64 heads; one
    query row -> 16 CTAs for 16 heads, four times.
    """
    tiles, best = max(1, math.ceil(k / TILE)), (math.inf, 1, HEADS)
    for cluster, block_heads in SHAPES:
        if cluster > tiles:
            continue
        waves = math.ceil(num * math.ceil(heads / block_heads) / max(1, RESIDENT[cluster] * processors // _H200_PROCESSORS))
        cost = waves * (math.ceil(tiles / cluster) * _TILE_US + _FIXED_US)
        if cluster > 1:
            cost += _COMBINE_US * block_heads / HEADS + _RANK_US * cluster
        best = min(best, (cost, cluster, block_heads))
    return best[1], best[2]


def attend(q: Tensor, rows: Tensor, row_ids: Tensor, scaling: float, row_delta: int, host_rows: Tensor | None,
           host_ids: Tensor | None, out: Tensor, cluster: int, block_heads: int = HEADS) -> None:
    """Launches. Arguments as `attention.sparse_mla` has checked them, and as `suits` says.

    Raises:
        ConfigError: the device has no room for a cluster of 8 CTAs.
    """
    num, heads, _ = q.shape
    run, cluster, block_heads = _loaded(cluster, block_heads, rows.dtype == torch.uint8, torch.cuda.current_device())
    run((num * math.ceil(heads / block_heads) * cluster,), THREADS, (
        q, rows, host_rows, row_ids, host_ids, out, scaling * math.log2(math.e), row_delta, row_ids.shape[1], heads,
        *_stride_bytes(q), row_ids.stride(0), 0 if host_ids is None else host_ids.stride(0), *_stride_bytes(out),
        row_ids.dtype == torch.int64, host_ids is not None and host_ids.dtype == torch.int64, q.dtype == torch.float32,
    ), SHARED_BYTES)


@functools.cache
def _loaded(cluster: int, block_heads: int, is_fp8: bool, device: int) -> tuple[Kernel, int, int]:
    """The kernel, and what it is for: clusters of 8 CTAs where the device has no room for larger ones."""
    compile_ahead(instance(*shape, is_fp8) for shape in SHAPES)  # batches of other sizes follow
    loaded = load(instance(cluster, block_heads, is_fp8))
    if find_room(loaded, f"cuda:{device} cannot run sparse MLA", cluster=cluster, threads=THREADS, shared_bytes=SHARED_BYTES):
        return loaded, cluster, block_heads
    return _loaded(PORTABLE_CLUSTER, HEADS, is_fp8, device)


INSTANCES = tuple(instance(*shape, is_fp8) for shape in ((1, HEADS), (6, HEADS), (16, 16)) for is_fp8 in (False, True))
"""For CI; other sizes differ in the bounds of a loop."""

"""Launches of `kernels/attention.cu`: sparse MLA for Hopper at the real widths, the parts of a query row in one cluster."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from hisparse.ops.cuda.module import Instance, Kernel, load

ARCHITECTURE = "sm_90a"
HEADS, TILE, THREADS = 64, 64, 384
LATENT, ROPE = 512, 64
SHARED_BYTES = 3 * 9 * 8192 + 4096 + 1024
"""Queries and two slots of rows; what is known of them; alignment of the first."""
CLUSTERS = (1, 2, 4, 8, 16)
_PORTABLE_CLUSTER = 8
_FIXED_TILES, _COMBINE_TILES, _RANK_TILES = 3.0, 0.5, 0.08
"""Start and end of a CTA, and the combination of a cluster and of each of its ranks, in units of a tile's time."""


def instance(cluster: int, is_fp8: bool) -> Instance:
    return Instance("attention.cu", "sparse_mla", {"CLUSTER": cluster, "FP8": int(is_fp8)}, ARCHITECTURE)


def suits(q: Tensor, rows: Tensor, host_rows: Tensor | None, out: Tensor) -> bool:
    """Whether the kernel reads these as they are: bfloat16 queries, aligned heads; all else is checked already."""
    return (q.dtype == torch.bfloat16 and rows.dtype != torch.float32
            and _aligned(q, 16) and _aligned(out, 8) and rows.data_ptr() % 16 == 0
            and (host_rows is None or host_rows.data_ptr() % 16 == 0))


def _aligned(x: Tensor, num_bytes: int) -> bool:
    size = x.element_size()
    return x.data_ptr() % num_bytes == 0 and all(x.stride(i) * size % num_bytes == 0 for i in (0, 1))


def plan_cluster(num: int, heads: int, k: int, processors: int) -> int:
    """CTAs of a cluster: the least estimated time.

    Example: 16 query rows, 64 heads, k 2048 on 132 multiprocessors -> 8 CTAs, each 256 entries.
    """
    tiles, programs = max(1, math.ceil(k / TILE)), num * math.ceil(heads / HEADS)
    best = (math.inf, 1)
    for cluster in CLUSTERS:
        if cluster > tiles:
            break
        slots = processors // 16 * 16 // cluster * cluster if cluster > 4 else processors // cluster * cluster
        waves = math.ceil(programs * cluster / slots)
        cost = waves * (math.ceil(tiles / cluster) + _FIXED_TILES)
        if cluster > 1:
            cost += _COMBINE_TILES + _RANK_TILES * cluster
        best = min(best, (cost, cluster))
    return best[1]


def attend(q: Tensor, rows: Tensor, row_ids: Tensor, scaling: float, row_delta: int, host_rows: Tensor | None,
           host_ids: Tensor | None, out: Tensor, cluster: int) -> None:
    """Launches. Arguments as `attention.sparse_mla` has checked them; `out` bfloat16, written completely."""
    num, heads, _ = q.shape
    run = _loaded(cluster, rows.dtype == torch.uint8, torch.cuda.current_device())
    run((num * math.ceil(heads / HEADS) * cluster,), THREADS, (
        q, rows, host_rows, row_ids, host_ids, out, scaling * math.log2(math.e), row_delta, row_ids.shape[1], heads,
        q.stride(0), q.stride(1), row_ids.stride(0), 0 if host_ids is None else host_ids.stride(0), out.stride(0),
        out.stride(1), row_ids.dtype == torch.int64, host_ids is not None and host_ids.dtype == torch.int64,
    ), SHARED_BYTES)


@functools.cache
def _loaded(cluster: int, is_fp8: bool, device: int) -> Kernel:
    loaded = load(instance(cluster, is_fp8))
    if cluster > _PORTABLE_CLUSTER:
        loaded.allow_large_clusters()
    loaded.allow_shared_bytes(SHARED_BYTES)
    return loaded


INSTANCES = tuple(instance(cluster, is_fp8) for cluster in CLUSTERS for is_fp8 in (False, True))

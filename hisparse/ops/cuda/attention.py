"""Sparse MLA over flat row ids on the GPU: which kernel runs, in how many splits, and its launch.

Kernels with one contract. `attention_cluster` (CUDA) for the real widths on Hopper; `attention_kernels` (Triton) for everything
else (float32 rows, few heads, other widths, strides and GPUs; and the CPU under TRITON_INTERPRET=1). `attention_flash_mla` (the
FlashMLA package, where it is installed) runs where `attention_switch` says so.

Workspaces (of the Triton kernel): parts of split query rows come from torch's allocator at each call, never from a cache of
this module. Inside `torch.cuda.graph` they belong to that graph's private pool, so graphs, streams and batch sizes cannot
share one by mistake; outside they follow torch's rule for the current stream.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hisparse.errors import ConfigError
from hisparse.ops.cuda import attention_cluster, attention_flash_mla, attention_kernels

_SCALED_LATENTS, _SCALE_ALIGN = 128, 16
"""fp8_ds_mla: latents that share a scale; bytes to whose multiple the scales of a row are filled up."""
_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_FEW_HEADS = 16
"""Up to this many heads the general kernel's blocks of 16 read bfloat16 rows faster than the cluster kernel's of 64."""
_FIXED_TILES, _SPLIT_TILES = 1.5, 0.4
"""Start and end of a program, and each split's part of the combination, in units of one tile of 64 entries."""

_COMBINE_PROGRAMS = 512
"""Latents are cut into blocks until the combination has this many programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a call is cut up. A function of shapes alone, so that a captured graph and an eager call agree bit for bit.

    Attributes:
        splits: parts of a query row's entries. per_split: entries of a part, a multiple of block_n.
        cluster: CTAs of a query row and block of block_h heads in `attention_cluster`; 0 = the Triton kernel runs, as all says.
        block_h, block_n: heads and entries of a tile. warps, stages: of a program. part_dtype: of the parts.
        pdl: the combination is launched before the parts are complete, and waits on the device (from Hopper on).
    """

    splits: int
    per_split: int
    cluster: int = 0
    block_h: int = 64
    block_n: int = 64
    warps: int = 8
    stages: int = 2
    part_dtype: torch.dtype = torch.float32
    pdl: bool = False


def sparse_mla(
    q: Tensor,
    rows: Tensor,
    row_ids: Tensor,
    scaling: float,
    latent_dim: int,
    *,
    row_delta: int = 0,
    host_rows: Tensor | None = None,
    host_ids: Tensor | None = None,
    out: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Absorbed sparse MLA: softmax(q . row * scaling) over the named rows, times their latent part.

    Masked entries (-1) load nothing, so NaN in rows that nobody names cannot reach the result; they may stand anywhere.
    Sums are float32. Products: float32 rows exact float32; bfloat16 rows in bfloat16, to which q and probabilities are
    rounded; fp8_ds_mla rows in float16, scaled so that nothing leaves its range.

    Args:
        q: float32 or bfloat16 [n, heads, latent_dim + rope], any strides. Query rows may be one step of n requests or a
            prefill chunk, each with its own ids.
        rows: [num_rows, latent_dim + rope] float32 or bfloat16, or uint8 fp8_ds_mla
            [num_rows, row_bytes] (656 for 512 + 64; 128, 256 or 512 latents), contiguous.
        row_ids: int32 or int64 [n, k], -1 = none. row_delta: added to ids that are not -1.
        scaling: factor of the scores.
        host_rows: as `rows`; may alias registered host memory. host_ids: int32 or int64 [n, k]: entries to read there
            instead, without row_delta. An entry is named by one of the two at most.
        out: [n, heads, latent_dim] in q's dtype, latents adjacent: written completely.
        launch: in place of `plan_launch(...)`, and never FlashMLA: tuning.
    Returns:
        (out, gathered): out is 0 for a row without entries. gathered: int64 [n], entries read from `host_rows`; None
        without `host_ids`.
    Stream: the current one; no synchronisation; may be captured once the same shapes have run outside of a capture.
    Raises:
        ConfigError: shapes, dtypes or strides do not fit together.

    Example: n 16, heads 64, k 2048, bfloat16: q [16, 64, 576], rows [num_rows, 576], ids [16, 2048] -> out [16, 64, 512].
    """
    num, heads, width = q.shape
    k = row_ids.shape[1]
    _check(q, rows, row_ids, latent_dim, host_rows, host_ids)
    if out is not None and (out.shape != (num, heads, latent_dim) or out.dtype != q.dtype
                            or (out.numel() and out.stride(2) != 1)):
        raise ConfigError(f"out must be {q.dtype} [{num}, {heads}, {latent_dim}] with adjacent latents, got {out.dtype} "
                          f"{list(out.shape)} with strides {out.stride()}")
    facts = device_facts(q.device)
    if launch is None and attention_flash_mla.chosen(q, rows, row_ids, latent_dim, row_delta, host_ids, facts[0]):
        return attention_flash_mla.attend(q, rows, row_ids, scaling, row_delta, out), None
    if out is None:
        out = torch.empty(num, heads, latent_dim, dtype=q.dtype, device=q.device)
    gathered = None if host_ids is None else (host_ids >= 0).sum(1)
    if num == 0 or heads == 0:
        return out, gathered
    if k == 0:
        return out.zero_(), gathered
    if q.stride(2) != 1:
        q = q.contiguous()
    if launch is None:
        launch = plan_launch(num, heads, k, rows.dtype, latent_dim, width - latent_dim, facts,
                             attention_cluster.suits(q, rows, out))
    if launch.cluster:
        attention_cluster.attend(q, rows, row_ids, scaling, row_delta, host_rows, host_ids, out, launch.cluster, launch.block_h)
        return out, gathered
    target, lse = out, out
    if launch.splits > 1:
        target = torch.empty(num, launch.splits, heads, latent_dim, dtype=launch.part_dtype, device=q.device)
        lse = torch.empty(num, launch.splits, heads, dtype=torch.float32, device=q.device)
    _attend(launch, q, rows, row_ids, scaling, latent_dim, row_delta, host_rows, host_ids, target, lse)
    if launch.splits > 1:
        block = triton.next_power_of_2(latent_dim)
        while num * heads * latent_dim < _COMBINE_PROGRAMS * block and block > 64:
            block //= 2
        attention_kernels.combine_splits[(num * heads, triton.cdiv(latent_dim, block))](
            target, lse, out, launch.splits, heads, out.stride(0), out.stride(1),
            SPLITS_P=triton.next_power_of_2(launch.splits), LATENT=latent_dim, BLOCK_D=block,
            PDL=launch.pdl, num_warps=4, launch_pdl=launch.pdl)
    return out, gathered


def _attend(launch: Launch, q: Tensor, rows: Tensor, row_ids: Tensor, scaling: float, latent_dim: int, row_delta: int,
            host_rows: Tensor | None, host_ids: Tensor | None, target: Tensor, lse: Tensor) -> None:
    num, heads, width = q.shape
    k = row_ids.shape[1]
    has_host = host_ids is not None
    host, ids_of_host = (rows, row_ids) if host_rows is None or host_ids is None else (host_rows, host_ids)
    numbers = (scaling * math.log2(math.e), row_delta, k, launch.splits, launch.per_split, heads, q.stride(0), q.stride(1),
               row_ids.stride(0), ids_of_host.stride(0), target.stride(0), target.stride(1))
    grid = (triton.cdiv(heads, launch.block_h) * launch.splits * num,)
    rope = width - latent_dim
    attention_kernels.attend_rows[grid](
        q, rows, host, row_ids, ids_of_host, target, lse, *numbers,
        IS_SPLIT=launch.splits > 1, LATENT=latent_dim, ROPE=rope, LATENT_P=max(16, triton.next_power_of_2(latent_dim)),
        ROPE_P=max(16, triton.next_power_of_2(rope)), ROW=rows.shape[1], FORMAT=_FORMATS[rows.dtype], HAS_HOST=has_host,
        PDL=launch.pdl and launch.splits > 1, BLOCK_H=launch.block_h, BLOCK_N=launch.block_n, STAGES=launch.stages,
        num_warps=launch.warps)


@functools.lru_cache(maxsize=4096)
def plan_launch(num: int, heads: int, k: int, row_dtype: torch.dtype, latent_dim: int, rope: int,
                device: tuple[int, int], aligned: bool = True) -> Launch:
    """The launch of a shape. `device` = (compute capability's major number, multiprocessors); `aligned`: q and out are as
    `attention_cluster.suits` says.

    Example: 16 query rows, 64 heads, k 2048 on 132 multiprocessors -> 8 splits of 256 entries.
    """
    major, processors = device
    is_float32, is_fp8 = row_dtype == torch.float32, row_dtype == torch.uint8
    is_real = major == 9 and (latent_dim, rope) == (attention_cluster.LATENT, attention_cluster.ROPE)
    if is_real and aligned and not is_float32 and (is_fp8 or heads > _FEW_HEADS):
        cluster, block_heads = attention_cluster.plan_cluster(num, heads, k, processors)
        return Launch(splits=cluster, per_split=-(-triton.cdiv(k, 64) // cluster) * 64, cluster=cluster, block_h=block_heads)
    block_h = 16 if heads <= 16 or is_float32 else 32 if heads <= 32 or latent_dim < 256 else 64
    block_n = 16 if is_float32 else 64 if latent_dim < 256 or (block_h == 16 and not is_fp8) else 32
    warps = 8 if block_h == 64 or (block_n == 64 and latent_dim >= 256) else 4
    splits, per_split = _splits(num * triton.cdiv(heads, block_h), k, block_n, 2 * processors)
    return Launch(splits=splits, per_split=per_split, block_h=block_h, block_n=block_n, warps=warps,
                  pdl=major >= 9)


def _splits(programs: int, k: int, block_n: int, slots: int) -> tuple[int, int]:
    """(splits, entries of a split) with the least estimated time for `programs` per split on `slots` at a time."""
    tiles = triton.cdiv(k, block_n)
    best = (math.inf, 1, tiles)
    for splits in range(1, min(tiles, 64) + 1):
        per_split = triton.cdiv(tiles, splits)
        if triton.cdiv(tiles, per_split) != splits:
            continue
        waves = triton.cdiv(programs * splits, slots)
        cost = waves * (per_split * block_n / 64 + _FIXED_TILES)
        if splits > 1:
            cost += _FIXED_TILES + _SPLIT_TILES * programs * splits / slots
        best = min(best, (cost, splits, per_split))
    return best[1], best[2] * block_n


@functools.cache
def device_facts(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 1
    facts = torch.cuda.get_device_properties(device)
    return facts.major, facts.multi_processor_count


def _check(
    q: Tensor, rows: Tensor, row_ids: Tensor, latent_dim: int, host_rows: Tensor | None, host_ids: Tensor | None
) -> None:
    num, _, width = q.shape
    if q.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"q must be float32 or bfloat16, got {q.dtype}")
    if not 0 < latent_dim < width:
        raise ConfigError(f"latent_dim must be in [1, {width - 1}] of q's {width} elements, got {latent_dim}")
    for name, table in (("rows", rows), ("host_rows", host_rows)):
        if table is None:
            continue
        fits = table.dtype in _FORMATS and table.dim() == 2 and table.is_contiguous()
        if table.dtype == torch.uint8:
            fits = fits and table.shape[1] == _fp8_row_bytes(latent_dim, width - latent_dim)
        else:
            fits = fits and table.shape[1] == width
        if not fits or table.dtype != rows.dtype or table.data_ptr() % 16:
            raise ConfigError(
                f"{name} must be contiguous, 16-byte aligned float32 or bfloat16 [num_rows, {width}], or uint8 fp8_ds_mla "
                f"[num_rows, {_fp8_row_bytes(latent_dim, width - latent_dim)}]; got {table.dtype} {list(table.shape)}")
    if (host_rows is None) != (host_ids is None):
        raise ConfigError("host_rows and host_ids come together or not at all")
    for name, ids in (("row_ids", row_ids), ("host_ids", host_ids)):
        if ids is not None and (ids.dtype not in (torch.int32, torch.int64) or ids.shape != (num, row_ids.shape[1])
                                or (ids.numel() and ids.stride(1) != 1)):
            raise ConfigError(f"{name} must be int32 or int64 [{num}, {row_ids.shape[1]}] with adjacent entries, "
                              f"got {ids.dtype} {list(ids.shape)} with strides {ids.stride()}")


def _fp8_row_bytes(latent_dim: int, rope: int) -> int:
    """Of an fp8_ds_mla row; 0 where there is none that the kernels read. Example: 656 for 512 latents and 64 rope values."""
    tiles = latent_dim // _SCALED_LATENTS
    if latent_dim % _SCALED_LATENTS or tiles & (tiles - 1):
        return 0
    return latent_dim + -(-4 * tiles // _SCALE_ALIGN) * _SCALE_ALIGN + 2 * rope

"""Absorbed sparse MLA over flat row ids."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops.reference.fp8 import dequantize_rows

DEFAULT_GATHER_ROWS = 1 << 15
"""Most rows that attention gathers at once; bounds its workspace to this many times row_bytes."""


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
    gather_rows: int = DEFAULT_GATHER_ROWS,
) -> tuple[Tensor, Tensor]:
    """Absorbed sparse MLA: softmax(q . row * scaling) over the named rows, times their latent part.

    Masked entries (-1) load nothing, so NaN in rows that nobody names cannot reach the result.

    Args:
        q: [n, heads, latent_dim + rope]. rows: [device rows, row_elems] floating, or uint8 [device rows, row_bytes]
            (fp8_ds_mla: dequantised to float32 after the gather). row_ids: int [n, k], -1 = none.
        row_delta: added to the ids that are not -1.
        host_rows: [host rows, ...] as `rows`, host_ids: int [n, k], -1 = none: entries to read from the host instead, without
            row_delta. Each split of the query rows gathers its distinct host rows once into a workspace.
        gather_rows: most gathered rows at once; query rows are split so that a split has at most this many entries.
        out: [n, heads, latent_dim] in q's dtype: written completely if given.
    Returns:
        [n, heads, latent_dim] in q's dtype (0 for a row without entries), and int64 [n]: host rows gathered, counted at
        the first query row of each split.
    """
    num, k = row_ids.shape
    out = q.new_empty(num, q.shape[1], latent_dim) if out is None else out
    gathered = torch.zeros(num, dtype=torch.int64, device=q.device)
    step = max(1, gather_rows // max(k, 1))
    for start in range(0, num, step):
        part = slice(start, min(start + step, num))
        ids = row_ids[part].long()
        on_device = ids >= 0
        ids = torch.where(on_device, ids + row_delta, ids)
        named = on_device
        if host_rows is not None and host_ids is not None:
            on_host = host_ids[part] >= 0
            named = on_device | on_host
        if bool(on_device.all()):
            kv = _gather(rows, ids.reshape(-1), latent_dim).view(*ids.shape, q.shape[2])
        else:
            some = _gather(rows, ids[on_device], latent_dim)
            kv = some.new_zeros(*ids.shape, q.shape[2])
            kv[on_device] = some
        if named is not on_device and host_rows is not None and host_ids is not None:
            distinct, inverse = torch.unique(host_ids[part][on_host].long(), return_inverse=True)
            kv[on_host] = _gather(host_rows, distinct, latent_dim).to(kv.device)[inverse]
            gathered[start] = distinct.numel()
        out[part] = _attend(q[part], kv, named, scaling, latent_dim)
    return out, gathered


def _gather(rows: Tensor, ids: Tensor, latent_dim: int) -> Tensor:
    """The values of the named rows, [m, latent_dim + rope]."""
    found = rows.index_select(0, ids)
    return dequantize_rows(found, latent_dim) if rows.dtype == torch.uint8 else found


def _attend(q: Tensor, kv: Tensor, named: Tensor, scaling: float, latent_dim: int) -> Tensor:
    """In at least float32 whatever the inputs are: what a kernel accumulates in."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, kv = q.to(dtype), kv.to(dtype)
    scores = torch.matmul(q, kv.transpose(1, 2)) * scaling
    weights = scores.masked_fill(~named[:, None], float("-inf")).softmax(-1).masked_fill(~named[:, None], 0.0)
    return torch.matmul(weights, kv[..., :latent_dim])

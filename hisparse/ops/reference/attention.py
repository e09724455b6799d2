"""Absorbed sparse MLA over flat row ids."""

from __future__ import annotations

import torch
from torch import Tensor

DEFAULT_GATHER_ROWS = 1 << 15
"""Most rows that attention gathers at once; bounds its workspace to this many times row_bytes."""


def sparse_mla(
    q: Tensor,
    rows: Tensor,
    row_ids: Tensor,
    scaling: float,
    latent_dim: int,
    *,
    host_rows: Tensor | None = None,
    host_ids: Tensor | None = None,
    gather_rows: int = DEFAULT_GATHER_ROWS,
) -> tuple[Tensor, Tensor]:
    """Absorbed sparse MLA: softmax(q . row * scaling) over the named rows, times their latent part.

    Masked entries (-1) load nothing, so NaN in rows that nobody names cannot reach the result.

    Args:
        q: [n, heads, row_elems]. rows: [device rows, row_elems]. row_ids: int64 [n, k], -1 = none.
        host_rows: [host rows, row_elems], host_ids: int64 [n, k], -1 = none: entries to read from the host instead.
            Each split of the query rows gathers its distinct host rows once into a workspace.
        gather_rows: most gathered rows at once; query rows are split so that a split has at most this many entries.
    Returns:
        [n, heads, latent_dim] in q's dtype (0 for a row without entries), and int64 [n]: host rows gathered, counted at
        the first query row of each split.
    """
    num, k = row_ids.shape
    out = q.new_empty(num, q.shape[1], latent_dim)
    gathered = torch.zeros(num, dtype=torch.int64, device=q.device)
    step = max(1, gather_rows // max(k, 1))
    for start in range(0, num, step):
        part = slice(start, min(start + step, num))
        ids = row_ids[part]
        on_device = ids >= 0
        named = on_device
        if host_rows is not None and host_ids is not None:
            on_host = host_ids[part] >= 0
            named = on_device | on_host
        if bool(on_device.all()):
            kv = rows.index_select(0, ids.reshape(-1)).view(*ids.shape, rows.shape[1])
        else:
            kv = rows.new_zeros(*ids.shape, rows.shape[1])
            kv[on_device] = rows.index_select(0, ids[on_device])
        if named is not on_device and host_rows is not None and host_ids is not None:
            distinct, inverse = torch.unique(host_ids[part][on_host], return_inverse=True)
            kv[on_host] = host_rows.index_select(0, distinct).to(kv.device)[inverse]
            gathered[start] = distinct.numel()
        out[part] = _attend(q[part], kv, named, scaling, latent_dim)
    return out, gathered


def _attend(q: Tensor, kv: Tensor, named: Tensor, scaling: float, latent_dim: int) -> Tensor:
    """In at least float32 whatever the inputs are: what a kernel accumulates in."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, kv = q.to(dtype), kv.to(dtype)
    scores = torch.matmul(q, kv.transpose(1, 2)) * scaling
    weights = scores.masked_fill(~named[:, None], float("-inf")).softmax(-1).masked_fill(~named[:, None], 0.0)
    return torch.matmul(weights, kv[..., :latent_dim])

"""Copies of rows: new rows to the device and their mirror, pages from one place to another."""

from __future__ import annotations

import torch
from torch import Tensor


def append(new: Tensor, rows: Tensor, row_ids: Tensor, host_rows: Tensor | None = None, host_ids: Tensor | None = None) -> None:
    """Write-through of new rows [m, row_elems]: to `rows[row_ids]` and, where `host_ids` is not -1, to the host view.

    Args:
        row_ids: int64 [m], all valid and distinct. host_ids: int64 [m], -1 = not mirrored.
    """
    rows.index_copy_(0, row_ids, new)
    if host_rows is not None and host_ids is not None:
        mirrored = host_ids >= 0
        if bool(mirrored.all()):
            host_rows.index_copy_(0, host_ids, new)
        else:
            host_rows.index_copy_(0, host_ids[mirrored], new[mirrored])


def copy_pages(dst: Tensor, dst_first: Tensor, src: Tensor, src_first: Tensor, num_rows: int) -> None:
    """Copies `num_rows` rows of each page: `dst[dst_first[i] + j] = src[src_first[i] + j]`. First rows: int64."""
    step = torch.arange(num_rows, device=dst_first.device)
    dst.index_copy_(0, (dst_first[:, None] + step).reshape(-1), src.index_select(0, (src_first[:, None] + step).reshape(-1)))

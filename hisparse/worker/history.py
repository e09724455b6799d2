"""Rows of a prefill chunk's history that only the host has: where its attention reads them.

The CPU reads them in place. On CUDA the seat's pages that are not resident come to a workspace first, once for a layer and
chunk, since every query row would read its rows through PCIe again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hisparse.layout import KVCacheLayout
from hisparse.worker.batch import RowBatch
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool
from hisparse.worker.tables import KVTables


class History:
    """One per rank: its workspace serves one layer at a time.

    The workspace holds every position of the longest context of one request in one layer, so it is bounded by
    `max_model_len * row_bytes`; it grows to what chunks need.
    """

    def __init__(self, layout: KVCacheLayout, *, cache: DeviceCache, host_pool: HostPool, tables: KVTables,
                 copier: Any) -> None:
        self._layout = layout
        self._host = host_pool
        self._tables = tables
        self._copier = copier if cache.device.type == "cuda" else None
        self._workspace = cache.rows.new_empty(0, cache.rows.shape[1])

    def rows(self, layer: int, topk: Tensor, host_ids: Tensor, batch: RowBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """The rows that `host_ids` [n, k] (rows of the layer's host view, -1 = none) stand for, their ids, and how many were
        copied for them.

        Args:
            topk: [n, k], the positions behind `host_ids`. batch: a prefill batch.
        Returns:
            [m, row_elems] on the batch's device; int [n, k]: row of each entry, -1 = none; and int64 [n], the rows copied,
            all counted at the first query row, or None (attention copies and counts them itself). Valid until the next call.
        Stream: the current one; does not wait.
        """
        if self._copier is None:
            return self._host.device_rows(layer), host_ids, None
        assert batch.prefill_seat is not None
        pages, group = self._layout.pages(batch.max_len), self._layout.layer_group[layer]
        if self._workspace.shape[0] < pages * self._layout.block_size:
            self._workspace = self._workspace.new_empty(pages * self._layout.block_size, self._workspace.shape[1])
        self._copier.gather_pages(
            layer, batch.prefill_seat, self._tables.source, self._tables.resident(group), self._workspace, first_page=0,
            num_pages=pages, status=batch.status,
        )
        # a leader's `host_ids` serve its whole group, and a group of layers shares its pages
        ids = batch.once(f"history ids {id(host_ids)}", lambda: torch.where(host_ids >= 0, topk, -1))
        return self._workspace, ids, batch.once(f"history copies {group}", lambda: self._count(group, pages, batch))

    def _count(self, group: int, pages: int, batch: RowBatch) -> Tensor:
        """Rows of the pages that only the host has."""
        assert batch.prefill_seat is not None
        missing = self._tables.resident(group)[batch.prefill_seat, :pages] <= 0
        counts = torch.zeros(batch.num_rows, dtype=torch.int64, device=missing.device)
        counts[0] = missing.sum() * self._layout.block_size
        return counts

"""Write-through of a forward's new rows to the host."""

from __future__ import annotations

import torch

from hisparse import ops
from hisparse.layout import KVCacheLayout
from hisparse.worker.batch import RowBatch
from hisparse.worker.counters import Counters
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool
from hisparse.worker.tables import KVTables


class HostMirrors:
    """Copies new rows from their resident pages to the host pages behind them; only the rank that writes the pool has one.

    All layers go in one copy, on the compute stream, once the last one has appended: beside the forward it would cost more than
    it takes, since it holds processors that every large product counts on. Then the rows' bits in their pages' masks are set.
    """

    def __init__(self, layout: KVCacheLayout, *, cache: DeviceCache, host_pool: HostPool, tables: KVTables,
                 counters: Counters) -> None:
        self._layout = layout
        self._cache = cache
        self._host = host_pool
        self._tables = tables
        self._counters = counters
        self._ops = ops.backend(cache.device)
        self._host_rows = host_pool.num_blocks * layout.block_size
        self._layers = torch.tensor(
            [(tables.first_of_resident(layout.layer_group[layer]), layout.layer_row_offset[layer], layer * self._host_rows)
             for layer in range(layout.shape.num_layers)], dtype=torch.int64, device=cache.device)

    def appended(self, batch: RowBatch) -> None:
        """One more layer of `batch.appended` has its rows; after the last one, copies them and sets the row masks.

        Stream: the current one; nothing waits on the CPU; may be captured.
        Raises:
            InvariantError (CPU): a mirror outside the pool. On CUDA that is NO_TARGET in `batch.status`.
        """
        layout, tables = self._layout, self._tables
        if len(batch.appended) < layout.shape.num_layers:
            return
        self._ops.mirror_rows(
            batch.seats, batch.positions, batch.writes, self._layers, tables=tables.flat,
            resident_table=tables.resident(0), mirror_table=tables.mirrors, block_size=layout.block_size,
            rows_per_block=layout.rows_per_block, rows=self._cache.rows, host_body=self._host.device_body,
            host_rows=self._host_rows, status=batch.status)
        size, mirrors = layout.block_size, tables.mirrors
        self._ops.mark_rows(batch.seats, batch.positions, batch.writes, mirrors, self._host.device_masks, block_size=size)
        page = mirrors[batch.seats.long().clamp(min=0), batch.positions // size]
        mirrored = (page > 0) & batch.writes & (batch.seats >= 0)
        self._counters.add("mirrored_rows", batch.seats, mirrored * layout.shape.num_layers)

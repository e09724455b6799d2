"""Write-through of a forward's new rows to the host, beside the forward."""

from __future__ import annotations

import torch

from hisparse import ops
from hisparse.layout import KVCacheLayout
from hisparse.worker.batch import RowBatch
from hisparse.worker.counters import Counters
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool
from hisparse.worker.streams import Place, StepEvent, Streams
from hisparse.worker.tables import KVTables

LAYERS_A_COPY = 8


class HostMirrors:
    """Copies new rows from their resident pages to the host pages behind them; only the rank that writes the pool has one.

    Several layers go in one copy, on the mirror stream, and slowly: stores that fill the bus hold up every kernel beside them.
    Before the last layer's attention the compute stream waits for the last copy, which is of one layer only; then the rows'
    bits in their pages' masks are set.
    """

    def __init__(self, layout: KVCacheLayout, *, cache: DeviceCache, host_pool: HostPool, tables: KVTables, streams: Streams,
                 counters: Counters) -> None:
        self._layout = layout
        self._cache = cache
        self._host = host_pool
        self._tables = tables
        self._streams = streams
        self._counters = counters
        self._ops = ops.backend(cache.device)
        self._host_rows = host_pool.num_blocks * layout.block_size
        self._layers = torch.tensor(
            [(tables.first_of_resident(layout.layer_group[layer]), layout.layer_row_offset[layer], layer * self._host_rows)
             for layer in range(layout.shape.num_layers)], dtype=torch.int64, device=cache.device)

    def appended(self, batch: RowBatch) -> None:
        """One more layer of `batch.appended` has its rows: copies what is due, and after the last layer sets the row masks.

        Stream: mirror, and compute behind it once all layers appended; nothing waits on the CPU; may be captured.
        Raises:
            InvariantError (CPU): a mirror outside the pool. On CUDA that is NO_TARGET in `batch.status`.
        """
        done, all_layers = len(batch.appended), self._layout.shape.num_layers
        if done % LAYERS_A_COPY and done < all_layers - 1:
            return
        streams = self._streams
        streams.wait(streams.record(StepEvent.APPENDED, Place.COMPUTE), Place.MIRROR)
        with streams.on(Place.MIRROR):
            for first, end in _runs(batch.appended - batch.mirrored):
                self._copy(first, end, batch)
        batch.mirrored |= batch.appended
        if done == all_layers:
            streams.wait(streams.record(StepEvent.MIRRORED, Place.MIRROR), Place.COMPUTE)
            self._mark(batch)

    def _copy(self, first: int, end: int, batch: RowBatch) -> None:
        layout, tables = self._layout, self._tables
        self._ops.mirror_rows(
            batch.seats, batch.positions, batch.writes, self._layers[first:end], tables=tables.flat,
            resident_table=tables.resident(0), mirror_table=tables.mirrors, block_size=layout.block_size,
            rows_per_block=layout.rows_per_block, rows=self._cache.rows, host_body=self._host.device_body,
            host_rows=self._host_rows, status=batch.status)

    def _mark(self, batch: RowBatch) -> None:
        size, mirrors = self._layout.block_size, self._tables.mirrors
        self._ops.mark_rows(batch.seats, batch.positions, batch.writes, mirrors, self._host.device_masks, block_size=size)
        page = mirrors[batch.seats.long().clamp(min=0), batch.positions // size]
        mirrored = (page > 0) & batch.writes & (batch.seats >= 0)
        self._counters.add("mirrored_rows", batch.seats, mirrored * self._layout.shape.num_layers)


def _runs(layers: set[int]) -> list[tuple[int, int]]:
    """Consecutive layers as (first, end), in order."""
    runs: list[tuple[int, int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return runs

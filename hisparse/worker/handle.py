"""What one attention layer sees of the cache: append its rows, attend to the rows that top-k names."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse import ops
from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.worker.batch import RowBatch
from hisparse.worker.counters import Counters
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool
from hisparse.worker.runtime import HiSparseRuntime
from hisparse.worker.tables import KVTables


class HiSparseCacheHandle:
    """Append and attend for one layer. Layers of a forward call in model order, append before attend.

    Holds no mapping of its own: tables, plans and row ids belong to KVTables, HiSparseRuntime and the batch.

    Attributes:
        layer: model layer index.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        layer: int,
        *,
        cache: DeviceCache,
        host_pool: HostPool | None,
        tables: KVTables,
        runtime: HiSparseRuntime,
        counters: Counters,
        is_writer: bool,
    ) -> None:
        self.layer = layer
        self._layout = layout
        self._view = cache.view(layer)
        self._group = layout.layer_group[layer]
        self._host = host_pool
        self._tables = tables
        self._runtime = runtime
        self._counters = counters
        self._mirrors = host_pool is not None and is_writer
        self._ops = ops.backend(cache.device)

    def append(self, rows: Tensor, batch: RowBatch) -> None:
        """Writes `rows` [n, values] (latent, then rope key) through to the resident page and the mirrored host page.

        Rows that do not write are skipped; the others are rounded or quantised as the layout's row format says. Only the
        host pool's writer writes host rows; the page's row mask gets its bits when every layer has appended.
        Raises:
            InvariantError: a written position has no resident page, or this layer appended in this batch before.
        """
        if self.layer in batch.appended:
            raise InvariantError(f"layer {self.layer} appends twice in one batch; make a RowBatch for each forward")
        index = batch.write_index
        if rows.shape != (batch.num_rows, self._layout.row.values):
            raise InvariantError(
                f"layer {self.layer}: rows must be [{batch.num_rows}, {self._layout.row.values}], "
                f"got {list(rows.shape)}"
            )
        if index.numel():
            new = rows if index.numel() == batch.num_rows else rows.index_select(0, index)
            host_ids = self._host_ids(batch)
            self._ops.append(
                new,
                self._view.rows,
                self._row_ids(batch),
                None if host_ids is None or self._host is None else self._host.rows(self.layer),
                host_ids,
            )
            if host_ids is not None:
                self._counters.add("mirrored_rows", batch.seats[index], (host_ids >= 0).to(torch.int64))
        batch.appended.add(self.layer)
        if len(batch.appended) == self._layout.shape.num_layers:
            self._mark_rows(batch)

    def attend(self, q: Tensor, topk: Tensor, batch: RowBatch, scaling: float) -> Tensor:
        """Sparse MLA over the rows that `topk` names.

        Args:
            q: absorbed queries [n, heads, values] (latent part, then rope part).
            topk: int32 or int64 [n, k] positions; -1 or outside [0, position] = none. Of a follower: its leader's.
            batch: the same object for every layer of a forward.
            scaling: factor of the scores.
        Returns:
            [n, heads, latent_dim] in q's dtype; zero for a row without any valid position.
        Raises:
            InvariantError: a position is neither resident nor on the host, or a follower attends before its leader.
        """
        found = self._runtime.resolve(self.layer, topk, batch)
        host_rows = None if found.host_ids is None or self._host is None else self._host.rows(self.layer)
        out: Tensor
        out, gathered = self._ops.sparse_mla(
            q,
            self._view.rows,
            found.shifted(self._view.row_offset),
            scaling,
            self._layout.row.latent_dim,
            host_rows=host_rows,
            host_ids=found.host_ids,
        )
        if host_rows is not None:
            self._counters.add("prefill_host_rows", batch.seats, gathered)
        return out

    def _row_ids(self, batch: RowBatch) -> Tensor:
        """int64 [m]: where the batch's writing rows go in this layer; the part that layers share is computed once."""
        key = f"resident{self._group}"
        base: Tensor | None = batch.targets.get(key)
        if base is None:
            seats, positions = batch.seats[batch.write_index].long(), batch.positions[batch.write_index]
            size = self._layout.block_size
            blocks = self._tables.resident(self._group)[seats, positions // size].long()
            if bool((blocks <= 0).any()):
                bad = int((blocks <= 0).nonzero()[0])
                raise InvariantError(
                    f"layer {self.layer} writes position {int(positions[bad])} of seat {int(seats[bad])}, "
                    f"which has no page in resident group {self._group}"
                )
            base = batch.targets[key] = blocks * self._layout.rows_per_block + positions % size
        ids: Tensor = base + self._view.row_offset
        return ids

    def _host_ids(self, batch: RowBatch) -> Tensor | None:
        """int64 [m]: host rows that mirror the writing rows, -1 = not mirrored; None = no row is."""
        if not self._mirrors:
            return None
        if "mirror" not in batch.targets:
            seats, positions = batch.seats[batch.write_index].long(), batch.positions[batch.write_index]
            size = self._layout.block_size
            blocks = self._tables.mirrors[seats, positions // size].long()
            ids = torch.where(blocks > 0, blocks * size + positions % size, -1)
            batch.targets["mirror"] = ids if bool((ids >= 0).any()) else None
        ids_or_none: Tensor | None = batch.targets["mirror"]
        return ids_or_none

    def _mark_rows(self, batch: RowBatch) -> None:
        ids: Tensor | None = batch.targets.get("mirror")
        if ids is not None and self._host is not None:
            written = ids[ids >= 0].cpu().numpy()
            size = self._layout.block_size
            self._host.set_rows(written // size, written % size)

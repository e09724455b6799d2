"""What one attention layer sees of the cache: append its rows, attend to the rows that top-k names."""

from __future__ import annotations

from torch import Tensor

from hisparse import ops
from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.ops import Resolution
from hisparse.worker.batch import RowBatch
from hisparse.worker.counters import Counters
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.history import History
from hisparse.worker.host_mirrors import HostMirrors
from hisparse.worker.runtime import HiSparseRuntime
from hisparse.worker.selected_rows import SelectedRows
from hisparse.worker.tables import KVTables


class HiSparseCacheHandle:
    """Append and attend for one layer. Layers of a forward call in model order, append before attend.

    `attend` is `resolve` and sparse MLA; an engine with an attention of its own calls `resolve` instead.

    Holds no mapping of its own: tables, plans and row ids belong to KVTables, HiSparseRuntime and the batch. Stream: the
    current one; on CUDA nothing waits for the device, and a decode batch may be captured in a graph.

    Attributes:
        layer: model layer index.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        layer: int,
        *,
        cache: DeviceCache,
        mirrors: HostMirrors | None,
        tables: KVTables,
        runtime: HiSparseRuntime,
        counters: Counters,
        history: History | None = None,
    ) -> None:
        self.layer = layer
        self._layout = layout
        self._view = cache.view(layer)
        self._group = layout.layer_group[layer]
        self._tables = tables
        self._runtime = runtime
        self._counters = counters
        self._ops = ops.backend(cache.device)
        self._history = history
        self._mirrors = mirrors

    def append(self, rows: Tensor | tuple[Tensor, Tensor], batch: RowBatch) -> None:
        """Writes rows to their resident page, in the layout's row format, and through to the mirrored host page.

        Rows that do not write are skipped. Only the host pool's writer has mirrors (`HostMirrors`).

        Args:
            rows: [n, latent + rope], or (latent [n, latent_dim], rope key [n, rope_dim]).
        Raises:
            InvariantError: this layer appended in this batch before, or a written position has no resident page (with
                `batch.status` that is NO_TARGET).
        """
        if self.layer in batch.appended:
            raise InvariantError(f"layer {self.layer} appends twice in one batch; make a RowBatch for each forward")
        parts = rows if isinstance(rows, tuple) else (rows,)
        width, want = sum(part.shape[1] for part in parts), self._layout.row.values
        if width != want or any(part.shape[0] != batch.num_rows for part in parts):
            raise InvariantError(
                f"layer {self.layer}: rows must be [{batch.num_rows}, {want}], got [{parts[0].shape[0]}, {width}]"
            )
        self._ops.append_rows(
            rows,
            batch.seats,
            batch.positions,
            batch.writes,
            resident_table=self._tables.resident(self._group),
            block_size=self._layout.block_size,
            rows_per_block=self._layout.rows_per_block,
            row_offset=self._view.row_offset,
            rows=self._view.rows,
            status=batch.status,
        )
        batch.appended.add(self.layer)
        if self._mirrors is not None:
            self._mirrors.appended(batch)

    def attend(self, q: Tensor, topk: Tensor, batch: RowBatch, scaling: float) -> Tensor:
        """Sparse MLA over the rows that `topk` names.

        Args:
            q: absorbed queries [n, heads, latent + rope] (latent part, then rope part).
            topk: int32 or int64 [n, k] positions; -1 or outside [0, position] = none. Of a follower: its leader's.
            batch: the same object for every layer of a forward.
            scaling: factor of the scores.
        Returns:
            [n, heads, latent_dim] in q's dtype; zero for a row without any valid position.
        Raises:
            InvariantError: a follower attends before its leader, or a position is neither resident nor on the host (with
                `batch.status` that is NO_PAGE).
        """
        found, history, history_ids, copied = self._find(topk, batch)
        out: Tensor
        out, gathered = self._ops.sparse_mla(
            q,
            self._view.rows,
            found.row_ids,
            scaling,
            self._layout.row.latent_dim,
            row_delta=self._view.row_offset - found.row_offset,
            host_rows=history,
            host_ids=history_ids,
        )
        if history is not None:
            self._counters.add("prefill_host_rows", batch.seats, gathered if copied is None else copied, self.layer)
        return out

    def resolve(self, topk: Tensor, batch: RowBatch) -> SelectedRows:
        """Where the rows that `topk` names are, once per layer and batch. Copies what is neither resident nor hot.

        Args: as `attend`.
        Stream: the current one, as `attend`; a decode batch may be captured.
        Raises:
            InvariantError: as `attend`.
        """
        found, history, history_ids, copied = self._find(topk, batch)
        if history_ids is not None:
            copied = (history_ids >= 0).sum(1) if copied is None else copied
            self._counters.add("prefill_host_rows", batch.seats, copied, self.layer)
        # a follower lies behind its leader in a block, so that the leader's ids serve when counting starts there
        rows = self._view.rows[self._view.row_offset - found.row_offset :]
        return SelectedRows(rows=rows, row_ids=found.row_ids, host_rows=history, host_ids=history_ids)

    def _find(self, topk: Tensor, batch: RowBatch) -> tuple[Resolution, Tensor | None, Tensor | None, Tensor | None]:
        """The resolution, and for history that only the host has its rows, their ids and how many were copied."""
        found = self._runtime.resolve(self.layer, topk, batch)
        if found.host_ids is None or self._history is None:
            return found, None, None, None
        return found, *self._history.rows(self.layer, topk, found.host_ids, batch)

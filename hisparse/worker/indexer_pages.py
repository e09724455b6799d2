"""Indexer keys in their GPU pages: written by position, scored against queries where they lie."""

from __future__ import annotations

from torch import Tensor

from hisparse import ops
from hisparse.worker.batch import RowBatch
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.tables import KVTables


class IndexerPages:
    """Keys of every layer that owns an indexer. `i` counts those layers (0 .. len(layout.indexer.layers) - 1).

    Stream: the current one; on CUDA nothing waits for the device, and a decode batch may be captured in a graph.
    """

    def __init__(self, cache: DeviceCache, tables: KVTables) -> None:
        self._tables = tables
        self._ops = ops.backend(cache.device)
        self._keys = [cache.indexer_keys(i) for i in range(len(cache.layout.indexer.layers))]

    def write(self, i: int, keys: Tensor, batch: RowBatch) -> None:
        """Stores `keys` [n, index_head_dim] of the batch's rows; rows that do not write are skipped.

        Raises:
            InvariantError: a written position has no indexer page (with `batch.status` that is NO_INDEXER_PAGE).
        """
        self._ops.write_keys(
            keys, self._keys[i], self._tables.indexer, batch.seats, batch.positions, batch.writes, status=batch.status
        )

    def top_k(self, i: int, q: Tensor, weights: Tensor, batch: RowBatch, top_k: int, scale: float) -> Tensor:
        """The positions of each row's context that score best.

        Args:
            q: [n, heads, index_head_dim]. weights: float32 [n, heads]. scale: of the dot products.
        Returns:
            int32 [n, min(top_k, batch.max_len)], ascending, -1 behind; all -1 for padding rows.
        Raises:
            InvariantError: a page of a context is missing (with `batch.status` that is NO_INDEXER_PAGE).
        """
        out: Tensor = self._ops.index_topk(
            q,
            weights,
            self._keys[i],
            self._tables.indexer,
            batch.seats,
            batch.context_len,
            min(top_k, batch.max_len),
            scale,
            max_len=batch.max_len,
            status=batch.status,
        )
        return out

"""Indexer keys in their GPU pages: written by position, gathered dense for the model's indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.worker.batch import RowBatch
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.tables import KVTables


class IndexerPages:
    """Keys of every layer that owns an indexer. `i` counts those layers (0 .. len(layout.indexer.layers) - 1)."""

    def __init__(self, cache: DeviceCache, tables: KVTables) -> None:
        self._tables = tables
        self._size = cache.layout.block_size
        self._keys = [cache.indexer_keys(i) for i in range(len(cache.layout.indexer.layers))]

    def write(self, i: int, keys: Tensor, batch: RowBatch) -> None:
        """Stores `keys` [n, index_head_dim] of the batch's rows; rows that do not write are skipped.

        Raises:
            InvariantError: a written position has no indexer page.
        """
        at = batch.targets.get("indexer")
        if at is None:
            index = batch.write_index
            seats, positions = batch.seats[index].long(), batch.positions[index]
            blocks = self._tables.indexer[seats, positions // self._size].long()
            if bool((blocks <= 0).any()):
                bad = int((blocks <= 0).nonzero()[0])
                raise InvariantError(f"seat {int(seats[bad])} has no indexer page for position {int(positions[bad])}")
            at = batch.targets["indexer"] = (blocks, positions % self._size)
        index = batch.write_index
        self._keys[i][at[0], at[1]] = keys.index_select(0, index).to(self._keys[i].dtype)

    def gather(self, i: int, seats: Tensor, num_tokens: int | Tensor, width: int | None = None) -> Tensor:
        """Keys of positions [0, num_tokens) of each seat, zero beyond (nothing unwritten is ever returned).

        Args:
            seats: int [B]; -1 = padding, all zero.
            num_tokens: tokens each seat holds, one for all or int [B].
            width: columns of the result; default the largest of `num_tokens`.
        Returns:
            [B, width, index_head_dim] in the indexer's dtype.
        Raises:
            InvariantError: a page below num_tokens is missing.
        """
        lengths = torch.as_tensor(num_tokens, dtype=torch.int64).expand(seats.shape[0])
        if width is None:
            width = int(lengths.max()) if lengths.numel() else 0
        keys, size = self._keys[i], self._size
        pages = -(-width // size)
        held = torch.arange(pages) * size < lengths[:, None]
        held &= (seats >= 0)[:, None]
        blocks = torch.where(held, self._tables.indexer[seats.long().clamp(min=0), :pages].long(), 0)
        if bool((held & (blocks <= 0)).any()):
            row, page = (held & (blocks <= 0)).nonzero()[0].tolist()
            raise InvariantError(f"seat {int(seats[row])} has no indexer page {page} of {int(lengths[row])} tokens")
        out = keys.index_select(0, blocks.reshape(-1)).view(seats.shape[0], pages * size, keys.shape[2])[:, :width]
        valid = (torch.arange(width) < lengths[:, None]) & (seats >= 0)[:, None]
        return torch.where(valid[..., None], out, torch.zeros((), dtype=keys.dtype))

"""The packed device allocation: one block of any GPU cache group is `block_bytes` of it.

Holds bytes and generations only; which group owns a block, and for whom, is the business of the block pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.errors import ConfigError
from hisparse.layout import KVCacheLayout
from hisparse.worker import host_memory

ALIGN_BYTES = 64
POISON_BYTE = 0xFF
"""A row of these bytes is NaN in float32, bfloat16, float16 and, value by value, in fp8_ds_mla."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedCacheView:
    """Immutable binding of one layer to its slice of the packed allocation.

    Attributes:
        rows: [num_blocks * rows_per_block, row_elems], the whole allocation seen as rows of this layer's format.
        row_offset: rows between the start of a block and this layer's page in it.
    """

    rows: Tensor
    layer: int
    row_offset: int
    rows_per_block: int
    block_size: int

    def row_ids(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Flat row ids int64 of row `offsets` (0..block_size-1) of this layer's page in `blocks` (any int dtype).

        Example: rows_per_block 8, row_offset 4: block 3, row 2 -> 30.
        """
        return blocks.to(torch.int64) * self.rows_per_block + self.row_offset + offsets

    def page(self, block: int) -> Tensor:
        """[block_size, row_elems] view of this layer's page in one block."""
        first = int(block) * self.rows_per_block + self.row_offset
        return self.rows[first : first + self.block_size]


class DeviceCache:
    """The packed allocation `[num_blocks, block_bytes]` uint8, 64-byte aligned, and a generation per block.

    Args:
        layout: byte arithmetic of the packed blocks.
        num_blocks: blocks incl. the null block 0.
        device: torch device.
        poison: fill everything with NaN, so that a read of an unwritten row, or of the null block, shows up in results.
            False leaves the memory untouched (pages of it may not even exist yet).

    Attributes:
        bytes: uint8 [num_blocks, block_bytes].
        rows: storage dtype of the row format, [num_blocks * rows_per_block, row_elems], the same memory; indexed by flat
            row ids (int64).
        generations: numpy uint64 [num_blocks], written by HiSparseWorker (or whoever applies NewBlocks), read by peers.
        address: of the first byte. nbytes: of the allocation.

    Raises:
        ConfigError: fewer than two blocks.
    """

    def __init__(self, layout: KVCacheLayout, num_blocks: int, device: str = "cpu", *, poison: bool = True) -> None:
        if num_blocks < 2:
            raise ConfigError(f"device_blocks must be at least 2 (one is the null block), got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.poison = poison
        self.nbytes = layout.device_bytes(num_blocks)
        backing = torch.empty(self.nbytes + ALIGN_BYTES, dtype=torch.uint8, device=self.device)
        shift = -backing.data_ptr() % ALIGN_BYTES
        flat = backing[shift : shift + self.nbytes]
        if self.device.type == "cpu":
            host_memory.use_large_pages(flat.data_ptr(), self.nbytes)
        if poison:
            flat.fill_(POISON_BYTE)
        self.bytes = flat.view(num_blocks, layout.block_bytes)
        self.rows = flat.view(getattr(torch, layout.row.dtype)).view(-1, layout.row.row_elems)
        self._indexer = flat.view(getattr(torch, layout.indexer_dtype)).view(num_blocks, -1)
        self.generations = np.zeros(num_blocks, dtype=np.uint64)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def view(self, layer: int) -> PagedCacheView:
        """The binding of `layer` to its rows."""
        layout = self.layout
        return PagedCacheView(
            rows=self.rows,
            layer=layer,
            row_offset=layout.layer_row_offset[layer],
            rows_per_block=layout.rows_per_block,
            block_size=layout.block_size,
        )

    def indexer_keys(self, i: int) -> Tensor:
        """Keys of the i-th indexer layer: [num_blocks, block_size, indexer_row_elems], a strided view."""
        size, dim = self.layout.block_size, self.layout.indexer_row_elems
        row_stride = self._indexer.stride(0)
        return self._indexer.as_strided(
            (self.num_blocks, size, dim), (row_stride, dim, 1), self._indexer.storage_offset() + i * size * dim
        )

    def poison_blocks(self, blocks: Tensor | list[int]) -> None:
        """Fills whole blocks with NaN (no rows are lost that anybody may read; a debugging aid).

        Args:
            blocks: ids, int64 [m] on the cache's device; a list is uploaded, which waits on CUDA.
        """
        index = blocks if isinstance(blocks, Tensor) else torch.tensor(blocks, dtype=torch.int64, device=self.device)
        self.bytes.index_fill_(0, index, POISON_BYTE)

    def store_generations(self, ids: tuple[int, ...], generations: tuple[int, ...]) -> None:
        """Stores the generation that each block has from now on, before anything writes to it."""
        if ids:
            self.generations[np.asarray(ids, dtype=np.int64)] = np.asarray(generations, dtype=np.uint64)

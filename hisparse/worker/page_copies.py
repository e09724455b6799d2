"""Whole pages from one place to another: spills, restores, copy-on-write. All are the same operation on flat rows.

The host pool's body is one tensor of rows, layer by layer, and so is the packed allocation: a page of one layer is `block_size`
consecutive rows in either, and one launch moves any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from hisparse import ops
from hisparse.layout import KVCacheLayout
from hisparse.types import PageCopy, PageRestore, SparseKVPageTransfer
from hisparse.worker.copy_queue import CopyQueue
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool
from hisparse.worker.staging import Array, PinnedRing
from hisparse.worker.stream_copies import Finish, StreamCopies
from hisparse.worker.streams import Mark, Place, Streams


class PageCopies:
    """Copies of one rank. For the step's thread, except where CopyQueue's thread copies spills on the CPU.

    Args:
        hook, name: of the queue, see CopyQueue.
    Attributes:
        queue: of the spills: a thread on the CPU, batches on the DMA stream on CUDA.
    """

    def __init__(self, layout: KVCacheLayout, *, cache: DeviceCache, host: HostPool, streams: Streams, staging: PinnedRing,
                 hook: Callable[[int], None] | None, name: str) -> None:
        self._layout = layout
        self._cache, self._host = cache, host
        self._streams, self._staging = streams, staging
        self._ops = ops.backend(cache.device)
        self._layer_group = np.array(layout.layer_group, dtype=np.int64)
        self._layer_row_offset = np.array(layout.layer_row_offset, dtype=np.int64)
        self._host_layer_row = np.arange(layout.shape.num_layers, dtype=np.int64) * host.num_blocks * layout.block_size
        self._full = -1 if layout.block_size == 64 else host.full_mask
        self.queue: CopyQueue | StreamCopies = (
            StreamCopies(streams, hook=hook) if streams.is_cuda else CopyQueue(name=name, hook=hook)
        )

    # ---- before the step's first kernel
    def hand_out(self, ids: tuple[int, ...]) -> None:
        """Clears the device's row masks of host pages. Stream: compute."""
        if ids and self._host.is_pinned:
            (pages,) = self._staging.upload(np.array(ids, dtype=np.int64))
            self._host.device_masks.index_fill_(0, pages, 0)

    def restore(self, restores: Sequence[PageRestore]) -> int:
        """Host pages to device blocks, pages of equal length together; returns the rows copied. Stream: compute."""
        rows = 0
        for num_rows in sorted({restore.num_rows for restore in restores}):
            alike = [restore for restore in restores if restore.num_rows == num_rows]
            to = self._device_first(np.array([restore.device_blocks for restore in alike], dtype=np.int64))
            source = self._host_first(np.array([restore.host_block for restore in alike], dtype=np.int64))
            first_to, first_source = self._staging.upload(to, source)
            self._ops.copy_pages(self._cache.rows, first_to, self._host.device_body, first_source, num_rows)
            rows += len(alike) * num_rows * self._layout.shape.num_layers
        return rows

    def copy(self, copies: Sequence[PageCopy], *, host_too: bool) -> None:
        """Copy-on-write: whole device blocks, and rows of host pages with their mask bits. Stream: compute.

        Args:
            host_too: this rank writes the host pool.
        """
        for pairs in _independent([pair for copy in copies for pair in copy.device_pairs]):
            per_block = self._layout.rows_per_block
            source, to = self._staging.upload(pairs[:, 0] * per_block, pairs[:, 1] * per_block)
            self._ops.copy_pages(self._cache.rows, to, self._cache.rows, source, per_block)
        if host_too:
            for copy in copies:
                if copy.host_pair is not None:
                    self._copy_host_rows(*copy.host_pair, copy.num_rows)

    # ---- spills
    def spill(self, spills: Sequence[SparseKVPageTransfer], behind: Mark) -> None:
        """Queues device pages to host pages, behind `behind`. Never waits; outcomes come from `queue.take_done`."""
        if isinstance(self.queue, StreamCopies):
            if spills:
                ids = [spill.id for spill in spills]
                self.queue.submit(ids, lambda kept: self._launch_spills([spills[i] for i in kept]), behind)
            return
        for spill in spills:
            self.queue.submit(spill.id, lambda spill=spill: self._launch_spills([spill])()[0])  # type: ignore[misc]

    def _launch_spills(self, spills: Sequence[SparseKVPageTransfer]) -> Finish:
        """Copies the bytes that are asked for, and reads the pages' masks, on the current stream."""
        moved = [spill for spill in spills if spill.copy_bytes]
        pages = np.array([spill.host_block for spill in spills], dtype=np.int64)
        moved_pages = np.array([spill.host_block for spill in moved], dtype=np.int64)
        blocks = np.array([spill.device_blocks for spill in moved], dtype=np.int64)
        to = self._host_first(moved_pages)
        source = self._device_first(blocks.reshape(-1, self._layout.num_resident_groups))
        at_pages, at_moved, first_to, first_source = self._staging.upload(pages, moved_pages, to, source, place=Place.DMA)
        masks = self._host.device_masks
        if moved:
            self._ops.copy_pages(self._host.device_body, first_to, self._cache.rows, first_source, self._layout.block_size)
            masks.index_fill_(0, at_moved, self._full)
        found = masks.index_select(0, at_pages)
        if self._streams.is_cuda:
            found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
        return lambda: self._finish_spills(pages, found.numpy())

    def _finish_spills(self, pages: Array, found: Array) -> list[int]:
        """The copies are done: what the CPU knows of the pages' masks becomes what the device found."""
        masks = self._host.row_masks
        if self._host.is_pinned:
            masks[pages] |= found.view(np.uint64)
        return [int(mask) for mask in masks[pages]]

    # ---- flat rows; layers outermost, so that a copy works within one layer's part of the host pool at a time
    def _device_first(self, blocks: Array) -> Array:
        """int64 [num_layers * n]: first flat row of each page in each layer; blocks int64 [n, num resident groups]."""
        first: Array = blocks.T[self._layer_group] * self._layout.rows_per_block + self._layer_row_offset[:, None]
        return first.reshape(-1)

    def _host_first(self, pages: Array) -> Array:
        """int64 [num_layers * n]: first row of each page in each layer of the host pool's body."""
        return (pages * self._layout.block_size + self._host_layer_row[:, None]).reshape(-1)

    def _copy_host_rows(self, source: int, target: int, num_rows: int) -> None:
        first_source, first_to = (self._host_first(np.array([page], dtype=np.int64)) for page in (source, target))
        body = self._host.device_body
        at_source, at_to = self._staging.upload(first_source, first_to)
        self._ops.copy_pages(body, at_to, body, at_source, num_rows)
        kept = (1 << num_rows) - 1
        self._host.row_masks[target] |= self._host.row_masks[source] & np.uint64(kept)
        if self._host.is_pinned:
            masks = self._host.device_masks
            masks[target : target + 1].bitwise_or_(masks[source : source + 1] & (kept if num_rows < 64 else -1))


def _independent(pairs: Sequence[tuple[int, int]]) -> Iterator[Array]:
    """Runs of (source, target) int64 [m, 2], in order, in none of which a block is a target and something else besides."""
    run: list[tuple[int, int]] = []
    targets: set[int] = set()
    sources: set[int] = set()
    for source, target in pairs:
        if source in targets or target in targets or target in sources:
            yield np.array(run, dtype=np.int64)
            run, targets, sources = [], set(), set()
        run.append((source, target))
        sources.add(source)
        targets.add(target)
    if run:
        yield np.array(run, dtype=np.int64)

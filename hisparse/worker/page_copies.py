"""Whole pages from one place to another: spills, restores, copy-on-write, as lists for the backend's PageCopier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hisparse.layout import KVCacheLayout
from hisparse.ops.page_list import page_list, pair_list
from hisparse.types import PageCopy, PageRestore, SparseKVPageTransfer
from hisparse.worker.copy_queue import CopyQueue
from hisparse.worker.host_pool import HostPool
from hisparse.worker.staging import Array, PinnedRing
from hisparse.worker.stream_copies import Finish, StreamCopies
from hisparse.worker.streams import Mark, Place, Streams


class PageCopies:
    """Copies of one rank. For the step's thread, except where CopyQueue's thread copies spills on the CPU.

    Args:
        copier: the backend's PageCopier over the rank's device cache and this host pool.
        hook, name: of the queue, see CopyQueue.
    Attributes:
        queue: of the spills: a thread on the CPU, batches on the DMA stream on CUDA.
    """

    def __init__(self, layout: KVCacheLayout, *, copier: Any, host: HostPool, streams: Streams, staging: PinnedRing,
                 hook: Callable[[int], None] | None, name: str) -> None:
        self._layout = layout
        self._copier, self._host = copier, host
        self._streams, self._staging = streams, staging
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
        """Host pages to device blocks; returns the rows copied. Stream: compute."""
        if not restores:
            return 0
        num_rows = [restore.num_rows for restore in restores]
        self._copier.restore(page_list([r.host_block for r in restores], [r.device_blocks for r in restores], num_rows))
        return sum(num_rows) * self._layout.shape.num_layers

    def copy(self, copies: Sequence[PageCopy], *, host_too: bool) -> None:
        """Copy-on-write: whole device blocks, and rows of host pages with their mask bits. Stream: compute.

        Args:
            host_too: this rank writes the host pool.
        """
        for pairs in _independent([pair for copy in copies for pair in copy.device_pairs]):
            self._copier.copy_blocks(pair_list(pairs, self._layout.block_size))
        if host_too:
            for copy in copies:
                if copy.host_pair is not None:
                    self._copy_host_page(*copy.host_pair, copy.num_rows)

    def close(self, timeout_s: float) -> None:
        """Runs what is queued, ends the queue, and lets go of the host pool's memory. Raises TransferError when late."""
        self.queue.close(timeout_s)
        self._copier = None

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
        moved_pages = [spill.host_block for spill in moved]
        if moved:
            self._copier.spill(page_list(moved_pages, [spill.device_blocks for spill in moved], self._layout.block_size))
        at_pages, at_moved = self._staging.upload(pages, np.array(moved_pages, dtype=np.int64), place=Place.DMA)
        masks = self._host.device_masks
        if moved:
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

    def _copy_host_page(self, source: int, target: int, num_rows: int) -> None:
        self._copier.copy_host_pages(pair_list([(source, target)], num_rows))
        kept = (1 << num_rows) - 1
        self._host.row_masks[target] |= self._host.row_masks[source] & np.uint64(kept)
        if self._host.is_pinned:
            masks = self._host.device_masks
            masks[target : target + 1].bitwise_or_(masks[source : source + 1] & (kept if num_rows < 64 else -1))


def _independent(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Runs of (source, target), in order, in none of which a block is a target and something else besides."""
    run: list[tuple[int, int]] = []
    targets: set[int] = set()
    sources: set[int] = set()
    for source, target in pairs:
        if source in targets or target in targets or target in sources:
            yield run
            run, targets, sources = [], set(), set()
        run.append((source, target))
        sources.add(source)
        targets.add(target)
    if run:
        yield run

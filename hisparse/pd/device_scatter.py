"""Copies out of staging on CUDA: one launch moves a slot's pages to the registered host pool and to resident blocks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hisparse import ops
from hisparse.errors import InvariantError
from hisparse.ops.page_list import page_list
from hisparse.ops.reference.pages import staged_page
from hisparse.pd.commands import ImportPlan
from hisparse.pd.descriptors import mirrored
from hisparse.pd.memory import LocalMemory
from hisparse.pd.pages import Ids
from hisparse.pd.scatter import set_row_masks
from hisparse.pd.staging import SlotPool


class DeviceScatter:
    """SlotCopies through the rank's operations, for a packed allocation on a GPU. Every copy is a launch on the current stream.

    Slots are on the device (pages from a peer's GPU) or registered CPU memory (pages from a peer's host pool).
    """

    def __init__(self, memory: LocalMemory, slot_pages: int) -> None:
        self._memory, self._layout, self._slot_pages = memory, memory.layout, slot_pages
        self._ops = ops.backend(memory.cache.device)
        rows = memory.cache.rows
        layers = range(memory.layout.shape.num_layers)
        host_rows = [memory.pool.device_rows(layer) for layer in layers] if memory.pool is not None else []
        self._copier = self._ops.PageCopier(memory.layout, rows, host_rows)
        self._groups = np.array(memory.layout.layer_group, dtype=np.int64)
        self._row_offset = np.array(memory.layout.layer_row_offset, dtype=np.int64)
        self._load_kernels(rows)

    def from_slot(self, plan: ImportPlan, pages: Ids, pool: SlotPool, slot: int, *, layered: bool, to_host: bool) -> None:
        if pool.tensor is None:
            raise InvariantError(f"import {plan.job_id}: a staging slot that no kernel can read")
        target, staged = plan.destination, pool.tensor[slot]
        blocks = target.resident[:, pages]
        if to_host:
            listed = page_list(target.host[pages].tolist(), blocks.T, self._layout.block_size)
            self._copier.scatter(staged, listed, layered=layered, slot_pages=self._slot_pages)
            return
        places = np.flatnonzero(mirrored(target)[pages])
        if places.size:
            rows = self._memory.cache.rows
            source = staged.view(rows.dtype).view(-1, rows.shape[1])
            self._copy_runs(rows, self._resident_first(blocks[:, places]), source, self._staged_first(places, layered))

    def mirror_from_host(self, plan: ImportPlan) -> None:
        target = plan.destination
        pages = np.flatnonzero(mirrored(target))
        if pages.size:
            self._copier.restore(page_list(target.host[pages].tolist(), target.resident[:, pages].T, self._layout.block_size))

    def set_row_masks(self, plan: ImportPlan) -> None:
        set_row_masks(self._memory, plan)

    # ---- first rows of pages, layer by layer
    def _resident_first(self, blocks: Ids) -> Ids:
        """int64 [layers * n] of resident pages; blocks int64 [groups, n]."""
        first: Ids = blocks[self._groups] * self._layout.rows_per_block + self._row_offset[:, None]
        return first.reshape(-1)

    def _staged_first(self, places: Ids, layered: bool) -> Ids:
        """int64 [layers * n] of the pages at `places` of a slot."""
        layers = range(self._layout.shape.num_layers)
        offset, stride = np.array([staged_page(self._layout, layer, self._slot_pages, layered) for layer in layers]).T
        first: Ids = (offset[:, None] + stride[:, None] * places) // self._layout.row.row_bytes
        return first.reshape(-1)

    def _copy_runs(self, to: Tensor, to_first: Ids, source: Tensor, source_first: Ids) -> None:
        at_to, at_source = (_upload(first, to.device) for first in (to_first, source_first))
        self._ops.copy_pages(to, at_to, source, at_source, self._layout.block_size)

    def _load_kernels(self, rows: Tensor) -> None:
        """The first launch of a kernel waits for the whole device, so each is launched once now; no page is touched."""
        if self._memory.pool is not None:
            self._copier.restore(page_list([1], [[1] * self._layout.num_resident_groups], 0))
        size = self._layout.block_size
        spare = torch.zeros((2 * size, rows.shape[1]), dtype=rows.dtype, device=rows.device)
        self._copy_runs(spare, np.full(1, size, np.int64), spare, np.zeros(1, np.int64))


def _upload(first: Ids, device: torch.device) -> Tensor:
    """From pinned memory, which torch's allocator keeps until the stream has read it."""
    if device.type == "cpu":
        return torch.from_numpy(first)
    pinned = torch.empty(first.shape, dtype=torch.int64, pin_memory=True)
    pinned.numpy()[...] = first
    return pinned.to(device, non_blocking=True)

"""Copies out of staging on CUDA: one launch moves a slot's pages to the registered host pool and to resident blocks."""

from __future__ import annotations

import numpy as np

from hisparse import ops
from hisparse.errors import InvariantError
from hisparse.ops.page_list import page_list
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
        self._copier.prepare_scatter(slot_pages)  # a GPU that is full later must not end the transfer thread

    def from_slot(self, plan: ImportPlan, pages: Ids, pool: SlotPool, slot: int, *, layered: bool, to_host: bool) -> None:
        if pool.tensor is None:
            raise InvariantError(f"import {plan.job_id}: a staging slot that no kernel can read")
        target = plan.destination
        host = target.host[pages] if to_host else np.zeros(len(pages), dtype=np.int32)
        listed = page_list(host.tolist(), target.resident[:, pages].T, self._layout.block_size)
        self._copier.scatter(pool.tensor[slot], listed, layered=layered, slot_pages=self._slot_pages)

    def mirror_from_host(self, plan: ImportPlan) -> None:
        target = plan.destination
        pages = np.flatnonzero(mirrored(target))
        if pages.size:
            self._copier.restore(page_list(target.host[pages].tolist(), target.resident[:, pages].T, self._layout.block_size))

    def set_row_masks(self, plan: ImportPlan) -> None:
        set_row_masks(self._memory, plan)

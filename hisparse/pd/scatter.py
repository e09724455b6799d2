"""Copies out of staging: rows to host pages of every layer, and pages needed at once to their resident blocks."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from hisparse.pd.commands import ImportPlan
from hisparse.pd.descriptors import mirrored
from hisparse.pd.memory import LocalMemory
from hisparse.pd.pages import Ids
from hisparse.pd.staging import SlotPool

Bytes = npt.NDArray[np.uint8]


class SlotCopies(Protocol):
    """Copies of one rank. Order of a staged slot, by the kind of source its pages came from:

    layered: `[layer][slot_pages][layer_page_bytes]`, from a host pool, whose pages lie layer by layer;
    grouped: `[group][slot_pages][block_bytes]`, whole blocks, from resident blocks.
    """

    def from_slot(self, plan: ImportPlan, pages: Ids, pool: SlotPool, slot: int, *, layered: bool, to_host: bool) -> None:
        """Copies staged pages (indices into the plan) to resident blocks where the plan names them, and to host pages.

        Args:
            to_host: False leaves the host pages out.
        Mutates: host pages, resident blocks; no row mask. Stream: the current one; returns at once on CUDA.
        """

    def mirror_from_host(self, plan: ImportPlan) -> None:
        """For pages that were read straight into host pages: fills the resident blocks that the plan names.

        Stream: as above.
        """

    def set_row_masks(self, plan: ImportPlan) -> None:
        """Says which rows of the imported host pages hold KV: all, in the last page its first `tail_rows`."""


def make_scatter(memory: LocalMemory, slot_pages: int) -> SlotCopies:
    """The copies for wherever the packed allocation lies."""
    if memory.on_cuda:
        from hisparse.pd.device_scatter import DeviceScatter

        return DeviceScatter(memory, slot_pages)
    return Scatter(memory, slot_pages)


def set_row_masks(memory: LocalMemory, plan: ImportPlan) -> None:
    """See SlotCopies. In the CPU's array on either device: a page's mask is what the CPU knows and what the device knows."""
    masks, block_size = memory.row_masks, memory.layout.block_size
    assert masks is not None
    masks[plan.destination.host] = np.uint64((1 << block_size) - 1)
    masks[plan.destination.host[-1]] = np.uint64((1 << plan.tail_rows) - 1)


class Scatter:
    """SlotCopies where everything is CPU memory."""

    def __init__(self, memory: LocalMemory, slot_pages: int) -> None:
        self._memory, self._layout, self._slot_pages = memory, memory.layout, slot_pages
        self._starts = [memory.layout.layer_byte_offset(layer) for layer in range(memory.layout.shape.num_layers)]

    def from_slot(self, plan: ImportPlan, pages: Ids, pool: SlotPool, slot: int, *, layered: bool, to_host: bool) -> None:
        layout, memory, target = self._layout, self._memory, plan.destination
        size, count = layout.layer_page_bytes, pages.size
        hosts = target.host[pages]
        mirrors = np.flatnonzero(mirrored(target, pages))
        staged = pool.memory[slot]
        by_layer = staged[: self._slot_pages * layout.host_block_bytes].reshape(-1, self._slot_pages, size)
        by_group = staged.reshape(-1, self._slot_pages, layout.block_bytes)
        for layer, g in enumerate(layout.layer_group):
            start = self._starts[layer]
            rows = by_layer[layer, :count] if layered else by_group[g, :count, start : start + size]
            if to_host:
                assert memory.host is not None
                memory.host[layer, hosts] = rows
            if mirrors.size:
                self._to_resident(layer, target.resident[g, pages[mirrors]], rows[mirrors])

    def mirror_from_host(self, plan: ImportPlan) -> None:
        assert self._memory.host is not None
        target = plan.destination
        pages = np.flatnonzero(mirrored(target))
        if pages.size:
            for layer, g in enumerate(self._layout.layer_group):
                self._to_resident(layer, target.resident[g, pages], self._memory.host[layer, target.host[pages]])

    def set_row_masks(self, plan: ImportPlan) -> None:
        set_row_masks(self._memory, plan)

    def _to_resident(self, layer: int, blocks: Ids, rows: Bytes) -> None:
        start = self._starts[layer]
        self._memory.device[blocks, start : start + self._layout.layer_page_bytes] = rows

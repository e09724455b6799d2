"""READ descriptors of an import whose source pages are cut differently: each layer of each unit goes to its own place.

Same surface as `ReadPlanner`. The READs do the regrouping: a staging slot holds target pages layer by layer, whatever
mixture of the peer's resident blocks and host pages they came from, so the copies out of it need not know.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import ImportPlan
from hisparse.pd.descriptors import ReadPlanner, from_resident, merge
from hisparse.pd.endpoint import HOST, INDEXER, RankEndpoint, Region, resident_region
from hisparse.pd.pages import Ids
from hisparse.pd.paging import PeerLayouts, Units
from hisparse.pd.transport import Descriptors


class RepagingPlanner:
    """Descriptors of one import on one rank. Args: as ReadPlanner's; far_layout: of the peer."""

    def __init__(self, layout: KVCacheLayout, plan: ImportPlan, source: RankEndpoint, own: dict[str, Region],
                 far_layout: KVCacheLayout) -> None:
        self._layout, self._far_layout = layout, far_layout
        self._plan = plan
        self._far = {region.name: region for region in source.regions}
        self._own = own
        self._resident = from_resident(plan.source)
        self._units = plan.units(layout.block_size)

    def indexer(self) -> Descriptors:
        """Every unit's indexer keys, into own indexer blocks."""
        units, row = self._units, self._layout.indexer_row_bytes
        far = self._far[INDEXER].page_addresses(self._plan.source.indexer[units.source]) + units.source_row * row
        near = self._own[INDEXER].page_addresses(self._plan.destination.indexer[units.target]) + units.target_row * row
        return merge((far + i * self._far_layout.block_size * row, near + i * self._layout.block_size * row, units.size * row)
                     for i in range(len(self._layout.indexer.layers)))

    def to_resident(self, pages: Ids) -> Descriptors:
        """Target pages (indices) straight into own resident blocks of every group."""
        layout, blocks = self._layout, self._plan.destination.resident
        parts = []
        for layer, units, far, size in self._layers(pages):
            g = layout.layer_group[layer]
            near = self._own[resident_region(g)].page_addresses(blocks[g, units.target]) + layout.layer_byte_offset(layer)
            parts.append((far, near + self._rows(units), size))
        return merge(parts)

    def to_host(self, pages: Ids) -> Descriptors:
        """Target pages (indices) straight into own host pages, layer by layer."""
        near = self._own[HOST]
        return merge((far, near.page_addresses(self._plan.destination.host[units.target], layer) + self._rows(units), size)
                     for layer, units, far, size in self._layers(pages))

    def to_slot(self, pages: Ids, address: int, slot_pages: int) -> Descriptors:
        """Target pages (indices) into a staging slot at `address`, in the slot's layered order."""
        place = np.zeros(self._plan.destination.num_pages, dtype=np.int64)
        place[pages] = np.arange(pages.size)
        size = self._layout.layer_page_bytes
        return merge((far, address + (layer * slot_pages + place[units.target]) * size + self._rows(units), length)
                     for layer, units, far, length in self._layers(pages))

    def slot_chunks(self, pages: Ids, slot_pages: int) -> list[Ids]:
        """Cuts target pages (indices) into lists of at most `slot_pages`."""
        return [pages[i : i + slot_pages] for i in range(0, pages.size, slot_pages)]

    def resident(self, pages: Ids) -> npt.NDArray[np.bool_]:
        """None: staged pages are in layered order, whatever they came from."""
        return np.zeros(pages.size, dtype=np.bool_)

    def _rows(self, units: Units) -> Ids:
        """Byte offset of each unit in a layer's page of the target."""
        return units.target_row * self._layout.row.row_bytes

    def _layers(self, pages: Ids) -> Iterator[tuple[int, Units, Ids, int]]:
        """(layer, units of the target pages, their remote addresses of that layer, bytes of one), for both kinds of source."""
        layout, source, row = self._far_layout, self._plan.source, self._layout.row.row_bytes
        units = self._units.on(pages)
        held = self._resident[units.source]
        gpu, cpu = units.where(held), units.where(~held)
        for layer, g in enumerate(layout.layer_group):
            if gpu.source.size:
                far = self._far[resident_region(g)].page_addresses(source.resident[g, gpu.source])
                yield layer, gpu, far + layout.layer_byte_offset(layer) + gpu.source_row * row, units.size * row
            if cpu.source.size:
                far = self._far[HOST].page_addresses(source.host[cpu.source], layer)
                yield layer, cpu, far + cpu.source_row * row, units.size * row


class ReadPlanners:
    """Makes the planner of each import of one rank: page to page where both sides cut alike, unit by unit where not.

    Args:
        layout: of this side. own: this rank's regions by name. bridge_bytes: see ReadPlanner.
    """

    def __init__(self, layout: KVCacheLayout, own: dict[str, Region], *, bridge_bytes: int = 0) -> None:
        self._layout, self._own, self._peers = layout, own, PeerLayouts(layout)
        self._bridge_bytes = bridge_bytes

    def make(self, plan: ImportPlan, source: RankEndpoint) -> ReadPlanner | RepagingPlanner:
        """Raises ProtocolError for a paging that the scheduler half had to refuse."""
        far = self._peers.of(plan.source_paging)
        if far is self._layout:
            return ReadPlanner(self._layout, plan, source, self._own, bridge_bytes=self._bridge_bytes)
        return RepagingPlanner(self._layout, plan, source, self._own, far)

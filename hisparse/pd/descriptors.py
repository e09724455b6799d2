"""From page tables to READ descriptors: which bytes of a peer go where, sorted by source address, neighbours merged.

A source page is read from P's resident blocks when P holds it resident in every group, else from P's host pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import ImportPlan
from hisparse.pd.endpoint import HOST, INDEXER, RankEndpoint, Region, resident_region
from hisparse.pd.pages import Ids, PageTable
from hisparse.pd.transport import Descriptors

MAX_READ_BYTES = 32 << 20
MAX_READ_DESCRIPTORS = 2048
"""One READ stays below both (unless a single descriptor is larger): posting a READ may block for its copy."""


def from_resident(table: PageTable) -> npt.NDArray[np.bool_]:
    """[pages] True where the source is the peer's resident blocks, False where it is its host pool."""
    if not table.resident.shape[0]:
        return np.zeros(table.num_pages, dtype=np.bool_)
    return np.asarray((table.resident != 0).all(axis=0))


def mirrored(table: PageTable) -> npt.NDArray[np.bool_]:
    """[pages] True where a destination has resident blocks."""
    return from_resident(table)


def merge(parts: Iterable[tuple[Ids, Ids, int]]) -> Descriptors:
    """Joins (remote addresses [n], local addresses [n], bytes each), sorts by remote address, merges true neighbours.

    Returns: int64 [m, 3], remote address, local address, bytes.
    Example: (100, 8, 4) and (104, 12, 4) become (100, 8, 8); (104, 20, 4) would stay apart.
    """
    blocks = [np.stack([far, near, np.full(far.shape, size, np.int64)], axis=1)
              for far, near, size in parts if far.size]
    if not blocks:
        return np.zeros((0, 3), dtype=np.int64)
    table = np.concatenate(blocks)
    table = table[np.argsort(table[:, 0], kind="stable")]
    ends = table[:, :2] + table[:, 2:]
    starts = np.flatnonzero(np.concatenate(([True], (ends[:-1] != table[1:, :2]).any(axis=1))))
    merged = table[starts].copy()
    merged[:, 2] = np.add.reduceat(table[:, 2], starts)
    return merged


def split(descriptors: Descriptors) -> Iterator[Descriptors]:
    """Cuts a list into READs of bounded bytes and descriptors, in order."""
    first, total = 0, 0
    for i, size in enumerate(descriptors[:, 2].tolist()):
        if i > first and (total + size > MAX_READ_BYTES or i - first == MAX_READ_DESCRIPTORS):
            yield descriptors[first:i]
            first, total = i, 0
        total += size
    if first < len(descriptors):
        yield descriptors[first:]


class ReadPlanner:
    """Descriptors of one import on one rank.

    Args:
        source: the prefill rank read from. own: this rank's regions by name.
    """

    def __init__(self, layout: KVCacheLayout, plan: ImportPlan, source: RankEndpoint, own: dict[str, Region]) -> None:
        self._layout = layout
        self._plan = plan
        self._far = {region.name: region for region in source.regions}
        self._own = own
        self._resident = from_resident(plan.source)

    def indexer(self) -> Descriptors:
        """Every page's indexer keys, into own indexer blocks."""
        far, near = self._far[INDEXER], self._own[INDEXER]
        return merge([(far.page_addresses(self._plan.source.indexer),
                       near.page_addresses(self._plan.destination.indexer), near.page_bytes)])

    def to_resident(self, pages: Ids) -> Descriptors:
        """Pages (indices) straight into own resident blocks of every group."""
        layout, source, target = self._layout, self._plan.source, self._plan.destination
        gpu, cpu = pages[self._resident[pages]], pages[~self._resident[pages]]
        parts = []
        for g in range(layout.num_resident_groups):
            name = resident_region(g)
            far, near = self._far[name], self._own[name]
            parts.append((far.page_addresses(source.resident[g, gpu]), near.page_addresses(target.resident[g, gpu]),
                          near.page_bytes))
        if cpu.size:
            for layer, g in enumerate(layout.layer_group):
                near = self._own[resident_region(g)]
                parts.append((self._far[HOST].page_addresses(source.host[cpu], layer),
                              near.page_addresses(target.resident[g, cpu]) + layout.layer_byte_offset(layer),
                              layout.layer_page_bytes))
        return merge(parts)

    def to_host(self, pages: Ids) -> Descriptors:
        """Pages (indices) straight into own host pages, layer by layer."""
        near = self._own[HOST]
        return merge((far, near.page_addresses(self._plan.destination.host[group], layer), near.page_bytes)
                     for layer, group, far in self._layers(pages))

    def to_slot(self, pages: Ids, address: int, slot_pages: int) -> Descriptors:
        """Pages (indices, all of one kind of source) into a staging slot at `address`; see `SlotView` for its order."""
        layout = self._layout
        place = np.arange(pages.size, dtype=np.int64)
        if pages.size and self._resident[pages[0]]:
            parts = []
            for g, offset in enumerate(group_offsets(layout)):
                far = self._far[resident_region(g)]
                parts.append((far.page_addresses(self._plan.source.resident[g, pages]),
                              address + offset + place * layout.host_block_bytes, layout.resident_page_bytes(g)))
            return merge(parts)
        size = layout.layer_page_bytes
        return merge((far, address + (layer * slot_pages + place) * size, size)
                     for layer, _, far in self._layers(pages))

    def slot_chunks(self, pages: Ids, slot_pages: int) -> list[Ids]:
        """Cuts pages (indices) into lists of at most `slot_pages`, each of one kind of source."""
        kinds = self._resident[pages]
        return [kind[i : i + slot_pages]
                for kind in (pages[kinds], pages[~kinds]) for i in range(0, kind.size, slot_pages)]

    def is_resident(self, page: int) -> bool:
        """The page is read from the peer's resident blocks."""
        return bool(self._resident[page])

    def _layers(self, pages: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """(layer, pages, their remote addresses of that layer), for both kinds of source."""
        layout, source = self._layout, self._plan.source
        gpu, cpu = pages[self._resident[pages]], pages[~self._resident[pages]]
        for layer, g in enumerate(layout.layer_group):
            if gpu.size:
                far = self._far[resident_region(g)].page_addresses(source.resident[g, gpu])
                yield layer, gpu, far + layout.layer_byte_offset(layer)
            if cpu.size:
                yield layer, cpu, self._far[HOST].page_addresses(source.host[cpu], layer)


def group_offsets(layout: KVCacheLayout) -> list[int]:
    """Byte offset of each resident group's page in a staged page that came from resident blocks."""
    sizes = [layout.resident_page_bytes(g) for g in range(layout.num_resident_groups)]
    return [sum(sizes[:g]) for g in range(len(sizes))]

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
from hisparse.pd.transport import Descriptors, FarMemory

MAX_READ_BYTES = 32 << 20
MAX_READ_DESCRIPTORS = 2048
"""One READ stays below both (unless a single descriptor is larger): posting a READ may block for its copy."""


def from_resident(table: PageTable, pages: Ids | None = None) -> npt.NDArray[np.bool_]:
    """True where the source is the peer's resident blocks, False where it is its host pool; of all pages, or of those named
    (indices)."""
    resident = table.resident if pages is None else table.resident[:, pages]
    if not resident.shape[0]:
        return np.zeros(resident.shape[1], dtype=np.bool_)
    return np.asarray((resident != 0).all(axis=0))


def mirrored(table: PageTable, pages: Ids | None = None) -> npt.NDArray[np.bool_]:
    """True where a destination has resident blocks; of all pages, or of those named (indices)."""
    return from_resident(table, pages)


Part = tuple[Ids, Ids, int] | tuple[Ids, Ids, int, int]


def merge(parts: Iterable[Part]) -> Descriptors:
    """Joins (remote addresses [n], local addresses [n], bytes each), sorts by remote address, merges true neighbours.

    A fourth number says how many bytes behind a piece belong to it on both sides, without content: pieces with just that
    between them are merged, too.
    Returns: int64 [m, 3], remote address, local address, bytes.
    Example: (100, 8, 4) and (104, 12, 4) become (100, 8, 8); (104, 20, 4) would stay apart. (100, 8, 4, 2) and (106, 14, 4, 2)
    become (100, 8, 10).
    """
    blocks = [_piece_runs(far, near, size, padding[0] if padding else 0) for far, near, size, *padding in parts if far.size]
    if not blocks:
        return np.zeros((0, 3), dtype=np.int64)
    table = np.concatenate(blocks)
    table = table[np.argsort(table[:, 0], kind="stable")]
    gaps = table[1:, :2] - table[:-1, :2] - table[:-1, 2:3]
    joined = (gaps[:, 0] == gaps[:, 1]) & ((gaps[:, 0] == 0) | (gaps[:, 0] == table[:-1, 3]))
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    ends = np.append(starts[1:], len(table)) - 1
    merged = table[starts, :3].copy()
    merged[:, 2] = table[ends, 0] + table[ends, 2] - merged[:, 0]
    return merged


def _piece_runs(far: Ids, near: Ids, size: int, padding: int) -> npt.NDArray[np.int64]:
    """[runs, 4]: pieces that follow each other on both sides, joined before anything is sorted; their padding behind."""
    step = np.diff(far)
    joined = (step == np.diff(near)) & ((step == size) | (step == size + padding))
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    runs = np.empty((starts.size, 4), dtype=np.int64)
    runs[:, 0], runs[:, 1], runs[:, 3] = far[starts], near[starts], padding
    runs[:, 2] = far[np.append(starts[1:], far.size) - 1] + size - runs[:, 0]
    return runs


def split(descriptors: Descriptors, max_bytes: int | None = None) -> Iterator[Descriptors]:
    """Cuts a list into READs of bounded bytes (default MAX_READ_BYTES) and descriptors, in order."""
    max_bytes = MAX_READ_BYTES if max_bytes is None else max_bytes
    ends = np.cumsum(descriptors[:, 2])
    first = 0
    while first < len(descriptors):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + max_bytes, side="right"))
        last = max(first + 1, min(last, first + MAX_READ_DESCRIPTORS))
        yield descriptors[first:last]
        first = last


def cut(descriptors: Descriptors, max_bytes: int) -> Descriptors:
    """Pieces of at most `max_bytes`, in order; of one descriptor they are of equal length, but for the last.

    Example: (100, 8, 10) cut at 4 is (100, 8, 4), (104, 12, 4), (108, 16, 2).
    """
    counts = -(-descriptors[:, 2] // max_bytes)
    if not (counts > 1).any():
        return descriptors
    which = np.repeat(np.arange(len(descriptors)), counts)
    start = (np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)) * max_bytes
    pieces = descriptors[which]
    pieces[:, :2] += start[:, None]
    pieces[:, 2] = np.minimum(max_bytes, pieces[:, 2] - start)
    return pieces


class ReadPlanner:
    """Descriptors of one import on one rank.

    Args:
        source: the prefill rank read from. own: this rank's regions by name.
        bridge_bytes: padding behind a page is read, too, where that makes one descriptor of two and it is no more than this.
    """

    def __init__(self, layout: KVCacheLayout, plan: ImportPlan, source: RankEndpoint, own: dict[str, Region], *,
                 bridge_bytes: int = 0) -> None:
        self._layout = layout
        self._plan = plan
        self._far = {region.name: region for region in source.regions}
        self._own = own
        self._bridge_bytes = bridge_bytes
        self._resident = from_resident(plan.source)
        self._slots: dict[int, tuple[Ids, Descriptors]] = {}  # first page -> pages of a slot, READs relative to it

    def indexer(self) -> Descriptors:
        """Every page's indexer keys, into own indexer blocks."""
        far, near = self._far[INDEXER], self._own[INDEXER]
        return merge([(far.page_addresses(self._plan.source.indexer),
                       near.page_addresses(self._plan.destination.indexer), near.page_bytes, self._padding(far, near))])

    def to_resident(self, pages: Ids) -> Descriptors:
        """Pages (indices) straight into own resident blocks of every group."""
        layout, source, target = self._layout, self._plan.source, self._plan.destination
        gpu, cpu = pages[self._resident[pages]], pages[~self._resident[pages]]
        parts: list[Part] = []
        for g in range(layout.num_resident_groups):
            name = resident_region(g)
            far, near = self._far[name], self._own[name]
            parts.append((far.page_addresses(source.resident[g, gpu]), near.page_addresses(target.resident[g, gpu]),
                          near.page_bytes, self._padding(far, near)))
        if cpu.size:
            for layer, g in enumerate(layout.layer_group):
                near = self._own[resident_region(g)]
                parts.append((self._far[HOST].page_addresses(source.host[cpu], layer),
                              near.page_addresses(target.resident[g, cpu]) + layout.layer_byte_offset(layer),
                              layout.layer_page_bytes, 0))
        return merge(parts)

    def to_host(self, pages: Ids) -> Descriptors:
        """Pages (indices) straight into own host pages, layer by layer."""
        near = self._own[HOST]
        return merge((far, near.page_addresses(self._plan.destination.host[group], layer), near.page_bytes)
                     for layer, group, far in self._layers(pages))

    def to_slot(self, pages: Ids, address: int, slot_pages: int) -> Descriptors:
        """Pages (indices, one of `slot_chunks`) into a staging slot at `address`; see `SlotCopies` for its order."""
        known = self._slots.get(int(pages[0])) if pages.size else None
        if known is None or known[0] is not pages:
            self._plan_slots([pages], slot_pages)
            known = self._slots[int(pages[0])]
        descriptors = known[1].copy()
        descriptors[:, 1] += address
        return descriptors

    def straight(self, pages: Ids, *, to_host: bool) -> list[Descriptors]:
        """Pages (indices) of one kind of source to their places, without a slot."""
        return [self.to_host(pages) if to_host else self.to_resident(pages)]

    def slot_chunks(self, pages: Ids, slot_pages: int) -> list[Ids]:
        """Cuts pages (indices) into lists of at most `slot_pages`, each of one kind of source, in the order of their source."""
        source, chunks = self._plan.source, []
        for resident in (True, False):
            kind = pages[self._resident[pages] == resident]
            kind = kind[np.argsort(source.resident[0, kind] if resident else source.host[kind], kind="stable")]
            of_kind = [kind[i : i + slot_pages] for i in range(0, kind.size, slot_pages)]
            if of_kind:
                self._plan_slots(of_kind, slot_pages)
            chunks += of_kind
        return chunks

    def _plan_slots(self, chunks: list[Ids], slot_pages: int) -> None:
        """READs of many slots at once, all pages of one kind of source; every slot but the last is full."""
        layout, source, pages = self._layout, self._plan.source, np.concatenate(chunks)
        place = np.arange(pages.size, dtype=np.int64)
        slot = place // slot_pages
        place -= slot * slot_pages
        parts = []  # slot, remote address, place in the slot, bytes
        if self._resident[pages[0]]:
            for g in range(layout.num_resident_groups):
                region = self._far[resident_region(g)]
                far = region.page_addresses(source.resident[g, pages])
                stride, padding = region.page_stride, region.page_stride - region.page_bytes
                merges = padding <= self._bridge_bytes and stride == layout.block_bytes  # the distance of pages in a slot
                first, count = _runs(far, region.page_stride if merges else 0, slot)
                near = (g * slot_pages + place[first]) * layout.block_bytes
                parts.append((slot[first], far[first], near, (count - 1) * region.page_stride + region.page_bytes))
        else:
            region, size = self._far[HOST], layout.layer_page_bytes
            first, count = _runs(region.page_addresses(source.host[pages]), size, slot)
            for layer in range(layout.shape.num_layers):
                near = (layer * slot_pages + place[first]) * size
                parts.append((slot[first], region.page_addresses(source.host[pages[first]], layer), near, count * size))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        table = np.stack(columns[1:], axis=1)[order]
        bounds = np.searchsorted(columns[0][order], np.arange(len(chunks) + 1)).tolist()
        for chunk, begin, end in zip(chunks, bounds, bounds[1:], strict=False):
            self._slots[int(chunk[0])] = chunk, table[begin:end]

    def _padding(self, far: Region, near: Region) -> int:
        """Bytes behind a page of both regions that may be read with it."""
        padding = far.page_stride - far.page_bytes
        return padding if padding == near.page_stride - near.page_bytes and padding <= self._bridge_bytes else 0

    def by_memory(self, pages: Ids) -> list[tuple[FarMemory, Ids]]:
        """Pages (indices) by the memory of the peer that they are read from, none of them empty."""
        kinds = (FarMemory.GPU, pages[self._resident[pages]]), (FarMemory.CPU, pages[~self._resident[pages]])
        return [(memory, held) for memory, held in kinds if held.size]

    def layered(self, memory: FarMemory) -> bool:
        """The order of pages in a slot: layer by layer, else in whole blocks; see `SlotCopies`."""
        return memory is not FarMemory.GPU

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


def _runs(addresses: Ids, stride: int, slot: Ids) -> tuple[Ids, Ids]:
    """Runs of addresses `stride` apart within one slot: index of the first of each, and how many. Stride 0: each alone."""
    apart = (np.diff(addresses) != stride) | (np.diff(slot) != 0) if stride else np.ones(addresses.size - 1, np.bool_)
    first = np.flatnonzero(np.concatenate(([True], apart)))
    return first, np.diff(np.append(first, addresses.size))

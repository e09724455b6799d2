"""Copy-on-write: a child request that starts with the rows of a running one (`n > 1`)."""

from __future__ import annotations

from hisparse.cache.coordinator import HiSparseCoordinator
from hisparse.cache.core import CacheCore
from hisparse.cache.pages import Residency
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import DURABLE, PINNED, PageEvent
from hisparse.types import PageCopy


class Fork:
    """Shares the parent's durable pages and copies the others, so that no row is ever written to a shared page."""

    def __init__(self, core: CacheCore, residency: Residency, coordinator: HiSparseCoordinator) -> None:
        self.core = core
        self.residency = residency
        self.coordinator = coordinator

    def num_shared_pages(self, parent: Incarnation) -> int:
        """The longest run of durable pages from the first one on. A page can be durable before the step that filled it
        retired; rows beyond the valid ones are not the child's."""
        page = 0
        while page < parent.valid // self.core.block_size and parent.states[page] in DURABLE:
            page += 1
        return page

    def room(self, parent: Incarnation) -> bool:
        """Pure: whether the copies, and a hot region if the parent has one, fit now. False also while a page to copy is
        not pinned (a dispatched step of the parent filled it, or a spill before it failed): the copies' own blocks could
        be taken from it. It is shared once that step has retired, or that spill succeeded."""
        core = self.core
        shared, end = self.num_shared_pages(parent), core.layout.pages(parent.valid)
        if core.groups_per_page and not all(state in PINNED for state in parent.states[shared:end]):
            return False
        copies = end - shared
        region = core.hot.region_blocks if parent.has_hot and core.hot is not None else 0
        return (core.available_device() >= copies * (1 + core.groups_per_page) + region
                and core.available_host() >= copies)

    def fill(self, parent: Incarnation, child: Incarnation) -> None:
        """Gives the child every page below the parent's valid rows; the caller checked `room`."""
        core = self.core
        assert core.source is not None
        shared = self.num_shared_pages(parent)
        core.pool.touch(parent.indexer[:shared])
        core.source.pool.touch(parent.host[:shared])
        core.append_pages(child, PageEvent.HOST_HIT, indexer=parent.indexer[:shared], host=parent.host[:shared])
        child.published = min(parent.published, shared)
        child.sealed = child.spill_cursor = child.spill_target = shared
        child.valid = child.planned = parent.valid
        end = core.layout.pages(parent.valid)
        indexer = core.indexer.allocate(end - shared)
        resident = core.residents.allocate(end - shared)
        host = core.source.allocate(child, end - shared)
        assert indexer is not None and resident is not None and host is not None
        core.append_pages(child, PageEvent.FORK, indexer=indexer, host=host)
        for page, blocks in enumerate(resident, shared):
            self.residency.new(child, page, blocks)
            self._copy(parent, child, page)
        if parent.has_hot:
            self.residency.allocate_hot(child)
        for page in range(shared):
            on_gpu = parent.resident.get(page)
            if on_gpu is not None:
                self.residency.share(child, page, on_gpu)

    def _copy(self, parent: Incarnation, child: Incarnation, page: int) -> None:
        """Both ends stay pinned until every rank has reported."""
        core = self.core
        assert core.source is not None
        size = core.block_size
        rows = min(size, parent.valid - page * size)
        pairs = ((parent.indexer[page], child.indexer[page]),
                 *zip(parent.blocks(page), child.blocks(page), strict=True))
        # Host rows of an unsealed page are mirrored as they are written; a sealed one is spilled by the child itself.
        host_pair = (parent.host[page], child.host[page]) if rows < size else None
        device_blocks = tuple(block for pair in pairs for block in pair)
        core.pool.touch(device_blocks)
        if host_pair is not None:
            core.source.pool.touch(host_pair)
        spills = self.coordinator.spills
        transfer = spills.issue_page_copy(child, page, host_blocks=host_pair or (), device_blocks=device_blocks)
        self.coordinator.add_page_copy(PageCopy(id=transfer.id, device_pairs=pairs, host_pair=host_pair, num_rows=rows))

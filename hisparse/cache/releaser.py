"""Requests giving back what they hold: at a finish, an abort, a preemption, a hand-over, or a lost worker."""

from __future__ import annotations

from hisparse.cache.admitter import Admitter
from hisparse.cache.coordinator import HiSparseCoordinator
from hisparse.cache.core import CacheCore
from hisparse.cache.offload import IndexerStore
from hisparse.cache.pages import Residency
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import PageEvent, PageState
from hisparse.errors import InvariantError


class Releaser:
    """Drops the holds of an incarnation. What outside writers and copies still touch stays pinned by them."""

    def __init__(self, core: CacheCore, residency: Residency, coordinator: HiSparseCoordinator | None,
                 admitter: Admitter, offload: IndexerStore | None) -> None:
        self.core = core
        self.residency = residency
        self.coordinator = coordinator
        self.admitter = admitter
        self._offload = offload

    def release(self, inc: Incarnation, *, finished: bool) -> None:
        """Everything goes; spills under way of a finished request are published when they complete."""
        core = self.core
        if self.coordinator is not None:
            self.coordinator.free(inc, finished=finished)
        self.residency.release_pages(inc, 0, inc.num_pages, PageEvent.FREE)
        core.free_device([block for block in reversed(inc.indexer) if block])
        self.leave_seat(inc)
        self._forget(inc)

    def leave_seat(self, inc: Incarnation) -> None:
        """The seat with its hot region and table rows goes; pages stay."""
        if inc.seat < 0:
            return
        self.residency.release_hot(inc)
        self.core.tables.seat_emptied(inc)
        self.admitter.give_back_seat(inc.seat)
        inc.seat = -1

    def hold(self, inc: Incarnation) -> None:
        """A finished request keeps its pages for a reader elsewhere; residency is frozen, the seat given back."""
        if inc.loading:
            raise InvariantError(f"request {inc.request_id!r} cannot be held while a load is pending")
        if self.coordinator is not None and self.coordinator.spills.awaits_copy(inc):
            raise InvariantError(f"request {inc.request_id!r} cannot be held before its forked pages are filled")
        if not inc.held:
            self.leave_seat(inc)
            inc.held = True
            self.core.update_reservation(inc)

    def store_indexer(self, inc: Incarnation) -> None:
        """Plans the store of a victim's sealed indexer pages that the engine has not asked for yet."""
        indexer = self.core.indexer
        if self._offload is None or not indexer.unstored:
            return
        for key in inc.identity.keys.keys[: inc.sealed]:
            if key not in indexer.unstored:
                continue
            del indexer.unstored[key]
            block = indexer.cached.get(key)
            if block is not None and self._offload.plan_store(key, block):
                indexer.pin_for_store(block)

    def _forget(self, inc: Incarnation) -> None:
        core = self.core
        inc.released = True
        core.update_reservation(inc)
        core.page_counts[PageState.NONE] -= inc.num_pages
        del core.live[inc.request_id]

    def crash(self, new_incarnation: int, *, host_pool_lost: bool) -> None:
        """Every page is none; the device pool starts anew; published host pages stay unless their pool died too."""
        core, source = self.core, self.core.source
        for inc in list(core.live.values()):
            core.move_run(inc, 0, inc.num_pages, PageEvent.CRASH)
            if source is not None:
                source.pool.free([block for block in reversed(inc.host) if block])
            self._forget(inc)
        core.clock.abandon()
        core.tables.clear()
        self.residency.crash()
        core.indexer.crash()
        if core.hot is not None:
            core.hot.crash()
        core.pool.reset(new_incarnation)
        if source is not None and host_pool_lost:
            source.published.clear()
            source.pool.reset(new_incarnation)
        self.admitter.crash()

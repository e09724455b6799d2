"""GPU residency of pages: pinning, loosening, reuse, copies, adoption, hot regions."""

from __future__ import annotations

from collections.abc import Sequence

from hisparse.cache.core import ABSENT, CacheCore
from hisparse.cache.request import Incarnation, SharedPage
from hisparse.cache.residency import PageEvent, PageState
from hisparse.errors import InvariantError
from hisparse.types import SeatReset


class Residency:
    """Moves pages between pinned, loose and host-only. Never writes bytes; never allocates except hot regions.

    `copies` maps a page key to the newest resident blocks that hold the published page. Writer: this class.
    """

    def __init__(self, core: CacheCore) -> None:
        self.core = core
        self.copies: dict[bytes, SharedPage] = {}

    # ------------------------------------------------------------------------------------------- pressure
    def update(self, inc: Incarnation) -> None:
        """Section 3 point 1: unpin clean pages of a hot request, or require hot under pressure."""
        if inc.held or inc.released or inc.loading:
            return
        if inc.has_hot:
            self.unpin_clean(inc)
        elif not inc.hot_required and self.core.num_free < self.core.watermark_blocks:
            self.require_hot(inc)

    def require_hot(self, inc: Incarnation) -> None:
        """Marks only; a scheduling pass allocates the region, and pages stay pinned until then."""
        if inc.hot_required or inc.held or inc.released or self.core.hot is None:
            return
        inc.hot_required = True
        self.core.counters.hot_required += 1
        self.core.update_reservation(inc)

    def allocate_hot(self, inc: Incarnation) -> bool:
        """A full region in every hot group, or nothing. Unpins what may go now that there is one."""
        hot = self.core.hot
        if hot is None or inc.has_hot:
            raise InvariantError(f"request {inc.request_id!r} cannot take a hot region now")
        region = hot.allocate()
        if region is None:
            return False
        inc.hot, inc.hot_required = region, True
        self.core.tables.hot(inc, hot.rows)
        self.unpin_clean(inc)
        self.core.update_reservation(inc)
        return True

    def release_hot(self, inc: Incarnation) -> None:
        """The seat's hot state is cleared before the blocks go on."""
        hot = self.core.hot
        if hot is None or not inc.has_hot:
            return
        hot.forget(inc)
        self.core.tables.hot(inc, 0)
        self.core.tables.reset(SeatReset(seat=inc.seat))
        for blocks in inc.hot:
            self.core.free_device(blocks)
        inc.hot = []

    def unpin_clean(self, inc: Incarnation) -> None:
        """Every clean sealed page outside the tail becomes loose, last page first (it is reused first)."""
        if not inc.clean_pinned or inc.held or inc.loading or not inc.has_hot:
            return
        for page in sorted((p for p in inc.clean_pinned if p < inc.tail_start), reverse=True):
            shared = inc.shared[page]
            self.core.move(inc, page, PageEvent.UNPIN)
            shared.owners[inc, page] = None
            self.core.pool.watch(shared.blocks, shared.on_reuse)
            self.core.free_device(shared.blocks)
            self.core.counters.pages_unpinned += 1
        self.core.update_reservation(inc)

    def clean(self, inc: Incarnation, page: int, event: PageEvent) -> None:
        """A resident page became durable: it may be shared from now on, and goes loose at once if it may."""
        self.core.move(inc, page, event)
        inc.shared[page] = SharedPage(inc.resident[page], self._reused)
        self.unpin_clean(inc)

    # ------------------------------------------------------------------------------------------- reuse
    def _reused(self, shared: SharedPage, block: int) -> None:
        """One block of a readable page is being handed out: the page is gone from the GPU, for every owner."""
        if not shared.alive:
            raise InvariantError(f"device block {block} was handed out twice as part of one loose page")
        self._forget(shared)
        for inc, page in shared.owners:
            self.core.move(inc, page, PageEvent.REUSED)
            self.core.set_resident(inc, page, ABSENT)
            del inc.shared[page]
            self.require_hot(inc)
        shared.owners.clear()
        self.core.counters.pages_reused += 1
        self._unwatch([other for other in shared.blocks if other != block])

    def _forget(self, shared: SharedPage) -> None:
        shared.alive = shared.awaited = False
        if shared.key is not None:
            del self.copies[shared.key]
            shared.key = None

    def settle(self, shared: SharedPage) -> None:
        """Nobody wants the blocks any more: they become ordinary ones."""
        if shared.alive and not shared.wanted:
            self._unwatch(shared.blocks)

    def _unwatch(self, blocks: Sequence[int]) -> None:
        """Nobody will read the blocks in a later step; dispatched ones may still, without a reference."""
        self.core.clock.mark_busy(block for block in blocks if self.core.pool.is_free(block))
        self.core.pool.unwatch(blocks)

    # ------------------------------------------------------------------------------------------- copies
    def record_copy(self, key: bytes, shared: SharedPage) -> None:
        """The published page `key` is also in these resident blocks; a newer copy replaces the older."""
        old = self.copies.get(key)
        if old is shared or not shared.alive or not self.core.prefix_cache:
            return
        if old is not None:
            old.key = None
            self.settle(old)
        self.copies[key] = shared
        shared.key = key
        self.core.pool.watch([b for b in shared.blocks if not self.core.pool.is_free(b)], shared.on_reuse)

    def adopt(self, inc: Incarnation, page: int, key: bytes) -> bool:
        """A host-only page takes an existing GPU copy: without a reference if the request has a hot region, else
        pinned, as long as free - reserved stays at or above the watermark."""
        core = self.core
        shared = self.copies.get(key)
        if shared is None or inc.states[page] is not PageState.HOST_ONLY:
            return False
        if inc.has_hot:
            core.move(inc, page, PageEvent.ADOPT_LOOSE)
            shared.owners[inc, page] = None
        else:
            cost = core.pool.num_unreferenced(shared.blocks)
            if core.num_free - cost - core.reserved_device < core.watermark_blocks:
                return False
            core.pool.touch(shared.blocks)
            core.move(inc, page, PageEvent.ADOPT_PINNED)
        inc.shared[page] = shared
        core.set_resident(inc, page, shared.blocks)
        core.counters.pages_adopted += 1
        return True

    # ------------------------------------------------------------------------------------------- release
    def keep_readable(self, inc: Incarnation, page: int) -> SharedPage:
        """A page still SPILLING when its request finishes: its blocks stay readable, for it may yet become a copy."""
        shared = SharedPage(inc.resident[page], self._reused)
        shared.awaited = True
        self.core.pool.watch(shared.blocks, shared.on_reuse)
        return shared

    def release_page(self, inc: Incarnation, page: int, event: PageEvent) -> None:
        """Gives back this request's hold on the resident blocks of one page; durable copies stay readable."""
        core = self.core
        state, blocks = inc.states[page], inc.resident[page]
        shared = inc.shared.pop(page, None)
        core.move(inc, page, event)
        inc.resident[page] = ABSENT
        inc.num_absent += bool(blocks)
        if state is PageState.CLEAN_LOOSE:
            assert shared is not None
            del shared.owners[inc, page]
            self.settle(shared)
        elif state is PageState.CLEAN_PINNED:
            assert shared is not None
            core.free_device(blocks)
            self.settle(shared)
        elif blocks:
            core.free_device(blocks)

    def crash(self) -> None:
        """Every device block is void."""
        for shared in self.copies.values():
            shared.alive, shared.key = False, None
        self.copies.clear()

    def check(self) -> None:
        pool = self.core.pool
        for key, shared in self.copies.items():
            if shared.key != key or not shared.alive:
                raise InvariantError(f"copies lists blocks {shared.blocks} under a key they do not have")
            if not all(pool.is_watched(block) for block in shared.blocks):
                raise InvariantError(f"copy {shared.blocks} would be handed out unnoticed")
        for inc in self.core.live.values():
            for page, shared in inc.shared.items():
                if not shared.alive:
                    raise InvariantError(f"page {page} of {inc.request_id!r} reads blocks {shared.blocks} after reuse")

"""GPU residency of pages: pinning, loosening, reuse, copies, adoption, hot regions."""

from __future__ import annotations

from collections.abc import Sequence

from hisparse.cache.core import CacheCore
from hisparse.cache.request import Incarnation, ResidentPage
from hisparse.cache.residency import PageEvent, PageState
from hisparse.errors import InvariantError
from hisparse.types import SeatReset


class Residency:
    """Moves pages between pinned, loose and host-only. Never writes bytes; never allocates except hot regions.

    `copies` maps a page key to the newest resident blocks that hold the published page. Writer: this class.
    """

    def __init__(self, core: CacheCore) -> None:
        self.core = core
        self.copies: dict[bytes, ResidentPage] = {}

    # ------------------------------------------------------------------------------------------- pressure
    def update_all(self) -> None:
        """While free blocks are short, requires hot of every request that is not. Pages of hot requests go loose at once when
        they are clean, when the tail moves on or when the region comes: nothing is left to unpin here."""
        if self.core.num_free < self.core.watermark_blocks:
            for inc in self.core.live.values():
                if not inc.hot and not inc.loading:
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
        if hot is None or inc.hot:
            raise InvariantError(f"request {inc.request_id!r} cannot take a hot region now")
        region = hot.allocate()
        if region is None:
            return False
        inc.hot, inc.hot_required = region, True
        for group, blocks in enumerate(region):
            self.core.tables.hot(inc, group, len(blocks) * hot.block_size)
        self.unpin_clean(inc)
        self.core.update_reservation(inc)
        return True

    def release_hot(self, inc: Incarnation) -> None:
        """The seat's hot state is cleared before the blocks go on."""
        hot = self.core.hot
        if hot is None or not inc.hot:
            return
        hot.forget(inc)
        for group, blocks in enumerate(inc.hot):
            self.core.tables.hot(inc, group, 0)
            self.core.free_device(blocks)
        self.core.tables.reset(SeatReset(seat=inc.seat))
        inc.hot = []

    def unpin_clean(self, inc: Incarnation) -> None:
        """Every clean sealed page outside the tail becomes loose, last page first (it is reused first)."""
        if not inc.clean_pinned or inc.held or inc.loading or not inc.hot:
            return
        core, tail = self.core, inc.tail_start
        pages = sorted([page for page in inc.clean_pinned if page < tail], reverse=True)
        if not pages:
            return
        for page in pages:
            resident = inc.resident[page]
            core.move(inc, page, PageEvent.UNPIN)
            _add_owner(resident, inc, page)
            core.unpin(resident)
            core.counters.pages_unpinned += 1
        core.update_reservation(inc)

    def new(self, inc: Incarnation, page: int, blocks: tuple[int, ...]) -> None:
        """A page gets resident blocks that were just handed out."""
        self.core.new_resident(inc, page, blocks, self._reused)

    def clean(self, inc: Incarnation, page: int, event: PageEvent) -> None:
        """A resident page became durable: it may be shared from now on, and goes loose at once if it may."""
        self.core.move(inc, page, event)
        if inc.hot:
            self.unpin_clean(inc)

    # ------------------------------------------------------------------------------------------- reuse
    def _reused(self, resident: ResidentPage, block: int) -> None:
        """One block of a readable page is being handed out: the page is gone from the GPU, for every owner."""
        if not resident.alive:
            raise InvariantError(f"device block {block} was handed out twice as part of one loose page")
        self._forget(resident)
        core = self.core
        for inc, page in (resident.owners or {}).items():
            core.move(inc, page, PageEvent.REUSED)
            del inc.resident[page]
            if inc.seat >= 0:
                core.tables.resident(inc, page, page + 1)
            self.require_hot(inc)
        resident.owners = None
        core.counters.pages_reused += 1
        self._unwatch([other for other in resident.blocks if other != block])

    def _forget(self, resident: ResidentPage) -> None:
        resident.alive = resident.awaited = resident.watched = False
        if resident.key is not None:
            del self.copies[resident.key]
            resident.key = None

    def settle(self, resident: ResidentPage) -> None:
        """If nobody wants the blocks any more, they become ordinary ones."""
        if resident.watched and not resident.wanted:
            resident.watched = False
            self._unwatch(resident.blocks)

    def _unwatch(self, blocks: Sequence[int]) -> None:
        """Nobody will read the blocks in a later step; dispatched ones may still, without a reference."""
        core = self.core
        if core.clock.outstanding:
            core.clock.mark_busy([block for block in blocks if core.pool.is_free(block)])
        core.pool.unwatch(blocks)

    # ------------------------------------------------------------------------------------------- copies
    def record_copy(self, key: bytes, resident: ResidentPage) -> None:
        """The published page `key` is also in these resident blocks; a newer copy replaces the older."""
        old = self.copies.get(key)
        if old is resident or not resident.alive or not self.core.prefix_cache:
            return
        if old is not None:
            old.key = None
            self.settle(old)
        self.copies[key] = resident
        resident.key = key

    def adopt(self, inc: Incarnation, keys: Sequence[bytes]) -> None:
        """Host-only pages 0 .. len(keys)-1 take existing GPU copies: without a pin if the request has a hot region,
        else pinned, as long as free - reserved stays at or above the watermark."""
        copies = self.copies
        if not copies:
            return
        for page, key in enumerate(keys):
            if key in copies:
                self.adopt_page(inc, page, copies[key])

    def adopt_page(self, inc: Incarnation, page: int, resident: ResidentPage) -> bool:
        """False: it is not host-only, or pinning it would take free - reserved below the watermark."""
        core = self.core
        if inc.states[page] != PageState.HOST_ONLY:
            return False
        if not inc.hot:
            cost = 0 if resident.pins else core.pool.num_unreferenced(resident.blocks)
            if core.num_free - cost - core.reserved_device < core.watermark_blocks:
                return False
        self.share(inc, page, resident)
        core.counters.pages_adopted += 1
        return True

    def share(self, inc: Incarnation, page: int, resident: ResidentPage) -> None:
        """A host-only page is also read from these resident blocks: loose if the request has a region, else pinned."""
        core = self.core
        if inc.hot:
            core.move(inc, page, PageEvent.ADOPT_LOOSE)
            _add_owner(resident, inc, page)
        else:
            core.pin(resident)
            core.move(inc, page, PageEvent.ADOPT_PINNED)
        inc.resident[page] = resident
        core.tables.resident(inc, page, page + 1)

    # ------------------------------------------------------------------------------------------- release
    def keep_readable(self, inc: Incarnation, page: int) -> ResidentPage:
        """A page still SPILLING when its request finishes: its blocks stay readable, for it may yet become a copy."""
        resident = inc.resident[page]
        resident.awaited = True
        return resident

    def release_pages(self, inc: Incarnation, first: int, end: int, event: PageEvent) -> None:
        """Gives back this request's hold on the resident blocks of the pages [first, end), last page first; durable
        copies stay readable. The pages are in state NONE then; their table entries are the caller's."""
        core = self.core
        for page in sorted([page for page in inc.resident if first <= page < end], reverse=True):
            resident = inc.resident.pop(page)
            if inc.states[page] == PageState.CLEAN_LOOSE:
                assert resident.owners is not None
                del resident.owners[inc]
            else:
                core.unpin(resident)
            self.settle(resident)
        core.move_run(inc, first, end, event)

    def crash(self) -> None:
        """Every device block is void."""
        for resident in self.copies.values():
            resident.alive, resident.key = False, None
        self.copies.clear()

    def check(self) -> None:
        pool = self.core.pool
        holders: dict[ResidentPage, int] = {}
        for inc in self.core.live.values():
            for page, resident in inc.resident.items():
                holders[resident] = holders.get(resident, 0) + (inc.states[page] != PageState.CLEAN_LOOSE)
        for resident, pins in holders.items():
            if resident.pins < pins:
                raise InvariantError(f"resident page {resident.blocks} counts {resident.pins} pins, requests hold {pins}")
            if not resident.pins and not all(pool.is_watched(block) for block in resident.blocks):
                raise InvariantError(f"resident page {resident.blocks} would be handed out unnoticed")
            if resident.pins and any(pool.refs(block) < 1 for block in resident.blocks):
                raise InvariantError(f"resident page {resident.blocks} is pinned without references")
        for key, resident in self.copies.items():
            if resident.key != key or not resident.alive:
                raise InvariantError(f"copies lists blocks {resident.blocks} under a key they do not have")
            if not resident.pins and not all(pool.is_watched(block) for block in resident.blocks):
                raise InvariantError(f"copy {resident.blocks} would be handed out unnoticed")


def _add_owner(resident: ResidentPage, inc: Incarnation, page: int) -> None:
    if resident.owners is None:
        resident.owners = {}
    resident.owners[inc] = page

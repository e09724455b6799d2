"""Blocks for a running request's next tokens, and what is done to other requests to find them."""

from __future__ import annotations

from hisparse.cache.core import CacheCore
from hisparse.cache.pages import Residency
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import PageEvent
from hisparse.errors import InvariantError


class Growth:
    """Appends pages; hands out hot regions that were required; never preempts."""

    def __init__(self, core: CacheCore, residency: Residency) -> None:
        self.core = core
        self.residency = residency

    def grow(self, inc: Incarnation, num_tokens: int) -> bool:
        """Pages up to the position that follows the next `num_tokens`. False = no room now, no page was added."""
        core = self.core
        first = inc.planned if inc.planned != inc.valid else min(inc.valid, inc.identity.keys.num_tokens - 1)
        new = -(-(first + num_tokens) // core.block_size) - len(inc.states)
        if new <= 0:
            if inc.hot or not inc.hot_required:
                return True
            new = 0
        need = new * (1 + core.groups_per_page)
        hot = core.hot
        if hot is not None and inc.hot_required and not inc.has_hot:
            if core.available_device(inc) >= hot.region_blocks + need:
                self.residency.allocate_hot(inc)
            elif inc.num_absent:
                return False
        if core.available_host(inc) < new or not self._make_room(inc, need):
            return False
        self._append_pages(inc, new)
        return True

    def _make_room(self, inc: Incarnation, need: int) -> bool:
        """True if `need` device blocks are available, after giving hot regions to requests whose clean pages go then."""
        core = self.core
        if need <= core.available_device(inc):
            return True
        if core.hot is None:
            return False
        region = core.hot.region_blocks
        for other in core.live.values():
            if not other.loading:
                self.residency.require_hot(other)
        for other in core.live.values():
            if other.has_hot or other.loading or other.held or core.available_device(other) < region:
                continue
            gain = sum(page < other.tail_start for page in other.clean_pinned) * core.groups_per_page
            if gain > region:
                self.residency.allocate_hot(other)
                if need <= core.available_device(inc):
                    return True
        return need <= core.available_device(inc)

    def _append_pages(self, inc: Incarnation, count: int) -> None:
        if not count:
            return
        core = self.core
        indexer = core.indexer.allocate(count)
        resident = core.residents.allocate(count)
        host = core.source.allocate(inc, count) if core.source is not None else [0] * count
        if indexer is None or resident is None or host is None:
            raise InvariantError(f"request {inc.request_id!r}: {count} pages were counted as available but are not")
        first = inc.num_pages
        core.append_pages(inc, PageEvent.ALLOC, indexer=indexer, host=host)
        for page, blocks in enumerate(resident, first):
            self.residency.new(inc, page, blocks)
        self.residency.unpin_clean(inc)  # the tail moved on
        core.update_reservation(inc)

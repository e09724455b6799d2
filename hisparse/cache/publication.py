"""Making durable host pages findable, in order, also after their request has finished."""

from __future__ import annotations

from hisparse.cache.core import CacheCore
from hisparse.cache.pages import Residency
from hisparse.cache.request import Incarnation, ResidentPage
from hisparse.cache.residency import DURABLE
from hisparse.errors import InvariantError


class Publication:
    """Publishes only a contiguous durable prefix. A finished request's remaining pages are *detached*: their host
    blocks stay leased until its last spill is acknowledged."""

    def __init__(self, core: CacheCore, residency: Residency) -> None:
        self.core = core
        self.residency = residency
        self.detached: dict[Incarnation, dict[int, ResidentPage]] = {}
        """Finished requests with spills under way -> their pages that may yet become copies."""

    def limit(self, inc: Incarnation) -> int:
        """Pages that may be published: their rows are in cache, and their tokens accepted and hashed."""
        return min(inc.valid // self.core.block_size, len(inc.identity.keys.keys))

    def advance(self, inc: Incarnation) -> None:
        """Publishes the pages of a live request that became durable, as far as its retention keeps them."""
        first, limit, states = inc.published, self.limit(inc), inc.states
        end = first
        while end < limit and states[end] in DURABLE:
            end += 1
        for page in range(first, self._retained(inc, end)):
            self._publish(inc, page, inc.resident.get(page))
            inc.published = page + 1

    def _retained(self, inc: Incarnation, end: int) -> int:
        retention = inc.identity.retention
        return end if retention is None else retention.pages(end, self.core.block_size)

    def _publish(self, inc: Incarnation, page: int, resident: ResidentPage | None) -> None:
        source = self.core.source
        if source is None or not self.core.prefix_cache:
            return
        key = inc.identity.keys.keys[page]
        if source.published.publish(key, inc.host[page]):
            self.core.counters.pages_published += 1
        if resident is not None:
            self.residency.record_copy(key, resident)

    # ------------------------------------------------------------------------------------------- after a finish
    def detach(self, inc: Incarnation, durable: set[int], awaited: dict[int, ResidentPage], limit: int) -> None:
        """The request finished with spills under way; keeps its host blocks until `spill_done` said the last one."""
        inc.detached_durable = durable
        inc.detached_limit = limit
        inc.retained_host = [block for block in inc.host if block]
        self.detached[inc] = awaited

    def spill_done(self, inc: Incarnation, page: int, *, durable: bool) -> None:
        """A spill of a released request ended. Feeds its detached publication, if it has one."""
        if inc.detached_durable is None:
            return
        awaited = self.detached[inc]
        if durable:
            inc.detached_durable.add(page)
        end = inc.published
        while end < inc.detached_limit and end in inc.detached_durable:
            end += 1
        for page in range(inc.published, self._retained(inc, end)):
            resident = awaited.pop(page, None)
            self._publish(inc, page, resident)
            if resident is not None:
                self._stop_waiting(resident)
            inc.published = page + 1
        if inc.pending_spills == 0:
            self.drop(inc)

    def drop(self, inc: Incarnation) -> None:
        """Ends a detached publication: host blocks go back, unpublished pages are no copies."""
        for resident in self.detached.pop(inc).values():
            self._stop_waiting(resident)
        inc.detached_durable = None
        self.core.free_host_after_steps(reversed(inc.retained_host))
        inc.retained_host = []

    def _stop_waiting(self, resident: ResidentPage) -> None:
        resident.awaited = False
        self.residency.settle(resident)

    def check(self) -> None:
        for inc in self.detached:
            if not inc.released or inc.pending_spills <= 0:
                raise InvariantError(f"publication of {inc.request_id!r} is detached without a spill under way")

"""Making durable host pages findable, in order, also after their request has finished."""

from __future__ import annotations

from hisparse.cache.core import CacheCore
from hisparse.cache.pages import Residency
from hisparse.cache.request import Incarnation, SharedPage
from hisparse.cache.residency import DURABLE
from hisparse.errors import InvariantError


class Publication:
    """Publishes only a contiguous durable prefix. A finished request's remaining pages are *detached*: their host
    blocks stay leased until its last spill is acknowledged."""

    def __init__(self, core: CacheCore, residency: Residency) -> None:
        self.core = core
        self.residency = residency
        self.detached: dict[Incarnation, dict[int, SharedPage]] = {}
        """Finished requests with spills under way -> their pages that may yet become copies."""

    def advance(self, inc: Incarnation) -> None:
        """Publishes the pages of a live request that became durable and whose tokens are all accepted."""
        limit = min(inc.valid // self.core.block_size, len(inc.identity.keys.keys))
        while inc.published < limit and inc.states[inc.published] in DURABLE:
            self._publish(inc, inc.published, inc.shared.get(inc.published))
            inc.published += 1

    def _publish(self, inc: Incarnation, page: int, shared: SharedPage | None) -> None:
        source = self.core.source
        if source is None or not self.core.prefix_cache:
            return
        key = inc.identity.keys.keys[page]
        host = inc.host[page]
        if source.published.get(key) != host and source.published.publish(key, host):
            self.core.counters.pages_published += 1
        if shared is not None:
            self.residency.record_copy(key, shared)

    # ------------------------------------------------------------------------------------------- after a finish
    def detach(self, inc: Incarnation, durable: set[int], awaited: dict[int, SharedPage], limit: int) -> None:
        """The request finished with spills under way; keeps its host blocks until `spill_done` said the last one."""
        inc.detached_durable = durable
        inc.detached_limit = min(limit, len(inc.identity.keys.keys))
        inc.retained_host = [block for block in inc.host if block]
        self.detached[inc] = awaited

    def spill_done(self, inc: Incarnation, page: int, *, durable: bool) -> None:
        """A spill of a released request ended. Feeds its detached publication, if it has one."""
        if inc.detached_durable is None:
            return
        awaited = self.detached[inc]
        if durable:
            inc.detached_durable.add(page)
        while inc.published < inc.detached_limit and inc.published in inc.detached_durable:
            shared = awaited.pop(inc.published, None)
            self._publish(inc, inc.published, shared)
            if shared is not None:
                self._stop_waiting(shared)
            inc.published += 1
        if inc.pending_spills == 0:
            self.drop(inc)

    def drop(self, inc: Incarnation) -> None:
        """Ends a detached publication: host blocks go back, unpublished pages are no copies."""
        for shared in self.detached.pop(inc).values():
            self._stop_waiting(shared)
        inc.detached_durable = None
        self.core.free_host_after_steps(reversed(inc.retained_host))
        inc.retained_host = []

    def _stop_waiting(self, shared: SharedPage) -> None:
        shared.awaited = False
        self.residency.settle(shared)

    def check(self) -> None:
        for inc in self.detached:
            if not inc.released or inc.pending_spills <= 0:
                raise InvariantError(f"publication of {inc.request_id!r} is detached without a spill under way")

"""Blocks that something outside the step fills: P/D imports and loads of indexer pages from the store."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from hisparse.cache.core import CacheCore
from hisparse.cache.pages import Residency
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import PageEvent
from hisparse.errors import InvariantError
from hisparse.types import Landing, SeatReset

TAIL_PAGES = 2


@dataclass(slots=True, eq=False, kw_only=True)
class Load:
    """One admission's outside writers, drained together. Holds a reference of its own on every block they touch."""

    inc: Incarnation
    keep_pages: int
    """Pages that stay valid if the load fails."""
    hit_pages: int
    landing: Landing | None
    import_tokens: int
    """End of the imported positions; 0 = no import."""
    device_blocks: Sequence[int]
    host_blocks: Sequence[int]


class Loads:
    """At most one load per request id at a time; its pins outlive the request."""

    def __init__(self, core: CacheCore, residency: Residency) -> None:
        self.core = core
        self.residency = residency
        self.pending: dict[str, Load] = {}

    def quiet_blocks(self, *, hit_pages: int, gpu_pages: int, landing: Landing | None, import_tokens: int) -> int:
        """Device blocks that `begin` takes for writers outside the compute stream."""
        first, end = self._import_range(hit_pages, landing, import_tokens)
        resident = end - self._first_resident(first, end, landing)
        return (hit_pages - gpu_pages) + (end - first) + resident * self.core.groups_per_page

    def _import_range(self, hit_pages: int, landing: Landing | None, import_tokens: int) -> tuple[int, int]:
        end = self.core.layout.pages(import_tokens) if landing is not None else hit_pages
        return hit_pages, max(hit_pages, end)

    def _first_resident(self, first: int, end: int, landing: Landing | None) -> int:
        """RESIDENT: every page. HOST: only the pages needed at once, the last two (the last may be partly filled)."""
        return first if landing is Landing.RESIDENT else max(first, end - TAIL_PAGES)

    def begin(self, inc: Incarnation, *, hit_pages: int, gpu_pages: int, landing: Landing | None,
              import_tokens: int) -> Load:
        """Leases quiet blocks: indexer blocks of the hit pages beyond `gpu_pages`, and every block of the import.

        The caller checked the room. The blocks stay pinned until `finish`, whatever becomes of the request.
        """
        if inc.request_id in self.pending:
            raise InvariantError(f"request {inc.request_id!r} has a load that is not drained yet")
        core = self.core
        first, end = self._import_range(hit_pages, landing, import_tokens)
        first_resident = self._first_resident(first, end, landing)
        accept = None if core.all_quiet else core.is_quiet
        indexer = core.indexer.allocate((hit_pages - gpu_pages) + (end - first), accept)
        resident = core.residents.allocate(end - first_resident, accept)
        host = core.source.allocate(inc, end - first) if core.source is not None else [0] * (end - first)
        if indexer is None or resident is None or host is None:
            raise InvariantError(f"request {inc.request_id!r}: admission counted wrong, no blocks for its load")
        if gpu_pages < hit_pages:
            inc.indexer[gpu_pages:hit_pages] = array("i", indexer[: hit_pages - gpu_pages])
            core.tables.pages(inc, gpu_pages, hit_pages)
        core.append_pages(inc, PageEvent.IMPORT_PLANNED, indexer=indexer[hit_pages - gpu_pages :], host=host)
        for page, blocks in enumerate(resident, first_resident):
            self.residency.new(inc, page, blocks)
        device_blocks = [*indexer, *(block for page in resident for block in page)]
        host_blocks = [block for block in inc.host[gpu_pages:end] if block]
        core.pool.touch(device_blocks)
        if core.source is not None:
            core.source.pool.touch(host_blocks)
        load = Load(inc=inc, keep_pages=gpu_pages if gpu_pages < hit_pages else hit_pages,
                    hit_pages=hit_pages, landing=landing, import_tokens=import_tokens if landing is not None else 0,
                    device_blocks=device_blocks, host_blocks=host_blocks)
        self.pending[inc.request_id] = load
        inc.loading = True
        core.counters.imports_started += landing is not None
        return load

    def finish(self, request_id: str, *, failed: bool) -> Load | None:
        """Every rank has drained: drops the pins. Returns the load if its request still waits for it, else None."""
        core = self.core
        load = self.pending.pop(request_id, None)
        if load is None:
            core.counters.late_completions += 1
            return None
        core.free_device(load.device_blocks)
        if core.source is not None:
            core.source.pool.free(load.host_blocks)
        if load.inc.released:
            core.counters.late_completions += 1
            return None
        load.inc.loading = False
        if load.landing is not None:
            core.counters.imports_failed += failed
            core.counters.imports_completed += not failed
        if failed:
            self._roll_back(load)
        else:
            self._land(load)
        return load

    def _land(self, load: Load) -> None:
        core, inc = self.core, load.inc
        inc.valid = inc.planned = max(load.hit_pages * core.block_size, load.import_tokens)
        end, whole = core.layout.pages(load.import_tokens), load.import_tokens // core.block_size
        on_host = load.hit_pages if load.landing is Landing.RESIDENT else max(load.hit_pages, whole)
        first_resident = self._first_resident(load.hit_pages, max(load.hit_pages, end), load.landing)
        core.move_run(inc, load.hit_pages, min(on_host, first_resident), PageEvent.IMPORT_OK_HOST)
        core.move_run(inc, first_resident, on_host, PageEvent.IMPORT_OK_MIRRORED)
        core.move_run(inc, on_host, end, PageEvent.IMPORT_OK_RESIDENT)
        if load.landing is Landing.HOST:
            inc.spill_cursor = inc.spill_target = max(inc.spill_cursor, whole)
        self.residency.unpin_clean(inc)

    def _roll_back(self, load: Load) -> None:
        """Nothing of the load is valid; the pages go, and a recompute takes fresh blocks."""
        core, inc = self.core, load.inc
        end = inc.num_pages
        self.residency.release_pages(inc, load.hit_pages, end, PageEvent.IMPORT_FAILED)
        self.residency.release_pages(inc, load.keep_pages, load.hit_pages, PageEvent.REWIND)
        core.tables.resident(inc, load.keep_pages, end)
        core.free_device([block for block in reversed(inc.indexer[load.keep_pages :]) if block])
        core.free_host_after_steps([block for block in reversed(inc.host[load.keep_pages :]) if block])
        while inc.num_pages > load.keep_pages:
            core.drop_last_page(inc)
        core.tables.pages(inc, inc.num_pages, inc.num_pages)
        if inc.has_hot:
            core.tables.reset(SeatReset(seat=inc.seat, from_slot=0, from_position=0))
        inc.valid = inc.planned = load.keep_pages * core.block_size
        inc.published = min(inc.published, load.keep_pages)
        inc.sealed = min(inc.sealed, load.keep_pages)
        inc.spill_cursor = inc.spill_target = load.keep_pages

    def crash(self) -> None:
        """The processes that would have written are gone; host pins only (the device pool is rebuilt)."""
        for load in self.pending.values():
            if self.core.source is not None:
                self.core.source.pool.free(load.host_blocks)
        self.pending.clear()

    def check(self) -> None:
        for request_id, load in self.pending.items():
            if any(self.core.pool.refs(block) < 1 for block in load.device_blocks):
                raise InvariantError(f"load of {request_id!r} does not pin its device blocks {load.device_blocks}")
            if self.core.source and any(self.core.source.pool.refs(block) < 1 for block in load.host_blocks):
                raise InvariantError(f"load of {request_id!r} does not pin its host blocks {load.host_blocks}")
        for inc in self.core.live.values():
            if inc.loading and inc.request_id not in self.pending:
                raise InvariantError(f"request {inc.request_id!r} waits for a load that is not recorded")

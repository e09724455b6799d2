"""Taking a request in: prefix hits, quiet room, blocks of loads, the hot region, adoption."""

from __future__ import annotations

import heapq

from hisparse.cache.admission import AdmissionArithmetic, Hit
from hisparse.cache.core import CacheCore
from hisparse.cache.elastic import ElasticRegions
from hisparse.cache.loads import Load, Loads
from hisparse.cache.offload import IndexerStore
from hisparse.cache.pages import Residency
from hisparse.cache.report import resident_columns
from hisparse.cache.request import Identity, Incarnation
from hisparse.cache.residency import PageEvent
from hisparse.cache.values import Admission, Fit, PrefixHit
from hisparse.errors import InvariantError
from hisparse.types import ImportTarget, Landing, RequestPages


class Admitter:
    """Answers `prefix` and `fits`, and does `admit`. Owns the free seats."""

    def __init__(self, core: CacheCore, residency: Residency, loads: Loads, arithmetic: AdmissionArithmetic, *,
                 elastic: ElasticRegions, max_seats: int, offload: IndexerStore | None) -> None:
        self.core = core
        self.residency = residency
        self.loads = loads
        self.arithmetic = arithmetic
        self.elastic = elastic
        self.max_seats = max_seats
        self._offload = offload
        self._order = 0
        self._last_find: tuple[Identity, int, int, list[int], list[int]] | None = None
        """Of the request looked at last: itself (ids come back with other tokens), number of keys, version of the index,
        and what was found."""
        self.free_seats = list(range(max_seats))

    def give_back_seat(self, seat: int) -> None:
        heapq.heappush(self.free_seats, seat)

    def take_seat(self, identity: Identity) -> Incarnation:
        """A new admission that holds nothing but a seat; the caller saw a free one."""
        self._order += 1
        inc = Incarnation(identity=identity, seat=heapq.heappop(self.free_seats), order=self._order)
        self.core.live[identity.request_id] = inc
        return inc

    def crash(self) -> None:
        """Nobody sits anywhere any more."""
        self.free_seats = list(range(self.max_seats))

    def prefix(self, identity: Identity) -> PrefixHit:
        """The longest prefix of whole pages that every group has or can load. Pure."""
        found = self._find(identity, len(identity.keys.keys))
        return self._hit(found.pages, len(found.indexer))

    def _find(self, identity: Identity, limit: int) -> Hit:
        """Of at most `limit` pages: host pages, as far as their indexer pages are on the GPU or in the store."""
        source = self.core.source
        if source is None or not self.core.prefix_cache or not limit:
            return Hit()
        keys = identity.keys.keys
        host, indexer = self._look_up(identity, limit)
        load = 0
        if len(indexer) < len(host) and self._offload is not None:
            load = min(self._offload.hit(keys, len(indexer)), len(host) - len(indexer))
        return Hit(host=host[: len(indexer) + load], indexer=indexer)

    def _known(self, identity: Identity, prefix: PrefixHit) -> Hit:
        """The blocks of `prefix`, as far as they are still there."""
        if self.core.source is None or not prefix.host_pages:
            return Hit()
        host, indexer = self._look_up(identity, prefix.host_pages)
        return Hit(host=host, indexer=indexer[: prefix.indexer_gpu_pages])

    def _look_up(self, identity: Identity, limit: int) -> tuple[list[int], list[int]]:
        """`PrefixIndex.find` of the request's keys; asked again in the same pass, it is remembered."""
        index, keys, last = self.core.index, identity.keys.keys, self._last_find
        if last is None or last[0] is not identity or last[1:3] != (len(keys), index.version):
            last = (identity, len(keys), index.version, *index.find(keys))
            self._last_find = last
        return last[3][:limit], last[4][:limit]

    def fits(self, identity: Identity, prefix: PrefixHit, landing: Landing | None, import_tokens: int,
             chunk_tokens: int) -> Fit:
        """Whether `admit` finds room. Pure."""
        landing = self._landing(prefix, landing, import_tokens)
        needs = self.arithmetic.needs(identity, self._known(identity, prefix), landing, import_tokens, chunk_tokens)
        return self.arithmetic.fit(needs, blocked=self._blocked(identity.request_id))

    def admit(self, identity: Identity, prefix: PrefixHit, landing: Landing | None, import_tokens: int,
              chunk_tokens: int) -> Admission | None:
        """Everything the request needs to reach its first step, or None and nothing has changed for it."""
        request_id = identity.request_id
        if request_id in self.core.live:
            raise InvariantError(f"request {request_id!r} is admitted already")
        if import_tokens > identity.num_tokens:
            raise InvariantError(f"import of {import_tokens} tokens into {request_id!r} of {identity.num_tokens} tokens")
        if self._blocked(request_id) is not None:
            return None
        found = self._find(identity, prefix.host_pages)
        hit = self._hit(found.pages, len(found.indexer))
        landing = self._landing(hit, landing, import_tokens)
        need = self.arithmetic.choose(self.arithmetic.needs(identity, found, landing, import_tokens, chunk_tokens))
        if need is None or not self._has_quiet_room(found, landing, import_tokens):
            return None
        self._last_find = None
        inc = self.take_seat(identity)
        inc.target_pages, inc.window_pages = need.target_pages, need.window_pages
        inc.host_target_pages = need.host_target_pages
        self._take_hit(inc, found)
        if landing is not None or hit.indexer_load_pages:
            load = self.loads.begin(inc, hit_pages=hit.host_pages, gpu_pages=hit.indexer_gpu_pages, landing=landing,
                                    import_tokens=import_tokens)
        else:
            load = None
        if need.hot and not self.residency.allocate_hot(inc):
            raise InvariantError(f"request {request_id!r}: admission counted wrong, no hot region")
        self.core.update_reservation(inc)
        self.residency.adopt(inc, identity.keys.keys[: hit.host_pages])
        self.core.update_reservation(inc)
        return self._admission(inc, hit, landing, load)

    def _hit(self, pages: int, gpu_pages: int) -> PrefixHit:
        return PrefixHit(tokens=pages * self.core.block_size, host_pages=pages, indexer_gpu_pages=gpu_pages,
                         indexer_load_pages=pages - gpu_pages)

    def _landing(self, prefix: PrefixHit, landing: Landing | None, import_tokens: int) -> Landing | None:
        """No import when the whole imported prefix is here already."""
        return landing if import_tokens > prefix.tokens else None

    def _blocked(self, request_id: str) -> str | None:
        if request_id in self.loads.pending:
            return "a load of an earlier admission has not drained"
        if not self.free_seats:
            return f"all {self.max_seats} seats are taken"
        return None

    def _has_quiet_room(self, found: Hit, landing: Landing | None, import_tokens: int) -> bool:
        """Writers outside the compute stream need blocks that no step or copy in flight touches. If there are too few,
        takes grown blocks of hot regions and readable free blocks out of use: quiet once the dispatched steps retired."""
        core = self.core
        count = self.loads.quiet_blocks(hit_pages=found.pages, gpu_pages=len(found.indexer), landing=landing,
                                        import_tokens=import_tokens)
        if not count or core.all_quiet:
            return True
        missing = count - core.num_quiet(found.indexer)
        if missing <= 0:
            return True
        given = self.elastic.give_to_outside_writers(missing)
        if given and core.num_quiet(found.indexer) >= count:
            return True
        if core.clock.outstanding and missing > given:
            core.clock.mark_busy(core.pool.drop_readable(missing - given))
        return False

    def _take_hit(self, inc: Incarnation, found: Hit) -> None:
        """References on the hit's host and indexer blocks; pages become HOST_ONLY."""
        core = self.core
        if not found.pages:
            return
        assert core.source is not None
        core.source.pool.touch(found.host)
        core.pool.touch(found.indexer)
        to_load = [0] * (found.pages - len(found.indexer))
        core.append_pages(inc, PageEvent.HOST_HIT, indexer=[*found.indexer, *to_load], host=found.host)
        inc.valid = inc.planned = len(found.indexer) * core.block_size
        inc.published = inc.spill_cursor = inc.spill_target = found.pages
        inc.sealed = len(found.indexer)
        core.counters.prefix_hit_tokens += found.pages * core.block_size

    def _admission(self, inc: Incarnation, hit: PrefixHit, landing: Landing | None, load: Load | None) -> Admission:
        target = None
        if landing is not None and load is not None:
            first, size = hit.host_pages, self.core.block_size
            target = ImportTarget(landing=landing, pages=RequestPages(
                first_page=first, num_tokens=load.import_tokens, indexer_blocks=tuple(inc.indexer[first:]),
                host_blocks=tuple(inc.host[first:]), resident_blocks=resident_columns(self.core, inc, first)))
            if inc.num_pages != self.core.layout.pages(load.import_tokens) or first * size > load.import_tokens:
                raise InvariantError(f"import of {load.import_tokens} tokens got {inc.num_pages} pages")
        pages = slice(hit.indexer_gpu_pages, hit.host_pages)
        return Admission(seat=inc.seat, cached_tokens=hit.tokens, import_target=target,
                         indexer_keys=tuple(inc.identity.keys.keys[pages]), indexer_blocks=tuple(inc.indexer[pages]))

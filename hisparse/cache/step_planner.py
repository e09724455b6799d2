"""One step from plan to retirement: the command is built, rows become valid, whole pages are sealed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hisparse.cache.coordinator import HiSparseCoordinator
from hisparse.cache.core import CacheCore
from hisparse.cache.elastic import ElasticRegions
from hisparse.cache.mirrors import uncover
from hisparse.cache.request import Incarnation
from hisparse.errors import InvariantError
from hisparse.types import SeatReset, SparseKVOffloadCommand


class StepPlanner:
    """Keeps, for every dispatched step, which rows it may write. Steps may be in flight behind one another."""

    def __init__(self, core: CacheCore, coordinator: HiSparseCoordinator | None, elastic: ElasticRegions, *,
                 offload: bool) -> None:
        self.core = core
        self.coordinator = coordinator
        self.elastic = elastic
        self.offload = offload
        """Sealed indexer pages are offered to a store."""
        self._in_flight: dict[int, list[tuple[Incarnation, int, int]]] = {}
        """Step -> (request, end of its rows, rows beyond those planned before)."""

    def plan(self, step: int, scheduled: Sequence[tuple[str, int, int]]) -> SparseKVOffloadCommand | None:
        """Builds the command of a step and counts it as dispatched. None when HiSparse is off."""
        core, live, size = self.core, self.core.live, self.core.block_size
        for request_id, first, num_tokens in scheduled:
            inc = live.get(request_id)
            if inc is None or inc.loading or inc.held or num_tokens < 1 or first + num_tokens > len(inc.states) * size or (
                first > inc.valid and first != inc.planned
            ):
                self._refuse(request_id, first, num_tokens)
        command = None
        if self.coordinator is not None:
            self.elastic.restore_watermark()
            self.coordinator.update_residency()
            mirrors = self.coordinator.build_row_mirrors(scheduled)
            self.coordinator.plan_prefix_materialization(scheduled)
            command = self.coordinator.build_offload_command(step, mirrors)
        else:
            core.pool.take_handed_out()
        core.clock.dispatch(step)
        chunks = []
        for request_id, first, num_tokens in scheduled:
            inc = live[request_id]
            end = first + num_tokens
            fresh = end - inc.planned
            if fresh > 0:
                inc.planned = end
            else:
                fresh = 0
            known = inc.identity.keys.num_tokens
            if known > end:
                known = end
            if known > inc.settled:
                inc.settled = known
            chunks.append((inc, end, fresh))
        self._in_flight[step] = chunks
        return command

    def _refuse(self, request_id: str, first: int, num_tokens: int) -> None:
        inc = self.core.incarnation(request_id)
        raise InvariantError(
            f"request {request_id!r} scheduled for {num_tokens} tokens from position {first}: it has {inc.valid} "
            f"valid rows ({inc.planned} planned) and {inc.num_pages} pages (loading: {inc.loading}, held: {inc.held})")

    def retire(self, step: int, computed: Mapping[str, int]) -> None:
        """The output of every rank for `step`, and for every earlier one, is back."""
        for done in [number for number in self._in_flight if number <= step]:
            for inc, end, fresh in self._in_flight.pop(done):
                if inc.released:
                    continue
                later = inc.planned - inc.valid - fresh
                rows = computed.get(inc.identity.request_id) if done == step else None
                if rows is not None:
                    self._advance(inc, rows, end)
                inc.planned = inc.valid + later
                if not later:
                    inc.settled = inc.valid
        self.core.clock.retire(step)
        self.elastic.grow()

    def _advance(self, inc: Incarnation, rows: int, end: int) -> None:
        """A step of this request retired with `rows` rows in cache, of `end` planned."""
        valid = inc.valid
        if rows < valid or (rows > end and rows > valid):
            raise InvariantError(f"request {inc.request_id!r}: {rows} rows after a step that had {valid}, planned {end}")
        if rows < end:
            uncover(self.core, inc, rows)
            if inc.hot:
                self.core.tables.reset(SeatReset(seat=inc.seat, from_slot=-1, from_position=rows))
        inc.valid = rows
        if rows // self.core.block_size > inc.sealed:
            self.seal(inc)

    def seal(self, inc: Incarnation) -> None:
        """Pages whose rows and tokens are all accepted: their indexer pages become findable, durable ones published."""
        if inc.loading:
            return
        core, keys = self.core, inc.identity.keys.keys
        limit = min(inc.valid // core.block_size, len(keys))
        for page in range(inc.sealed, limit):
            core.indexer.seal(keys[page], inc.indexer[page], offer=self.offload)
            inc.sealed = page + 1
        if self.coordinator is not None and inc.published < limit:
            self.coordinator.publication.advance(inc)

    def crash(self) -> None:
        """No dispatched step will be heard of."""
        self._in_flight.clear()

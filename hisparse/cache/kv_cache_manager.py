"""Facade of the cache: what an engine's scheduler may ask and do. Owns ids and states, never bytes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from hisparse.cache.admission import AdmissionArithmetic, check_device_pool
from hisparse.cache.admitter import Admitter
from hisparse.cache.block_pool import BlockPool
from hisparse.cache.coordinator import HiSparseCoordinator
from hisparse.cache.core import CacheCore
from hisparse.cache.elastic import ElasticRegions
from hisparse.cache.fork import Fork
from hisparse.cache.groups import (
    HiSparseHotManager,
    HiSparseResidentManager,
    HiSparseSourceManager,
    IndexerManager,
)
from hisparse.cache.growth import Growth
from hisparse.cache.loads import Loads
from hisparse.cache.mirrors import uncover
from hisparse.cache.offload import IndexerStore
from hisparse.cache.pages import Residency
from hisparse.cache.prefix import ExtraKeys, PageKeys, root_key
from hisparse.cache.report import collect_stats, held_pages
from hisparse.cache.request import Identity, Incarnation
from hisparse.cache.residency import PageEvent, PageState
from hisparse.cache.tables import TableChanges
from hisparse.cache.values import Admission, CacheStats, Fit, PrefixHit
from hisparse.config import CacheConfig, hot_rows, hot_rows_max
from hisparse.errors import ConfigError, InvariantError, RequestError
from hisparse.layout import KVCacheLayout
from hisparse.types import (
    BlockTableUpdate,
    HiSparseWorkerOutput,
    Landing,
    PageGenerations,
    RequestPages,
    SeatReset,
    SparseKVOffloadCommand,
)

__all__ = ["Admission", "CacheStats", "Fit", "KVCacheManager", "PrefixHit"]


class KVCacheManager:
    """Both block pools, every request's pages, and (when HiSparse is on) the coordinator of the host tier.

    One thread. Deterministic. A pass of the scheduler is: `fits`/`admit`/`allocate`/`preempt`..., then `plan_step`
    exactly once for the step that is sent, then (when every rank answered) `on_worker_output`, `retire`, `extend`.

    Args:
        num_host_blocks: blocks of the host pool incl. its null block (0 when HiSparse is off).
        max_seats: requests that may hold blocks of a running request at once.
        max_query_tokens: most tokens of one request in one step.
        num_ranks: ranks that acknowledge restores and page copies; num_host_writers: those that acknowledge spills.
        indexer_offload: store of indexer pages outside the device pool, or None.
        incarnation: of the workers; default a random 64-bit number. Block generations start there.
    Raises:
        ConfigError: a pool cannot hold even one request of `max_model_len`, with the numbers.
    """

    def __init__(self, layout: KVCacheLayout, config: CacheConfig, *, num_host_blocks: int, max_model_len: int,
                 max_seats: int, max_query_tokens: int, num_ranks: int, num_host_writers: int = 1,
                 indexer_offload: IndexerStore | None = None, incarnation: int | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.layout = layout
        self.config = config
        self.max_model_len = max_model_len
        self.max_seats = max_seats
        check_device_pool(layout, config, max_model_len=max_model_len, max_query_tokens=max_query_tokens)
        if incarnation is None:
            incarnation = secrets.randbits(64)
        pool = BlockPool(config.device_blocks, incarnation=incarnation, name="device")
        hot = source = None
        watermark = 0
        if config.enabled:
            _check_host_pool(layout, num_host_blocks, max_model_len)
            # One size for every group: the smallest, which fits each group's tables, until regions differ by group.
            rows, rows_max = min(hot_rows(config, layout)), min(hot_rows_max(config, layout))
            hot = HiSparseHotManager(layout.hots, pool, rows=rows, blocks_per_group=layout.hot_blocks(rows),
                                     max_blocks_per_group=layout.hot_blocks(rows_max))
            source = HiSparseSourceManager(
                layout.source, BlockPool(num_host_blocks, incarnation=incarnation, name="host"))
            watermark = max(hot.region_blocks, int(config.device_blocks * config.watermark))
        self.core = CacheCore(
            layout=layout, max_model_len=max_model_len, watermark_blocks=watermark,
            prefix_cache=config.prefix_cache and config.enabled, pool=pool,
            indexer=IndexerManager(layout.indexer, pool), residents=HiSparseResidentManager(layout.residents, pool),
            hot=hot, source=source, tables=TableChanges(layout),
        )
        self.residency = Residency(self.core)
        self.loads = Loads(self.core, self.residency)
        self.elastic = ElasticRegions(self.core)
        self.coordinator: HiSparseCoordinator | None = None
        if config.enabled:
            self.coordinator = HiSparseCoordinator(
                self.core, self.residency, self.loads, num_writers=num_host_writers, num_ranks=num_ranks,
                incarnation=incarnation, deadline_s=config.transfer_deadline_s, clock=clock)
        self._offload = indexer_offload
        self._identities: dict[str, Identity] = {}
        self._admitter = Admitter(self.core, self.residency, self.loads, AdmissionArithmetic(self.core, config),
                                  elastic=self.elastic, max_seats=max_seats, offload=indexer_offload)
        self._growth = Growth(self.core, self.residency)
        self._steps: dict[int, list[tuple[Incarnation, int]]] = {}
        self.last_command: SparseKVOffloadCommand | None = None
        """What the last `plan_step` returned, for the connector to carry."""

    # ------------------------------------------------------------------------------------------- identity
    def open(self, request_id: str, token_ids: Sequence[int], *, extra_keys: ExtraKeys | None = None,
             max_tokens: int) -> None:
        """Registers a request and computes its page keys once. Takes no blocks.

        Raises:
            RequestError: it can never fit (with the numbers). InvariantError: the id is open already.
        """
        if request_id in self._identities:
            raise InvariantError(f"request {request_id!r} is open already")
        num_tokens = len(token_ids)
        if num_tokens < 1 or max_tokens < 1:
            raise RequestError(f"a request needs at least 1 token and max_tokens >= 1, got {num_tokens} and {max_tokens}")
        if num_tokens > self.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, more than max_model_len = {self.max_model_len}; shorten it",
                field="prompt", status=413)
        root = root_key(self._fingerprint, extra_keys or ExtraKeys())
        keys = PageKeys(self.layout.block_size, root, enabled=self.core.prefix_cache)
        keys.extend(token_ids)
        self._identities[request_id] = Identity(
            request_id=request_id, keys=keys, num_prompt_tokens=num_tokens, max_tokens=max_tokens,
            max_rows=min(num_tokens + max_tokens - 1, self.max_model_len))

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Accepted (sampled) tokens join the identity."""
        identity = self._identity(request_id)
        identity.keys.extend(token_ids)
        inc = self.core.live.get(request_id)
        if inc is not None:
            self._seal(inc)

    def close(self, request_id: str) -> None:
        """Forgets the identity; frees first if it still holds blocks. Unknown ids are ignored."""
        self.free(request_id)
        self._identities.pop(request_id, None)

    # ------------------------------------------------------------------------------------------- pure queries
    def prefix(self, request_id: str) -> PrefixHit:
        """The longest prefix of whole pages that every group has or can load. Pure."""
        return self._admitter.prefix(self._identity(request_id))

    def fits(self, request_id: str, prefix: PrefixHit, *, landing: Landing | None, import_tokens: int = 0,
             chunk_tokens: int) -> Fit:
        """Whether `admit` with the same arguments finds room. Pure: changes nothing."""
        return self._admitter.fits(self._identity(request_id), prefix, landing, import_tokens, chunk_tokens)

    # ------------------------------------------------------------------------------------------- life cycle
    def admit(self, request_id: str, prefix: PrefixHit, *, landing: Landing | None = None, import_tokens: int = 0,
              chunk_tokens: int) -> Admission | None:
        """Gives the request a seat, its prefix pages, and what it needs to reach its first step. None = no room now.

        With `landing`, also leases every block of the positions [cached, import_tokens); their pages stay unreadable
        until `finish_load`. May answer None although `fits` said now: blocks that outside writers need must be quiet
        (no step or copy in flight touches them); ask again in the next pass.
        """
        return self._admitter.admit(self._identity(request_id), prefix, landing, import_tokens, chunk_tokens)

    def fork(self, request_id: str, child_id: str, *, max_tokens: int) -> Admission | None:
        """Opens and admits `child_id` with the tokens and rows of a running request; None = no room, nothing opened.

        Durable pages are shared; the others are copied before the next step's first kernel. The child's
        `cached_tokens` are the parent's valid rows; equal to its length, its last token is replayed.

        Raises:
            InvariantError: HiSparse is off, or the parent is loading, held, or not admitted.
        """
        parent = self.core.incarnation(request_id)
        if self.coordinator is None or parent.loading or parent.held:
            raise InvariantError(f"request {request_id!r} cannot be forked now")
        if child_id in self._identities:
            raise InvariantError(f"request {child_id!r} is open already")
        fork = Fork(self.core, self.residency, self.coordinator)
        if not self._admitter.free_seats or not fork.room(parent):
            return None
        keys = parent.identity.keys.copy()
        identity = Identity(request_id=child_id, keys=keys, num_prompt_tokens=keys.num_tokens, max_tokens=max_tokens,
                            max_rows=min(keys.num_tokens + max_tokens - 1, self.max_model_len))
        self._identities[child_id] = identity
        child = self._admitter.take_seat(identity)
        fork.fill(parent, child)
        return Admission(seat=child.seat, cached_tokens=child.valid)

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Blocks for the positions [computed, computed + num_tokens). False = no room now, nothing changed for it."""
        inc = self.core.incarnation(request_id)
        if inc.loading or inc.held:
            raise InvariantError(f"request {request_id!r} cannot run: {'a load is pending' if inc.loading else 'held'}")
        return self._growth.grow(inc, num_tokens)

    def finish_load(self, request_id: str, *, failed: bool) -> int:
        """Outcome of an import and/or indexer load, drained on every rank. Returns the tokens now valid.

        Failed: nothing of it is valid; the request keeps its GPU-indexed prefix and recomputes with fresh blocks.
        Also call it for requests freed meanwhile (their blocks are pinned until then): counted, returns 0.
        """
        if self.coordinator is not None:
            valid = self.coordinator.finish_host_import(request_id, failed=failed)
        else:
            load = self.loads.finish(request_id, failed=failed)
            valid = load.inc.valid if load is not None else 0
        inc = self.core.live.get(request_id)
        if inc is not None and not inc.loading:
            self._seal(inc)
            self.core.update_reservation(inc)
        return valid

    def plan_step(self, step: int, scheduled: Sequence[tuple[str, int, int]]) -> SparseKVOffloadCommand | None:
        """Builds the HiSparse command of a step; the step counts as dispatched. None when HiSparse is off.

        Args:
            step: strictly increasing. scheduled: (request id, first position, tokens), after the last allocation.
        """
        core = self.core
        for request_id, first, num_tokens in scheduled:
            inc = core.incarnation(request_id)
            if inc.loading or inc.held or first > inc.valid or first + num_tokens > inc.num_pages * self.layout.block_size:
                raise InvariantError(
                    f"request {request_id!r} scheduled for {num_tokens} tokens from position {first}: it has {inc.valid} "
                    f"valid rows and {inc.num_pages} pages (loading: {inc.loading}, held: {inc.held})")
        command = None
        if self.coordinator is not None:
            self.elastic.restore_watermark()
            for request_id in core.live:
                self.coordinator.update_residency(request_id)
            mirrors = self.coordinator.build_row_mirrors(scheduled)
            self.coordinator.plan_prefix_materialization(scheduled)
            command = self.coordinator.build_offload_command(step, mirrors)
        else:
            core.pool.take_handed_out()
        self._steps[step] = [(core.live[request_id], first + num_tokens) for request_id, first, num_tokens in scheduled]
        core.clock.dispatch(step)
        self.last_command = command
        return command

    def take_table_updates(self) -> tuple[BlockTableUpdate, ...]:
        """Table updates since the last call, when HiSparse is off (otherwise they travel in the command)."""
        return self.core.tables.take_updates()

    def retire(self, step: int, computed: Mapping[str, int]) -> None:
        """The output of every rank for `step` is back; `computed` = tokens now in cache per request of that step."""
        for done in [number for number in self._steps if number <= step]:
            for inc, end in self._steps.pop(done):
                rows = computed.get(inc.request_id)
                if not inc.released and rows is not None and done == step:
                    self._advance(inc, rows, end)
        self.core.clock.retire(step)
        self.elastic.grow()

    def on_worker_output(self, outputs: Sequence[HiSparseWorkerOutput]) -> None:
        """Acknowledgements of transfers."""
        if self.coordinator is not None:
            self.coordinator.on_worker_output(outputs)

    def preempt(self, request_id: str) -> None:
        """Gives everything back; durable pages stay published; indexer pages go to the store first. Idempotent."""
        inc = self.core.live.get(request_id)
        if inc is None:
            return
        self.core.counters.preemptions += 1
        self._store_indexer(inc)
        self._release(inc, finished=False)

    def free(self, request_id: str, *, finished: bool = True) -> None:
        """Gives everything back. finished: spills under way are published when they complete. Idempotent."""
        inc = self.core.live.get(request_id)
        if inc is not None:
            self._release(inc, finished=finished)

    def computed_tokens(self, request_id: str) -> int:
        """Tokens whose KV is valid; 0 when it holds nothing."""
        inc = self.core.live.get(request_id)
        return inc.valid if inc is not None else 0

    def spilled_pages(self, request_id: str) -> int:
        """Spills planned for an open request so far, over all its admissions."""
        return self._identity(request_id).spilled_pages

    def seat(self, request_id: str) -> int:
        """Seat of an admitted request; -1 when it has none."""
        inc = self.core.live.get(request_id)
        return inc.seat if inc is not None else -1

    # ------------------------------------------------------------------------------------------- indexer offload
    def take_sealed_indexer_pages(self) -> list[tuple[bytes, int]]:
        """(page key, block) sealed since the last call and still cached; each block is pinned for the caller."""
        indexer, out = self.core.indexer, []
        for key in indexer.unstored:
            block = indexer.cached.get(key)
            if block is not None:
                indexer.pin_for_store(block)
                out.append((key, block))
        indexer.unstored.clear()
        return out

    def unpin_indexer(self, blocks: Sequence[int]) -> None:
        """Drops pins taken by `take_sealed_indexer_pages` or for a store planned at preemption."""
        self.core.free_device([block for block in blocks if self.core.indexer.drop_store_pin(block)])

    # ------------------------------------------------------------------------------------------- P/D prefill side
    def hold(self, request_id: str) -> tuple[RequestPages, PageGenerations]:
        """Keeps a finished request's pages for a decode engine: no page is unpinned any more, its seat is given back.

        Lists a resident block only if it is pinned and a host block only if it is durable. Ends with `free`.
        """
        inc = self.core.incarnation(request_id)
        if inc.loading:
            raise InvariantError(f"request {request_id!r} cannot be held while a load is pending")
        if self.coordinator is not None and self.coordinator.spills.awaits_copy(inc):
            raise InvariantError(f"request {request_id!r} cannot be held before its forked pages are filled")
        if not inc.held:
            self._leave_seat(inc)
            inc.held = True
            self.core.update_reservation(inc)
        return held_pages(self.core, inc)

    # ------------------------------------------------------------------------------------------- scheduler queries
    def has_pending_reclamation(self) -> bool:
        """Blocks will come free without a preemption: wait."""
        if self.core.clock.has_deferred or self.core.indexer.store_pins:
            return True
        return self.coordinator is not None and self.coordinator.has_pending_reclamation()

    def has_pending_work(self) -> bool:
        """Transfers to send or in flight, loads or pages retained: keep stepping even with nothing scheduled."""
        if self.loads.pending or self.core.clock.has_deferred:
            return True
        return self.coordinator is not None and self.coordinator.has_pending_work()

    def all_context_pages_resident(self, request_ids: Sequence[str]) -> bool:
        """Every page of every request is resident in every group. Ask after the pass's last allocation."""
        if self.coordinator is not None:
            return self.coordinator.all_context_pages_resident(request_ids)
        return bool(self.core.groups_per_page) and all(
            self.core.incarnation(request_id).num_absent == 0 for request_id in request_ids)

    def overdue_transfers(self) -> tuple[tuple[int, int], ...]:
        """(rank, transfer id) without completion for longer than `transfer_deadline_s`: that worker has failed."""
        return self.coordinator.spills.overdue() if self.coordinator is not None else ()

    def worker_lost(self, new_incarnation: int, *, host_pool_lost: bool = False) -> None:
        """All device state is void; durable host pages stay unless the pool died too. Requests must be re-admitted."""
        core = self.core
        core.counters.workers_lost += 1
        if self.coordinator is not None:
            self.coordinator.crash(new_incarnation)
        self.loads.crash()
        for inc in list(core.live.values()):
            for page in range(inc.num_pages):
                core.move(inc, page, PageEvent.CRASH)
            if core.source is not None:
                core.source.pool.free(block for block in reversed(inc.host) if block)
            self._forget(inc)
        core.clock.abandon()
        core.tables.clear()
        self.residency.crash()
        core.indexer.crash()
        if core.hot is not None:
            core.hot.crash()
        core.pool.reset(new_incarnation)
        if core.source is not None and host_pool_lost:
            core.source.published.clear()
            core.source.pool.reset(new_incarnation)
        self._admitter.crash()
        self._steps.clear()

    def check(self) -> None:
        """Raises InvariantError unless both pools and every account are consistent."""
        self.core.check()
        self.residency.check()
        self.loads.check()
        self.elastic.check()
        if self.coordinator is not None:
            self.coordinator.check()
        seats = [inc.seat for inc in self.core.live.values() if inc.seat >= 0]
        if sorted(seats + self._admitter.free_seats) != list(range(self.max_seats)):
            raise InvariantError(f"seats held {sorted(seats)} and free {sorted(self._admitter.free_seats)} are not all, once")

    def stats(self) -> CacheStats:
        """Gauges and counters."""
        return collect_stats(self.core, num_open=len(self._identities), num_loads=len(self.loads.pending),
                             num_transfers=len(self.coordinator.spills.transfers) if self.coordinator else 0)

    # ------------------------------------------------------------------------------------------- parts of the above
    @property
    def _fingerprint(self) -> str:
        return self.layout.fingerprint()

    def _identity(self, request_id: str) -> Identity:
        identity = self._identities.get(request_id)
        if identity is None:
            raise InvariantError(f"request {request_id!r} is not open")
        return identity

    def _advance(self, inc: Incarnation, rows: int, end: int) -> None:
        """A step of this request retired with `rows` rows in cache, of `end` planned."""
        if not inc.valid <= rows <= max(end, inc.valid):
            raise InvariantError(f"request {inc.request_id!r}: {rows} rows after a step that had {inc.valid}, planned {end}")
        if rows < end:
            uncover(self.core, inc, rows)
            if inc.has_hot:
                self.core.tables.reset(SeatReset(seat=inc.seat, from_slot=-1, from_position=rows))
        inc.valid = rows
        self._seal(inc)

    def _seal(self, inc: Incarnation) -> None:
        """Pages whose rows and tokens are all accepted: their indexer pages become findable, durable ones published."""
        core = self.core
        limit = min(inc.valid // self.layout.block_size, len(inc.identity.keys.keys))
        while inc.sealed < limit and not inc.loading:
            core.indexer.seal(inc.identity.keys.keys[inc.sealed], inc.indexer[inc.sealed],
                              offer=self._offload is not None)
            inc.sealed += 1
        if self.coordinator is not None and not inc.loading:
            self.coordinator.publication.advance(inc)

    def _store_indexer(self, inc: Incarnation) -> None:
        """Plans the store of the victim's sealed indexer pages that the engine has not asked for yet."""
        indexer = self.core.indexer
        if self._offload is None:
            return
        for page in range(inc.sealed):
            key = inc.identity.keys.keys[page]
            if key not in indexer.unstored:
                continue
            del indexer.unstored[key]
            block = indexer.cached.get(key)
            if block is not None and self._offload.plan_store(key, block):
                indexer.pin_for_store(block)

    def _release(self, inc: Incarnation, *, finished: bool) -> None:
        """Every hold of this admission goes; what outside writers and copies still touch stays pinned by them."""
        core = self.core
        if self.coordinator is not None:
            self.coordinator.free(inc, finished=finished)
        for page in reversed(range(inc.num_pages)):
            self.residency.release_page(inc, page, PageEvent.FREE)
        core.free_device(block for block in reversed(inc.indexer) if block)
        self._leave_seat(inc)
        self._forget(inc)

    def _leave_seat(self, inc: Incarnation) -> None:
        if inc.seat < 0:
            return
        self.residency.release_hot(inc)
        self.core.tables.seat_emptied(inc)
        self._admitter.give_back_seat(inc.seat)
        inc.seat = -1

    def _forget(self, inc: Incarnation) -> None:
        core = self.core
        inc.released = True
        core.update_reservation(inc)
        core.page_counts[PageState.NONE] -= inc.num_pages
        del core.live[inc.request_id]


def _check_host_pool(layout: KVCacheLayout, num_host_blocks: int, max_model_len: int) -> None:
    need = layout.pages(max_model_len) + 2
    if num_host_blocks < need:
        raise ConfigError(
            f"the host pool has {num_host_blocks} pages, but one request of max_model_len = {max_model_len} tokens needs "
            f"{need} (pages + 2); raise cache.host_pool_gib or lower max_model_len")

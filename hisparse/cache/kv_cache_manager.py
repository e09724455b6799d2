"""Facade of the cache: what an engine's scheduler may ask and do. Owns ids and states, never bytes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from hisparse.cache.admission import AdmissionArithmetic
from hisparse.cache.admitter import Admitter
from hisparse.cache.assembly import build_core
from hisparse.cache.coordinator import HiSparseCoordinator
from hisparse.cache.elastic import ElasticRegions
from hisparse.cache.fork import Fork
from hisparse.cache.growth import Growth
from hisparse.cache.loads import Loads
from hisparse.cache.offload import IndexerStore
from hisparse.cache.pages import Residency
from hisparse.cache.prefix import ExtraKeys, PageKeys, root_key
from hisparse.cache.releaser import Releaser
from hisparse.cache.report import PageView, RequestTiers, collect_stats, held_pages, page_views, request_tiers
from hisparse.cache.request import Identity
from hisparse.cache.retention import Retention
from hisparse.cache.spills import PendingTransfer
from hisparse.cache.step_planner import StepPlanner
from hisparse.cache.values import Admission, CacheStats, Fit, PrefixHit
from hisparse.config import CacheConfig
from hisparse.errors import InvariantError, RequestError
from hisparse.layout import KVCacheLayout
from hisparse.types import (
    HiSparseWorkerOutput,
    Landing,
    PageGenerations,
    RequestPages,
    SparseKVOffloadCommand,
    TableUpdate,
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
        lookahead_tokens: draft tokens that a decode step may add; admission counts their rows.
        num_ranks: ranks that acknowledge restores and page copies; num_host_writers: those that acknowledge spills.
        indexer_offload: store of indexer pages outside the device pool, or None.
        incarnation: of the workers; default a random 64-bit number. Block generations start there.
    Raises:
        ConfigError: a pool cannot hold even one request of `max_model_len`, with the numbers.
    """

    def __init__(self, layout: KVCacheLayout, config: CacheConfig, *, num_host_blocks: int, max_model_len: int,
                 max_seats: int, max_query_tokens: int, num_ranks: int, num_host_writers: int = 1,
                 lookahead_tokens: int = 0, indexer_offload: IndexerStore | None = None, incarnation: int | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.layout = layout
        self.config = config
        self.max_model_len = max_model_len
        self.max_seats = max_seats
        if incarnation is None:
            incarnation = secrets.randbits(64)
        self.core = build_core(layout, config, num_host_blocks=num_host_blocks, max_model_len=max_model_len,
                               max_query_tokens=max_query_tokens, lookahead_tokens=lookahead_tokens, incarnation=incarnation)
        self.residency = Residency(self.core)
        self.loads = Loads(self.core, self.residency)
        self.elastic = ElasticRegions(self.core)
        self.coordinator: HiSparseCoordinator | None = None
        if config.enabled:
            self.coordinator = HiSparseCoordinator(
                self.core, self.residency, self.loads, num_writers=num_host_writers, num_ranks=num_ranks,
                incarnation=incarnation, deadline_s=config.transfer_deadline_s, clock=clock)
        self._identities: dict[str, Identity] = {}
        self._fingerprint = layout.fingerprint()
        arithmetic = AdmissionArithmetic(self.core, config, lookahead_tokens=lookahead_tokens)
        self._admitter = Admitter(self.core, self.residency, self.loads, arithmetic,
                                  elastic=self.elastic, max_seats=max_seats, offload=indexer_offload)
        self._growth = Growth(self.core, self.residency)
        self._steps = StepPlanner(self.core, self.coordinator, self.elastic, offload=indexer_offload is not None)
        self._releaser = Releaser(self.core, self.residency, self.coordinator, self._admitter, indexer_offload)
        self.last_command: SparseKVOffloadCommand | None = None
        """What the last `plan_step` returned, for the connector to carry."""

    # ------------------------------------------------------------------------------------------- identity
    def open(self, request_id: str, token_ids: Sequence[int], *, extra_keys: ExtraKeys | None = None,
             max_tokens: int, retention: Retention | None = None) -> None:
        """Registers a request and computes its page keys once. Takes no blocks. `retention`: None = every full page.

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
            max_rows=min(num_tokens + max_tokens - 1, self.max_model_len), retention=retention)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Accepted (sampled) tokens join the identity."""
        if self._identity(request_id).keys.extend(token_ids):
            inc = self.core.live.get(request_id)
            if inc is not None:
                self._steps.seal(inc)

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
                            max_rows=min(keys.num_tokens + max_tokens - 1, self.max_model_len),
                            retention=parent.identity.retention)
        self._identities[child_id] = identity
        child = self._admitter.take_seat(identity)
        fork.fill(parent, child)
        return Admission(seat=child.seat, cached_tokens=child.valid)

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Blocks for the `num_tokens` positions behind those planned so far. False = no room now, nothing changed for it.

        Behind a replayed last token that is still in flight, ask for one more: the replay plans no position.
        """
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
            self._steps.seal(inc)
            self.core.update_reservation(inc)
        return valid

    def plan_step(self, step: int, scheduled: Sequence[tuple[str, int, int]]) -> SparseKVOffloadCommand | None:
        """Builds the HiSparse command of a step; the step counts as dispatched. None when HiSparse is off.

        Args:
            step: strictly increasing. scheduled: (request id, first position, tokens), after the last allocation.
        """
        self.last_command = self._steps.plan(step, scheduled)
        return self.last_command

    def take_table_updates(self) -> tuple[TableUpdate, ...]:
        """Table updates since the last call, when HiSparse is off (otherwise they travel in the command)."""
        return self.core.tables.take_updates()

    def retire(self, step: int, computed: Mapping[str, int]) -> None:
        """The output of every rank for `step` is back; `computed` = tokens now in cache per request of that step."""
        self._steps.retire(step, computed)

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
        self._releaser.store_indexer(inc)
        self._releaser.release(inc, finished=False)

    def free(self, request_id: str, *, finished: bool = True) -> None:
        """Gives everything back. finished: spills under way are published when they complete. Idempotent."""
        inc = self.core.live.get(request_id)
        if inc is not None:
            self._releaser.release(inc, finished=finished)

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
        self._releaser.hold(inc)
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
        return self.core.all_context_pages_resident(request_ids)

    def overdue_transfers(self) -> tuple[tuple[int, int], ...]:
        """(rank, transfer id) without completion for longer than `transfer_deadline_s`: that worker has failed."""
        return self.coordinator.spills.overdue() if self.coordinator is not None else ()

    def worker_lost(self, new_incarnation: int, *, host_pool_lost: bool = False) -> None:
        """All device state is void; durable host pages stay unless the pool died too. Requests must be re-admitted."""
        self.core.counters.workers_lost += 1
        if self.coordinator is not None:
            self.coordinator.crash(new_incarnation)
        self.loads.crash()
        self._releaser.crash(new_incarnation, host_pool_lost=host_pool_lost)
        self._steps.crash()

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

    def page_views(self, request_id: str) -> tuple[PageView, ...]:
        """Every page of an admitted request, by table entry. O(pages held). InvariantError: it holds nothing."""
        return page_views(self.core.incarnation(request_id))

    def request_tiers(self) -> dict[str, RequestTiers]:
        """Where every admitted request lives, by id, in order of admission."""
        return request_tiers(self.core)

    def oldest_transfers(self, most: int) -> tuple[PendingTransfer, ...]:
        """Transfers that have not completed, oldest first, up to `most`; () when HiSparse is off."""
        return self.coordinator.spills.oldest(most) if self.coordinator is not None else ()

    def published_host_blocks(self) -> tuple[int, ...]:
        """Host blocks that can be found by their page key, oldest first."""
        return tuple(self.core.source.published.blocks()) if self.core.source is not None else ()

    def _identity(self, request_id: str) -> Identity:
        identity = self._identities.get(request_id)
        if identity is None:
            raise InvariantError(f"request {request_id!r} is not open")
        return identity

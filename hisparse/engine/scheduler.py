"""Continuous batching: which requests run how many tokens in the next step, who is admitted, who is preempted.

Asks the cache manager for room and never counts blocks itself. Progress: requests are served in `Request.order`; a
victim is always the last in that order, so the first one always runs; loaded requests are never queued behind a waiting
head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hisparse.cache.kv_cache_manager import Admission, KVCacheManager, PrefixHit
from hisparse.config import SchedulerConfig
from hisparse.connector.base import IndexerOffload, RemotePrefill
from hisparse.engine.request import Request, RequestState
from hisparse.types import FinishReason, Landing, ScheduledChunk


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Monotonic counts since start."""

    preemptions: int = 0
    admissions: int = 0
    resident_landings: int = 0
    host_landings: int = 0
    indexer_loads: int = 0
    local_prefill_tokens: int = 0
    """Prompt tokens computed here although a prefill engine was asked first."""


class Scheduler:
    """Single-threaded; owned by EngineCore."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, *, offload: IndexerOffload | None = None,
                 remote_prefill: RemotePrefill | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.cache = cache
        self.offload = offload
        self.remote_prefill = remote_prefill
        self.waiting: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.running: list[Request] = []
        self.counters = SchedulerCounters()

    # ------------------------------------------------------------------------------------------- queues
    def add(self, request: Request) -> None:
        """Queues a request whose identity the cache manager already knows."""
        request.state = RequestState.WAITING
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: r.order)

    def remove(self, request: Request) -> None:
        """Takes the request out of every queue; its blocks stay with the cache manager."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        self.loading.pop(request.request_id, None)

    @property
    def num_live(self) -> int:
        return len(self.waiting) + len(self.loading) + len(self.running)

    # ------------------------------------------------------------------------------------------- one pass
    def schedule(self) -> list[ScheduledChunk]:
        """Chooses the chunks of the next step; all allocation of the pass happens here."""
        budget = self.config.max_step_tokens
        chosen: dict[str, int] = {}
        preempted = False
        for request in list(self.running):
            if request.state is not RequestState.RUNNING or budget == 0:
                continue
            tokens = min(request.pending_tokens, self.config.prefill_chunk_tokens, budget)
            granted, victims = self._make_room(request, tokens)
            preempted |= bool(victims)
            for victim in victims:
                budget += chosen.pop(victim.request_id, 0)
            if granted:
                chosen[request.request_id] = granted
                budget -= granted
        if not preempted:
            budget = self._admit(chosen, budget)
        requests = [request for request in self.running if request.request_id in chosen]
        plain = self.cache.all_context_pages_resident([r.request_id for r in requests]) if requests else False
        return [self._chunk(request, chosen[request.request_id], plain) for request in requests]

    def _make_room(self, request: Request, tokens: int) -> tuple[int, list[Request]]:
        """Allocates for `tokens` of a running request, preempting later ones if nothing else will free blocks.

        Returns (tokens granted, requests preempted). 0 tokens: the request waits this step, or was preempted itself.
        """
        victims: list[Request] = []
        if request.replays:
            return 1, victims
        while not self.cache.allocate(request.request_id, tokens):
            if tokens > self.cache.layout.block_size:
                tokens = max(tokens // 2, self.cache.layout.block_size)
                continue
            if self.cache.has_pending_reclamation():
                return 0, victims
            victim = max(self.running, key=lambda r: r.order)
            if victim is request and (len(self.running) == 1 and self.loading):
                return 0, victims
            self.preempt(victim)
            victims.append(victim)
            if victim is request:
                return 0, victims
        return tokens, victims

    def preempt(self, request: Request) -> None:
        """Back to waiting; durable pages stay published, so it resumes as a prefix hit."""
        self.running.remove(request)
        self.cache.preempt(request.request_id)
        request.preemptions += 1
        self.counters.preemptions += 1
        request.computed, request.seat = 0, -1
        self.add(request)

    # ------------------------------------------------------------------------------------------- admission
    def _admit(self, chosen: dict[str, int], budget: int) -> int:
        for request in list(self.waiting):
            if len(self.running) + len(self.loading) >= self.config.max_num_seqs:
                break
            imports = self.remote_prefill.remote_tokens(request.request_id) if self.remote_prefill else 0
            prefix = self.cache.prefix(request.request_id)
            if imports > prefix.tokens:
                if not self._admit_import(request, prefix, imports):
                    break
                continue
            if imports and self.remote_prefill is not None:
                self.remote_prefill.release_unused(request.request_id, "the whole prefix is already here")
            if budget == 0:
                break
            tokens = min(max(len(request.token_ids) - prefix.tokens, 1), self.config.prefill_chunk_tokens, budget)
            admission = self.cache.admit(request.request_id, prefix, landing=None, chunk_tokens=tokens)
            if admission is None:
                break
            self._admitted(request, admission)
            if admission.indexer_blocks:
                self._load(request)
                continue
            self._run(request)
            granted = self._make_first_chunk(request, tokens)
            if granted:
                chosen[request.request_id] = granted
                budget -= granted
        return budget

    def _make_first_chunk(self, request: Request, tokens: int) -> int:
        """Tokens of the chunk that admission counted in, or 0; a newcomer never preempts."""
        if request.replays:
            return 1
        tokens = min(tokens, request.pending_tokens)
        return tokens if self.cache.allocate(request.request_id, tokens) else 0

    def _admit_import(self, request: Request, prefix: PrefixHit, tokens: int) -> bool:
        assert self.remote_prefill is not None
        fits = {
            landing: self.cache.fits(request.request_id, prefix, landing=landing, import_tokens=tokens, chunk_tokens=1).now
            for landing in Landing
        }
        landing = self.remote_prefill.choose_landing(request.request_id, fits[Landing.RESIDENT], fits[Landing.HOST])
        if landing is None or not fits[landing]:
            return False
        admission = self.cache.admit(request.request_id, prefix, landing=landing, import_tokens=tokens, chunk_tokens=1)
        if admission is None:
            return False
        assert admission.import_target is not None
        self._admitted(request, admission)
        request.landing, request.importing = landing, True
        request.imported_tokens = tokens - admission.cached_tokens
        if landing is Landing.RESIDENT:
            self.counters.resident_landings += 1
        else:
            self.counters.host_landings += 1
        self.remote_prefill.start_import(request.request_id, admission.import_target)
        self._load(request)
        return True

    def _admitted(self, request: Request, admission: Admission) -> None:
        """Takes what the cache manager gave, and starts the load of indexer pages that only the store has."""
        self.waiting.remove(request)
        request.seat = admission.seat
        request.computed = admission.cached_tokens
        request.importing = False
        if request.cached_tokens is None:
            request.cached_tokens = admission.cached_tokens
        if request.queue_s is None:
            request.queue_s = self.clock() - request.arrived_s
        self.counters.admissions += 1
        if admission.indexer_blocks:
            assert self.offload is not None
            self.offload.plan_load(request.request_id, admission.indexer_keys, admission.indexer_blocks)
            self.counters.indexer_loads += 1

    def _load(self, request: Request) -> None:
        request.state = RequestState.LOADING
        self.loading[request.request_id] = request

    def _run(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        self.running.append(request)
        self.running.sort(key=lambda r: r.order)

    # ------------------------------------------------------------------------------------------- loads
    def loaded(self, request_ids: Iterable[str]) -> None:
        """Loads done on every rank: the requests run from the next pass on."""
        for request_id in request_ids:
            request = self.loading.pop(request_id, None)
            if request is not None:
                self._import_ended(request)
                request.computed = self.cache.finish_load(request_id, failed=False)
                self._run(request)

    def load_failed(self, request_id: str) -> Request | None:
        """Nothing of the load is valid: back to waiting, to be computed here with fresh blocks. None = not loading."""
        request = self.loading.pop(request_id, None)
        if request is None:
            return None
        self._import_ended(request)
        self.cache.finish_load(request_id, failed=True)
        self.cache.preempt(request_id)
        request.computed, request.seat = 0, -1
        self.add(request)
        return request

    def _import_ended(self, request: Request) -> None:
        if request.importing and request.loaded_s is None:
            request.loaded_s = self.clock() - request.arrived_s

    # ------------------------------------------------------------------------------------------- steps
    def _chunk(self, request: Request, tokens: int, plain: bool) -> ScheduledChunk:
        first = len(request.token_ids) - 1 if request.replays else request.computed
        last = first + tokens
        if request.recomputes and first < request.num_prompt_tokens:
            self.counters.local_prefill_tokens += min(last, request.num_prompt_tokens) - first
        return ScheduledChunk(
            request_id=request.request_id, seat=request.seat, first_position=first,
            token_ids=tuple(request.token_ids[first:last]), writes=not request.replays,
            sample=last == len(request.token_ids), plain_tables=plain, sampling=request.sampling,
        )

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Out of every queue, blocks given back. Idempotent."""
        if request.state is RequestState.FINISHED:
            return
        self.remove(request)
        self.cache.free(request.request_id, finished=reason in (FinishReason.STOP, FinishReason.LENGTH))
        self.cache.close(request.request_id)
        request.state, request.error = RequestState.FINISHED, error

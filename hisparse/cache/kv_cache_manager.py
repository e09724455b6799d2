"""Facade of the cache: what an engine's scheduler may ask and do. Owns ids and states, never bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hisparse.cache.offload import IndexerStore
from hisparse.cache.prefix import ExtraKeys
from hisparse.cache.values import Admission, CacheStats, Fit, PrefixHit
from hisparse.config import CacheConfig
from hisparse.layout import KVCacheLayout
from hisparse.types import (
    BlockTableUpdate,
    HiSparseWorkerOutput,
    Landing,
    PageGenerations,
    RequestPages,
    SparseKVOffloadCommand,
)

if TYPE_CHECKING:
    from hisparse.cache.coordinator import HiSparseCoordinator

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
        raise NotImplementedError

    coordinator: HiSparseCoordinator | None
    layout: KVCacheLayout

    # ------------------------------------------------------------------------------------------- identity
    def open(self, request_id: str, token_ids: Sequence[int], *, extra_keys: ExtraKeys | None = None,
             max_tokens: int) -> None:
        """Registers a request and computes its page keys once. Takes no blocks.

        Raises:
            RequestError: it can never fit (with the numbers). InvariantError: the id is open already.
        """
        raise NotImplementedError

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Accepted (sampled) tokens join the identity."""
        raise NotImplementedError

    def close(self, request_id: str) -> None:
        """Forgets the identity; frees first if it still holds blocks. Unknown ids are ignored."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- pure queries
    def prefix(self, request_id: str) -> PrefixHit:
        """The longest prefix of whole pages that every group has or can load. Pure."""
        raise NotImplementedError

    def fits(self, request_id: str, prefix: PrefixHit, *, landing: Landing | None, import_tokens: int = 0,
             chunk_tokens: int) -> Fit:
        """Whether `admit` with the same arguments finds room. Pure: changes nothing."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- life cycle
    def admit(self, request_id: str, prefix: PrefixHit, *, landing: Landing | None = None, import_tokens: int = 0,
              chunk_tokens: int) -> Admission | None:
        """Gives the request a seat, its prefix pages, and what it needs to reach its first step. None = no room now.

        With `landing`, also leases every block of the positions [cached, import_tokens); their pages stay unreadable
        until `finish_load`. May answer None although `fits` said now: blocks that outside writers need must be quiet
        (no step or copy in flight touches them); ask again in the next pass.
        """
        raise NotImplementedError

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Blocks for the positions [computed, computed + num_tokens). False = no room now, nothing changed for it."""
        raise NotImplementedError

    def finish_load(self, request_id: str, *, failed: bool) -> int:
        """Outcome of an import and/or indexer load, drained on every rank. Returns the tokens now valid.

        Failed: nothing of it is valid; the request keeps its GPU-indexed prefix and recomputes with fresh blocks.
        Also call it for requests freed meanwhile (their blocks are pinned until then): counted, returns 0.
        """
        raise NotImplementedError

    def plan_step(self, step: int, scheduled: Sequence[tuple[str, int, int]]) -> SparseKVOffloadCommand | None:
        """Builds the HiSparse command of a step; the step counts as dispatched. None when HiSparse is off.

        Args:
            step: strictly increasing. scheduled: (request id, first position, tokens), after the last allocation.
        """
        raise NotImplementedError

    def take_table_updates(self) -> tuple[BlockTableUpdate, ...]:
        """Table updates since the last call, when HiSparse is off (otherwise they travel in the command)."""
        raise NotImplementedError

    def retire(self, step: int, computed: Mapping[str, int]) -> None:
        """The output of every rank for `step` is back; `computed` = tokens now in cache per request of that step."""
        raise NotImplementedError

    def on_worker_output(self, outputs: Sequence[HiSparseWorkerOutput]) -> None:
        """Acknowledgements of transfers."""
        raise NotImplementedError

    def preempt(self, request_id: str) -> None:
        """Gives everything back; durable pages stay published; indexer pages go to the store first. Idempotent."""
        raise NotImplementedError

    def free(self, request_id: str, *, finished: bool = True) -> None:
        """Gives everything back. finished: spills under way are published when they complete. Idempotent."""
        raise NotImplementedError

    def computed_tokens(self, request_id: str) -> int:
        """Tokens whose KV is valid; 0 when it holds nothing."""
        raise NotImplementedError

    def seat(self, request_id: str) -> int:
        """Seat of an admitted request; -1 when it has none."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- indexer offload
    def take_sealed_indexer_pages(self) -> list[tuple[bytes, int]]:
        """(page key, block) sealed since the last call and still cached; each block is pinned for the caller."""
        raise NotImplementedError

    def unpin_indexer(self, blocks: Sequence[int]) -> None:
        """Drops pins taken by `take_sealed_indexer_pages` or for a store planned at preemption."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- P/D prefill side
    def hold(self, request_id: str) -> tuple[RequestPages, PageGenerations]:
        """Keeps a finished request's pages for a decode engine: no page is unpinned any more, its seat is given back.

        Lists a resident block only if it is pinned and a host block only if it is durable. Ends with `free`.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- scheduler queries
    def has_pending_reclamation(self) -> bool:
        """Blocks will come free without a preemption: wait."""
        raise NotImplementedError

    def has_pending_work(self) -> bool:
        """Transfers to send or in flight, loads or pages retained: keep stepping even with nothing scheduled."""
        raise NotImplementedError

    def all_context_pages_resident(self, request_ids: Sequence[str]) -> bool:
        """Every page of every request is resident in every group. Ask after the pass's last allocation."""
        raise NotImplementedError

    def overdue_transfers(self) -> tuple[tuple[int, int], ...]:
        """(rank, transfer id) without completion for longer than `transfer_deadline_s`: that worker has failed."""
        raise NotImplementedError

    def worker_lost(self, new_incarnation: int, *, host_pool_lost: bool = False) -> None:
        """All device state is void; durable host pages stay unless the pool died too. Requests must be re-admitted."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises InvariantError unless both pools and every account are consistent."""
        raise NotImplementedError

    def stats(self) -> CacheStats:
        """Gauges and counters."""
        raise NotImplementedError

"""Frozen answers of the cache facade."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.types import ImportTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """Tokens of a request whose KV is here already, as whole pages common to every group.

    Attributes:
        tokens: `host_pages * block_size`. It may equal the request's length: then the last token is replayed and
            nothing is written (its rows are here).
        host_pages: published host pages that hit.
        indexer_gpu_pages: of these, how many have their indexer page on the GPU (a prefix).
        indexer_load_pages: the rest, all held by the indexer store: `host_pages - indexer_gpu_pages`.
    """

    tokens: int = 0
    host_pages: int = 0
    indexer_gpu_pages: int = 0
    indexer_load_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Answer of an admission query. `now` implies `ever`. `reason` has the numbers, also when it fits."""

    now: bool
    ever: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a request got.

    Attributes:
        seat: row of every per-seat table, 0 .. max_seats-1.
        cached_tokens: tokens whose KV is valid once the loads named below have finished (at once without loads).
            Equal to the request's length in a full hit: replay the last token with `writes=False`.
        import_target: where the positions [cached_tokens, import_tokens) must land; None = nothing to import.
        indexer_keys, indexer_blocks: pages to load from the indexer store before the request may run; () = none.
    """

    seat: int
    cached_tokens: int
    import_target: ImportTarget | None = None
    indexer_keys: tuple[bytes, ...] = ()
    indexer_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Gauges (now) and counters (since start; they survive a lost worker). Blocks exclude the null blocks."""

    device_blocks_total: int = 0
    device_blocks_free: int = 0
    """Free or free-but-readable."""
    device_blocks_loose: int = 0
    """Free-but-readable: loose pages, copies and cached indexer pages."""
    device_blocks_reserved: int = 0
    host_blocks_total: int = 0
    host_blocks_free: int = 0
    host_blocks_reserved: int = 0
    host_extents_whole: int = 0
    """Extents of the host pool without a used or readable block."""
    host_pages: int = 0
    """Pages of admitted requests; shared ones count for each."""
    host_runs: int = 0
    """Runs of consecutive host blocks that these pages form, each request's in page order: `host_pages / host_runs` is the
    mean length. 1 = scattered."""
    host_pages_published: int = 0
    requests_open: int = 0
    requests_admitted: int = 0
    hot_seats: int = 0
    hot_blocks: int = 0
    hot_blocks_elastic: int = 0
    """Of `hot_blocks`, those beyond the regions' starting size; not in `device_blocks_free`, but given back on demand."""
    pages_gpu_only: int = 0
    pages_spilling: int = 0
    pages_clean_pinned: int = 0
    pages_clean_loose: int = 0
    pages_host_only: int = 0
    pages_importing: int = 0
    transfers_in_flight: int = 0
    loads_in_flight: int = 0
    # ---- counters
    spills_planned: int = 0
    spills_without_bytes: int = 0
    spills_completed: int = 0
    spills_failed: int = 0
    spill_seconds: float = 0.0
    """Of completed spills, from a worker's last "enqueued" to the last "completed"."""
    pages_unpinned: int = 0
    pages_reused: int = 0
    """Loose pages whose blocks were handed out again."""
    pages_adopted: int = 0
    pages_published: int = 0
    host_pages_evicted: int = 0
    prefix_hit_tokens: int = 0
    hot_required: int = 0
    hot_blocks_grown: int = 0
    hot_blocks_taken_back: int = 0
    """Given back before their region was released."""
    imports_started: int = 0
    imports_completed: int = 0
    imports_failed: int = 0
    preemptions: int = 0
    acks_repeated: int = 0
    acks_old_incarnation: int = 0
    late_completions: int = 0
    """Outcomes of loads whose request was gone: pins dropped, otherwise ignored."""
    workers_lost: int = 0

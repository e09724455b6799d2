"""State shared by the parts of the cache: pools, per-group managers, requests, accounts, and page moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hisparse.cache.block_pool import BlockPool
from hisparse.cache.groups import (
    HiSparseHotManager,
    HiSparseResidentManager,
    HiSparseSourceManager,
    IndexerManager,
)
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import PINNED, READABLE_ON_GPU, PageEvent, PageState, next_state
from hisparse.cache.steps import StepClock
from hisparse.cache.tables import TableChanges
from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout

ABSENT: tuple[int, ...] = ()


@dataclass(slots=True)
class Counters:
    """Monotonic counts since start; see CacheStats."""

    spills_planned: int = 0
    spills_without_bytes: int = 0
    spills_completed: int = 0
    spills_failed: int = 0
    pages_unpinned: int = 0
    pages_reused: int = 0
    pages_adopted: int = 0
    pages_published: int = 0
    prefix_hit_tokens: int = 0
    hot_required: int = 0
    hot_blocks_grown: int = 0
    hot_blocks_taken_back: int = 0
    imports_started: int = 0
    imports_completed: int = 0
    imports_failed: int = 0
    preemptions: int = 0
    acks_repeated: int = 0
    acks_old_incarnation: int = 0
    late_completions: int = 0
    workers_lost: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class CacheCore:
    """The one place where blocks go back and pages change state. `source` and `hot` are None when HiSparse is off."""

    layout: KVCacheLayout
    max_model_len: int
    watermark_blocks: int
    prefix_cache: bool
    pool: BlockPool
    indexer: IndexerManager
    residents: HiSparseResidentManager
    hot: HiSparseHotManager | None
    source: HiSparseSourceManager | None
    tables: TableChanges
    clock: StepClock = field(default_factory=StepClock)
    counters: Counters = field(default_factory=Counters)
    live: dict[str, Incarnation] = field(default_factory=dict)
    """Admitted requests by id, in order of admission."""
    page_counts: Counter[PageState] = field(default_factory=Counter)
    fences: dict[int, int] = field(default_factory=dict)
    """Device block -> id of the spill whose copy may still read it (enqueued everywhere, not completed)."""
    reserved_device: int = 0
    reserved_host: int = 0

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def groups_per_page(self) -> int:
        return self.residents.blocks_per_page

    def incarnation(self, request_id: str) -> Incarnation:
        inc = self.live.get(request_id)
        if inc is None:
            raise InvariantError(f"request {request_id!r} holds nothing: it was not admitted, or was freed")
        return inc

    # ------------------------------------------------------------------------------------------- pages
    def move(self, inc: Incarnation, page: int, event: PageEvent) -> PageState:
        """One page takes one event; keeps the counts. Blocks and tables are the caller's."""
        old = inc.states[page]
        new = next_state(old, event, inc.request_id, page)
        inc.states[page] = new
        self.page_counts[old] -= 1
        self.page_counts[new] += 1
        inc.num_pinned += (new in PINNED) - (old in PINNED)
        inc.num_spilling += (new is PageState.SPILLING) - (old is PageState.SPILLING)
        if old is PageState.CLEAN_PINNED:
            inc.clean_pinned.discard(page)
        if new is PageState.CLEAN_PINNED:
            inc.clean_pinned.add(page)
        return new

    def append_page(self, inc: Incarnation, event: PageEvent, *, indexer: int, host: int,
                    resident: tuple[int, ...]) -> int:
        """A new last page with the blocks given (0 or () = none). Returns its index."""
        page = len(inc.states)
        inc.states.append(PageState.NONE)
        inc.indexer.append(indexer)
        inc.host.append(host)
        inc.resident.append(resident)
        inc.num_absent += not resident
        self.page_counts[PageState.NONE] += 1
        self.move(inc, page, event)
        return page

    def set_resident(self, inc: Incarnation, page: int, blocks: tuple[int, ...]) -> None:
        """Replaces the resident entry of a page; queues the tables."""
        inc.num_absent += (not blocks) - (not inc.resident[page])
        inc.resident[page] = blocks
        if inc.seat >= 0:
            self.tables.resident(inc, page)

    def drop_last_page(self, inc: Incarnation) -> None:
        """Removes the last page, which is in state NONE and whose blocks were given back."""
        if inc.states[-1] is not PageState.NONE:
            raise InvariantError(f"page {len(inc.states) - 1} of {inc.request_id!r} dropped as {inc.states[-1].name}")
        self.page_counts[PageState.NONE] -= 1
        inc.num_absent -= not inc.resident[-1]
        page = len(inc.states) - 1
        inc.states.pop()
        inc.indexer.pop()
        inc.host.pop()
        inc.resident.pop()
        inc.covered.pop(page, None)

    # ------------------------------------------------------------------------------------------- blocks going back
    def free_device(self, blocks: Iterable[int]) -> None:
        """Drops one reference on each device block; steps in flight may still touch them."""
        blocks = list(blocks)
        self.clock.mark_busy(blocks)
        self.pool.free(blocks)

    def free_host_after_steps(self, blocks: Iterable[int]) -> None:
        """Drops one reference on each host block once no dispatched step can touch it."""
        blocks = list(blocks)
        source = self.source
        if source is not None and blocks:
            pool = source.pool
            self.clock.after_dispatched(lambda: pool.free(blocks))

    def is_quiet(self, block: int) -> bool:
        """No dispatched step and no copy touches this free device block: writers outside the compute stream may."""
        if block in self.fences or self.clock.is_busy(block):
            return False
        return not (self.clock.outstanding and self.pool.is_watched(block))

    @property
    def all_quiet(self) -> bool:
        return not self.fences and not self.clock.outstanding

    # ------------------------------------------------------------------------------------------- reservations
    @property
    def num_free(self) -> int:
        """Device blocks that are free, or would be at once: what hot regions have beyond their starting size counts."""
        return self.pool.num_free + (self.hot.elastic_blocks if self.hot is not None else 0)

    def available_device(self, inc: Incarnation | None = None) -> int:
        """Free blocks not promised to others."""
        return self.num_free - self.reserved_device + (inc.reserved_device if inc is not None else 0)

    def available_host(self, inc: Incarnation | None = None) -> int:
        if self.source is None:
            return 1 << 62
        return self.source.pool.num_free - self.reserved_host + (inc.reserved_host if inc is not None else 0)

    def update_reservation(self, inc: Incarnation) -> None:
        """What this request still needs to reach its first step, from its state alone."""
        device = host = 0
        if not inc.released and not inc.held:
            missing = max(0, inc.target_pages - inc.num_pages)
            resident = missing
            if inc.host_backed:
                resident = min(missing, max(0, inc.window_pages - inc.num_pinned))
            device = missing + resident * self.groups_per_page
            host = max(0, inc.host_target_pages - inc.num_pages)
        self.reserved_device += device - inc.reserved_device
        self.reserved_host += host - inc.reserved_host
        inc.reserved_device, inc.reserved_host = device, host

    # ------------------------------------------------------------------------------------------- conservation
    def check(self) -> None:
        """Both pools; every count kept incrementally equals what the pages say; references equal their holders."""
        self.pool.check()
        self.indexer.cached.check()
        if self.source is not None:
            self.source.pool.check()
            self.source.published.check()
        counts: Counter[PageState] = Counter()
        for inc in self.live.values():
            _check_incarnation(inc, self.groups_per_page)
            counts.update(inc.states)
        if +counts != +self.page_counts:
            raise InvariantError(f"page states counted {dict(+self.page_counts)}, held {dict(+counts)}")
        for name in ("device", "host"):
            total = sum(getattr(inc, f"reserved_{name}") for inc in self.live.values())
            if total != getattr(self, f"reserved_{name}"):
                raise InvariantError(f"{name} blocks reserved: {getattr(self, f'reserved_{name}')}, by request {total}")


def _check_incarnation(inc: Incarnation, groups: int) -> None:
    who = f"request {inc.request_id!r}"
    if not len(inc.states) == len(inc.indexer) == len(inc.host) == len(inc.resident):
        raise InvariantError(f"{who}: page lists differ in length")
    pinned = sum(state in PINNED for state in inc.states)
    spilling = sum(state is PageState.SPILLING for state in inc.states)
    absent = sum(not blocks for blocks in inc.resident)
    clean = {page for page, state in enumerate(inc.states) if state is PageState.CLEAN_PINNED}
    if (pinned, spilling, absent, clean) != (inc.num_pinned, inc.num_spilling, inc.num_absent, inc.clean_pinned):
        raise InvariantError(f"{who}: counts of pages {(inc.num_pinned, inc.num_spilling, inc.num_absent)} are off")
    for page, (state, blocks) in enumerate(zip(inc.states, inc.resident, strict=True)):
        if state is PageState.NONE:
            raise InvariantError(f"{who}: page {page} is in the table in state NONE")
        if groups and (state in READABLE_ON_GPU) != bool(blocks) and state is not PageState.IMPORTING:
            raise InvariantError(f"{who}: page {page} is {state.name} with resident blocks {blocks}")
        if blocks and len(blocks) != groups:
            raise InvariantError(f"{who}: page {page} has {len(blocks)} resident blocks for {groups} groups")
        if not inc.indexer[page]:
            raise InvariantError(f"{who}: page {page} has no indexer block")
        if state is PageState.CLEAN_LOOSE:
            shared = inc.shared.get(page)
            if shared is None or (inc, page) not in shared.owners or not shared.alive or shared.blocks != blocks:
                raise InvariantError(f"{who}: loose page {page} is not an owner of its blocks")

"""State shared by the parts of the cache: pools, per-group managers, requests, accounts, and page moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hisparse.cache.block_pool import BlockPool
from hisparse.cache.extents import num_runs
from hisparse.cache.groups import (
    HiSparseHotManager,
    HiSparseResidentManager,
    HiSparseSourceManager,
    IndexerManager,
)
from hisparse.cache.prefix_index import PrefixIndex
from hisparse.cache.request import Incarnation, ResidentPage
from hisparse.cache.residency import PINNED, READABLE_ON_GPU, PageEvent, PageState, next_state
from hisparse.cache.steps import StepClock
from hisparse.cache.tables import TableChanges
from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout

_IS_PINNED = tuple(state in PINNED for state in PageState)
_CLEAN_PINNED, _SPILLING = PageState.CLEAN_PINNED, PageState.SPILLING


@dataclass(slots=True)
class Counters:
    """Monotonic counts since start; see CacheStats."""

    spills_planned: int = 0
    spills_without_bytes: int = 0
    spills_completed: int = 0
    spills_failed: int = 0
    spill_seconds: float = 0.0
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
    index: PrefixIndex
    clock: StepClock = field(default_factory=StepClock)
    counters: Counters = field(default_factory=Counters)
    live: dict[str, Incarnation] = field(default_factory=dict)
    """Admitted requests by id, in order of admission."""
    page_counts: list[int] = field(default_factory=lambda: [0] * len(PageState))
    """Pages of all requests by state."""
    fences: dict[int, int] = field(default_factory=dict)
    """Free device block -> id of the spill whose copy may still read it (enqueued everywhere, not completed)."""
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

    def all_context_pages_resident(self, request_ids: Sequence[str]) -> bool:
        """Every page of these requests is resident in every group. False without resident groups."""
        if not self.groups_per_page:
            return False
        for request_id in request_ids:
            inc = self.incarnation(request_id)
            if len(inc.resident) < len(inc.states):
                return False
        return True

    # ------------------------------------------------------------------------------------------- pages
    def move(self, inc: Incarnation, page: int, event: PageEvent) -> None:
        """One page takes one event; keeps the counts. Blocks and tables are the caller's."""
        old = inc.states[page]
        new = next_state(old, event, inc.identity.request_id, page)
        inc.states[page] = new
        counts = self.page_counts
        counts[old] -= 1
        counts[new] += 1
        inc.num_pinned += _IS_PINNED[new] - _IS_PINNED[old]
        if old == _CLEAN_PINNED:
            inc.clean_pinned.discard(page)
        elif old == _SPILLING:
            inc.num_spilling -= 1
        if new == _CLEAN_PINNED:
            inc.clean_pinned.add(page)
        elif new == _SPILLING:
            inc.num_spilling += 1

    def move_run(self, inc: Incarnation, first: int, end: int, event: PageEvent) -> None:
        """`move` for the pages [first, end): a run in one state costs one look into the table."""
        page = first
        while page < end:
            old = inc.states[page]
            stop = page + 1
            while stop < end and inc.states[stop] == old:
                stop += 1
            count = stop - page
            new = next_state(old, event, inc.identity.request_id, page)
            inc.states[page:stop] = bytes([new]) * count
            self.page_counts[old] -= count
            self.page_counts[new] += count
            inc.num_pinned += count * (_IS_PINNED[new] - _IS_PINNED[old])
            inc.num_spilling += count * ((new == _SPILLING) - (old == _SPILLING))
            if old == _CLEAN_PINNED:
                inc.clean_pinned.difference_update(range(page, stop))
            if new == _CLEAN_PINNED:
                inc.clean_pinned.update(range(page, stop))
            page = stop

    def append_pages(self, inc: Incarnation, event: PageEvent, *, indexer: Sequence[int], host: Sequence[int]) -> None:
        """New last pages, not resident yet, with one indexer and one host block each (0 = none); queues their tables."""
        first, count = len(inc.states), len(indexer)
        inc.states += bytes(count)
        inc.indexer.extend(indexer)
        inc.host.extend(host)
        inc.host_runs += num_runs(inc.host, first)
        self.page_counts[PageState.NONE] += count
        self.move_run(inc, first, first + count, event)
        self.tables.pages(inc, first, first + count)

    def new_resident(self, inc: Incarnation, page: int, blocks: tuple[int, ...],
                     reused: Callable[[ResidentPage, int], None]) -> None:
        """The page is resident in blocks just handed out; queues its tables."""
        inc.resident[page] = ResidentPage(blocks, reused)
        self.tables.resident(inc, page, page + 1)

    def drop_last_page(self, inc: Incarnation) -> None:
        """Removes the last page, which is in state NONE and whose blocks were given back."""
        page = len(inc.states) - 1
        if inc.states[page] != PageState.NONE or page in inc.resident:
            raise InvariantError(f"page {page} of {inc.request_id!r} dropped as {inc.state(page).name}")
        self.page_counts[PageState.NONE] -= 1
        inc.states.pop()
        inc.indexer.pop()
        inc.host_runs -= num_runs(inc.host, page)
        inc.host.pop()
        inc.covered.pop(page, None)

    # ------------------------------------------------------------------------------------------- blocks going back
    def free_device(self, blocks: Sequence[int]) -> None:
        """Drops one reference on each device block; steps in flight may still touch them."""
        clock = self.clock
        if clock.dispatched > clock.retired:
            clock.mark_busy(blocks)
        self.pool.free(blocks)

    def pin(self, page: ResidentPage) -> None:
        """One more holder of a readable or pinned page."""
        if not page.pins:
            self.pool.touch(page.blocks)
        page.pins += 1

    def unpin(self, page: ResidentPage) -> None:
        """One holder less; the last one frees the blocks, readable if somebody may want them. While a copy may still read
        them they are fenced."""
        page.pins -= 1
        if page.pins:
            if page.pins < 0:
                raise InvariantError(f"resident page {page.blocks} was unpinned once more than it was pinned")
            return
        if page.copy_id:
            self.fences.update(dict.fromkeys(page.blocks, page.copy_id))
        if page.wanted:
            page.watched = True
            self.pool.watch(page.blocks, page)
        self.free_device(page.blocks)

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

    def num_quiet(self, beside: Sequence[int]) -> int:
        """Free device blocks that are quiet, not counting `beside`. O(blocks that are not quiet)."""
        readable = not self.clock.outstanding
        return self.pool.num_quiet({*self.fences, *self.clock.busy, *beside}, readable=readable)

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
        num_pages = len(inc.states)
        if not inc.released and not inc.held:
            if num_pages < inc.target_pages:
                missing = resident = inc.target_pages - num_pages
                if inc.host_backed:
                    held = inc.num_pinned
                    if inc.loading:  # pages that an import fills are pinned once it has landed
                        held += sum([inc.states[page] == PageState.IMPORTING for page in inc.resident])
                    resident = min(missing, max(0, inc.window_pages - held))
                device = missing + resident * self.groups_per_page
            if num_pages < inc.host_target_pages:
                host = inc.host_target_pages - num_pages
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
        counts = [0] * len(PageState)
        for inc in self.live.values():
            _check_incarnation(inc, self.groups_per_page)
            for state in PageState:
                counts[state] += inc.states.count(state)
        if counts != self.page_counts:
            raise InvariantError(f"page states counted {self.page_counts}, held {counts}")
        for name in ("device", "host"):
            total = sum(getattr(inc, f"reserved_{name}") for inc in self.live.values())
            if total != getattr(self, f"reserved_{name}"):
                raise InvariantError(f"{name} blocks reserved: {getattr(self, f'reserved_{name}')}, by request {total}")


def _check_incarnation(inc: Incarnation, groups: int) -> None:
    who = f"request {inc.request_id!r}"
    if not len(inc.states) == len(inc.indexer) == len(inc.host):
        raise InvariantError(f"{who}: page lists differ in length")
    pinned = sum(state in PINNED for state in inc.states)
    spilling = inc.states.count(PageState.SPILLING)
    clean = {page for page, state in enumerate(inc.states) if state == PageState.CLEAN_PINNED}
    if (pinned, spilling, clean) != (inc.num_pinned, inc.num_spilling, inc.clean_pinned):
        raise InvariantError(f"{who}: counts of pages {(inc.num_pinned, inc.num_spilling)} are off")
    if inc.states.count(PageState.NONE):
        raise InvariantError(f"{who}: page {inc.states.index(PageState.NONE)} is in the table in state NONE")
    if inc.host_runs != num_runs(inc.host, 0):
        raise InvariantError(f"{who}: {inc.host_runs} runs of host blocks counted, there are {num_runs(inc.host, 0)}")
    if any(not 0 <= page < inc.num_pages for page in inc.resident):
        raise InvariantError(f"{who}: resident pages {sorted(inc.resident)} of {inc.num_pages} pages")
    for page, state in enumerate(inc.states):
        resident = inc.resident.get(page)
        if groups and (state in READABLE_ON_GPU) != (resident is not None) and state != PageState.IMPORTING:
            raise InvariantError(f"{who}: page {page} is {PageState(state).name} with resident blocks {inc.blocks(page)}")
        if not inc.indexer[page]:
            raise InvariantError(f"{who}: page {page} has no indexer block")
        if resident is None:
            continue
        if len(resident.blocks) != groups:
            raise InvariantError(f"{who}: page {page} has {len(resident.blocks)} resident blocks for {groups} groups")
        if not resident.alive:
            raise InvariantError(f"{who}: page {page} reads blocks {resident.blocks} after their reuse")
        if state == PageState.CLEAN_LOOSE and (resident.owners or {}).get(inc) != page:
            raise InvariantError(f"{who}: loose page {page} is not an owner of its blocks")
        if state in PINNED and resident.pins < 1:
            raise InvariantError(f"{who}: page {page} is {PageState(state).name} without a pin on {resident.blocks}")

"""Damage to the state of a cache, each against one conservation law of `check()`. Like the faults, it knows the insides."""

from __future__ import annotations

from collections.abc import Callable

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import PageState

Damage = Callable[[KVCacheManager], None]


def page(m: KVCacheManager, state: PageState) -> tuple[Incarnation, int]:
    """A page in this state, of any request."""
    return next((inc, page) for inc in m.core.live.values() for page, held in enumerate(inc.states) if held == state)


def some(m: KVCacheManager) -> Incarnation:
    """A request with a hot region."""
    return next(inc for inc in m.core.live.values() if inc.hot)


# ------------------------------------------------------------------------------------------- the pools
def free_block_referenced(m: KVCacheManager) -> None:
    m.core.pool._refs[m.core.pool.free_blocks()[0]] = 1


def negative_references(m: KVCacheManager) -> None:
    m.core.pool._refs[m.core.pool.free_blocks()[0]] = -1


def free_block_lost(m: KVCacheManager) -> None:
    m.core.source.pool.extents.take(1)


def readable_block_without_watcher(m: KVCacheManager) -> None:
    m.core.pool._watched[m.core.pool._next[0]] = 0


def plain_block_with_watcher(m: KVCacheManager) -> None:
    m.core.source.pool._watched[m.core.source.pool.free_blocks()[0]] = 1


def free_block_outside_its_extent(m: KVCacheManager) -> None:
    m.core.source.pool.extents._free[m.core.source.pool.free_blocks()[0]] = 0


def extent_miscounted(m: KVCacheManager) -> None:
    m.core.source.pool.extents._room[-1] += 1


def free_host_blocks_miscounted(m: KVCacheManager) -> None:
    m.core.source.pool.extents._count += 1


def null_block_free(m: KVCacheManager) -> None:
    m.core.source.pool.extents.append(0)


def runs_of_host_blocks_miscounted(m: KVCacheManager) -> None:
    some(m).host_runs += 1


def readable_blocks_miscounted(m: KVCacheManager) -> None:
    m.core.pool.num_readable += 1


def broken_link(m: KVCacheManager) -> None:
    m.core.pool._prev[m.core.pool._next[0]] = m.core.pool._next[0]


def wrong_tail(m: KVCacheManager) -> None:
    m.core.pool._prev[0] = m.core.pool._next[0]


def null_block_watched(m: KVCacheManager) -> None:
    m.core.pool._watched[0] = 1


def watcher_of_nobody(m: KVCacheManager) -> None:
    m.core.pool._own[m.core.pool._stack[-1]] = None


# ------------------------------------------------------------------------------------------- pages and requests
def state_changed_behind_the_counts(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.CLEAN_PINNED)
    inc.states[number] = PageState.GPU_ONLY


def page_counts_off(m: KVCacheManager) -> None:
    m.core.page_counts[PageState.HOST_ONLY] += 1


def page_list_too_short(m: KVCacheManager) -> None:
    some(m).host.pop()


def page_without_state(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.HOST_ONLY)
    inc.states[number] = PageState.NONE


def pinned_page_without_blocks(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.GPU_ONLY)
    del inc.resident[number]


def host_only_page_with_blocks(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.HOST_ONLY)
    inc.resident[number] = next(iter(inc.resident.values()))


def resident_page_beyond_the_table(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.GPU_ONLY)
    inc.resident[999] = inc.resident[number]


def page_without_indexer_block(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.GPU_ONLY)
    inc.indexer[number] = 0


def page_resident_in_one_group_only(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.GPU_ONLY)
    inc.resident[number].blocks = inc.resident[number].blocks[:1]


def loose_page_read_after_its_reuse(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.CLEAN_LOOSE)
    inc.resident[number].alive = False


def loose_page_without_owner(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.CLEAN_LOOSE)
    inc.resident[number].owners = None


def page_without_pin(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.GPU_ONLY)
    inc.resident[number].pins = 0


def pinned_page_without_references(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.GPU_ONLY)
    m.core.pool.free(inc.resident[number].blocks)


def loose_page_unwatched(m: KVCacheManager) -> None:
    inc, number = page(m, PageState.CLEAN_LOOSE)
    m.core.pool.unwatch(inc.resident[number].blocks)


def reservation_off(m: KVCacheManager) -> None:
    m.core.reserved_host += 1


def seat_given_twice(m: KVCacheManager) -> None:
    m._admitter.free_seats.append(some(m).seat)


# ------------------------------------------------------------------------------------------- the rest
def published_block_unwatched(m: KVCacheManager) -> None:
    m.core.source.pool.unwatch(m.published_host_blocks()[:1])


def published_block_miscounted(m: KVCacheManager) -> None:
    m.core.source.published._count += 1


def copy_under_a_wrong_key(m: KVCacheManager) -> None:
    next(iter(m.residency.copies.values())).key = b"?"


def copy_unwatched(m: KVCacheManager) -> None:
    m.core.pool.unwatch(next(copy for copy in m.residency.copies.values() if not copy.pins).blocks)


def hot_region_of_another_size(m: KVCacheManager) -> None:
    some(m).hot[0].pop()


def hot_block_shared(m: KVCacheManager) -> None:
    m.core.pool.touch(some(m).hot[0][:1])


def grown_blocks_miscounted(m: KVCacheManager) -> None:
    m.core.hot.grown.clear()


def spill_without_pin_on_its_host_block(m: KVCacheManager) -> None:
    transfer = next(iter(m.coordinator.spills.transfers.values()))
    for _ in range(m.core.source.pool.refs(transfer.host_blocks[0])):
        m.core.source.pool.free(transfer.host_blocks)


def spills_miscounted(m: KVCacheManager) -> None:
    inc, _ = page(m, PageState.SPILLING)
    inc.pending_spills += 1


def fence_of_nobody(m: KVCacheManager) -> None:
    m.core.fences[1] = 999


def detached_without_spills(m: KVCacheManager) -> None:
    m.coordinator.publication.detached[some(m)] = {}


def load_without_pins(m: KVCacheManager) -> None:
    load = next(iter(m.loads.pending.values()))
    for _ in range(m.core.pool.refs(load.device_blocks[0])):
        m.core.pool.free(load.device_blocks[:1])


def load_without_host_pins(m: KVCacheManager) -> None:
    load = next(iter(m.loads.pending.values()))
    for _ in range(m.core.source.pool.refs(load.host_blocks[-1])):
        m.core.source.pool.free(load.host_blocks[-1:])


def load_not_recorded(m: KVCacheManager) -> None:
    m.loads.pending.clear()


DAMAGES: tuple[tuple[Damage, str], ...] = (
    (free_block_referenced, "free list is not the set of unreferenced blocks"),
    (negative_references, "negative or null-block references"),
    (free_block_lost, "host pool: the free list is not the set of unreferenced"),
    (readable_block_without_watcher, "on the readable list without a watcher"),
    (free_block_outside_its_extent, "host pool: extent .* free blocks, it has"),
    (extent_miscounted, "host pool: extent .* free blocks, it has"),
    (free_host_blocks_miscounted, "free blocks counted, there are"),
    (null_block_free, "the null block is free"),
    (runs_of_host_blocks_miscounted, "runs of host blocks counted"),
    (plain_block_with_watcher, "has a watcher but is not on the readable list"),
    (readable_blocks_miscounted, "readable free blocks, .* counted"),
    (broken_link, "links back to"),
    (wrong_tail, "tail is"),
    (null_block_watched, "the null block has a watcher"),
    (watcher_of_nobody, "watcher of their own"),
    (state_changed_behind_the_counts, "counts of pages .* are off"),
    (page_counts_off, "page states counted"),
    (page_list_too_short, "page lists differ in length"),
    (page_without_state, "is in the table in state NONE"),
    (pinned_page_without_blocks, r"is GPU_ONLY with resident blocks \(\)"),
    (host_only_page_with_blocks, "is HOST_ONLY with resident blocks"),
    (resident_page_beyond_the_table, "resident pages .*999"),
    (page_without_indexer_block, "has no indexer block"),
    (page_resident_in_one_group_only, "has 1 resident blocks for 2 groups"),
    (loose_page_read_after_its_reuse, "after their reuse"),
    (loose_page_without_owner, "is not an owner of its blocks"),
    (page_without_pin, "is GPU_ONLY without a pin"),
    (pinned_page_without_references, "is pinned without references"),
    (loose_page_unwatched, "would be handed out unnoticed"),
    (reservation_off, "host blocks reserved"),
    (seat_given_twice, "are not all, once"),
    (published_block_unwatched, "is published but would be handed out unnoticed"),
    (published_block_miscounted, "published keys on"),
    (copy_under_a_wrong_key, "under a key they do not have"),
    (copy_unwatched, "would be handed out unnoticed"),
    (hot_region_of_another_size, "hot region of .* blocks by group"),
    (hot_block_shared, "does not own its blocks alone"),
    (grown_blocks_miscounted, "blocks of hot regions count as grown"),
    (spill_without_pin_on_its_host_block, "does not pin its host blocks"),
    (spills_miscounted, "counts .* spills, ledger has"),
    (fence_of_nobody, "device block 1 is fenced by transfer 999, which is over"),
    (detached_without_spills, "is detached without a spill under way"),
    (load_without_pins, "does not pin its device blocks"),
    (load_without_host_pins, "does not pin its host blocks"),
    (load_not_recorded, "waits for a load that is not recorded"),
)
"""Each with what `check()` must say."""

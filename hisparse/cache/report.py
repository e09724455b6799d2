"""Read-only views of the cache: gauges and counters, and the pages of a held request."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

from hisparse.cache.core import CacheCore
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import DURABLE, PINNED, PageState
from hisparse.cache.values import CacheStats
from hisparse.types import PageGenerations, RequestPages


class PageView(NamedTuple):
    """One page of an admitted request as the coordinator sees it now.

    Attributes:
        indexer, host: its blocks; host is 0 when HiSparse is off.
        resident: one block per resident group in the order of `layout.residents`, or () where it is not resident.
    """

    state: PageState
    indexer: int
    host: int
    resident: tuple[int, ...]


def page_views(inc: Incarnation) -> tuple[PageView, ...]:
    """Every page of a request, by table entry. O(pages held): for tests and reports, not for the step."""
    return tuple(map(PageView._make, zip(inc.states, inc.indexer, inc.host, inc.resident, strict=True)))


def collect_stats(core: CacheCore, *, num_open: int, num_loads: int, num_transfers: int) -> CacheStats:
    """Gauges from the pools and page counts, counters since start. O(requests)."""
    pool, source, pages = core.pool, core.source, core.page_counts
    hot_seats = [inc for inc in core.live.values() if inc.has_hot]
    return CacheStats(
        device_blocks_total=pool.num_blocks - 1, device_blocks_free=pool.num_free, device_blocks_loose=pool.num_readable,
        device_blocks_reserved=core.reserved_device,
        host_blocks_total=source.pool.num_blocks - 1 if source else 0, host_blocks_free=source.pool.num_free if source else 0,
        host_blocks_reserved=core.reserved_host, host_pages_published=len(source.published) if source else 0,
        host_pages_evicted=source.published.num_evicted if source else 0,
        requests_open=num_open, requests_admitted=len(core.live), hot_seats=len(hot_seats),
        hot_blocks=sum(len(blocks) for inc in hot_seats for blocks in inc.hot),
        hot_blocks_elastic=core.hot.elastic_blocks if core.hot else 0,
        pages_gpu_only=pages[PageState.GPU_ONLY], pages_spilling=pages[PageState.SPILLING],
        pages_clean_pinned=pages[PageState.CLEAN_PINNED], pages_clean_loose=pages[PageState.CLEAN_LOOSE],
        pages_host_only=pages[PageState.HOST_ONLY], pages_importing=pages[PageState.IMPORTING],
        transfers_in_flight=num_transfers, loads_in_flight=num_loads, **asdict(core.counters),
    )


def held_pages(core: CacheCore, inc: Incarnation) -> tuple[RequestPages, PageGenerations]:
    """A held request's valid pages: resident blocks only where pinned, host blocks only where durable; else 0."""
    count = core.layout.pages(inc.valid)
    states = inc.states[:count]
    groups = range(core.groups_per_page)
    resident = tuple(
        tuple([blocks[g] if blocks and state in PINNED else 0
               for blocks, state in zip(inc.resident, states, strict=False)]) for g in groups)
    host = tuple([block if state in DURABLE else 0 for block, state in zip(inc.host, states, strict=False)])
    pages = RequestPages(first_page=0, num_tokens=inc.valid, indexer_blocks=tuple(inc.indexer[:count]),
                         resident_blocks=resident, host_blocks=host)
    device = core.pool.generations

    def generations(blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([int(device[block]) if block else 0 for block in blocks])

    host_generations = core.source.pool.generations if core.source is not None else device
    return pages, PageGenerations(
        indexer=generations(pages.indexer_blocks), resident=tuple(generations(blocks) for blocks in resident),
        host=tuple([int(host_generations[block]) if block else 0 for block in host]))

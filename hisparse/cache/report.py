"""Read-only views of the cache: gauges and counters, the pages of a request, and where every request lives."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hisparse.cache.core import CacheCore
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import DURABLE, PINNED, PageState
from hisparse.cache.values import CacheStats
from hisparse.types import PageGenerations, RequestPages


class PageView(NamedTuple):
    """Where one page of a request is. Blocks are 0 (or no tuple) where a tier does not have it."""

    state: PageState
    indexer: int
    host: int
    resident: tuple[int, ...]
    """One block per resident group; () = not resident."""


def page_views(inc: Incarnation) -> tuple[PageView, ...]:
    """Every page in order."""
    return tuple(PageView(inc.state(page), inc.indexer[page], inc.host[page], inc.blocks(page))
                 for page in range(inc.num_pages))


class RequestTiers(NamedTuple):
    """Where one admitted request lives, copied so that it can be looked at while the cache goes on.

    Attributes:
        num_tokens: tokens whose KV is valid. states: a PageState per page, in order.
        hot_blocks: device blocks of its hot region by hot group; () = no region.
    """

    num_tokens: int
    states: bytes
    hot_blocks: tuple[int, ...]


def request_tiers(core: CacheCore) -> dict[str, RequestTiers]:
    """Of every admitted request, by id. One copy of a byte per page: about 1 us for a request of 128k tokens."""
    return {name: RequestTiers(inc.valid, bytes(inc.states), tuple(map(len, inc.hot))) for name, inc in core.live.items()}


def collect_stats(core: CacheCore, *, num_open: int, num_loads: int, num_transfers: int) -> CacheStats:
    """Gauges from the pools and page counts, counters since start. O(requests)."""
    pool, source, pages = core.pool, core.source, core.page_counts
    hot_seats = [inc for inc in core.live.values() if inc.has_hot]
    return CacheStats(
        device_blocks_total=pool.num_blocks - 1, device_blocks_free=pool.num_free, device_blocks_loose=pool.num_readable,
        device_blocks_reserved=core.reserved_device,
        host_blocks_total=source.pool.num_blocks - 1 if source else 0, host_blocks_free=source.pool.num_free if source else 0,
        host_blocks_reserved=core.reserved_host, host_extents_whole=source.pool.extents.num_whole if source else 0,
        host_pages=sum(len(inc.host) for inc in core.live.values()) if source else 0,
        host_runs=sum(inc.host_runs for inc in core.live.values()) if source else 0,
        host_pages_published=len(source.published) if source else 0,
        host_pages_evicted=source.published.num_evicted if source else 0,
        requests_open=num_open, requests_admitted=len(core.live), hot_seats=len(hot_seats),
        hot_blocks=sum(len(blocks) for inc in hot_seats for blocks in inc.hot),
        hot_blocks_elastic=core.hot.elastic_blocks if core.hot else 0,
        pages_gpu_only=pages[PageState.GPU_ONLY], pages_spilling=pages[PageState.SPILLING],
        pages_clean_pinned=pages[PageState.CLEAN_PINNED], pages_clean_loose=pages[PageState.CLEAN_LOOSE],
        pages_host_only=pages[PageState.HOST_ONLY], pages_importing=pages[PageState.IMPORTING],
        transfers_in_flight=num_transfers, loads_in_flight=num_loads, **asdict(core.counters),
    )


def resident_columns(core: CacheCore, inc: Incarnation, first: int, end: int | None = None, *,
                     pinned_only: bool = False) -> tuple[tuple[int, ...], ...]:
    """By resident group, the blocks of the pages [first, end); 0 = not resident (or loose, with `pinned_only`)."""
    end = inc.num_pages if end is None else end
    pages = [page for page in inc.resident
             if first <= page < end and (not pinned_only or inc.states[page] in PINNED)]
    columns = []
    for group in range(core.groups_per_page):
        column = [0] * (end - first)
        for page in pages:
            column[page - first] = inc.resident[page].blocks[group]
        columns.append(tuple(column))
    return tuple(columns)


def held_pages(core: CacheCore, inc: Incarnation) -> tuple[RequestPages, PageGenerations]:
    """A held request's valid pages: resident blocks only where pinned, host blocks only where durable; else 0."""
    count = core.layout.pages(inc.valid)
    pages = RequestPages(
        first_page=0, num_tokens=inc.valid, indexer_blocks=tuple(inc.indexer[:count]),
        resident_blocks=resident_columns(core, inc, 0, count, pinned_only=True),
        host_blocks=tuple([inc.host[page] if inc.states[page] in DURABLE else 0 for page in range(count)]))
    device = core.pool.generations
    host_generations = core.source.pool.generations if core.source is not None else device

    def generations(of: npt.NDArray[np.uint64], blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([int(of[block]) if block else 0 for block in blocks])

    return pages, PageGenerations(
        indexer=generations(device, pages.indexer_blocks),
        resident=tuple([generations(device, blocks) for blocks in pages.resident_blocks]),
        host=generations(host_generations, pages.host_blocks))

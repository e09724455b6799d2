"""Admission arithmetic: what a request needs to reach its first step, on the device and on the host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hisparse.cache.core import CacheCore
from hisparse.cache.loads import TAIL_PAGES
from hisparse.cache.request import Identity
from hisparse.cache.values import Fit
from hisparse.config import CacheConfig, hot_rows
from hisparse.errors import ConfigError
from hisparse.layout import KVCacheLayout, rows_text
from hisparse.types import Landing


@dataclass(slots=True, kw_only=True)
class Hit:
    """Blocks of a prefix hit, looked up once per admission: host blocks of its pages, indexer blocks of the first ones."""

    host: Sequence[int] = ()
    indexer: Sequence[int] = ()

    @property
    def pages(self) -> int:
        return len(self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Blocks an admission takes from what is available now.

    Attributes:
        device, host: blocks to become referenced or reserved. device_at_most: the same if nothing were shared.
        hot: the request starts with a hot region.
        target_pages: table entries at its first decode step. window_pages: resident pages it may pin when host-backed.
    """

    device: int
    device_at_most: int
    host: int
    host_at_most: int
    hot: bool
    target_pages: int
    window_pages: int
    host_target_pages: int


def window_pages(layout: KVCacheLayout, chunk_tokens: int) -> int:
    """Resident pages in flight of a host-backed request: the tail, and what one chunk can touch beyond it."""
    return TAIL_PAGES + layout.pages(max(1, chunk_tokens))


def request_blocks(layout: KVCacheLayout, *, pages: int, resident_pages: int, region_blocks: int) -> int:
    """Device blocks of one request: an indexer block for each page, a block of every group for each resident page, its region.

    Args:
        resident_pages: all of them, or `window_pages` when host-backed. region_blocks: of all hot groups; 0 = no region.
    """
    return pages + resident_pages * layout.num_resident_groups + region_blocks


def min_device_blocks(layout: KVCacheLayout, config: CacheConfig, *, max_model_len: int, max_query_tokens: int) -> int:
    """Smallest legal device pool, incl. the null block: one request of `max_model_len` tokens can always finish alone.

    HiSparse on: indexer pages of the whole request + one hot region + the in-flight window in every resident group.
    Off: indexer and resident pages of the whole request.
    """
    pages = layout.pages(max_model_len)
    if not config.enabled:
        return 1 + layout.device_blocks_resident(max_model_len)
    region = sum(layout.hot_blocks(rows) for rows in hot_rows(config, layout))
    window = min(pages, window_pages(layout, max_query_tokens))
    return 1 + request_blocks(layout, pages=pages, resident_pages=window, region_blocks=region)


def check_device_pool(layout: KVCacheLayout, config: CacheConfig, *, max_model_len: int, max_query_tokens: int) -> None:
    """Raises ConfigError when one longest request can never fit, with the numbers."""
    need = min_device_blocks(layout, config, max_model_len=max_model_len, max_query_tokens=max_query_tokens)
    if config.device_blocks >= need:
        return
    pages = layout.pages(max_model_len)
    what = f"{pages} indexer and resident pages of {layout.num_resident_groups} groups"
    fix = "lower max_model_len, or enable HiSparse"
    if config.enabled:
        what = (f"{pages} indexer pages, hot regions of {rows_text(hot_rows(config, layout))} in {len(layout.hots)} groups, "
                f"and the resident window of "
                f"{layout.num_resident_groups} groups for steps of {max_query_tokens} tokens")
        fix = "lower max_model_len, prefill_chunk_tokens or hot_rows"
    raise ConfigError(
        f"cache.device_blocks = {config.device_blocks} cannot hold one request of max_model_len = {max_model_len} tokens: "
        f"it needs {need} blocks (the null block, {what}); raise device_blocks to {need}, or {fix}"
    )


def check_host_pool(layout: KVCacheLayout, num_host_blocks: int, max_model_len: int) -> None:
    """Raises ConfigError when the host pool cannot hold one longest request and two pages more."""
    need = layout.pages(max_model_len) + 2
    if num_host_blocks < need:
        raise ConfigError(
            f"the host pool has {num_host_blocks} pages, but one request of max_model_len = {max_model_len} tokens needs "
            f"{need} (pages + 2); raise cache.host_pool_gib or lower max_model_len")


class AdmissionArithmetic:
    """Needs and fits, from the state of the cache; changes nothing."""

    def __init__(self, core: CacheCore, config: CacheConfig, *, lookahead_tokens: int) -> None:
        self.core = core
        self.config = config
        self.lookahead_tokens = lookahead_tokens

    @property
    def region_blocks(self) -> int:
        return self.core.hot.region_blocks if self.core.hot is not None else 0

    def needs(self, identity: Identity, found: Hit, landing: Landing | None, import_tokens: int,
              chunk_tokens: int) -> list[Need]:
        """Ways to admit, the preferred first: every page resident, then host-backed."""
        core, layout = self.core, self.core.layout
        tokens, hit = identity.num_tokens, found.pages
        rows = max(tokens, min(tokens + 1 + self.lookahead_tokens, identity.max_rows))
        target = layout.pages(max(rows, 1))
        missing = target - hit
        referenced = len(found.indexer) - core.pool.num_unreferenced(found.indexer)
        host_target = host_referenced = 0
        if core.source is not None:
            remaining = max(0, identity.max_tokens - (tokens - identity.num_prompt_tokens))
            ahead = remaining if self.config.host_reservation == "full" else min(
                remaining, self.config.host_reserve_tokens)
            host_target = max(target, layout.pages(max(1, min(tokens + ahead, identity.max_rows))))
            host_referenced = hit - core.source.pool.num_unreferenced(found.host)
        rest = max(1, tokens - max(hit * layout.block_size, import_tokens)) + self.lookahead_tokens
        window = window_pages(layout, min(chunk_tokens, rest))

        def need(resident_pages: int, hot: bool) -> Need:
            at_most = request_blocks(layout, pages=target, resident_pages=resident_pages,
                                     region_blocks=self.region_blocks if hot else 0)
            return Need(device=at_most - referenced, device_at_most=at_most,
                        host=host_target - host_referenced, host_at_most=host_target, hot=hot, target_pages=target,
                        window_pages=window, host_target_pages=host_target)

        full = need(missing, hot=hit > 0 and core.hot is not None)
        if core.hot is None:
            return [] if landing is Landing.HOST else [full]
        backed = need(min(missing, window), hot=True)
        if landing is Landing.RESIDENT:
            return [full]
        if landing is Landing.HOST or hit > 0:
            return [backed]
        return [full, backed]

    def choose(self, needs: list[Need]) -> Need | None:
        """The first way that fits now, or None."""
        device, host = self.core.available_device(), self.core.available_host()
        return next((need for need in needs if need.device <= device and need.host <= host), None)

    def fit(self, needs: list[Need], *, blocked: str | None = None) -> Fit:
        """`blocked`: why it cannot be now whatever the blocks (no seat, a load to drain), or None."""
        core = self.core
        device, host = core.available_device(), core.available_host()
        total_device = core.pool.num_blocks - 1
        total_host = core.source.pool.num_blocks - 1 if core.source is not None else 1 << 62
        ever = any(n.device_at_most <= total_device and n.host_at_most <= total_host for n in needs)
        now = self.choose(needs) is not None and blocked is None
        best = needs[-1] if needs else None
        if best is None:
            return Fit(now=False, ever=False, reason="a HOST landing needs HiSparse to be enabled")
        numbers = f"device: needs {best.device} of {device} available ({total_device} in all)"
        if core.source is not None:
            numbers += f"; host: needs {best.host} of {host} available ({total_host} in all)"
        return Fit(now=now, ever=ever or now, reason=f"{blocked}; {numbers}" if blocked else numbers)

"""Wires the cache of an engine and the scheduler halves of its connectors, from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.config import HiSparseConfig, host_blocks
from hisparse.connector.base import SchedulerConnector
from hisparse.connector.hisparse import HiSparseConnectorScheduler
from hisparse.connector.multi import MultiSchedulerConnector
from hisparse.connector.offloading import OffloadingScheduler
from hisparse.layout import KVCacheLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheParts:
    """What build_cache made. offload: store of indexer pages; None = there is none. connectors: all of the engine's."""

    cache: KVCacheManager
    offload: OffloadingScheduler | None
    connectors: MultiSchedulerConnector


def build_cache(config: HiSparseConfig, layout: KVCacheLayout, *, num_ranks: int, incarnation: int,
                pd: SchedulerConnector | None, clock: Callable[[], float]) -> CacheParts:
    """The ranks must use the same configuration. Raises ConfigError: a pool that can never work, with the numbers."""
    num_host_blocks = host_blocks(config.cache, layout, config.model.max_model_len)
    offload = None
    if config.cache.enabled and config.cache.offload_indexer and config.cache.prefix_cache:
        offload = OffloadingScheduler(capacity_pages=num_host_blocks, num_ranks=num_ranks)
    cache = KVCacheManager(
        layout, config.cache, num_host_blocks=num_host_blocks, max_model_len=config.model.max_model_len,
        max_seats=config.scheduler.max_num_seqs, max_query_tokens=config.scheduler.prefill_chunk_tokens, num_ranks=num_ranks,
        num_host_writers=num_ranks if config.cache.host_pool == "private" else 1, indexer_offload=offload,
        incarnation=incarnation, clock=clock)
    children: list[SchedulerConnector] = []
    if config.cache.enabled:
        children.append(HiSparseConnectorScheduler(cache))
    if offload is not None:
        children.append(offload)
    if pd is not None:
        children.append(pd)
    return CacheParts(cache=cache, offload=offload, connectors=MultiSchedulerConnector(children))

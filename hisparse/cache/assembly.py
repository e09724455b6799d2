"""The pools and group managers of a cache, from its layout and configuration; refuses what can never work."""

from __future__ import annotations

from hisparse.cache.admission import check_device_pool, check_host_pool
from hisparse.cache.block_pool import BlockPool
from hisparse.cache.core import CacheCore
from hisparse.cache.groups import (
    HiSparseHotManager,
    HiSparseResidentManager,
    HiSparseSourceManager,
    IndexerManager,
)
from hisparse.cache.host_blocks import HostBlockPool
from hisparse.cache.prefix_index import PrefixIndex
from hisparse.cache.tables import TableChanges
from hisparse.config import CacheConfig, hot_rows, hot_rows_max
from hisparse.layout import KVCacheLayout, check_query_rows


def build_core(layout: KVCacheLayout, config: CacheConfig, *, num_host_blocks: int, max_model_len: int,
               max_query_tokens: int, lookahead_tokens: int, incarnation: int) -> CacheCore:
    """Empty pools; without hot and source managers when HiSparse is off. Arguments as of `KVCacheManager`.

    Raises:
        ConfigError: a pool cannot hold even one longest request, or a hot region one verification step, with the numbers.
    """
    check_device_pool(layout, config, max_model_len=max_model_len, max_query_tokens=max_query_tokens)
    pool = BlockPool(config.device_blocks, incarnation=incarnation, name="device")
    index = PrefixIndex()
    hot = source = None
    watermark_blocks = 0
    if config.enabled:
        check_host_pool(layout, num_host_blocks, max_model_len)
        rows = hot_rows(config, layout)
        check_query_rows(rows, layout.shape.top_k, lookahead_tokens)
        hot = HiSparseHotManager(
            layout.hots, pool, block_size=layout.block_size, start_blocks=[layout.hot_blocks(n) for n in rows],
            max_blocks=[layout.hot_blocks(n) for n in hot_rows_max(config, layout)])
        source = HiSparseSourceManager(
            layout.source, HostBlockPool(num_host_blocks, incarnation=incarnation, name="host"), index)
        watermark_blocks = max(hot.region_blocks, int(config.device_blocks * config.watermark))
    return CacheCore(
        layout=layout, max_model_len=max_model_len, watermark_blocks=watermark_blocks,
        prefix_cache=config.prefix_cache and config.enabled, pool=pool,
        indexer=IndexerManager(layout.indexer, pool, index), residents=HiSparseResidentManager(layout.residents, pool),
        hot=hot, source=source, tables=TableChanges(layout, enabled=config.enabled), index=index,
    )

"""All byte arithmetic: row formats, packing of cache groups, host layout, capacity, rows of hot regions.

Nothing else in hisparse multiplies block counts with byte sizes. All results are Python ints (never 32-bit).
"""

from hisparse.layout.groups import CacheGroup, HotGroup, IndexerGroup, ResidentGroup, SourceGroup
from hisparse.layout.hot_regions import (
    MAX_HOT_ROWS,
    check_query_rows,
    hot_state_bytes,
    limit_rows,
    rows_text,
    split_rows,
    start_rows,
)
from hisparse.layout.kv_cache_layout import NULL_BLOCK, KVCacheLayout
from hisparse.layout.row_format import FP8_DS_MLA, RowFormat, quantized_latent_dim, scale_bytes
from hisparse.layout.shape import IndexGroup, ModelShape
from hisparse.layout.waste import GroupWaste, WasteReport

__all__ = [
    "FP8_DS_MLA",
    "MAX_HOT_ROWS",
    "NULL_BLOCK",
    "CacheGroup",
    "GroupWaste",
    "HotGroup",
    "IndexGroup",
    "IndexerGroup",
    "KVCacheLayout",
    "ModelShape",
    "ResidentGroup",
    "RowFormat",
    "SourceGroup",
    "WasteReport",
    "check_query_rows",
    "hot_state_bytes",
    "limit_rows",
    "quantized_latent_dim",
    "rows_text",
    "scale_bytes",
    "split_rows",
    "start_rows",
]

"""All byte arithmetic: row formats, packing of cache groups, host layout, capacity, rows of hot regions.

Nothing else in hisparse multiplies block counts with byte sizes. All results are Python ints (never 32-bit).
"""

from hisparse.layout.groups import CacheGroup, HotGroup, IndexerGroup, ResidentGroup, SourceGroup
from hisparse.layout.kv_cache_layout import NULL_BLOCK, KVCacheLayout
from hisparse.layout.row_format import RowFormat
from hisparse.layout.shape import IndexGroup, ModelShape
from hisparse.layout.waste import GroupWaste, WasteReport

__all__ = [
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
]

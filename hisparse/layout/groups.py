"""Cache groups: which layers live together in one block, and in which pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerGroup:
    """Indexer keys of every layer that owns an indexer: GPU, prefix-cacheable, transferable."""

    group_id: int
    layers: tuple[int, ...]
    block_pool_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceGroup:
    """The whole sparse-MLA KV in host memory: prefix-cacheable, transferable, in no device pool."""

    group_id: int
    layers: tuple[int, ...]
    block_pool_id: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentGroup:
    """Whole pages of some index groups on the GPU: not prefix-cacheable, not transferable as such."""

    group_id: int
    layers: tuple[int, ...]
    index_groups: tuple[int, ...]
    block_pool_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HotGroup:
    """Hot regions of the same index groups as one resident group; same base pointer and strides."""

    group_id: int
    layers: tuple[int, ...]
    index_groups: tuple[int, ...]
    block_pool_id: int = 0


CacheGroup = IndexerGroup | SourceGroup | ResidentGroup | HotGroup

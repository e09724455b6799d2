"""Bookkeeping per kind of cache group: indexer pages, resident pages, hot regions, host (source) pages.

Device managers narrow to the device pool; the source manager has a pool of its own and no device pool id.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

from hisparse.cache.block_pool import Accept, BlockPool
from hisparse.cache.host_blocks import HostBlockPool
from hisparse.cache.prefix_index import PrefixIndex, PublishedBlocks
from hisparse.cache.request import Incarnation
from hisparse.errors import InvariantError
from hisparse.layout import HotGroup, IndexerGroup, ResidentGroup, SourceGroup


class IndexerManager:
    """Indexer pages: one device block per page of every request; sealed ones are cached by page key."""

    def __init__(self, group: IndexerGroup, pool: BlockPool, index: PrefixIndex) -> None:
        self.group = group
        self.pool = pool
        self.cached = PublishedBlocks.of_indexer(pool, index)
        self.unstored: dict[bytes, None] = {}
        """Keys sealed since the engine last asked, oldest first."""
        self.store_pins: dict[int, int] = {}
        """Block -> references held for stores."""

    def allocate(self, n: int, accept: Accept | None = None) -> list[int] | None:
        return self.pool.take(n, accept)

    def seal(self, key: bytes, block: int, *, offer: bool) -> None:
        """A page is complete: findable from now on, and offered to the store."""
        if self.cached.publish(key, block) and offer:
            self.unstored[key] = None

    def pin_for_store(self, block: int) -> None:
        self.pool.touch((block,))
        self.store_pins[block] = self.store_pins.get(block, 0) + 1

    def crash(self) -> None:
        """Every device block is void."""
        self.cached.clear()
        self.unstored.clear()
        self.store_pins.clear()

    def drop_store_pin(self, block: int) -> bool:
        """False: no such pin (its pool was rebuilt since)."""
        count = self.store_pins.get(block, 0)
        if not count:
            return False
        if count == 1:
            del self.store_pins[block]
        else:
            self.store_pins[block] = count - 1
        return True


class HiSparseResidentManager:
    """Resident pages: one device block in *every* resident group, or a host-backed hole."""

    def __init__(self, groups: Sequence[ResidentGroup], pool: BlockPool) -> None:
        self.groups = tuple(groups)
        self.pool = pool
        self.blocks_per_page = len(self.groups)

    def allocate(self, num_pages: int, accept: Accept | None = None) -> list[tuple[int, ...]] | None:
        """One tuple of blocks per page. Blocks of one group are contiguous where the pool is."""
        ids = self.pool.take(num_pages * self.blocks_per_page, accept)
        if ids is None:
            return None
        if num_pages == 1:
            return [tuple(ids)]
        return [tuple(ids[page::num_pages]) for page in range(num_pages)]


class HiSparseHotManager:
    """Hot regions: at first `start_blocks[g]` device blocks in every hot group g, all or none.

    A region grows by levels: each adds one block in every group that is below its `max_blocks[g]`.

    Attributes:
        grown: (request, level) -> blocks, for every level beyond the start, in the order in which they were added.
        level_groups: by level - 1, the hot groups that get a block at it.
    """

    def __init__(self, groups: Sequence[HotGroup], pool: BlockPool, *, start_blocks: Sequence[int],
                 max_blocks: Sequence[int], block_size: int) -> None:
        self.groups = tuple(groups)
        self.pool = pool
        self.block_size = block_size
        self.start_blocks = tuple(start_blocks)
        self.max_blocks = tuple(max_blocks)
        spans = [most - start for start, most in zip(self.start_blocks, self.max_blocks, strict=True)]
        self.level_groups = tuple(
            tuple(g for g, span in enumerate(spans) if span >= level) for level in range(1, max(spans) + 1))
        self.region_blocks = sum(self.start_blocks)
        """Blocks of one request's region over all hot groups, at its starting size."""
        self.grown: dict[tuple[Incarnation, int], int] = {}
        self.elastic_blocks = 0
        """Blocks of all regions beyond their starting size."""

    def allocate(self) -> list[array[int]] | None:
        """A region of the starting size, by group."""
        ids = self.pool.take(self.region_blocks)
        if ids is None:
            return None
        ends = list(itertools.accumulate(self.start_blocks))
        return [array("i", ids[end - count : end]) for end, count in zip(ends, self.start_blocks, strict=True)]

    def add_level(self, inc: Incarnation, blocks: Sequence[int]) -> None:
        """One level more, with a block for each of its groups."""
        groups = self.level_groups[inc.hot_level]
        inc.hot_level += 1
        for g, block in zip(groups, blocks, strict=True):
            inc.hot[g].append(block)
        self.grown[inc, inc.hot_level] = len(groups)
        self.elastic_blocks += len(groups)

    def remove_last_level(self) -> tuple[Incarnation, list[int]]:
        """The level added last goes. Returns its request and blocks."""
        (inc, level), count = self.grown.popitem()
        self.elastic_blocks -= count
        inc.hot_level = level - 1
        return inc, [inc.hot[g].pop() for g in self.level_groups[level - 1]]

    def forget(self, inc: Incarnation) -> None:
        """The request's region goes as a whole."""
        for level in range(1, inc.hot_level + 1):
            self.elastic_blocks -= self.grown.pop((inc, level))
        inc.hot_level = 0

    def crash(self) -> None:
        """Every device block is void."""
        self.grown.clear()
        self.elastic_blocks = 0


class HiSparseSourceManager:
    """Host pages: one host block per page; published ones are found by page key."""

    def __init__(self, group: SourceGroup, pool: HostBlockPool, index: PrefixIndex) -> None:
        if group.block_pool_id is not None:
            raise InvariantError("the source group must not be in a device pool")
        self.group = group
        self.pool = pool
        self.published = PublishedBlocks.of_host(pool, index)

    def allocate(self, inc: Incarnation, n: int) -> list[int] | None:
        """The request's next n blocks: behind its last one where they are free, else where the pages that are reserved for
        it fit as well."""
        have = inc.host
        return self.pool.take(n, after=have[-1] if have else 0, room=max(0, inc.host_target_pages - len(have) - n))

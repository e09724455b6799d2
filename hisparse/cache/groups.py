"""Bookkeeping per kind of cache group: indexer pages, resident pages, hot regions, host (source) pages.

Device managers narrow to the device pool; the source manager has a pool of its own and no device pool id.
"""

from __future__ import annotations

from collections.abc import Sequence

from hisparse.cache.block_pool import Accept, BlockPool
from hisparse.cache.request import Incarnation
from hisparse.errors import InvariantError
from hisparse.layout import HotGroup, IndexerGroup, ResidentGroup, SourceGroup


class PublishedBlocks:
    """Blocks findable by page key while their content stands: one block per key, dropped before it is handed out."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._block)

    def get(self, key: bytes) -> int | None:
        return self._block.get(key)

    def blocks(self) -> list[int]:
        """Every published block, oldest first."""
        return list(self._key)

    def publish(self, key: bytes, block: int) -> bool:
        """Makes a referenced block findable. False: the key stays with the block that has it."""
        if key in self._block:
            return False
        if block in self._key:
            raise InvariantError(f"{self._pool.name} block {block} is published already, under another key")
        self._block[key], self._key[block] = block, key
        self._pool.watch((block,), self._evict)
        return True

    def prefix(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest run of published keys from the first one on."""
        out = []
        for key in keys:
            block = self._block.get(key)
            if block is None:
                break
            out.append(block)
        return out

    def clear(self) -> None:
        """The pool is gone."""
        self._block.clear()
        self._key.clear()

    def _evict(self, block: int) -> None:
        del self._block[self._key.pop(block)]
        self.num_evicted += 1

    def check(self) -> None:
        if len(self._block) != len(self._key):
            raise InvariantError(f"{self._pool.name} pool: keys and blocks of the published pages differ in number")
        for key, block in self._block.items():
            if self._key.get(block) != key or not self._pool.is_watched(block):
                raise InvariantError(f"{self._pool.name} block {block} is published but would be handed out unnoticed")


class IndexerManager:
    """Indexer pages: one device block per page of every request; sealed ones are cached by page key."""

    def __init__(self, group: IndexerGroup, pool: BlockPool) -> None:
        self.group = group
        self.pool = pool
        self.cached = PublishedBlocks(pool)
        self.unstored: dict[bytes, None] = {}
        """Keys sealed since the engine last asked, oldest first."""
        self.store_pins: dict[int, int] = {}
        """Block -> references held for stores."""

    def allocate(self, n: int, accept: Accept | None = None) -> list[int] | None:
        ids = self.pool.allocate(n, accept)
        return None if ids is None else ids.tolist()

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

    @property
    def blocks_per_page(self) -> int:
        return len(self.groups)

    def allocate(self, num_pages: int, accept: Accept | None = None) -> list[tuple[int, ...]] | None:
        """One tuple of blocks per page. Blocks of one group are contiguous where the pool is."""
        n = len(self.groups)
        ids = self.pool.allocate(num_pages * n, accept)
        if ids is None:
            return None
        return [tuple(page) for page in ids.reshape(n, num_pages).T.tolist()]


class HiSparseHotManager:
    """Hot regions: at first `blocks_per_group` device blocks in every hot group, all or none.

    Attributes:
        rows: of a region at first. max_blocks_per_group: limit of its elastic growth.
        grown: (request, page of its region) beyond the starting size, in the order in which they were added.
    """

    def __init__(self, groups: Sequence[HotGroup], pool: BlockPool, *, rows: int, blocks_per_group: int,
                 max_blocks_per_group: int) -> None:
        self.groups = tuple(groups)
        self.pool = pool
        self.rows = rows
        self.blocks_per_group = blocks_per_group
        self.max_blocks_per_group = max_blocks_per_group
        self.grown: dict[tuple[Incarnation, int], None] = {}

    @property
    def region_blocks(self) -> int:
        """Blocks of one request's region over all hot groups, at its starting size."""
        return len(self.groups) * self.blocks_per_group

    @property
    def elastic_blocks(self) -> int:
        """Blocks of all regions beyond their starting size."""
        return len(self.groups) * len(self.grown)

    def allocate(self) -> list[list[int]] | None:
        """A region of the starting size, by group."""
        ids = self.pool.allocate(self.region_blocks)
        return None if ids is None else [list(part) for part in ids.reshape(len(self.groups), -1).tolist()]

    def forget(self, inc: Incarnation) -> None:
        """The request's region goes as a whole."""
        for page in range(self.blocks_per_group, len(inc.hot[0])):
            del self.grown[inc, page]

    def crash(self) -> None:
        """Every device block is void."""
        self.grown.clear()


class HiSparseSourceManager:
    """Host pages: one host block per page; published ones are found by page key."""

    def __init__(self, group: SourceGroup, pool: BlockPool) -> None:
        if group.block_pool_id is not None:
            raise InvariantError("the source group must not be in a device pool")
        self.group = group
        self.pool = pool
        self.published = PublishedBlocks(pool)

    def allocate(self, n: int) -> list[int] | None:
        ids = self.pool.allocate(n)
        return None if ids is None else ids.tolist()

"""Page key -> the blocks that hold the page: one host block, one indexer block, or both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hisparse.cache.block_pool import BlockPool
from hisparse.errors import ConfigError, InvariantError

_BITS = 30
_MASK = (1 << _BITS) - 1


class PrefixIndex:
    """One dictionary for both pools, so that a prefix hit costs one look-up per page: value = indexer block << 30 | host
    block, 0 = none. `version` changes with every entry."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.version = 0

    def find(self, keys: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Host blocks of the longest published run from the first key on, and the indexer blocks of the longest run within
        it. O(pages found)."""
        host: list[int] = []
        indexer: list[int] = []
        get = self.blocks.get
        for key in keys:
            value = get(key, 0)
            block = value & _MASK
            if not block:
                break
            if value > _MASK and len(indexer) == len(host):
                indexer.append(value >> _BITS)
            host.append(block)
        return host, indexer


class PublishedBlocks:
    """Blocks of one pool findable by page key while their content stands: one block per key, dropped before it is handed
    out.

    Args:
        shift: bit of this pool's blocks in the values of `index`; 0 (host) or 30 (indexer).
    """

    def __init__(self, pool: BlockPool, index: PrefixIndex, *, shift: int) -> None:
        if pool.num_blocks > _MASK:
            raise ConfigError(f"the {pool.name} pool has {pool.num_blocks} blocks, more than the {_MASK} that can be "
                              "published; use a larger block_size")
        self._pool = pool
        self._index = index
        self._shift = shift
        pool.standing_watcher = self._evict
        # By block. A numpy array of objects is not walked by the garbage collector, and bytes cannot form a cycle.
        self._key: npt.NDArray[np.object_] = np.full(pool.num_blocks, None, dtype=object)
        self._count = 0
        self.num_evicted = 0

    @classmethod
    def of_host(cls, pool: BlockPool, index: PrefixIndex) -> PublishedBlocks:
        return cls(pool, index, shift=0)

    @classmethod
    def of_indexer(cls, pool: BlockPool, index: PrefixIndex) -> PublishedBlocks:
        return cls(pool, index, shift=_BITS)

    def __len__(self) -> int:
        return self._count

    def get(self, key: bytes) -> int | None:
        return self._index.blocks.get(key, 0) >> self._shift & _MASK or None

    def blocks(self) -> list[int]:
        """Every published block, in the order in which their keys were first seen."""
        blocks = [value >> self._shift & _MASK for value in self._index.blocks.values()]
        return [block for block in blocks if block]

    def publish(self, key: bytes, block: int) -> bool:
        """Makes a referenced block findable. False: the key stays with the block that has it."""
        blocks, shift = self._index.blocks, self._shift
        value = blocks.get(key, 0)
        if value >> shift & _MASK:
            return False
        if self._key[block] is not None:
            raise InvariantError(f"{self._pool.name} block {block} is published already, under another key")
        self._pool.watch((block,))
        blocks[key] = value | block << shift
        self._key[block] = key
        self._count += 1
        self._index.version += 1
        return True

    def _evict(self, block: int) -> None:
        self._drop(block)
        self.num_evicted += 1

    def _drop(self, block: int) -> None:
        key = self._key[block]
        self._key[block] = None
        self._count -= 1
        blocks = self._index.blocks
        value = blocks[key] & ~(_MASK << self._shift)
        if value:
            blocks[key] = value
        else:
            del blocks[key]
        self._index.version += 1

    def clear(self) -> None:
        """The pool is gone."""
        for block in self.blocks():
            self._drop(block)

    def check(self) -> None:
        blocks = self.blocks()
        num_keys = sum(key is not None for key in self._key)
        if not len(blocks) == num_keys == self._count:
            raise InvariantError(f"{self._pool.name} pool: {len(blocks)} published keys on {num_keys} blocks, "
                                 f"{self._count} counted")
        for key, value in self._index.blocks.items():
            block = value >> self._shift & _MASK
            if block and (self._key[block] != key or not self._pool.is_watched(block)):
                raise InvariantError(f"{self._pool.name} block {block} is published but would be handed out unnoticed")

"""The pool of host blocks: those of a request follow one another where possible."""

from __future__ import annotations

from hisparse.cache.block_pool import Accept, BlockPool
from hisparse.cache.extents import Extents
from hisparse.errors import InvariantError
from hisparse.layout import NULL_BLOCK

EXTENT_BLOCKS = 16
"""A request's decode steps move to another place once in so many pages."""
RESERVE = 8
"""Readable blocks are evicted early, for new places, until one block in so many is free."""
SMALL_POOL_BLOCKS, SMALL_EXTENT_BLOCKS = 1024, 4
"""A pool of fewer blocks has extents of this size, and evicts nothing early: each of its pages counts."""


class HostBlockPool(BlockPool):
    """A `BlockPool` whose free blocks are `Extents` instead of a stack. There are no choosy writers and no shortage hook.

    Free blocks go before readable ones, which are evicted oldest first, as in every pool. But where no whole extent is left
    for a new place, readable blocks are evicted early, with their neighbours, until there is one or the reserve is full:
    otherwise a pool full of cached pages would hand out single blocks in the order of their age.
    """

    def reset(self, incarnation: int) -> None:
        super().reset(incarnation)
        small = self.num_blocks < SMALL_POOL_BLOCKS
        self.extents = Extents(self.num_blocks, SMALL_EXTENT_BLOCKS if small else EXTENT_BLOCKS)
        del self._stack[:]
        self._plain = self.extents
        self._reserve = 0 if small else self.num_blocks // RESERVE

    def free_blocks(self) -> list[int]:
        """Every free block: the unwatched ones ascending, then the readable ones, oldest first. O(blocks)."""
        return [*self.extents, *self._readable()]

    def take(self, n: int, accept: Accept | None = None, *, after: int = 0, room: int = 0) -> list[int] | None:
        """n blocks, or None. `after`, `room`: as of `Extents.take`. Watchers of evicted blocks fire first."""
        if n < 0 or accept is not None:
            raise InvariantError(f"{self.name} pool: asked for {n} blocks{'' if accept is None else ' of its choice'}")
        if n > self.num_free:
            return None
        extents = self.extents
        missing = n - (extents.num_from(after + 1, n) if after else 0)
        if missing:
            self._evict_for(n, -(-missing // extents.extent_blocks))
        out = extents.take(n, after=after, room=room)
        self._hand_out(out)
        return out

    def drop_readable(self, n: int) -> list[int]:
        raise InvariantError(f"{self.name} pool: nobody waits for quiet blocks here")

    def _evict_for(self, n: int, num_whole: int) -> None:
        """Readable blocks become ordinary free ones, the oldest first, until n are free, and so many whole extents or the
        reserve beside them."""
        extents = self.extents
        enough = n + self._reserve
        while self.num_readable and (
            len(extents) < n or (extents.num_whole < num_whole and len(extents) < enough)
        ):
            self._evict_extent(enough - len(extents))

    def _evict_extent(self, most: int) -> None:
        """The oldest readable block and, if nobody holds a block of its extent, its readable neighbours; at most so many."""
        oldest, size = self._next[NULL_BLOCK], self.extents.extent_blocks
        if oldest == NULL_BLOCK:
            raise InvariantError(f"{self.name} pool: {self.num_readable} readable blocks are counted, but none is listed")
        start = oldest - oldest % size
        end = min(start + size, self.num_blocks)
        along = [] if any(self._refs[start:end]) else [block for block in range(start, end) if self._watched[block]]
        self.extents.append(self._take_readable(oldest))
        most -= 1
        for block in along:
            if most and self._watched[block]:  # not the oldest, and not taken along by an earlier watcher
                self.extents.append(self._take_readable(block))
                most -= 1

    def check(self) -> None:
        self.extents.check(self.name)
        super().check()

"""Free blocks of a pool, handed out in runs of consecutive numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from hisparse.errors import InvariantError

_BULK = 64
"""From so many blocks on, numpy is faster than a loop."""


class Extents:
    """A set of free blocks out of 0 .. num_blocks-1, at first all but block 0.

    The numbers are cut into aligned *extents* of `extent_blocks`. Whoever needs a new place gets whole free extents, as
    many next to each other as the request fills, and the search goes on behind them. What is left of the last extent stays
    free for the request's next blocks, without being promised: others come here only when no extent is whole any more.

    Args:
        extent_blocks: at most 255.
    """

    def __init__(self, num_blocks: int, extent_blocks: int) -> None:
        if not 1 <= extent_blocks <= 255:
            raise InvariantError(f"an extent has 1 to 255 blocks, got {extent_blocks}")
        self.num_blocks = num_blocks
        self.extent_blocks = extent_blocks
        num_extents = -(-num_blocks // extent_blocks)
        self._free = bytearray(b"\1") * num_blocks
        """By block: 1 = free."""
        self._free[0] = 0
        self._room = bytearray([extent_blocks]) * num_extents
        """By extent: its free blocks. A last extent that is cut off, and that of block 0, are never whole."""
        self._room[-1] = num_blocks - (num_extents - 1) * extent_blocks
        self._room[0] -= 1
        self._count = num_blocks - 1
        self._rover = 0
        """Extent at which the next search starts."""
        self._longest_rest = max(1, extent_blocks // 2)
        """Where no extent is whole: where to start the search, as longer ones were not found since a block became free."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(np.frombuffer(self._free, dtype=np.uint8)).tolist())

    def __contains__(self, block: int) -> bool:
        return self._free[block] == 1

    @property
    def num_whole(self) -> int:
        """Extents that are free as a whole."""
        return self._room.count(self.extent_blocks)

    def num_from(self, block: int, most: int) -> int:
        """Free blocks from `block` on without a gap, counted up to `most`."""
        if block >= self.num_blocks:
            return 0
        end = min(block + most, self.num_blocks)
        gap = self._free.find(0, block, end)
        return (end if gap < 0 else gap) - block

    # ------------------------------------------------------------------------------------------- return
    def append(self, block: int) -> None:
        """One block, which was not free, becomes free."""
        self._free[block] = 1
        self._room[block // self.extent_blocks] += 1
        self._count += 1
        self._longest_rest = max(1, self.extent_blocks // 2)

    def extend(self, blocks: Sequence[int]) -> None:
        """Distinct blocks, none of them free, become free."""
        if len(blocks) < _BULK:
            for block in blocks:
                self.append(block)
            return
        ids = np.array(blocks, dtype=np.int64)
        np.frombuffer(self._free, dtype=np.uint8)[ids] = 1
        more = np.bincount(ids // self.extent_blocks, minlength=len(self._room))
        np.frombuffer(self._room, dtype=np.uint8)[:] += more.astype(np.uint8)
        self._count += len(ids)
        self._longest_rest = max(1, self.extent_blocks // 2)

    # ------------------------------------------------------------------------------------------- hand-out
    def take(self, n: int, *, after: int = 0, room: int = 0) -> list[int]:
        """n of the free blocks (the caller saw that there are so many), in as few runs as the places allow.

        Args:
            after: the block that the first one should follow; 0 = none. Blocks behind it come first, as long as they are free.
            room: blocks that the same request will probably take later; a new place has room for them, if there is one.
        """
        out: list[int] = []
        if after and n:
            self._take_run(after + 1, self.num_from(after + 1, n), out)
        while len(out) < n:
            missing = n - len(out)
            start = self._place(missing, room)
            count = self.num_from(start, missing)
            if not count:
                raise InvariantError(f"block {start} was chosen of {self._count} that are counted as free, but is not")
            self._take_run(start, count, out)
        return out

    def _place(self, n: int, room: int) -> int:
        """Where a new run starts: whole extents for n blocks and the room, for n blocks, or the longest row of extents up to
        a factor of two; else any free block."""
        size = self.extent_blocks
        count = -(-(n + room) // size)
        found = self._find_whole(count)
        if found < 0 and room:
            count = -(-n // size)
            found = self._find_whole(count)
        while found < 0 and count > 1:
            count = (count + 1) // 2
            found = self._find_whole(count)
        if found >= 0:
            self._rover = found + count
            return found * size
        return self._place_in_a_rest(n)

    def _place_in_a_rest(self, n: int) -> int:
        """No extent is whole: in the middle of a rest, so that whoever is before it may go on. The longest up to a factor of
        two, at most half an extent."""
        size = self.extent_blocks
        while True:
            row = b"\1" * self._longest_rest
            start = self._free.find(row, self._rover * size)
            if start < 0:
                start = self._free.find(row)
            if start >= 0:
                self._rover = start // size
                return start + max(0, self.num_from(start, size) - n) // 2
            self._longest_rest //= 2

    def _find_whole(self, count: int) -> int:
        """First of `count` whole extents in a row, from the rover on, else from the start; -1 = there are none."""
        row = bytes([self.extent_blocks]) * count
        found = self._room.find(row, self._rover)
        return found if found >= 0 else self._room.find(row)

    def _take_run(self, start: int, count: int, out: list[int]) -> None:
        if not count:
            return
        end, size = start + count, self.extent_blocks
        self._free[start:end] = bytes(count)
        first, last = start // size, (end - 1) // size
        if first == last:
            self._room[first] -= count
        else:
            self._room[first] -= (first + 1) * size - start
            self._room[first + 1 : last] = bytes(last - first - 1)
            self._room[last] -= end - last * size
        self._count -= count
        out.extend(range(start, end))

    # ------------------------------------------------------------------------------------------- conservation
    def check(self, name: str) -> None:
        """Counts by extent and in all are those of the blocks."""
        free = np.frombuffer(self._free, dtype=np.uint8)
        if free[0] or (free > 1).any():
            raise InvariantError(f"{name} pool: the null block is free, or a block more than once")
        starts = range(0, self.num_blocks, self.extent_blocks)
        room = np.add.reduceat(free, starts, dtype=np.int64)
        wrong = np.flatnonzero(room != np.frombuffer(self._room, dtype=np.uint8))
        if len(wrong):
            at = int(wrong[0])
            raise InvariantError(f"{name} pool: extent {at} counts {self._room[at]} free blocks, it has {room[at]}")
        if self._count != int(room.sum()):
            raise InvariantError(f"{name} pool: {self._count} free blocks counted, there are {int(room.sum())}")


def num_runs(blocks: array[int], first: int) -> int:
    """Runs of consecutive numbers that start in blocks[first:]."""
    count = len(blocks) - first
    if count < _BULK:
        return sum([at == 0 or blocks[at] != blocks[at - 1] + 1 for at in range(first, len(blocks))])
    ids = np.frombuffer(blocks, dtype=np.int32)[max(0, first - 1) :]
    return int(np.count_nonzero(np.diff(ids) != 1)) + (first == 0)

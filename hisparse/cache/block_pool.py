"""A pool of numbered blocks: reference counts, free list, watchers of readable free blocks, generations."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import NULL_BLOCK

OnReuse = Callable[[int], None]
Accept = Callable[[int], bool]
OnShortage = Callable[[int], None]


class BlockPool:
    """Blocks 1 .. num_blocks-1 (block 0 is the null block, never handed out). Owns ids, never bytes.

    A block is exactly one of: null, referenced, free, or *free but readable*: free with a watcher. Readable blocks wait
    at the tail of the free list, others at its head. A watcher is called once, before its block is handed out; it may
    call `unwatch` and nothing else of the pool.

    Args:
        num_blocks: incl. the null block. incarnation: where every block's generation starts.
    """

    def __init__(self, num_blocks: int, *, incarnation: int = 0, name: str = "device") -> None:
        if num_blocks < 2:
            raise ConfigError(f"the {name} pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.name = name
        self.num_blocks = num_blocks
        self.on_shortage: OnShortage | None = None
        """Called with the number of missing blocks before a hand-out would fail; may free blocks, nothing else."""
        self.reset(incarnation)

    def reset(self, incarnation: int) -> None:
        """Every block becomes free and unwatched (no watcher is called); generations restart at `incarnation`."""
        num_blocks = self.num_blocks
        self.num_free = num_blocks - 1
        self.generations: npt.NDArray[np.uint64] = np.full(num_blocks, incarnation & (2**64 - 1), dtype=np.uint64)
        self._refs = array("i", bytes(4 * num_blocks))
        # A ring through the null block: _next[0] is the head, _prev[0] the tail.
        self._next = array("i", [*range(1, num_blocks), 0])
        self._prev = array("i", [num_blocks - 1, *range(num_blocks - 1)])
        self._watchers: dict[int, OnReuse] = {}
        self._num_readable = 0
        self._handed_out: dict[int, None] = {}

    # ------------------------------------------------------------------------------------------- queries
    @property
    def num_readable(self) -> int:
        """Free blocks that still have a watcher."""
        return self._num_readable

    def refs(self, block: int) -> int:
        return self._refs[block]

    def is_free(self, block: int) -> bool:
        return block != NULL_BLOCK and self._refs[block] == 0

    def is_watched(self, block: int) -> bool:
        return block in self._watchers

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free (a `touch` would take them out of the free list)."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def free_blocks(self) -> list[int]:
        """The free list, next to be handed out first. O(free)."""
        out, block = [], self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            out.append(block)
            block = self._next[block]
        return out

    def count_free(self, accept: Accept) -> int:
        """Free blocks that `accept` takes. O(free)."""
        return sum(1 for block in self.free_blocks() if accept(block))

    # ------------------------------------------------------------------------------------------- hand-out and return
    def allocate(self, n: int, accept: Accept | None = None) -> npt.NDArray[np.int32] | None:
        """Hands out n blocks with one reference each, or None (and nothing happens) when there are fewer.

        Watchers of the chosen blocks fire first. `accept` restricts the choice (O(free) when given; then `on_shortage` is
        not asked).
        Returns: int32 [n].
        """
        if n < 0:
            raise InvariantError(f"{self.name} pool: asked for {n} blocks")
        if n > self.num_free and self.on_shortage is not None and accept is None:
            self.on_shortage(n - self.num_free)
        if n > self.num_free or (accept is not None and self.count_free(accept) < n):
            return None
        out: list[int] = []
        while len(out) < n:
            block = self._next[NULL_BLOCK]
            if accept is not None:
                while block != NULL_BLOCK and not accept(block):
                    block = self._next[block]
                if block == NULL_BLOCK:
                    raise InvariantError(f"{self.name} pool: free blocks became unacceptable during a hand-out")
            watcher = self._watchers.pop(block, None)
            if watcher is not None:
                self._num_readable -= 1
                watcher(block)
            self._unlink(block)
            self._refs[block] = 1
            out.append(block)
        ids = np.array(out, dtype=np.int32)
        self.generations[ids] += np.uint64(1)
        self._handed_out.update(dict.fromkeys(out))
        return ids

    def take_handed_out(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ids, generations) of blocks handed out since the last call; each id once, ascending, last generation."""
        ids = sorted(self._handed_out)
        self._handed_out.clear()
        return tuple(ids), tuple(self.generations[ids].tolist()) if ids else ()

    @property
    def has_handed_out(self) -> bool:
        return bool(self._handed_out)

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference on each block, free or not; a watcher stays."""
        for block in blocks:
            if self._refs[block] == 0:
                self._must_be_real(block)
                self._unlink(block)
                if block in self._watchers:
                    self._num_readable -= 1
            self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less on each block. At the last one it becomes free (readable if it has a watcher).

        Readable blocks join the tail in the given order; the others join the head so that the given order is handed
        out again in that order.
        """
        plain: list[int] = []
        for block in blocks:
            refs = self._refs[block]
            if refs <= 0:
                raise InvariantError(f"{self.name} block {block} was freed once more than it was referenced")
            self._refs[block] = refs - 1
            if refs > 1:
                continue
            if block in self._watchers:
                self._link(block, self._prev[NULL_BLOCK])
                self._num_readable += 1
            else:
                plain.append(block)
        for block in reversed(plain):
            self._link(block, NULL_BLOCK)

    def unpin(self, blocks: Sequence[int], on_reuse: OnReuse) -> None:
        """`free`, but leaves a watcher: the blocks stay readable until they are handed out, which calls it once."""
        self.watch(blocks, on_reuse)
        self.free(blocks)

    def watch(self, blocks: Iterable[int], on_reuse: OnReuse) -> None:
        """Leaves a watcher on referenced blocks without dropping a reference. Replaces an earlier one."""
        for block in blocks:
            if self._refs[block] <= 0:
                raise InvariantError(f"{self.name} block {block} is not referenced, so its content cannot be kept")
            self._watchers[block] = on_reuse

    def unwatch(self, blocks: Iterable[int]) -> None:
        """Forgets watchers without calling them; a readable block becomes an ordinary free one, handed out next."""
        for block in blocks:
            if self._watchers.pop(block, None) is not None and self._refs[block] == 0:
                self._num_readable -= 1
                self._unlink(block)
                self._link(block, NULL_BLOCK)

    def drop_readable(self, n: int) -> list[int]:
        """Fires the watchers of up to n readable free blocks, the next in line first; they stay free. Returns them."""
        chosen = [block for block in self.free_blocks() if block in self._watchers][:n]
        dropped = []
        for block in chosen:
            watcher = self._watchers.pop(block, None)
            if watcher is None:  # an earlier watcher took this one along
                dropped.append(block)
                continue
            self._num_readable -= 1
            watcher(block)
            self._unlink(block)
            self._link(block, NULL_BLOCK)
            dropped.append(block)
        return dropped

    # ------------------------------------------------------------------------------------------- list
    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1

    def _must_be_real(self, block: int) -> None:
        if not 0 < block < self.num_blocks:
            raise InvariantError(f"{self.name} block {block} is not in 1..{self.num_blocks - 1}")

    # ------------------------------------------------------------------------------------------- conservation
    def check(self) -> None:
        """Each block is exactly one of null, referenced, free, free-but-readable; links and counts agree."""
        free: list[int] = []
        before, block = NULL_BLOCK, self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            if self._prev[block] != before:
                raise InvariantError(f"{self.name} pool: block {block} links back to {self._prev[block]}, not {before}")
            if len(free) >= self.num_blocks:
                raise InvariantError(f"{self.name} pool: the free list has a cycle")
            free.append(block)
            before, block = block, self._next[block]
        if self._prev[NULL_BLOCK] != before:
            raise InvariantError(f"{self.name} pool: tail is {self._prev[NULL_BLOCK]}, the list ends at {before}")
        refs = np.frombuffer(self._refs, dtype=np.int32)
        if refs[NULL_BLOCK] or (refs < 0).any():
            raise InvariantError(f"{self.name} pool: negative or null-block references")
        if len(set(free)) != len(free) or sorted(free) != (np.flatnonzero(refs[1:] == 0) + 1).tolist():
            raise InvariantError(f"{self.name} pool: the free list is not the set of unreferenced blocks")
        if len(free) != self.num_free:
            raise InvariantError(f"{self.name} pool: {len(free)} blocks on the free list, {self.num_free} counted")
        readable = sum(1 for b in free if b in self._watchers)
        if readable != self._num_readable:
            raise InvariantError(f"{self.name} pool: {readable} readable free blocks, {self._num_readable} counted")
        if NULL_BLOCK in self._watchers:
            raise InvariantError(f"{self.name} pool: the null block has a watcher")

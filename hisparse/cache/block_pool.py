"""A pool of numbered blocks: reference counts, free list, watchers of readable free blocks, generations."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import NULL_BLOCK

OnReuse = Callable[[int], None]
Accept = Callable[[int], bool]
OnShortage = Callable[[int], None]
_STANDING, _OWN = 1, 2
_BULK = 64
"""From so many blocks on, numpy is faster than a loop."""


class FreeBlocks(Protocol):
    """Free blocks without a watcher, in any order."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def append(self, block: int, /) -> None: ...
    def extend(self, blocks: list[int], /) -> None: ...


class BlockPool:
    """Blocks 1 .. num_blocks-1 (block 0 is the null block, never handed out). Owns ids, never bytes.

    A block is exactly one of: null, referenced, free, or *free but readable*: free with a watcher. Free blocks are a
    stack, handed out first; readable ones a linked list behind it, oldest first. A watcher is called once, before its
    block is handed out; it may call `unwatch` and nothing else of the pool.

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
        self.standing_watcher: OnReuse | None = None
        """Of blocks that are watched without a watcher of their own."""
        self.reset(incarnation)

    def reset(self, incarnation: int) -> None:
        """Every block becomes free and unwatched (no watcher is called); generations restart at `incarnation`."""
        num_blocks = self.num_blocks
        self.generations: npt.NDArray[np.uint64] = np.full(num_blocks, incarnation & (2**64 - 1), dtype=np.uint64)
        """Hand-outs of each block so far, from `incarnation` on; bumped by `take_handed_out`."""
        self._refs = array("i", bytes(4 * num_blocks))
        self._stack = array("i", range(num_blocks - 1, 0, -1))
        """Free blocks without a watcher; the last is handed out next."""
        self._plain: FreeBlocks = self._stack
        # Readable blocks, a ring through the null block: _next[0] is handed out next, _prev[0] last. Else 0.
        self._next = array("i", bytes(4 * num_blocks))
        self._prev = array("i", bytes(4 * num_blocks))
        # A bytearray and a small dictionary: a list with an entry per block would be walked by every garbage collection.
        self._watched = bytearray(num_blocks)
        """By block: unwatched, watched by `standing_watcher`, or by its own watcher in `_own`."""
        self._own: dict[int, OnReuse] = {}
        self.num_readable = 0
        """Free blocks that still have a watcher."""
        self._handed_out: list[int] = []

    # ------------------------------------------------------------------------------------------- queries
    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, readable ones included."""
        return len(self._plain) + self.num_readable

    def refs(self, block: int) -> int:
        return self._refs[block]

    def is_free(self, block: int) -> bool:
        return block != NULL_BLOCK and self._refs[block] == 0

    def is_watched(self, block: int) -> bool:
        return self._watched[block] != 0

    def num_unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are free (a `touch` would take them out of the free list)."""
        refs = self._refs
        return sum([refs[block] == 0 for block in blocks])

    def free_blocks(self) -> list[int]:
        """The free list, next to be handed out first. O(free)."""
        return [*reversed(self._stack), *self._readable()]

    def _readable(self) -> Iterator[int]:
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self._next[block]

    def num_quiet(self, busy: Collection[int], *, readable: bool) -> int:
        """Free blocks not in `busy`; `readable`: whether free-but-readable ones count. O(busy)."""
        count = len(self._plain) + (self.num_readable if readable else 0)
        for block in busy:
            if self._refs[block] == 0 and (readable or not self._watched[block]):
                count -= 1
        return count

    # ------------------------------------------------------------------------------------------- hand-out and return
    def allocate(self, n: int, accept: Accept | None = None) -> npt.NDArray[np.int32] | None:
        """Hands out n blocks with one reference each, or None (and nothing happens) when there are fewer.

        Returns: int32 [n]. See `take`.
        """
        taken = self.take(n, accept)
        return None if taken is None else np.array(taken, dtype=np.int32)

    def take(self, n: int, accept: Accept | None = None) -> list[int] | None:
        """`allocate` as a list. Watchers of the chosen blocks fire first.

        `accept` restricts the choice (then `on_shortage` is not asked, and the cost is O(free) at worst).
        """
        if n < 0:
            raise InvariantError(f"{self.name} pool: asked for {n} blocks")
        if accept is not None:
            return self._take_accepted(n, accept)
        missing = n - len(self._plain) - self.num_readable
        if missing > 0:
            if self.on_shortage is not None:
                self.on_shortage(missing)
            if n > self.num_free:
                return None
        plain = self._stack
        out: list[int] = []
        while True:
            count = min(n - len(out), len(plain))
            if count:
                out += plain[: -count - 1 : -1]
                del plain[-count:]
            if len(out) == n:
                break
            out.append(self._take_readable(self._next[NULL_BLOCK]))
        self._hand_out(out)
        return out

    def _take_accepted(self, n: int, accept: Accept) -> list[int] | None:
        out: list[int] = []
        passed: list[int] = []
        plain = self._stack
        for block in reversed(plain):
            if len(out) == n:
                break
            (out if accept(block) else passed).append(block)
        readable: list[int] = []
        for block in self._readable():
            if len(out) + len(readable) == n:
                break
            if accept(block):
                readable.append(block)
        if len(out) + len(readable) < n:
            return None
        del plain[len(plain) - len(out) - len(passed) :]
        plain.extend(reversed(passed))
        for block in readable:
            if not self._watched[block]:  # an earlier watcher took this one along
                plain.remove(block)
                out.append(block)
            else:
                out.append(self._take_readable(block))
        self._hand_out(out)
        return out

    def _take_readable(self, block: int) -> int:
        """Fires the watcher of a readable block (which finds it still free) and takes it off the list."""
        watcher = self._own.pop(block) if self._watched[block] == _OWN else self.standing_watcher
        assert watcher is not None
        watcher(block)
        self._watched[block] = 0
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_readable -= 1
        return block

    def _hand_out(self, blocks: list[int]) -> None:
        if len(blocks) < _BULK:
            refs = self._refs
            for block in blocks:
                refs[block] = 1
        else:
            np.frombuffer(self._refs, dtype=np.int32)[blocks] = 1
        self._handed_out += blocks

    def take_handed_out(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ids, generations) of blocks handed out since the last call, each id once, ascending.

        Their generations grow by one here: nothing is written to a block before the command that lists it.
        """
        if not self._handed_out:
            return (), ()
        ids = sorted(set(self._handed_out))
        self._handed_out.clear()
        generations = self.generations[ids] + np.uint64(1)
        self.generations[ids] = generations
        return tuple(ids), tuple(generations.tolist())

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference on each block, which is referenced or readable; a watcher stays."""
        refs, behind, ahead = self._refs, self._next, self._prev
        for block in blocks:
            count = refs[block]
            if not count:
                if not self._watched[block]:
                    raise InvariantError(f"{self.name} block {block} is neither referenced nor readable, or not in "
                                         f"1..{self.num_blocks - 1}: it has no content to keep")
                before, after = ahead[block], behind[block]
                behind[before], ahead[after] = after, before
                self.num_readable -= 1
            refs[block] = count + 1

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less on each block. At the last one it becomes free (readable if it has a watcher).

        Readable blocks join the tail in the given order; the others are handed out next, in the given order.
        """
        refs, watched, behind, ahead = self._refs, self._watched, self._next, self._prev
        plain: list[int] = []
        last = ahead[NULL_BLOCK]
        for block in blocks:
            count = refs[block] - 1
            if count > 0:
                refs[block] = count
                continue
            if count < 0:
                raise InvariantError(f"{self.name} block {block} was freed once more than it was referenced")
            refs[block] = 0
            if not watched[block]:
                plain.append(block)
            else:
                behind[last] = block
                ahead[block] = last
                behind[block] = NULL_BLOCK
                ahead[NULL_BLOCK] = last = block
                self.num_readable += 1
        if plain:
            plain.reverse()
            self._plain.extend(plain)

    def unpin(self, blocks: Sequence[int], on_reuse: OnReuse) -> None:
        """`free`, but leaves a watcher: the blocks stay readable until they are handed out, which calls it once."""
        self.watch(blocks, on_reuse)
        self.free(blocks)

    def watch(self, blocks: Iterable[int], on_reuse: OnReuse | None = None) -> None:
        """Leaves a watcher (None: the standing one) on referenced blocks without dropping a reference. Replaces an earlier
        one."""
        refs, watched, own = self._refs, self._watched, self._own
        for block in blocks:
            if refs[block] <= 0:
                raise InvariantError(f"{self.name} block {block} is not referenced, so its content cannot be kept")
            if on_reuse is not None:
                watched[block] = _OWN
                own[block] = on_reuse
            else:
                if watched[block] == _OWN:
                    del own[block]
                watched[block] = _STANDING

    def unwatch(self, blocks: Iterable[int]) -> None:
        """Forgets watchers without calling them; a readable block becomes an ordinary free one, handed out next."""
        refs, watched, behind, ahead = self._refs, self._watched, self._next, self._prev
        for block in blocks:
            if watched[block]:
                if watched[block] == _OWN:
                    del self._own[block]
                watched[block] = 0
                if not refs[block]:
                    before, after = ahead[block], behind[block]
                    behind[before], ahead[after] = after, before
                    self.num_readable -= 1
                    self._plain.append(block)

    def drop_readable(self, n: int) -> list[int]:
        """Fires the watchers of n readable free blocks (or all), the next in line first; they stay free.

        Returns them, with those that a watcher took along."""
        dropped: list[int] = []
        while len(dropped) < n and self.num_readable:
            before = len(self._stack)
            block = self._take_readable(self._next[NULL_BLOCK])
            dropped += [block, *self._stack[before:]]  # its watcher may have taken others along
            self._stack.append(block)
        return dropped

    # ------------------------------------------------------------------------------------------- conservation
    def check(self) -> None:
        """Each block is exactly one of null, referenced, free, free-but-readable; links and counts agree."""
        readable: list[int] = []
        before, block = NULL_BLOCK, self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            if self._prev[block] != before:
                raise InvariantError(f"{self.name} pool: block {block} links back to {self._prev[block]}, not {before}")
            if len(readable) >= self.num_blocks:
                raise InvariantError(f"{self.name} pool: the list of readable blocks has a cycle")
            if not self._watched[block]:
                raise InvariantError(f"{self.name} pool: block {block} is on the readable list without a watcher")
            readable.append(block)
            before, block = block, self._next[block]
        if self._prev[NULL_BLOCK] != before:
            raise InvariantError(f"{self.name} pool: tail is {self._prev[NULL_BLOCK]}, the list ends at {before}")
        if len(readable) != self.num_readable:
            raise InvariantError(f"{self.name} pool: {len(readable)} readable free blocks, {self.num_readable} counted")
        for block in self._plain:
            if self._watched[block]:
                raise InvariantError(f"{self.name} pool: free block {block} has a watcher but is not on the readable list")
        refs = np.frombuffer(self._refs, dtype=np.int32)
        if refs[NULL_BLOCK] or (refs < 0).any():
            raise InvariantError(f"{self.name} pool: negative or null-block references")
        if sorted([*self._plain, *readable]) != (np.flatnonzero(refs[1:] == 0) + 1).tolist():
            raise InvariantError(f"{self.name} pool: the free list is not the set of unreferenced blocks")
        if self._own.keys() != {block for block, kind in enumerate(self._watched) if kind == _OWN}:
            raise InvariantError(f"{self.name} pool: the blocks with a watcher of their own are not those marked so")
        if self._watched[NULL_BLOCK]:
            raise InvariantError(f"{self.name} pool: the null block has a watcher")

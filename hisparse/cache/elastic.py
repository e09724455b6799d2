"""Hot regions that grow while blocks are plenty, and give them back before anybody has to do without."""

from __future__ import annotations

import bisect
import itertools

from hisparse.cache.core import CacheCore
from hisparse.cache.groups import HiSparseHotManager
from hisparse.cache.request import Incarnation
from hisparse.errors import InvariantError
from hisparse.types import SeatReset

MAX_GROWN_REGIONS = 8
"""Regions that grow in one step, by one level each: bounds the table updates of a command."""


class ElasticRegions:
    """Grows regions by levels (one block in every hot group that may still grow), and shrinks them again.

    Blocks beyond the starting size count as free everywhere (`CacheCore.num_free`), so nothing is refused, deferred,
    preempted or required to go hot because of them; the pool asks for them when it runs short. A shrink's reset, size
    and table entries travel in the same command as the new use of its blocks: the compute stream may have them at once,
    other writers once the steps that may still touch them have retired.
    """

    def __init__(self, core: CacheCore) -> None:
        self.core = core
        self._turn = 0
        """Order of the last request whose region grew."""
        self._paused_until = -1
        """No growth before this step has retired and another one after it: a load waits for quiet blocks."""
        if core.hot is not None:
            core.pool.on_shortage = self._on_shortage

    # ------------------------------------------------------------------------------------------- growth
    def grow(self) -> None:
        """At most one level per region. Never takes free - reserved below the watermark plus one starting region.

        Call it between passes, never inside one: it may take loose pages, and residency was already answered there.
        """
        core, hot = self.core, self.core.hot
        if hot is None or not hot.level_groups:
            return
        if core.fences or core.clock.retired <= self._paused_until:
            return  # a fenced block would make the step wait for a copy
        spare = core.pool.num_free - core.reserved_device - core.watermark_blocks - hot.region_blocks
        left = min(spare // len(hot.groups), MAX_GROWN_REGIONS)
        if left <= 0:
            return
        incs = list(core.live.values())
        start = bisect.bisect_right(incs, self._turn, key=_order)
        for inc in itertools.chain(incs[start:], incs[:start]):
            if inc.hot and self._wants(inc):
                self._add_level(inc, hot)
                left -= 1
                if not left:
                    return

    def _wants(self, inc: Incarnation) -> bool:
        """More rows than its absent pages have are of no use to a request."""
        hot = self.core.hot
        assert hot is not None
        level = inc.hot_level
        return (level < len(hot.level_groups) and len(inc.hot[hot.level_groups[level][0]]) < inc.num_absent
                and not inc.loading and not inc.held)

    def _add_level(self, inc: Incarnation, hot: HiSparseHotManager) -> None:
        core, groups = self.core, hot.level_groups[inc.hot_level]
        blocks = core.pool.take(len(groups))
        if blocks is None:
            raise InvariantError(f"request {inc.request_id!r}: blocks for its hot region were counted but are not there")
        hot.add_level(inc, blocks)
        self._turn = inc.order
        core.counters.hot_blocks_grown += len(groups)
        for group in groups:
            size = len(inc.hot[group])
            core.tables.hot(inc, group, size * hot.block_size, first_block=size - 1)

    # ------------------------------------------------------------------------------------------- giving back
    def take_back(self, num_blocks: int) -> int:
        """Gives back at least `num_blocks` blocks, or all there are: the last page grown first. Returns how many."""
        hot = self.core.hot
        if hot is None or num_blocks <= 0 or not hot.grown:
            return 0
        shrunk: dict[Incarnation, set[int]] = {}
        taken = 0
        while taken < num_blocks and hot.grown:
            inc, blocks = hot.remove_last_level()
            self.core.free_device(blocks)
            taken += len(blocks)
            shrunk.setdefault(inc, set()).update(hot.level_groups[inc.hot_level])
        for inc, groups in shrunk.items():
            rows = {group: len(inc.hot[group]) * hot.block_size for group in sorted(groups)}
            for group in rows:
                self.core.tables.hot(inc, group, rows[group], first_block=len(inc.hot[group]))
            if len(rows) == len(hot.groups) and len(set(rows.values())) == 1:
                rows = {-1: rows[0]}
            for group in rows:
                self.core.tables.reset(
                    SeatReset(seat=inc.seat, from_slot=rows[group], from_position=-1, hot_group=group))
        self.core.counters.hot_blocks_taken_back += taken
        return taken

    def restore_watermark(self) -> None:
        """Before anybody is required to go hot: free blocks back to the watermark, as far as given-back blocks reach."""
        self.take_back(self.core.watermark_blocks - self.core.pool.num_free)

    def give_to_outside_writers(self, num_blocks: int) -> int:
        """Like `take_back`, for a load that waits for quiet blocks: regions do not grow before it had its turn."""
        self._paused_until = self.core.clock.dispatched
        return self.take_back(num_blocks)

    def _on_shortage(self, missing: int) -> None:
        self.take_back(missing)

    # ------------------------------------------------------------------------------------------- conservation
    def check(self) -> None:
        """Every region has the size of its level in each group; the blocks beyond the start count."""
        hot = self.core.hot
        if hot is None:
            return
        grown: dict[tuple[Incarnation, int], int] = {}
        for inc in self.core.live.values():
            if not inc.hot:
                continue
            want = [min(start + inc.hot_level, most)
                    for start, most in zip(hot.start_blocks, hot.max_blocks, strict=True)]
            if [len(blocks) for blocks in inc.hot] != want:
                raise InvariantError(f"hot region of {inc.request_id!r} has {[len(blocks) for blocks in inc.hot]} blocks by "
                                     f"group, not {want}, those of level {inc.hot_level}")
            if inc.seat < 0 or any(self.core.pool.refs(block) != 1 for blocks in inc.hot for block in blocks):
                raise InvariantError(f"hot region of {inc.request_id!r} (seat {inc.seat}) does not own its blocks alone")
            grown |= {(inc, level): len(hot.level_groups[level - 1]) for level in range(1, inc.hot_level + 1)}
        if grown != hot.grown or sum(grown.values()) != hot.elastic_blocks:
            raise InvariantError(f"{hot.elastic_blocks} blocks of hot regions count as grown, {sum(grown.values())} are")


def _order(inc: Incarnation) -> int:
    return inc.order

"""Hot regions that grow while blocks are plenty, and give them back before anybody has to do without."""

from __future__ import annotations

from hisparse.cache.core import CacheCore
from hisparse.cache.request import Incarnation
from hisparse.errors import InvariantError
from hisparse.types import SeatReset

MAX_GROWN_REGIONS = 8
"""Regions that grow in one step, by one page each: bounds the table updates of a command."""


class ElasticRegions:
    """Grows regions by whole pages (one block in every hot group) beyond their starting size, and shrinks them again.

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

    @property
    def num_blocks(self) -> int:
        """Blocks beyond the starting size, over all regions."""
        return self.core.hot.elastic_blocks if self.core.hot is not None else 0

    # ------------------------------------------------------------------------------------------- growth
    def grow(self) -> None:
        """At most one page per region. Never takes free - reserved below the watermark plus one starting region.

        Call it between passes, never inside one: it may take loose pages, and residency was already answered there.
        """
        core, hot = self.core, self.core.hot
        if hot is None or hot.max_blocks_per_group <= hot.blocks_per_group:
            return
        if core.fences or core.clock.retired <= self._paused_until:
            return  # a fenced block would make the step wait for a copy
        spare = core.pool.num_free - core.reserved_device - core.watermark_blocks - hot.region_blocks
        pages = min(spare // len(hot.groups), MAX_GROWN_REGIONS)
        if pages <= 0:
            return
        wanting = [inc for inc in core.live.values() if inc.hot and self._wants(inc)]
        if len(wanting) > pages:
            first = next((i for i, inc in enumerate(wanting) if inc.order > self._turn), 0)
            wanting = (wanting[first:] + wanting[:first])[:pages]
        for inc in wanting:
            if self._wants(inc):  # an earlier one may have taken a loose page, never given one
                self._add_page(inc)

    def _wants(self, inc: Incarnation) -> bool:
        """More rows than its absent pages have are of no use to a request."""
        hot = self.core.hot
        assert hot is not None
        return (bool(inc.hot) and len(inc.hot[0]) < min(hot.max_blocks_per_group, inc.num_absent)
                and not inc.loading and not inc.held)

    def _add_page(self, inc: Incarnation) -> None:
        core, hot = self.core, self.core.hot
        assert hot is not None
        blocks = core.pool.allocate(len(hot.groups))
        if blocks is None:
            raise InvariantError(f"request {inc.request_id!r}: blocks for its hot region were counted but are not there")
        page = len(inc.hot[0])
        for group, block in zip(inc.hot, blocks.tolist(), strict=True):
            group.append(block)
        hot.grown[inc, page] = None
        self._turn = inc.order
        core.counters.hot_blocks_grown += len(hot.groups)
        core.tables.hot(inc, self._rows(inc), first_block=page)

    # ------------------------------------------------------------------------------------------- giving back
    def take_back(self, num_blocks: int) -> int:
        """Gives back at least `num_blocks` blocks, or all there are: the last page grown first. Returns how many."""
        hot = self.core.hot
        if hot is None or num_blocks <= 0 or not hot.grown:
            return 0
        shrunk: dict[Incarnation, None] = {}
        taken = 0
        while taken < num_blocks and hot.grown:
            (inc, _), _ = hot.grown.popitem()
            blocks = [group.pop() for group in inc.hot]
            self.core.free_device(blocks)
            taken += len(blocks)
            shrunk[inc] = None
        for inc in shrunk:
            rows = self._rows(inc)
            self.core.tables.hot(inc, rows, first_block=len(inc.hot[0]))
            self.core.tables.reset(SeatReset(seat=inc.seat, from_slot=rows, from_position=-1))
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

    def _rows(self, inc: Incarnation) -> int:
        return len(inc.hot[0]) * self.core.block_size

    # ------------------------------------------------------------------------------------------- conservation
    def check(self) -> None:
        """Every region has between its starting and its greatest size, equal in all groups; the pages beyond count."""
        hot = self.core.hot
        if hot is None:
            return
        grown = set()
        for inc in self.core.live.values():
            if not inc.hot:
                continue
            sizes = {len(blocks) for blocks in inc.hot}
            size = max(sizes)
            if len(inc.hot) != len(hot.groups) or sizes != {size} or (
                not hot.blocks_per_group <= size <= hot.max_blocks_per_group
            ):
                raise InvariantError(f"hot region of {inc.request_id!r} has {[len(blocks) for blocks in inc.hot]} blocks by "
                                     f"group, not {hot.blocks_per_group}..{hot.max_blocks_per_group} in each")
            if inc.seat < 0 or any(self.core.pool.refs(block) != 1 for blocks in inc.hot for block in blocks):
                raise InvariantError(f"hot region of {inc.request_id!r} (seat {inc.seat}) does not own its blocks alone")
            grown |= {(inc, page) for page in range(hot.blocks_per_group, size)}
        if grown != hot.grown.keys():
            raise InvariantError(f"{len(hot.grown)} pages of hot regions count as grown, {len(grown)} are")

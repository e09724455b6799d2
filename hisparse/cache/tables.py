"""Which block table entries changed since the last command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hisparse.cache.request import Incarnation
from hisparse.layout import CacheGroup, KVCacheLayout
from hisparse.types import BlockTableUpdate, HotRows, SeatReset


class TableChanges:
    """Collects changed entries by (request, kind of table); drains them as runs. Cost O(entries that changed)."""

    def __init__(self, layout: KVCacheLayout, *, enabled: bool = True) -> None:
        self._layout = layout
        self._enabled = enabled
        """False: there is no host page and no hot region, and no table of them is sent."""
        self._indexer: dict[Incarnation, set[int]] = {}
        self._source: dict[Incarnation, set[int]] = {}
        self._resident: dict[Incarnation, set[int]] = {}
        self._hot: dict[Incarnation, int] = {}
        """Request -> first block of its region that changed."""
        self._emptied: dict[int, None] = {}
        self._hot_rows: dict[tuple[int, int], int] = {}
        self._resets: dict[SeatReset, None] = {}

    def clear(self) -> None:
        self.__init__(self._layout, enabled=self._enabled)  # type: ignore[misc]

    def pages(self, inc: Incarnation, pages: Iterable[int]) -> None:
        """Entries of the indexer, source and resident tables; none = only the length changed."""
        pages = list(pages)
        for marks in (self._indexer, self._source, self._resident):
            marks.setdefault(inc, set()).update(pages)

    def resident(self, inc: Incarnation, page: int) -> None:
        self._resident.setdefault(inc, set()).add(page)

    def hot(self, inc: Incarnation, rows: int, *, first_block: int = 0) -> None:
        """The request's hot region has `rows` rows in every hot group from now on; blocks below `first_block` stayed."""
        self._hot[inc] = min(first_block, self._hot.get(inc, first_block))
        for group in range(len(self._layout.hots)):
            self._hot_rows[inc.seat, group] = rows

    def reset(self, reset: SeatReset) -> None:
        self._resets[reset] = None

    def seat_emptied(self, inc: Incarnation) -> None:
        """The seat's rows become empty in every table, and what was noted for its request is void."""
        for marks in (self._indexer, self._source, self._resident):
            marks.pop(inc, None)
        self._hot.pop(inc, None)
        self._emptied[inc.seat] = None

    def take_updates(self) -> tuple[BlockTableUpdate, ...]:
        """Empty rows first, then the changed runs of every group in order."""
        layout = self._layout
        groups: Sequence[CacheGroup] = layout.groups if self._enabled else (layout.indexer, *layout.residents)
        out = [
            BlockTableUpdate(group_id=group.group_id, seat=seat, first_page=0, ids=(), num_pages=0)
            for group in groups for seat in self._emptied
        ]
        for inc, pages in self._indexer.items():
            out += _runs(layout.indexer.group_id, inc.seat, inc.indexer, pages)
        for inc, pages in self._source.items() if self._enabled else ():
            out += _runs(layout.source.group_id, inc.seat, inc.host, pages)
        runs = [(inc, list(_spans(pages, inc.num_pages))) for inc, pages in self._resident.items()]
        for g, group in enumerate(layout.residents):
            for inc, spans in runs:
                out += [
                    BlockTableUpdate(
                        group_id=group.group_id, seat=inc.seat, first_page=first, num_pages=inc.num_pages,
                        ids=tuple([blocks[g] if blocks else 0 for blocks in inc.resident[first:end]]),
                    )
                    for first, end in spans
                ]
        for g, hot_group in enumerate(layout.hots):
            for inc, changed in self._hot.items():
                region = inc.hot[g] if inc.hot else []
                first = min(changed, len(region))
                out.append(BlockTableUpdate(group_id=hot_group.group_id, seat=inc.seat, first_page=first,
                                            ids=tuple(region[first:]), num_pages=len(region)))
        for marks in (self._indexer, self._source, self._resident):
            marks.clear()
        self._hot.clear()
        self._emptied.clear()
        return tuple(out)

    def take_hot_rows(self) -> tuple[HotRows, ...]:
        out = tuple(HotRows(seat=seat, hot_group=group, rows=rows) for (seat, group), rows in self._hot_rows.items())
        self._hot_rows.clear()
        return out

    def take_resets(self) -> tuple[SeatReset, ...]:
        out = tuple(self._resets)
        self._resets.clear()
        return out


def _spans(pages: set[int], num_pages: int) -> Iterator[tuple[int, int]]:
    """Runs [first, end) of changed pages below num_pages; (num_pages, num_pages) if only the length changed."""
    todo = sorted(page for page in pages if page < num_pages)
    if not todo:
        yield num_pages, num_pages
        return
    first = previous = todo[0]
    for page in todo[1:]:
        if page != previous + 1:
            yield first, previous + 1
            first = page
        previous = page
    yield first, previous + 1


def _runs(group_id: int, seat: int, table: list[int], pages: set[int]) -> Iterator[BlockTableUpdate]:
    for first, end in _spans(pages, len(table)):
        yield BlockTableUpdate(group_id=group_id, seat=seat, first_page=first, ids=tuple(table[first:end]),
                               num_pages=len(table))

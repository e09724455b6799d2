"""Which block table entries changed since the last command."""

from __future__ import annotations

from collections.abc import Sequence

from hisparse.cache.request import ABSENT, Incarnation
from hisparse.layout import CacheGroup, KVCacheLayout
from hisparse.types import BlockTableUpdate, HotRows, ResidentPagesUpdate, SeatReset, TableUpdate

Runs = list[tuple[int, int]]
"""Ranges [first, end) of pages; an empty one = only the length of the table changed."""


class TableChanges:
    """Collects changed entries by (request, kind of table); drains them as runs. Cost O(entries that changed).

    An entry of a resident table that is null and was null before (a host-only page of a new request) is no change: an
    emptied row is null everywhere.
    """

    def __init__(self, layout: KVCacheLayout, *, enabled: bool = True) -> None:
        self._layout = layout
        self._enabled = enabled
        """False: there is no host page and no hot region, and no table of them is sent."""
        self._held: dict[Incarnation, Runs] = {}
        """Changes of the indexer and the source table."""
        self._resident: dict[Incarnation, Runs] = {}
        self._hot: dict[Incarnation, list[int]] = {}
        """Request -> by hot group, the first block of its region that changed; -1 = none."""
        self._emptied: dict[int, None] = {}
        self._hot_rows: dict[tuple[int, int], int] = {}
        self._resets: dict[SeatReset, None] = {}

    def clear(self) -> None:
        self.__init__(self._layout, enabled=self._enabled)  # type: ignore[misc]

    def pages(self, inc: Incarnation, first: int, end: int) -> None:
        """Entries [first, end) of the indexer and source tables, and the length of every table."""
        self._held.setdefault(inc, []).append((first, end))
        self._resident.setdefault(inc, []).append((0, 0))

    def resident(self, inc: Incarnation, first: int, end: int) -> None:
        """Entries [first, end) of the resident tables."""
        runs = self._resident.get(inc)
        if runs is None:
            self._resident[inc] = [(first, end)]
        else:
            runs.append((first, end))

    def hot(self, inc: Incarnation, group: int, rows: int, *, first_block: int = 0) -> None:
        """The request's region in `group` has `rows` rows from now on; its blocks below `first_block` stayed."""
        changed = self._hot.setdefault(inc, [-1] * len(self._layout.hots))
        changed[group] = first_block if changed[group] < 0 else min(first_block, changed[group])
        self._hot_rows[inc.seat, group] = rows

    def reset(self, reset: SeatReset) -> None:
        self._resets[reset] = None

    def seat_emptied(self, inc: Incarnation) -> None:
        """The seat's rows become empty in every table, and what was noted for its request is void."""
        self._held.pop(inc, None)
        self._resident.pop(inc, None)
        self._hot.pop(inc, None)
        self._emptied[inc.seat] = None

    def take_updates(self) -> tuple[TableUpdate, ...]:
        """Empty rows first, then the changed runs of every group in order."""
        layout = self._layout
        groups: Sequence[CacheGroup] = layout.groups if self._enabled else (layout.indexer, *layout.residents)
        out: list[TableUpdate] = [
            BlockTableUpdate(group.group_id, seat, 0, (), 0) for group in groups for seat in self._emptied]
        held = [(inc, _merged(runs, inc.num_pages)) for inc, runs in self._held.items()]
        for inc, runs in held:
            for first, end in runs:
                out.append(BlockTableUpdate(
                    layout.indexer.group_id, inc.seat, first, tuple(inc.indexer[first:end]), inc.num_pages))
        for inc, runs in held if self._enabled else ():
            for first, end in runs:
                out.append(BlockTableUpdate(
                    layout.source.group_id, inc.seat, first, tuple(inc.host[first:end]), inc.num_pages))
        self._take_resident(out)
        for g, hot_group in enumerate(layout.hots):
            for inc, changed in self._hot.items():
                if changed[g] >= 0:
                    region = inc.hot[g] if inc.hot else []
                    first = min(changed[g], len(region))
                    out.append(BlockTableUpdate(hot_group.group_id, inc.seat, first, tuple(region[first:]), len(region)))
        self._held.clear()
        self._resident.clear()
        self._hot.clear()
        self._emptied.clear()
        return tuple(out)

    def _take_resident(self, out: list[TableUpdate]) -> None:
        """The runs of every request, for all groups at once."""
        for inc, marks in self._resident.items():
            seat, num_pages, get = inc.seat, inc.num_pages, inc.resident.get
            for first, end in _merged(marks, num_pages):
                pages = [get(page) for page in range(first, end)]
                blocks = tuple([page.blocks if page is not None else ABSENT for page in pages])
                out.append(ResidentPagesUpdate(seat, first, blocks, num_pages))

    def take_hot_rows(self) -> tuple[HotRows, ...]:
        out = tuple([HotRows(seat, group, rows) for (seat, group), rows in self._hot_rows.items()])
        self._hot_rows.clear()
        return out

    def take_resets(self) -> tuple[SeatReset, ...]:
        out = tuple(self._resets)
        self._resets.clear()
        return out


def _merged(runs: Runs, num_pages: int) -> Runs:
    """Disjoint ascending runs below num_pages that cover the same pages; only (num_pages, num_pages) if there is none."""
    if len(runs) == 1 and runs[0][0] < runs[0][1] <= num_pages:
        return runs
    out: Runs = []
    for first, end in sorted(runs):
        end = min(end, num_pages)
        if first >= end:
            continue
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((first, end))
    return out or [(num_pages, num_pages)]

"""Block tables, mirror table and hot-region sizes of every seat, as tensors that resolve and append index.

All of them lie in one int32 allocation whose address never changes (CUDA graphs hold it). The CPU keeps the same numbers in
numpy, where updates are checked and applied; `flush` then brings what changed to the device in one upload and one scatter.
On the CPU the two are the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.types import HotRows, MirrorSpan, ResidentPagesUpdate, TableUpdate
from hisparse.worker.staging import PinnedRing

ALIGN_ITEMS = 32
Array = np.ndarray[Any, Any]


class KVTables:
    """What each seat's pages are, by group. Written by the step's command only, read by every layer.

    `apply`, `apply_hot_rows` and `apply_mirrors` flush; `apply_step` does all three with one flush.

    Args:
        max_seats: seats 0..max_seats-1.
        max_model_len: longest request in tokens.
        hot_rows_max: most rows of a hot region, per hot group (0 when HiSparse is off).
        staging: for uploads; needed on a device other than the CPU.

    Raises:
        InvariantError: `hot_rows_max` has another length than `layout.hots`, or there is no staging for the device.

    Attributes:
        tables: per group id, int32 [max_seats, width]; 0 = null. Width: pages of `max_model_len`, or the most blocks of a
            region of that hot group.
        hot_rows: int32 [num hot groups, max_seats], rows of each region now; 0 = none.
        mirrors: int32 [max_seats, pages]: host block behind a page that this step may write, 0 = skip. One step only.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        *,
        max_seats: int,
        max_model_len: int,
        hot_rows_max: Sequence[int],
        device: str | torch.device = "cpu",
        staging: PinnedRing | None = None,
    ) -> None:
        self.layout = layout
        self.max_seats = max_seats
        self.pages = layout.pages(max_model_len)
        self._staging = staging
        if len(hot_rows_max) != len(layout.hots):
            raise InvariantError(f"hot_rows_max has {len(hot_rows_max)} entries for {len(layout.hots)} hot groups")
        if staging is None and torch.device(device).type != "cpu":
            raise InvariantError(f"tables on {device} need a staging ring")
        widths = [self.pages] * len(layout.groups)
        for group, rows in zip(layout.hots, hot_rows_max, strict=True):
            widths[group.group_id] = layout.hot_blocks(rows)
        shapes = [*((max_seats, width) for width in widths), (len(layout.hots), max_seats), (max_seats, self.pages)]
        self._first = [0]
        for rows, columns in shapes:
            self._first.append(self._first[-1] + -(-rows * columns // ALIGN_ITEMS) * ALIGN_ITEMS)
        self._flat = torch.zeros(self._first[-1], dtype=torch.int32, device=device)
        self._mirror: Array = self._flat.numpy() if staging is None else np.zeros(self._first[-1], dtype=np.int32)
        on_device = [self._flat[at : at + r * c].view(r, c) for at, (r, c) in zip(self._first, shapes)]
        on_host = [self._mirror[at : at + r * c].reshape(r, c) for at, (r, c) in zip(self._first, shapes)]
        *self.tables, self.hot_rows, self.mirrors = on_device
        *self._host_tables, self._host_hot_rows, self._host_mirrors = on_host
        self._residents = slice(layout.residents[0].group_id, layout.residents[-1].group_id + 1)
        first, end = self._first[self._residents.start], self._first[self._residents.stop]
        per_table = self._mirror[first:end].reshape(len(layout.residents), -1)[:, : max_seats * self.pages]
        self._resident_rows = per_table.reshape(len(layout.residents), max_seats, self.pages)
        """Rows of every resident table: their ids follow one another. A view."""
        self._extent: Array = np.zeros((len(widths), max_seats), dtype=np.int64)
        """Entries of each table's row at and beyond which everything is null."""
        self._changed: list[tuple[int, int]] = []
        """First entry and count of what the CPU changed since the last flush."""
        self._mirrored: tuple[MirrorSpan, ...] = ()

    # ---- named tables
    @property
    def flat(self) -> Tensor:
        """int32, the allocation in which all of them lie; `first_of_resident` is where one begins."""
        return self._flat

    def first_of_resident(self, group: int) -> int:
        """Entry of `flat` where the block table of the group-th resident group begins."""
        return self._first[self.layout.residents[group].group_id]

    @property
    def indexer(self) -> Tensor:
        return self.tables[self.layout.indexer.group_id]

    @property
    def source(self) -> Tensor:
        return self.tables[self.layout.source.group_id]

    def resident(self, group: int) -> Tensor:
        """Block table of the group-th resident group."""
        return self.tables[self.layout.residents[group].group_id]

    def hot(self, group: int) -> Tensor:
        """Blocks of each seat's hot region in the group-th hot group, in slot order."""
        return self.tables[self.layout.hots[group].group_id]

    # ---- the command
    def apply_step(
        self, updates: Iterable[TableUpdate], hot_rows: Iterable[HotRows], mirrors: Iterable[MirrorSpan]
    ) -> None:
        """Everything that a command says of tables, in one upload. Raises as `apply`, `apply_hot_rows`, `apply_mirrors`."""
        self._take_updates(updates)
        self._take_hot_rows(hot_rows)
        self._take_mirrors(mirrors)
        self.flush()

    def apply(self, updates: Iterable[TableUpdate]) -> None:
        """Applies updates in order.

        Raises:
            InvariantError: a group, seat or page outside the tables.
        """
        self._take_updates(updates)
        self.flush()

    def apply_hot_rows(self, items: Iterable[HotRows]) -> None:
        """Sets region sizes; runs after the table updates of the same command.

        Raises:
            InvariantError: a size beyond the table, or slots without a block behind them.
        """
        self._take_hot_rows(items)
        self.flush()

    def apply_mirrors(self, spans: Iterable[MirrorSpan]) -> None:
        """Replaces the mirror table: pages not in `spans` are not mirrored in this step."""
        self._take_mirrors(spans)
        self.flush()

    def flush(self) -> None:
        """Brings the entries that changed since the last flush to the device.

        An entry that changed several times is uploaded with its last value, whatever place in the list it has.
        Stream: asynchronous on the compute stream; one upload, one scatter, nothing when nothing changed.
        """
        if self._staging is not None and self._changed:
            first, count = np.array(self._changed, dtype=np.int64).T
            index = ranges(first, count)
            if index.size:
                where, values = self._staging.upload(index, self._mirror[index])
                self._flat.index_copy_(0, where, values)
        self._changed.clear()

    def check(self) -> None:
        """Raises InvariantError unless the device holds what the CPU believes. Synchronises: for tests."""
        held = self._flat.cpu().numpy()
        if not np.array_equal(held, self._mirror):
            at = int(np.flatnonzero(held != self._mirror)[0])
            raise InvariantError(f"table entry {at} is {held[at]} on the device and should be {self._mirror[at]}")

    # ---- on the CPU
    def _take_updates(self, updates: Iterable[TableUpdate]) -> None:
        for update in updates:
            self._check_seat(update.seat, "table update")
            if isinstance(update, ResidentPagesUpdate):
                self._take_resident(update)
                continue
            if not 0 <= update.group_id < len(self.tables):
                raise InvariantError(f"table update for group {update.group_id}; groups are 0..{len(self.tables) - 1}")
            width, end = self.tables[update.group_id].shape[1], update.first_page + len(update.ids)
            if update.first_page < 0 or end > width or not 0 <= update.num_pages <= width:
                raise InvariantError(
                    f"table update of seat {update.seat}, group {update.group_id} covers entries {update.first_page}.."
                    f"{end} of {update.num_pages}, but the table has {width}"
                )
            row = self._host_tables[update.group_id][update.seat : update.seat + 1]
            values = np.array(update.ids, dtype=np.int32)[None]
            group = slice(update.group_id, update.group_id + 1)
            self._set(group, row, update.seat, update.first_page, values, update.num_pages)

    def _take_resident(self, update: ResidentPagesUpdate) -> None:
        num_groups, end = len(self.layout.residents), update.first_page + len(update.blocks)
        if update.first_page < 0 or end > self.pages or not 0 <= update.num_pages <= self.pages:
            raise InvariantError(
                f"table update of seat {update.seat}, resident groups, covers pages {update.first_page}..{end} of "
                f"{update.num_pages}, but the tables have {self.pages}"
            )
        if any(len(page) not in (0, num_groups) for page in update.blocks):
            raise InvariantError(
                f"table update of seat {update.seat} has pages of {sorted({len(page) for page in update.blocks})} blocks "
                f"for {num_groups} resident groups"
            )
        null = (0,) * num_groups
        blocks = np.array([page or null for page in update.blocks], dtype=np.int32).reshape(-1, num_groups)
        rows = self._resident_rows[:, update.seat]
        self._set(self._residents, rows, update.seat, update.first_page, blocks.T, update.num_pages)

    def _set(self, groups: slice, rows: Array, seat: int, first: int, values: Array, num_pages: int) -> None:
        """`rows[:, first : first + n] = values` [tables, n], then null from `num_pages` on; notes what changed.

        Args: groups: ids of the tables. rows: of `seat` in each of them.
        """
        end, extent = first + values.shape[1], int(self._extent[groups, seat].max())
        spans = []
        if values.shape[1]:
            rows[:, first:end] = values
            spans.append((first, end - first))
            extent = max(extent, end)
        if extent > num_pages:
            rows[:, num_pages:extent] = 0
            spans.append((num_pages, extent - num_pages))
            extent = num_pages
        self._extent[groups, seat] = extent
        if self._staging is not None:
            start = seat * rows.shape[1]
            for at, count in spans:
                self._changed += [(base + start + at, count) for base in self._first[groups]]

    def _take_hot_rows(self, items: Iterable[HotRows]) -> None:
        for item in items:
            self._check_seat(item.seat, "hot rows")
            if not 0 <= item.hot_group < len(self.layout.hots):
                raise InvariantError(f"hot rows for hot group {item.hot_group}; there are {len(self.layout.hots)}")
            blocks = self.layout.hot_blocks(item.rows)
            row = self._host_tables[self.layout.hots[item.hot_group].group_id][item.seat]
            if item.rows < 0 or blocks > row.shape[0] or not row[:blocks].all():
                raise InvariantError(
                    f"seat {item.seat}, hot group {item.hot_group}: {item.rows} hot rows need {blocks} blocks, the "
                    f"table holds {int((row != 0).sum())} of at most {row.shape[0]}"
                )
            if self._host_hot_rows[item.hot_group, item.seat] != item.rows:
                self._host_hot_rows[item.hot_group, item.seat] = item.rows
                self._note(self._first[-3] + item.hot_group * self.max_seats + item.seat, 1)

    def _take_mirrors(self, spans: Iterable[MirrorSpan]) -> None:
        """Most seats have the same spans as in the step before: those are left alone."""
        old, new = self._mirrored, tuple(spans)
        if new == old:
            return
        seats = {span.seat for pair in zip_longest(old, new) if pair[0] != pair[1] for span in pair if span is not None}
        changed = [span for span in new if span.seat in seats]
        for span in changed:
            self._check_seat(span.seat, "mirror span")
            end = span.first_page + len(span.host_blocks)
            if span.first_page < 0 or end > self.pages:
                raise InvariantError(
                    f"mirror span of seat {span.seat} covers pages {span.first_page}..{end} of {self.pages}"
                )
        for span in old:
            if span.seat in seats:
                self._mirror_span(span, 0)
        for span in changed:
            self._mirror_span(span, np.maximum(np.array(span.host_blocks, dtype=np.int32), 0))
        self._mirrored = new

    def _mirror_span(self, span: MirrorSpan, blocks: Array | int) -> None:
        count = len(span.host_blocks)
        self._host_mirrors[span.seat, span.first_page : span.first_page + count] = blocks
        self._note(self._first[-2] + span.seat * self.pages + span.first_page, count)

    def _note(self, first: int, count: int) -> None:
        if self._staging is not None:
            self._changed.append((first, count))

    def _check_seat(self, seat: int, what: str) -> None:
        if not 0 <= seat < self.max_seats:
            raise InvariantError(f"{what} for seat {seat}; seats are 0..{self.max_seats - 1}")


def ranges(first: Array, count: Array) -> Array:
    """int64, sorted: the distinct members of [first[i], first[i] + count[i]). Both int64 [n] and >= 0.

    Example: first (5, 6), count (3, 4) -> 5, 6, 7, 8, 9.
    """
    order = np.argsort(first, kind="stable")
    first, end = first[order], (first + count)[order]
    # a range begins where all earlier ones have ended
    begin = np.maximum(first, np.concatenate(([0], np.maximum.accumulate(end)[:-1])))
    size = np.maximum(end - begin, 0)
    offset = np.cumsum(size) - size
    return np.repeat(begin - offset, size) + np.arange(int(size.sum()), dtype=np.int64)

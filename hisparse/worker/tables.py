"""Block tables, mirror table and hot-region sizes of every seat, as tensors that resolve and append index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.types import HotRows, MirrorSpan, ResidentPagesUpdate, TableUpdate


class KVTables:
    """What each seat's pages are, by group. Written by the step's command only, read by every layer.

    Args:
        max_seats: seats 0..max_seats-1.
        max_model_len: longest request in tokens.
        hot_rows_max: most rows of a hot region, per hot group (0 when HiSparse is off).

    Raises:
        InvariantError: `hot_rows_max` has another length than `layout.hots`.

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
        device: str = "cpu",
    ) -> None:
        self.layout = layout
        self.max_seats = max_seats
        self.pages = layout.pages(max_model_len)
        if len(hot_rows_max) != len(layout.hots):
            raise InvariantError(f"hot_rows_max has {len(hot_rows_max)} entries for {len(layout.hots)} hot groups")
        widths = [self.pages] * len(layout.groups)
        for group, rows in zip(layout.hots, hot_rows_max, strict=True):
            widths[group.group_id] = layout.hot_blocks(rows)
        self.tables: list[Tensor] = [
            torch.zeros((max_seats, width), dtype=torch.int32, device=device) for width in widths
        ]
        self.hot_rows = torch.zeros((len(layout.hots), max_seats), dtype=torch.int32, device=device)
        self.mirrors = torch.zeros((max_seats, self.pages), dtype=torch.int32, device=device)
        self._mirrored: set[int] = set()

    # ---- named tables
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
    def apply(self, updates: Iterable[TableUpdate]) -> None:
        """Applies updates in order.

        Raises:
            InvariantError: a group, seat or page outside the tables.
        """
        for update in updates:
            if isinstance(update, ResidentPagesUpdate):
                self._apply_resident(update)
                continue
            if not 0 <= update.group_id < len(self.tables):
                raise InvariantError(f"table update for group {update.group_id}; groups are 0..{len(self.tables) - 1}")
            table = self.tables[update.group_id]
            self._check_seat(update.seat, "table update")
            end = update.first_page + len(update.ids)
            if update.first_page < 0 or end > table.shape[1] or not 0 <= update.num_pages <= table.shape[1]:
                raise InvariantError(
                    f"table update of seat {update.seat}, group {update.group_id} covers entries {update.first_page}.."
                    f"{end} of {update.num_pages}, but the table has {table.shape[1]}"
                )
            row = table[update.seat]
            if update.ids:
                row[update.first_page : end] = torch.tensor(update.ids, dtype=torch.int32)
            row[update.num_pages :] = 0

    def _apply_resident(self, update: ResidentPagesUpdate) -> None:
        self._check_seat(update.seat, "table update")
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
        blocks = torch.tensor([page or null for page in update.blocks], dtype=torch.int32).reshape(-1, num_groups)
        for group in range(num_groups):
            row = self.resident(group)[update.seat]
            row[update.first_page : end] = blocks[:, group]
            row[update.num_pages :] = 0

    def apply_hot_rows(self, items: Iterable[HotRows]) -> None:
        """Sets region sizes; runs after the table updates of the same command.

        Raises:
            InvariantError: a size beyond the table, or slots without a block behind them.
        """
        for item in items:
            self._check_seat(item.seat, "hot rows")
            if not 0 <= item.hot_group < len(self.layout.hots):
                raise InvariantError(f"hot rows for hot group {item.hot_group}; there are {len(self.layout.hots)}")
            blocks = self.layout.hot_blocks(item.rows)
            row = self.hot(item.hot_group)[item.seat]
            if item.rows < 0 or blocks > row.shape[0] or bool((row[:blocks] == 0).any()):
                raise InvariantError(
                    f"seat {item.seat}, hot group {item.hot_group}: {item.rows} hot rows need {blocks} blocks, the "
                    f"table holds {int((row != 0).sum())} of at most {row.shape[0]}"
                )
            self.hot_rows[item.hot_group, item.seat] = item.rows

    def apply_mirrors(self, spans: Iterable[MirrorSpan]) -> None:
        """Replaces the mirror table: pages not in `spans` are not mirrored in this step."""
        for seat in self._mirrored:
            self.mirrors[seat] = 0
        self._mirrored.clear()
        for span in spans:
            self._check_seat(span.seat, "mirror span")
            end = span.first_page + len(span.host_blocks)
            if span.first_page < 0 or end > self.pages:
                raise InvariantError(
                    f"mirror span of seat {span.seat} covers pages {span.first_page}..{end} of {self.pages}"
                )
            blocks = torch.tensor(span.host_blocks, dtype=torch.int32)
            self.mirrors[span.seat, span.first_page : end] = blocks.clamp(min=0)
            self._mirrored.add(span.seat)

    def _check_seat(self, seat: int, what: str) -> None:
        if not 0 <= seat < self.max_seats:
            raise InvariantError(f"{what} for seat {seat}; seats are 0..{self.max_seats - 1}")

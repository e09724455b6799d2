"""How many bytes of a packed block hold nothing, by group, for people and for the warning at start."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 80
"""Columns of the table."""
WARN_FRACTION = 0.1
"""A layout that wastes more than this share of a page is warned about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWaste:
    """One block of one group. A hot group is like the resident group of the same number.

    Attributes:
        name: "indexer", or the number of the resident (and hot) group.
        used_bytes: hold keys or rows. wasted_bytes: the rest of the block.
    """

    name: str
    layers: tuple[int, ...]
    used_bytes: int
    wasted_bytes: int

    @property
    def fraction(self) -> float:
        """Share of the block that holds nothing, 0..1."""
        return self.wasted_bytes / (self.used_bytes + self.wasted_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteReport:
    """Waste of a page: one indexer block and one block of every resident group.

    Attributes:
        groups: the indexer group first, then the resident groups in order.
        num_groups: resident groups (as many hot groups). block_bytes: of every device block.
    """

    groups: tuple[GroupWaste, ...]
    num_groups: int
    block_bytes: int

    @property
    def used_bytes(self) -> int:
        return sum(group.used_bytes for group in self.groups)

    @property
    def wasted_bytes(self) -> int:
        return sum(group.wasted_bytes for group in self.groups)

    @property
    def fraction(self) -> float:
        """Share of the bytes of a page that holds nothing, 0..1."""
        return self.wasted_bytes / (self.used_bytes + self.wasted_bytes)

    def text(self, hot_rows: Sequence[int] = ()) -> str:
        """A table of at most 80 columns that names each group's layers.

        Args:
            hot_rows: rows of a hot region per hot group, shown beside the group; () = no such column.
        """
        lines = [f"{self.num_groups} groups, blocks of {self.block_bytes:,} bytes, {self.fraction:.1%} of a page holds nothing"]
        header = f"{'group':<7} {'used bytes':>12} {'wasted bytes':>12} {'share':>6} "
        header += f"{'hot rows':>8} " if hot_rows else ""
        lines.append(header + " layers")
        for i, group in enumerate(self.groups):
            row = f"{group.name:<7} {group.used_bytes:>12,} {group.wasted_bytes:>12,} {group.fraction:>6.1%} "
            if hot_rows:
                row += f"{hot_rows[i - 1]:>8,} " if i else " " * 9
            lines += textwrap.wrap(layer_ranges(group.layers), WIDTH, initial_indent=row + " ",
                                   subsequent_indent=" " * (len(header) + 1))
        return "\n".join(lines)


def layer_ranges(layers: Sequence[int]) -> str:
    """Ascending layer numbers in short. Example: (0, 1, 2, 6, 8, 9) -> "0-2, 6, 8-9"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)

"""Counts of what served each selected row, by seat, kept on the device until the step's output is asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.layout import KVCacheLayout
from hisparse.types import ResolveStats

_FIELDS = ("resident_rows", "hot_rows", "miss_rows", "prefill_host_rows", "mirrored_rows")


class Counters:
    """Per-seat sums of the resolver's and append's counts, and per-worker sums of page copies.

    Attributes:
        restored_rows, spilled_pages, spilled_bytes: page copies, which no seat is known for.
    """

    def __init__(self, layout: KVCacheLayout, max_seats: int, device: str | torch.device = "cpu") -> None:
        self._row_bytes = layout.row.row_bytes
        self._seats = torch.zeros((len(_FIELDS), max_seats + 1), dtype=torch.int64, device=device)
        self.restored_rows = 0
        self.spilled_pages = 0
        self.spilled_bytes = 0

    def add(self, field: str, seats: Tensor, counts: Tensor) -> None:
        """Adds `counts` int64 [n] to the seats int [n] (-1 = padding, not counted). No host sync."""
        column = torch.where(seats >= 0, seats, self._seats.shape[1] - 1).to(torch.int64)
        self._seats[_FIELDS.index(field)].index_add_(0, column, counts)

    def take(self) -> tuple[ResolveStats, dict[int, ResolveStats]]:
        """Sums since the last call: of everything, and of each seat that has any."""
        table = self._seats[:, :-1].cpu()
        by_seat = {seat: self._stats(table[:, seat].tolist()) for seat in table.any(0).nonzero().squeeze(1).tolist()}
        total = self._stats(table.sum(1).tolist()) + ResolveStats(
            host_to_device_bytes=self.restored_rows * self._row_bytes,
            device_to_host_bytes=self.spilled_bytes,
            spilled_pages=self.spilled_pages,
        )
        self._seats.zero_()
        self.restored_rows = self.spilled_pages = self.spilled_bytes = 0
        return total, by_seat

    def _stats(self, values: list[int]) -> ResolveStats:
        resident, hot, miss, prefill, mirrored = values
        return ResolveStats(
            resident_rows=resident,
            hot_rows=hot,
            miss_rows=miss,
            prefill_host_rows=prefill,
            mirrored_rows=mirrored,
            host_to_device_bytes=(miss + prefill) * self._row_bytes,
            device_to_host_bytes=mirrored * self._row_bytes,
        )

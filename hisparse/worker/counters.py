"""Counts of what served each selected row, by seat, kept on the device until the step's output is asked for.

On CUDA nobody waits for them: the end of a step copies them to pinned memory, and an output has what has arrived by then,
which is the step before when outputs are taken while the device works.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.layout import KVCacheLayout
from hisparse.types import ResolveStats
from hisparse.worker.streams import Mark, Place, StepEvent, Streams

_FIELDS = ("resident_rows", "hot_rows", "miss_rows", "prefill_host_rows", "mirrored_rows")
MAX_SNAPSHOTS = 8
"""On their way at a time; when the device is later than this, counts stay with it until the next end of a step."""


@dataclass(slots=True, eq=False)
class _Snapshot:
    values: Tensor
    mark: Mark


class Counters:
    """Per-seat sums of the resolver's and append's counts, and per-worker sums of page copies.

    Args:
        streams: of the rank; default those of `device`.
    Attributes:
        restored_rows, spilled_pages, spilled_bytes: page copies, which no seat is known for.
    """

    def __init__(self, layout: KVCacheLayout, max_seats: int, device: str | torch.device = "cpu",
                 streams: Streams | None = None) -> None:
        self._row_bytes = layout.row.row_bytes
        self._streams = streams or Streams(device)
        self._seats = torch.zeros((len(_FIELDS), max_seats + 1), dtype=torch.int64, device=device)
        self._on_the_way: list[_Snapshot] = []
        self._free: list[Tensor] = []
        self.restored_rows = 0
        self.spilled_pages = 0
        self.spilled_bytes = 0

    def add(self, field: str, seats: Tensor, counts: Tensor) -> None:
        """Adds `counts` int [n] to the seats int [n] (-1 = padding, not counted). No host sync; capture-safe."""
        column = torch.where(seats >= 0, seats, self._seats.shape[1] - 1).to(torch.int64)
        self._seats[_FIELDS.index(field)].index_add_(0, column, counts.to(torch.int64))

    def snapshot(self) -> None:
        """Sends the sums on their way to the host, and starts again at zero. Does nothing on the CPU.

        Stream: asynchronous on the compute stream.
        """
        if not self._streams.is_cuda or len(self._on_the_way) >= MAX_SNAPSHOTS:
            return
        values = self._free.pop() if self._free else torch.empty(self._seats.shape, dtype=torch.int64, pin_memory=True)
        values.copy_(self._seats, non_blocking=True)
        self._seats.zero_()
        self._on_the_way.append(_Snapshot(values, self._streams.record(StepEvent.COUNTS_READ, Place.COMPUTE)))

    def take(self) -> tuple[ResolveStats, dict[int, ResolveStats]]:
        """Sums since the last call, of everything and of each seat that has any; on CUDA, those that have arrived."""
        table = self._arrived()[:, :-1].numpy()
        seats = np.flatnonzero(table.any(0))
        by_seat = dict(zip(seats.tolist(), map(self._stats, table[:, seats].T.tolist())))
        total = self._stats(table.sum(1).tolist()) + ResolveStats(
            host_to_device_bytes=self.restored_rows * self._row_bytes,
            device_to_host_bytes=self.spilled_bytes,
            spilled_pages=self.spilled_pages,
        )
        self.restored_rows = self.spilled_pages = self.spilled_bytes = 0
        return total, by_seat

    def _arrived(self) -> Tensor:
        if not self._streams.is_cuda:
            sums = self._seats.clone()
            self._seats.zero_()
            return sums
        sums = torch.zeros(self._seats.shape, dtype=torch.int64)
        while self._on_the_way and self._streams.reached(self._on_the_way[0].mark):
            values = self._on_the_way.pop(0).values
            sums += values
            self._free.append(values)
        return sums

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

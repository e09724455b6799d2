"""Counts of what served each selected row, by seat and by index group, kept on the device until the step's output is asked for.

On CUDA nobody waits for them: the end of a step copies them to pinned memory, and an output has what has arrived by then,
which is the step before when outputs are taken while the device works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.layout import KVCacheLayout
from hisparse.types import ResolveStats, TierRows
from hisparse.worker.streams import Mark, Place, StepEvent, Streams

_FIELDS = ("resident_rows", "hot_rows", "miss_rows", "prefill_host_rows", "mirrored_rows")
_TIERS = len(TierRows._fields)
"""The first so many fields are counted by index group, too."""
MAX_SNAPSHOTS = 8
"""On their way at a time; when the device is later than this, counts stay with it until the next end of a step."""


@dataclass(slots=True, eq=False)
class _Snapshot:
    values: Tensor
    mark: Mark


class Counters:
    """Sums of the resolver's and append's counts, by seat and by index group, and per-worker sums of page copies.

    Args:
        streams: of the rank; default those of `device`.
    Attributes:
        restored_rows, spilled_pages, spilled_bytes: page copies, which no seat is known for.
    """

    def __init__(self, layout: KVCacheLayout, max_seats: int, device: str | torch.device = "cpu",
                 streams: Streams | None = None) -> None:
        self._row_bytes = layout.row.row_bytes
        self._streams = streams or Streams(device)
        groups = layout.shape.index_groups
        self._group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._layers = torch.tensor([len(group.layers) for group in groups], device=device)
        self._shapes = ((len(_FIELDS), max_seats + 1), (_TIERS, len(groups)))
        self._sums = torch.zeros(sum(rows * columns for rows, columns in self._shapes), dtype=torch.int64, device=device)
        self._seats, self._groups = self._tables(self._sums)  # one tensor, so that one copy takes both to the host
        self._on_the_way: list[_Snapshot] = []
        self._free: list[Tensor] = []
        self.restored_rows = 0
        self.spilled_pages = 0
        self.spilled_bytes = 0

    def add(self, field: str, seats: Tensor, counts: Tensor, layer: int | None = None) -> None:
        """Adds `counts` int [n] to the seats int [n] (-1 = padding, not counted). No host sync; capture-safe.

        Args:
            layer: whose rows they are, for a field that is counted by index group, too.
        """
        at = _FIELDS.index(field)
        counts = counts.to(torch.int64)
        self._seats[at].index_add_(0, self._columns(seats), counts)
        if layer is not None:
            self._groups[at, self._group_of[layer]] += torch.where(seats >= 0, counts, 0).sum()

    def add_tiers(self, seats: Tensor, tiers: Sequence[Tensor]) -> None:
        """What served one forward's rows: counts int [n] of resident, hot and missed entries of each index group's leader,
        group after group. Every layer of a group reads the same rows. A few launches in all. No host sync; capture-safe.
        """
        num_groups = self._layers.shape[0]
        counts = torch.stack(tuple(tiers)).view(num_groups, -1, seats.shape[0]) * self._layers[:, None, None]
        fields = counts.shape[1]
        self._seats[:fields].index_add_(1, self._columns(seats), counts.sum(0))
        self._groups[:fields] += (counts * (seats >= 0)).sum(2).T

    def snapshot(self) -> None:
        """Sends the sums on their way to the host, and starts again at zero. Does nothing on the CPU.

        Stream: asynchronous on the compute stream.
        """
        if not self._streams.is_cuda or len(self._on_the_way) >= MAX_SNAPSHOTS:
            return
        values = self._free.pop() if self._free else torch.empty(self._sums.shape, dtype=torch.int64, pin_memory=True)
        values.copy_(self._sums, non_blocking=True)
        self._sums.zero_()
        self._on_the_way.append(_Snapshot(values, self._streams.record(StepEvent.COUNTS_READ, Place.COMPUTE)))

    def take(self) -> tuple[ResolveStats, dict[int, ResolveStats], tuple[TierRows, ...]]:
        """Sums since the last call: of everything, of each seat that has any, and of each index group (() = nothing). On CUDA,
        those that have arrived.
        """
        by_column, by_group = self._tables(self._arrived())
        table = by_column[:, :-1].numpy()
        seats = np.flatnonzero(table.any(0))
        by_seat = dict(zip(seats.tolist(), self._stats(table[:, seats])))
        total = self._stats(table.sum(1, keepdims=True))[0] + ResolveStats(
            host_to_device_bytes=self.restored_rows * self._row_bytes,
            device_to_host_bytes=self.spilled_bytes,
            spilled_pages=self.spilled_pages,
            spilled_bytes=self.spilled_bytes,
        )
        self.restored_rows = self.spilled_pages = self.spilled_bytes = 0
        groups = tuple(TierRows(*counts) for counts in by_group.T.tolist())
        return total, by_seat, groups if any(map(any, groups)) else ()

    def _columns(self, seats: Tensor) -> Tensor:
        return torch.where(seats >= 0, seats, self._seats.shape[1] - 1).to(torch.int64)

    def _tables(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Views of one flat tensor: [fields, seats + 1] and [tiers, index groups]."""
        seats, groups = (rows * columns for rows, columns in self._shapes)
        return sums[:seats].view(self._shapes[0]), sums[seats : seats + groups].view(self._shapes[1])

    def _arrived(self) -> Tensor:
        if not self._streams.is_cuda:
            sums = self._sums.clone()
            self._sums.zero_()
            return sums
        sums = torch.zeros(self._sums.shape, dtype=torch.int64)
        while self._on_the_way and self._streams.reached(self._on_the_way[0].mark):
            values = self._on_the_way.pop(0).values
            sums += values
            self._free.append(values)
        return sums

    def _stats(self, table: np.ndarray[Any, Any]) -> list[ResolveStats]:
        """Of each column of int64 [fields, n]."""
        counts = dict(zip(_FIELDS, table))
        counts["host_to_device_bytes"] = (counts["miss_rows"] + counts["prefill_host_rows"]) * self._row_bytes
        counts["device_to_host_bytes"] = counts["mirrored_rows"] * self._row_bytes
        nothing = np.zeros(table.shape[1], dtype=np.int64)
        columns = np.stack([counts.get(name, nothing) for name in ResolveStats._fields], axis=1)
        return list(map(ResolveStats._make, columns.tolist()))

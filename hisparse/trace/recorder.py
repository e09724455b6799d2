"""Records the selections of real decode steps. Off unless an engine is given a recorder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hisparse.trace.trace_file import Series, Trace


@dataclass(slots=True)
class _Recorded:
    steps: list[NDArray[np.int64]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class SelectionRecorder:
    """Keeps what the first `max_requests` requests select in their first `max_steps` decode steps, in every index group.

    `see` only remembers tensors, which nobody changes; `end_step` brings them to the host and is called when the step has
    been waited for anyway. Python sees nothing of a replayed CUDA graph: recording needs eager steps.

    Args:
        max_requests, max_steps: 4 bytes are kept for each request, step, index group and selected position.
    """

    def __init__(self, *, max_requests: int, max_steps: int) -> None:
        self._max_requests, self._max_steps = max_requests, max_steps
        self._series: dict[tuple[str, int], _Recorded] = {}
        self._requests: dict[str, None] = {}
        self._by_seat: dict[int, str] = {}
        self._seen: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def begin_step(self, decoding: Mapping[int, str]) -> None:
        """`decoding`: request id by seat, of the requests that decode in this step."""
        self._by_seat = {}
        for seat, request_id in decoding.items():
            if request_id not in self._requests and len(self._requests) < self._max_requests:
                self._requests[request_id] = None
            if request_id in self._requests:
                self._by_seat[seat] = request_id

    def see(self, layer: int, topk: Tensor, seats: Tensor, positions: Tensor) -> None:
        """What a layer that owns an indexer selects in a decode batch: int [n, k], [n], [n]. No host synchronisation."""
        if self._by_seat:
            self._seen.append((layer, topk, seats, positions))

    def end_step(self) -> None:
        """Waits for the tensors of this step."""
        for layer, topk, seats, positions in self._seen:
            rows, ends = topk.cpu().numpy(), positions.tolist()
            for row, seat in enumerate(seats.tolist()):
                request_id = self._by_seat.get(seat)
                if request_id is None:
                    continue
                kept = self._series.setdefault((request_id, layer), _Recorded())
                if len(kept.steps) < self._max_steps:
                    named = rows[row][(rows[row] >= 0) & (rows[row] <= ends[row])]
                    kept.steps.append(named.astype(np.int64))
                    kept.lengths.append(ends[row] + 1)
        self._seen = []

    def trace(self, source: str) -> Trace:
        """Everything so far."""
        number = {request_id: i for i, request_id in enumerate(self._requests)}
        return Trace(source=source, series=tuple(
            Series(name=f"request {number[request_id]}, layer {layer}", steps=tuple(kept.steps), lengths=tuple(kept.lengths))
            for (request_id, layer), kept in sorted(self._series.items(), key=lambda item: (number[item[0][0]], item[0][1]))))

    def save(self, path: Path, source: str) -> bool:
        """Writes a trace file, unless nothing was recorded; returns whether it did. Raises ConfigError like `Trace.save`."""
        found = self.trace(source)
        if found.series:
            found.save(path)
        return bool(found.series)

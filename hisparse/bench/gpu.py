"""Timing launches on a GPU: what each adds to a graph, with cold caches before it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 160 << 20
"""More than the L2 holds (50 to 60 MB on Hopper)."""
FLUSH_HOST_ROWS = 2048


class ColdTimer:
    """Times launches of one graph, each behind a flush of the L2 and of the translations of host memory.

    Args:
        host: uint8 [n, 4096], mapped host memory that no launch under test reads; None leaves translations alone.
    """

    def __init__(self, host: Tensor | None = None) -> None:
        self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._host = host
        self._ids = None if host is None else torch.randint(0, host.shape[0], (64, FLUSH_HOST_ROWS), device="cuda")
        self._count = 0
        self._nudge = torch.zeros(1, device="cuda")

    def cold(self) -> None:
        """Read, not written: lines that must first be written back would slow down whoever evicts them."""
        torch.sum(self._flush)
        if self._host is not None and self._ids is not None:
            torch.sum(self._host.select(1, 0)[self._ids[self._count % 64]])
        self._count += 1

    def us(self, launches: Sequence[Callable[[], Any]], *, prepare: Callable[[], None] | None = None, replays: int = 9,
           cold: bool = True) -> list[float]:
        """Microseconds that a launch adds to a graph: of a graph with the launches less one without, by their number.

        Args:
            launches: captured one after the other into one graph, each behind a flush (not if `cold` is False).
            prepare: runs before each replay, outside of the time.
        Returns:
            The mean over the launches, for each replay.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, allocates
            for launch in launches:
                self.cold()
                launch()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graphs = []
        for full in (False, True):  # the one under test runs last: its state and results are left to be checked
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._nudge.add_(1)
                for launch in launches:
                    if cold:
                        self.cold()
                    if full:
                        launch()
            graphs.append(graph)
        times: list[list[float]] = [[], []]
        for _ in range(replays + 1):
            for graph, found in zip(graphs, times):
                if prepare is not None:
                    prepare()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                found.append(begin.elapsed_time(end) * 1e3)
        without = statistics.median(times[0][1:])
        return [(value - without) / len(launches) for value in times[1][1:]]

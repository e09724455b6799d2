"""Timing on the device and on the calling thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

PAUSE_CYCLES = 4_000_000
"""About 2 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds."""

    median: float
    best: float
    p90: float
    max: float

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        ordered = sorted(samples)
        p90 = ordered[int(0.9 * (len(ordered) - 1))]
        return cls(median=statistics.median(ordered), best=ordered[0], p90=p90, max=ordered[-1])


def device_us(run: Callable[[], object], repeats: int) -> Times:
    """Between events around `run`, behind a pause of the device in which the calls of `run` return."""
    run()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(PAUSE_CYCLES)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return Times.of(samples)


def cpu_us(run: Callable[[], object], repeats: int) -> Times:
    """Of the calling thread until `run` returns, of calls that follow each other and pile up on the device."""
    run()
    torch.cuda.synchronize()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return Times.of(samples)


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Captured once `run` has warmed up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph

"""Timing on a CUDA device, and the ceilings of the device in this run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hisparse.bench import report


def graph_us(calls: Sequence[Callable[[], object]], *, replays: int = 5, repeats: int = 7) -> list[float]:
    """Microseconds of one call, `repeats` times: all `calls` captured in one CUDA graph, replayed `replays` times.

    Give calls with different inputs, together larger than the L2 cache, when inputs are to come from memory.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / replays / len(calls))
    return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What this device does in this run."""

    copy_bytes_per_s: float
    """Read plus written by an elementwise kernel over large float32 tensors, which is faster than a device-to-device memcpy."""
    bf16_flops_per_s: float
    """Of a dense 8,192^3 product of random matrices through torch."""

    @classmethod
    def measure(cls, *, quick: bool = False) -> Ceilings:
        size, width = (1 << 24, 1024) if quick else (1 << 29, 8192)
        source = torch.randn(size, device="cuda")
        target = torch.empty_like(source)
        copy_us = statistics.median(graph_us([partial(torch.add, source, 1.0, out=target)] * 2))
        matrix = torch.randn(width, width, dtype=torch.bfloat16, device="cuda")
        product_us = statistics.median(graph_us([partial(torch.matmul, matrix, matrix)] * 2, replays=2))
        return cls(copy_bytes_per_s=8 * size / copy_us * 1e6, bf16_flops_per_s=2 * width**3 / product_us * 1e6)


def row(case: str, times_us: Sequence[float], *, bar_us: float | None = None, ceiling_us: float | None = None,
        ceiling_name: str = "x ceiling", **detail: Any) -> report.Row:
    """A row of the table: the median, beside the time that the ceilings of this run would allow."""
    ordered = sorted(times_us)
    return report.Row(
        case=case, value=statistics.median(ordered), unit="us", bar=bar_us, best=ordered[0], max=ordered[-1],
        yardstick=None if ceiling_us is None else (ceiling_us, ceiling_name), detail=detail,
    )


def facts(bench: str, ceilings: Ceilings) -> dict[str, Any]:
    """As `report.facts`, with the ceilings."""
    return report.facts(bench) | {"copy_tb_per_s": round(ceilings.copy_bytes_per_s / 1e12, 2),
                                  "bf16_tflops": round(ceilings.bf16_flops_per_s / 1e12)}

"""Timing launches on a GPU: what each adds to a graph, with cold caches before it, and the floors to compare it with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hisparse.ops.cuda.module import Kernel

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


FLOORS = r"""
extern "C" __global__ void nothing() {}
extern "C" __global__ void lookup_floor(const int* topk, long long k, const int* seats, const int* resident, long long pages,
                                        const short* slots, long long positions, const int* blocks, long long num_blocks,
                                        int* out) {
    const long long n = blockIdx.y, c = blockIdx.x * 256ll + threadIdx.x;
    const int seat = seats[n];
    if (c >= k) return;
    const int p = topk[n * k + c];
    const int block = resident[seat * pages + (p >> 6)], slot = slots[seat * positions + p];
    if (block <= 0 && slot >= 0) out[n * k + c] = blocks[seat * num_blocks + (slot >> 6)] * 64 + (slot & 63);
    else out[n * k + c] = block > 0 ? block * 64 + (p & 63) : -1;
}
"""


def floor_kernels() -> dict[str, Kernel]:
    """`nothing()`, and `lookup_floor`: the two table reads that any resolver makes, and no more. By name."""
    import cupy

    module = cupy.RawModule(code=FLOORS, options=("-std=c++17",), backend="nvrtc")
    loaded = {name: module.get_function(name).kernel for name in ("nothing", "lookup_floor")}
    return {name: Kernel(function.ptr, name, torch.cuda.current_device(), owner=function) for name, function in loaded.items()}

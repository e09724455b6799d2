"""Timing launches on a GPU: captured in a graph, with cold caches before each, and the floors to compare them with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 160 << 20
"""More than the L2 holds (50 to 60 MB on Hopper)."""
FLUSH_HOST_ROWS = 2048


class Mapped:
    """CUDA's view of pinned CPU memory; keeps it alive."""

    def __init__(self, pinned: Tensor) -> None:
        self.pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": (pinned.numel() * pinned.element_size(),), "typestr": "|u1", "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def mapped(pinned: Tensor) -> Tensor:
    return torch.as_tensor(Mapped(pinned), device="cuda").view(pinned.dtype).view(pinned.shape)


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

    def cold(self) -> None:
        """Read, not written: lines that must first be written back would slow down whoever evicts them."""
        torch.sum(self._flush)
        if self._host is not None and self._ids is not None:
            torch.sum(self._host.select(1, 0)[self._ids[self._count % 64]])
        self._count += 1

    def us(self, launches: Sequence[Callable[[], Any]], *, prepare: Callable[[], None] | None = None, replays: int = 7,
           cold: bool = True) -> list[float]:
        """Microseconds of every launch in every replay, less the cost of two events in a row.

        Args:
            launches: captured one after the other into one graph. prepare: runs before each replay, outside of the time.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, allocates
            for launch in launches:
                self.cold()
                launch()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        pairs, empty = [], []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                for found, what in ((empty, None), (pairs, launch)):
                    if cold:
                        self.cold()
                    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
                    begin.record()
                    if what is not None:
                        what()
                    end.record()
                    found.append((begin, end))
        times, nothing = [], []
        for _ in range(replays + 1):
            if prepare is not None:
                prepare()
            graph.replay()
            torch.cuda.synchronize()
            times.append([begin.elapsed_time(end) * 1e3 for begin, end in pairs])
            nothing += [begin.elapsed_time(end) * 1e3 for begin, end in empty]
        floor = statistics.median(nothing)
        return [value - floor for one in times[1:] for value in one]


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


def floor_kernels() -> Any:
    """`nothing()`, and `lookup_floor`: the two table reads that any resolver makes, and no more."""
    import cupy

    return cupy.RawModule(code=FLOORS, options=("-std=c++17",), backend="nvrtc")

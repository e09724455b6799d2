"""One captured CUDA graph per batch size and kind of decode step; replayed, it costs the CPU one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hisparse.engine.packed_rows import pack, upload

Outputs = tuple[Tensor, ...]
Body = Callable[[Tensor, bool], Outputs]
"""Runs a decode step over packed rows int64 [4 * n] (`packed_rows.pack`); the flag says that plain tables are enough."""


def batch_sizes(max_seats: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `max_seats`, then `max_seats`. Example: `batch_sizes(12) == (1, 2, 4, 8, 12)`."""
    sizes = []
    size = 1
    while size < max_seats:
        sizes.append(size)
        size *= 2
    return (*sizes, max_seats)


class DecodeGraphs:
    """Graphs of one rank's decode step. They share one memory pool, so that only one's outputs are alive at a time.

    Args:
        body: captured once per (size, plain). It must touch nothing for padding rows: the runs before the capture have no
            others. inputs: int64 [4 * largest size], where the rows of every step are put. sizes: of batches, in rows.
        kinds: values of the body's flag that steps may have.
    """

    def __init__(self, body: Body, *, inputs: Tensor, sizes: Sequence[int], kinds: Sequence[bool]) -> None:
        self._body, self._inputs, self._sizes, self._kinds = body, inputs, tuple(sizes), tuple(kinds)
        self._graphs: dict[tuple[int, bool], tuple[Any, Outputs]] = {}
        self._pool: Any = None

    def capture_all(self) -> None:
        """Captures every size, largest first (the pool is then as large as it gets). Waits for the device."""
        for size in sorted(self._sizes, reverse=True):
            for plain in self._kinds:
                self._capture(size, plain)

    def replay(self, size: int, plain: bool) -> Outputs:
        """Runs a step of `size` rows, whose packed rows are in `inputs`. Stream: the current one; does not wait.

        Returns: the outputs of `body`; the next replay of any size overwrites them.
        """
        graph, outputs = self._graphs[size, plain]
        graph.replay()
        return outputs

    def close(self) -> None:
        """Destroys every graph. NCCL does not end a process group while graphs hold its operations."""
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _capture(self, size: int, plain: bool) -> None:
        packed = upload(pack((), size), self._inputs.device, self._inputs)
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):  # compiles kernels and makes library handles, which a capture may not
            for _ in range(2):
                self._body(packed, plain)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # other threads poll their copies' events meanwhile: only this thread's calls are restricted
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = self._body(packed, plain)
        self._graphs[size, plain] = graph, outputs

"""Append and a layer's share of the mirror copy, against append alone.

As a forward does it: one graph with the appends of all layers and, behind the last one, the copy of their new rows to the
host. Its time over the number of layers is what a mirrored append costs. Replays follow each other, so translations of host
memory are warm; once a step they are not, which `bench step` has.
"""

from __future__ import annotations

from typing import Any

import torch

from hisparse.bench.data_plane.gpu import Times, device_us, graph_of
from hisparse.bench.report import Row
from hisparse.ops import reference
from hisparse.ops.cuda.append import append_rows
from hisparse.ops.cuda.mirror import mirror_rows
from hisparse.testing.registered_memory import RegisteredMemory

BATCHES = (1, 16, 64, 256)
BLOCK, LAYERS, PAGES = 64, 16, 1024
HOST_BYTES_PER_S = 45e9
SLACK = 1.3


class _Layers:
    """`num` requests with one new row each at scattered pages, in LAYERS layers of one pool."""

    def __init__(self, num: int, dtype: torch.dtype, memory: RegisteredMemory) -> None:
        self.row_elems = 656 if dtype == torch.uint8 else 576
        make = torch.Generator().manual_seed(num)
        rows_per_block = LAYERS * BLOCK
        self.rows = torch.zeros(PAGES * rows_per_block, self.row_elems, dtype=dtype, device="cuda")
        host = memory.cuda[: LAYERS * PAGES * BLOCK * self.row_elems * dtype.itemsize].view(dtype)
        self.host = host.view(LAYERS * PAGES * BLOCK, self.row_elems)
        self.new = torch.randn(LAYERS, num, 576, generator=make).bfloat16().cuda()
        self.seats = torch.arange(num, dtype=torch.int32, device="cuda")
        self.positions = torch.randint(0, 64 * BLOCK, (num,), generator=make).cuda()
        self.writes = torch.ones(num, dtype=torch.bool, device="cuda")
        blocks = torch.zeros(2, num, 64, dtype=torch.int32)
        for table in blocks:
            pages = 1 + torch.randperm(PAGES - 1, generator=make)[:num].int()
            table[torch.arange(num), self.positions.cpu() // BLOCK] = pages
        self.tables = blocks.cuda()
        self.resident, self.mirror = self.tables
        self.layers = torch.tensor([(0, layer * BLOCK, layer * PAGES * BLOCK) for layer in range(LAYERS)]).cuda()
        self.geometry: dict[str, Any] = {"block_size": BLOCK, "rows_per_block": rows_per_block}

    def append(self, mirror: bool) -> None:
        for layer in range(LAYERS):
            append_rows(self.new[layer], self.seats, self.positions, self.writes, resident_table=self.resident,
                        row_offset=layer * BLOCK, rows=self.rows, **self.geometry)
        if mirror:
            mirror_rows(self.seats, self.positions, self.writes, self.layers, tables=self.tables, resident_table=self.resident,
                        mirror_table=self.mirror, rows=self.rows, host_body=self.host, host_rows=PAGES * BLOCK, **self.geometry)

    def check(self) -> None:
        """Raises unless every row, and its mirror, is the reference's."""
        pages, offset = self.positions.cpu() // BLOCK, self.positions.cpu() % BLOCK
        seats = torch.arange(len(pages))
        host = self.mirror.cpu()[seats, pages].long() * BLOCK + offset
        for layer in range(LAYERS):
            near = self.resident.cpu()[seats, pages].long() * LAYERS * BLOCK + layer * BLOCK + offset
            want = self.new[layer].cpu() if self.row_elems == 576 else reference.quantize_rows(self.new[layer].cpu())
            if not all(torch.equal(place[ids.cuda()].cpu(), want)
                       for place, ids in ((self.rows, near), (self.host, layer * PAGES * BLOCK + host))):
                raise AssertionError(f"layer {layer}: wrong bytes")

    def time(self, mirror: bool, repeats: int) -> Times:
        """Of one layer: a replay over the number of its layers."""
        times = device_us(graph_of(lambda: self.append(mirror)).replay, repeats)
        return Times(**{name: getattr(times, name) / LAYERS for name in Times.__dataclass_fields__})


def measure(quick: bool) -> list[Row]:
    rows = []
    with RegisteredMemory(LAYERS * PAGES * BLOCK * 1152) as memory:
        for dtype, row_bytes in ((torch.uint8, 656), (torch.bfloat16, 1152)):
            for num in BATCHES[:2] if quick else BATCHES:
                layers = _Layers(num, dtype, memory)
                layers.append(mirror=True)
                layers.check()
                alone, both = (layers.time(mirror, 5 if quick else 50) for mirror in (False, True))
                bar = SLACK * alone.median + num * row_bytes / HOST_BYTES_PER_S * 1e6
                rows.append(Row(case=f"append {num} x {row_bytes} B, mirrored", value=both.median, unit="us",
                                bar=None if quick else bar,
                                yardstick=(alone.median, "append alone"),
                                best=both.best, p90=both.p90, max=both.max,
                                detail={"layers_in_graph": LAYERS, "alone_us": alone.median}))
                del layers
    return rows

"""Random tables of a few groups in one allocation, layers over them, and rows that were appended: what mirror_rows reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INT_MAX = 2**31 - 1
SEATS, GAP = 5, 32


class MirrorWorld:
    """`num` rows of which some are padding, do not write, or have no mirror; every byte of the device is different noise.

    Attributes:
        layers: int64 [m, 3], as `mirror_rows` takes them. groups: per layer, the group whose table it uses.
    """

    def __init__(self, num: int, *, seed: int, num_layers: int = 5, num_groups: int = 3, row_bytes: int = 656,
                 block_size: int = 64) -> None:
        make = torch.Generator().manual_seed(seed)
        pages = max(3, 2 * num // block_size)
        entries = SEATS * pages
        self.block_size, self.rows_per_block = block_size, 3 * block_size + 7
        self.num_blocks, self.num_host = 2 + num_groups * entries, 2 + entries
        self.tables = torch.full((num_groups * (entries + GAP),), -7, dtype=torch.int32)
        order = 1 + torch.randperm(self.num_blocks - 1, generator=make)[: num_groups * entries].int().view(num_groups, -1)
        self.first = [group * (entries + GAP) + GAP // 2 for group in range(num_groups)]
        for first, blocks in zip(self.first, order):
            self.tables[first : first + entries] = blocks
        self.shape = (SEATS, pages)
        self.mirror = (1 + torch.randperm(self.num_host - 1, generator=make)[:entries].int()).view(self.shape).clone()
        self.mirror[torch.rand(self.shape, generator=make) < 0.3] = 0
        places = torch.randperm(entries * block_size, generator=make)[:num]
        self.seats, self.positions = (places // (pages * block_size)).int(), places % (pages * block_size)
        self.writes = torch.rand(num, generator=make) < 0.8
        self.seats[torch.rand(num, generator=make) < 0.2] = -1
        self.positions[(self.seats < 0) | ~self.writes] = INT_MAX
        self.groups = [layer % num_groups for layer in range(num_layers)]
        self.row_offsets = [(layer % 3) * block_size + layer % 2 for layer in range(num_layers)]
        self.host_rows = self.num_host * block_size
        self.layers = torch.tensor([(self.first[group], offset, layer * self.host_rows)
                                    for layer, (group, offset) in enumerate(zip(self.groups, self.row_offsets))])
        self.rows = torch.randint(0, 256, (self.num_blocks * self.rows_per_block, row_bytes), generator=make, dtype=torch.uint8)
        self.host = torch.full((num_layers * self.host_rows, row_bytes), 0xEE, dtype=torch.uint8)

    def table(self, group: int, tables: Tensor | None = None) -> Tensor:
        """Resident table of a group, a view."""
        entries = self.shape[0] * self.shape[1]
        flat = self.tables if tables is None else tables
        return flat[self.first[group] : self.first[group] + entries].view(self.shape)

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """All but host_body."""
        tables = self.tables.to(device)
        return dict(seats=self.seats.to(device), positions=self.positions.to(device), writes=self.writes.to(device),
                    layers=self.layers.to(device), tables=tables, resident_table=self.table(0, tables),
                    mirror_table=self.mirror.to(device), block_size=self.block_size, rows_per_block=self.rows_per_block,
                    rows=self.rows.to(device), host_rows=self.host_rows)

    def expected(self) -> Tensor:
        """The host body, row by row in plain Python."""
        want = self.host.clone()
        for layer, (group, offset) in enumerate(zip(self.groups, self.row_offsets)):
            table = self.table(group)
            for seat, position, writes in zip(self.seats.tolist(), self.positions.tolist(), self.writes.tolist()):
                if seat < 0 or not writes:
                    continue
                page, row = divmod(position, self.block_size)
                block, host = int(table[seat, page]), int(self.mirror[seat, page])
                if block and host:
                    want[layer * self.host_rows + host * self.block_size + row] = \
                        self.rows[block * self.rows_per_block + offset + row]
        return want

"""Seats, tables, rows and hot state twice: on the CPU for the reference, on CUDA for the kernel under test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.ops import HotState, cuda, reference
from hisparse.testing.pinned_alias import alias_on_cuda

POISON = 0xEE


@dataclass
class World:
    """`layers` pages per block; the leader's layer is at `row_offset`, a follower's at 0."""

    seats: int = 4
    pages: int = 32
    block: int = 64
    hot: int = 256
    hot_max: int = 256
    row_bytes: int = 656
    resident: float = 0.3
    seed: int = 0
    rows_per_block: int = field(default=0)
    hashed: bool = False

    def __post_init__(self) -> None:
        rng = self.rng = np.random.default_rng(self.seed)
        self.rows_per_block = self.rows_per_block or 3 * self.block
        self.row_offset = self.block
        hot_blocks = -(-self.hot_max // self.block)
        num_blocks = 1 + self.seats * (self.pages + hot_blocks)
        num_host = 1 + self.seats * self.pages
        self.free = (rng.permutation(num_blocks - 1) + 1).tolist()
        self.rows = torch.full((num_blocks * self.rows_per_block, self.row_bytes), POISON, dtype=torch.uint8)
        content = rng.integers(0, 256, (num_host * self.block, self.row_bytes), dtype=np.uint8)
        self.host = torch.from_numpy(content).pin_memory()
        self.resident_table = torch.zeros(self.seats, self.pages, dtype=torch.int32)
        on_host = (rng.permutation(num_host - 1) + 1).astype(np.int32)
        self.source_table = torch.from_numpy(on_host.reshape(self.seats, self.pages))
        blocks = [[self.free.pop() for _ in range(hot_blocks)] for _ in range(self.seats)]
        self.hot_table = torch.tensor(blocks, dtype=torch.int32)
        self.hot_rows = torch.full((self.seats,), self.hot, dtype=torch.int32)
        self.state = HotState.empty(self.seats, hot_blocks * self.block, self.pages * self.block)
        for seat in range(self.seats):
            for page in range(self.pages):
                if rng.random() < self.resident:
                    self.seal(seat, page)
        self.on_gpu = {name: getattr(self, name).cuda() for name in
                       ("rows", "resident_table", "source_table", "hot_table", "hot_rows")}
        self.gpu_state = HotState.empty(self.seats, hot_blocks * self.block, self.pages * self.block, "cuda",
                                        hashed=self.hashed)
        self.gpu_host = alias_on_cuda(self.host)
        self.status = torch.zeros(4, dtype=torch.int32, device="cuda")

    # ---- moves, on both sides
    def seal(self, seat: int, page: int) -> None:
        """The page becomes resident, with its rows."""
        block = self.free.pop()
        self.resident_table[seat, page] = block
        source = int(self.source_table[seat, page]) * self.block
        first = block * self.rows_per_block + self.row_offset
        self.rows[first : first + self.block] = self.host[source : source + self.block]
        if hasattr(self, "on_gpu"):
            self.on_gpu["rows"][first : first + self.block] = self.rows[first : first + self.block].cuda()
            self.on_gpu["resident_table"][seat, page] = block

    def evict(self, seat: int, page: int) -> None:
        """The page turns loose and its block goes on, poisoned."""
        block = int(self.resident_table[seat, page])
        if block:
            for rows in (self.rows, self.on_gpu["rows"]):
                rows[block * self.rows_per_block : (block + 1) * self.rows_per_block] = POISON
            self.resident_table[seat, page] = 0
            self.on_gpu["resident_table"][seat, page] = 0
            self.free.append(block)

    def resize(self, seat: int, rows: int) -> None:
        self.hot_rows[seat] = rows
        self.on_gpu["hot_rows"][seat] = rows
        self.reset(seat, rows, -1)

    def reset(self, seat: int, from_slot: int, from_position: int) -> None:
        reference.reset_seat(self.state, seat, from_slot=from_slot, from_position=from_position)
        cuda.reset_seats(self.gpu_state, torch.tensor([[seat, from_slot, from_position]], dtype=torch.int32, device="cuda"))

    # ---- resolves
    def geometry(self) -> dict[str, Any]:
        return {"block_size": self.block, "rows_per_block": self.rows_per_block, "row_offset": self.row_offset}

    def expected(self, topk: Tensor, seats: Tensor, seq_len: Tensor) -> Any:
        return reference.resolve(
            topk, seats, seq_len, resident_table=self.resident_table, source_table=self.source_table, hot_table=self.hot_table,
            hot_rows=self.hot_rows, state=self.state, rows=self.rows, host_rows=self.host, **self.geometry())

    def launch(self, topk: Tensor, seats: Tensor, seq_len: Tensor, **kw: Any) -> Any:
        """Inputs on CUDA."""
        gpu = self.on_gpu
        return cuda.resolve(
            topk, seats, seq_len, resident_table=gpu["resident_table"], source_table=gpu["source_table"],
            hot_table=gpu["hot_table"], hot_rows=gpu["hot_rows"], state=self.gpu_state, rows=gpu["rows"],
            host_rows=self.gpu_host, status=self.status, **self.geometry(), **kw)

    def step(self, topk: Tensor, seats: Tensor, seq_len: Tensor, **kw: Any) -> Any:
        """Both, compared in everything."""
        found = self.launch(topk.cuda(), seats.cuda(), seq_len.cuda(), **kw)
        expected = self.expected(topk, seats, seq_len)
        self.compare(found, expected)
        return found

    def compare(self, found: Any, expected: Any) -> None:
        for name in ("row_ids", "valid", "fits", "resident", "hot", "miss"):
            got, want = getattr(found, name).cpu(), getattr(expected, name)
            assert torch.equal(got.to(want.dtype), want), f"{name}: {_difference(got.to(want.dtype), want)}"
        got_plan, want_plan = found.plan.flat(), expected.plan
        assert torch.equal(_pairs(got_plan), _pairs(want_plan)), "the plans differ"
        self.compare_state()
        assert torch.equal(self.on_gpu["rows"].cpu(), self.rows), "rows differ"

    def compare_state(self) -> None:
        for name in ("slot_tag", "pos_slot", "use", "hand"):
            want = getattr(self.state, name)
            got = getattr(self.gpu_state, name).cpu()
            if name == "pos_slot" and self.hashed:
                assert got.numel() == 0
                continue
            if got.ndim == 2 and got.shape[1] > want.shape[1]:  # slots are rounded up
                empty = 0 if name == "use" else -1
                assert bool((got[:, want.shape[1] :] == empty).all()), f"{name}: a slot beyond the region is in use"
                got = got[:, : want.shape[1]]
            assert torch.equal(got, want), f"{name}: {_difference(got, want)}"

    # ---- selections
    def select(self, seats: list[int], k: int, *, rows: int = 1, hostile: bool = False, ordered: bool = False,
               pool: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k of `rows` consecutive rows for each seat; without duplicates unless hostile."""
        rng, total = self.rng, self.pages * self.block
        seq = rng.integers(max(1, total // 2), total + 1, len(seats)).repeat(rows)
        topk = np.full((len(seats) * rows, k), -1, dtype=np.int64)
        for n in range(len(topk)):
            among = min(int(seq[n]), pool or int(seq[n]))
            chosen = rng.permutation(among)[: min(k, among)]
            topk[n, : len(chosen)] = np.sort(chosen) if ordered else chosen
            if hostile:
                topk[n, rng.random(k) < 0.1] = -1
                for value in (-(2**31), 2**31 - 1, int(seq[n]), int(seq[n]) + 1, total, total + 5):
                    topk[n, rng.integers(k)] = value
                topk[n, rng.integers(k, size=3)] = topk[n, rng.integers(k)]
        seat = np.array(seats).repeat(rows)
        return (torch.from_numpy(topk.astype(np.int32)), torch.from_numpy(seat.astype(np.int32)), torch.from_numpy(seq))


def _pairs(plan: Any) -> Tensor:
    """Copies of a plan in one order, for it is a set within a query row."""
    table = torch.stack([plan.rows.cpu(), plan.host_rows.cpu(), plan.device_rows.cpu()], 1)
    order = np.lexsort(table.numpy().T[::-1])
    return table[torch.from_numpy(order.copy())]


def _difference(got: Tensor, want: Tensor) -> str:
    where = (got != want).nonzero()[:4].tolist()
    return f"{int((got != want).sum())} differ, e.g. at {where}: " + ", ".join(
        f"{got[tuple(i)].item()} for {want[tuple(i)].item()}" for i in where)

"""Random life of several requests: pages spill, go, come back; regions grow, shrink; seats change hands; copies are late.

After each step, attention of every layer is compared with a dense softmax over the rows that were written (float64), and
every durable host page with those rows. Blocks are poisoned at each hand-out, so a read of a stale or unwritten row is NaN.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hisparse.layout import IndexGroup
from hisparse.types import AckKind, Fence, HotRows, PageRestore, SeatReset, SparseKVPageTransfer
from hisparse.worker import RowBatch
from tests.worker.rig import BLOCK, HEADS, Rig, dense_attention, make_layout

SEATS, MAX_TOKENS, TOP_K = 3, 64, 6


@dataclass
class Life:
    """One request on a seat, and what the test knows of its pages."""

    tokens: int = 0
    host: list[int] = field(default_factory=list)
    resident: list[tuple[int, ...]] = field(default_factory=list)
    hot: tuple[tuple[int, ...], ...] = ()
    hot_rows: int = 0
    spilling: dict[int, int] = field(default_factory=dict)
    """Page -> transfer id."""
    durable: set[int] = field(default_factory=set)
    mirrored: set[int] = field(default_factory=set)
    """Positions whose rows a step mirrored."""


class World:
    """`pause` and `resume` hold copies back and let them go; `rtol` and `atol` are for attention.

    A decode step has one of `rows` rows for each request, a region one of `regions` rows.
    """

    atol, rtol = 1e-5, 1e-4
    rows, regions = (1, 1, 2, 3), (8, 12, 16)

    def __init__(self, seed: int, num_groups: int, device: str = "cpu", **layout: Any) -> None:
        self.random = random.Random(seed)
        self.layout = make_layout(num_groups=num_groups, **layout)
        self.device = device
        self.rig = Rig(
            self.layout, device_blocks=160, host_blocks=80, seats=SEATS, max_model_len=MAX_TOKENS, device=device
        )
        self.free = list(range(1, 160))
        self.free_host = list(range(1, 80))
        self.random.shuffle(self.free)
        self.random.shuffle(self.free_host)
        self.fenced: dict[int, int] = {}
        self.lives: dict[int, Life] = {}
        self.detached: dict[int, tuple[int, list[torch.Tensor]]] = {}
        """Transfer of a request that is gone -> host block, rows it must hold."""
        shape = (SEATS, self.layout.shape.num_layers, MAX_TOKENS, self.layout.row.row_elems)
        self.truth = torch.full(shape, float("nan"))
        self.next_id = 1
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = dict.fromkeys(("resident_rows", "hot_rows", "miss_rows", "prefill_host_rows", "mirrored_rows",
                                   "spilled_pages", "fences"), 0)
        self.refused = 0

    def pause(self) -> None:
        self.rig.worker.copies.pause()

    def resume(self) -> None:
        self.rig.worker.copies.resume()

    # ---- the step's command
    def begin(self) -> None:
        self.new_device: list[int] = []
        self.new_host: list[int] = []
        self.fences: list[Fence] = []
        self.resets: list[SeatReset] = []
        self.restores: list[PageRestore] = []
        self.spills: list[SparseKVPageTransfer] = []

    def block(self) -> int:
        block = self.free.pop(0)
        if block in self.fenced:
            self.fences.append(Fence(block=block, transfer_id=self.fenced.pop(block)))
            self.seen["fences"] += 1
        self.new_device.append(block)
        return block

    def host_block(self) -> int:
        block = self.free_host.pop(0)
        self.new_host.append(block)
        return block

    def id(self) -> int:
        self.next_id += 1
        return self.next_id

    # ---- what may happen between steps
    def end_life(self, seat: int) -> None:
        life = self.lives.pop(seat)
        for page, blocks in enumerate(life.resident):
            self.release(blocks, life.spilling.get(page))
        for page, block in enumerate(life.host):
            if page in life.spilling:
                rows = [self.truth[seat, layer, page * BLOCK : (page + 1) * BLOCK].clone() for layer in self.layers]
                self.detached[life.spilling[page]] = (block, rows)
            else:
                self.free_host.append(block)
        for blocks in life.hot:
            self.free += blocks
        self.resets.append(SeatReset(seat=seat))
        self.truth[seat] = float("nan")

    def release(self, blocks: tuple[int, ...], transfer_id: int | None) -> None:
        for block in blocks:
            if block:
                self.free.insert(self.random.randint(0, 8), block)
                if transfer_id is not None:
                    self.fenced[block] = transfer_id  # enqueued, perhaps not completed: whoever gets it must wait

    def set_region(self, life: Life, rows: int) -> None:
        want = rows // BLOCK
        grown = []
        for blocks in life.hot or ((),) * self.layout.num_resident_groups:
            grown.append(tuple(blocks[:want]) + tuple(self.block() for _ in range(want - len(blocks))))
            self.free += blocks[want:]
        life.hot, life.hot_rows = tuple(grown), rows

    def drop_pages(self, seat: int) -> None:
        """Any durable page outside the tail may go once the request has a region."""
        life = self.lives[seat]
        for page in sorted(life.durable):
            if page < len(life.resident) - 2 and life.resident[page][0] and self.random.random() < 0.6:
                self.release(life.resident[page], None)
                life.resident[page] = (0,) * self.layout.num_resident_groups

    def bring_back(self, seat: int) -> None:
        life = self.lives[seat]
        for page, blocks in enumerate(life.resident):
            if not blocks[0] and self.random.random() < 0.3:
                life.resident[page] = tuple(self.block() for _ in blocks)
                self.restores.append(
                    PageRestore(id=self.id(), host_block=life.host[page], num_rows=BLOCK, device_blocks=life.resident[page])
                )

    def plan_spills(self, seat: int, written: range) -> None:
        life = self.lives[seat]
        for page in range(life.tokens // BLOCK):
            if page not in life.durable and page not in life.spilling and self.random.random() < 0.7:
                rows = set(range(page * BLOCK, (page + 1) * BLOCK))
                copy_bytes = not rows <= life.mirrored or self.random.random() < 0.3
                spill = SparseKVPageTransfer(
                    id=self.id(),
                    host_block=life.host[page],
                    device_blocks=life.resident[page],
                    copy_bytes=copy_bytes,
                    after_forward=page * BLOCK + BLOCK > written.start,
                )
                life.spilling[page] = spill.id
                self.spills.append(spill)

    # ---- a step
    def step(self) -> None:
        self.begin()
        r = self.random
        for seat in range(SEATS):
            life = self.lives.get(seat)
            if life is None:
                self.lives[seat] = Life()
            elif life.tokens > MAX_TOKENS - 16 or r.random() < 0.06:
                self.end_life(seat)
                self.lives[seat] = Life()
            elif life.tokens:
                if not life.hot_rows and r.random() < 0.3:
                    self.set_region(life, 8)
                elif life.hot_rows:
                    if r.random() < 0.25:
                        rows = r.choice(self.regions)
                        if rows < life.hot_rows:
                            self.resets.append(SeatReset(seat=seat, from_slot=rows, from_position=-1))
                        self.set_region(life, rows)
                    if r.random() < 0.5:
                        self.drop_pages(seat)
                    elif r.random() < 0.3:
                        self.bring_back(seat)
        chunks, decodes, mirrors = [], [], {}
        rows = r.choice(self.rows)
        for seat, life in self.lives.items():
            prefill = not life.tokens or r.random() < 0.15
            count = r.randint(2, 11) if prefill else rows
            first = life.tokens
            (chunks if prefill else decodes).append((seat, first, count))
            life.tokens += count
            while len(life.host) * BLOCK < life.tokens:
                life.host.append(self.host_block())
                life.resident.append(tuple(self.block() for _ in self.layout.residents))
            pages = range(first // BLOCK, len(life.host))
            if prefill:  # pages that a chunk seals are spilled with bytes, not mirrored
                pages = range(life.tokens // BLOCK, len(life.host))
            mirrors[seat] = tuple(b if p in pages else -1 for p, b in enumerate(life.host))
            life.mirrored |= {p for p in range(first, life.tokens) if p // BLOCK in pages}
            self.plan_spills(seat, range(first, life.tokens))
        groups = range(self.layout.num_resident_groups)
        command = self.rig.command(
            resident={(s, g): tuple(b[g] for b in life.resident) for s, life in self.lives.items() for g in groups},
            source={s: tuple(life.host) for s, life in self.lives.items()},
            hot={(s, g): life.hot[g] if life.hot else () for s, life in self.lives.items() for g in groups},
            mirrors=mirrors,
            new_device=tuple(self.new_device),
            new_host=tuple(self.new_host),
            fences=tuple(self.fences),
            seat_resets=tuple(self.resets),
            restores=tuple(self.restores),
            spills=tuple(self.spills),
        )
        sizes = tuple(HotRows(seat=s, hot_group=g, rows=life.hot_rows) for s, life in self.lives.items() for g in groups)
        object.__setattr__(command, "hot_rows", sizes)
        # copies run when the test says so, hence the walk is the same in every run; a fence must really wait
        copies = self.rig.worker.copies
        run_copies = bool(self.fences) or r.random() < 0.5
        if run_copies:
            timer = threading.Timer(0.01, self.resume)
            timer.start()
        self.rig.worker.start_step(command)
        for seat, first, count in chunks:
            batch = RowBatch.build([seat] * count, range(first, first + count), is_prefill=True, device=self.device)
            self.forward(batch)
        if decodes:
            pad = rows if r.random() < 0.5 else 0
            seats = [s for s, _, _ in decodes for _ in range(rows)] + [-1] * pad
            positions = [f + i for _, f, _ in decodes for i in range(rows)] + [0] * pad
            self.forward(RowBatch.build(seats, positions, rows_per_request=rows, device=self.device))
        if run_copies:
            timer.join()
            copies.drain(20)
        self.pause()
        self.rig.worker.end_step()
        self.take(self.rig.worker.output())
        self.rig.worker.check()

    @property
    def layers(self) -> range:
        return range(self.layout.shape.num_layers)

    def forward(self, batch: RowBatch) -> None:
        """Appends random rows in every layer and attends, with one top-k per index group; compares with dense."""
        n, elems = batch.num_rows, self.layout.row.row_elems
        fit_in_all = torch.ones(n, dtype=torch.bool)
        seats, positions, context_len = batch.seats.cpu(), batch.positions.cpu(), batch.context_len.cpu()
        for group in self.layout.shape.index_groups:
            spread = int(context_len.max()) + 3
            topk = torch.randint(-1, spread, (n, TOP_K), generator=self.generator, dtype=torch.int32)
            for layer in group.layers:
                rows = torch.randn(n, elems, generator=self.generator)
                for i, (seat, position) in enumerate(zip(seats.tolist(), positions.tolist())):
                    if seat >= 0:
                        self.truth[seat, layer, position] = rows[i]
                self.rig.handles[layer].append(rows.to(self.device), batch)
                q = torch.randn(n, HEADS, elems, generator=self.generator)
                got = self.rig.handles[layer].attend(q.to(self.device), topk.to(self.device), batch, 0.3)
                fits = self.fitting(group, topk, batch)
                fit_in_all &= fits
                context = torch.where((seats >= 0) & fits, context_len, 0)
                latent_dim = self.layout.row.latent_dim
                want = dense_attention(q, self.truth[seats.clamp(min=0).long(), layer], topk, context, 0.3, latent_dim)
                torch.testing.assert_close(got.cpu().double(), want, atol=self.atol, rtol=self.rtol)
        assert batch.fits().tolist() == fit_in_all.tolist()

    def fitting(self, group: IndexGroup, topk: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        """bool [n]: rows that are not refused. Only a later row of a request may be, whose rows its region cannot hold."""
        fits = batch.plans[self.layout.shape.index_groups.index(group)].fits.cpu()
        hot_group = self.layout.layer_group[group.leader]
        for i in (~fits).nonzero().flatten().tolist():
            seat, first = int(batch.seats[i]), i - i % batch.rows_per_request
            life, context = self.lives[seat], batch.context_len.cpu()
            absent = {p for row in range(first, i + 1) for p in topk[row].tolist()
                      if 0 <= p < int(context[row]) and not life.resident[p // BLOCK][hot_group]}
            assert i > first and len(absent) > life.hot_rows, (seat, absent, life.hot_rows)
            self.refused += 1
        return fits

    def take(self, output) -> None:
        for name in self.seen:
            self.seen[name] += getattr(output.stats, name, 0)
        for name in ("resident_rows", "hot_rows", "miss_rows", "prefill_host_rows", "mirrored_rows"):
            assert getattr(output.stats, name) == sum(getattr(s, name) for s in output.request_stats.values())
        owners = {i: (s, p) for s, life in self.lives.items() for p, i in life.spilling.items()}
        for ack in output.acks:
            if ack.kind is AckKind.ENQUEUED or (ack.transfer_id not in owners and ack.transfer_id not in self.detached):
                continue
            assert ack.kind is AckKind.COMPLETED, ack
            assert ack.row_mask == 15
            if ack.transfer_id in self.detached:
                block, rows = self.detached.pop(ack.transfer_id)
                self.free_host.append(block)
            else:
                seat, page = owners[ack.transfer_id]
                del self.lives[seat].spilling[page]
                self.lives[seat].durable.add(page)
                block = self.lives[seat].host[page]
                rows = [self.truth[seat, layer, page * BLOCK : (page + 1) * BLOCK] for layer in self.layers]
            for layer in self.layers:
                assert torch.equal(self.rig.host.rows(layer)[block * BLOCK : (block + 1) * BLOCK], rows[layer])


def live(world: World, steps: int = 45) -> None:
    for _ in range(steps):
        world.step()
    world.resume()
    world.take(world.rig.finish_copies())
    assert not world.detached
    assert all(world.seen.values()), world.seen
    world.rig.shutdown()


@pytest.mark.parametrize(("seed", "num_groups"), [(0, 2), (1, 4), (2, 1)])
def test_random_life_equals_dense_attention(seed, num_groups):
    live(World(seed, num_groups))


def test_drafts_that_a_region_cannot_hold_are_refused():
    world = World(3, 2)
    world.rows, world.regions = (3,), (8,)
    live(world)
    assert world.refused

"""Hot groups of different sizes on one worker: each group behaves as if it were alone with its own size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse.errors import ConfigError, InvariantError
from hisparse.ops import HotState, reference
from hisparse.types import SeatReset
from hisparse.worker import KVTables, RowBatch
from tests.worker.rig import BLOCK, HEADS, Rig, dense_attention, make_layout

TOP_K, TOKENS, MAX_TOKENS, SEATS = 6, 40, 64, 3
PAGES = TOKENS // BLOCK
START, LIMIT = (8, 20), (12, 32)


class Alone:
    """The hot regions of one index group, resolved by the reference with tables and state of nobody else."""

    def __init__(self, rig: Rig, index: int) -> None:
        layout = rig.layout
        self.leader = layout.shape.index_groups[index].leader
        self.group = layout.layer_group[self.leader]
        self.state = HotState.empty(SEATS, LIMIT[self.group], rig.tables.pages * BLOCK)
        self.hot_table = torch.zeros(SEATS, LIMIT[self.group] // BLOCK, dtype=torch.int32)
        self.hot_rows = torch.zeros(SEATS, dtype=torch.int32)
        self.rows = rig.cache.rows.clone()
        self.rig = rig

    def resize(self, seat: int, blocks: tuple[int, ...]) -> None:
        self.hot_table[seat] = torch.tensor(blocks + (0,) * (self.hot_table.shape[1] - len(blocks)), dtype=torch.int32)
        if len(blocks) * BLOCK < int(self.hot_rows[seat]):
            reference.reset_seat(self.state, seat, from_slot=len(blocks) * BLOCK, from_position=-1)
        self.hot_rows[seat] = len(blocks) * BLOCK

    def resolve(self, topk: Tensor, batch: RowBatch):
        rig = self.rig
        return reference.resolve(
            topk, batch.seats, batch.context_len, resident_table=rig.tables.resident(self.group),
            source_table=rig.tables.source, hot_table=self.hot_table, hot_rows=self.hot_rows, state=self.state,
            block_size=BLOCK, rows_per_block=rig.layout.rows_per_block,
            row_offset=rig.layout.layer_row_offset[self.leader], rows=self.rows, host_rows=rig.host.rows(self.leader),
        )


class Bench:
    """Seats 1 and 2 hold 40 tokens each on the host only, and regions whose sizes differ by hot group."""

    def __init__(self, seed: int) -> None:
        self.layout = make_layout(num_groups=2)
        self.rig = Rig(self.layout, device_blocks=200, host_blocks=40, seats=SEATS, max_model_len=MAX_TOKENS,
                       hot_rows=START, hot_rows_max=LIMIT)
        self.random = torch.Generator().manual_seed(seed)
        self.truth = torch.full((SEATS, self.layout.shape.num_layers, MAX_TOKENS, self.layout.row.row_elems), float("nan"))
        pages = {seat: tuple(range(1 + 15 * (seat - 1), 1 + 15 * (seat - 1) + PAGES)) for seat in (1, 2)}
        self.rig.step(source=pages, new_host=tuple(block for ids in pages.values() for block in ids))
        for seat, ids in pages.items():
            for layer in range(self.layout.shape.num_layers):
                rows = torch.randn(TOKENS, self.layout.row.row_elems, generator=self.random)
                self.rig.host.rows(layer)[ids[0] * BLOCK : ids[0] * BLOCK + TOKENS] = rows
                self.truth[seat, layer, :TOKENS] = rows
        self.alone = [Alone(self.rig, i) for i in range(len(self.layout.shape.index_groups))]

    def blocks(self, seat: int, group: int, rows: int) -> tuple[int, ...]:
        """Of a region of that size, in an order that is not ascending."""
        first = 10 + 90 * (seat - 1) + 40 * group
        return tuple(first + (3 * i) % 8 for i in range(rows // BLOCK))

    def resize(self, seat: int, sizes: dict[int, int]) -> None:
        regions = {(seat, group): self.blocks(seat, group, rows) for group, rows in sizes.items()}
        now = self.rig.tables.hot_rows[:, seat].tolist()
        shrunk = [group for group, rows in sizes.items() if rows < now[group]]
        fresh = tuple(block for (_, group), ids in regions.items() for block in ids[now[group] // BLOCK :])
        self.rig.step(
            hot=regions, hot_rows={key: len(ids) * BLOCK for key, ids in regions.items()}, new_device=fresh,
            seat_resets=tuple(SeatReset(seat=seat, hot_group=group, from_slot=sizes[group], from_position=-1)
                              for group in shrunk))
        for item in self.alone:
            if item.group in sizes:
                item.resize(seat, regions[seat, item.group])

    def step(self, seats: list[int]) -> None:
        """One decode row per seat through every layer."""
        batch = RowBatch.build(seats, [TOKENS - 1] * len(seats), writes=False)
        for item, group in zip(self.alone, self.layout.shape.index_groups, strict=True):
            topk = torch.stack([torch.randperm(TOKENS, generator=self.random)[:TOP_K] for _ in seats]).to(torch.int32)
            want = item.resolve(topk, batch)
            for layer in group.layers:
                q = torch.randn(len(seats), HEADS, self.layout.row.row_elems, generator=self.random)
                got = self.rig.handles[layer].attend(q, topk, batch, 0.3)
                dense = dense_attention(q, torch.stack([self.truth[seat, layer] for seat in seats]), topk, batch.context_len,
                                        0.3, 8)
                torch.testing.assert_close(got.double(), dense, atol=1e-5, rtol=1e-4)
            self.same(item, batch.plans[self.alone.index(item)], want)
        self.rig.worker.check()

    def same(self, item: Alone, got, want) -> None:
        for name in ("row_ids", "valid", "fits", "resident", "hot", "miss"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        for name in ("host_rows", "device_rows", "rows"):
            assert torch.equal(getattr(got.plan, name), getattr(want.plan, name)), name
        state = self.rig.handles[item.leader]._runtime.state
        for name in ("slot_tag", "pos_slot", "use", "hand"):
            assert torch.equal(getattr(state, name), getattr(item.state, name)), name
        ids = want.row_ids[want.row_ids >= 0]
        assert torch.equal(self.rig.cache.rows[ids], item.rows[ids]) and not bool(item.rows[ids].isnan().any())

    def num_hot(self, seat: int) -> list[int]:
        return [int((item.state.slot_tag[seat] >= 0).sum()) for item in self.alone]


def expected(layout, sizes: tuple[int, int]) -> list[int]:
    return [sizes[layout.layer_group[group.leader]] for group in layout.shape.index_groups]


@pytest.mark.parametrize("seed", [0, 1])
def test_each_group_resolves_as_if_it_were_alone_with_its_size(seed: int) -> None:
    bench = Bench(seed)
    assert len({item.group for item in bench.alone}) == 2 and len(bench.alone) == 4
    for seat in (1, 2):
        bench.resize(seat, dict(enumerate(START)))
    for _ in range(12):
        bench.step([1, 2])
    assert bench.num_hot(1) == bench.num_hot(2) == expected(bench.layout, START)

    bench.resize(1, {1: LIMIT[1]})  # one group grows, the other keeps its rows
    for _ in range(20):
        bench.step([2, 1])
    assert bench.num_hot(1) == expected(bench.layout, (START[0], LIMIT[1]))
    assert bench.num_hot(2) == expected(bench.layout, START)

    bench.resize(1, {0: LIMIT[0], 1: START[1]})  # one grows while the other shrinks
    assert bench.num_hot(1) == [min(START[0], n) if item.group == 0 else START[1]
                                for item, n in zip(bench.alone, bench.num_hot(1), strict=True)]
    for _ in range(12):
        bench.step([1])
        bench.step([1, 2])
    assert bench.num_hot(1) == expected(bench.layout, (LIMIT[0], START[1]))
    bench.rig.shutdown()


def test_tables_and_state_are_as_wide_as_their_own_group() -> None:
    rig = Bench(3).rig
    assert [rig.tables.hot(g).shape[1] * BLOCK for g in range(2)] == list(LIMIT)
    for index, group in enumerate(rig.layout.shape.index_groups):
        state = rig.handles[group.leader]._runtime.state
        assert state.slot_tag.shape == state.use.shape == (SEATS, LIMIT[rig.layout.layer_group[group.leader]]), index
        for follower in group.layers[1:]:
            assert rig.handles[follower]._runtime.state is state
    rig.shutdown()


def test_a_region_beyond_its_own_group_is_refused_though_another_could_hold_it() -> None:
    bench = Bench(4)
    with pytest.raises(InvariantError, match="covers entries 0..5 of 5, but the table has 3"):
        bench.resize(1, {0: START[1]})
    bench.resize(1, {1: START[1]})
    bench.rig.shutdown()


def test_a_verification_row_fits_by_its_own_group() -> None:
    """Two rows of one seat select 12 rows: 8 hold only the first one's, 20 hold both."""
    bench = Bench(5)
    bench.resize(1, dict(enumerate(START)))
    for item, group in zip(bench.alone, bench.layout.shape.index_groups, strict=True):
        batch = RowBatch.build([1, 1], [TOKENS - 2, TOKENS - 1], writes=False, rows_per_request=2)
        topk = torch.arange(12, dtype=torch.int32).view(2, 6)
        want = item.resolve(topk, batch)
        bench.rig.handles[group.leader].attend(torch.zeros(2, HEADS, 12), topk, batch, 0.3)
        got = batch.plans[bench.alone.index(item)]
        assert got.fits.tolist() == want.fits.tolist() == [True, item.group == 1]
        bench.same(item, got, want)
    bench.rig.shutdown()


def test_sizes_must_be_given_for_every_group() -> None:
    layout = make_layout(num_groups=2)
    for sizes in ((8,), (8, 8, 8), ()):
        with pytest.raises(InvariantError, match=f"{len(sizes)} entries for 2 hot groups"):
            KVTables(layout, max_seats=1, max_model_len=16, hot_rows_max=sizes)
    with pytest.raises(ConfigError, match="cache.hot_rows has 3 entries"):
        Rig(layout, hot_rows=(8, 8, 8))

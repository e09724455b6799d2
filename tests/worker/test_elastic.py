"""A hot region that grows and shrinks between steps: no row moves, and given-up blocks may be anybody's at once."""

from __future__ import annotations

import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.types import SeatReset
from hisparse.worker import RowBatch
from tests.worker.rig import BLOCK, HEADS, Rig, dense_attention, make_layout

TOP_K, TOKENS, MAX_TOKENS = 6, 40, 64
PAGES = TOKENS // BLOCK


class Bench:
    """Seat 1 holds 40 tokens on the host only; other seats may hold resident pages. Rows are random, and remembered."""

    def __init__(self, num_groups: int, seed: int) -> None:
        self.layout = make_layout(num_groups=num_groups)
        self.groups = range(num_groups)
        self.rig = Rig(self.layout, device_blocks=160, host_blocks=40, seats=3, max_model_len=MAX_TOKENS, hot_rows=8,
                       hot_rows_max=24)
        self.random = torch.Generator().manual_seed(seed)
        layers = self.layout.shape.num_layers
        self.truth = torch.full((3, layers, MAX_TOKENS, self.layout.row.row_elems), float("nan"))
        self.host = tuple(range(1, 1 + PAGES))
        self.rig.step(source={1: self.host}, new_host=self.host)
        for layer in range(layers):
            rows = torch.randn(TOKENS, self.layout.row.row_elems, generator=self.random)
            self.rig.host.rows(layer)[BLOCK : BLOCK + TOKENS] = rows
            self.truth[1, layer, :TOKENS] = rows

    def region(self, blocks: dict[int, tuple[int, ...]], *, new: tuple[int, ...] = (), **command) -> None:
        """Gives seat 1 a region of these blocks by hot group, in a command that may carry more."""
        hot = {(1, g): ids for g, ids in blocks.items()}
        self.rig.step(hot=hot, hot_rows={key: len(ids) * BLOCK for key, ids in hot.items()}, new_device=new, **command)

    def attend(self, seat: int, context: int, *, only_hot: bool = False) -> int:
        """One decode row through every layer equals dense attention. Returns the rows copied from the host."""
        self.rig.worker.output()
        batch = RowBatch.build([seat], [context - 1], writes=False)
        for group, tags in zip(self.layout.shape.index_groups, self.tags(), strict=True):
            chosen = sorted(tags)[:TOP_K] if only_hot else torch.randperm(context, generator=self.random)[:TOP_K].tolist()
            topk = torch.tensor([chosen], dtype=torch.int32)
            for layer in group.layers:
                q = torch.randn(1, HEADS, self.layout.row.row_elems, generator=self.random)
                got = self.rig.handles[layer].attend(q, topk, batch, 0.3)
                want = dense_attention(q, self.truth[seat, layer][None], topk, batch.context_len, 0.3, 8)
                torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)
        self.rig.worker.check()
        return self.rig.worker.output().stats.miss_rows

    def tags(self) -> list[set[int]]:
        """Per index group, positions that are hot for seat 1."""
        states = [self.rig.handles[group.leader]._runtime.state for group in self.layout.shape.index_groups]
        return [set(state.slot_tag[1][state.slot_tag[1] >= 0].tolist()) for state in states]


@pytest.mark.parametrize(("num_groups", "seed"), [(1, 0), (2, 1), (4, 2)])
def test_grown_then_shrunk_while_another_request_takes_the_blocks(num_groups, seed):
    bench = Bench(num_groups, seed)
    layers = bench.layout.shape.num_layers
    blocks = {g: tuple(10 + 10 * g + i for i in range(6)) for g in bench.groups}
    start = {g: ids[:2] for g, ids in blocks.items()}
    bench.region(start, new=tuple(b for ids in start.values() for b in ids))
    for _ in range(6):
        bench.attend(1, TOKENS)
    small = bench.tags()
    assert all(len(tags) == 8 for tags in small)

    bench.region(blocks, new=tuple(b for ids in blocks.values() for b in ids[2:]))
    assert bench.tags() == small, "growth keeps tags"
    assert bench.attend(1, TOKENS, only_hot=True) == 0
    for _ in range(24):
        bench.attend(1, TOKENS)
    assert all(len(tags) == 24 for tags in bench.tags())

    # The command that shrinks also hands the blocks to seat 2 as resident pages of its prompt, which it then writes.
    # (Blocks are poisoned when they are handed out, so a read through a stale slot is NaN or a row of seat 2.)
    freed = {g: ids[2:] for g, ids in blocks.items()}
    tokens = 4 * BLOCK
    hot = {(1, g): ids for g, ids in start.items()}

    def fill() -> None:
        batch = RowBatch.build([2] * tokens, range(tokens), is_prefill=True)
        for layer in range(layers):
            rows = torch.randn(tokens, bench.layout.row.row_elems, generator=bench.random)
            bench.truth[2, layer, :tokens] = rows
            bench.rig.handles[layer].append(rows, batch)

    bench.rig.step(fill, resident={(2, g): ids for g, ids in freed.items()}, hot=hot, hot_rows=dict.fromkeys(hot, 8),
                   new_device=tuple(b for ids in freed.values() for b in ids),
                   seat_resets=(SeatReset(seat=1, from_slot=8, from_position=-1),))
    for g in bench.groups:
        assert bench.rig.tables.hot(g)[1].tolist() == [*start[g], 0, 0, 0, 0]
    assert bench.rig.tables.hot_rows[:, 1].tolist() == [8] * num_groups
    assert all(len(tags) == 8 for tags in bench.tags()), "slots of the starting size keep their rows"
    assert bench.attend(1, TOKENS, only_hot=True) == 0
    for _ in range(8):
        assert bench.attend(1, TOKENS) > 0
        bench.attend(2, tokens)
    assert all(len(tags) == 8 for tags in bench.tags())

    # Grown again, into other blocks: the old slots have nothing to say about them.
    other = {g: (*start[g], 100 + 4 * g, 101 + 4 * g) for g in bench.groups}
    bench.region(other, new=tuple(b for ids in other.values() for b in ids[2:]))
    for _ in range(12):
        bench.attend(1, TOKENS)
        bench.attend(2, tokens)
    assert all(len(tags) == 16 for tags in bench.tags())
    bench.rig.shutdown()


def test_shrunk_and_grown_again_in_one_command():
    """A pass may take a page back and, at its end, give another one: the reset still empties the slot."""
    bench = Bench(2, 5)
    first = {g: (10 + 10 * g, 11 + 10 * g, 12 + 10 * g) for g in bench.groups}
    bench.region(first, new=tuple(b for ids in first.values() for b in ids))
    for _ in range(12):
        bench.attend(1, TOKENS)
    assert all(len(tags) == 12 for tags in bench.tags())
    again = {g: (*ids[:2], 60 + g) for g, ids in first.items()}
    bench.region(again, new=tuple(ids[2] for ids in again.values()),
                 seat_resets=(SeatReset(seat=1, from_slot=8, from_position=-1),))
    assert all(len(tags) == 8 for tags in bench.tags())
    for _ in range(12):
        bench.attend(1, TOKENS)
    bench.rig.shutdown()


def test_a_shrink_without_its_reset_is_noticed():
    bench = Bench(2, 6)
    blocks = {g: (10 + 10 * g, 11 + 10 * g, 12 + 10 * g) for g in bench.groups}
    bench.region(blocks, new=tuple(b for ids in blocks.values() for b in ids))
    for _ in range(12):
        bench.attend(1, TOKENS)
    bench.region({g: ids[:2] for g, ids in blocks.items()})
    with pytest.raises(InvariantError, match="a slot beyond its region's size is tagged"):
        bench.rig.worker.check()

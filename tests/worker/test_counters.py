"""Rows by index group, counted by hand: every group of the model selects other positions, on every route."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hisparse.types import TierRows
from hisparse.worker import RowBatch
from hisparse.worker.counters import Counters
from tests.worker.rig import GROUPS, HEADS, Rig, make_layout

NOTHING = TierRows()


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Seat 1 is resident, seat 2 host-backed with a hot region of 8 rows; both have the positions 0 to 3."""
    rig = Rig()
    for seat, blocks in ((1, (1, 2)), (2, (3, 4))):
        batch = RowBatch.build([seat] * 4, range(4), is_prefill=True)
        rig.step(lambda batch=batch: rig.append(batch, lambda layer, positions: positions + 100.0 * layer),
                 resident={(seat, g): (blocks[g],) for g in range(2)}, source={seat: (seat,)}, mirrors={seat: (seat,)},
                 new_host=(seat,))
    rig.step(resident={(2, g): () for g in range(2)}, hot={(2, g): (10 + 2 * g, 11 + 2 * g) for g in range(2)},
             hot_rows={(2, g): 8 for g in range(2)})
    yield rig
    rig.shutdown()


def attend(rig: Rig, batch: RowBatch, selected: list[list[int]], *, own_attention: bool = False) -> None:
    """The layers of index group `g` select the positions `selected[g]` in every row. `own_attention`: they only resolve."""
    n = batch.num_rows
    for group, positions in zip(GROUPS, selected):
        topk = torch.tensor([positions + [-1] * (6 - len(positions))] * n, dtype=torch.int32)
        for layer in group:
            if own_attention:
                rig.handles[layer].resolve(topk, batch)
            else:
                rig.handles[layer].attend(torch.ones(n, HEADS, rig.layout.row.row_elems), topk, batch, 1.0)


def test_each_index_group_counts_its_own_layers_and_tiers(rig: Rig) -> None:
    """Groups of 2, 1, 3 and 1 layers. A padding row and positions that are none count nowhere."""
    def decode(selected: list[list[int]]) -> tuple[TierRows, ...]:
        batch = RowBatch.build([1, 2, -1], [3, 3, 3], writes=False)
        return rig.step(lambda: attend(rig, batch, selected)).index_groups

    assert decode([[0, 1], [2], [], [0, 1, 3, 9]]) == (
        TierRows(resident=2 * 2, miss=2 * 2), TierRows(resident=1, miss=1), NOTHING, TierRows(resident=3, miss=3))
    assert decode([[1, 2], [2], [0], []]) == (
        TierRows(resident=2 * 2, hot=2 * 1, miss=2 * 1), TierRows(resident=1, hot=1), TierRows(resident=3, miss=3), NOTHING)
    assert rig.worker.output().index_groups == (), "nothing was selected since"


@pytest.mark.parametrize("own_attention", [False, True])
def test_rows_that_prefill_reads_from_the_host_are_their_groups(rig: Rig, own_attention: bool) -> None:
    batch = RowBatch.build([2, 2], [2, 3], writes=False, is_prefill=True)
    output = rig.step(lambda: attend(rig, batch, [[0], [0, 1, 2], [1, 2], []], own_attention=own_attention))
    each = 2 if own_attention else 1  # our attention gathers a row once for both query rows, another may read it twice
    assert output.index_groups == (
        TierRows(prefill_host=2 * each), TierRows(prefill_host=3 * each), TierRows(prefill_host=3 * 2 * each), NOTHING)
    assert output.stats.prefill_host_rows == 11 * each


def test_groups_and_seats_add_up_to_the_same_rows(rig: Rig) -> None:
    """The sums by seat and by group come from the same launches, so that each tier agrees."""
    for step in range(4):
        batch = RowBatch.build([2, 1], [3, 2], writes=False, is_prefill=False)
        output = rig.step(lambda batch=batch, step=step: attend(rig, batch, [[step % 4, 1], [0], [3 - step], [step, 2]]))
        for tier, field in zip(TierRows._fields, ("resident_rows", "hot_rows", "miss_rows", "prefill_host_rows")):
            assert sum(getattr(rows, tier) for rows in output.index_groups) == getattr(output.stats, field), (step, tier)


def test_a_seat_that_is_padding_adds_nothing() -> None:
    counters = Counters(make_layout(), 2)
    ones = torch.ones(3, dtype=torch.int32)
    seats = torch.tensor([-1, 1, -1], dtype=torch.int32)
    counters.add("prefill_host_rows", seats, ones, 4)
    counters.add_tiers(seats, [ones * (10 * group + tier) for group in range(4) for tier in range(3)])
    total, by_seat, groups = counters.take()
    assert groups == (TierRows(0, 2, 4), TierRows(10, 11, 12), TierRows(60, 63, 66, 1), TierRows(30, 31, 32))
    assert by_seat == {1: total} and (total.resident_rows, total.hot_rows, total.miss_rows) == (100, 107, 114)
    assert counters.take()[2] == ()

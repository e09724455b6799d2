"""Landing choice, staging slots, descriptors and generation runs: the pure parts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import ConfigError, InvariantError
from hisparse.pd import descriptors as module
from hisparse.pd.descriptors import ReadPlanner, cut, merge, split
from hisparse.pd.generations import first_difference, generation_reads, generation_runs
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.pd.planner import LandingPlanner, plan_landing
from hisparse.pd.staging import SlotPool
from hisparse.types import Landing, RequestPages
from tests.pd.rig import GROUPS, LAYOUT, Side, make_plan, pick_pages


@pytest.mark.parametrize(("resident", "host", "landing"), [
    (True, True, Landing.RESIDENT), (True, False, Landing.RESIDENT), (False, True, Landing.HOST), (False, False, None)])
def test_landing_table(resident: bool, host: bool, landing: Landing | None) -> None:
    assert plan_landing(resident, host) is landing


def test_choice_is_recorded_when_one_first_fits_and_kept_through_retries() -> None:
    planner = LandingPlanner()
    for _ in range(1000):
        assert planner.choose("r", False, False) is None
        assert planner.recorded("r") is None
    assert not planner.counts
    assert planner.choose("r", False, True) is Landing.HOST
    assert planner.choose("r", True, True) is Landing.HOST, "not decided again"
    assert planner.choose("r", False, False) is Landing.HOST
    assert planner.counts == {Landing.HOST: 1}
    planner.forget("r")
    assert planner.choose("r", True, True) is Landing.RESIDENT


def test_slots_are_granted_up_to_the_quota_at_once_and_conserved() -> None:
    pool = SlotPool(5, 64, quota=3)
    taken = [pool.acquire("a") for _ in range(4)]
    assert taken[3] is None and len({slot for slot in taken if slot is not None}) == 3
    assert [pool.acquire("b") is None for _ in range(3)] == [False, False, True]
    pool.check()
    slot = taken[1]
    assert slot is not None
    pool.release(slot)
    with pytest.raises(InvariantError, match=str(slot)):
        pool.release(slot)
    assert pool.acquire("c") == slot
    assert pool.slot_address(2) - pool.slot_address(1) == 64
    pool.check()
    assert SlotPool(4, 8).quota == 2 and SlotPool(1, 8).quota == 1
    for bad in ({"num_slots": 0, "slot_bytes": 8}, {"num_slots": 2, "slot_bytes": 8, "quota": 3}):
        with pytest.raises(ConfigError):
            SlotPool(**bad)


pieces = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=30, unique_by=(lambda p: p[0], lambda p: p[1]))


@given(pieces)
def test_merged_descriptors_move_the_same_bytes(items: list[tuple[int, int]]) -> None:
    far = np.array([f * 8 for f, _ in items], np.int64)
    near = np.array([n * 8 for _, n in items], np.int64)
    merged = merge([(far[::2], near[::2], 8), (far[1::2], near[1::2], 8)])
    source = np.arange(31 * 8)
    want, got = np.full(31 * 8, -1), np.full(31 * 8, -1)
    for f, n in zip(far, near):
        want[n : n + 8] = source[f : f + 8]
    for f, n, size in merged.tolist():
        assert (got[n : n + size] == -1).all(), "no byte is moved twice"
        got[n : n + size] = source[f : f + size]
    assert (got == want).all()
    assert (np.diff(merged[:, 0]) > 0).all(), "sorted by source address"
    for a, b in itertools.pairwise(merged):
        assert not (a[0] + a[2] == b[0] and a[1] + a[2] == b[1]), "true neighbours are one descriptor"


@given(pieces, st.booleans())
def test_merging_over_padding_moves_every_piece_and_else_only_padding(items: list[tuple[int, int]], padded: bool) -> None:
    """Pieces of 8 bytes in blocks of 12: what else is moved lies behind a piece on both sides, in its own block."""
    far = np.array([f * 12 for f, _ in items], np.int64)
    near = np.array([n * 12 for _, n in items], np.int64)
    merged = merge([(far, near, 8, 4 if padded else 0)])
    moved = {n + i: f + i for f, n, size in merged.tolist() for i in range(size)}
    assert len(moved) == merged[:, 2].sum(), "no byte is moved twice"
    own = {n + i: f + i for f, n in zip(far.tolist(), near.tolist()) for i in range(12)}
    assert moved.items() <= own.items()
    assert {n + i: f + i for f, n in zip(far.tolist(), near.tolist()) for i in range(8)}.items() <= moved.items()
    neighbours = len({(f, n) for f, n in items} & {(f + 1, n + 1) for f, n in items})
    assert len(merged) == len(items) - (neighbours if padded else 0)


def test_split_bounds_bytes_and_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_BYTES", 100)
    monkeypatch.setattr(module, "MAX_READ_DESCRIPTORS", 3)
    sizes = [40, 40, 40, 300, 1, 1, 1, 1, 1]
    descriptors = np.stack([np.arange(9), np.arange(9), np.array(sizes)], axis=1)
    parts = list(split(descriptors))
    assert [part[:, 2].tolist() for part in parts] == [[40, 40], [40], [300], [1, 1, 1], [1, 1]]
    assert (np.concatenate(parts) == descriptors).all()
    assert list(split(descriptors[:0])) == []


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300)), max_size=8), st.integers(1, 64))
def test_cut_pieces_are_the_same_bytes_in_order_and_none_is_longer(items: list[tuple[int, int, int]], most: int) -> None:
    descriptors = np.array(items, dtype=np.int64).reshape(-1, 3)
    before, pieces = descriptors.copy(), cut(descriptors, most)
    assert [(f + i, n + i) for f, n, size in items for i in range(size)] == \
        [(f + i, n + i) for f, n, size in pieces.tolist() for i in range(size)]
    assert (pieces[:, 2] <= most).all() and len(pieces) == sum(-(-size // most) for _, _, size in items)
    assert (descriptors == before).all()


def test_generation_check_reads_one_slice_from_lowest_to_highest_page() -> None:
    side = Side("p", LoopbackNetwork())
    source = side.endpoints[0]
    ids = np.array([40, 9, 12, 33])
    for name, array in (("device", side.ranks[0].cache.generations), ("host", side.ranks[0].pool.generations)):
        use = ids if name == "device" else np.array([30, 9, 12, 11])
        expected = array[use].astype(np.uint64)
        (run,) = generation_runs(source, name, use, expected, 1 << 20)
        assert (run.first, run.count) == (9, int(use.max()) - 8)
        assert generation_reads([run], 4096).tolist() == [[int(array.ctypes.data) + 9 * array.strides[0], 4096, run.num_bytes]]


@given(st.lists(st.integers(1, 63), min_size=1, max_size=40, unique=True), st.sampled_from([8, 16, 64, 200, 512]), st.data())
def test_generation_runs_find_any_single_difference_within_their_limit(ids: list[int], limit: int, data: st.DataObject) -> None:
    gens = SIDE.ranks[0].cache.generations
    pages = np.array(ids)
    expected = gens[pages].astype(np.uint64)
    runs = generation_runs(SIDE.endpoints[0], "device", pages, expected, limit)
    assert all(run.num_bytes <= limit for run in runs)
    assert sorted(int(i) for run in runs for i in run.ids) == sorted(ids)
    slot = np.concatenate([gens[run.first : run.first + run.count].view(np.uint8) for run in runs])
    assert first_difference(runs, slot) == ""
    i = data.draw(st.integers(0, len(ids) - 1))
    wrong = expected.copy()
    wrong[i] += np.uint64(1)
    runs = generation_runs(SIDE.endpoints[0], "device", pages, wrong, limit)
    assert f"page {ids[i]} " in first_difference(runs, slot)


SIDE = Side("p", LoopbackNetwork())


@pytest.mark.parametrize("more", [0, 64, 1 << 16])
def test_neighbours_of_another_stride_stay_within_their_place_of_a_slot(more: int) -> None:
    """A peer says itself how far its blocks are apart; what it says must not reach into other slots."""
    prefill, pages = Side("p", LoopbackNetwork()), np.arange(4)
    source = RequestPages(first_page=0, num_tokens=16, indexer_blocks=(1, 2, 3, 4),
                          resident_blocks=tuple((5, 6, 7, 8) for _ in range(GROUPS)), host_blocks=(0,) * 4)
    target = pick_pages(3, 4, 16, resident=[False] * 4, host=[True] * 4)
    plan, near = make_plan(prefill, source, target, Landing.HOST), prefill.endpoints[0]
    stride = LAYOUT.block_bytes + more
    far = replace(near, regions=tuple(replace(r, page_stride=stride) if r.name.startswith("resident") else r
                                      for r in near.regions))
    planner = ReadPlanner(LAYOUT, plan, far, {r.name: r for r in near.regions}, bridge_bytes=1 << 20)
    (chunk,) = planner.slot_chunks(pages, 4)
    moved = {}
    for address, place, size in planner.to_slot(chunk, 0, 4).tolist():
        assert place + size <= 4 * GROUPS * LAYOUT.block_bytes
        moved.update(zip(range(place, place + size), range(address, address + size)))
    for g in range(GROUPS):
        region = far.region(f"resident.{g}")
        for i, block in enumerate((5, 6, 7, 8)):
            at = (g * 4 + i) * LAYOUT.block_bytes
            assert [moved[at + b] - region.address - block * stride for b in (0, region.page_bytes - 1)] == [
                0, region.page_bytes - 1]

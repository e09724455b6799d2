"""The replacement policy misses hardly more than exact LRU, measured through the shipped code; and the yardsticks are right."""

from __future__ import annotations

from collections import OrderedDict
from itertools import product

import numpy as np
import pytest

from hisparse.bench import policy as bench_policy
from hisparse.bench.policy import FACTOR, SIZES, SLACK, SUMMED
from hisparse.trace.policies import FIFO, LRU, Belady
from hisparse.trace.selection import LAYER_TYPES, Order, SelectionModel
from hisparse.trace.shipped import Shipped

STEPS, WARM = 150, 60
SMALL = SelectionModel(pool=160, drift=3, recent=4, top_k=48, context=600)


def mean_misses(policy, steps):
    return float(np.mean([policy.step(selected) for selected in steps][WARM:]))


@pytest.mark.parametrize("order", [Order.ASCENDING, Order.RANDOM], ids=lambda order: order.value)
def test_misses_are_close_to_lru_in_every_cell_and_fewer_in_sum(order):
    """Ascending is how the indexer selects: ties of a launch then fall by position, which must not cost misses."""
    summed = np.zeros(2)
    for kind, model in LAYER_TYPES.items():
        steps = list(model.steps(STEPS, seed=11, order=order))
        positions = model.length(STEPS)
        for rows in SIZES:
            shipped = Shipped(rows, positions)
            ours, lru = mean_misses(shipped, steps), mean_misses(LRU(rows, positions), steps)
            shipped.check()
            assert ours <= FACTOR * lru + SLACK, (kind, rows, ours, lru)
            if rows == SUMMED:
                summed += ours, lru
    assert summed[0] < summed[1]


def test_the_bar_can_be_missed():
    """FIFO misses it, by the same measure: the bar separates policies."""
    model = LAYER_TYPES["sticky"]
    steps, positions = list(model.steps(STEPS, seed=11)), model.length(STEPS)
    assert mean_misses(FIFO(6144, positions), steps) > FACTOR * mean_misses(LRU(6144, positions), steps) + SLACK


@pytest.mark.parametrize("seed", range(3))
def test_lru_is_exact(seed):
    """Against an ordered dictionary: touch all of a step in order, then drop from the old end what does not fit."""
    policy, model = LRU(100, SMALL.length(80)), OrderedDict()
    for selected in SMALL.steps(80, seed=seed, order=Order.RANDOM):
        missing = [p for p in selected.tolist() if p not in model]
        for position in selected.tolist():
            model[position] = None
            model.move_to_end(position)
        while len(model) > 100:
            model.popitem(last=False)
        assert policy.step(selected) == len(missing)


@pytest.mark.parametrize("seed", range(20))
def test_belady_is_the_optimum(seed):
    """Against every choice of victims there is, for tiny regions."""
    rng = np.random.default_rng(seed)
    steps = [rng.choice(6, 2, replace=False) for _ in range(6)]
    belady = Belady(3, 6, steps)
    states = {frozenset(): 0}
    for selected in steps:
        need = frozenset(selected.tolist())
        following: dict[frozenset[int], int] = {}
        for held, count in states.items():
            rest = sorted(held - need)
            for keep in product((False, True), repeat=len(rest)):
                after = need | {p for p, kept in zip(rest, keep) if kept}
                if len(after) <= 3:
                    total = count + len(need - held)
                    following[after] = min(total, following.get(after, total))
        states = following
    assert sum(belady.step(selected) for selected in steps) == min(states.values())


@pytest.mark.parametrize("order", Order)
def test_selections_are_distinct_seeded_and_recent(order):
    steps = list(SMALL.steps(30, seed=5, order=order))
    again = SMALL.steps(30, seed=5, order=Order.ASCENDING)
    for i, (selected, ascending) in enumerate(zip(steps, again)):
        length = SMALL.length(i)
        assert len(selected) == len(set(selected.tolist())) == SMALL.top_k
        assert selected.min() >= 0 and selected.max() < length
        assert set(range(length - SMALL.recent, length)) <= set(selected.tolist())
        assert np.array_equal(np.sort(selected), ascending)
    assert not np.array_equal(steps[3], next(SMALL.steps(1, seed=6, order=order)))


def test_parameters_of_a_selection_do_what_they_say():
    def overlap(**changes):
        model = SelectionModel(**{"pool": 6000, "drift": 0, **changes})
        a, b = list(model.steps(12, seed=0))[-2:]
        return len(np.intersect1d(a, b)) / len(b)

    base = overlap()
    assert overlap(persistence=0.9) > base + 0.2 and overlap(shift=1) < base - 0.2
    assert overlap(pool=12_500) < base and overlap(skew=0.0) < base and overlap(drift=2000) < base
    with pytest.raises(ValueError, match="top_k"):
        SelectionModel(pool=100, top_k=64, recent=65)


def test_the_benchmark_runs() -> None:
    _, rows = bench_policy.run(quick=True, orders=["ascending"])
    assert len(rows) == len(bench_policy.KINDS) * len(SIZES) + 1
    assert all(row.value > 0 and row.bar is None for row in rows)

"""Misses of the generated kinds of layers are the ones that the generator was calibrated to, and policies are what they say."""

from __future__ import annotations

import numpy as np
import pytest

from hisparse.errors import ConfigError
from hisparse.trace.policies import StampLRU
from hisparse.trace.replay import POLICIES, replay
from hisparse.trace.selection import LAYER_TYPES, SelectionModel
from hisparse.trace.synth import synthesise
from hisparse.trace.trace_file import Series, Trace

# LRU misses per layer and step at 4,096 and 6,553 rows: 260 steps of which 140 fill the region, top_k 2,048, 128k tokens.
# The values come from the calibration of the generator's parameters, not from this code, and are rounded ("about"): the means
# of 8 seeds here lie within 1.2 % of them, and a seed's standard deviation is at most 3 rows.
ANCHORS = {"sticky": (437, 15), "typical": (671, 217), "volatile": (943, 582), "scan": (1900, 1900)}
TOLERANCE, SLACK = 0.02, 1.0

SMALL = SelectionModel(pool=160, drift=3, recent=4, top_k=48, context=600)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthesise(LAYER_TYPES, num_steps=260, seed=0)


@pytest.mark.parametrize("kind", ANCHORS)
def test_lru_misses_what_the_calibration_says(trace: Trace, kind: str) -> None:
    (series,) = [series for series in trace.series if series.name == kind]
    found = [row.mean for row in replay(series, hot_rows=[4096, 6553], policies=["lru"], warm_steps=140)]
    assert found == [pytest.approx(want, abs=TOLERANCE * want + SLACK) for want in ANCHORS[kind]]


def test_policies_are_in_their_order() -> None:
    """The optimum first; then CLOCK and LRU by launch within 5 % of exact LRU; FIFO worst, where rows come back."""
    (series,) = synthesise({"typical": LAYER_TYPES["typical"]}, num_steps=90, seed=3).series
    mean = {row.policy: row.mean for row in replay(series, hot_rows=[6144], policies=list(POLICIES), warm_steps=45)}
    assert list(mean) == list(POLICIES)
    assert mean["belady"] < 0.6 * mean["lru"] and mean["belady"] == min(mean.values())
    assert mean["clock"] <= 1.05 * mean["lru"] and mean["stamp"] == pytest.approx(mean["lru"], rel=0.05)
    assert mean["fifo"] > 1.1 * mean["lru"]


def test_the_newest_position_is_not_a_miss_unless_it_was_there_before() -> None:
    steps = tuple(np.array(step) for step in ([0, 1, 2], [1, 2, 3], [0, 4, 2], [0, 4, 2]))
    # 3 rows, LRU: step 0 misses 0, 1 and the new 2; step 1 the new 3; step 2 misses 0 and the new 4; step 3 hits
    counts = [3, 1, 2, 0]
    series = Series(name="x", steps=steps, lengths=(3, 4, 5, 5))
    (row,) = replay(series, hot_rows=[3], policies=["lru"], warm_steps=0)
    assert row.mean == pytest.approx((sum(counts) - 3) / 4)
    again = Series(name="x", steps=(steps[0], steps[1], steps[2], np.array([1, 3, 4])), lengths=(3, 4, 5, 5))
    (row,) = replay(again, hot_rows=[3], policies=["lru"], warm_steps=0)
    assert row.mean == pytest.approx((3 + 1 + 2 + 2 - 3) / 4)  # 4 stays; 1 and 3 were evicted


@pytest.mark.parametrize("seed", range(3))
def test_stamp_lru_against_a_plain_model(seed: int) -> None:
    """A list of (position, launch) walked in ring order, oldest launch first."""
    policy, slots, hand = StampLRU(100, SMALL.length(80)), [(-1, -1)] * 100, 0
    for launch, selected in enumerate(SMALL.steps(80, seed=seed)):
        held = {position: slot for slot, (position, _) in enumerate(slots)}
        missing = [position for position in selected.tolist() if position not in held]
        for position in selected.tolist():
            if position in held:
                slots[held[position]] = (position, launch)
        ring = [(hand + i) % 100 for i in range(100)]
        victims = sorted(ring, key=lambda slot: slots[slot][1])[: len(missing)]
        for slot, position in zip(victims, missing, strict=True):
            assert slots[slot][1] < launch, "a row of this step was evicted"
            slots[slot] = (position, launch)
        hand = (victims[-1] + 1) % 100 if missing else hand
        assert policy.step(selected) == len(missing)


def test_mistakes_are_explained() -> None:
    (series,) = synthesise({"small": SMALL}, num_steps=4, seed=0).series
    for change, text in (({"policies": ["mru"]}, "clock, lru"), ({"hot_rows": [47]}, "up to 48 rows"),
                         ({"warm_steps": 4}, "0 to 3 steps")):
        arguments = {"hot_rows": [64], "policies": ["lru"], "warm_steps": 1} | change
        with pytest.raises(ConfigError, match=text):
            list(replay(series, **arguments))  # type: ignore[arg-type]


def test_series_of_one_seed_are_different_draws() -> None:
    both = synthesise({"a": SMALL, "b": SMALL}, num_steps=2, seed=0).series
    again = synthesise({"a": SMALL, "b": SMALL}, num_steps=2, seed=0).series
    assert not np.array_equal(both[0].steps[0], both[1].steps[0])
    assert all(np.array_equal(x, y) for one, two in zip(both, again) for x, y in zip(one.steps, two.steps))
    with pytest.raises(ConfigError, match="at least 1 step"):
        synthesise({"a": SMALL}, num_steps=0, seed=0)

"""Replays a trace through replacement policies: how many rows a hot region of some size misses."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hisparse.errors import ConfigError
from hisparse.trace.policies import FIFO, LFU, LRU, Belady, StampLRU
from hisparse.trace.trace_file import Series

Steps = Sequence[NDArray[np.int64]]


class Region(Protocol):
    """A hot region under some policy."""

    def step(self, selected: NDArray[np.int64]) -> int:
        """Serves distinct positions, at most its rows; returns how many of them missed."""
        ...


def _clock(rows: int, num_positions: int, steps: Steps) -> Region:
    from hisparse.trace.shipped import Shipped  # torch

    return Shipped(rows, num_positions)


POLICIES: dict[str, Callable[[int, int, Steps], Region]] = {
    "clock": _clock,
    "lru": lambda rows, num_positions, steps: LRU(rows, num_positions),
    "stamp": lambda rows, num_positions, steps: StampLRU(rows, num_positions),
    "fifo": lambda rows, num_positions, steps: FIFO(rows, num_positions),
    "lfu": lambda rows, num_positions, steps: LFU(rows, num_positions),
    "belady": Belady,
}
"""By name: the shipped clock, exact LRU, LRU by launch, FIFO, LFU with decay, and the optimum, which no policy beats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Of one series, one size and one policy. `mean`: rows per step after the warm-up, the newest position left out."""

    series: str
    hot_rows: int
    policy: str
    mean: float


def replay(series: Series, *, hot_rows: Sequence[int], policies: Sequence[str], warm_steps: int) -> Iterator[Misses]:
    """Misses of every size and policy over the same steps, sizes outermost.

    A region starts empty; the first `warm_steps` fill it and do not count. The newest position of a step was written in
    that step, to a page that is still on the device: it enters the region, but is never counted as a miss.

    Raises:
        ConfigError: unknown policy, a region smaller than a step, or nothing left after the warm-up.
    """
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        raise ConfigError(f"no policy is named {unknown[0]!r}; there are {', '.join(POLICIES)}")
    if not 0 <= warm_steps < len(series.steps):
        raise ConfigError(f"{series.name} has {len(series.steps)} steps, so the warm-up must be 0 to {len(series.steps) - 1} "
                          f"steps, got {warm_steps}; make a longer trace or lower --warm")
    top_k = max(len(step) for step in series.steps)
    for rows in hot_rows:
        if rows < top_k:
            raise ConfigError(f"a hot region must hold a whole step: {series.name} selects up to {top_k} rows, got "
                              f"--hot-rows {rows}; raise it")
    newest = _new_and_newest(series)
    for rows in hot_rows:
        for name in policies:
            region = POLICIES[name](rows, series.num_positions, series.steps)
            counts = [region.step(step) - fresh for step, fresh in zip(series.steps, newest, strict=True)]
            yield Misses(series=series.name, hot_rows=rows, policy=name, mean=statistics.fmean(counts[warm_steps:]))


def _new_and_newest(series: Series) -> list[int]:
    """1 for each step that selects its newest position, if no step did so before; a replayed step reads it like any other."""
    seen: set[int] = set()
    found = []
    for step, length in zip(series.steps, series.lengths, strict=True):
        last = length - 1
        found.append(int(last not in seen and last in step))
        seen.add(last)
    return found

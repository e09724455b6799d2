"""Policies that the shipped one is compared with, and Belady's optimum as the bound.

Those over `Policy` keep the least valuable rows out: a step's misses enter, then as many rows leave as do not fit, the ones
of least priority among those that the step did not select. A step needs all of its rows at once; no row can be bypassed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


class Policy:
    """A region of `rows` rows over positions below `num_positions`. Subclasses keep `priority`, float64 by position."""

    def __init__(self, rows: int, num_positions: int) -> None:
        self.rows = rows
        self.priority = np.zeros(num_positions)
        self._held = np.zeros(num_positions, dtype=bool)
        self._inside = np.empty(0, dtype=np.int64)
        self.step_idx = -1

    def step(self, selected: Positions) -> int:
        """Serves distinct positions, at most `rows`; returns how many of them missed."""
        self.step_idx += 1
        missing = selected[~self._held[selected]]
        self.touch(selected, missing)
        inside = np.concatenate([self._inside, missing])
        surplus = len(inside) - self.rows
        if surplus > 0:
            values = self.priority[inside]
            busy = np.zeros(len(self.priority), dtype=bool)
            busy[selected] = True
            values[busy[inside]] = np.inf
            order = np.argpartition(values, surplus - 1)
            self._held[inside[order[:surplus]]] = False
            inside = inside[order[surplus:]]
        self._held[missing] = True
        self._inside = inside
        return len(missing)

    def touch(self, selected: Positions, missing: Positions) -> None:
        """Updates priorities; `missing` are about to enter."""
        raise NotImplementedError


class LRU(Policy):
    """Exact: by launch, and inside a launch by the order of its positions."""

    def touch(self, selected: Positions, missing: Positions) -> None:
        self.priority[selected] = self.step_idx + np.arange(len(selected)) / len(selected)


class FIFO(Policy):
    def touch(self, selected: Positions, missing: Positions) -> None:
        self.priority[missing] = self.step_idx + np.arange(len(missing)) / max(1, len(missing))


class LFU(Policy):
    """Uses so far, also those before a row was evicted, each worth 3 % less per step since."""

    DECAY = 0.97

    def touch(self, selected: Positions, missing: Positions) -> None:
        self.priority[selected] += self.DECAY ** -self.step_idx


class Random(Policy):
    def __init__(self, rows: int, num_positions: int, seed: int = 0) -> None:
        super().__init__(rows, num_positions)
        self._rng = np.random.default_rng(seed)

    def touch(self, selected: Positions, missing: Positions) -> None:
        self.priority = self._rng.random(len(self.priority))


class Belady(Policy):
    """Evicts what is selected again last; no policy misses less. Must be given the very steps it is then asked for."""

    def __init__(self, rows: int, num_positions: int, steps: Sequence[Positions]) -> None:
        super().__init__(rows, num_positions)
        coming = np.full(num_positions, np.inf)
        self._next: list[NDArray[np.float64]] = [coming] * len(steps)
        for i in range(len(steps) - 1, -1, -1):
            self._next[i] = coming[steps[i]]
            coming[steps[i]] = i

    def touch(self, selected: Positions, missing: Positions) -> None:
        self.priority[selected] = -self._next[self.step_idx]


class StampLRU:
    """LRU as a kernel can afford it: a byte a row for the launch of its last use, and no order inside a launch.

    The oldest rows go; of equally old ones the next in ring order from where the last search ended. Ages beyond `MAX_AGE`
    count as equal.
    """

    MAX_AGE = 255

    def __init__(self, rows: int, num_positions: int) -> None:
        self._tag = np.full(rows, -1, dtype=np.int64)
        self._stamp = np.full(rows, -1, dtype=np.int64)
        self._slot = np.full(num_positions, -1, dtype=np.int64)
        self._ring = np.arange(rows)
        self._hand = 0
        self._step_idx = -1

    def step(self, selected: Positions) -> int:
        """Serves distinct positions, at most `rows`; returns how many of them missed."""
        self._step_idx += 1
        slots = self._slot[selected]
        missing = selected[slots < 0]
        self._stamp[slots[slots >= 0]] = self._step_idx
        if len(missing):
            rows = len(self._tag)
            age = np.where(self._tag < 0, self.MAX_AGE + 1, np.minimum(self._step_idx - self._stamp, self.MAX_AGE))
            key = (self.MAX_AGE + 1 - age) * rows + (self._ring - self._hand) % rows
            victims = np.argsort(key, kind="stable")[: len(missing)]
            old = self._tag[victims]
            self._slot[old[old >= 0]] = -1
            self._tag[victims], self._stamp[victims], self._slot[missing] = missing, self._step_idx, victims
            self._hand = int(victims[-1] + 1) % rows
        return len(missing)

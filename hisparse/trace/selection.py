"""Top-k selections of a long decode without a model: which positions of the context one layer reads in each step.

Measured layers of sparse-attention models differ in three things that decide how often a hot region misses: how many
positions are alive at all, how unevenly they are wanted, and how fast that changes. `SelectionModel` is a generator with
these as parameters. The live positions form a pool; a step takes the best of them by score, where a score is the log of the
position's weight plus Gumbel noise, which makes the step a draw without replacement by weight. The newest positions are
always taken. Nothing here imitates a particular checkpoint, and no attention is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hisparse.errors import ConfigError

__all__ = ["LAYER_TYPES", "Order", "SelectionModel"]


class Order(Enum):
    """Order of the positions inside a step: how our indexer writes them, best first, or no order at all."""

    ASCENDING = "ascending"
    SCORE = "score"
    RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionModel:
    """Parameters of one layer's selections.

    Attributes:
        pool: live positions. skew: the i-th of them has weight `i ** -skew`; 0 = all alike.
        drift: members of the pool that are replaced by random positions before each step.
        recent: newest positions, selected in every step. top_k: distinct positions of a step, fewer if the pool is smaller.
        context: length of the sequence in the first step; it grows by one a step.
        shift: positions by which the whole pool moves in each step (a scan), wrapping at the end of the sequence.
        persistence: chance that a member keeps its noise for another step; 0 = steps are independent draws.
    """

    pool: int
    skew: float = 0.8
    drift: int = 16
    recent: int = 64
    top_k: int = 2048
    context: int = 131_072
    shift: int = 0
    persistence: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.pool <= self.context or not 0 <= self.recent <= self.top_k <= self.context:
            raise ConfigError(f"pool {self.pool}, recent {self.recent} and top_k {self.top_k} must fit context {self.context}")
        if self.drift < 0 or not 0 <= self.persistence < 1:
            raise ConfigError(f"drift must be at least 0 and persistence in [0, 1), got {self.drift}, {self.persistence}")

    def length(self, step: int) -> int:
        """Tokens of the sequence in a step; every selected position is below it."""
        return self.context + step

    def steps(self, num_steps: int, *, seed: int, order: Order = Order.ASCENDING) -> Iterator[NDArray[np.int64]]:
        """Distinct positions, int64 [<= top_k], of each step. A seed fixes the sets for every order.

        Example: `SelectionModel(pool=6000).steps(2, seed=0)` gives two arrays of 2,048 positions that share about half.
        """
        draw, shuffle = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        members = draw.choice(self.context, self.pool, replace=False)
        log_weight = -self.skew * np.log(np.arange(1, self.pool + 1))
        noise = draw.gumbel(size=self.pool)
        for step in range(num_steps):
            length = self.length(step)
            if step:
                members[draw.integers(self.pool, size=self.drift)] = draw.integers(length, size=self.drift)
                fresh = draw.gumbel(size=self.pool)
                noise = np.where(draw.random(self.pool) < self.persistence, noise, fresh)
            ranked = np.argsort(-(log_weight + noise), kind="stable")[: self.top_k]
            wanted = np.concatenate([np.arange(length - self.recent, length), (members[ranked] + self.shift * step) % length])
            first = np.sort(np.unique(wanted, return_index=True)[1])
            chosen = wanted[first][: self.top_k].astype(np.int64)
            if order is Order.ASCENDING:
                chosen = np.sort(chosen)
            elif order is Order.RANDOM:
                chosen = shuffle.permutation(chosen)
            yield chosen


LAYER_TYPES = {
    "sticky": SelectionModel(pool=6_000),
    "typical": SelectionModel(pool=8_000),
    "volatile": SelectionModel(pool=12_500),
    "scan": SelectionModel(pool=8_000, shift=1),
}
"""Three kinds of layers by how many positions they want to read, and one that hardly reads anything twice."""

"""Misses of the hot region's replacement policy against LRU, FIFO, LFU, random and Belady's optimum.

Selections come from `hisparse.trace.selection`, "ours" is the shipped state machine driven through `resolve`, row by row.
Bars: at most 1.05 x exact LRU + 10 rows per step for each kind of layer and size, and at 4,096 rows fewer than LRU summed
over the kinds. Exit code 1 with --check if a bar is missed. Nothing is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hisparse.bench import report
from hisparse.bench.progress import Progress
from hisparse.trace.policies import FIFO, LFU, LRU, Belady, Policy, Random
from hisparse.trace.selection import LAYER_TYPES, Order, SelectionModel
from hisparse.trace.shipped import Shipped

SIZES = (3072, 4096, 6144, 8192)
SUMMED = 4096
FACTOR, SLACK = 1.05, 10.0
KINDS = {
    **LAYER_TYPES,
    "fast drift": SelectionModel(pool=8_000, drift=64),
    "persistent": SelectionModel(pool=8_000, persistence=0.9),
}
"""The bars hold for every kind; the sums are over `LAYER_TYPES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How long, and how often with another seed. The first `warm` steps fill the region and do not count."""

    warm: int
    steps: int
    seeds: int


def misses(model: SelectionModel, rows: int, seed: int, order: Order, run: Run) -> dict[str, float]:
    """Mean misses per step of each policy over the same steps, the newest position's one included."""
    steps = list(model.steps(run.steps, seed=seed, order=order))
    positions = model.length(run.steps)
    ours = Shipped(rows, positions)
    policies: dict[str, Shipped | Policy] = {
        "ours": ours, "lru": LRU(rows, positions), "fifo": FIFO(rows, positions), "lfu": LFU(rows, positions),
        "random": Random(rows, positions, seed), "optimum": Belady(rows, positions, steps)}
    found = {name: [policy.step(selected) for selected in steps] for name, policy in policies.items()}
    ours.check()
    for counts in found.values():
        if sum(counts) < sum(found["optimum"]):
            raise AssertionError("a policy missed less than the optimum")
    return {name: statistics.mean(counts[run.warm:]) for name, counts in found.items()}


def measure(orders: Sequence[Order], run: Run, *, bars: bool) -> Iterator[report.Row]:
    for order in orders:
        summed = {"ours": 0.0, "lru": 0.0}
        for kind, model in KINDS.items():
            for rows in SIZES:
                seeds = [misses(model, rows, seed, order, run) for seed in range(run.seeds)]
                mean = {name: statistics.mean(found[name] for found in seeds) for name in seeds[0]}
                lru = mean["lru"]
                yield report.Row(case=f"{kind}, {rows:,} rows, {order.value}", value=mean["ours"], unit="misses/step",
                                 bar=FACTOR * lru + SLACK if bars else None, yardstick=(lru, "x LRU"),
                                 max=max(found["ours"] for found in seeds),
                                 detail={name: value for name, value in mean.items() if name != "ours"})
                if rows == SUMMED and kind in LAYER_TYPES:
                    summed = {name: summed[name] + mean[name] for name in summed}
        yield report.Row(case=f"sum of {len(LAYER_TYPES)} kinds, {SUMMED:,} rows, {order.value}", value=summed["ours"],
                         unit="misses/step", bar=summed["lru"] if bars else None, yardstick=(summed["lru"], "x LRU"))


def run(*, quick: bool = False, orders: Sequence[str] = (), seeds: int = 2, progress: Progress | None = None) -> report.Result:
    """`quick`: a few steps, no bars. `orders`: of a step's positions. `seeds`: runs of each cell, averaged.

    Raises:
        ConfigError: unknown order.
    """
    progress = progress or Progress()
    chosen = [Order(name) for name in report.chosen("--order", orders, [order.value for order in Order])]
    length = Run(warm=4, steps=8, seeds=1) if quick else Run(warm=140, steps=340, seeds=seeds)
    header, rows = report.facts("policy", report.Yardsticks.measure(repeats=1)), []
    progress.expect(len(chosen) * (1 + len(KINDS) * len(SIZES)))
    for row in measure(chosen, length, bars=not quick):
        rows.append(row)
        progress.step(f"{row.case}: {row.value:,.0f}")
    return header, rows

"""Steps of a decode engine: steady, all requests sealing at once, and over the number and length of requests."""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from typing import Any

from hisparse.bench.control_plane.context import Collections, Context, K, p90, size
from hisparse.bench.control_plane.rig import BLOCK, MAX_MODEL_LEN, PHASES, Load, Rig, difference
from hisparse.bench.report import Row


def steady(context: Context) -> list[Row]:
    """256 requests of 128k, default configuration: the bar."""
    return _steady(context, "steady decode", context.load(256, 128 * K), bar=2.0)


def steady_rig(context: Context) -> Rig:
    """What `steady` measures."""
    return Rig(context.layout, context.load(256, 128 * K))


def steady_fixed(context: Context) -> list[Row]:
    return _steady(context, "steady decode, hot_rows_max=hot_rows", context.load(256, 128 * K, elastic=False))


def steady_growing(context: Context) -> list[Row]:
    """Copies complete in the step that enqueued them (regions grow only when no copy is under way)."""
    load = context.load(256, 128 * K, growing=True, ack_delay=0)
    return _steady(context, "steady decode, regions growing", load, repeats=1)


def steady_1024(context: Context) -> list[Row]:
    return _steady(context, "steady decode", context.load(1024, 128 * K), bar=8.0)


def _steady(context: Context, name: str, load: Load, *, bar: float | None = None, repeats: int = 3) -> list[Row]:
    steps = 64 if context.quick else 200
    rig = Rig(context.layout, load)
    before = rig.manager.stats()
    runs, phases = [], []
    with Collections() as collections:
        for _ in range(repeats):
            times = []
            for _ in range(steps):
                times.append(rig.step() * 1e3)
                phases.append(rig.phases_s)
            runs.append(times)
    after = rig.manager.stats()
    changes = difference(after, before)
    num_steps = repeats * steps
    _check_steady(rig, changes, num_steps)
    frozen = _with_frozen_heap(rig, steps)
    rig.manager.check()
    every = [value for times in runs for value in times]
    detail: dict[str, Any] = {f"{phase}_us": statistics.median(parts[phase] for parts in phases) * 1e6 for phase in PHASES}
    detail |= {f"{counter}_per_step": count / num_steps for counter, count in changes.items() if count}
    detail |= {"median_frozen_ms": statistics.median(frozen), "max_frozen_ms": max(frozen),
               "longest_collection_ms": collections.longest_s * 1e3,
               "host_pages_per_run": after.host_pages / after.host_runs, "steps": num_steps}
    name = f"{name} {load.num_requests}x{size(load.num_tokens)}"
    return [context.row(name, statistics.median(every), "ms", bar=bar, best=min(map(statistics.median, runs)),
                        p90=p90(every), max=max(every), detail=detail)]


def _with_frozen_heap(rig: Rig, steps: int) -> list[float]:
    """The same after gc.freeze(), as servers do."""
    gc.collect()
    gc.freeze()
    try:
        return [rig.step() * 1e3 for _ in range(steps)]
    finally:
        gc.unfreeze()


def _check_steady(rig: Rig, changes: dict[str, int], num_steps: int) -> None:
    """The shape is what it claims: in each step a 64th of the requests seals a page, writes it back by mirrors alone,
    publishes and unpins it, and takes the place of another loose page."""
    want = rig.load.num_requests * num_steps / BLOCK
    slack = max(2.0, 0.1 * want)
    for counter in ("spills_planned", "spills_completed", "spills_without_bytes", "pages_unpinned", "pages_published"):
        assert abs(changes[counter] - want) <= slack, f"{counter}: {changes[counter]} in {num_steps} steps, expected {want}"
    if not rig.load.growing:
        assert changes["pages_reused"] >= 0.8 * want - slack, f"{changes['pages_reused']} pages reused, expected {want}"
    stats = rig.manager.stats()
    assert stats.hot_seats == rig.load.num_requests + stats.loads_in_flight, f"{stats.hot_seats} hot regions"
    assert stats.pages_host_only > 0.5 * rig.load.num_requests * rig.layout.pages(rig.load.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """64 steps in which every request seals one page, all in the same step."""

    base_s: float
    """Of a step in which no page changes."""
    seal_s: float
    after_s: float
    """The step after: copies complete, pages go loose, every request takes a new page from a loose one."""

    @property
    def changes_s(self) -> float:
        return max(self.seal_s + self.after_s - 2 * self.base_s, 0.0)


def _cycles(rig: Rig, count: int) -> list[Cycle]:
    _until_sealing(rig)
    rig.step()
    out = []
    for _ in range(count):
        *base, seal = _until_sealing(rig)
        assert rig.num_spills == rig.load.num_requests and len(base) == BLOCK - 2
        out.append(Cycle(base_s=statistics.median(base), seal_s=seal, after_s=rig.step()))
    return out


def _until_sealing(rig: Rig) -> list[float]:
    """Runs steps up to the next one that seals pages; seconds of each, that one last."""
    times = [rig.step()]
    while not rig.num_spills:
        times.append(rig.step())
    return times


def all_seal(context: Context) -> list[Row]:
    """The worst step: every request seals in the same one."""
    load = context.load(256, 128 * K, staggered=False)
    rig = Rig(context.layout, load)
    cycles = _cycles(rig, 2 if context.quick else 5)
    rig.manager.check()
    worst = [max(cycle.seal_s, cycle.after_s) * 1e3 for cycle in cycles]
    per_page = statistics.median(cycle.changes_s for cycle in cycles) / load.num_requests * 1e6
    return [context.row(
        f"all seal in one step {load.num_requests}x{size(load.num_tokens)}", statistics.median(worst), "ms",
        best=min(worst), max=max(worst), detail={
            "per_changed_page_us": per_page, "seal_step_ms": statistics.median(c.seal_s for c in cycles) * 1e3,
            "step_after_ms": statistics.median(c.after_s for c in cycles) * 1e3,
            "quiet_step_ms": statistics.median(c.base_s for c in cycles) * 1e3})]


def growth(context: Context) -> list[Row]:
    """Cost per changed page over the number of requests, and over their length. Hot regions of a fixed size: they would
    grow in the steps in which no page changes."""
    if context.quick:
        points = [(256, 8 * K), (512, 8 * K)]
    else:
        points = [(64, 8 * K), (256, 8 * K), (1024, 8 * K), (4096, 8 * K), (64, 128 * K), (64, MAX_MODEL_LEN - 16 * K)]
    rows = []
    for num_requests, num_tokens in points:
        load = context.load(num_requests, num_tokens, staggered=False, elastic=False, steps=BLOCK * 6)
        rig = Rig(context.layout, load)
        cycles = _cycles(rig, 2 if context.quick else 3)
        rig.manager.check()
        del rig
        gc.collect()
        values = [cycle.changes_s / load.num_requests * 1e6 for cycle in cycles]
        base_us = statistics.median(cycle.base_s for cycle in cycles) * 1e6
        rows.append(context.row(
            f"growth, per changed page, {load.num_requests}x{size(load.num_tokens)}", statistics.median(values), "us/page",
            best=min(values), max=max(values),
            detail={"quiet_step_us": base_us, "quiet_step_per_request_us": base_us / load.num_requests}))
    spread = max(row.value for row in rows) / min(row.value for row in rows)
    return [*rows, context.row("growth, per changed page, most/least", spread, "x")]

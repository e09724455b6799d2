"""Scheduler side of the cache at real shapes: decode steps, admission, page keys, spills, memory.

Uses nothing but the public `KVCacheManager`. Exit code 1 with --check if a bar is missed.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from hisparse.bench import report
from hisparse.bench.control_plane import admission, churn, decode, memory, transfers
from hisparse.bench.control_plane.context import Context
from hisparse.bench.control_plane.rig import LAYOUTS
from hisparse.bench.progress import Progress

CASES: dict[str, Callable[[Context], list[report.Row]]] = {
    "steady": decode.steady,
    "steady_fixed": decode.steady_fixed,
    "steady_growing": decode.steady_growing,
    "steady_1024": decode.steady_1024,
    "all_seal": decode.all_seal,
    "churn": churn.churn,
    "page_keys": admission.page_keys,
    "admit": admission.admit,
    "admit_busy": admission.admit_busy,
    "spills": transfers.spills,
    "memory": memory.memory,
    "growth": decode.growth,
    "admit_growth": admission.admit_growth,
}


def run(*, shapes: Sequence[str] = (), only: Sequence[str] = (), quick: bool = False,
        progress: Progress | None = None) -> report.Result:
    """Facts of the run, and the rows of the named cases on each shape; empty: all. `quick`: tiny sizes, no bars.

    The yardsticks are measured anew before and after every case, for others may use the machine; a row is compared with
    the one before.

    Raises:
        ConfigError: unknown shape or case.
    """
    shapes, names = report.chosen("--shape", shapes, LAYOUTS), report.chosen("--only", only, CASES)
    progress, repeats = progress or Progress(), 1 if quick else 5
    progress.expect(len(shapes) * len(names))
    before = report.Yardsticks.measure(repeats)
    header = report.facts("control-plane", before)
    rows: list[report.Row] = []
    for shape in shapes:
        for name in names:
            start = time.perf_counter()
            found = CASES[name](Context(shape=shape, quick=quick, yardsticks=before))
            after = before if quick else report.Yardsticks.measure(repeats)
            around = {"lookup_ns_before": before.lookup_ns, "lookup_ns_after": after.lookup_ns,
                      "cold_lookup_ns_before": before.cold_lookup_ns, "cold_lookup_ns_after": after.cold_lookup_ns}
            rows += [replace(row, around=around) for row in found]
            progress.step(f"{shape} {name}: {time.perf_counter() - start:.1f} s; ns per lookup {before.lookup_ns:.1f} before, "
                          f"{after.lookup_ns:.1f} after; cold {before.cold_lookup_ns:.1f}, {after.cold_lookup_ns:.1f}")
            before = after
    return header, rows


def profile(shape: str, *, quick: bool) -> None:
    """Prints where a steady step's time goes, by own time."""
    context = Context(shape=shape, quick=quick, yardsticks=report.Yardsticks.measure(repeats=1))
    rig = decode.steady_rig(context)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(200):
        rig.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)

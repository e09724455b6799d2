"""Scheduler side of the cache at real shapes: decode steps, admission, page keys, spills, memory.

    python -m benchmarks.bench_control_plane [--quick] [--shape NAME] [--only NAME] [--json PATH] [--check]

Uses nothing but the public `KVCacheManager`. Exit code 1 with --check if a bar is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hisparse.bench import report
from hisparse.bench.control_plane import admission, decode, memory, transfers
from hisparse.bench.control_plane.context import Context
from hisparse.bench.control_plane.rig import LAYOUTS

CASES: dict[str, Callable[[Context], list[report.Row]]] = {
    "steady": decode.steady,
    "steady_fixed": decode.steady_fixed,
    "steady_growing": decode.steady_growing,
    "steady_1024": decode.steady_1024,
    "all_seal": decode.all_seal,
    "page_keys": admission.page_keys,
    "admit": admission.admit,
    "admit_busy": admission.admit_busy,
    "spills": transfers.spills,
    "memory": memory.memory,
    "growth": decode.growth,
    "admit_growth": admission.admit_growth,
}


def measure(shapes: Sequence[str], names: Sequence[str], *, quick: bool) -> tuple[dict[str, object], list[report.Row]]:
    """Facts of the run, and the rows of the named cases on each shape.

    The yardsticks are measured anew before and after every case, for others may use the machine; a row is compared with
    the one before.
    """
    repeats = 1 if quick else 5
    before = report.Yardsticks.measure(repeats)
    header = report.facts("bench_control_plane", before)
    rows: list[report.Row] = []
    for shape in shapes:
        for name in names:
            start = time.perf_counter()
            found = CASES[name](Context(shape=shape, quick=quick, yardsticks=before))
            after = before if quick else report.Yardsticks.measure(repeats)
            around = {"lookup_ns_before": before.lookup_ns, "lookup_ns_after": after.lookup_ns,
                      "cold_lookup_ns_before": before.cold_lookup_ns, "cold_lookup_ns_after": after.cold_lookup_ns}
            rows += [replace(row, around=around) for row in found]
            print(f"{shape} {name}: {time.perf_counter() - start:.1f} s; ns per lookup {before.lookup_ns:.1f} before, "
                  f"{after.lookup_ns:.1f} after; cold {before.cold_lookup_ns:.1f}, {after.cold_lookup_ns:.1f}",
                  file=sys.stderr, flush=True)
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_control_plane", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every measurement at a tiny size, no bars: a smoke test")
    parser.add_argument("--shape", choices=[*LAYOUTS, "all"], default="all")
    parser.add_argument("--only", choices=list(CASES), action="append", metavar="NAME", help=f"one of {', '.join(CASES)}")
    parser.add_argument("--json", type=Path, metavar="PATH", help="one JSON object a line; a table goes beside it (.md)")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bar is missed")
    parser.add_argument("--profile", action="store_true", help="profile the steady step instead of measuring")
    args = parser.parse_args(argv)
    shapes = list(LAYOUTS) if args.shape == "all" else [args.shape]
    if args.profile:
        for shape in shapes:
            profile(shape, quick=args.quick)
        return 0
    header, rows = measure(shapes, args.only or list(CASES), quick=args.quick)
    return report.finish(header, rows, path=args.json, check=args.check)


if __name__ == "__main__":
    sys.exit(main())

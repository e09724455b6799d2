"""Imports of prefill/decode: 2,048 pages from one engine's pools into another's, end to end, and what control costs a page.

    python -m benchmarks.bench_import [--device cpu|cuda] [--only NAME] [--quick] [--json PATH] [--check]

Two processes, each with pools, worker half, transfer thread and scheduler half as in an engine, joined by NIXL (or one process
and the loopback transport). Ratios are to a plain memcpy of the same bytes by one thread in the same run; on CUDA the ceilings
are the copy engine and the link between the GPUs. Every byte of the first import of a case is compared: wrong bytes, no number.
Exit code 1 with --check if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hisparse.bench import report
from hisparse.bench.imports import cases


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_import", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where both engines keep their KV")
    parser.add_argument("--quick", action="store_true", help="64 pages, no bars: a smoke test")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="cases whose name has this word")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="imports timed per case")
    parser.add_argument("--slot-pages", type=int, metavar="N", help="pages of a staging slot: 8, on CUDA 64")
    parser.add_argument("--json", type=Path, metavar="PATH", help="one JSON object a line; a table goes beside it (.md)")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bar is missed")
    args = parser.parse_args(argv)
    yardsticks = report.Yardsticks.measure(2) if args.device == "cpu" else None
    header = report.facts("bench_import", yardsticks)
    rows: list[report.Row] = []
    slot_pages = args.slot_pages or (64 if args.device == "cuda" else 8)
    chosen = [case for case in cases.all_cases(args.device, slot_pages) if all(word in case.name for word in args.only)]
    start = time.perf_counter()
    for row in cases.measure_all(chosen, quick=args.quick, repeats=args.repeats):
        rows.append(row)
        print(f"{row.case}: {row.value:.3g} {row.unit}, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return report.finish(header, rows, path=args.json, check=args.check)


if __name__ == "__main__":
    sys.exit(main())

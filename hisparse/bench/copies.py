"""Writing rows and copying pages on one GPU: append with its mirror, spill, restore, import scatter, gather.

    python -m benchmarks.bench_copy [--quick] [--only NAME] [--json PATH] [--check]

Every number is checked against the bytes it should have written first: wrong bytes, no number. Ceilings (the copy
engine, an append without mirror) are measured in the same run. Exit code 1 with --check if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hisparse.bench import report
from hisparse.bench.data_plane import append, pages

CASES: dict[str, Callable[[bool], list[report.Row]]] = {"append": append.measure, "pages": pages.measure}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_copy", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, no bars: a smoke test")
    parser.add_argument("--only", choices=list(CASES), action="append", metavar="NAME", help=f"one of {', '.join(CASES)}")
    parser.add_argument("--json", type=Path, metavar="PATH", help="one JSON object a line; a table goes beside it (.md)")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bar is missed")
    args = parser.parse_args(argv)
    header, rows = report.facts("bench_copy"), []
    for name in args.only or list(CASES):
        start = time.perf_counter()
        rows += CASES[name](args.quick)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return report.finish(header, rows, path=args.json, check=args.check)


if __name__ == "__main__":
    sys.exit(main())

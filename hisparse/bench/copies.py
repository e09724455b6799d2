"""Writing rows and copying pages on one GPU: append and its share of the mirror copy, spill, restore, import scatter, gather.

Every number is checked against the bytes it should have written first: wrong bytes, no number. Ceilings (the copy
engine, an append alone) are measured in the same run. Exit code 1 with --check if a bar is missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hisparse.bench import report
from hisparse.bench.catalogue import need_gpu
from hisparse.bench.data_plane import append, pages
from hisparse.bench.progress import Progress

CASES: dict[str, Callable[[bool], list[report.Row]]] = {"append": append.measure, "pages": pages.measure}


def run(*, quick: bool = False, only: Sequence[str] = (), progress: Progress | None = None) -> report.Result:
    """`quick`: small sizes, no bars: a smoke test. Raises HiSparseError: no CUDA device; ConfigError: unknown case."""
    progress, names = progress or Progress(), report.chosen("--only", only, CASES)
    need_gpu("copy")
    header, rows = report.facts("copy"), []
    progress.expect(len(names))
    for name in names:
        start = time.perf_counter()
        rows += CASES[name](quick)
        progress.step(f"{name}: {time.perf_counter() - start:.1f} s")
    return header, rows

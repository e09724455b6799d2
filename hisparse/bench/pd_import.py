"""Imports of prefill/decode: 2,048 pages from one engine's pools into another's, end to end, and what control costs a page.

Two processes, each with pools, worker half, transfer thread and scheduler half as in an engine, joined by NIXL (or one process
and the loopback transport). Ratios are to a plain memcpy of the same bytes by one thread in the same run; on CUDA the ceilings
are the copy engine and the link between the GPUs. Every byte of the first import of a case is compared: wrong bytes, no number.
Exit code 1 with --check if a bar is missed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hisparse.bench import report
from hisparse.bench.catalogue import need_gpu
from hisparse.bench.imports import cases
from hisparse.bench.progress import Progress
from hisparse.errors import ConfigError


def run(*, device: str = "cpu", quick: bool = False, only: Sequence[str] = (), repeats: int = 7, slot_pages: int | None = None,
        progress: Progress | None = None) -> report.Result:
    """Times imports.

    Args:
        device: where both engines keep their KV. quick: 64 pages, no bars: a smoke test. only: words of a case's name, all of
            which it must have. repeats: imports timed per case. slot_pages: of a staging slot; default as an engine.
    Raises:
        HiSparseError: no CUDA device. ConfigError: no case has these words.
    """
    progress = progress or Progress()
    if device == "cuda":
        need_gpu("import --device cuda")
    every = cases.all_cases(device, slot_pages)
    chosen = [case for case in every if all(word in case.name for word in only)]
    if not chosen:
        raise ConfigError(f"no case's name has {' and '.join(map(repr, only))}; names are like {every[0].name!r}")
    header = report.facts("import", report.Yardsticks.measure(2) if device == "cpu" else None)
    rows: list[report.Row] = []
    start = time.perf_counter()
    progress.expect(len(chosen))
    for row in cases.measure_all(chosen, quick=quick, repeats=repeats):
        rows.append(row)
        progress.step(f"{row.case}: {row.value:.3g} {row.unit}, {time.perf_counter() - start:.1f} s")
    return header, rows

"""Memory of all metadata of a steady state, measured in a process of its own."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

from hisparse.bench.control_plane.context import Context, K, size
from hisparse.bench.control_plane.rig import LAYOUTS, Load, Rig
from hisparse.bench.report import Row

MB = 1e6


def memory(context: Context) -> list[Row]:
    """Bytes that the manager holds for 256 requests of 128k in the steady state, all prompts different.

    The number is tracemalloc's (what is allocated now, arrays included); a second process tells how much its resident
    set grew, which also counts what the allocator kept of the set-up.
    """
    load = context.load(256, 128 * K)
    held = _child(context, load, traced=True)
    grown = _child(context, load, traced=False)
    pages = load.num_requests * context.layout.pages(load.num_tokens)
    return [context.row(
        f"metadata {load.num_requests}x{size(load.num_tokens)}", held / MB, "MB", bar=200.0,
        detail={"rss_growth_mb": grown / MB, "bytes_per_page": held / pages})]


def _child(context: Context, load: Load, *, traced: bool) -> int:
    command = [sys.executable, "-m", "hisparse.bench.control_plane.memory", context.shape, str(load.num_requests),
               str(load.num_tokens), str(load.max_model_len), *(["--traced"] if traced else [])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return int(json.loads(result.stdout))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _measure(shape: str, load: Load, *, traced: bool) -> int:
    layout = LAYOUTS[shape]()
    gc.collect()
    if traced:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0] if traced else _resident_bytes()
    rig = Rig(layout, load)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0] if traced else _resident_bytes()
    rig.manager.check()
    return after - before


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("num_requests", type=int)
    parser.add_argument("num_tokens", type=int)
    parser.add_argument("max_model_len", type=int)
    parser.add_argument("--traced", action="store_true")
    args = parser.parse_args()
    print(_measure(args.shape, Load(num_requests=args.num_requests, num_tokens=args.num_tokens,
                                    max_model_len=args.max_model_len), traced=args.traced))

"""The fused resolver against its floors: launch, table look-up, and a copy-only launch of the same misses.

One layer call of an index-group leader in a CUDA graph; top_k 2,048, context 131,072; L2 and translations of host memory
cold before each launch, inputs rotated, top-k in random order. The host pool is scattered in 64-row blocks over `span` GiB.
A case whose row ids, rows or misses are wrong gives no number. Exit code 1 with --check if a bar is missed.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hisparse.bench import gpu, report
from hisparse.bench.catalogue import need_gpu
from hisparse.bench.progress import Progress
from hisparse.ops import HotState, cuda
from hisparse.ops.cuda.floors import floor_kernels
from hisparse.ops.cuda.module import Kernel
from hisparse.ops.cuda.resolve import Geometry
from hisparse.testing.pinned_alias import alias_on_cuda

TOP_K, CONTEXT, BLOCK = 2048, 131_072, 64
PAGES = CONTEXT // BLOCK
SHARES = (0.0, 0.02, 0.05, 0.10, 0.25, 1.0)
BATCHES = (1, 16, 64, 128, 256)
GIB = 1 << 30
BARS = {  # data-plane.md "Where to be", us at 656 B and 4,096 slots; larger batches: 1.05 x (copy + look-up) of the same run
    (1, 0): 4, (1, 41): 10, (1, 205): 18, (1, 2048): 66,
    (16, 0): 5, (16, 41): 32, (16, 205): 126, (16, 2048): 870,
    (64, 0): 7, (256, 0): 20,
}
OTHER_SHAPE = 1.15
"""Allowance for 6,144 slots or 1,152 B rows."""


class Bench:
    """Tables, rows and selections of `batch` requests; `placement` says where their host blocks are.

    Args:
        pool: uint8 [bytes], mapped host memory. span_rows: rows of the layer's host view.
        extents: blocks of a request contiguous; False: scattered over the span.
    """

    def __init__(self, batch: int, row_bytes: int, hot: int, pool: Tensor, span_rows: int, *, extents: bool = False,
                 seed: int = 0) -> None:
        device, make = "cuda", torch.Generator("cuda").manual_seed(seed)
        self.batch, self.row_bytes, self.hot, self.make = batch, row_bytes, hot, make
        self.host = pool[: span_rows * row_bytes].view(span_rows, row_bytes)
        blocks = span_rows // BLOCK - 1
        hot_blocks = hot // BLOCK
        if extents:
            start = torch.arange(batch, device=device) * PAGES % max(1, blocks - PAGES)
            self.source = (1 + start[:, None] + torch.arange(PAGES, device=device)).int()
        else:
            self.source = torch.randint(1, blocks, (batch, PAGES), device=device, generator=make, dtype=torch.int32)
        self.resident = torch.zeros(batch, PAGES, device=device, dtype=torch.int32)
        order = torch.randperm(batch * hot_blocks, device=device, generator=make)
        self.hot_table = (1 + order).int().view(batch, hot_blocks)
        self.rows = torch.zeros((1 + batch * hot_blocks) * BLOCK, row_bytes, device=device, dtype=torch.uint8)
        self.hot_rows = torch.full((batch,), hot, device=device, dtype=torch.int32)
        self.seats = torch.randperm(batch, device=device, generator=make).int()
        self.seq = torch.full((batch,), CONTEXT, device=device, dtype=torch.int64)
        self.state = HotState.empty(batch, hot, CONTEXT, device)
        self.status = torch.zeros(4, device=device, dtype=torch.int32)
        self.pool = torch.stack([torch.randperm(CONTEXT, device=device, generator=make) for _ in range(batch)])
        tags = self.pool[:, :hot]
        self.state.slot_tag.copy_(tags)
        slots = torch.arange(hot, device=device, dtype=torch.int16).expand(batch, hot)
        self.state.pos_slot.scatter_(1, tags, slots)
        self.state.use[:, :TOP_K] = 3
        self.state.use[:, TOP_K:] = torch.randint(0, 3, (batch, hot - TOP_K), device=device, generator=make, dtype=torch.uint8)
        self.state.hand.copy_(torch.randint(0, hot, (batch,), device=device, generator=make))
        self._saved = [x.clone() for x in (self.state.slot_tag, self.state.pos_slot, self.state.use, self.state.hand)]

    def restore(self) -> None:
        for now, saved in zip((self.state.slot_tag, self.state.pos_slot, self.state.use, self.state.hand), self._saved):
            now.copy_(saved)

    def selections(self, misses: int, count: int) -> list[Tensor]:
        """Top-k of each launch: hits from the rows used most, misses that no other launch selects."""
        found = []
        for i in range(count):
            kept = torch.rand(self.batch, TOP_K, device="cuda", generator=self.make).argsort(1)[:, : TOP_K - misses]
            first = self.hot + i * misses
            chosen = torch.cat([self.pool.gather(1, kept), self.pool[:, first : first + misses]], 1)
            mixed = torch.rand(chosen.shape, device="cuda", generator=self.make).argsort(1)
            found.append(chosen.gather(1, mixed).int()[self.seats.long()].contiguous())  # row n belongs to seats[n]
        return found

    def resolve(self, topk: Tensor, geometry: Geometry | None = None) -> Any:
        return cuda.resolve(
            topk, self.seats, self.seq, resident_table=self.resident, source_table=self.source, hot_table=self.hot_table,
            hot_rows=self.hot_rows, state=self.state, block_size=BLOCK, rows_per_block=BLOCK, row_offset=0, rows=self.rows,
            host_rows=self.host, status=self.status, geometry=geometry)

    def check(self, topk: Tensor, found: Any) -> None:
        """Raises unless every id names the slot that the state gives the position, and new rows hold the host's bytes."""
        seats = self.seats.long()[:, None]
        slot = self.state.pos_slot[seats, topk.long()].long()
        want = self.hot_table[seats, slot.clamp(min=0) // BLOCK].long() * BLOCK + slot % BLOCK
        if not torch.equal(want, found.row_ids.long()) or bool((slot < 0).any()) or int(self.status[0]):
            raise RuntimeError(f"wrong row ids (status {self.status.tolist()})")
        plan = found.plan.flat()
        some = torch.randperm(plan.count, device="cuda")[:512]
        if not torch.equal(self.rows[plan.device_rows[some]], self.host[plan.host_rows[some]]):
            raise RuntimeError("wrong bytes")

    def measure(self, timer: gpu.ColdTimer, misses: int, *, launches: int, replays: int, geometry: Geometry | None = None,
                copies: bool = True) -> dict[str, float]:
        """Median us of the resolver, and of a copy-only launch of the same plans; actual misses per request."""
        topks = self.selections(misses, launches)
        results: list[Any] = [None] * launches

        def launch(i: int) -> Any:
            def run() -> None:
                results[i] = self.resolve(topks[i], geometry)
            return run

        self.restore()
        times = timer.us([launch(i) for i in range(launches)], prepare=self.restore, replays=replays)
        self.check(topks[-1], results[-1])
        actual = float(torch.stack([r.miss.float().mean() for r in results]).mean())
        out = {"us": statistics.median(times), "misses": actual, "best": min(times),
               "p90": statistics.quantiles(times, n=10)[-1]}
        if not misses:
            out["warm_us"] = statistics.median(timer.us([launch(i) for i in range(launches)], prepare=self.restore, cold=False))
        if misses and copies:
            plans = [r.plan for r in results]
            out["copy_us"] = statistics.median(
                timer.us([lambda p=p: cuda.replay(p, 0, self.rows, self.host) for p in plans], replays=replays))
        return out


def lookup_floor(bench: Bench, timer: gpu.ColdTimer, floors: dict[str, Kernel], replays: int) -> float:
    """Median us of the bare table reads of the same selections."""
    out = torch.empty(bench.batch, TOP_K, dtype=torch.int32, device="cuda")

    def launch(topk: Tensor) -> Any:
        def run() -> None:
            floors["lookup_floor"]((TOP_K // 256, bench.batch), 256, (
                topk, TOP_K, bench.seats, bench.resident, PAGES, bench.state.pos_slot, CONTEXT, bench.hot_table,
                bench.hot_table.shape[1], out))
        return run

    return statistics.median(timer.us([launch(t) for t in bench.selections(0, 4)], replays=replays))


def launch_floor(timer: gpu.ColdTimer, floors: dict[str, Kernel]) -> float:
    return statistics.median(timer.us([lambda: floors["nothing"]((1,), 32, ())] * 8))


def main_cases(pool: Tensor, timer: gpu.ColdTimer, quick: bool, progress: Progress) -> list[report.Row]:
    rows, floors = [], floor_kernels()
    empty = launch_floor(timer, floors)
    rows.append(report.Row(case="launch floor", value=empty, unit="us"))
    shapes = [(656, 4096)] if quick else list(itertools.product((656, 1152), (4096, 6144)))
    batches, shares = ((1, 16, 256), (0.0, 0.02, 0.10, 1.0)) if quick else (BATCHES, SHARES)
    progress.expect(len(shapes) * len(batches) * len(shares))
    for (row_bytes, hot), batch in itertools.product(shapes, batches):
        span_rows = pool.numel() // row_bytes // BLOCK * BLOCK
        bench = Bench(batch, row_bytes, hot, pool, span_rows)
        floor = lookup_floor(bench, timer, floors, 5)
        for share in shares:
            misses = round(share * TOP_K)
            got = bench.measure(timer, misses, launches=8 if misses < 205 else 4,
                                replays=3 if batch * misses > 50_000 else 25 if batch * misses < 1000 else 9)
            copy = got.get("copy_us", 0.0)
            if batch >= 64 and misses:
                bar: float | None = 1.05 * (copy + floor)
            else:
                bar = BARS.get((batch, misses))
                bar = bar if bar is None or (row_bytes, hot) == (656, 4096) else bar * OTHER_SHAPE
            rows.append(report.Row(
                case=f"B={batch} miss={misses} row={row_bytes} hot={hot} span={pool.numel() / GIB:.0f}", value=got["us"],
                unit="us", bar=bar, yardstick=(copy + floor, "copy+lookup"), best=got["best"], p90=got["p90"],
                detail={"misses_seen": got["misses"], "copy_us": copy, "lookup_us": floor, "launch_us": empty,
                        "gb_per_s": got["misses"] * batch * row_bytes / got["us"] / 1e3,
                        **({"warm_us": got["warm_us"]} if "warm_us" in got else {})}))
            progress.step(f"{rows[-1].case}: {got['us']:.1f} us, copy {copy:.1f}, floor {floor:.1f}, seen {got['misses']:.0f}")
    return rows


def resident_cases(pool: Tensor, timer: gpu.ColdTimer, quick: bool, progress: Progress) -> list[report.Row]:
    """Nothing is hot: every page is resident, requests have no region."""
    rows = []
    for batch in (1, 16, 64, 256):
        bench = Bench(batch, 656, 4096, pool, 1 << 16)
        bench.hot_rows.zero_()
        bench.state.pos_slot.fill_(-1)
        bench.resident.copy_(torch.randint(1, 1 << 15, (batch, PAGES), device="cuda"))
        topks = bench.selections(0, 8)
        times = timer.us([functools.partial(bench.resolve, topk) for topk in topks])
        found = bench.resolve(topks[0])
        seats, at = bench.seats.long()[:, None], topks[0].long()
        if not torch.equal(found.row_ids.long(), bench.resident[seats, at // BLOCK].long() * BLOCK + at % BLOCK):
            raise RuntimeError("wrong row ids")
        rows.append(report.Row(case=f"B={batch} all resident", value=statistics.median(times), unit="us",
                               bar=3.0 if batch == 1 else None, best=min(times)))
    return rows


def locality_cases(pool: Tensor, timer: gpu.ColdTimer, quick: bool, progress: Progress) -> list[report.Row]:
    """Host blocks in extents within the span that the requests need, against the same misses scattered over the pool."""
    rows, row_bytes = [], 656
    for batch, span in ((16, 2.0), (64, 5.1)):
        span = min(span, pool.numel() / GIB)
        near_rows = int(span * GIB) // row_bytes // BLOCK * BLOCK
        far_rows = pool.numel() // row_bytes // BLOCK * BLOCK
        near = Bench(batch, row_bytes, 4096, pool, near_rows, extents=True).measure(timer, 205, launches=4, replays=7)
        far = Bench(batch, row_bytes, 4096, pool, far_rows).measure(timer, 205, launches=4, replays=7)
        case = f"B={batch} miss=205 row={row_bytes} hot=4096 span={span}"
        rows.append(report.Row(case=f"{case}: share of copy-only", value=near["copy_us"] / near["us"], unit="x", bar=0.95,
                               more_is_better=True, detail=near))
        rows.append(report.Row(case=f"{case}: rate over scattered", value=far["us"] / near["us"], unit="x", bar=1.15,
                               more_is_better=True, detail=far))
    return rows


def tune(pool: Tensor, timer: gpu.ColdTimer) -> None:
    """Prints the time of launch geometries, to choose `Geometry.choose` by."""
    tried = {1: (8, 16), 16: (4, 8), 64: (1, 2, 4), 256: (1, 2)}
    for (batch, clusters), misses in itertools.product(tried.items(), (0, 41, 205)):
        bench = Bench(batch, 656, 4096, pool, pool.numel() // 656 // BLOCK * BLOCK)
        base, line = Geometry.choose(batch, 1, TOP_K, 4096), []
        shapes = itertools.product(clusters, (128, 256), (1, 2, 3) if batch >= 64 else (1,), (2, 4, 8) if misses else (4,))
        for cluster, threads, per_sm, unroll in shapes:
            if threads == 128 and batch > 1:
                continue
            geometry = replace(base, cluster=cluster, threads=threads, ctas_per_sm=per_sm, groups=256 // threads, unroll=unroll)
            name = f"{cluster}x{threads}/{per_sm} u{unroll}"
            try:
                got = bench.measure(timer, misses, launches=4, replays=5, geometry=geometry, copies=False)
                line.append(f"{name}: {got['us']:.1f}")
            except Exception as error:
                line.append(f"{name}: {type(error).__name__} {str(error)[:60]}")
        print(f"B={batch} miss={misses}: " + "  ".join(line), flush=True)


CASES = {"main": main_cases, "resident": resident_cases, "locality": locality_cases}


def run(*, quick: bool = False, only: Sequence[str] = (), span_gib: float = 16.0, tuning: bool = False,
        progress: Progress | None = None) -> report.Result:
    """`quick`: fewer cases. `span_gib`: host pool of the main cases. `tuning`: prints times of launch geometries instead.

    Raises:
        HiSparseError: no CUDA device. ConfigError: unknown case.
    """
    names = report.chosen("--only", only, CASES)
    need_gpu("resolver")
    header = report.facts("resolver")
    pool = alias_on_cuda(torch.empty(int(span_gib * GIB), dtype=torch.uint8, pin_memory=True))
    for part in pool.split(1 << 30):
        part.view(torch.int64).random_()
    other = alias_on_cuda(torch.zeros((2 << 30) // 4096, 4096, dtype=torch.uint8, pin_memory=True))
    timer = gpu.ColdTimer(other)
    if tuning:
        tune(pool, timer)
        return header, []
    return header, [row for name in names for row in CASES[name](pool, timer, quick, progress or Progress())]

"""Sparse MLA on one GPU at the real widths (latent 512, rope 64, top-k 2,048), against this machine's own ceilings.

Each number is the median of CUDA graph replays, each graph a rotation of calls over different entries and queries so that
at least 64 MiB of rows lie between two uses of one. Ceiling of a case: the longer of its gather (the best of a few plain
Triton kernels that read the same rows by the same ids and add them up) and its arithmetic at the rate of a large dense
bfloat16 product, both in the same run. Bars: 1.8 times that from 16 requests on; 1.5 times FlashMLA where that loads.
A number is of the kernel that `sparse_mla` chooses; own_us is of ours, triton_us of the general Triton kernel. An answer that
differs from float64 by more than rounding ends the run. Exit code 1 with --check if a bar is missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hisparse.bench import report
from hisparse.bench.catalogue import need_gpu
from hisparse.bench.progress import Progress
from hisparse.errors import HiSparseError
from hisparse.ops.cuda import attention, attention_flash_mla

LATENT, ROPE, TOP_K = 512, 64, 2048
BATCHES, HEADS, ROWS = (1, 4, 16, 64, 128, 256), (64, 128), ("bf16", "fp8")
NUM_ROWS = 400_000
ROTATED_BYTES = 64 << 20
BAR_OVER_CEILING, BAR_FROM_BATCH = 1.8, 16
EARLIER_TRITON_US = {1: 12.0, 16: 38.0, 64: 104.0}
"""An earlier split-K Triton kernel, bfloat16 rows, 64 heads (H200, 2026-11-30); not to be slower."""
BAR_OVER_FLASH_MLA = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Rotated inputs of one case."""

    rows: Tensor
    queries: list[Tensor]
    ids: list[Tensor]
    scaling: float = (LATENT + ROPE) ** -0.5


def make_rows(kind: str) -> Tensor:
    """[NUM_ROWS, 576] bfloat16 or [NUM_ROWS, 656] uint8 on the GPU."""
    rows = torch.randn(NUM_ROWS, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    if kind == "bf16":
        return rows
    from hisparse.ops.reference.fp8 import quantize_rows

    return torch.cat([quantize_rows(part) for part in rows.split(50_000)])


def make_data(rows: Tensor, batch: int, heads: int) -> Data:
    sets = max(2, -(-ROTATED_BYTES // (batch * TOP_K * rows.stride(0) * rows.element_size())))
    generator = torch.Generator("cuda").manual_seed(batch)
    ids = [torch.randint(0, NUM_ROWS, (batch, TOP_K), generator=generator, device="cuda", dtype=torch.int32)
           for _ in range(sets)]
    queries = [torch.randn(batch, heads, LATENT + ROPE, generator=generator, device="cuda", dtype=torch.bfloat16)
               for _ in range(min(sets, 4))]
    return Data(rows=rows, queries=queries, ids=ids)


def median_us(calls: Sequence[Callable[[], object]], repeats: int = 9, least_us: float = 3000.0) -> tuple[float, float, float]:
    """(median, least, greatest) time of a call in a CUDA graph that makes each call once, replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def run(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / replays

    run(2)
    replays = max(1, round(least_us / run(2)))
    times = sorted(run(replays) / len(calls) for _ in range(repeats))
    return statistics.median(times), times[0], times[-1]


def attention_us(data: Data) -> tuple[float, float, float]:
    """`sparse_mla` as it is called in a step: by the kernel that it chooses."""
    return _rotated(data, lambda q, ids: attention.sparse_mla(q, data.rows, ids, data.scaling, LATENT))


def own_us(data: Data, launch: attention.Launch) -> tuple[float, float, float]:
    return _rotated(data, lambda q, ids: attention.sparse_mla(q, data.rows, ids, data.scaling, LATENT, launch=launch))


def flash_mla_us(data: Data) -> tuple[float, float, float] | None:
    """FlashMLA on the same inputs; None where it does not load or fit."""
    q, ids = data.queries[0], data.ids[0]
    if not attention_flash_mla.support(9).usable or attention_flash_mla.misfit(q, data.rows, ids, LATENT, 0, None):
        return None
    return _rotated(data, lambda q, ids: attention_flash_mla.attend(q, data.rows, ids, data.scaling, 0, None))


def _is_flash_mla(data: Data) -> bool:
    return attention_flash_mla.chosen(data.queries[0], data.rows, data.ids[0], LATENT, 0, None, 9)


def _rotated(data: Data, attend: Callable[[Tensor, Tensor], object]) -> tuple[float, float, float]:
    def call(turn: int) -> Callable[[], object]:
        return lambda: attend(data.queries[turn % len(data.queries)], data.ids[turn])

    return median_us([call(turn) for turn in range(len(data.ids))])


def gather_us(data: Data) -> float:
    """The best of several shapes of a plain gather of the same rows and entries."""
    from hisparse.ops.cuda.gather_floor import gather_sums  # Triton

    words = data.rows.view(torch.int32)
    batch, found = data.ids[0].shape[0], []
    for rows, warps in ((4, 4), (8, 4), (16, 8)):
        out = torch.empty(batch * TOP_K // rows, dtype=torch.int32, device="cuda")
        calls = [partial(gather_sums, words, ids, out, rows=rows, warps=warps) for ids in data.ids]
        found.append(median_us(calls, repeats=5)[0])
    return min(found)


def dense_tflops(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_us([lambda: torch.mm(a, b)], repeats=5)[0] / 1e6


def relative_error(data: Data, launch: attention.Launch | None = None, rows: int = 3) -> float:
    """Of the first query rows against float64."""
    out, _ = attention.sparse_mla(data.queries[0], data.rows, data.ids[0], data.scaling, LATENT, launch=launch)
    named = data.rows[data.ids[0][:rows].long()]
    if named.dtype == torch.uint8:
        from hisparse.ops.reference.fp8 import dequantize_rows

        kv = dequantize_rows(named.reshape(-1, named.shape[2])).reshape(*named.shape[:2], -1).double()
    else:
        kv = named.double()
    scores = data.queries[0][:rows].double() @ kv.transpose(1, 2) * data.scaling
    want = scores.softmax(-1) @ kv[..., :LATENT]
    return float((out[:rows].double() - want).norm() / want.norm())


def measure(batches: Sequence[int], heads: Sequence[int], kinds: Sequence[str], progress: Progress) -> list[report.Row]:
    progress.expect(len(batches) * len(heads) * len(kinds))
    tflops = dense_tflops()
    found = [report.Row(case="dense bfloat16 product, 8192", value=tflops, unit="TFLOP/s")]
    for kind in kinds:
        rows = make_rows(kind)
        for num_heads in heads:
            for batch in batches:
                data = make_data(rows, batch, num_heads)
                wrong = relative_error(data)
                if not wrong < 6e-3:
                    raise HiSparseError(f"{kind}, {num_heads} heads, batch {batch}: relative error {wrong:.2e}; no number")
                value, best, worst = attention_us(data)
                gather = gather_us(data)
                bytes_moved = batch * TOP_K * rows.stride(0) * rows.element_size()
                math = 2 * batch * num_heads * TOP_K * (2 * LATENT + ROPE) / tflops / 1e6
                ceiling = max(gather, math)
                plan = attention.plan_launch(batch, num_heads, TOP_K, rows.dtype, LATENT, ROPE,
                                             attention.device_facts(rows.device))
                flash = flash_mla_us(data)
                own = own_us(data, plan)[0] if flash is not None and _is_flash_mla(data) else value
                general = attention.plan_launch(batch, num_heads, TOP_K, rows.dtype, LATENT, ROPE,
                                                attention.device_facts(rows.device), aligned=False)
                bars = [BAR_OVER_CEILING * ceiling] if batch >= BAR_FROM_BATCH else []
                if kind == "bf16" and num_heads == 64 and batch in EARLIER_TRITON_US:
                    bars.append(EARLIER_TRITON_US[batch])
                if flash is not None:
                    bars.append(BAR_OVER_FLASH_MLA * flash[0])
                detail = {"own_us": own, "triton_us": own_us(data, general)[0], "cluster": plan.cluster,
                          "gather_us": gather, "gather_tb_per_s": bytes_moved / gather / 1e6, "math_us": math,
                          "relative_error": wrong,
                          "tflops": math * tflops / value, "tb_per_s": bytes_moved / value / 1e6}
                if flash is not None:
                    detail["flash_mla_us"] = flash[0]
                found.append(report.Row(
                    case=f"{kind} rows, {num_heads} heads, batch {batch}", value=value, unit="us", best=best, max=worst,
                    bar=min(bars, default=None), yardstick=(ceiling, "gathers" if gather >= math else "products"),
                    detail=detail))
                progress.step(f"{found[-1].case}: {value:.1f} us")
    return found


def run(*, batches: Sequence[int] = (), heads: Sequence[int] = (), row_kinds: Sequence[str] = (),
        progress: Progress | None = None) -> report.Result:
    """`batches`: requests. `heads`: of a rank. `row_kinds`: bf16, fp8. Each empty: all of the design.

    Raises:
        HiSparseError: no CUDA device, or a wrong answer. ConfigError: unknown kind of rows.
    """
    kinds = report.chosen("--rows", row_kinds, ROWS)
    need_gpu("attention")
    return report.facts("attention"), measure(batches or BATCHES, heads or HEADS, kinds, progress or Progress())

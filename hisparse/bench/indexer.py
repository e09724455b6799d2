"""The lightning indexer on the GPU: scores, exact top-k and both, at GLM-5.2's shape (32 heads x 128, bfloat16 keys).

Bars: what a Triton indexer over contiguous keys with an unsorted top-k took on the same GPU, one input repeated; here inputs
rotate, so that keys come from memory. A wrong selection ends the run without a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hisparse.bench import device, report
from hisparse.bench.catalogue import need_gpu
from hisparse.bench.progress import Progress
from hisparse.ops.cuda.indexer import index_scores, index_topk
from hisparse.ops.cuda.topk import select_topk

HEADS, DIM, BLOCK_SIZE, TOP_K = 32, 128, 64, 2048
SCALE = DIM**-0.5
KEY_BYTES = DIM * 2
MAX_POOL_BYTES = 6 << 30
BARS_US = {("scores", 16, 32768): 42.0, ("scores", 64, 32768): 147.0, ("top-k", 16, 32768): 53.0, ("top-k", 64, 32768): 72.0}
"""Measured 2026-11-30, one H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arguments of one call."""

    q: Tensor
    weights: Tensor
    table: Tensor
    seats: Tensor
    lengths: Tensor


class Rig:
    """Keys in scattered pages of a packed allocation, and batches over different parts of it."""

    def __init__(self, pool_bytes: int) -> None:
        self.num_blocks = pool_bytes // (BLOCK_SIZE * KEY_BYTES)
        stride = BLOCK_SIZE * DIM + 512  # a block also holds other layers' keys
        packed = torch.randn(self.num_blocks * stride, dtype=torch.bfloat16, device="cuda")
        self.pages = packed.as_strided((self.num_blocks, BLOCK_SIZE, DIM), (stride, DIM, 1), 256)
        self._blocks = torch.randperm(self.num_blocks - 1, device="cuda", dtype=torch.int32) + 1
        self._next = 0

    def decode(self, num: int, length: int, max_len: int) -> Batch:
        """`num` rows of distinct seats; pages repeat only when the pool is used up."""
        pages = -(-length // BLOCK_SIZE)
        at = (self._next + torch.arange(num * pages, device="cuda")) % self._blocks.numel()
        self._next = (self._next + num * pages) % self._blocks.numel()
        table = torch.zeros(num, -(-max_len // BLOCK_SIZE), dtype=torch.int32, device="cuda")
        table[:, :pages] = self._blocks[at].view(num, pages)
        return self._batch(table, torch.arange(num, device="cuda"), torch.full((num,), length, device="cuda"))

    def chunk(self, num: int, length: int) -> Batch:
        """The last `num` rows of one seat's context."""
        table = self.decode(1, length, length).table
        return self._batch(table, torch.zeros(num, device="cuda"), torch.arange(length - num + 1, length + 1, device="cuda"))

    def _batch(self, table: Tensor, seats: Tensor, lengths: Tensor) -> Batch:
        num = seats.shape[0]
        return Batch(q=torch.randn(num, HEADS, DIM, dtype=torch.bfloat16, device="cuda"), table=table, seats=seats.int(),
                     weights=torch.randn(num, HEADS, device="cuda"), lengths=lengths.long())

    def scores(self, batch: Batch, max_len: int, out: Tensor) -> Tensor:
        return index_scores(batch.q, batch.weights, self.pages, batch.table, batch.seats, batch.lengths, TOP_K, SCALE,
                            max_len=max_len, out=out)

    def both(self, batch: Batch, max_len: int, out: Tensor) -> Tensor:
        return index_topk(batch.q, batch.weights, self.pages, batch.table, batch.seats, batch.lengths, TOP_K, SCALE,
                          max_len=max_len, out=out)

    def check(self, batch: Batch, out: Tensor) -> None:
        """The last row against float64. Raises SystemExit."""
        length, seat = int(batch.lengths[-1]), int(batch.seats[-1])
        blocks = batch.table[seat, : -(-length // BLOCK_SIZE)].long()
        keys = self.pages[blocks].flatten(0, 1)[:length].double()
        scores = batch.weights[-1].double() @ (batch.q[-1].double() @ keys.T * SCALE).relu()
        if length <= TOP_K:
            wrong = out[-1, :length].tolist() != list(range(length))
        else:
            chosen = out[-1].long()
            least = scores[chosen].min()
            ascending = bool((chosen[1:] > chosen[:-1]).all())
            scores[chosen] = float("-inf")
            wrong = not ascending or float(scores.max() - least) > 1e-4
        if wrong:
            raise SystemExit(f"wrong top-k at {len(batch.seats)} rows of {length} positions: no number")


def decode_rows(rig: Rig, ceilings: device.Ceilings, num: int, length: int) -> list[report.Row]:
    """Scores, top-k and both of a decode step; inputs come from memory, scores from wherever the kernel before left them."""
    key_bytes = num * length * KEY_BYTES
    sets = max(1, min(16, MAX_POOL_BYTES // 3 // key_bytes))
    batches = [rig.decode(num, length, length) for _ in range(sets)]
    scores = [torch.empty(num, length, device="cuda") for _ in batches]
    outs = [torch.empty(num, TOP_K, dtype=torch.int32, device="cuda") for _ in batches]
    rig.check(batches[0], rig.both(batches[0], length, outs[0]))
    memory_us = key_bytes / ceilings.copy_bytes_per_s * 1e6
    compute_us = 2 * num * length * HEADS * DIM / ceilings.bf16_flops_per_s * 1e6
    case = f"{num} x {length // 1024}k"
    score_us = device.graph_us([lambda b=b, s=s: rig.scores(b, length, s) for b, s in zip(batches, scores)])
    select_us = device.graph_us([lambda b=b, s=s, o=o: select_topk(s, b.seats, b.lengths, TOP_K, max_len=length, out=o)
                                 for b, s, o in zip(batches, scores, outs)])
    torch_us = device.graph_us([lambda s=s: torch.topk(s, TOP_K, dim=1, sorted=False) for s in scores], replays=1, repeats=3)
    both_us = device.graph_us([lambda b=b, o=o: rig.both(b, length, o) for b, o in zip(batches, outs)])
    ceiling = max(memory_us, compute_us)
    return [
        device.row(f"scores {case}", score_us, bar_us=BARS_US.get(("scores", num, length)), ceiling_us=ceiling,
                   memory_us=memory_us, compute_us=compute_us, sets=sets),
        device.row(f"top-k {case}", select_us, bar_us=BARS_US.get(("top-k", num, length)),
                   ceiling_us=num * length * 4 / ceilings.copy_bytes_per_s * 1e6, torch_topk_us=sorted(torch_us)[1]),
        device.row(f"both {case}", both_us, ceiling_us=ceiling),
    ]


def graph_rows(rig: Rig, num: int, length: int, max_len: int) -> list[report.Row]:
    """A launch for contexts up to `max_len`, on shorter ones, beside a launch made for exactly their length."""
    batches = [rig.decode(num, length, max_len) for _ in range(4)]
    out = torch.empty(num, TOP_K, dtype=torch.int32, device="cuda")
    rig.check(batches[0], rig.both(batches[0], max_len, out))
    exact = device.graph_us([lambda b=b: rig.both(b, length, out) for b in batches])
    times = device.graph_us([lambda b=b: rig.both(b, max_len, out) for b in batches])
    return [device.row(f"both {num} x {length // 1024}k, made for {max_len // 1024}k", times,
                       ceiling_us=sorted(exact)[len(exact) // 2], ceiling_name="x exact launch")]


def prefill_rows(rig: Rig, ceilings: device.Ceilings, num: int, length: int) -> list[report.Row]:
    batch = rig.chunk(num, length)
    out = torch.empty(num, TOP_K, dtype=torch.int32, device="cuda")
    rig.check(batch, rig.both(batch, length, out))
    times = device.graph_us([lambda: rig.both(batch, length, out)], replays=2, repeats=5)
    flops = 2 * int(batch.lengths.sum()) * HEADS * DIM
    return [device.row(f"both, chunk of {num} at {length // 1024}k", times, ceiling_us=flops / ceilings.bf16_flops_per_s * 1e6)]


def measure(rig: Rig, ceilings: device.Ceilings, quick: bool, progress: Progress) -> list[report.Row]:
    if quick:
        cases = [partial(decode_rows, rig, ceilings, 2, 4096), partial(graph_rows, rig, 2, 1024, 8192),
                 partial(prefill_rows, rig, ceilings, 20, 4096)]
    else:
        cases = [partial(decode_rows, rig, ceilings, num, length) for length in (32768, 131072) for num in (1, 16, 64)]
        cases += [partial(graph_rows, rig, num, length, 1 << 20) for length in (1024, 8192) for num in (1, 64)]
        cases += [partial(prefill_rows, rig, ceilings, 1024, length) for length in (32768, 131072)]
    progress.expect(len(cases))
    rows = []
    for case in cases:
        rows += case()
        progress.step(f"{rows[-1].case}: {rows[-1].value:.1f} us")
    return rows


def run(*, quick: bool = False, progress: Progress | None = None) -> report.Result:
    """`quick`: a tiny size, no bars: a smoke test. Raises HiSparseError: no CUDA device."""
    need_gpu("indexer")
    torch.manual_seed(0)
    ceilings = device.Ceilings.measure(quick=quick)
    rows = measure(Rig((64 << 20) if quick else MAX_POOL_BYTES), ceilings, quick, progress or Progress())
    return device.facts("indexer", ceilings), rows

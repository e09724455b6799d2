"""Page copies of all layers between the device, the host and staging, against one large copy of the copy engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse.bench.data_plane.gpu import PAUSE_CYCLES, cpu_us, device_us, graph_of
from hisparse.bench.report import Row
from hisparse.layout import KVCacheLayout, ModelShape
from hisparse.ops.cuda.floors import engine_copy
from hisparse.ops.cuda.module import kernel
from hisparse.ops.cuda.pages import LIST_WORDS, THREADS, UNROLL, PageCopier
from hisparse.ops.page_list import PageList, page_list
from hisparse.ops.reference.pages import staged_page
from hisparse.testing.registered_memory import RegisteredMemory

GLM52 = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "num_attention_heads": 64, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 2048, "max_position_embeddings": 1048576,
    "vocab_size": 154880, "index_topk_freq": 4, "index_skip_topk_offset": 3,
}
COUNTS = (64, 256, 512)
SHARE = 0.85
CPU_BAR_US = 50.0
LAUNCH_BAR_US = 8.0
BESIDE_BAR = 1.1
"""Times as long as alone: a forward that a spill runs beside."""


def small_layout() -> KVCacheLayout:
    """GLM-5.2 in fp8_ds_mla: 78 layers, pages of 41,984 bytes a layer."""
    return KVCacheLayout.build(ModelShape.from_hf_config(GLM52), dtype="bfloat16", row_format="fp8_ds_mla")


class World:
    """Device blocks, a host pool and a staging slot on the device, all of random bytes."""

    def __init__(self, layout: KVCacheLayout, memory: RegisteredMemory, host_blocks: int, most: int) -> None:
        self.layout = layout
        layers, page = layout.shape.num_layers, layout.layer_page_bytes
        self.host = memory.cuda[: layers * host_blocks * page].view(layers, host_blocks, page)
        self.blocks = 1 + most * layout.num_resident_groups
        self.device = torch.randint(0, 256, (self.blocks, layout.block_bytes), dtype=torch.uint8, device="cuda")
        self.staging = torch.randint(0, 256, (most * layout.staged_page_bytes,), dtype=torch.uint8, device="cuda")
        self.most, self.host_blocks = most, host_blocks
        self.copier = PageCopier(layout, self.device.view(-1, layout.row.row_bytes),
                                 [layer.view(-1, layout.row.row_bytes) for layer in self.host])

    def scattered(self, count: int) -> PageList:
        rng, groups = np.random.default_rng(count), self.layout.num_resident_groups
        near = (1 + rng.permutation(self.blocks - 1)[: count * groups]).reshape(count, groups)
        return page_list((1 + rng.permutation(self.host_blocks - 1)[:count]).tolist(), near, self.layout.block_size)

    def prepare(self, case: str, pages: PageList) -> None:
        """The targets hold other bytes than the sources."""
        host = _ids(pages[:, 1])
        size = host.numel() * self.layout.host_block_bytes
        if case.startswith("restore"):
            self.host[:, host] = self.staging[:size].view(self.host.shape[0], host.numel(), -1) ^ 0x5A
        else:
            self.host[:, host] = 0xEE

    def in_place(self, case: str, pages: PageList) -> bool:
        """Every page's bytes are equal on the device and on the host, and in staging after a scatter."""
        layout, host = self.layout, _ids(pages[:, 1])
        for layer, group in enumerate(layout.layer_group):
            start = layout.layer_byte_offset(layer)
            near = self.device[_ids(pages[:, 2 + group])][:, start : start + layout.layer_page_bytes]
            same = torch.equal(near, self.host[layer][host])
            if case.startswith("scatter"):
                offset, stride = staged_page(layout, layer, self.most, "layered" in case)
                staged = self.staging.as_strided((len(pages), layout.layer_page_bytes), (stride, 1), offset)
                same = same and torch.equal(near, staged)
            if not same:
                return False
        return True


def _ids(column: npt.NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(column.copy()).long().cuda()


def measure(quick: bool) -> list[Row]:
    layout, most = small_layout(), 16 if quick else max(COUNTS)
    host_blocks = 40 if quick else 640
    repeats = 3 if quick else 9
    with RegisteredMemory(host_blocks * layout.host_block_bytes) as memory:
        world = World(layout, memory, host_blocks, most)
        copier, staging = world.copier, world.staging
        rows = [_launch(bars=not quick)]
        for count in (16,) if quick else COUNTS:
            size, pages = count * layout.host_block_bytes, world.scattered(count)
            to_host, to_device = _engine(memory.cuda, staging, size, repeats)
            cases = {
                f"spill {count} pages": (partial(copier.spill, pages), to_host),
                f"restore {count} pages": (partial(copier.restore, pages), to_device),
            } | {
                f"scatter {count} {order} pages to host and device":
                    (partial(copier.scatter, staging, pages, layered=order == "layered", slot_pages=most),
                     to_host)
                for order in ("layered", "grouped")
            }
            for case, (run, ceiling) in cases.items():
                rows += _row(world, case, pages, run, ceiling, repeats, bars=not quick)
        rows += _gather(world, 16 if quick else 512, to_device, repeats)
        rows += _beside(world, memory.cuda, world.scattered(most), repeats, bars=not quick)
        del world, copier, staging
    return rows


def _row(world: World, case: str, pages: PageList, run: Callable[[], object], engine_gb: float, repeats: int, *,
         bars: bool) -> list[Row]:
    """Bandwidth of the host link, and CPU time of the call."""
    world.prepare(case, pages)
    run()
    torch.cuda.synchronize()
    if not world.in_place(case, pages):
        raise AssertionError(f"{case}: wrong bytes")
    size = len(pages) * world.layout.host_block_bytes
    device, cpu = device_us(run, repeats), cpu_us(run, repeats)
    return [
        Row(case=case, value=size / device.median / 1e3, unit="GB/s", bar=SHARE * engine_gb if bars else None,
            more_is_better=True, yardstick=(engine_gb, "copy engine"), best=size / device.best / 1e3,
            p90=size / device.p90 / 1e3, max=size / device.max / 1e3,
            detail={"bytes": size, "us": device.median, "ctas": world.copier.ctas}),
        Row(case=f"{case}, CPU", value=cpu.median, unit="us", bar=CPU_BAR_US if bars else None, best=cpu.best, p90=cpu.p90,
            max=cpu.max),
    ]


def _launch(*, bars: bool) -> Row:
    """CPU time of a bare launch, of a copy without pages."""
    copy = kernel("pages.cu", "copy_pages", THREADS=THREADS, UNROLL=UNROLL, LIST_WORDS=LIST_WORDS[0])
    nothing = (b"", 12, 0, None, 0, 656, 0, 1, 1, 0)

    def launch() -> None:
        for _ in range(100):
            copy((1,), THREADS, nothing)

    times = cpu_us(launch, 9)
    return Row(case="launch of a kernel with 10 arguments, CPU", value=times.median / 100, unit="us",
               bar=LAUNCH_BAR_US if bars else None, best=times.best / 100, p90=times.p90 / 100, max=times.max / 100)


def _engine(host: Tensor, device: Tensor, size: int, repeats: int) -> tuple[float, float]:
    """GB/s of one large asynchronous copy of `size` bytes, device to host and host to device."""
    def copy(target: Tensor, source: Tensor) -> float:
        return size / device_us(lambda: engine_copy(target, source, size), repeats).median / 1e3

    return copy(host, device), copy(device, host)


def _gather(world: World, count: int, engine_gb: float, repeats: int) -> list[Row]:
    """One layer's pages of one seat to a workspace."""
    layout = world.layout
    source = (1 + torch.randperm(world.host_blocks - 1)[:count]).int().cuda()[None]
    resident = torch.zeros_like(source)
    workspace = torch.zeros(count * layout.block_size, layout.row.row_elems, dtype=torch.uint8, device="cuda")
    layer = layout.shape.num_layers - 1

    def run() -> None:
        world.copier.gather_pages(layer, 0, source, resident, workspace, first_page=0, num_pages=count)

    run()  # compiles
    if not torch.equal(workspace.view(count, -1), world.host[layer][source[0].long()]):
        raise AssertionError("gather: wrong bytes")
    size, device = count * layout.layer_page_bytes, device_us(graph_of(run).replay, repeats)
    return [Row(case=f"gather {count} pages of one layer", value=size / device.median / 1e3, unit="GB/s",
                yardstick=(engine_gb, "copy engine"), best=size / device.best / 1e3,
                detail={"bytes": size, "us": device.median})]


def _beside(world: World, host: Tensor, pages: PageList, repeats: int, *, bars: bool) -> list[Row]:
    """A forward alone, and while a spill that lasts longer runs on another stream: by us, and as one copy of the copy engine.

    The forward is small matrix products, as a decode step has them, in a graph.
    """
    thin = torch.randn(64, 6144, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(4, 6144, 6144, device="cuda", dtype=torch.bfloat16)
    side, size = torch.cuda.Stream(), len(pages) * world.layout.host_block_bytes

    def products() -> None:
        for i in range(200):
            torch.mm(thin, weights[i % 4])

    engine = partial(engine_copy, host, world.staging, size)
    forward = graph_of(products)
    alone = device_us(forward.replay, repeats).median
    rows = [Row(case="200 products of 64 x 6144 x 6144, alone", value=alone, unit="us")]
    for name, copy, bar in ((f"a spill of {len(pages)} pages", partial(world.copier.spill, pages), BESIDE_BAR),
                            ("one copy of the copy engine", engine, None)):
        times = [_overlap(forward, copy, side) for _ in range(repeats)]
        ratios = sorted(forward_us / alone for forward_us, _ in times)
        rates = sorted(size / copy_us / 1e3 for _, copy_us in times)
        rows.append(Row(case=f"the same beside {name}, over alone", value=ratios[len(ratios) // 2], unit="x", best=ratios[0],
                        bar=bar if bars else None, max=ratios[-1],
                        detail={"copy_gb_per_s": rates[len(rates) // 2], "copy_us": size / rates[len(rates) // 2] / 1e3}))
    return rows


def _overlap(forward: torch.cuda.CUDAGraph, copy: Callable[[], object], side: torch.cuda.Stream) -> tuple[float, float]:
    """Microseconds of the forward and of the copy beside it; both begin behind a pause in which they were queued."""
    start, end, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE_CYCLES)
    side.wait_stream(torch.cuda.current_stream())
    start.record()
    with torch.cuda.stream(side):
        copy()
        copied.record()
    forward.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3, start.elapsed_time(copied) * 1e3

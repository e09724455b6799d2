"""The indexer's store on CUDA: bytes both ways on a late device, behind the forward that wrote them, without a wait."""

from __future__ import annotations

import time

import pytest
import torch

from hisparse.connector.offloading import OffloadCommand, OffloadJob
from hisparse.connector.offloading_worker import OffloadingWorker
from hisparse.errors import InvariantError
from hisparse.worker import DeviceCache, Place, Streams
from tests.gpu.gate import no_waiting
from tests.worker.rig import make_layout

pytestmark = pytest.mark.gpu
BLOCKS, PAGES = 40, 30


class World:
    def __init__(self) -> None:
        self.layout = make_layout(block_size=64, wide=True)
        self.cache = DeviceCache(self.layout, BLOCKS, "cuda")
        self.cache.bytes.random_(0, 256)
        self.streams = Streams("cuda")
        self.worker = OffloadingWorker(self.layout, self.cache, capacity_pages=PAGES, rank=0, streams=self.streams)
        self.size = self.layout.indexer_page_bytes
        self.acks: dict[int, str] = {}
        self.page(3).fill_(3)  # loading a kernel for the first time waits for the device
        self.step(stores=(job(900, (0,), (1,)),))
        self.settle()

    def step(self, forward=lambda: None, **jobs) -> None:
        self.worker.start_step(OffloadCommand(**jobs))
        forward()
        self.worker.end_step()
        self.collect()

    def collect(self) -> None:
        output = self.worker.output()
        self.acks.update({ack.job_id: ack.reason for ack in output.acks} if output else {})

    def settle(self) -> None:
        deadline = time.monotonic() + 10
        while self.worker._copies.num_pending:
            assert time.monotonic() < deadline
        self.collect()

    def page(self, block: int) -> torch.Tensor:
        return self.cache.bytes[block, : self.size]


def job(job_id: int, slots: tuple[int, ...], blocks: tuple[int, ...]) -> OffloadJob:
    return OffloadJob(job_id=job_id, slots=slots, device_blocks=blocks)


def test_pages_go_to_the_store_and_come_back_on_a_late_device(gate):
    world = World()
    before = world.cache.bytes.cpu()
    written = torch.randint(0, 256, (8, world.size), dtype=torch.uint8).pin_memory()
    source, target = tuple(range(2, 10)), tuple(range(30, 38))

    def forward() -> None:
        for block, content in zip(source, written, strict=True):
            world.page(block).copy_(content, non_blocking=True)

    def others_take_the_blocks() -> None:
        for block in source:
            world.page(block).fill_(3)

    torch.cuda.synchronize()
    with no_waiting():
        gate.hold(world.streams.raw(Place.COMPUTE))
        world.step(forward, stores=(job(1, tuple(range(8, 16)), source),))
        assert world.acks == {900: ""}
        gate.open()
    world.settle()
    with no_waiting():
        gate.hold(world.streams.raw(Place.DMA))
        world.step(others_take_the_blocks)
        world.step(loads=(job(2, tuple(range(8, 16)), target), job(3, (0,), (12,))))
        assert sorted(world.acks) == [1, 900]
        gate.open()
    world.settle()
    assert world.acks == {900: "", 1: "", 2: "", 3: ""}
    after = world.cache.bytes.cpu()
    assert torch.equal(after[list(target), : world.size], written)
    assert torch.equal(after[12, : world.size], before[1, : world.size])
    assert torch.equal(after[:, world.size :], before[:, world.size :]), "padding of blocks is not touched"
    assert bool((after[list(source), : world.size] == 3).all())
    world.worker.shutdown()


def test_a_load_waits_for_what_still_reads_its_block(gate):
    """The block belonged to somebody whose last forward is still on its way when the load is queued."""
    world, out = World(), torch.zeros(2, dtype=torch.uint8, device="cuda")
    world.page(5).fill_(77)
    stored = world.page(1).clone()
    torch.cuda.synchronize()
    with no_waiting():
        gate.hold(world.streams.raw(Place.COMPUTE))
        out[0:1].copy_(world.page(5)[:1])
        world.step(loads=(job(1, (0,), (5,)),))
        gate.open()
    world.settle()
    assert out.tolist() == [77, 0] and torch.equal(world.page(5), stored)
    world.worker.shutdown()


def test_impossible_jobs_fail_alone_and_the_end_is_the_end():
    world = World()
    world.step(stores=(job(1, (PAGES,), (3,)), job(2, (4,), (3,)), job(3, (5,), (0,))))
    world.settle()
    assert world.acks[2] == "" and "out of range" in world.acks[1] and "out of range" in world.acks[3]
    world.worker.shutdown()
    world.worker.shutdown()
    with pytest.raises(InvariantError, match="shut down"):
        world.worker.start_step(None)
    again = OffloadingWorker(world.layout, world.cache, capacity_pages=PAGES, rank=0)  # its memory is free to be registered
    again.shutdown()

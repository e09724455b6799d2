"""Streams, events and pinned staging on a device that is late: nothing waits, nothing is overwritten, nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from hisparse.types import ResolveStats
from hisparse.worker import (
    HostPool,
    PeerWrites,
    PinnedRing,
    Place,
    StepEvent,
    StreamCopies,
    Streams,
    host_memory,
)
from hisparse.worker.counters import Counters
from tests.gpu.gate import no_waiting
from tests.gpu.test_host_pool import layout
from tests.worker.rig import make_layout

pytestmark = pytest.mark.gpu


@pytest.fixture
def streams():
    return Streams("cuda")


def test_streams_wait_for_marks_and_the_cpu_for_nothing(gate, streams):
    value = torch.zeros(1, device="cuda")
    seen = torch.zeros(2, device="cuda")
    torch.cuda.synchronize()
    with no_waiting():
        gate.hold(streams.raw(Place.COMPUTE))
        value.fill_(7.0)
        mark = streams.record(StepEvent.FORWARD_DONE, Place.COMPUTE)
        with streams.on(Place.DMA):
            assert torch.cuda.current_stream() == streams.raw(Place.DMA)
            streams.wait(mark, Place.DMA)
            seen[0:1].copy_(value)
        done = streams.record(StepEvent.SPILLS_DONE, Place.DMA)
        streams.wait(done, Place.COMPUTE)
        value.fill_(9.0)
        assert not streams.reached(done)
        gate.open()
        deadline = time.monotonic() + 10
        while not streams.reached(done):
            assert time.monotonic() < deadline
    streams.drain(10)
    assert seen.tolist() == [7.0, 0.0] and value.tolist() == [9.0]


def test_the_compute_stream_is_whatever_is_current(streams):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert streams.raw(Place.COMPUTE) == side
    assert len({streams.raw(place).cuda_stream for place in (Place.COMPUTE, Place.DMA, Place.PREFETCH)}) == 3


def test_draining_a_device_that_hangs_ends_in_time(gate, streams):
    gate.hold(streams.raw(Place.DMA))
    with pytest.raises(Exception, match=r"did not finish its work within 0.05 s"):
        streams.drain(0.05)


def test_uploads_survive_a_late_device(gate, streams):
    """Twenty uploads while the stream is held: buffers are added, none is filled again too early."""
    ring = PinnedRing(streams, slots=2)
    ring.upload(np.zeros(1000))
    torch.cuda.synchronize()
    out = []
    with no_waiting():
        gate.hold(streams.raw(Place.COMPUTE))
        for i in range(20):
            out.append(ring.upload(np.full(100, i, dtype=np.int64), np.full(7, -i, dtype=np.int32)))
        assert ring.num_slots >= 20
        gate.open()
    torch.cuda.synchronize()
    for i, (wide, narrow) in enumerate(out):
        assert wide.is_cuda and wide.tolist() == [i] * 100 and narrow.tolist() == [-i] * 7
    slots = ring.num_slots
    for i in range(200):
        (got,) = ring.upload(np.array([i]))
        assert got.tolist() == [i]
    assert ring.num_slots == slots


def test_counts_are_never_awaited_and_never_lost(gate, streams):
    layout = make_layout()
    counters = Counters(layout, 4, "cuda", streams)
    seats = torch.tensor([0, 3, -1, 3], dtype=torch.int32, device="cuda")
    ones = torch.ones(4, dtype=torch.int32, device="cuda")
    counters.add("hot_rows", seats, ones)
    counters.snapshot()
    torch.cuda.synchronize()
    assert counters.take()[1] == {0: ResolveStats(hot_rows=1), 3: ResolveStats(hot_rows=2)}
    graph = torch.cuda.CUDAGraph()
    tiers = [ones.clone() for _ in range(3 * len(layout.shape.index_groups))]
    layers = layout.shape.num_layers
    with torch.cuda.graph(graph):
        counters.add_tiers(seats, tiers)
    total, by_group = 0, 0
    with no_waiting():
        gate.hold(streams.raw(Place.COMPUTE))
        for _ in range(30):
            graph.replay()
            counters.snapshot()
            total += counters.take()[0].hot_rows
        assert total == 0
        gate.open()
    torch.cuda.synchronize()
    for _ in range(2):
        taken = counters.take()
        total += taken[0].hot_rows
        by_group += sum(rows.hot for rows in taken[2])
        counters.snapshot()
        torch.cuda.synchronize()
    assert total == by_group == 90 * layers


def test_batches_on_the_dma_stream(gate, streams):
    """A held batch holds up the one behind it on its stream, not the CPU; fences hold up the compute stream only."""
    copies, source = StreamCopies(streams), torch.arange(4, dtype=torch.int64, device="cuda")
    target = torch.zeros(4, dtype=torch.int64, pin_memory=True)

    def launch(kept):
        target.copy_(source, non_blocking=True)
        return lambda: [int(target[i]) for i in kept]

    torch.cuda.synchronize()
    with no_waiting():
        gate.hold(streams.raw(Place.DMA))
        copies.submit([1, 2], launch, streams.record(StepEvent.FORWARD_DONE, Place.COMPUTE))
        assert copies.take_done() == [] and copies.num_pending == 2
        copies.wait(2, 0)
        source.fill_(-1)  # behind the fence: the copy must not see it
        gate.open()
    copies.drain(10)
    assert [(r.transfer_id, r.row_mask) for r in copies.take_done()] == [(1, 0), (2, 1)]
    copies.close(10)


def test_peers_see_what_the_writer_copied_in_the_same_step(gate):
    """Two processes: the peer's kernels run behind the writer's event, although its CPU is long past it."""
    code = """
        import sys, time, torch
        from hisparse.worker import HostPool, PeerWrites
        from tests.gpu.test_host_pool import layout
        pool = HostPool.attach(layout(), 8, sys.argv[1])
        pool.pin("cuda")
        peer = PeerWrites("cuda", bytes.fromhex(sys.argv[2]))
        out = torch.zeros(3, 16, device="cuda")
        torch.cuda.synchronize()
        print("ready", flush=True)
        for i in range(3):
            sys.stdin.readline()                       # the barrier
            peer.wait()
            out[i].copy_(pool.device_rows(2)[5])
            print("queued", torch.cuda.current_stream().query(), flush=True)
        torch.cuda.synchronize()
        print(out[:, 0].tolist(), flush=True)
        pool.close()
    """
    with TemporaryDirectory(dir=host_memory.SHM) as directory:
        pool = HostPool.shared(layout(), 8, Path(directory) / "hisparse-peer.pool", poison=True)
        pool.pin("cuda")
        writer = PeerWrites("cuda")
        peer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(pool.path), writer.handle.hex()],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        assert peer.stdout.readline() == "ready\n"
        for i in range(3):
            gate.hold(torch.cuda.current_stream())
            pool.device_rows(2)[5] = 10.0 + i
            writer.record()
            peer.stdin.write("\n")
            peer.stdin.flush()
            assert peer.stdout.readline() == "queued False\n", "the peer did not wait for the writer"
            gate.open()
            torch.cuda.synchronize()
            time.sleep(0.05)  # the next write must not overtake the peer's read: in a step a barrier is between them
        assert peer.stdout.readline() == "[10.0, 11.0, 12.0]\n" and peer.wait(30) == 0
        pool.close()
        pool.unlink()

"""Tables on the device: the same steps as on the CPU, without waiting, at addresses that graphs may hold."""

from __future__ import annotations

import random

import pytest
import torch

from hisparse.worker import KVTables, PinnedRing, Place, Streams
from tests.gpu.gate import Gate, no_waiting
from tests.worker.test_tables import LAYOUT, random_step, tables

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_equal_those_of_the_cpu(seed):
    r, streams, gate = random.Random(seed), Streams("cuda"), Gate()
    here = tables()
    there = KVTables(LAYOUT, max_seats=3, max_model_len=30, hot_rows_max=(8, 16), device="cuda", staging=PinnedRing(streams))
    everything = (*there.tables, there.hot_rows, there.mirrors)
    copies = [torch.zeros_like(t) for t in everything]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for to, source in zip(copies, everything, strict=True):
            to.copy_(source)
    want = []
    for step in range(60):
        updates, hot_rows, mirrors = random_step(r)
        here.apply_step(updates, hot_rows, mirrors)
        with no_waiting():
            if step and step % 7 == 0:
                gate.hold(streams.raw(Place.COMPUTE))
            there.apply_step(updates, hot_rows, mirrors)
            graph.replay()
            want.append([to.clone() for to in copies])
        if step % 7 == 6:
            gate.close()
            for got in want[-1:]:
                for a, b in zip((*here.tables, here.hot_rows, here.mirrors), got, strict=True):
                    assert torch.equal(a, b.cpu())
            there.check()
    gate.close()

"""A prefill and a decode engine without a model, with pools on a GPU, and the byte-for-byte oracle of what was imported."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from hisparse.config import PDConfig
from hisparse.connector.base import LoadEvents
from hisparse.pd.connector import PDConnectorScheduler, PDConnectorWorker
from hisparse.pd.loopback import LoopbackNetwork, LoopbackTransport
from hisparse.pd.memory import LocalMemory
from hisparse.types import ImportTarget, Landing, RequestPages
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool
from hisparse.worker.streams import Streams
from tests.pd.halves import Halves
from tests.pd.rig import LAYOUT, RankMemory, expected_page, pick_pages

PAGES, TOKENS = 7, 26
TAIL_ROWS = TOKENS - (PAGES - 1) * LAYOUT.block_size
WAIT_S = 20.0
SOURCES = {
    "resident": [True] * PAGES,
    "host": [False] * PAGES,
    "mixed": [True, False, True, True, False, False, True],
}
MIRRORS = (1, PAGES - 1)
"""Pages of a HOST landing that have resident destinations, too."""


class DeviceRank(RankMemory):
    """RankMemory whose packed allocation is on a device, and whose host pool is registered with it."""

    def __init__(self, seed: int, device: str = "cuda", *, device_blocks: int = 64, host_blocks: int = 32) -> None:
        self.cache = DeviceCache(LAYOUT, device_blocks, device)
        self.pool = HostPool.private(LAYOUT, host_blocks)
        self.pool.pin(device)
        self.memory = LocalMemory(LAYOUT, self.cache, self.pool)
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """Every byte and every generation is the seed's."""
        rng = np.random.default_rng(seed)
        self.cache.bytes.copy_(torch.from_numpy(rng.integers(0, 256, tuple(self.cache.bytes.shape), dtype=np.uint8)))
        assert self.memory.host is not None
        self.memory.host[:] = rng.integers(0, 256, self.memory.host.shape, dtype=np.uint8)
        for slab in (self.cache, self.pool):
            slab.generations[:] = rng.integers(1, 1 << 63, slab.num_blocks, dtype=np.uint64)
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)

    def resident_row(self, layer: int, blocks: Sequence[int]) -> np.ndarray:
        start = LAYOUT.layer_byte_offset(layer)
        block = int(blocks[LAYOUT.layer_group[layer]])
        return self.cache.bytes[block, start : start + LAYOUT.layer_page_bytes].cpu().numpy()

    def indexer_row(self, block: int) -> np.ndarray:
        return self.cache.bytes[int(block), : LAYOUT.indexer_page_bytes].cpu().numpy()

    def snapshot(self) -> tuple[np.ndarray, np.ndarray]:
        assert self.memory.host is not None
        return self.cache.bytes.cpu().numpy(), self.memory.host.copy()


class Half(Halves):
    """One engine: memory, worker half on its own transfer thread, scheduler half."""

    def __init__(self, name: str, seed: int, *, role: str, device: str = "cuda", network: LoopbackNetwork | None = None,
                 incarnation: int = 77, **config: Any) -> None:
        settings = PDConfig(role=role, **{"staging_slots": 2, "staging_slot_pages": 2, **config})  # type: ignore[arg-type]
        self.memory = DeviceRank(seed, device)
        self.streams = Streams(device)
        self.transport: LoopbackTransport | None = None

        def loopback(agent: str) -> LoopbackTransport:
            self.transport = LoopbackTransport(agent, network=network or LoopbackNetwork())
            return self.transport

        self.worker = PDConnectorWorker(
            LAYOUT, settings, cache=self.memory.cache, host_pool=self.memory.pool, engine_id=name, incarnation=incarnation,
            rank=0, host_writer=True, streams=self.streams, make_transport=None if network is None else loopback)
        self.scheduler = PDConnectorScheduler(LAYOUT, settings, engine_id=name, incarnation=incarnation, num_ranks=1)
        self.scheduler.set_endpoints([self.worker.handshake()])

    def grant(self, request_id: str, pages: RequestPages) -> dict[str, Any]:
        generations = self.memory.generations_of(pages)
        return dict(self.scheduler.grant(request_id, pages, generations, prompt_digest="d" * 64))

    def start(self, request_id: str, params: dict[str, Any], landing: Landing, seed: int) -> RequestPages:
        """Plans the import; the next `step` sends it off."""
        assert self.scheduler.add_remote(request_id, params) == TOKENS
        resident = [landing is Landing.RESIDENT or i in MIRRORS for i in range(PAGES)]
        target = pick_pages(seed, PAGES, TOKENS, resident=resident, host=[landing is Landing.HOST] * PAGES)
        assert self.scheduler.choose_landing(request_id, landing is Landing.RESIDENT, True) is landing
        self.scheduler.start_import(request_id, ImportTarget(landing=landing, pages=target))
        return target

    def until(self, done: Callable[[LoadEvents], bool]) -> LoadEvents:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            events = self.step()
            if done(events):
                return events
            time.sleep(0.001)
        raise AssertionError(f"not within {WAIT_S} s: {self.scheduler.stats()}")

    def outcome(self, request_id: str) -> str:
        """Steps until the request's load ends: "" or the reason."""
        events = self.until(lambda events: request_id in events.loaded or request_id in events.failed)
        return events.failed.get(request_id, "")

    def close(self) -> None:
        self.worker.shutdown()
        self.memory.pool.close()


def source_pages(kind: str) -> RequestPages:
    held = SOURCES[kind]
    return pick_pages(11, PAGES, TOKENS, resident=held, host=[not h for h in held])


def assert_imported(far: RankMemory, source: RequestPages, near: RankMemory, target: RequestPages, landing: Landing) -> None:
    """Every byte of every page, in every tier that the landing names, and the row masks."""
    for i in range(PAGES):
        assert (near.indexer_row(target.indexer_blocks[i]) == far.indexer_row(source.indexer_blocks[i])).all(), i
        blocks = [group[i] for group in target.resident_blocks]
        for layer in range(LAYOUT.shape.num_layers):
            want = expected_page(far, source, i, layer)
            if landing is Landing.HOST:
                assert (near.host_row(layer, target.host_blocks[i]) == want).all(), (i, layer)
            if all(blocks):
                assert (near.resident_row(layer, blocks) == want).all(), (i, layer)
        if landing is Landing.HOST:
            rows = LAYOUT.block_size if i < PAGES - 1 else TAIL_ROWS
            assert near.pool.row_masks[target.host_blocks[i]] == (1 << rows) - 1, i


def assert_elsewhere_untouched(before: tuple[np.ndarray, np.ndarray], near: RankMemory, target: RequestPages) -> None:
    """No byte outside the destination's blocks has changed."""
    device, host = near.snapshot()
    blocks = {*target.indexer_blocks, *(i for group in target.resident_blocks for i in group)} - {0}
    others = [i for i in range(device.shape[0]) if i not in blocks]
    assert (device[others] == before[0][others]).all()
    hosts = [i for i in range(host.shape[1]) if i not in set(target.host_blocks)]
    assert (host[:, hosts] == before[1][:, hosts]).all()


def serve(pipe: Connection, device: str, config: dict[str, Any]) -> None:
    """A prefill engine in a process of its own: obeys ("grant", id, kind), ("reuse", id), ("fill",), ("ended",), ("stop",)."""
    if device != "cpu":
        torch.cuda.set_device(device)
    half = Half("p", 1, role="prefill", device=device, **{"incarnation": 5, **config})
    pipe.send("ready")
    granted: dict[str, RequestPages] = {}
    ended: list[str] = []
    while True:
        half.step()
        ended += half.scheduler.take_expired()
        if not pipe.poll(0.002):
            continue
        order = pipe.recv()
        if order[0] == "grant":
            granted[order[1]] = source_pages(order[2])
            pipe.send(half.grant(order[1], granted[order[1]]))
        elif order[0] == "reuse":
            reuse(half, granted[order[1]])
            pipe.send("reused")
        elif order[0] == "fill":
            half.memory.fill(1)
            pipe.send("filled")
        elif order[0] == "ended":
            pipe.send(ended)
            ended = []
        else:
            half.close()
            pipe.send("stopped")
            return


def reuse(half: Half, pages: RequestPages) -> None:
    """The pages get another owner: generation first, then other bytes, on the device and in the host pool."""
    device = np.array([*pages.indexer_blocks, *(i for group in pages.resident_blocks for i in group if i)])
    host = np.array([i for i in pages.host_blocks if i], dtype=np.int64)
    half.memory.cache.generations[device] += np.uint64(1)
    half.memory.pool.generations[host] += np.uint64(1)
    half.memory.cache.bytes[torch.from_numpy(device).to(half.memory.cache.device)] = 0xEE
    assert half.memory.memory.host is not None
    half.memory.memory.host[:, host] = 0xEE

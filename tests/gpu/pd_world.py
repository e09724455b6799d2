"""A prefill and a decode engine without a model, with pools on a GPU, and the byte-for-byte oracle of what was imported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hisparse.config import PDConfig
from hisparse.connector.base import LoadEvents
from hisparse.layout import KVCacheLayout
from hisparse.pd.connector import PDConnectorScheduler, PDConnectorWorker
from hisparse.pd.loopback import LoopbackNetwork, LoopbackTransport
from hisparse.types import ImportTarget, Landing, RequestPages
from hisparse.worker.streams import Streams
from tests.pd.device_rank import DeviceRank
from tests.pd.halves import Halves
from tests.pd.rig import LAYOUT, RankMemory, expected_page, pick_pages

NEAR, FAR = "cuda:0", f"cuda:{max(torch.cuda.device_count() - 1, 0)}"
"""Devices of decode and of a prefill process: two GPUs where there are two."""
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


class Half(Halves):
    """One engine: memory, worker half on its own transfer thread, scheduler half."""

    def __init__(self, name: str, seed: int, *, role: str, device: str = "cuda", network: LoopbackNetwork | None = None,
                 incarnation: int = 77, layout: KVCacheLayout = LAYOUT, **config: Any) -> None:
        settings = PDConfig(role=role, **{"staging_slots": 2, "staging_slot_pages": 2, **config})  # type: ignore[arg-type]
        self.memory = DeviceRank(seed, device, layout=layout)
        self.streams = Streams(device)
        self.transport: LoopbackTransport | None = None

        def loopback(agent: str) -> LoopbackTransport:
            self.transport = LoopbackTransport(agent, network=network or LoopbackNetwork())
            return self.transport

        self.worker = PDConnectorWorker(
            layout, settings, cache=self.memory.cache, host_pool=self.memory.pool, engine_id=name, incarnation=incarnation,
            rank=0, host_writer=True, streams=self.streams, make_transport=None if network is None else loopback)
        self.scheduler = PDConnectorScheduler(layout, settings, engine_id=name, incarnation=incarnation, num_ranks=1)
        self.scheduler.set_endpoints([self.worker.handshake()])

    def grant(self, request_id: str, pages: RequestPages) -> dict[str, Any]:
        generations = self.memory.generations_of(pages)
        return dict(self.scheduler.grant(request_id, pages, generations, prompt_digest="d" * 64))

    def start(self, request_id: str, params: dict[str, Any], landing: Landing, seed: int) -> RequestPages:
        """Plans an import of every page; the next `step` sends it off."""
        resident = [landing is Landing.RESIDENT or i in MIRRORS for i in range(PAGES)]
        target = pick_pages(seed, PAGES, TOKENS, resident=resident, host=[landing is Landing.HOST] * PAGES)
        self.start_at(request_id, params, landing, target)
        return target

    def start_at(self, request_id: str, params: dict[str, Any], landing: Landing, target: RequestPages) -> None:
        """Like `start`, into these pages."""
        assert self.scheduler.add_remote(request_id, params) == target.num_tokens
        assert self.scheduler.choose_landing(request_id, landing is Landing.RESIDENT, True) is landing
        self.scheduler.start_import(request_id, ImportTarget(landing=landing, pages=target))

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

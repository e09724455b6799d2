"""A rank like those of `rig`, whose packed allocation lies on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hisparse.pd.memory import LocalMemory
from hisparse.types import RequestPages
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool
from tests.pd.rig import LAYOUT, RankMemory, blocks_of


class DeviceRank(RankMemory):
    """RankMemory whose packed allocation is on a device, and whose host pool is registered with it."""

    def __init__(self, seed: int, device: str = "cuda", *, device_blocks: int = 64, host_blocks: int = 32) -> None:
        self.layout = LAYOUT
        self.cache = DeviceCache(LAYOUT, device_blocks, device)
        self.pool = HostPool.private(LAYOUT, host_blocks)
        self.pool.pin(device)
        self.memory = LocalMemory(LAYOUT, self.cache, self.pool)
        self.fill(seed)

    def _fill_device(self, values: np.ndarray) -> None:
        self.cache.bytes.copy_(torch.from_numpy(values))
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)

    def resident_row(self, layer: int, blocks: Sequence[int]) -> np.ndarray:
        start = LAYOUT.layer_byte_offset(layer)
        block = int(blocks[LAYOUT.layer_group[layer]])
        return self.cache.bytes[block, start : start + LAYOUT.layer_page_bytes].cpu().numpy()

    def indexer_row(self, block: int) -> np.ndarray:
        return self.cache.bytes[int(block), : LAYOUT.indexer_page_bytes].cpu().numpy()

    def overwrite(self, pages: RequestPages, value: int) -> None:
        device, host = blocks_of(pages)
        self.cache.bytes[torch.tensor(device, device=self.cache.device)] = value
        assert self.memory.host is not None
        self.memory.host[:, host] = value
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)

    def snapshot(self) -> tuple[np.ndarray, np.ndarray]:
        assert self.memory.host is not None
        return self.cache.bytes.cpu().numpy().copy(), self.memory.host.copy()


def rank_on(device: str, seed: int, **sizes: int) -> RankMemory:
    """The same bytes and generations on any device."""
    return RankMemory(seed, **sizes) if device == "cpu" else DeviceRank(seed, device, **sizes)

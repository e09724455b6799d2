"""A rank like those of `rig`, whose packed allocation lies on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hisparse.layout import KVCacheLayout
from hisparse.pd.memory import LocalMemory
from hisparse.types import RequestPages
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool
from tests.pd.rig import LAYOUT, RankMemory, blocks_of


class DeviceRank(RankMemory):
    """RankMemory whose packed allocation is on a device, and whose host pool is registered with it."""

    def __init__(self, seed: int, device: str = "cuda", *, device_blocks: int = 64, host_blocks: int = 32,
                 layout: KVCacheLayout = LAYOUT) -> None:
        self.layout = layout
        self.cache = DeviceCache(layout, device_blocks, device)
        self.pool = HostPool.private(layout, host_blocks)
        self.pool.pin(device)
        self.memory = LocalMemory(layout, self.cache, self.pool)
        self.fill(seed)

    def _fill_device(self, values: np.ndarray) -> None:
        self.cache.bytes.copy_(torch.from_numpy(values))
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)

    def device_bytes(self) -> np.ndarray:
        return self.cache.bytes.cpu().numpy()

    def overwrite(self, pages: RequestPages, value: int) -> None:
        device, host = blocks_of(pages)
        self.cache.bytes[torch.tensor(device, device=self.cache.device)] = value
        assert self.memory.host is not None
        self.memory.host[:, host] = value
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)


def rank_on(device: str, seed: int, **options: Any) -> RankMemory:
    """The same bytes and generations on any device."""
    return RankMemory(seed, **options) if device == "cpu" else DeviceRank(seed, device, **options)

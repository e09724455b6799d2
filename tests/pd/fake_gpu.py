"""GPU memory that is CPU memory in truth: the same planning, staging and copies as on CUDA, without a device."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from hisparse.pd import importer, loopback
from hisparse.pd.generations import GENERATION_BYTES
from hisparse.pd.memory import LocalMemory
from hisparse.pd.staging import SlotPool
from hisparse.pd.staging_pools import StagingPools
from tests.pd.paging_case import World
from tests.pd.rig import RankMemory


class FakeGpuRank(RankMemory):
    """A rank whose packed allocation counts as memory of GPU 0."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        memory, cache = self.memory, self.cache
        memory.on_cuda = True
        memory.slabs.remove((cache.address, cache.nbytes))
        memory.device_slabs.append((cache.address, cache.nbytes, 0))


class FakePools(StagingPools):
    """Slots of both kinds, all of them CPU memory that the CPU's operations read."""

    def __init__(self, memory: LocalMemory, *, num_slots: int, slot_pages: int, direct: bool) -> None:
        if not memory.on_cuda:
            super().__init__(memory, num_slots=num_slots, slot_pages=slot_pages, direct=direct)
            return
        self._on_cuda, self._direct = True, direct
        slot_bytes = slot_pages * memory.layout.staged_page_bytes
        self.cpu = SlotPool(num_slots, slot_bytes)
        self.cpu.tensor = torch.from_numpy(self.cpu.memory)
        self.gpu = SlotPool(num_slots, slot_bytes, device=torch.device("cpu"), on_device=True)
        self.generations = SlotPool(max(2, num_slots), GENERATION_BYTES)
        self.slabs = [(pool.address, pool.num_bytes) for pool in (self.cpu, self.generations)]
        self.device_slabs = [(self.gpu.address, self.gpu.num_bytes, 0)]


def _copy(pieces: Sequence[tuple[int, int, int]]) -> None:
    for to, source, count in pieces:
        ctypes.memmove(to, source, count)


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Importers that are made inside take the memory of a FakeGpuRank for a GPU's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importer, "StagingPools", FakePools)
        patch.setattr(loopback, "_copy_on_device", _copy)
        yield


FAKE_GPU = World(FakeGpuRank, fake_gpu)

"""The slots of one rank, by the memory they lie in, and which READs pass through which."""

from __future__ import annotations

import torch

from hisparse.errors import InvariantError
from hisparse.pd.generations import GENERATION_BYTES
from hisparse.pd.memory import LocalMemory, device_index
from hisparse.pd.staging import SlotPool
from hisparse.pd.transport import FarMemory


class StagingPools:
    """Args: as Importer's.

    Attributes:
        cpu: slots in CPU memory. generations: for answers to generation READs.
        gpu: on CUDA, slots on the GPU for pages that come from a peer's GPU: a READ from GPU into CPU memory is a hundred times
            slower than one between GPUs and a copy here.
        slabs, device_slabs: what the transport has to register, as in LocalMemory.
    """

    def __init__(self, memory: LocalMemory, *, num_slots: int, slot_pages: int, direct: bool) -> None:
        self._on_cuda, self._direct = memory.on_cuda, direct
        slot_bytes = slot_pages * memory.layout.staged_page_bytes
        device = torch.device("cuda", device_index(memory.cache.device)) if memory.on_cuda else None
        self.cpu = SlotPool(num_slots, slot_bytes, device=device)
        self.gpu = SlotPool(num_slots, slot_bytes, device=device, on_device=True) if memory.on_cuda else None
        self.generations = SlotPool(max(2, num_slots), GENERATION_BYTES)
        self.slabs = [(pool.address, pool.num_bytes) for pool in (self.cpu, self.generations)]
        self.device_slabs: list[tuple[int, int, int]] = []
        if self.gpu is not None and device is not None:
            self.device_slabs.append((self.gpu.address, self.gpu.num_bytes, device.index))

    def used(self, memory: FarMemory, *, to_host: bool) -> bool:
        """Whether pages that the peer has in `memory` pass through a slot. The peer is taken to have a GPU where this side has
        one, and only there.
        """
        if not self._on_cuda:
            return to_host and not self._direct
        if memory is FarMemory.BOTH:
            return False  # no slot can take pieces from either; slow, but few pages are so
        if memory is FarMemory.GPU:
            return to_host
        return not (to_host and self._direct)

    def of(self, memory: FarMemory) -> SlotPool:
        """The slots that they pass through."""
        return self.gpu if self.gpu is not None and memory is FarMemory.GPU else self.cpu

    @property
    def num_staging(self) -> int:
        """Slots for pages, in either memory."""
        return sum(pool.memory.shape[0] for pool in (self.cpu, self.gpu) if pool is not None)

    @property
    def num_staging_free(self) -> int:
        return sum(pool.num_free for pool in (self.cpu, self.gpu) if pool is not None)

    def check(self, held: int) -> None:
        """Args: held: slots in use, of all pools. Raises InvariantError unless the others are free."""
        pools = [pool for pool in (self.cpu, self.gpu, self.generations) if pool is not None]
        for pool in pools:
            pool.check()
        free, total = sum(pool.num_free for pool in pools), sum(pool.memory.shape[0] for pool in pools)
        if held + free != total:
            raise InvariantError(f"{held} slots held by imports and {free} free of {total}")

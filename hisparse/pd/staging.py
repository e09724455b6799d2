"""Bounded staging memory: fixed slots, a free list, and a quota per peer so that one hung peer cannot take them all."""

from __future__ import annotations

import mmap
from collections import Counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse.errors import ConfigError, InvariantError
from hisparse.worker import host_memory, pinned


class SlotPool:
    """Slots of equal size in one allocation that is registered once.

    A slot stays taken until its holder releases it: after the event of its copies, or after its transfer drained.

    Args:
        num_slots, slot_bytes: size. quota: most slots of one peer; default half of them, at least one.
        device: where kernels copy out of the slots; None = the CPU does. on_device: the slots are memory of that device,
            else CPU memory, which is registered with it.
    Attributes:
        memory: uint8 [num_slots, slot_bytes]; no column where the slots are on a device.
        tensor: the slots as kernels see them, uint8 [num_slots, slot_bytes], cuda; None without a device.
        address, num_bytes: of all slots.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, quota: int | None = None, device: torch.device | None = None,
                 on_device: bool = False) -> None:
        self._pinned: pinned.PinnedMemory | None = None  # the first attribute, so that it is forgotten before the memory
        if num_slots < 1 or slot_bytes < 1:
            raise ConfigError(f"staging needs at least 1 slot of 1 byte, got {num_slots} of {slot_bytes}")
        self.quota = max(1, num_slots // 2) if quota is None else quota
        if not 1 <= self.quota <= num_slots:
            raise ConfigError(f"the staging quota must be in 1..{num_slots} slots, got {self.quota}")
        self.num_bytes, self.slot_bytes = num_slots * slot_bytes, slot_bytes
        self.tensor: Tensor | None = None
        self.memory: npt.NDArray[np.uint8]
        if device is not None and on_device:
            self.tensor = torch.empty((num_slots, slot_bytes), dtype=torch.uint8, device=device)
            self.memory = np.empty((num_slots, 0), dtype=np.uint8)
            self.address = self.tensor.data_ptr()
        else:
            self.memory = (np.empty(self.num_bytes, dtype=np.uint8) if device is None else self._pin(device)).reshape(
                num_slots, slot_bytes)
            self.address = int(self.memory.ctypes.data)
        self._free = list(range(num_slots - 1, -1, -1))
        self._owner: dict[int, str] = {}
        self._used: Counter[str] = Counter()

    def _pin(self, device: torch.device) -> npt.NDArray[np.uint8]:
        """Populated memory that is registered with CUDA, before the transport registers it. Sets `tensor`."""
        from hisparse.ops.cuda import mapped

        size = -(-self.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size)
        host_memory.check_memlock(size, 1)
        host_memory.populate(memory, size, chunk_bytes=64 << 20)
        host = np.frombuffer(memory, dtype=np.uint8)
        self._pinned = pinned.pin(host.ctypes.data, size, unit_bytes=mmap.PAGESIZE, page_bytes=mmap.PAGESIZE, device=device,
                                  registrar=mapped)
        self.tensor = self._pinned.tensor[: self.num_bytes].view(-1, self.slot_bytes)
        return host[: self.num_bytes]

    def slot_address(self, slot: int) -> int:
        return self.address + slot * self.slot_bytes

    def acquire(self, peer: str) -> int | None:
        """A slot for the peer; None = none is free or the peer's quota is used up."""
        if not self._free or self._used[peer] >= self.quota:
            return None
        slot = self._free.pop()
        self._owner[slot] = peer
        self._used[peer] += 1
        return slot

    def release(self, slot: int) -> None:
        """Raises InvariantError for a slot that is not taken."""
        peer = self._owner.pop(slot, None)
        if peer is None:
            raise InvariantError(f"staging slot {slot} is released but nobody holds it")
        self._used[peer] -= 1
        if not self._used[peer]:
            del self._used[peer]
        self._free.append(slot)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def check(self) -> None:
        """Each slot is free or owned, once; no peer is above the quota."""
        if sorted([*self._free, *self._owner]) != list(range(self.memory.shape[0])):
            raise InvariantError(f"staging slots are not conserved: free {self._free}, owned {self._owner}")
        if Counter(self._owner.values()) != self._used or any(n > self.quota for n in self._used.values()):
            raise InvariantError(f"staging slots by peer {dict(self._used)} do not match owners {self._owner}")

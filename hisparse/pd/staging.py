"""Bounded staging memory: fixed slots, a free list, and a quota per peer so that one hung peer cannot take them all."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from hisparse.errors import ConfigError, InvariantError


class SlotPool:
    """Slots of equal size in one allocation that is registered once.

    A slot stays taken until its holder releases it: after the event of its copies, or after its transfer drained.

    Args:
        num_slots, slot_bytes: size. quota: most slots of one peer; default half of them, at least one.
    Attributes:
        memory: uint8 [num_slots, slot_bytes].
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, quota: int | None = None) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ConfigError(f"staging needs at least 1 slot of 1 byte, got {num_slots} of {slot_bytes}")
        self.quota = max(1, num_slots // 2) if quota is None else quota
        if not 1 <= self.quota <= num_slots:
            raise ConfigError(f"the staging quota must be in 1..{num_slots} slots, got {self.quota}")
        self.memory: npt.NDArray[np.uint8] = np.empty((num_slots, slot_bytes), dtype=np.uint8)
        self._free = list(range(num_slots - 1, -1, -1))
        self._owner: dict[int, str] = {}
        self._used: Counter[str] = Counter()

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return int(self.memory.nbytes)

    @property
    def slot_bytes(self) -> int:
        return int(self.memory.shape[1])

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

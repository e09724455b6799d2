"""Which memory an agent has registered, and which GPU's it is: told to peers in front of the agent's own metadata."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hisparse.errors import TransferError
from hisparse.pd.ranges_head import RangesHead

CPU = -1
_HEAD = RangesHead(b"HSR1", "registered ranges", range_format="QQi")  # first address, bytes, device


class RegisteredRanges:
    """Ranges of one agent. Example: after `add(4096, 100, None)`, `device_of([4100], [8])` is CPU."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []  # first address, bytes, device

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return iter(self._ranges)

    def add(self, address: int, num_bytes: int, device: int | None) -> None:
        self._ranges.append((address, num_bytes, CPU if device is None else device))

    def device_of(self, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> int:
        """The GPU whose memory all of [address, address + size) are, or CPU.

        Raises:
            TransferError: one is in no range, or they are not of one kind.
        """
        ends = addresses + sizes
        if addresses.size:  # nearly always all of them lie in one range
            low, high = int(addresses.min()), int(ends.max())
            for first, num_bytes, device in self._ranges:
                if first <= low and high <= first + num_bytes:
                    return device
        kinds = np.full(addresses.shape, CPU - 1, dtype=np.int64)
        for first, num_bytes, device in self._ranges:
            kinds[(addresses >= first) & (ends <= first + num_bytes)] = device
        found = set(np.unique(kinds).tolist())
        if CPU - 1 in found:
            bad = int(addresses[np.flatnonzero(kinds == CPU - 1)[0]])
            raise TransferError(f"memory at {bad:#x} is not registered")
        if len(found) != 1:
            raise TransferError(f"one READ has memory of several kinds on one side: devices {sorted(found)} ({CPU} = CPU)")
        return int(found.pop())

    def wrap(self, metadata: bytes) -> bytes:
        """The ranges, then the agent's own metadata."""
        return _HEAD.pack(self._ranges, metadata)

    @classmethod
    def unwrap(cls, data: bytes) -> tuple[RegisteredRanges, bytes]:
        """What `wrap` made: the ranges, and the agent's own metadata.

        Raises:
            TransferError: it is something else.
        """
        ranges = cls()
        _, ranges._ranges, metadata = _HEAD.unpack(data)
        return ranges, metadata

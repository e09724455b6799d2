"""Page lists on their way to the device: pairs of a pinned buffer and one on the device, used again when the device is done."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hisparse.errors import InvariantError
from hisparse.ops.cuda import driver

MAX_SLOTS = 256
"""More unread lists than this mean that the device is not running."""
_LEAST_BYTES = 1 << 14


class ListSlot:
    """One list. `address`: of its copy on the device, in the order of the stream that was current."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._words: npt.NDArray[np.int32] = self._pinned.numpy().view(np.int32)
        self._read: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.num_bytes = num_bytes
        self.address = self._device.data_ptr()

    @property
    def is_free(self) -> bool:
        return bool(self._read.query())

    def fill(self, array: npt.NDArray[np.int32]) -> None:
        self._words[: array.size] = array.reshape(-1)
        code = driver.library().cuMemcpyHtoDAsync_v2(
            ctypes.c_void_p(self.address), ctypes.c_void_p(self._pinned.data_ptr()), ctypes.c_size_t(array.nbytes),
            ctypes.c_void_p(driver.current_stream(self._device.device.index)))
        driver.check(code, f"uploading a list of {array.nbytes} bytes")

    def launched(self) -> None:
        """What reads the list has been launched on the current stream: behind it the buffers are free."""
        self._read.record()


class ListUploads:
    """Uploads of int32 arrays to one device, by one thread, from any stream. When all buffers are unread, another is added.

    Stream: the current one; never waits; not for capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[ListSlot] = []
        self._next = 0

    def upload(self, array: npt.NDArray[np.int32]) -> ListSlot:
        """Call its `launched` behind the launch that reads it.

        Raises:
            InvariantError: the device has not read any of MAX_SLOTS earlier lists.
        """
        slot = self._take(array.nbytes)
        slot.fill(array)
        return slot

    def _take(self, num_bytes: int) -> ListSlot:
        size = max(_LEAST_BYTES, 1 << max(num_bytes - 1, 0).bit_length())
        for step in range(len(self._slots)):
            at = (self._next + step) % len(self._slots)
            if self._slots[at].is_free:
                if self._slots[at].num_bytes < num_bytes:
                    self._slots[at] = ListSlot(size, self._device)
                self._next = (at + 1) % len(self._slots)
                return self._slots[at]
        if len(self._slots) >= MAX_SLOTS:
            raise InvariantError(f"the device has read none of the last {MAX_SLOTS} page lists")
        slot = ListSlot(size, self._device)
        self._slots.insert(self._next, slot)
        self._next = (self._next + 1) % len(self._slots)
        return slot

"""Small uploads of a step: pinned buffers that are filled by the CPU and read by the device, without a wait.

A buffer is used again when the device has read it. When all are still unread, another one is added: the CPU never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.worker.streams import Mark, Place, StepEvent, Streams

ALIGN_BYTES = 16
MAX_SLOTS = 256
"""More unread uploads than this mean that the device is not running."""
Array = np.ndarray[Any, Any]


@dataclass(slots=True, eq=False)
class _Slot:
    buffer: Tensor
    bytes: Array
    mark: Mark | None = None


class PinnedRing:
    """Uploads of numpy arrays to one device. For the step's thread only.

    Args:
        streams: of the rank; its device is where uploads go. On the CPU an upload is a copy in ordinary memory.
        slot_bytes: size of a new buffer; one that is larger than this is made for a larger upload. slots: buffers at first.
        make_buffer: bytes -> uint8 tensor; pinned memory unless a test says otherwise.
    """

    def __init__(self, streams: Streams, *, slot_bytes: int = 1 << 16, slots: int = 4,
                 make_buffer: Callable[[int], Tensor] | None = None) -> None:
        self._streams = streams
        self._slot_bytes = slot_bytes
        self._make_buffer = make_buffer or _pinned_buffer
        self._slots: list[_Slot] = []
        self._next = 0
        if streams.is_cuda or make_buffer is not None:
            self._slots = [self._new_slot(slot_bytes) for _ in range(slots)]

    @property
    def num_slots(self) -> int:
        """Buffers now; grows when the device is late."""
        return len(self._slots)

    def upload(self, *arrays: Array, place: Place = Place.COMPUTE) -> list[Tensor]:
        """One copy of all `arrays` to the device; the tensors are views of one allocation.

        Args:
            place: the stream that copies, COMPUTE or DMA; the tensors belong to it. It must be torch's current stream.
        Stream: asynchronous on the current stream; not for capture.
        Raises:
            InvariantError: the device has not read any of MAX_SLOTS earlier uploads.
        """
        if not self._slots:
            return [torch.from_numpy(np.array(a)) for a in arrays]
        offsets, total = _pack([a.nbytes for a in arrays])
        slot = self._take(total)
        for array, offset in zip(arrays, offsets, strict=True):
            _fill(slot, offset, array)
        on_device = slot.buffer[:total].to(self._streams.device, non_blocking=True, copy=True)
        slot.mark = self._streams.record(StepEvent.STAGING_READ, place)
        return [
            on_device[offset : offset + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def _take(self, num_bytes: int) -> _Slot:
        for step in range(len(self._slots)):
            at = (self._next + step) % len(self._slots)
            slot = self._slots[at]
            if slot.mark is None or self._streams.reached(slot.mark):
                if slot.buffer.numel() < num_bytes:
                    slot = self._slots[at] = self._new_slot(num_bytes)
                self._next = (at + 1) % len(self._slots)
                return slot
        if len(self._slots) >= MAX_SLOTS:
            raise InvariantError(f"the device has read none of the last {MAX_SLOTS} uploads")
        slot = self._new_slot(num_bytes)
        self._slots.insert(self._next, slot)
        self._next = (self._next + 1) % len(self._slots)
        return slot

    def _new_slot(self, num_bytes: int) -> _Slot:
        size = max(self._slot_bytes, 1 << max(num_bytes - 1, 0).bit_length())
        buffer = self._make_buffer(size)
        return _Slot(buffer=buffer, bytes=buffer.numpy())


def _pack(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned byte offsets of consecutive areas, and their total."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // ALIGN_BYTES) * ALIGN_BYTES
    return offsets, total


def _fill(slot: _Slot, offset: int, array: Array) -> None:
    slot.bytes[offset : offset + array.nbytes].view(array.dtype)[:] = array.reshape(-1)


def _torch_dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


def _pinned_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

"""Small uploads of a step: pinned buffers that are filled by the CPU and read by the device, without a wait.

A buffer is used again when the device has read it. When all are still unread, another one is added: the CPU never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Field:
    """One input of a captured graph. `dtype` is a torch dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


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

    def upload_into(self, target: Tensor, arrays: Sequence[Array], offsets: Sequence[int]) -> None:
        """One copy into `target` uint8 [n]: `arrays[i]` at byte `offsets[i]`. Bytes in between are not defined.

        Stream: asynchronous on the compute stream.
        """
        total = max((offset + a.nbytes for a, offset in zip(arrays, offsets, strict=True)), default=0)
        if not self._slots:
            for array, offset in zip(arrays, offsets, strict=True):
                target[offset : offset + array.nbytes].view(_torch_dtype(array)).copy_(torch.from_numpy(array).reshape(-1))
            return
        slot = self._take(total)
        for array, offset in zip(arrays, offsets, strict=True):
            _fill(slot, offset, array)
        target[:total].copy_(slot.buffer[:total], non_blocking=True)
        slot.mark = self._streams.record(StepEvent.STAGING_READ, Place.COMPUTE)

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


@dataclass(slots=True, eq=False)
class StepInputs:
    """Inputs of a captured graph: fixed tensors on the device, all filled by one upload a step.

    Args:
        fields: name -> shape and dtype.

    Example: `inputs = StepInputs(ring, {"seats": Field((8,), torch.int32)})`; a graph reads `inputs["seats"]`; a step of 3
    rows calls `inputs.write(seats=np.array([4, 7, 1], np.int32))`, and entries 3..7 are -1, the padding.
    """

    ring: PinnedRing
    fields: Mapping[str, Field]
    padding: Mapping[str, int] = field(default_factory=dict)
    """Value of the entries behind a shorter array, by field; -1 where none is given (False for bool)."""
    _tensors: dict[str, Tensor] = field(init=False, default_factory=dict)
    _offsets: dict[str, int] = field(init=False, default_factory=dict)
    _bytes: Tensor = field(init=False)

    def __post_init__(self) -> None:
        offsets, total = _pack([f.nbytes for f in self.fields.values()])
        self._bytes = torch.zeros(total, dtype=torch.uint8, device=self.ring._streams.device)
        for (name, spec), offset in zip(self.fields.items(), offsets, strict=True):
            self._offsets[name] = offset
            self._tensors[name] = self._bytes[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)

    def __getitem__(self, name: str) -> Tensor:
        """The field's tensor on the device; its address never changes."""
        return self._tensors[name]

    def write(self, **arrays: Array) -> None:
        """Fills every field, in one upload. An array shorter than its field (in the first dimension) is padded.

        Stream: asynchronous on the compute stream, before what is launched next.
        Raises:
            InvariantError: a field is missing or unknown, or an array does not fit.
        """
        if arrays.keys() != self.fields.keys():
            raise InvariantError(f"step inputs are {sorted(self.fields)}, got {sorted(arrays)}")
        padded = []
        for name, spec in self.fields.items():
            array, dtype = arrays[name], _numpy_dtype(spec.dtype)
            if array.shape[1:] != spec.shape[1:] or array.shape[0] > spec.shape[0]:
                raise InvariantError(f"step input {name} of shape {array.shape} does not fit {spec.shape}")
            whole = np.empty(spec.shape, dtype=dtype)
            whole[: array.shape[0]] = array
            whole[array.shape[0] :] = self.padding.get(name, 0 if dtype == np.bool_ else -1)
            padded.append(whole)
        self.ring.upload_into(self._bytes, padded, [self._offsets[name] for name in self.fields])


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


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _pinned_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

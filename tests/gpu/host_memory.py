"""Registered host memory of a test, seen from both sides."""

from __future__ import annotations

import mmap
from types import TracebackType

import numpy as np
import torch
from torch import Tensor


class HostMemory:
    """Anonymous pages, registered with CUDA. A context manager: registration ends with it, tensors must not outlive it.

    Attributes:
        cpu: uint8 [num_bytes], the memory. cuda: uint8 [num_bytes], a CUDA tensor of the same bytes (zero-copy).
    """

    def __init__(self, num_bytes: int, fill: int | None = None) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        self.cpu: Tensor = torch.from_numpy(np.frombuffer(self._memory, dtype=np.uint8))
        if fill is not None:
            self.cpu.fill_(fill)
        self._address = self.cpu.data_ptr()
        portable_and_mapped = 1 | 2
        error = torch.cuda.cudart().cudaHostRegister(self._address, num_bytes, portable_and_mapped)
        assert int(error) == 0, f"cudaHostRegister of {num_bytes} bytes failed: {error}"
        from cupy.cuda import runtime

        device = runtime.pointerGetAttributes(self._address).devicePointer
        assert device, "registered memory has no device pointer"
        self.cuda: Tensor = torch.as_tensor(_Array(device, num_bytes), device="cuda")
        assert self.cuda.data_ptr() == device, "the alias was copied"

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.cuda.synchronize()
        assert int(torch.cuda.cudart().cudaHostUnregister(self._address)) == 0


class _Array:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None, "stream": None,
        }

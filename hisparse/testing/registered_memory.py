"""Host memory registered with CUDA, as the host pool gives it to kernels; for benchmarks without a pool."""

from __future__ import annotations

import mmap
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from hisparse.ops.cuda import mapped


class RegisteredMemory:
    """Anonymous pages, registered with CUDA. A context manager: registration ends with it, tensors must not outlive it.

    Attributes:
        cuda: uint8 [num_bytes], a CUDA tensor of these bytes (zero-copy).
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        self._address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self._device = torch.device("cuda", torch.cuda.current_device())
        mapped.register(self._address, num_bytes, self._device)
        self.cuda: Tensor = mapped.tensor_at(mapped.device_address(self._address, self._device), num_bytes, self._device)

    def __enter__(self) -> RegisteredMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.cuda.synchronize(self._device)
        mapped.unregister(self._address, self._device)

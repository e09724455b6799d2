"""A CUDA tensor over pinned CPU memory, as the host pool gives kernels one; for tests and benchmarks without a pool."""

from __future__ import annotations

import torch
from torch import Tensor


class _Pinned:
    """CUDA's view of a pinned CPU tensor; keeps it alive."""

    def __init__(self, pinned: Tensor) -> None:
        self.pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": (pinned.numel() * pinned.element_size(),), "typestr": "|u1", "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def alias_on_cuda(pinned: Tensor) -> Tensor:
    """The same bytes, shape and dtype on CUDA, zero-copy. `pinned` is contiguous and lives as long as the result."""
    return torch.as_tensor(_Pinned(pinned), device="cuda").view(pinned.dtype).view(pinned.shape)

"""A GPU that has no room left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def full_gpu() -> Iterator[None]:
    """No allocation of torch on the device succeeds, of whatever size; other processes have what they had."""
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        pytest.skip("without its cache torch does not limit what it takes: it would fill the GPU for others, too")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held = []
    try:
        for size in (2 << 20, 1 << 20, 1 << 16, 1 << 9):  # the rest of the blocks that torch keeps
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda:0"))
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

"""The host pool's body as memory of a device: registered in chunks, released in reverse, never half.

Kernels see one range. A copy by the driver (memcpy, so also `copy_`, `clone` and `cpu` of contiguous rows) fails when it spans
two chunks: it must end on a border, or be made by a kernel.

CUDA comes before NIXL and goes after it: a range that NIXL registered first is refused by CUDA, and its pin would end with
NIXL's. `HostPool` keeps that order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hisparse.config import GIB
from hisparse.errors import ConfigError, InvariantError

CHUNK_BYTES = 16 * GIB
"""Far below the 512 GiB that one registration may have, and under a second each, for the progress report."""
Progress = Callable[[int, int], None]
"""Called with (bytes registered, bytes in all)."""


class Registrar(Protocol):
    """What registers memory; `hisparse.ops.cuda.mapped`, or a fake one in tests."""

    def register(self, address: int, num_bytes: int, device: torch.device) -> None: ...
    def unregister(self, address: int, device: torch.device) -> None: ...
    def device_address(self, address: int, device: torch.device) -> int: ...
    def tensor_at(self, address: int, num_bytes: int, device: torch.device) -> Tensor: ...


def chunk_sizes(total_bytes: int, *, unit_bytes: int, page_bytes: int, chunk_bytes: int) -> list[int]:
    """Sizes that add up to `total_bytes`, where every border is a multiple of `unit_bytes` and of `page_bytes`.

    A copy of one unit (a page of one layer) then never spans two registrations. The last size is whatever is left.

    Raises:
        InvariantError: a size is not positive.

    Example: 100 KiB in units of 10 KiB, pages of 4 KiB, chunks of at most 50 KiB: borders at multiples of 20 KiB, so
    40, 40 and 20 KiB.
    """
    if min(total_bytes, unit_bytes, page_bytes, chunk_bytes) < 1:
        raise InvariantError(f"cannot cut {total_bytes} bytes into chunks of {chunk_bytes} (unit {unit_bytes})")
    step = math.lcm(unit_bytes, page_bytes)
    size = max(chunk_bytes // step, 1) * step
    whole, rest = divmod(total_bytes, size)
    return [size] * whole + ([rest] if rest else [])


class PinnedMemory:
    """One registered range. Made by `pin`; ends with `unpin`, or at the latest when it is forgotten.

    Attributes:
        tensor: uint8 [num_bytes] on the device, the same memory.
        num_chunks: registrations behind it.
    """

    def __init__(self, registrar: Registrar, device: torch.device, chunks: list[tuple[int, int]], tensor: Tensor) -> None:
        self.tensor = tensor
        self._chunks = chunks
        # memory that is given back while it is registered would make the next pool at its address impossible
        self._end = weakref.finalize(self, _release, registrar, device, tuple(chunks))
        self._end.atexit = False

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def unpin(self) -> None:
        """Releases the chunks in reverse. No kernel may be using them. Idempotent.

        Raises:
            InvariantError: the driver refused chunks (named); the others were released.
        """
        self._chunks = []
        self.tensor = torch.empty(0, dtype=torch.uint8)
        refused = self._end()
        if refused:
            raise InvariantError(f"unpinning the host pool: {'; '.join(refused)}")


def pin(
    address: int,
    num_bytes: int,
    *,
    unit_bytes: int,
    page_bytes: int,
    device: torch.device,
    registrar: Registrar,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
) -> PinnedMemory:
    """Registers [address, address + num_bytes), which should be populated: ten times faster than untouched memory.

    Args:
        unit_bytes: no copy is larger; chunk borders are multiples of it. num_bytes: a multiple of `page_bytes`.
    Raises:
        ConfigError: a chunk was refused (its place, size, reason and the fix), or kernels would not see the chunks as one
            range. Nothing stays registered.
    """
    sizes = chunk_sizes(num_bytes, unit_bytes=unit_bytes, page_bytes=page_bytes, chunk_bytes=chunk_bytes)
    done: list[tuple[int, int]] = []
    first_device_address = 0
    try:
        offset = 0
        for i, size in enumerate(sizes):
            at = address + offset
            try:
                registrar.register(at, size, device)
            except Exception as error:
                raise ConfigError(
                    f"cannot pin chunk {i + 1} of {len(sizes)} of the host pool ({size} bytes at offset {offset} of "
                    f"{num_bytes}) for {device}: {error}; {_fix(str(error))}"
                ) from error
            done.append((at, size))
            seen = registrar.device_address(at, device)
            if i == 0:
                first_device_address = seen
            elif seen != first_device_address + offset:
                raise ConfigError(
                    f"chunk {i + 1} of the host pool is at {seen:#x} on {device}, not {offset} bytes behind the first at "
                    f"{first_device_address:#x}: kernels need one range; lower cache.host_pool_gib until one "
                    f"registration of {chunk_bytes / GIB:g} GiB covers the pool"
                )
            offset += size
            if progress is not None:
                progress(offset, num_bytes)
        tensor = registrar.tensor_at(first_device_address, num_bytes, device)
    except BaseException:
        _release(registrar, device, done)
        raise
    return PinnedMemory(registrar, device, done, tensor)


def _release(registrar: Registrar, device: torch.device, chunks: Sequence[tuple[int, int]]) -> list[str]:
    """Unregisters in reverse, all of them whatever happens; returns what was refused."""
    refused = []
    for at, size in reversed(chunks):
        try:
            registrar.unregister(at, device)
        except Exception as error:
            refused.append(f"{size} bytes at {at:#x}: {error}")
    return refused


def _fix(reason: str) -> str:
    if "ALREADY_REGISTERED" in reason:
        return "something registered this memory first (NIXL must come after CUDA)"
    if "OUT_OF_MEMORY" in reason:
        return "lower cache.host_pool_gib, or raise the locked-memory limit (ulimit -l unlimited, docker --ulimit memlock=-1)"
    if "INVALID_VALUE" in reason:
        return "memory of a file can be pinned only if the file is in a tmpfs, such as /dev/shm"
    return "lower cache.host_pool_gib, or see the kernel log of this node (dmesg) for why"

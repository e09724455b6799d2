"""GPU memory of other processes of this host, mapped here: exported, opened, read by a kernel."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hisparse.errors import InvariantError
from hisparse.ops.cuda import driver
from hisparse.ops.cuda.pages import load_read_pieces, read_pieces

HANDLE_BYTES = 64
READ_CTAS = 16
"""CTAs of a READ: nearly enough in flight for the link between two GPUs, few of the device's processors: with 24 and more a
forward beside them takes 1.7 times as long."""
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class PeerMemory:
    """What one thread of a rank exports, maps and reads. Construction and every call are that thread's.

    Args:
        device: the rank's, the thread's current one. ctas: of a READ.
    """

    def __init__(self, device: torch.device, *, ctas: int = READ_CTAS) -> None:
        self._ctas = ctas
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        load_read_pieces()

    def export(self, address: int, num_bytes: int) -> tuple[bytes, int]:
        """What another process needs to map GPU memory of this one: a handle of the allocation, and the offset in it.

        Raises:
            DriverError: it is memory of a kind that cannot be shared. InvariantError: more than one allocation.
        """
        base, size = self._allocation(address)
        if address + num_bytes > base + size:
            raise InvariantError(f"{num_bytes} bytes at {address:#x} are more than the allocation of {size} at {base:#x}")
        handle = _Handle()
        driver.check(driver.library().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base)), "cuIpcGetMemHandle")
        return bytes(handle), address - base

    def open(self, handle: bytes) -> tuple[int, int]:
        """Maps an allocation of another process: its address here, and its bytes.

        Raises:
            DriverError: the process is gone, is this one, is on another host, or its GPU is out of reach.
        """
        address = ctypes.c_uint64()
        code = driver.library().cuIpcOpenMemHandle_v2(ctypes.byref(address), _Handle.from_buffer_copy(handle),
                                                      ctypes.c_uint(_LAZY_PEER_ACCESS))
        driver.check(code, "cuIpcOpenMemHandle")
        try:
            return self._allocation(address.value)
        except driver.DriverError:
            self.close(address.value)  # nobody else knows of the mapping, which keeps the memory from being free
            raise

    def close(self, address: int) -> None:
        """Ends a mapping, by the address that `open` gave. No READ may be under way. Raises DriverError."""
        driver.check(driver.library().cuIpcCloseMemHandle(ctypes.c_uint64(address)), "cuIpcCloseMemHandle")

    def read(self, pieces: npt.NDArray[np.int64]) -> torch.cuda.Event:
        """Copies pieces [n, 3] (source address, target address, bytes; multiples of 16) on a stream of its own.

        Returns: the event behind the last byte. Never waits, and takes no memory: the GPU may be full.
        Raises:
            RuntimeError: the device did not take all of it; some of it may be under way until `wait` returns.
        """
        with torch.cuda.stream(self._stream):
            read_pieces(pieces, ctas=self._ctas)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def wait(self) -> None:
        """Until every READ is over."""
        self._stream.synchronize()

    def _allocation(self, address: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = driver.library().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        driver.check(code, "cuMemGetAddressRange")
        return base.value, size.value

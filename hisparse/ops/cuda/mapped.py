"""Host memory that kernels read and write in place: registered with the driver, seen as CUDA tensors.

Through the driver's own interface, which keeps no "last error" that a later, unrelated launch could stumble over.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import ConfigError, InvariantError

_PORTABLE_AND_MAPPED = 0x01 | 0x02
"""CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP."""


class RegistrationError(Exception):
    """The driver refused. `code` is CUDA's name of the reason, e.g. CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code


def register(address: int, num_bytes: int, device: torch.device) -> None:
    """Pins and maps [address, address + num_bytes), both multiples of the page size, for every context of the process.

    Stream: none; may take 0.05 s/GiB. Raises RegistrationError.
    """
    _call("cuMemHostRegister_v2", device, ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _PORTABLE_AND_MAPPED)


def unregister(address: int, device: torch.device) -> None:
    """Ends one registration, by its first address. No kernel may use it any more. Raises RegistrationError."""
    _call("cuMemHostUnregister", device, ctypes.c_void_p(address))


def device_address(address: int, device: torch.device) -> int:
    """Where kernels find registered host address `address`. Raises RegistrationError when it is not registered."""
    out = ctypes.c_uint64()
    _call("cuMemHostGetDevicePointer_v2", device, ctypes.byref(out), ctypes.c_void_p(address), ctypes.c_uint(0))
    return out.value


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] CUDA tensor at a device address; owns nothing, so the memory must outlive it.

    Raises:
        InvariantError: torch made a copy, or put the tensor elsewhere.
    """
    tensor: Tensor = torch.as_tensor(_Memory(address, num_bytes), device=device)
    if tensor.data_ptr() != address or tensor.device != device or tensor.numel() != num_bytes:
        raise InvariantError(
            f"torch sees {num_bytes} bytes at {address:#x} on {device} as {tensor.numel()} bytes at {tensor.data_ptr():#x} "
            f"on {tensor.device}"
        )
    return tensor


class _Memory:
    """Device memory for `torch.as_tensor`."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }


def _call(name: str, device: torch.device, *args: Any) -> None:
    library = _driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # binds the device's primary context to this thread
        code = getattr(library, name)(*args)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        raise RegistrationError(name, (text.value or str(code).encode()).decode())


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"the CUDA driver library does not load: {error}") from error

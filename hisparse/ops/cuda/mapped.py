"""Host memory that kernels read and write in place: registered with the driver, seen as CUDA tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.ops.cuda import driver
from hisparse.ops.cuda.driver import DriverError

_PORTABLE_AND_MAPPED = 0x01 | 0x02
"""CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP."""


class RegistrationError(DriverError):
    """The driver refused. `code` is CUDA's name of the reason, e.g. CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED."""


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
    driver.bind_context(torch.cuda.current_device() if device.index is None else device.index)
    with torch.cuda.device(device):
        code = getattr(driver.library(), name)(*args)
    if code:
        raise RegistrationError(name, driver.error_name(code))

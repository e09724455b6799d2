"""The CUDA driver's C interface: loaded once, errors by name.

Through the driver, and not the runtime, which keeps a "last error" that a later, unrelated launch could stumble over.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from hisparse.errors import ConfigError

INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: this thread has used no device yet."""
_INVALID_CLUSTER_SIZE = 912
"""CUDA_ERROR_INVALID_CLUSTER_SIZE: no cluster of that size has room on the device."""
_CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""
_SHARED_BYTES_OPT_IN, _STATIC_SHARED_BYTES = 97, 1
"""CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES."""


class DriverError(RuntimeError):
    """The driver refused. `code` is CUDA's name of the reason, e.g. CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code


@functools.cache
def library() -> Any:
    """libcuda. Raises ConfigError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"the CUDA driver library does not load: {error}; install the NVIDIA driver, or set model.device to "
                          "cpu") from error


def error_name(code: int) -> str:
    """CUDA's name of a status, e.g. CUDA_ERROR_OUT_OF_MEMORY."""
    text = ctypes.c_char_p()
    library().cuGetErrorName(code, ctypes.byref(text))
    return (text.value or str(code).encode()).decode()


def check(code: int, call: str) -> None:
    """Raises DriverError unless `code` is success."""
    if code:
        raise DriverError(call, error_name(code))


def bind_context(device: int) -> None:
    """Makes the primary context of `device` current on this thread, as torch does before its own first call."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()


def copy_async(target: int, source: int, num_bytes: int) -> None:
    """Copies between addresses that the device knows: its own, or registered host memory (within one registration).

    Stream: torch's current one; returns at once.
    Raises:
        DriverError: an address that the device does not know, or an earlier launch failed.
    """
    stream = torch.cuda.current_stream().cuda_stream
    code = library().cuMemcpyAsync(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes),
                                   ctypes.c_void_p(stream))
    check(code, f"copy of {num_bytes} bytes")


def most_shared_bytes(function: int, device: int) -> int:
    """Dynamic shared memory that a CTA of `function` can have on `device` at most, once its limit is raised."""
    limit, static = ctypes.c_int(), ctypes.c_int()
    check(library().cuDeviceGetAttribute(ctypes.byref(limit), _SHARED_BYTES_OPT_IN, device), "shared memory of a CTA")
    check(library().cuFuncGetAttribute(ctypes.byref(static), _STATIC_SHARED_BYTES, ctypes.c_void_p(function)),
          "shared memory of a function")
    return limit.value - static.value


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes, here the three dimensions of a cluster."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("dimensions", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint))


def max_active_clusters(function: int, cluster: int, threads: int, shared_bytes: int) -> int:
    """Clusters of `cluster` CTAs that the current device runs at once, 0 if none has room (cuOccupancyMaxActiveClusters).

    Depends on how the device's processors are grouped, in a MIG slice on which of them it has.

    Args:
        function: handle of the driver. threads, shared_bytes: of a CTA; its limit of shared memory must be raised already.
    Raises:
        DriverError: the driver cannot tell.
    """
    attribute = _Attribute(id=_CLUSTER_DIMENSION, dimensions=(cluster, 1, 1))
    config = _LaunchConfig(grid=(cluster, 1, 1), block=(threads, 1, 1), shared_bytes=shared_bytes, num_attributes=1,
                           attributes=ctypes.addressof(attribute))
    found = ctypes.c_int()
    code = library().cuOccupancyMaxActiveClusters(ctypes.byref(found), ctypes.c_void_p(function), ctypes.byref(config))
    if code == _INVALID_CLUSTER_SIZE:
        return 0
    check(code, f"room for clusters of {cluster} CTAs")
    return found.value


def launch_calls() -> tuple[Callable[..., None], Callable[[int], int]]:
    """cuLaunchKernel, by CuPy's compiled binding, which costs a third of a call through ctypes and raises RuntimeError with a
    `status`; and device -> the driver's handle of torch's current stream, at a tenth of the cost of a Stream object."""
    from cupy_backends.cuda.api.driver import launchKernel

    return launchKernel, torch._C._cuda_getCurrentRawStream

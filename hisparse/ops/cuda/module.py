"""Compiled kernels: one NVRTC instance per (source, function, definitions), launched on torch's current stream.

The sources need no CUDA headers, so NVRTC (the toolkit's or the `nvidia-cuda-nvrtc` wheel's) is all that is required.
CuPy compiles, loads and keeps the compiled instances on disk; launches go to the driver directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import ConfigError, InvariantError
from hisparse.ops.cuda import driver
from hisparse.ops.sources import kernel_sources

Argument = Tensor | int | float | bytes | None
_Key = tuple[str, str, tuple[tuple[str, int], ...], str]
OPTIONS = ("-std=c++17", "-default-device", "--extra-device-vectorization")
_MAX_PARAMETERS = 64


@dataclass(frozen=True, slots=True)
class Instance:
    """One compiled variant: `function` of `kernels/<source>`, with `-D` definitions.

    Example: `Instance("replay.cu", "replay", {"ROW_BYTES": 656})`.
    """

    source: str
    function: str
    defines: Mapping[str, int] = field(default_factory=dict)
    architecture: str = ""
    """The only one it compiles for, e.g. "sm_90a" (whose instructions no later one has); empty: any."""

    def options(self) -> tuple[str, ...]:
        """Compiler options, in a fixed order, without the architecture."""
        return OPTIONS + tuple(f"-D{name}={value}" for name, value in sorted(self.defines.items()))

    def key(self) -> _Key:
        return self.source, self.function, tuple(sorted(self.defines.items())), self.architecture


class Kernel:
    """A loaded function, ready to be launched: where its parameters lie is asked once, a launch packs them and makes one call.

    Stream: torch's current stream of the device that it was loaded for, which must be the current device; never synchronises;
    may be captured in a CUDA graph once it has been launched outside of one.

    Args:
        function: handle of the driver. owner: what keeps it loaded. name: for errors.
    Raises:
        InvariantError: a parameter that is neither a pointer, nor `long long`, nor `float`.
    """

    def __init__(self, function: int, name: str, device: int, owner: object = None) -> None:
        self._function, self._name, self._device, self._owner = function, name, device, owner
        self._parameters = struct.Struct(_parameter_format(function, name))
        self._block = ctypes.create_string_buffer(max(self._parameters.size, 1))
        self._size = ctypes.c_size_t(self._parameters.size)
        block_at, size_at = ctypes.addressof(self._block), ctypes.addressof(self._size)
        # of cuLaunchKernel: the arguments as one block, instead of a pointer to each
        self._extra = (ctypes.c_void_p * 5)(_BUFFER, block_at, _BUFFER_SIZE, size_at, 0)
        self._extra_at = ctypes.addressof(self._extra)
        self._pack_into = self._parameters.pack_into
        self._launch, self._stream = driver.launch_calls()
        self._lock = threading.Lock()
        self._shared_limit = 0

    def __call__(
        self, grid: Sequence[int], threads: int, args: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Launches.

        Args:
            grid: up to three numbers of CTAs. threads: of a CTA.
            args: tensor -> pointer, None -> null pointer, int -> `long long`, float -> `float`, bytes -> a struct (the rest of
                it is zeros). A tensor must live as long as the stream may run the launch; torch's allocator sees to it for the
                current stream.
        Raises:
            InvariantError: a tensor is not on a CUDA device, or the arguments are not what the function takes.
            DriverError: the driver refused the launch, or an earlier one failed on the device.
        """
        values = [  # plain integers first: most arguments are, and a launch is a few microseconds in all
            arg if type(arg) is int else 0 if arg is None else self._pointer(arg) if isinstance(arg, Tensor) else arg
            for arg in args
        ]
        x, y, z = (*grid, 1, 1)[:3]
        stream = self._stream(self._device)
        with self._lock:  # the driver has read the block when the call returns
            try:
                self._pack_into(self._block, 0, *values)
                self._launch(self._function, x, y, z, threads, 1, 1, shared_bytes, stream, 0, self._extra_at)
            except struct.error as error:
                kinds = ", ".join(type(arg).__name__ for arg in args)
                raise InvariantError(f"{self._name} takes {self._parameters.format} (q = pointer or integer, f = float, s = "
                                     f"struct), got {len(args)} arguments ({kinds}): {error}") from error
            except RuntimeError as error:
                self._launch_again(error, (x, y, z), threads, shared_bytes, stream)

    def _pointer(self, arg: Tensor) -> int:
        if not arg.is_cuda:
            raise InvariantError(f"{self._name}: a tensor of {list(arg.shape)} is on {arg.device}, not on CUDA")
        return arg.data_ptr()

    def _launch_again(self, error: RuntimeError, grid: tuple[int, int, int], threads: int, shared_bytes: int,
                      stream: int) -> None:
        """Once, with a context, on a thread that had none; else the error, with what was launched."""
        try:
            if getattr(error, "status", None) != driver.INVALID_CONTEXT:
                raise error
            driver.bind_context(self._device)
            self._launch(self._function, *grid, threads, 1, 1, shared_bytes, stream, 0, self._extra_at)
        except RuntimeError as final:
            what = f"{self._name}, grid {list(grid)} of {threads} threads and {shared_bytes} bytes of shared memory"
            raise driver.DriverError(f"{what}, on cuda:{self._device}", str(final)) from final

    def allow_large_clusters(self) -> None:
        """Lets the function run with clusters of 16 CTAs, which not every device has room for: see `room`."""
        self._set_attribute(14, 1)  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED

    def has_room(self, cluster: int, threads: int, shared_bytes: int) -> bool:
        """Whether the device can run one cluster of `cluster` CTAs. Ask after the `allow_` calls."""
        return driver.max_active_clusters(self._function, cluster, threads, shared_bytes) > 0

    def allow_shared_bytes(self, num_bytes: int) -> None:
        """Raises the limit of dynamic shared memory (48 KiB otherwise); never lowers it, for others launch the function too."""
        with self._lock:
            if num_bytes > self._shared_limit:
                self._set_attribute(8, num_bytes)  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._shared_limit = num_bytes

    def most_shared_bytes(self) -> int:
        """Dynamic shared memory that a CTA can have at most."""
        return driver.most_shared_bytes(self._function, self._device)

    def _set_attribute(self, attribute: int, value: int) -> None:
        code = driver.library().cuFuncSetAttribute(ctypes.c_void_p(self._function), attribute, value)
        driver.check(code, f"{self._name}: attribute {attribute} = {value}")


_BUFFER, _BUFFER_SIZE = 1, 2
"""CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE."""


def _parameter_format(function: int, name: str) -> str:
    """Of `struct`: the parameters where the function has them."""
    offset, size, form = ctypes.c_size_t(), ctypes.c_size_t(), "="
    for index in range(_MAX_PARAMETERS):
        code = driver.library().cuFuncGetParamInfo(
            ctypes.c_void_p(function), ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size))
        if code:  # there is no such parameter
            return form
        if size.value not in (4, 8) and size.value < 16:
            raise InvariantError(f"{name}: parameter {index} has {size.value} bytes; kernels take pointers, long long, float "
                                 "and structs of 16 bytes and more")
        gap = offset.value - struct.calcsize(form)
        form += ("x" * gap) + {8: "q", 4: "f"}.get(size.value, f"{size.value}s")
    raise InvariantError(f"{name} takes more than {_MAX_PARAMETERS} parameters")


def load(instance: Instance) -> Kernel:
    """The loaded instance for the current device; compiled once (2 to 8 s), then from CuPy's cache on disk.

    Raises:
        ConfigError: no CuPy, no NVRTC, no sources, or the source does not compile (with the compiler's messages).
    """
    return _kernel(instance.key(), torch.cuda.current_device())


def kernel(source: str, function: str, **defines: int) -> Kernel:
    """`load` of an instance that compiles for any architecture; cheap enough for every launch."""
    return _kernel((source, function, tuple(defines.items()), ""), torch.cuda.current_device())


@functools.cache
def _kernel(key: _Key, device: int) -> Kernel:
    source, function, defines, architecture = key
    instance = Instance(source, function, dict(defines), architecture)
    cupy = _cupy()
    path = kernel_sources() / source
    options = (*instance.options(), f"-I{path.parent}")
    try:
        with cupy.cuda.Device(device):
            if architecture:  # CuPy compiles for "sm_90" alone
                if key in _ahead:
                    _ahead[key].wait()
                module = cupy.RawModule(path=str(_cubin_file(instance)))  # what did not compile ahead is tried again
            else:
                module = cupy.RawModule(code=path.read_text(), options=options, backend="nvrtc")
            loaded = module.get_function(function).kernel
            driver.bind_context(device)
            return Kernel(loaded.ptr, f"{source}:{function}", device, owner=loaded)
    except cupy.cuda.compiler.CompileException as error:
        raise ConfigError(f"{path} does not compile with {' '.join(options)}: {error}") from error
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"cannot load {source}: {error}; NVRTC is needed: pip install nvidia-cuda-nvrtc, or a CUDA toolkit"
        ) from error


_ahead: dict[_Key, threading.Event] = {}
"""Instances that are compiled on a thread; set once that has been tried. Writer: `compile_ahead`."""


def compile_ahead(instances: Iterable[Instance]) -> None:
    """Starts compiling instances of one architecture on threads, at most one a core; `load` waits for the one that it needs.

    Several that a process will need one after the other are then there in the time of one or two. Returns at once; what does
    not compile is `load`'s to tell. A process that ends waits for those that are being compiled and begins no other.
    """
    waiting: deque[Instance] = deque()
    for instance in instances:
        if instance.key() not in _ahead:
            _ahead[instance.key()] = threading.Event()
            waiting.append(instance)
    for _ in range(min(len(waiting), os.cpu_count() or 1)):
        threading.Thread(target=_compile_all, args=(waiting,), name="nvrtc").start()


def _compile_all(waiting: deque[Instance]) -> None:
    """On a thread that the end of the process waits for: NVRTC may not run beside it."""
    while True:
        try:
            instance = waiting.popleft()
        except IndexError:
            return
        try:
            if threading.main_thread().is_alive():
                with contextlib.suppress(Exception):  # `load` tries it again
                    _cubin_file(instance)
        finally:
            _ahead[instance.key()].set()


def _cubin_file(instance: Instance) -> Path:
    """The instance compiled for its architecture, in CuPy's cache directory; compiled again when a source changes."""
    sources = kernel_sources()
    parts = [repr((instance.key(), instance.options(), nvrtc_version())), (sources / instance.source).read_text()]
    parts += [path.read_text() for path in sorted(sources.glob("*.cuh"))]
    name = f"hisparse-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.cubin"
    file = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache") / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as half:
            half.write(compile_cubin(instance, instance.architecture))
        os.replace(half.name, file)
    return file


def compile_cubin(instance: Instance, architecture: str) -> bytes:
    """Compiles without a device, e.g. for "sm_90a"; what CI checks every instance with.

    Raises:
        ConfigError: NVRTC is missing, or the source does not compile (with its messages).
    """
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise ConfigError(f"compiling kernels needs CuPy: pip install hisparse[cuda] ({error})") from error
    path = kernel_sources() / instance.source
    options = (*instance.options(), f"-I{path.parent}", f"-arch={architecture}", "-ftz=true")  # as CuPy adds when it compiles
    program = nvrtc.createProgram(path.read_text(), instance.source, (), ())
    try:
        nvrtc.compileProgram(program, options)
        cubin: bytes = nvrtc.getCUBIN(program)
        return cubin
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise ConfigError(f"{path} does not compile for {architecture} with {' '.join(options)}:\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the compiler. Raises ConfigError, with the fix, when CuPy or NVRTC does not load."""
    _cupy()
    try:
        from cupy_backends.cuda.libs import nvrtc

        major, minor = nvrtc.getVersion()
        return major, minor
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(f"NVRTC does not load: {error}; pip install nvidia-cuda-nvrtc, or a CUDA toolkit") from error


@functools.lru_cache(maxsize=1)
def _cupy() -> Any:
    try:
        import cupy
        import cupy.cuda.compiler
    except ImportError as error:
        raise ConfigError(f"CUDA kernels are launched through CuPy: pip install hisparse[cuda] ({error})") from error
    return cupy

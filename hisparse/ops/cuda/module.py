"""Compiled kernels: one NVRTC instance per (source, function, definitions), launched on torch's current stream.

The sources need no CUDA headers, so NVRTC (the toolkit's or the `nvidia-cuda-nvrtc` wheel's) is all that is required.
CuPy keeps the compiled instances on disk.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import ConfigError, InvariantError
from hisparse.ops.sources import kernel_sources

Argument = Tensor | int | float | None
_Key = tuple[str, str, tuple[tuple[str, int], ...], str]
OPTIONS = ("-std=c++17", "-default-device", "--extra-device-vectorization")


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
    """A loaded function.

    Stream: torch's current stream of the current device; never synchronises; may be captured in a CUDA graph once it
    has been launched outside of one.
    """

    def __init__(self, function: Any, name: str) -> None:
        self._function = function
        self._name = name

    def __call__(
        self, grid: Sequence[int], threads: int, args: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Launches.

        Args:
            grid: up to three numbers of CTAs. threads: of a CTA.
            args: tensor -> pointer, None -> null pointer, int -> `long long`, float -> `float`. A tensor must live as
                long as the stream may run the launch; torch's allocator sees to it for the current stream.
        Raises:
            InvariantError: a tensor is not on a CUDA device.
        """
        cupy = _cupy()
        values: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor):
                if not arg.is_cuda:
                    raise InvariantError(f"{self._name}: a tensor of {list(arg.shape)} is on {arg.device}, not on CUDA")
                values.append(arg.data_ptr())
            elif arg is None:
                values.append(0)
            else:
                values.append(cupy.float32(arg) if isinstance(arg, float) else cupy.int64(arg))
        with _stream(torch.cuda.current_stream().cuda_stream, torch.cuda.current_device()):
            self._function(tuple(grid), (threads,), tuple(values), shared_mem=shared_bytes)

    def allow_large_clusters(self) -> None:
        """Lets the function run with clusters of 16 CTAs, which not every device has room for."""
        driver = _cupy().cuda.driver
        non_portable = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        driver.funcSetAttribute(self._function.kernel.ptr, non_portable, 1)

    def allow_shared_bytes(self, num_bytes: int) -> None:
        """Raises the limit of dynamic shared memory (48 KiB otherwise)."""
        self._function.max_dynamic_shared_size_bytes = num_bytes


def load(instance: Instance) -> Kernel:
    """The loaded instance for the current device; compiled once (2 to 8 s), then from CuPy's cache on disk.

    Raises:
        ConfigError: no CuPy, no NVRTC, no sources, or the source does not compile (with the compiler's messages).
    """
    return _kernel(instance.key(), torch.cuda.current_device())


def kernel(source: str, function: str, **defines: int) -> Kernel:
    """`load` of an instance that compiles for any architecture."""
    return load(Instance(source, function, defines))


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
                module = cupy.RawModule(path=str(_cubin_file(instance)))
                return Kernel(module.get_function(function), f"{source}:{function}")
            module = cupy.RawModule(code=path.read_text(), options=options, backend="nvrtc")
            return Kernel(module.get_function(function), f"{source}:{function}")
    except cupy.cuda.compiler.CompileException as error:
        raise ConfigError(f"{path} does not compile with {' '.join(options)}: {error}") from error
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"cannot load {source}: {error}; NVRTC is needed: pip install nvidia-cuda-nvrtc, or a CUDA toolkit"
        ) from error


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


@functools.lru_cache(maxsize=64)
def _stream(pointer: int, device: int) -> Any:
    return _cupy().cuda.Stream.from_external(_Pointer(pointer, device))


class _Pointer:
    """What `Stream.from_external` asks of another library's stream."""

    def __init__(self, pointer: int, device: int) -> None:
        self._pointer = pointer
        self.device = device

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer

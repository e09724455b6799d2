"""Strided copies by the copy engine, which uses no multiprocessor; CuPy's binding, as torch stages strided host copies."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hisparse.errors import ConfigError


def copy_strided(target: int, target_stride: int, source: int, source_stride: int, width: int, height: int) -> None:
    """Copies `height` pieces of `width` bytes between addresses that the device knows (its own, or registered host memory).

    Piece i goes from `source + i * source_stride` to `target + i * target_stride`; strides are at least `width`.
    Stream: the current one; returns at once.
    """
    if not width or not height:
        return
    stream = torch.cuda.current_stream().cuda_stream
    runtime = _runtime()
    if height == 1 or width == target_stride == source_stride:
        runtime.memcpyAsync(target, source, width * height, runtime.memcpyDefault, stream)
    else:
        runtime.memcpy2DAsync(target, target_stride, source, source_stride, width, height, runtime.memcpyDefault, stream)


@functools.lru_cache(maxsize=1)
def _runtime() -> Any:
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise ConfigError(f"copies by the copy engine need CuPy: pip install hisparse[cuda] ({error})") from error
    return runtime

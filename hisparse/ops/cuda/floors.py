"""What benchmarks compare our kernels with: the least that a resolver must do, and the copy engine."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops.cuda.module import Kernel

_SOURCE = r"""
extern "C" __global__ void nothing() {}
extern "C" __global__ void lookup_floor(const int* topk, long long k, const int* seats, const int* resident, long long pages,
                                        const short* slots, long long positions, const int* blocks, long long num_blocks,
                                        int* out) {
    const long long n = blockIdx.y, c = blockIdx.x * 256ll + threadIdx.x;
    const int seat = seats[n];
    if (c >= k) return;
    const int p = topk[n * k + c];
    const int block = resident[seat * pages + (p >> 6)], slot = slots[seat * positions + p];
    if (block <= 0 && slot >= 0) out[n * k + c] = blocks[seat * num_blocks + (slot >> 6)] * 64 + (slot & 63);
    else out[n * k + c] = block > 0 ? block * 64 + (p & 63) : -1;
}
"""


def floor_kernels() -> dict[str, Kernel]:
    """`nothing()`, and `lookup_floor`: the two table reads that any resolver makes, and no more. By name."""
    import cupy

    module = cupy.RawModule(code=_SOURCE, options=("-std=c++17",), backend="nvrtc")
    loaded = {name: module.get_function(name).kernel for name in ("nothing", "lookup_floor")}
    return {name: Kernel(function.ptr, name, torch.cuda.current_device(), owner=function) for name, function in loaded.items()}


def engine_copy(target: Tensor, source: Tensor, num_bytes: int) -> None:
    """The first bytes of `source`, by the copy engine, on the current stream; one of the two may be mapped host memory."""
    from cupy.cuda import runtime

    stream = torch.cuda.current_stream().cuda_stream
    runtime.memcpyAsync(target.data_ptr(), source.data_ptr(), num_bytes, runtime.memcpyDefault, stream)

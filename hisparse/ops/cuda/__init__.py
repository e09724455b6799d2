"""The CUDA backend: the operations of `hisparse.ops.reference` as kernels, each bound by that module's contract."""

from hisparse.ops.cuda.attention import sparse_mla

__all__ = ["sparse_mla"]

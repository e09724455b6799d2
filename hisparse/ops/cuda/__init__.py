"""The CUDA backend: the operations of `hisparse.ops.reference` for tensors on a GPU, without synchronisation."""

from hisparse.ops.cuda.indexer import index_topk, write_keys

__all__ = ["index_topk", "write_keys"]

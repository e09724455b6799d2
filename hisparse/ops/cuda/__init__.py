"""The CUDA backend: the operations of `hisparse.ops.reference`, on the current stream, without host synchronisation."""

from hisparse.ops.cuda.append import append_rows, mark_rows
from hisparse.ops.cuda.attention import sparse_mla
from hisparse.ops.cuda.indexer import index_topk, write_keys
from hisparse.ops.cuda.mirror import mirror_rows
from hisparse.ops.cuda.pages import PageCopier
from hisparse.ops.cuda.replay import replay, reset_seats
from hisparse.ops.cuda.resolve import resolve, resolve_pages
from hisparse.ops.cuda.rope import rotate_heads

__all__ = [
    "PageCopier",
    "append_rows",
    "index_topk",
    "mark_rows",
    "mirror_rows",
    "replay",
    "reset_seats",
    "resolve",
    "resolve_pages",
    "rotate_heads",
    "sparse_mla",
    "write_keys",
]

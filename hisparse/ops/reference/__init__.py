"""Every operation in plain, vectorised torch: the CPU backend, and the contract of every other backend.

Row ids, host rows and byte offsets are int64 throughout. Nothing here allocates blocks or knows requests.
"""

from hisparse.ops.reference.attention import DEFAULT_GATHER_ROWS, sparse_mla
from hisparse.ops.reference.fp8 import dequantize_rows, quantize_rows
from hisparse.ops.reference.indexer import index_topk, write_keys
from hisparse.ops.reference.pages import PageCopier
from hisparse.ops.reference.resolve import replay, reset_seat, reset_seats, resolve, resolve_pages
from hisparse.ops.reference.rope import rotate_heads
from hisparse.ops.reference.rows import append_rows, mark_rows, mirror_rows

__all__ = [
    "DEFAULT_GATHER_ROWS",
    "PageCopier",
    "append_rows",
    "dequantize_rows",
    "index_topk",
    "mark_rows",
    "mirror_rows",
    "quantize_rows",
    "replay",
    "reset_seat",
    "reset_seats",
    "resolve",
    "resolve_pages",
    "rotate_heads",
    "sparse_mla",
    "write_keys",
]

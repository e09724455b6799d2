"""Every operation in plain, vectorised torch: the CPU backend, and the contract of every other backend.

Row ids, host rows and byte offsets are int64 throughout. Nothing here allocates blocks or knows requests.
"""

from hisparse.ops.reference.attention import DEFAULT_GATHER_ROWS, sparse_mla
from hisparse.ops.reference.resolve import replay, reset_seat, reset_seats, resolve, resolve_pages
from hisparse.ops.reference.rows import append, copy_pages

__all__ = [
    "DEFAULT_GATHER_ROWS",
    "append",
    "copy_pages",
    "replay",
    "reset_seat",
    "reset_seats",
    "resolve",
    "resolve_pages",
    "sparse_mla",
]

"""Every operation on CUDA; the contract of each is that of `hisparse.ops.reference`."""

from hisparse.ops.cuda.append import append_rows, mark_rows
from hisparse.ops.cuda.pages import PageCopier, copy_pages

__all__ = ["PageCopier", "append_rows", "copy_pages", "mark_rows"]

"""The CUDA backend: the functions of `hisparse.ops.reference`, on the current stream, without host synchronisation."""

from hisparse.ops.cuda.replay import replay, reset_seat, reset_seats
from hisparse.ops.cuda.resolve import resolve, resolve_pages

__all__ = ["replay", "reset_seat", "reset_seats", "resolve", "resolve_pages"]

"""New rows of many layers from their resident pages to the host, in one launch; see `kernels/mirror.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.ops.cuda.append import batch_arguments, check_batch, check_status, shift_of, table_arguments
from hisparse.ops.cuda.module import Instance, kernel

INSTANCES = tuple(Instance("mirror.cu", "mirror_rows", {"UNITS": units}) for units in (41, 72, 144))
_WARPS = 32
_MAX_CTAS = 16
"""6 fill the bus with rows of 1,152 bytes, and shorter ones need more of them."""


def mirror_rows(
    seats: Tensor,
    positions: Tensor,
    writes: Tensor,
    layers: Tensor,
    *,
    tables: Tensor,
    resident_table: Tensor,
    mirror_table: Tensor,
    block_size: int,
    rows_per_block: int,
    rows: Tensor,
    host_body: Tensor,
    host_rows: int,
    status: Tensor | None = None,
) -> None:
    """Copies what a forward appended in `layers` to the host; the contract is `hisparse.ops.reference.mirror_rows`.

    A mirror outside the pool sets NO_TARGET in `status`, and that row is written nowhere.

    Args:
        seats, positions: int32 or int64 [n]. writes: bool [n].
        layers: int64 [m, 3], contiguous: per layer the entry of `tables` where its resident table begins, its row offset, and
            the row of `host_body` where its rows begin.
        tables: int32, flat: the allocation of all tables. resident_table: any of them, for its shape and stride.
        rows: [device rows, row_elems]. host_body: alias of registered host memory, like `rows`.
        host_rows: rows of a layer in it. status: int32 [4] or None.
    Stream: the current one; no synchronisation; capture-safe after a first call with rows of this size.
    Raises:
        InvariantError: shapes, dtypes or strides that the kernel cannot take.
    """
    num, row_bytes = check_batch(seats, positions, writes), rows.shape[1] * rows.element_size()
    if layers.dtype != torch.int64 or layers.ndim != 2 or layers.shape[1] != 3 or not layers.is_contiguous():
        raise InvariantError(f"layers must be contiguous int64 [m, 3], got {layers.dtype} {list(layers.shape)}")
    if tables.dtype != torch.int32 or not tables.is_contiguous():
        raise InvariantError(f"tables must be contiguous int32, got {tables.dtype} with strides {tables.stride()}")
    for name, place in (("rows", rows), ("host_body", host_body)):
        if (not place.is_contiguous() or place.data_ptr() % 16 or place.dtype != rows.dtype
                or place.shape[1] != rows.shape[1] or row_bytes % 16):
            raise InvariantError(f"{name} must be contiguous, 16-byte aligned rows of whole 16-byte units, got {place.dtype} "
                                 f"{list(place.shape)} with strides {place.stride()}")
    if not num or not layers.shape[0]:
        return
    kernel("mirror.cu", "mirror_rows", UNITS=row_bytes // 16)(
        (min(-(-num * layers.shape[0] // _WARPS), _MAX_CTAS),),
        32 * _WARPS,
        (
            *batch_arguments(seats, positions, writes), num, layers, layers.shape[0],
            tables, *table_arguments(resident_table)[1:], *table_arguments(mirror_table),
            shift_of(block_size), rows_per_block, rows, rows.shape[0], host_body, host_rows, check_status(status),
        ),
    )

"""New rows: to their resident page, from there to the host, and the marks of those that got there."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.layout import quantized_latent_dim
from hisparse.ops.reference.fp8 import quantize_rows, to_bfloat16

NewRows = Tensor | tuple[Tensor, Tensor]
"""[n, latent + rope], or (latent [n, latent_dim], rope [n, rope_dim])."""


def append_rows(
    new: NewRows,
    seats: Tensor,
    positions: Tensor,
    writes: Tensor,
    *,
    resident_table: Tensor,
    block_size: int,
    rows_per_block: int,
    row_offset: int,
    rows: Tensor,
    status: Tensor | None = None,
) -> None:
    """Writes a forward's new rows of one layer to their resident pages, driven by the table alone.

    Row i goes to the resident page of (seats[i], positions[i]). Rows that do not write, and padding rows (seat -1), touch
    nothing.

    Args:
        new: float32 or bfloat16, [n, latent + rope] or (latent, rope); rounded, or quantised when `rows` is uint8.
        seats, positions: int [n]; (seat, position) of the writing rows are distinct. writes: bool [n].
        resident_table: int32 [seats, pages], 0 = no page.
        rows_per_block, row_offset: geometry of the layer. rows: [device rows, row_elems], changed in place.
        status: not written here; kernels report NO_TARGET in it where this raises.
    Raises:
        InvariantError: a written position has no resident page, or is outside the table or the pool. Nothing is written.

    Example: block 64, rows_per_block 128, row_offset 64, page 2 in block 5: position 130 goes to row 5 * 128 + 64 + 2 = 706.
    """
    packed = torch.cat(new, 1) if isinstance(new, tuple) else new
    index, seat, position = _writing(seats, positions, writes)
    block = _look_up(resident_table, seat, position, block_size)
    ids = block * rows_per_block + row_offset + position % block_size
    bad = (block <= 0) | (ids >= rows.shape[0])
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise InvariantError(
            f"position {int(position[at])} of seat {int(seat[at])} is written, but has no page "
            f"(resident block {int(block[at])})"
        )
    rows.index_copy_(0, ids, stored(packed[index], rows))


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
    """Copies the rows that a forward appended in some layers from their resident pages to the mirrored host pages.

    Rows that did not write, padding rows, and rows without a mirror or without a resident page are left out.

    Args:
        seats, positions: int [n]; (seat, position) of the writing rows are distinct. writes: bool [n].
        layers: int64 [m, 3]: per layer the entry of `tables` where its resident table begins, its row offset, and the row of
            `host_body` where its rows begin.
        tables: int32, flat: the allocation of all tables. resident_table: any of them, for its shape.
        mirror_table: int32 [seats, pages], 0 = no mirror. rows_per_block: geometry of every layer.
        rows: [device rows, row_elems]. host_body: [layers * host_rows, row_elems], changed in place.
        host_rows: rows of one layer in it, block_size for each host block.
        status: not written here; kernels report NO_TARGET in it where this raises.
    Raises:
        InvariantError: a mirror outside the pool. Nothing of that layer is written.
    """
    _, seat, position = _writing(seats, positions, writes)
    host_block = _look_up(mirror_table, seat, position, block_size)
    host_ids = host_block * block_size + position % block_size
    if bool((host_ids >= host_rows).any()):
        raise InvariantError(f"a mirror is host block {int(host_block.max())}, but there are {host_rows // block_size}")
    for first, row_offset, host_row in layers.tolist():
        table = tables.as_strided(resident_table.shape, resident_table.stride(), tables.storage_offset() + first)
        block = _look_up(table, seat, position, block_size)
        mirrored = (block > 0) & (host_block > 0)
        ids = (block * rows_per_block + row_offset + position % block_size)[mirrored]
        host_body.index_copy_(0, host_ids[mirrored] + host_row, rows.index_select(0, ids))


def mark_rows(
    seats: Tensor, positions: Tensor, writes: Tensor, mirror_table: Tensor, row_masks: Tensor, *, block_size: int
) -> None:
    """Sets the row-mask bit of every mirrored row that a forward wrote; runs after its last append.

    Args: as `append_rows`. row_masks: int64 [host blocks], changed in place: bit `position % block_size` of a page.
    Raises:
        InvariantError: the mirror table names a block outside `row_masks`.
    """
    _, seat, position = _writing(seats, positions, writes)
    block = _look_up(mirror_table, seat, position, block_size)
    if bool((block >= row_masks.shape[0]).any()):
        raise InvariantError(f"a mirror is host block {int(block.max())}, but there are {row_masks.shape[0]}")
    block, offset = block[block > 0], (position % block_size)[block > 0]
    for bit in range(block_size):
        pages = block[offset == bit]
        row_masks[pages] |= 1 << bit if bit < 63 else -(1 << 63)


def stored(new: Tensor, rows: Tensor) -> Tensor:
    """`new` [m, latent + rope] in the storage format of `rows`: as it is, rounded to nearest even, or fp8_ds_mla."""
    if rows.dtype == torch.uint8:
        return quantize_rows(new, quantized_latent_dim(new.shape[1], rows.shape[1]))
    return to_bfloat16(new) if rows.dtype == torch.bfloat16 else new.to(rows.dtype)


def _writing(seats: Tensor, positions: Tensor, writes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index, seat and position, int64 [m], of the rows that write."""
    if seats.ndim != 1 or positions.shape != seats.shape or writes.shape != seats.shape:
        raise InvariantError(
            f"seats, positions and writes must be [n], got {list(seats.shape)}, {list(positions.shape)}, {list(writes.shape)}"
        )
    index = (writes & (seats >= 0)).nonzero().squeeze(1)
    return index, seats[index].long(), positions[index].long()


def _look_up(table: Tensor, seat: Tensor, position: Tensor, block_size: int) -> Tensor:
    """int64 [m]: block of each position, 0 where the table has no such entry."""
    page = torch.div(position, block_size, rounding_mode="floor")
    inside = (seat < table.shape[0]) & (page >= 0) & (page < table.shape[1])
    return torch.where(inside, table[torch.where(inside, seat, 0), torch.where(inside, page, 0)].long(), 0)

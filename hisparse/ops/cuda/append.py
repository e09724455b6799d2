"""New rows of a forward to their resident page, and the marks of mirrored ones; see `kernels/append.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import quantized_latent_dim
from hisparse.ops.cuda.module import Instance, Kernel, kernel

NewRows = Tensor | tuple[Tensor, Tensor]
"""[n, latent + rope], or (latent [n, latent_dim], rope [n, rope_dim])."""

_BYTES = {torch.float32: 4, torch.bfloat16: 2}
_MARK_THREADS = 128
_MANY_ROWS = 1024
"""From here on a CTA takes four rows: fewer CTAs to start."""


def _defines(latent_dim: int, rope_dim: int, new_bytes: int, row_format: int, aligned: bool, warps: int) -> dict[str, int]:
    return {"LATENT": latent_dim, "ROPE": rope_dim, "NEW_BYTES": new_bytes, "FORMAT": row_format, "ALIGNED": int(aligned),
            "WARPS": warps}


INSTANCES = (
    *(Instance("append.cu", "append_rows", _defines(512, 64, new, fmt, True, 1)) for new in (4, 2) for fmt in (4, 2, 1)),
    *(Instance("append.cu", "append_rows", _defines(512, 64, new, fmt, False, 1)) for new, fmt in ((4, 1), (2, 2))),
    Instance("append.cu", "append_rows", _defines(576, 0, 2, 2, True, 4)),
    Instance("append.cu", "append_rows", _defines(640, 24, 4, 1, True, 4)),
    Instance("append.cu", "mark_rows"),
)


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
    """A forward's new rows in one layer to their resident pages; the contract is `hisparse.ops.reference.append_rows`.

    A written position without a resident page (or outside table and pool) sets NO_TARGET in `status`, and that row is
    written nowhere.

    Args:
        new: float32 or bfloat16, cuda, one tensor or (latent, rope); rows may be strided. seats, positions: int32 or int64 [n].
        writes: bool [n]. resident_table: int32 [seats, pages], rows may be strided.
        rows: [device rows, row_elems] float32, bfloat16 or uint8 (fp8_ds_mla), contiguous.
        status: int32 [4] or None.
    Stream: the current one; no synchronisation; capture-safe after a first call with the same shapes of rows.
    Raises:
        InvariantError: shapes, dtypes or strides that the kernel cannot take. ConfigError: a dtype without an instance.
    """
    num = check_batch(seats, positions, writes)
    if not num:
        return
    latent, rope = new if isinstance(new, tuple) else (new, None)
    latent_dim, rope_dim = latent.shape[1], 0 if rope is None else rope.shape[1]
    if rows.dtype == torch.uint8:
        dim = quantized_latent_dim(latent_dim + rope_dim, rows.shape[1])
        if rope is None:
            latent, rope = latent[:, :dim], latent[:, dim:]
            latent_dim, rope_dim = dim, rope.shape[1]
        elif latent_dim != dim:
            raise InvariantError(f"latent has {latent_dim} values, but these rows hold {dim} latents and {rope.shape[1]} rope")
    elif latent_dim + rope_dim != rows.shape[1]:
        raise InvariantError(f"rows hold {rows.shape[1]} values, got {latent_dim} + {rope_dim}")
    latent = _rows_of(latent, num)
    rope = latent if rope is None else _rows_of(rope, num)
    if rope.dtype != latent.dtype:
        raise InvariantError(f"latent is {latent.dtype} and rope {rope.dtype}; they must be alike")
    if not rows.is_contiguous() or rows.data_ptr() % 16:
        raise InvariantError(f"rows must be contiguous and 16-byte aligned, got {rows.dtype} {list(rows.shape)} with strides "
                             f"{rows.stride()}")
    warps = 4 if num >= _MANY_ROWS else 1
    launch = _append_kernel(latent, rope, latent_dim, rope_dim, rows.dtype, warps)
    launch(
        (-(-num // warps),),
        32 * warps,
        (
            latent, latent.stride(0) * latent.element_size(), rope, rope.stride(0) * rope.element_size(),
            *batch_arguments(seats, positions, writes), num,
            *table_arguments(resident_table), shift_of(block_size), rows_per_block, row_offset,
            rows, rows.shape[0], check_status(status),
        ),
    )


def mark_rows(
    seats: Tensor,
    positions: Tensor,
    writes: Tensor,
    mirror_table: Tensor,
    row_masks: Tensor,
    *,
    block_size: int,
    status: Tensor | None = None,
) -> None:
    """Sets the row-mask bit of every mirrored row that a forward wrote; the contract is the reference's `mark_rows`.

    A mirror outside `row_masks` sets NO_TARGET in `status`.

    Args: as `append_rows`. row_masks: int64 [host blocks], contiguous; atomic, so launches may overlap.
    Stream: the current one; no synchronisation; capture-safe after a first call.
    """
    num = check_batch(seats, positions, writes)
    if row_masks.dtype != torch.int64 or not row_masks.is_contiguous():
        raise InvariantError(f"row_masks must be contiguous int64, got {row_masks.dtype} with strides {row_masks.stride()}")
    if num:
        kernel("append.cu", "mark_rows")(
            (-(-num // _MARK_THREADS),),
            _MARK_THREADS,
            (*batch_arguments(seats, positions, writes), num, *table_arguments(mirror_table), shift_of(block_size), row_masks,
             row_masks.shape[0], check_status(status)),
        )


def _append_kernel(latent: Tensor, rope: Tensor, latent_dim: int, rope_dim: int, stored: torch.dtype, warps: int) -> Kernel:
    row_format = 1 if stored == torch.uint8 else _BYTES.get(stored)
    new_bytes = _BYTES.get(latent.dtype)
    if row_format is None or new_bytes is None:
        raise ConfigError(f"no append kernel from {latent.dtype} to {stored}; it takes float32 and bfloat16 rows")
    unit_bytes = max(row_format, new_bytes)
    aligned = rope_dim == 0 or latent_dim * unit_bytes % 16 == 0
    for part in (latent, rope):
        aligned = aligned and part.data_ptr() % 16 == 0 and part.stride(0) * new_bytes % 16 == 0
    return kernel("append.cu", "append_rows", **_defines(latent_dim, rope_dim, new_bytes, row_format, aligned, warps))


def check_batch(seats: Tensor, positions: Tensor, writes: Tensor) -> int:
    if seats.ndim != 1 or positions.shape != seats.shape or writes.shape != seats.shape:
        raise InvariantError(
            f"seats, positions and writes must be [n], got {list(seats.shape)}, {list(positions.shape)}, {list(writes.shape)}"
        )
    indices = (torch.int32, torch.int64)
    if seats.dtype not in indices or positions.dtype not in indices or writes.dtype != torch.bool:
        raise InvariantError(f"seats and positions are int32 or int64 and writes is bool, got {seats.dtype}, "
                             f"{positions.dtype}, {writes.dtype}")
    return int(seats.shape[0])


def batch_arguments(seats: Tensor, positions: Tensor, writes: Tensor) -> tuple[Tensor | int, ...]:
    seats, positions, writes = seats.contiguous(), positions.contiguous(), writes.contiguous()
    return seats, int(seats.dtype == torch.int64), positions, int(positions.dtype == torch.int64), writes


def table_arguments(table: Tensor) -> tuple[Tensor | int, ...]:
    if table.dtype != torch.int32 or table.ndim != 2 or table.stride(1) != 1:
        raise InvariantError(f"a block table is int32 [seats, pages] with dense rows, got {table.dtype} {list(table.shape)}")
    return table, table.stride(0), table.shape[0], table.shape[1]


def _rows_of(part: Tensor, num: int) -> Tensor:
    if part.ndim != 2 or part.shape[0] != num:
        raise InvariantError(f"new rows must be [{num}, values], got {list(part.shape)}")
    return part if part.stride(1) == 1 or part.shape[1] == 0 else part.contiguous()


def shift_of(block_size: int) -> int:
    if block_size & (block_size - 1) or not 1 <= block_size <= 64:
        raise InvariantError(f"block_size must be a power of two up to 64, got {block_size}")
    return block_size.bit_length() - 1


def check_status(status: Tensor | None) -> Tensor | None:
    if status is not None and (status.dtype != torch.int32 or status.numel() != 4 or not status.is_contiguous()):
        raise InvariantError(f"status must be contiguous int32 [4], got {status.dtype} {list(status.shape)}")
    return status

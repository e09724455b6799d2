"""Followers' copies and resets of hot regions on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.ops.cuda.module import Instance, kernel
from hisparse.ops.values import DeviceMissPlan, HotState

THREADS = 256
UNROLL = 4


def _parts(rows: int) -> int:
    """CTAs per plan row: enough of them to keep the host link busy."""
    return 32 if rows <= 2 else 8 if rows <= 32 else 4 if rows <= 128 else 2


def _replay_instance(row_bytes: int, top_k: int, parts: int) -> Instance:
    bucket = max(256, 1 << (top_k - 1).bit_length())
    return Instance("replay.cu", "replay", {"ROW_BYTES": row_bytes, "TOP_K": bucket, "PARTS": parts, "THREADS": THREADS,
                                            "UNROLL": UNROLL})


def replay(plan: DeviceMissPlan, row_delta: int, rows: Tensor, host_rows: Tensor) -> None:
    """Makes a plan's copies in a layer whose page starts `row_delta` rows behind the leader's. Mutates `rows`.

    Args:
        rows: [device rows, row_elems]. host_rows: the layer's, CUDA tensor over mapped host memory.
    Stream: the current one, behind the resolve that made the plan; no synchronisation; capture-safe.
    """
    n, k = plan.host_rows.shape
    if not n or not k:
        return
    parts = _parts(n)
    instance = _replay_instance(rows.shape[1] * rows.element_size(), k, parts)
    kernel(instance.source, instance.function, **instance.defines)(
        (parts, n), THREADS,
        (plan.host_rows, plan.device_rows, plan.counts, plan.host_rows.stride(0), row_delta, host_rows, rows),
    )


def reset_seats(state: HotState, resets: Tensor) -> None:
    """Empties slots of several seats: rows (seat, from_slot, from_position) as `hisparse.ops.reference.reset_seat` takes them.

    Args:
        resets: int32 [m, 3] on the device.
    Mutates: state. Stream: the current one; no synchronisation; capture-safe.
    Raises:
        InvariantError: `resets` has another shape, dtype or layout.
    """
    if resets.ndim != 2 or resets.shape[1] != 3 or resets.dtype != torch.int32 or not resets.is_contiguous():
        raise InvariantError(f"resets must be contiguous int32 [m, 3], got {resets.dtype} {list(resets.shape)}")
    if resets.shape[0]:
        seats, slots = state.slot_tag.shape
        kernel("reset_seats.cu", "reset_seats")(
            (resets.shape[0],), 512,
            (resets, state.slot_tag, state.pos_slot, state.use, state.hand, slots, state.pos_slot.shape[1], seats),
        )


INSTANCES = (
    *(_replay_instance(row_bytes, 2048, parts) for row_bytes in (656, 1152) for parts in (2, 4, 8, 32)),
    _replay_instance(320, 32, 8),
    Instance("reset_seats.cu", "reset_seats"),
)

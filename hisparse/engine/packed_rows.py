"""The rows of a forward as one tensor of integers, so that one copy brings them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.types import ScheduledChunk

FIELDS = 4
_PADDING = (0, 0, -1, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """token_ids, positions: int64 [n]. seats: int32 [n], -1 = padding. writes: bool [n]."""

    token_ids: Tensor
    positions: Tensor
    seats: Tensor
    writes: Tensor


def pack(chunks: Sequence[ScheduledChunk], num_rows: int | None = None) -> list[int]:
    """token ids, then positions, then seats, then write flags of all tokens of `chunks`; padded to `num_rows` rows.

    Example: one chunk of tokens (7, 8) of seat 3 at position 5, which writes -> [7, 8, 5, 6, 3, 3, 1, 1].
    """
    tokens: list[int] = []
    positions: list[int] = []
    seats: list[int] = []
    writes: list[int] = []
    for chunk in chunks:
        size = len(chunk.token_ids)
        tokens += chunk.token_ids
        positions += range(chunk.first_position, chunk.first_position + size)
        seats += [chunk.seat] * size
        writes += [int(chunk.writes)] * size
    missing = 0 if num_rows is None else num_rows - len(tokens)
    packed: list[int] = []
    for values, filler in zip((tokens, positions, seats, writes), _PADDING):
        packed += values
        packed += [filler] * missing
    return packed


def upload(values: Sequence[int], device: torch.device, out: Tensor | None = None) -> Tensor:
    """int64 on `device`; into the front of `out` if given. Stream: the current one; does not wait."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    if out is None:
        return host.to(device, non_blocking=True)
    return out[: host.shape[0]].copy_(host, non_blocking=True)


def unpack(packed: Tensor) -> Rows:
    """The rows of `packed` int64 [4 * n]. May be captured in a graph."""
    token_ids, positions, seats, writes = packed.view(FIELDS, -1).unbind(0)
    return Rows(token_ids, positions, seats.to(torch.int32), writes != 0)

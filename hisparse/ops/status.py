"""The word in which kernels report what they cannot raise.

A status tensor is int32 [4] on the device: flags, then seat, position and detail of the first error. The host reads it with the
step's sampled tokens and discards the step if any flag is set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.errors import InvariantError

NO_PAGE = 1
NO_HOT_BLOCK = 2
NO_TARGET = 4
NO_FIT = 8
NO_INDEXER_PAGE = 16
BAD_ROWS = 32
TABLE_FULL = 64
STATUS_WORDS = 4

_MEANING = {
    NO_PAGE: "a selected position is neither resident nor on the host",
    NO_HOT_BLOCK: "a slot of the hot region has no block",
    NO_TARGET: "a row is written where no resident page is",
    NO_FIT: "a request selects more non-resident rows than its hot region holds",
    NO_INDEXER_PAGE: "a position has no indexer page",
    BAD_ROWS: "the rows of one request name different seats",
    TABLE_FULL: "the hash table of a launch is full",
}


def describe(status: Sequence[int]) -> str | None:
    """What a status word says, or None when nothing is wrong.

    Example: `describe([1, 3, 130, 0])` names seat 3, position 130.
    """
    flags, seat, position, detail = status
    if not flags:
        return None
    found = [text for bit, text in _MEANING.items() if flags & bit] or [f"unknown flags {flags:#x}"]
    return f"{'; '.join(found)} (first: seat {seat}, position {position}, detail {detail})"


def new_status(device: str | torch.device) -> Tensor | None:
    """A clean status word for the batches of a rank; None on the CPU, where operations raise instead."""
    device = torch.device(device)
    return None if device.type == "cpu" else torch.zeros(STATUS_WORDS, dtype=torch.int32, device=device)


def check_status(status: Tensor | None) -> None:
    """Waits for the device and raises InvariantError if an operation reported an error: nothing of the step may be used.

    For loops that wait at the end of a step anyway; others bring the word to the host with their tokens and call `describe`.
    """
    problem = None if status is None else describe(status.tolist())
    if problem is not None:
        raise InvariantError(f"the device reports: {problem}")

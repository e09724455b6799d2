"""Tokens of one step on their way from the device to the host, and the one place where the host waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hisparse.engine.sampler import SampleRow
from hisparse.errors import InvariantError
from hisparse.ops.status import STATUS_WORDS, describe

NO_TOKEN = -1
"""In place of a token whose logits are not finite."""


def wait_for(event: Any) -> None:
    """Returns when the device has reached `event`. Nothing else in a step waits for the device."""
    event.synchronize()


def greedy(logits: Tensor) -> Tensor:
    """int32 [n]: the likeliest token of each row of logits [n, vocab], the smallest id of equals; NO_TOKEN where a logit is
    NaN or infinite."""
    return torch.where(logits.isfinite().all(dim=1), logits.argmax(dim=1), NO_TOKEN).to(torch.int32)


class StepOutput:
    """What a step's forwards leave for the host: a status word, a token per row, and the logits of rows that need them.

    Args:
        result: int32 [4 + m] on the device: the status word, then tokens. columns: of each row's token in `result`.
        rows: whose tokens they are. logits: float32 [vocab] of each row that `needs_logits`, in order.
    """

    def __init__(self, rows: Sequence[SampleRow], result: Tensor, columns: Sequence[int], logits: Sequence[Tensor]) -> None:
        self.rows = tuple(rows)
        self._result, self._columns, self._logits = result, columns, logits

    def take(self) -> tuple[list[int], Tensor | None]:
        """The greedy token of each row, and float32 [k, vocab] for the k rows that need logits (None if there are none).

        Call it before the next step, when everything of this one is queued.
        Stream: the current one; waits until it has come here.
        Raises:
            InvariantError: an operation of the step reported an error, or memory that nobody wrote reached the logits of a
                row. No token of the step may leave then.
        """
        result, logits = self._result, torch.stack(list(self._logits)) if self._logits else None
        if result.is_cuda:
            result, logits = _to_host(result), None if logits is None else _to_host(logits)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            wait_for(event)
        values = result.tolist()
        problem = describe(values[:STATUS_WORDS])
        if problem is not None:
            raise InvariantError(f"the device reports: {problem}")
        tokens = [values[column] for column in self._columns]
        bad = [f"{row.request_id}@{row.position}" for row, token in zip(self.rows, tokens) if token == NO_TOKEN]
        if bad:
            raise InvariantError(f"logits are not finite for {', '.join(bad)}; no token can be chosen")
        return tokens, logits


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

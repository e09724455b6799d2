"""Where the rows of one layer's selection are: what a sparse attention kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SelectedRows:
    """Rows that `topk` named, for an attention of your own. Valid until the next layer's resolve.

    Attributes:
        rows: [m, row_elems], device rows as this layer counts them; a view of the packed allocation, nothing is copied.
        row_ids: [n, k], int64 on the CPU and int32 on CUDA: `rows[row_ids[i, j]]` is the row of `topk[i, j]`; -1 = none here.
        host_rows, host_ids: history of a prefill chunk that is not resident, likewise; None = there is none. On CUDA
            `host_rows` is a workspace on the device. An entry is never in both.
    """

    rows: Tensor
    row_ids: Tensor
    host_rows: Tensor | None = None
    host_ids: Tensor | None = None

    def gather(self) -> Tensor:
        """[n, k, row_elems], the selected rows side by side; zero where an entry names none.

        A plain gather, for tests and for attention that takes dense rows. Stream: the current one; capture-safe.
        """
        out = _gather(self.rows, self.row_ids)
        if self.host_rows is not None and self.host_ids is not None:
            out = torch.where((self.host_ids >= 0)[..., None], _gather(self.host_rows, self.host_ids), out)
        return out


def _gather(rows: Tensor, ids: Tensor) -> Tensor:
    """Masked by a choice, not by a product: a row that nobody wrote may be NaN."""
    if rows.shape[0] == 0:
        return rows.new_zeros(*ids.shape, rows.shape[1])
    found = rows[ids.long().clamp(min=0)]
    return torch.where((ids >= 0)[..., None], found, torch.zeros_like(found))

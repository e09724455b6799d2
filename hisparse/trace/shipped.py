"""The hot region that decode uses, with rows one element wide: one seat, driven through the backend's `resolve`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hisparse.ops import HotState, reference


class Shipped:
    """A region of `rows` rows for one request of at most `num_positions` tokens, all on the host, none resident.

    Every answer is checked: the row that a position maps to holds that position's bytes. Pages of one row, so that `rows`
    may be any number: which rows miss does not depend on the size of a page.
    """

    def __init__(self, rows: int, num_positions: int) -> None:
        self.state = HotState.empty(1, rows, num_positions)
        self.hot_rows = torch.tensor([rows], dtype=torch.int32)
        self._hot_table = torch.arange(1, 1 + rows, dtype=torch.int32)[None]
        self._resident = torch.zeros((1, num_positions), dtype=torch.int32)
        self._source = torch.arange(1, 1 + num_positions, dtype=torch.int32)[None]
        self._rows = torch.full((1 + rows, 1), -1, dtype=torch.int32)
        self._host_rows = torch.arange(-1, num_positions, dtype=torch.int32)[:, None]

    def step(self, selected: NDArray[np.int64]) -> int:
        """Serves distinct positions; returns how many rows were copied."""
        topk = torch.from_numpy(selected.astype(np.int32))[None]
        got = reference.resolve(
            topk, torch.zeros(1, dtype=torch.int32), torch.tensor([int(selected.max()) + 1]), resident_table=self._resident,
            source_table=self._source, hot_table=self._hot_table, hot_rows=self.hot_rows, state=self.state, block_size=1,
            rows_per_block=1, row_offset=0, rows=self._rows, host_rows=self._host_rows)
        if not torch.equal(self._rows[got.row_ids[0], 0], topk[0]):
            raise AssertionError("a selected position was given another position's row")
        return int(got.miss.sum())

    def check(self) -> None:
        self.state.check(self.hot_rows.long())

"""The rows of one forward: which seat and position each query row is, and what this forward has resolved so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import InvariantError


@dataclass(slots=True, eq=False)
class RowBatch:
    """Query rows of one forward. Make a new one for each forward: it carries the miss plans of its leaders.

    Attributes:
        seats: int32 [n]; -1 = padding row, which reads and writes nothing.
        positions: int64 [n], the token position of each row; its context is [0, position].
        writes: bool [n]; False = a replayed row, whose KV is in the cache already: append and indexer write nothing.
        is_prefill: the rows are consecutive positions of one seat; history that is not resident is gathered from host
            memory, and the hot region is not used.
        plain_tables: every page of every row's context is resident, so block tables alone resolve it.
        plans: resolution of each index group's leader in this forward, for its followers. Written by HiSparseRuntime.
    """

    seats: Tensor
    positions: Tensor
    writes: Tensor
    is_prefill: bool = False
    plain_tables: bool = False
    plans: dict[int, Any] = field(default_factory=dict)
    appended: set[int] = field(default_factory=set)
    """Layers that appended their rows. Written by HiSparseCacheHandle."""
    targets: dict[str, Any] = field(default_factory=dict)
    """Row ids that append computed once per group. Written by HiSparseCacheHandle."""

    @classmethod
    def build(
        cls,
        seats: Sequence[int],
        positions: Sequence[int],
        *,
        writes: bool | Sequence[bool] = True,
        is_prefill: bool = False,
        plain_tables: bool = False,
        device: str = "cpu",
    ) -> RowBatch:
        """From Python numbers.

        Example: `RowBatch.build([3] * 4, range(8, 12), is_prefill=True)` is a chunk of four tokens of seat 3.
        Raises:
            InvariantError: lengths differ, or a prefill batch is not consecutive rows of one seat.
        """
        n = len(seats)
        flags = [writes] * n if isinstance(writes, bool) else list(writes)
        if len(positions) != n or len(flags) != n:
            raise InvariantError(f"a batch of {n} seats has {len(positions)} positions and {len(flags)} write flags")
        if is_prefill and (len(set(seats)) != 1 or list(positions) != list(range(positions[0], positions[0] + n))):
            raise InvariantError(
                "a prefill batch must be consecutive positions of one seat, got "
                f"seats {sorted(set(seats))}, positions {positions[0]}..{positions[-1]}"
            )
        return cls(
            seats=torch.tensor(list(seats), dtype=torch.int32, device=device),
            positions=torch.tensor(list(positions), dtype=torch.int64, device=device),
            writes=torch.tensor(flags, dtype=torch.bool, device=device),
            is_prefill=is_prefill,
            plain_tables=plain_tables,
        )

    @property
    def num_rows(self) -> int:
        return int(self.seats.shape[0])

    @property
    def context_len(self) -> Tensor:
        """int64 [n]: positions + 1, the tokens each row may attend to."""
        return self.positions + 1

    @property
    def write_index(self) -> Tensor:
        """int64 [m]: the rows that write (writes, and not padding), in order."""
        index = self.targets.get("write_index")
        if index is None:
            index = self.targets["write_index"] = (self.writes & (self.seats >= 0)).nonzero().squeeze(1)
        return index

"""The rows of one forward: which seat and position each query row is, and what this forward has resolved so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.worker.streams import Mark


@dataclass(slots=True, eq=False, kw_only=True)
class RowBatch:
    """Query rows of one forward. Make a new one for each forward: it carries the miss plans of its leaders.

    Attributes:
        seats: int32 [n]; -1 = padding row, which reads and writes nothing.
        positions: int64 [n], the token position of each row; its context is [0, position].
        writes: bool [n]; False = a replayed row, whose KV is in the cache already: append and indexer write nothing.
        max_len: no row's context is longer; known on the host, because nothing of a step on CUDA asks the device.
        prefill_seat: the rows are consecutive positions of this one seat; history that is not resident is gathered from host
            memory, and the hot region is not used. None = a decode batch.
        plain_tables: every page of every row's context is resident, so block tables alone resolve it.
        rows_per_request: of a decode batch: consecutive rows that share a seat (or are padding), as the verification of drafts
            has them; `num_rows` is a multiple of it. No seat occurs in two requests.
        status: int32 [4] on the device, where operations report what is wrong; None = they raise InvariantError (CPU).
        plans: resolution of each index group's leader in this forward, for its followers. Written by HiSparseRuntime.
    """

    seats: Tensor
    positions: Tensor
    writes: Tensor
    max_len: int
    prefill_seat: int | None = None
    plain_tables: bool = False
    rows_per_request: int = 1
    status: Tensor | None = None
    plans: dict[int, Any] = field(default_factory=dict)
    prefetched: dict[int, Mark] = field(default_factory=dict)
    """When each follower's hot rows are there. Written by HiSparseRuntime."""
    tiers: list[Tensor] = field(default_factory=list)
    """Resident, hot and missed entries [n] of each leader so far. Written by HiSparseRuntime."""
    appended: set[int] = field(default_factory=set)
    """Layers that appended their rows. Written by HiSparseCacheHandle."""
    _shared: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        seats: Sequence[int],
        positions: Sequence[int],
        *,
        writes: bool | Sequence[bool] = True,
        is_prefill: bool = False,
        plain_tables: bool = False,
        rows_per_request: int = 1,
        device: str = "cpu",
        status: Tensor | None = None,
    ) -> RowBatch:
        """From Python numbers, which on CUDA are uploaded: not inside a graph.

        Examples: `RowBatch.build([3] * 4, range(8, 12), is_prefill=True)` is a chunk of four tokens of seat 3;
        `RowBatch.build([3, 3, 5, 5], [8, 9, 20, 21], rows_per_request=2)` verifies one draft of each of two requests.
        Raises:
            InvariantError: lengths differ, a prefill batch is not consecutive rows of one seat, or a decode batch is not
                `rows_per_request` rows of each of its seats.
        """
        n = len(seats)
        flags = [writes] * n if isinstance(writes, bool) else list(writes)
        if len(positions) != n or len(flags) != n:
            raise InvariantError(f"a batch of {n} seats has {len(positions)} positions and {len(flags)} write flags")
        if not is_prefill:
            _check_requests(list(seats), rows_per_request)
        elif len(set(seats)) != 1 or list(positions) != list(range(positions[0], positions[0] + n)):
            raise InvariantError(
                "a prefill batch must be consecutive positions of one seat, got "
                f"seats {sorted(set(seats))}, positions {positions[0]}..{positions[-1]}"
            )
        return cls(
            seats=torch.tensor(list(seats), dtype=torch.int32, device=device),
            positions=torch.tensor(list(positions), dtype=torch.int64, device=device),
            writes=torch.tensor(flags, dtype=torch.bool, device=device),
            max_len=max(positions, default=-1) + 1,
            prefill_seat=seats[0] if is_prefill else None,
            plain_tables=plain_tables,
            rows_per_request=rows_per_request,
            status=status,
        )

    @property
    def is_prefill(self) -> bool:
        return self.prefill_seat is not None

    @property
    def num_rows(self) -> int:
        return int(self.seats.shape[0])

    @property
    def context_len(self) -> Tensor:
        """int64 [n]: positions + 1, the tokens each row may attend to."""
        return self.once("context_len", lambda: self.positions + 1)

    def fits(self) -> Tensor:
        """bool [n]: rows whose selection had room in the hot region of every group so far. Call it after the last layer.

        Only a later row of a request can be False: it attended to nothing, and no token of it may be accepted. A first row
        without room is an error. Stream: the current one; capture-safe.
        """
        plans = [plan.fits for plan in self.plans.values()]
        return torch.stack(plans).all(0) if plans else torch.ones_like(self.writes)

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that layers share: made by the first who asks."""
        found = self._shared.get(name)
        if found is None:
            found = self._shared[name] = make()
        return found


def _check_requests(seats: list[int], rows: int) -> None:
    """The kernel takes each `rows` rows for a request of its own, whose slots nobody else changes in this launch."""
    if rows < 1 or len(seats) % rows:
        raise InvariantError(f"{len(seats)} rows are no multiple of rows_per_request = {rows}")
    requests = [seats[i : i + rows] for i in range(0, len(seats), rows)]
    mixed = next((request for request in requests if len(set(request)) > 1), None)
    if mixed is not None:
        raise InvariantError(f"the {rows} rows of a request must share a seat (or all be padding), got seats {mixed}")
    counts = Counter(request[0] for request in requests if request[0] >= 0)
    if len(counts) < counts.total():
        twice = sorted(seat for seat, count in counts.items() if count > 1)
        raise InvariantError(
            f"a decode batch takes {rows} row{'s' * (rows > 1)} of a seat, got several requests of seats {twice}; put a seat's "
            "rows side by side and say how many with rows_per_request, or split the batch"
        )

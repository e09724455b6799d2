"""Which slots of a hot region a launch takes: the union of a request's rows, and a clock with 2-bit counters.

For each seat of a launch, the *union* is the set of positions that its rows select and that have no resident page,
ranked by first reference (row, column). A row whose cumulated union exceeds the region gets -1 everywhere. Positions
that are hot keep their slot, and its counter goes up by two, to at most 3, once a launch. The others are misses.
Victims are found by a clock: from the hand, in ring order, a slot that this launch does not use is taken if its
counter is 0 and decremented otherwise, round after round, until every miss has one. Miss i takes the i-th victim and
starts with counter 1; the hand stops behind the last victim. Empty slots have counter 0. All of it is a function of
inputs and state, of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hisparse.ops.values import HotState

USE_MAX = 3
USE_NEW = 1
USE_HIT = 2
"""So a new row that is selected once more counts as fully used: it outlives rows that were selected in one launch only."""


def rows_that_fit(u_row: Tensor, seats: Tensor, hot_rows: Tensor) -> Tensor:
    """bool [n]: rows whose seat's union, cumulated over its rows up to this one, is at most its region."""
    num = seats.shape[0]
    count = torch.bincount(u_row, minlength=num)
    order = torch.arange(num, device=seats.device)
    earlier = (seats[:, None] == seats[None, :]) & (order[:, None] >= order[None, :])
    total = (earlier * count).sum(1)
    return (total <= hot_rows[seats.to(torch.int64).clamp(min=0)]) | (seats < 0)


def find_victims(
    m_seat: Tensor, h_seat: Tensor, h_slot: Tensor, hot_rows: Tensor, state: HotState
) -> tuple[Tensor, Callable[[], None]]:
    """Slots int64 [m] for misses sorted by (seat, rank), and a function that ages the counters and moves the hands."""
    if not m_seat.numel():
        return m_seat, _nothing
    seats, counts = torch.unique_consecutive(m_seat, return_counts=True)
    index = torch.arange(seats.numel(), device=seats.device)
    size = hot_rows[seats].to(torch.int64)[:, None]
    width = int(size.max())
    slots = torch.arange(width, device=seats.device)
    used = torch.zeros(state.slot_tag.shape, dtype=torch.bool, device=seats.device)
    used[h_seat, h_slot] = True
    eligible = (slots < size) & ~used[seats, :width]
    distance = (slots - state.hand[seats].to(torch.int64)[:, None]) % size
    use = state.use[seats, :width].to(torch.int64)
    # a slot with counter c is reached in round c: sorted by (counter, ring distance), the clock's order falls out
    key = torch.where(eligible, use * width + distance, (USE_MAX + 1) * width)
    best, taken = key.topk(int(counts.max()), dim=1, largest=False, sorted=True)
    starts = torch.cumsum(counts, 0) - counts
    owner = index.repeat_interleave(counts)
    victim = taken[owner, torch.arange(m_seat.numel(), device=seats.device) - starts[owner]]

    def update() -> None:
        last = best[index, counts - 1][:, None]
        aged = (use - last // width - (distance <= last % width).to(torch.int64)).clamp(min=0)
        state.use[seats, :width] = torch.where(eligible, aged, use).to(torch.uint8)
        state.hand[seats] = ((taken[index, counts - 1] + 1) % size[:, 0]).to(torch.int32)

    return victim, update


def _nothing() -> None:
    return

"""Positions to rows: through block tables alone, or through the hot region with its replacement state.

The replacement rules are those of `hisparse.ops.clock`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.ops.clock import USE_HIT, USE_MAX, USE_NEW, find_victims, rows_that_fit
from hisparse.ops.values import HotState, MissPlan, Resolution


def resolve(
    topk: Tensor,
    seats: Tensor,
    seq_len: Tensor,
    *,
    resident_table: Tensor,
    source_table: Tensor,
    hot_table: Tensor,
    hot_rows: Tensor,
    state: HotState,
    block_size: int,
    rows_per_block: int,
    row_offset: int,
    rows: Tensor,
    host_rows: Tensor,
    rows_per_request: int = 1,
    status: Tensor | None = None,
    out_row_ids: Tensor | None = None,
    out_valid: Tensor | None = None,
) -> Resolution:
    """Maps selected positions to flat device rows, copying what is neither resident nor hot into the hot region.

    Args:
        topk: int [n, k], positions; -1 or outside [0, seq_len) = none. Several rows may belong to one seat.
        seats: int [n], -1 = padding row: all -1, no state is touched. seq_len: int [n].
        resident_table, source_table: int32 [seats, pages], device and host block of a page, 0 = none.
        hot_table: int32 [seats, blocks], blocks of the hot region in slot order. hot_rows: int32 [seats], its rows now.
        state: of this index group; changed in place.
        rows_per_block, row_offset: geometry of the leader's layer. rows: [device rows, row_elems], changed in place.
        host_rows: [host blocks * block_size, row_elems] of the leader's layer.
        rows_per_request: not read here, where rows of one seat may stand anywhere; kernels need them side by side.
        status: not written here; kernels report NO_PAGE, NO_HOT_BLOCK and NO_FIT in it where this (or its caller) raises.
        out_row_ids: int [n, k], out_valid: int [n]: written completely if given.
    Returns:
        A Resolution; `row_ids` is `out_row_ids` if that was given.
    Raises:
        InvariantError: a position has no page in any tier, or a slot has no block. Nothing was changed.

    Example: block 64, rows_per_block 128, row_offset 64, page 2 in block 5: position 130 -> 5 * 128 + 64 + 2 = 706.
    """
    num, device = topk.shape[0], topk.device
    where = _locate(topk, seats, seq_len, resident_table, block_size, rows_per_block, row_offset)
    row_ids, need, pos, seat = where.row_ids, where.need, where.pos, where.seat
    resident = (row_ids >= 0).sum(1)
    fits = torch.ones(num, dtype=torch.bool, device=device)
    zero = torch.zeros(num, dtype=torch.int64, device=device)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    plan, hot, miss = MissPlan(host_rows=empty, device_rows=empty, rows=empty), zero, zero
    e_row, e_col = need.nonzero(as_tuple=True)
    if e_row.numel():
        positions = state.pos_slot.shape[1]
        union, inverse = torch.unique(seat[e_row] * positions + pos[e_row, e_col], return_inverse=True)
        entries = torch.arange(e_row.numel(), device=device)
        first = torch.full_like(union, e_row.numel()).scatter_reduce_(0, inverse, entries, "amin")
        u_row, u_seat, u_pos = e_row[first], union // positions, union % positions
        fits = rows_that_fit(u_row, seats, hot_rows)
        kept = fits[u_row]
        u_slot = state.pos_slot[u_seat, u_pos].long()
        is_hit, is_miss = kept & (u_slot >= 0), kept & (u_slot < 0)
        order = torch.argsort(torch.where(is_miss, u_seat * entries.numel() + first, torch.iinfo(torch.int64).max))
        order = order[: int(is_miss.sum())]
        m_seat, m_pos = u_seat[order], u_pos[order]
        host_block = source_table[m_seat, m_pos // block_size].long()
        if bool((host_block <= 0).any()):
            at = int((host_block <= 0).nonzero()[0])
            raise InvariantError(f"seat {int(m_seat[at])}, position {int(m_pos[at])} is neither resident nor on the host")
        victim, update = find_victims(m_seat, u_seat[is_hit], u_slot[is_hit], hot_rows, state)
        u_slot[order] = victim
        u_slot = torch.where(kept, u_slot, 0)
        blocks = hot_table[u_seat, u_slot // block_size].long()
        if bool(((blocks <= 0) & kept).any()):
            at = int(((blocks <= 0) & kept).nonzero()[0])
            raise InvariantError(f"slot {int(u_slot[at])} of seat {int(u_seat[at])}'s hot region has no block")
        u_id = blocks * rows_per_block + row_offset + u_slot % block_size
        # every check is behind us: change state, copy, write the output
        update()
        use = state.use[u_seat[is_hit], u_slot[is_hit]]
        state.use[u_seat[is_hit], u_slot[is_hit]] = (use + USE_HIT).clamp(max=USE_MAX)
        if m_seat.numel():
            old = state.slot_tag[m_seat, victim].long()
            state.pos_slot[m_seat[old >= 0], old[old >= 0]] = -1
            state.slot_tag[m_seat, victim] = m_pos.to(torch.int32)
            state.pos_slot[m_seat, m_pos] = victim.to(torch.int16)
            state.use[m_seat, victim] = USE_NEW
            plan = MissPlan(host_rows=host_block * block_size + m_pos % block_size, device_rows=u_id[order], rows=u_row[order])
            replay(plan, 0, rows, host_rows)
        row_ids[e_row, e_col] = u_id[inverse]
        row_ids[~fits] = -1
        resident = torch.where(fits, resident, zero)
        miss = torch.bincount(plan.rows, minlength=num)
        hot = torch.where(fits, need.sum(1), zero) - miss
    valid = (row_ids >= 0).sum(1, dtype=torch.int32)
    if out_row_ids is not None:
        row_ids = out_row_ids.copy_(row_ids)
    if out_valid is not None:
        valid = out_valid.copy_(valid)
    return Resolution(
        row_ids=row_ids,
        host_ids=None,
        valid=valid,
        fits=fits,
        plan=plan,
        resident=resident,
        hot=hot,
        miss=miss,
        row_offset=row_offset,
    )


def resolve_pages(
    topk: Tensor,
    seats: Tensor,
    seq_len: Tensor,
    *,
    resident_table: Tensor,
    source_table: Tensor | None,
    block_size: int,
    rows_per_block: int,
    row_offset: int,
    status: Tensor | None = None,
) -> Resolution:
    """Maps positions through block tables alone: device rows where resident, else host rows. No state, no copy.

    Args: as `resolve`; `source_table=None` = everything must be resident. status: not written here; kernels report NO_PAGE.
    Returns:
        A Resolution whose `host_ids` is None when nothing is on the host.
    Raises:
        InvariantError: a position has no page in any (allowed) tier.
    """
    where = _locate(topk, seats, seq_len, resident_table, block_size, rows_per_block, row_offset)
    row_ids, need, num = where.row_ids, where.need, topk.shape[0]
    resident = (row_ids >= 0).sum(1)
    host_ids = None
    if bool(need.any()):
        row, col = need.nonzero(as_tuple=True)
        seat, pos = where.seat[row], where.pos[row, col]
        block = torch.zeros_like(pos) if source_table is None else source_table[seat, pos // block_size].long()
        if bool((block <= 0).any()):
            at = int((block <= 0).nonzero()[0])
            tier = "not resident" if source_table is None else "neither resident nor on the host"
            raise InvariantError(f"seat {int(seat[at])}, position {int(pos[at])} is {tier}")
        host_ids = torch.full_like(row_ids, -1)
        host_ids[row, col] = block * block_size + pos % block_size
    empty = torch.zeros(0, dtype=torch.int64, device=topk.device)
    zero = torch.zeros(num, dtype=torch.int64, device=topk.device)
    return Resolution(
        row_ids=row_ids,
        host_ids=host_ids,
        valid=(resident + need.sum(1)).to(torch.int32),
        fits=torch.ones(num, dtype=torch.bool, device=topk.device),
        plan=MissPlan(host_rows=empty, device_rows=empty, rows=empty),
        resident=resident,
        hot=zero,
        miss=zero,
        row_offset=row_offset,
    )


def replay(plan: MissPlan, row_delta: int, rows: Tensor, host_rows: Tensor) -> None:
    """Makes a plan's copies in a layer whose page starts `row_delta` rows behind the leader's. Mutates `rows`."""
    if plan.count:
        rows.index_copy_(0, plan.device_rows + row_delta, host_rows.index_select(0, plan.host_rows))


def reset_seat(state: HotState, seat: int, *, from_slot: int = 0, from_position: int = 0) -> None:
    """Empties slots at or beyond `from_slot` and slots that hold positions at or beyond `from_position`; -1 = neither.

    The hand returns to 0 if it stood at or beyond `from_slot`. Mutates `state`.
    Example: a region shrunk to 128 rows: `from_slot=128, from_position=-1`; a rewind: `from_slot=-1, from_position=r`.
    """
    tags = state.slot_tag[seat]
    clear = torch.zeros_like(tags, dtype=torch.bool)
    if from_slot >= 0:
        clear[from_slot:] = True
        if int(state.hand[seat]) >= from_slot:
            state.hand[seat] = 0
    if from_position >= 0:
        clear |= tags >= from_position
    gone = tags[clear & (tags >= 0)].long()
    state.pos_slot[seat, gone] = -1
    tags[clear] = -1
    state.use[seat][clear] = 0


def reset_seats(state: HotState, resets: Tensor) -> None:
    """`reset_seat` for every row (seat, from_slot, from_position) of `resets` int32 [m, 3]. Mutates `state`."""
    for seat, from_slot, from_position in resets.tolist():
        reset_seat(state, seat, from_slot=from_slot, from_position=from_position)


class _Where:
    """Entries by tier: `row_ids` of resident ones (else -1), `need` = valid but not resident, positions, seats."""

    __slots__ = ("need", "pos", "row_ids", "seat")

    def __init__(self, row_ids: Tensor, need: Tensor, pos: Tensor, seat: Tensor) -> None:
        self.row_ids, self.need, self.pos, self.seat = row_ids, need, pos, seat


def _locate(
    topk: Tensor,
    seats: Tensor,
    seq_len: Tensor,
    resident_table: Tensor,
    block_size: int,
    rows_per_block: int,
    row_offset: int,
) -> _Where:
    if topk.ndim != 2 or seats.shape != topk.shape[:1] or seq_len.shape != topk.shape[:1]:
        raise InvariantError(
            f"topk must be [n, k] with seats [n] and seq_len [n], got {tuple(topk.shape)}, "
            f"{tuple(seats.shape)}, {tuple(seq_len.shape)}"
        )
    index = topk.to(torch.int64)
    named = (index >= 0) & (index < seq_len.to(torch.int64)[:, None]) & (seats >= 0)[:, None]
    pos = torch.where(named, index, 0)
    seat = seats.to(torch.int64).clamp(min=0)
    block = resident_table[seat[:, None], pos // block_size].to(torch.int64)
    resident = named & (block > 0)
    row_ids = torch.where(resident, block * rows_per_block + row_offset + pos % block_size, -1)
    return _Where(row_ids, named & ~resident, pos, seat)

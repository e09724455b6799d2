"""State of the hot regions of one index group, and what one resolve of it found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.errors import InvariantError

SLOT_ALIGN = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HotState:
    """Replacement state of one index group's hot regions. Changed in place by `resolve` and `reset_seats` only.

    On CUDA `slots` is rounded up to a multiple of SLOT_ALIGN, so that a kernel loads 16 counters at once.

    Attributes:
        slot_tag: int32 [seats, slots], position held by a slot, -1 = empty. Slots beyond a region's size are empty.
        pos_slot: int16 [seats, positions], slot of a position, -1 = not hot; [seats, 0] of a hashed state.
        use: uint8 [seats, slots], 2-bit use counter.
        hand: int32 [seats], slot at which the next search for a victim starts.
    """

    slot_tag: Tensor
    pos_slot: Tensor
    use: Tensor
    hand: Tensor

    @classmethod
    def empty(cls, seats: int, slots: int, positions: int, device: str | torch.device = "cpu", *,
              hashed: bool = False) -> HotState:
        """`hashed` (CUDA): no position table, 2 bytes a position and seat less; each resolve builds one from the tags."""
        if torch.device(device).type == "cuda":
            slots = -(-slots // SLOT_ALIGN) * SLOT_ALIGN
        return cls(
            slot_tag=torch.full((seats, slots), -1, dtype=torch.int32, device=device),
            pos_slot=torch.full((seats, 0 if hashed else positions), -1, dtype=torch.int16, device=device),
            use=torch.zeros((seats, slots), dtype=torch.uint8, device=device),
            hand=torch.zeros((seats,), dtype=torch.int32, device=device),
        )

    @property
    def is_hashed(self) -> bool:
        return self.pos_slot.shape[1] == 0

    def check(self, hot_rows: Tensor) -> None:
        """Raises InvariantError unless tags and positions name each other, none beyond `hot_rows` int64 [seats]."""
        seat, slot = (self.slot_tag >= 0).nonzero(as_tuple=True)
        tag = self.slot_tag[seat, slot].long()
        if not self.is_hashed and not torch.equal(self.pos_slot[seat, tag].long(), slot):
            raise InvariantError(f"hot tags and positions disagree, seats {sorted(set(seat.tolist()))}")
        if not self.is_hashed and int((self.pos_slot >= 0).sum()) != seat.numel():
            raise InvariantError(f"{int((self.pos_slot >= 0).sum())} positions are hot but {seat.numel()} slots are tagged")
        if bool((slot >= hot_rows[seat]).any()):
            raise InvariantError("a slot beyond its region's size is tagged")
        if bool((self.use > 3).any()) or bool(((self.use > 0) & (self.slot_tag < 0)).any()):
            raise InvariantError("a use counter is out of range, or counts an empty slot")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MissPlan:
    """Copies that a leader's resolve made, for its followers to repeat in their own layers.

    Attributes:
        host_rows: int64 [m], row of the layer's host view. device_rows: int64 [m], flat row id in the leader's layer.
        rows: int64 [m], query row that first referenced the position.
    """

    host_rows: Tensor
    device_rows: Tensor
    rows: Tensor

    @property
    def count(self) -> int:
        return int(self.host_rows.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceMissPlan:
    """A miss plan that the host never sees: a section per query row, filled up to its count.

    Attributes:
        host_rows, device_rows: int32 [n, k]; entry i of row n is valid for i < counts[n], in order of first reference.
        counts: int32 [n], misses that row n referenced first.
    """

    host_rows: Tensor
    device_rows: Tensor
    counts: Tensor

    def flat(self) -> MissPlan:
        """The same on the host's side of a synchronisation, for tests."""
        n, k = self.host_rows.shape
        valid = torch.arange(k, device=self.counts.device) < self.counts[:, None]
        row = torch.arange(n, device=self.counts.device)[:, None].expand(n, k)
        return MissPlan(host_rows=self.host_rows[valid].long(), device_rows=self.device_rows[valid].long(), rows=row[valid])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resolution:
    """Result of one resolve. Integers are int64 on the CPU and int32 on CUDA.

    Attributes:
        row_ids: [n, k], flat device rows of the leader's layer, -1 = none.
        host_ids: [n, k] or None: rows of the layer's host view for entries of prefill rows that are not resident.
        valid: int32 [n], entries of each row that name a row (device or host).
        fits: bool [n]; False = this verification row did not fit the hot region and all of its entries are -1.
        plan: copies made; empty when everything was resident or hot.
        resident, hot, miss: [n], entries served by each tier; their sum plus host entries is `valid`. An entry
            that shares a miss of an earlier entry counts as hot.
        row_offset: of the leader's layer inside a block, contained in `row_ids` and in the plan.
    """

    row_ids: Tensor
    host_ids: Tensor | None
    valid: Tensor
    fits: Tensor
    plan: MissPlan | DeviceMissPlan
    resident: Tensor
    hot: Tensor
    miss: Tensor
    row_offset: int

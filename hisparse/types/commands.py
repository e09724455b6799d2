"""Scheduler to worker: the HiSparse work of one step, as block ids, seats and transfer ids.

What a step has many of is a NamedTuple: made in a third of the time of a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class BlockTableUpdate(NamedTuple):
    """New entries of one seat's row of one group's block table.

    `table[seat, first_page : first_page + len(ids)] = ids`, then every entry at or beyond `num_pages` becomes 0 (null).
    Entries below `first_page` keep. An emptied seat is `first_page=0, ids=(), num_pages=0`.
    For a hot group the "pages" are the blocks of the hot region in slot order; for the source group, host blocks.
    """

    group_id: int
    seat: int
    first_page: int
    ids: tuple[int, ...]
    num_pages: int


class ResidentPagesUpdate(NamedTuple):
    """New entries of one seat's rows in the tables of *every* resident group: one value for a page, however many groups.

    `blocks[i]` are the blocks of page `first_page + i`, one per resident group in the order of `layout.residents`; () = null
    in all of them. Entries below `first_page` keep; every entry at or beyond `num_pages` becomes null.
    """

    seat: int
    first_page: int
    blocks: tuple[tuple[int, ...], ...]
    num_pages: int

    def by_group(self, group_ids: Sequence[int]) -> tuple[BlockTableUpdate, ...]:
        """The same as one update per resident group; `group_ids` of `layout.residents` in order."""
        return tuple(
            BlockTableUpdate(group_id, self.seat, self.first_page,
                             tuple([page[g] if page else 0 for page in self.blocks]), self.num_pages)
            for g, group_id in enumerate(group_ids))


TableUpdate = BlockTableUpdate | ResidentPagesUpdate


class SeatReset(NamedTuple):
    """Clear the hot-region state of a seat, in every hot group (or one), before this step's first kernel.

    Slots at or beyond `from_slot` and positions at or beyond `from_position` become empty; (0, 0) clears all.
    A value of -1 leaves that dimension alone. `hot_group` is an index into `layout.hots`; -1 means every one.
    """

    seat: int
    from_slot: int = 0
    from_position: int = 0
    hot_group: int = -1


class HotRows(NamedTuple):
    """Rows that the hot region of (seat, hot group) has from this command on; 0 = no region."""

    seat: int
    hot_group: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBlocks:
    """Blocks handed out since the last command, with the generation each has from now on (parallel tuples).

    The worker stores the generations (then a fence) before any write to these blocks; for host blocks it also clears
    the page's row mask before the step's first kernel.
    """

    ids: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()


class Fence(NamedTuple):
    """`block` (a device block) may be written on the compute stream only after transfer `transfer_id`'s copy event."""

    block: int
    transfer_id: int


class SparseKVPageTransfer(NamedTuple):
    """One page, device to host (a spill): physical coordinates and an id, nothing else.

    Attributes:
        device_blocks: one block per resident group, in the order of `layout.residents`.
        after_forward: the copy goes behind this step's forward (else before it, at once).
        copy_bytes: False = every row was mirrored when it was written; nothing is copied, the row mask decides durability.
    """

    id: int
    host_block: int
    device_blocks: tuple[int, ...]
    after_forward: bool = True
    copy_bytes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRestore:
    """One page, host to device, in every resident group. Completed by every rank. `num_rows` rows from row 0."""

    id: int
    host_block: int
    device_blocks: tuple[int, ...]
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """Copy-on-write of a partly shared page, filled before the step's first kernel; rows [0, num_rows).

    Device blocks: (source, destination) pairs of whole blocks (any group). Host: likewise, done by the pool's writer.
    Acknowledged by every rank.
    """

    id: int
    device_pairs: tuple[tuple[int, int], ...]
    host_pair: tuple[int, int] | None
    num_rows: int


class MirrorSpan(NamedTuple):
    """Host blocks behind pages that this step may write: rows are mirrored there once every layer has appended.
    -1 = skip the page."""

    seat: int
    first_page: int
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseKVOffloadCommand:
    """The opaque scheduler-to-worker work of one step. Applied in field order; spills after the forward if they say so."""

    step: int
    new_device_blocks: NewBlocks = NewBlocks()
    new_host_blocks: NewBlocks = NewBlocks()
    fences: tuple[Fence, ...] = ()
    table_updates: tuple[TableUpdate, ...] = ()
    hot_rows: tuple[HotRows, ...] = ()
    seat_resets: tuple[SeatReset, ...] = ()
    page_copies: tuple[PageCopy, ...] = ()
    restores: tuple[PageRestore, ...] = ()
    mirrors: tuple[MirrorSpan, ...] = ()
    spills: tuple[SparseKVPageTransfer, ...] = ()

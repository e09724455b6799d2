"""A worker of plain lists: a row is a number, copies finish when the test says so.

It does what the commands say and nothing else, so a wrong command shows as a wrong or missing row.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hisparse.layout import KVCacheLayout
from hisparse.types import (
    AckKind,
    BlockTableUpdate,
    HiSparseWorkerOutput,
    ImportTarget,
    Landing,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    TableUpdate,
    TransferAck,
)

POISON = -1
Row = int
"""Stands for the KV of one position: differs whenever a token up to it, or an extra key, differs (`harness.next_row`)."""


def flat(updates: Iterable[TableUpdate], layout: KVCacheLayout) -> list[BlockTableUpdate]:
    """Updates of single groups."""
    residents = [group.group_id for group in layout.residents]
    return [row for update in updates
            for row in ((update,) if isinstance(update, BlockTableUpdate) else update.by_group(residents))]


@dataclass
class Copy:
    """A spill on the copy stream: bytes are read only when it completes, the latest moment the rules allow."""

    transfer: SparseKVPageTransfer
    read: bool = False


@dataclass
class Import:
    request_id: str
    target: ImportTarget
    rows: list[Row]


class HostMemory:
    """Bytes and row masks of one physical host pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.rows = [[POISON] * block_size for _ in range(num_blocks)]
        self.masks = [0] * num_blocks
        self.generations: dict[int, int] = {}


@dataclass
class FakeWorker:
    """One rank. A worker that is no writer maps the pool of rank 0 and never writes it."""

    layout: KVCacheLayout
    num_device_blocks: int
    host: HostMemory
    incarnation: int
    rank: int = 0
    writer: bool = True
    device: list[list[Row]] = field(init=False)
    """By block, resident and indexer blocks alike."""
    tables: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(group id, seat) -> blocks."""
    hot_rows: dict[tuple[int, int], int] = field(default_factory=dict)
    slots: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """(seat, hot group) -> slot of its region -> position whose row it holds."""
    tags: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """The same the other way round."""
    misses: int = 0
    highest_slot: int = -1
    mirrors: dict[tuple[int, int], int] = field(default_factory=dict)
    rows_to_drop: int = 0
    """Mirrored rows that the next appends lose: neither bytes nor mask bit."""
    dropped: set[int] = field(default_factory=set)
    """Host blocks in which such a row is missing."""
    copies: dict[int, Copy] = field(default_factory=dict)
    acks: list[TransferAck] = field(default_factory=list)
    after: list[SparseKVPageTransfer] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=dict)
    unstarted: Counter[int] = field(default_factory=Counter)
    """Device blocks named by commands received and not yet started."""
    landed: set[int] = field(default_factory=set)
    """Device blocks that outside writers filled, until the command that named them has run."""
    page_copies: list[int] = field(default_factory=list)
    """Copies done and not reported yet."""

    def __post_init__(self) -> None:
        self.size = self.layout.block_size
        self.full = (1 << self.size) - 1
        self.device = [[POISON] * self.size for _ in range(self.num_device_blocks)]
        self.resident_ids = [group.group_id for group in self.layout.residents]
        self.hot_ids = [group.group_id for group in self.layout.hots]

    def table(self, group_id: int, seat: int) -> list[int]:
        return self.tables.setdefault((group_id, seat), [])

    # ------------------------------------------------------------------------------------------- a step
    def receive(self, command: SparseKVOffloadCommand) -> None:
        """What the worker's thread does when the command arrives, while earlier steps may still run on the device."""
        self.unstarted.update(command.new_device_blocks.ids)
        pools = [(self.generations, command.new_device_blocks)]
        if self.writer:
            pools.append((self.host.generations, command.new_host_blocks))
        for seen, new in pools:
            assert len(set(new.ids)) == len(new.ids) == len(new.generations)
            for block, generation in zip(new.ids, new.generations, strict=True):
                assert block != 0
                old = seen.get(block)
                assert old is None or generation > old, f"block {block} went from generation {old} to {generation}"
                seen[block] = generation
        if self.writer:
            for block in command.new_host_blocks.ids:
                self.host.masks[block] = 0
                self.dropped.discard(block)
                assert not any(copy.transfer.host_block == block for copy in self.copies.values()), (
                    f"host block {block} handed out under a copy")

    def start(self, command: SparseKVOffloadCommand) -> None:
        """In stream order, before the step's first kernel."""
        fences = {(fence.block, fence.transfer_id) for fence in command.fences}
        self.unstarted.subtract(command.new_device_blocks.ids)
        for block in command.new_device_blocks.ids:
            for copy in self.copies.values():
                if not copy.read and block in copy.transfer.device_blocks:
                    assert (block, copy.transfer.id) in fences, f"block {block} handed out under copy {copy.transfer.id}"
                    self.read(copy)  # the compute stream waited for this copy
            if block in self.landed:  # bytes of an import came before this step ran
                if not self.unstarted[block]:
                    self.landed.discard(block)
                continue
            self.device[block] = [POISON] * self.size
        for update in flat(command.table_updates, self.layout):
            table = self.table(update.group_id, update.seat)
            end = update.first_page + len(update.ids)
            table += [0] * (max(end, update.num_pages) - len(table))  # entries never named are null
            table[update.first_page : end] = update.ids
            table += [0] * (update.num_pages - len(table))
            del table[update.num_pages :]
        for hot in command.hot_rows:
            self.hot_rows[hot.seat, hot.hot_group] = hot.rows
        for reset in command.seat_resets:
            for key, slots in self.slots.items():
                if key[0] == reset.seat and reset.hot_group in (-1, key[1]):
                    for slot, position in list(slots.items()):
                        if 0 <= reset.from_slot <= slot or 0 <= reset.from_position <= position:
                            del slots[slot], self.tags[key][position]
        for key, slots in self.slots.items():
            assert all(slot < self.hot_rows.get(key, 0) for slot in slots), "a slot beyond the region is in use"
        for page_copy in command.page_copies:
            rows = page_copy.num_rows
            for source, destination in page_copy.device_pairs:
                self.device[destination][:rows] = self.device[source][:rows]
            if page_copy.host_pair is not None and self.writer:
                source, destination = page_copy.host_pair
                kept = self.host.masks[source] & ((1 << rows) - 1)
                for row in range(rows):
                    if kept >> row & 1:
                        self.host.rows[destination][row] = self.host.rows[source][row]
                self.host.masks[destination] |= kept
            self.page_copies.append(page_copy.id)
        self.mirrors = {
            (span.seat, span.first_page + i): block
            for span in command.mirrors for i, block in enumerate(span.host_blocks) if block >= 0
        }
        for spill in command.spills:
            if not spill.after_forward:
                self.enqueue(spill)
        self.after = [spill for spill in command.spills if spill.after_forward]

    def write(self, seat: int, first: int, rows: list[Row]) -> None:
        """The forward's append of the rows at positions first, first + 1, ..."""
        for position, row in enumerate(rows, first):
            page, offset = divmod(position, self.size)
            indexer = self.table(self.layout.indexer.group_id, seat)[page]
            assert indexer, f"row {position} of seat {seat} has no indexer block"
            self.device[indexer][offset] = row
            for group_id in self.resident_ids:
                block = self.table(group_id, seat)[page]
                assert block, f"row {position} of seat {seat} has no resident block"
                self.device[block][offset] = row
            host = self.mirrors.get((seat, page))
            if host is not None:
                assert host == self.table(self.layout.source.group_id, seat)[page]
                if self.writer:
                    if self.rows_to_drop:
                        self.rows_to_drop -= 1
                        self.dropped.add(host)
                        continue
                    self.host.rows[host][offset] = row
                    self.host.masks[host] |= 1 << offset

    def reject(self, seat: int, num_rows: int, end: int) -> None:
        """Draft rows [num_rows, end) do not count: their mask bits go."""
        for position in range(num_rows, end):
            page, offset = divmod(position, self.size)
            host = self.mirrors.get((seat, page))
            if host is not None and self.writer:
                self.host.masks[host] &= ~(1 << offset)

    def end(self) -> None:
        for spill in self.after:
            self.enqueue(spill)
        self.after = []

    # ------------------------------------------------------------------------------------------- copies
    def enqueue(self, transfer: SparseKVPageTransfer) -> None:
        if not self.writer:
            return
        assert transfer.id not in self.copies
        self.copies[transfer.id] = Copy(transfer)
        self.acks.append(self.ack(transfer.id, AckKind.ENQUEUED))

    def read(self, copy: Copy) -> None:
        """The bytes leave the device blocks."""
        transfer = copy.transfer
        if transfer.copy_bytes:
            rows = self.device[transfer.device_blocks[0]]
            for block in transfer.device_blocks:
                assert self.device[block] == rows, f"transfer {transfer.id}: its groups hold different rows"
            self.host.rows[transfer.host_block] = list(rows)
            self.host.masks[transfer.host_block] = self.full
        copy.read = True

    def complete(self, transfer_id: int, *, fail: bool = False, mask_only: bool = False) -> None:
        """A copy's event is reached. An incomplete row mask is reported as a failure, or (mask_only) just as it is."""
        copy = self.copies.pop(transfer_id)
        if not copy.read:
            self.read(copy)
        mask = self.host.masks[copy.transfer.host_block]
        failed = fail or (mask != self.full and not mask_only)
        self.acks.append(self.ack(transfer_id, AckKind.FAILED if failed else AckKind.COMPLETED, mask))

    def complete_all(self, rng: random.Random | None = None) -> None:
        self.report_page_copies()
        ids = list(self.copies)
        if rng is not None:
            rng.shuffle(ids)
        for transfer_id in ids:
            self.complete(transfer_id)

    def report_page_copies(self) -> None:
        self.acks += [self.ack(transfer_id, AckKind.COMPLETED) for transfer_id in self.page_copies]
        self.page_copies.clear()

    def ack(self, transfer_id: int, kind: AckKind, mask: int = 0) -> TransferAck:
        return TransferAck(incarnation=self.incarnation, rank=self.rank, transfer_id=transfer_id, kind=kind, row_mask=mask)

    def output(self) -> HiSparseWorkerOutput:
        acks, self.acks = tuple(self.acks), []
        return HiSparseWorkerOutput(rank=self.rank, incarnation=self.incarnation, acks=acks)

    # ------------------------------------------------------------------------------------------- imports and loads
    def outside_write(self, block: int, rows: list[Row], first: int = 0) -> None:
        """Not ordered with the compute stream."""
        if self.unstarted[block] > 0:
            self.landed.add(block)
        self.device[block][first : first + len(rows)] = rows

    def land(self, load: Import, num_rows: int | None = None) -> None:
        """The first `num_rows` rows (default: all) arrive: indexer and resident blocks, host pages for a HOST landing."""
        pages, size = load.target.pages, self.size
        rows = load.rows[:num_rows]
        for i in range(pages.num_pages):
            first = (pages.first_page + i) * size
            part = rows[first : min(first + size, pages.num_tokens)]
            if not part:
                break
            self.outside_write(pages.indexer_blocks[i], part)
            for blocks in pages.resident_blocks:
                if blocks[i]:
                    self.outside_write(blocks[i], part)
            if load.target.landing is Landing.HOST and self.writer:
                self.host.rows[pages.host_blocks[i]][: len(part)] = part
                self.host.masks[pages.host_blocks[i]] |= (1 << len(part)) - 1

    # ------------------------------------------------------------------------------------------- what attention sees
    def check_rows(self, seat: int, rows: list[Row], who: str) -> list[str]:
        """Every selectable position and every indexer row of a seat. Returns the tier of each page."""
        size, tiers = self.size, []
        indexer = self.table(self.layout.indexer.group_id, seat)
        tables = [self.table(group_id, seat) for group_id in self.resident_ids]
        source = self.table(self.layout.source.group_id, seat)
        for first in range(0, len(rows), size):
            page = first // size
            want = rows[first : first + size]
            num = len(want)
            got = self.device[indexer[page]][:num]
            assert got == want, f"{who} page {page}: indexer block {indexer[page]} holds {show(got)}, not {show(want)}"
            blocks = [table[page] for table in tables]
            if all(blocks):
                for block in blocks:
                    got = self.device[block][:num]
                    assert got == want, f"{who} page {page}: resident block {block} holds {show(got)}, not {show(want)}"
                tiers.append("resident")
                continue
            assert not any(blocks), f"{who} page {page} is resident in some groups only: {blocks}"
            host = source[page]
            assert host, f"{who} page {page} is nowhere"
            missing = ((1 << num) - 1) & ~self.host.masks[host]
            assert not missing, f"{who} page {page}: host block {host} lacks rows {missing:b}"
            got = self.host.rows[host][:num]
            assert got == want, f"{who} page {page}: host block {host} holds {show(got)}, not {show(want)}"
            for group in range(len(self.hot_ids)):
                for position, row in enumerate(want, first):
                    self.through_hot(seat, group, position, row)
            tiers.append("host")
        return tiers

    def through_hot(self, seat: int, group: int, position: int, row: Row) -> None:
        """A hot row must be the host's; a miss is copied to an empty slot, the last one first, or over an old one."""
        key = (seat, group)
        rows = self.hot_rows.get(key, 0)
        assert rows > 0, f"seat {seat} needs host rows and has no hot region"
        held = self.table(self.hot_ids[group], seat)
        assert len(held) * self.size == rows and all(held), f"region of {rows} rows in blocks {held}"
        slots, tags = self.slots.setdefault(key, {}), self.tags.setdefault(key, {})
        slot = tags.get(position, -1)
        if slot < 0:
            self.misses += 1
            slot = next((s for s in range(rows - 1, -1, -1) if s not in slots), self.misses % rows)
            if slot in slots:
                del tags[slots[slot]]
            slots[slot], tags[position] = position, slot
            self.highest_slot = max(self.highest_slot, slot)
            self.device[held[slot // self.size]][slot % self.size] = row
        got = self.device[held[slot // self.size]][slot % self.size]
        assert got == row, f"hot slot {slot} of seat {seat} has {show([got])} for position {position}"


def show(rows: list[Row]) -> str:
    """Rows as the positions they were computed for; `!` = poison. The rest of a row's number is in brackets."""
    return " ".join("!" if row == POISON else f"{row & 0xFFFFF}[{row >> 20 & 0xFFFF:04x}]" for row in rows)

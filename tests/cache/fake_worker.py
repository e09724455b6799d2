"""A worker of plain dictionaries: rows are values, copies finish when the test says so.

It does what the commands say and nothing else, so a wrong command shows as a wrong or missing value.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hisparse.layout import KVCacheLayout
from hisparse.types import (
    AckKind,
    HiSparseWorkerOutput,
    ImportTarget,
    Landing,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    TransferAck,
)

POISON = "poison"
Row = tuple[bytes | str, int]
"""(what the row was computed from, position)."""


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
    device: tuple[int, ...] = ()


@dataclass
class FakeWorker:
    layout: KVCacheLayout
    num_device_blocks: int
    num_host_blocks: int
    seats: int
    incarnation: int
    rank: int = 0
    device: dict[tuple[int, int], Row | str] = field(default_factory=dict)
    """(block, row) -> value, for resident blocks and indexer blocks alike."""
    host: dict[tuple[int, int], Row | str] = field(default_factory=dict)
    masks: dict[int, int] = field(default_factory=dict)
    tables: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(group id, seat) -> blocks."""
    hot_rows: dict[tuple[int, int], int] = field(default_factory=dict)
    slots: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """(seat, hot group) -> slot of its region -> position whose row it holds."""
    misses: int = 0
    highest_slot: int = -1
    mirrors: dict[tuple[int, int], int] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)
    acks: list[TransferAck] = field(default_factory=list)
    after: list[SparseKVPageTransfer] = field(default_factory=list)
    seen_generations: dict[tuple[str, int], int] = field(default_factory=dict)
    unstarted: Counter[int] = field(default_factory=Counter)
    """Device blocks named by commands received and not yet started."""
    landed: set[int] = field(default_factory=set)
    """Device blocks that outside writers filled, until the command that named them has run."""
    page_copies: list[int] = field(default_factory=list)
    """Copies done and not reported yet."""
    commands: int = 0

    @property
    def size(self) -> int:
        return self.layout.block_size

    @property
    def full(self) -> int:
        return (1 << self.size) - 1

    def table(self, group_id: int, seat: int) -> list[int]:
        return self.tables.setdefault((group_id, seat), [])

    # ------------------------------------------------------------------------------------------- a step
    def receive(self, command: SparseKVOffloadCommand) -> None:
        """What the worker's thread does when the command arrives, while earlier steps may still run on the device."""
        self.commands += 1
        self.unstarted.update(command.new_device_blocks.ids)
        for pool, new in (("device", command.new_device_blocks), ("host", command.new_host_blocks)):
            assert len(set(new.ids)) == len(new.ids) == len(new.generations)
            for block, generation in zip(new.ids, new.generations, strict=True):
                assert block != 0
                old = self.seen_generations.get((pool, block))
                assert old is None or generation > old, f"{pool} block {block} went from {old} to {generation}"
                self.seen_generations[pool, block] = generation
        for block in command.new_host_blocks.ids:
            self.masks[block] = 0
            assert not any(copy.transfer.host_block == block for copy in self.copies.values())

    def start(self, command: SparseKVOffloadCommand) -> None:
        """In stream order, before the step's first kernel."""
        fences = {(fence.block, fence.transfer_id) for fence in command.fences}
        self.unstarted.subtract(command.new_device_blocks.ids)
        for block in command.new_device_blocks.ids:
            for copy in list(self.copies.values()):
                if block in copy.transfer.device_blocks and not copy.read:
                    assert (block, copy.transfer.id) in fences, f"block {block} handed out under copy {copy.transfer.id}"
                    self.read(copy)  # the compute stream waited for this copy
            if block in self.landed:  # bytes of an import came before this step ran
                if not self.unstarted[block]:
                    self.landed.discard(block)
                continue
            for row in range(self.size):
                self.device[block, row] = POISON
        for update in command.table_updates:
            table = self.table(update.group_id, update.seat)
            end = update.first_page + len(update.ids)
            table += [0] * (max(end, update.num_pages) - len(table))  # entries never named are null
            table[update.first_page : end] = update.ids
            table[update.num_pages :] = [0] * max(0, len(table) - update.num_pages)
            del table[update.num_pages :]
        for hot in command.hot_rows:
            self.hot_rows[hot.seat, hot.hot_group] = hot.rows
        for reset in command.seat_resets:
            for (seat, group), slots in self.slots.items():
                if seat == reset.seat and reset.hot_group in (-1, group):
                    for slot, position in list(slots.items()):
                        if 0 <= reset.from_slot <= slot or 0 <= reset.from_position <= position:
                            del slots[slot]
        for (seat, group), slots in self.slots.items():
            assert all(slot < self.hot_rows.get((seat, group), 0) for slot in slots), "a slot beyond the region is in use"
        for copy in command.page_copies:
            for source, destination in copy.device_pairs:
                for row in range(copy.num_rows):
                    self.device[destination, row] = self.device[source, row]
            if copy.host_pair is not None:
                source, destination = copy.host_pair
                for row in range(copy.num_rows):
                    if self.masks.get(source, 0) >> row & 1:
                        self.host[destination, row] = self.host[source, row]
                        self.masks[destination] |= 1 << row
            self.page_copies.append(copy.id)
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
            assert indexer
            self.device[indexer, offset] = row
            for group in self.layout.residents:
                block = self.table(group.group_id, seat)[page]
                assert block, f"row {position} of seat {seat} has no resident block"
                self.device[block, offset] = row
            host = self.mirrors.get((seat, page))
            if host is not None:
                assert host == self.table(self.layout.source.group_id, seat)[page]
                self.host[host, offset] = row
                self.masks[host] |= 1 << offset

    def reject(self, seat: int, num_rows: int, end: int) -> None:
        """Draft rows [num_rows, end) do not count: their mask bits go."""
        for position in range(num_rows, end):
            page, offset = divmod(position, self.size)
            host = self.mirrors.get((seat, page))
            if host is not None:
                self.masks[host] &= ~(1 << offset)

    def end(self) -> None:
        for spill in self.after:
            self.enqueue(spill)
        self.after = []

    def enqueue(self, transfer: SparseKVPageTransfer) -> None:
        assert transfer.id not in self.copies
        self.copies[transfer.id] = Copy(transfer)
        self.acks.append(self.ack(transfer.id, AckKind.ENQUEUED))

    def read(self, copy: Copy) -> None:
        """The bytes leave the device blocks."""
        transfer = copy.transfer
        if transfer.copy_bytes:
            for row in range(self.size):
                values = {self.device.get((block, row)) for block in transfer.device_blocks}
                assert len(values) == 1
                self.host[transfer.host_block, row] = values.pop() or POISON
            self.masks[transfer.host_block] = self.full
        copy.read = True

    def complete(self, transfer_id: int, *, fail: bool = False) -> None:
        copy = self.copies.pop(transfer_id)
        if not copy.read:
            self.read(copy)
        if fail:
            self.acks.append(self.ack(transfer_id, AckKind.FAILED))
        else:
            self.acks.append(self.ack(transfer_id, AckKind.COMPLETED, self.masks[copy.transfer.host_block]))

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

    # ------------------------------------------------------------------------------------------- imports
    def outside_write(self, blocks: tuple[int, ...]) -> None:
        self.landed.update(block for block in blocks if self.unstarted[block] > 0)

    def land(self, load: Import) -> None:
        """Every byte of an import arrives: indexer and resident blocks, and host pages for a HOST landing."""
        pages = load.target.pages
        self.outside_write(pages.indexer_blocks)
        for blocks in pages.resident_blocks:
            self.outside_write(blocks)
        for position, row in enumerate(load.rows):
            page, offset = divmod(position, self.size)
            if not pages.first_page <= page or position >= pages.num_tokens:
                continue
            i = page - pages.first_page
            self.device[pages.indexer_blocks[i], offset] = row
            for blocks in pages.resident_blocks:
                if blocks[i]:
                    self.device[blocks[i], offset] = row
            if load.target.landing is Landing.HOST:
                self.host[pages.host_blocks[i], offset] = row
                self.masks[pages.host_blocks[i]] = self.masks.get(pages.host_blocks[i], 0) | 1 << offset

    # ------------------------------------------------------------------------------------------- what attention sees
    def resolve(self, seat: int, position: int) -> tuple[str, Row | str]:
        """(tier, value) of one selected position: resident page, else hot region or host."""
        page, offset = divmod(position, self.size)
        blocks = [self.table(group.group_id, seat)[page] for group in self.layout.residents]
        if all(blocks):
            values = {self.device[block, offset] for block in blocks}
            assert len(values) == 1, f"groups disagree at position {position}: {values}"
            return "resident", values.pop()
        assert not any(blocks), f"page {page} of seat {seat} is resident in some groups only: {blocks}"
        host = self.table(self.layout.source.group_id, seat)[page]
        assert host
        assert self.masks.get(host, 0) >> offset & 1, f"row {position} of seat {seat} is not on its host page {host}"
        for group in range(len(self.layout.hots)):
            self.through_hot(seat, group, position, self.host[host, offset])
        return "host", self.host[host, offset]

    def through_hot(self, seat: int, group: int, position: int, value: Row | str) -> None:
        """A hot row must be the host's; a miss is copied to an empty slot, the last one first, or over an old one."""
        rows = self.hot_rows.get((seat, group), 0)
        assert rows > 0, f"seat {seat} needs host rows and has no hot region"
        held = self.table(self.layout.hots[group].group_id, seat)
        assert len(held) * self.size == rows and all(held), f"region of {rows} rows in blocks {held}"
        slots = self.slots.setdefault((seat, group), {})
        slot = next((slot for slot, tag in slots.items() if tag == position), None)
        if slot is None:
            self.misses += 1
            empty = [slot for slot in range(rows) if slot not in slots]
            slot = empty[-1] if empty else self.misses % rows
            slots[slot] = position
            self.highest_slot = max(self.highest_slot, slot)
            self.device[held[slot // self.size], slot % self.size] = value
        got = self.device[held[slot // self.size], slot % self.size]
        assert got == value, f"hot slot {slot} of seat {seat} has {got} for position {position}"

    def indexer_row(self, seat: int, position: int) -> Row | str:
        page, offset = divmod(position, self.size)
        return self.device[self.table(self.layout.indexer.group_id, seat)[page], offset]

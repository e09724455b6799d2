"""A slow model of hot regions in plain Python, written from the rules and not from the code under test.

One dictionary per seat; a clock that really walks slot by slot. It also keeps which host row each slot's bytes came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Region:
    size: int
    tags: list[int | None] = field(default_factory=list)
    use: list[int] = field(default_factory=list)
    hand: int = 0

    def __post_init__(self) -> None:
        self.tags = [None] * self.size
        self.use = [0] * self.size

    def slot_of(self, position: int) -> int | None:
        return self.tags.index(position) if position in self.tags else None

    def resize(self, size: int) -> None:
        if size >= self.size:
            self.tags += [None] * (size - self.size)
            self.use += [0] * (size - self.size)
        else:
            self.tags, self.use = self.tags[:size], self.use[:size]
            if self.hand >= size:
                self.hand = 0
        self.size = size

    def forget_from(self, position: int) -> None:
        for slot, tag in enumerate(self.tags):
            if tag is not None and tag >= position:
                self.tags[slot], self.use[slot] = None, 0


class HotModel:
    """Resolve for all seats. `resident[seat]` and `on_host[seat]` map a page to a block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.regions: dict[int, Region] = {}
        self.resident: dict[int, dict[int, int]] = {}
        self.on_host: dict[int, dict[int, int]] = {}

    def resolve(self, rows: list[tuple[int, int, list[int]]]) -> list[list[tuple[str, int, int] | None]]:
        """`rows` = (seat, seq_len, top-k). Each entry: ('resident', block, offset), ('slot', slot, host row) or None."""
        out: list[list[tuple[str, int, int] | None]] = []
        wanted: dict[int, list[int]] = {}
        refused: set[int] = set()
        for row, (seat, seq_len, topk) in enumerate(rows):
            entries: list[tuple[str, int, int] | None] = []
            mine = list(wanted.get(seat, []))
            for position in topk:
                if seat < 0 or not 0 <= position < seq_len:
                    entries.append(None)
                    continue
                page, offset = divmod(position, self.block_size)
                if page in self.resident[seat]:
                    entries.append(("resident", self.resident[seat][page], offset))
                    continue
                if position not in mine:
                    mine.append(position)
                entries.append(("slot", position, -1))
            if seat >= 0 and len(mine) > self.regions[seat].size:
                refused.add(row)
                entries = [None] * len(topk)
                wanted[seat] = wanted.get(seat, []) + [-1] * (self.regions[seat].size + 1)  # later rows do not fit either
            elif seat >= 0:
                wanted[seat] = mine
            out.append(entries)
        for seat, positions in wanted.items():
            self._serve(seat, [p for p in positions if p >= 0])
        for row, entries in enumerate(out):
            seat = rows[row][0]
            for column, entry in enumerate(entries):
                if entry is not None and entry[0] == "slot":
                    slot = self.regions[seat].slot_of(entry[1])
                    assert slot is not None
                    page, offset = divmod(entry[1], self.block_size)
                    entries[column] = ("slot", slot, self.on_host[seat][page] * self.block_size + offset)
        self.refused = refused
        return out

    def _serve(self, seat: int, positions: list[int]) -> None:
        region = self.regions[seat]
        busy = {region.slot_of(p) for p in positions} - {None}
        misses = [p for p in positions if region.slot_of(p) is None]
        victims: list[int] = []
        walk = region.hand
        while len(victims) < len(misses):
            if walk not in busy and walk not in victims:
                if region.use[walk] == 0:
                    victims.append(walk)
                else:
                    region.use[walk] -= 1
            walk = (walk + 1) % region.size
        for slot in busy:
            assert slot is not None
            region.use[slot] = min(3, region.use[slot] + 2)
        for position, slot in zip(misses, victims):
            region.tags[slot], region.use[slot] = position, 1
        if misses:
            region.hand = (victims[-1] + 1) % region.size

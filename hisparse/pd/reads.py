"""The READs that an import consists of, and those of them that are planned and not posted yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from hisparse.pd.copies import CopyEvent
from hisparse.pd.generations import GenerationRun
from hisparse.pd.pages import Ids
from hisparse.pd.staging import SlotPool
from hisparse.pd.transport import Descriptors, FarMemory


@dataclass(slots=True, eq=False)
class Read:
    """A piece that is planned, then posted, then (staged) copied. The importer is the only writer.

    Attributes:
        pool: whose slot it passes through; None = it needs none. slot: -1 = it has none.
    """

    descriptors: Descriptors | None = None  # None: staged or generations, made when it has a slot
    pages: Ids | None = None  # staged
    memory: FarMemory = FarMemory.CPU  # of staged pages
    runs: list[GenerationRun] | None = None  # generations
    pool: SlotPool | None = None
    slot: int = -1
    handle: Any = None
    event: CopyEvent | None = None


class WaitingReads:
    """A queue for each pool of slots, and one for READs that need none: where one waits for a slot, the others go on.

    The order within a queue is that of planning, and so is the order among queues as far as nothing waits.
    """

    def __init__(self) -> None:
        self._queues: dict[SlotPool | None, deque[tuple[int, Read]]] = {}
        self._planned = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def extend(self, reads: Iterable[Read]) -> None:
        for read in reads:
            self._queues.setdefault(read.pool, deque()).append((self._planned, read))
            self._planned += 1

    def clear(self) -> None:
        self._queues.clear()

    def first(self, full: Collection[SlotPool | None] = ()) -> Read | None:
        """The READ that was planned first of those whose pool is not in `full`; None = there is none."""
        heads = [queue[0] for pool, queue in self._queues.items() if pool not in full]
        return min(heads, key=lambda head: head[0])[1] if heads else None

    def take(self, read: Read) -> None:
        """Removes a READ that `first` gave."""
        queue = self._queues[read.pool]
        queue.popleft()
        if not queue:
            del self._queues[read.pool]

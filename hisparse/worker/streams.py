"""A rank's streams, and every event between them.

Four streams: *compute* is whatever stream is torch's current one when a step runs, *dma* carries spills, *prefetch* the copies
of followers, *import* the copies of imported pages out of staging (on *dma* they would stand behind spills that wait for a
forward). *host* stands for the threads of the process, which only ever ask.

| event | recorded on | read by | means |
|---|---|---|---|
| COMMAND_APPLIED | compute | dma, host | the command's tables and copies are queued, and so is every earlier step |
| FORWARD_DONE | compute | dma | the step's rows and row masks are written: its spills may read |
| SPILLS_DONE | dma | compute, host | a batch of spills is on the host: its blocks may be overwritten (fence) |
| IMPORT_DONE | import | host | the pages of a staging slot are in place: the slot is free |
| PLAN_READY | compute | prefetch | a leader's miss plan is complete |
| PREFETCHED | prefetch | compute | a follower's rows are in its hot region |
| STAGING_READ | compute, dma | host | a pinned buffer was uploaded and may be filled again |
| COUNTS_READ | compute | host | a snapshot of the counters is in pinned memory |

Between the ranks of a node there is one more, see `peer_writes`.

A record or wait by anybody else is refused. On the CPU the same calls do nothing: work is done when the call returns.
"""

from __future__ import annotations

import contextlib
import enum
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hisparse.errors import InvariantError, TransferError


class Place(enum.Enum):
    """Who records and who waits."""

    COMPUTE = "compute"
    DMA = "dma"
    PREFETCH = "prefetch"
    IMPORT = "import"
    HOST = "host"


_C, _D, _P, _I, _H = Place.COMPUTE, Place.DMA, Place.PREFETCH, Place.IMPORT, Place.HOST


class StepEvent(enum.Enum):
    """Every event of a step: name, who records it, who reads it. The table of this module in data."""

    COMMAND_APPLIED = ((_C,), (_D, _H), "the command's tables and copies are queued, and so is every earlier step")
    FORWARD_DONE = ((_C,), (_D,), "the step's rows and row masks are written: its spills may read")
    SPILLS_DONE = ((_D,), (_C, _H), "a batch of spills is on the host: its blocks may be overwritten (fence)")
    IMPORT_DONE = ((_I,), (_H,), "the pages of a staging slot are in place: the slot is free")
    PLAN_READY = ((_C,), (_P,), "a leader's miss plan is complete")
    PREFETCHED = ((_P,), (_C,), "a follower's rows are in its hot region")
    STAGING_READ = ((_C, _D), (_H,), "a pinned buffer was uploaded and may be filled again")
    COUNTS_READ = ((_C,), (_H,), "a snapshot of the counters is in pinned memory")

    def __init__(self, writers: tuple[Place, ...], readers: tuple[Place, ...], meaning: str) -> None:
        self.writers = writers
        self.readers = readers
        self.meaning = meaning


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """One recording of an event: a point in the order of the stream that recorded it. `raw` is None on the CPU."""

    event: StepEvent
    raw: Any = None


class Streams:
    """The streams of one rank and device.

    Attributes:
        device: torch device. is_cuda: False = everything here does nothing.
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        own = (Place.DMA, Place.PREFETCH, Place.IMPORT)
        self._own = {place: _stream(self.device) for place in own}

    def raw(self, place: Place) -> Any:
        """The torch stream of a place; None on the CPU. COMPUTE is torch's current stream of the device.

        Raises:
            InvariantError: HOST, which has none.
        """
        if place is Place.HOST:
            raise InvariantError("the host is no stream")
        if not self.is_cuda:
            return None
        if place is Place.COMPUTE:
            return torch.cuda.current_stream(self.device)
        return self._own[place]

    def on(self, place: Place) -> AbstractContextManager[Any]:
        """Makes the stream of `place` torch's current one inside a `with`. Do not ask for COMPUTE inside it."""
        return torch.cuda.stream(self.raw(place)) if self.is_cuda else contextlib.nullcontext()

    def record(self, event: StepEvent, place: Place) -> Mark:
        """Records `event` behind what the stream of `place` has been given so far. Never waits; may be captured.

        Raises:
            InvariantError: `place` is not a writer of this event.
        """
        if place not in event.writers:
            raise InvariantError(f"{event.name} is recorded by {_names(event.writers)}, not by {place.value}")
        if not self.is_cuda:
            return Mark(event)
        raw: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        raw.record(self.raw(place))
        return Mark(event, raw)

    def wait(self, mark: Mark, place: Place) -> None:
        """What the stream of `place` is given from now on runs behind `mark`. The CPU does not wait; may be captured.

        Raises:
            InvariantError: `place` is not a reader of the event, or the host, which only asks (`reached`).
        """
        _check_reader(mark, place)
        if mark.raw is not None:
            self.raw(place).wait_event(mark.raw)

    def reached(self, mark: Mark) -> bool:
        """True when the stream has come to `mark`. Never waits. True at once on the CPU.

        Raises:
            InvariantError: the host is not a reader of this event. RuntimeError: the device failed before it came there.
        """
        _check_reader(mark, Place.HOST)
        return True if mark.raw is None else bool(mark.raw.query())

    def drain(self, timeout_s: float) -> None:
        """Returns when the device has done everything it was given. Waits by asking: for the end, not for a step.

        Raises:
            TransferError: not in time. RuntimeError: the device failed.
        """
        deadline = time.monotonic() + timeout_s
        for raw in [self.raw(place) for place in (Place.COMPUTE, *self._own)] if self.is_cuda else []:
            while not raw.query():
                if time.monotonic() >= deadline:
                    raise TransferError(f"{self.device} did not finish its work within {timeout_s} s")
                time.sleep(0.0005)


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _check_reader(mark: Mark, place: Place) -> None:
    if place not in mark.event.readers:
        raise InvariantError(f"{mark.event.name} is read by {_names(mark.event.readers)}, not by {place.value}")


def _names(places: tuple[Place, ...]) -> str:
    return " and ".join(place.value for place in places)

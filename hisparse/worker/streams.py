"""A rank's streams, and every event between them.

Three streams: *compute* is whatever stream is torch's current one when a step runs, *dma* carries spills and the scatter of
imports, *prefetch* carries the copies of followers. *host* stands for the step's thread, which only ever asks.

| event | recorded on | read by | means |
|---|---|---|---|
| COMMAND_APPLIED | compute | dma | tables, resets, page copies and restores of the command are queued: earlier steps' rows are written |
| FORWARD_DONE | compute | dma | the step's rows and row masks are written: its spills may read |
| SPILLS_DONE | dma | compute, host | bytes and masks of a batch of spills are on the host: its blocks may be overwritten (fence) |
| IMPORT_DONE | dma | compute, host | an import's pages are in place |
| PLAN_READY | compute | prefetch | a leader's miss plan is complete |
| PREFETCHED | prefetch | compute | a follower's rows are in its hot region |
| HOST_PAGES_WRITTEN | compute | compute | pages the command's writer made in the shared host pool are there (between ranks, see peer_writes) |
| STAGING_READ | compute, dma | host | a pinned staging buffer was uploaded and may be filled again |
| COUNTS_READ | compute | host | a snapshot of the counters is in pinned memory |

A record or wait by anybody else is refused. On the CPU the same calls do nothing: work is done when the call returns.
"""

from __future__ import annotations

import contextlib
import enum
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hisparse.errors import InvariantError


class Place(enum.Enum):
    """Who records and who waits."""

    COMPUTE = "compute"
    DMA = "dma"
    PREFETCH = "prefetch"
    HOST = "host"


_C, _D, _P, _H = Place.COMPUTE, Place.DMA, Place.PREFETCH, Place.HOST


class StepEvent(enum.Enum):
    """Every event of a step: name, who records it, who reads it. The table of this module in data."""

    COMMAND_APPLIED = ("command_applied", (_C,), (_D,))
    FORWARD_DONE = ("forward_done", (_C,), (_D,))
    SPILLS_DONE = ("spills_done", (_D,), (_C, _H))
    IMPORT_DONE = ("import_done", (_D,), (_C, _H))
    PLAN_READY = ("plan_ready", (_C,), (_P,))
    PREFETCHED = ("prefetched", (_P,), (_C,))
    HOST_PAGES_WRITTEN = ("host_pages_written", (_C,), (_C,))
    STAGING_READ = ("staging_read", (_C, _D), (_H,))
    COUNTS_READ = ("counts_read", (_C,), (_H,))

    @property
    def writers(self) -> tuple[Place, ...]:
        return self.value[1]

    @property
    def readers(self) -> tuple[Place, ...]:
        return self.value[2]


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
        self._dma: Any = torch.cuda.Stream(self.device) if self.is_cuda else None
        self._prefetch: Any = torch.cuda.Stream(self.device) if self.is_cuda else None

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
        return self._dma if place is Place.DMA else self._prefetch

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
        raw = torch.cuda.Event()
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


def _check_reader(mark: Mark, place: Place) -> None:
    if place not in mark.event.readers:
        raise InvariantError(f"{mark.event.name} is read by {_names(mark.event.readers)}, not by {place.value}")


def _names(places: tuple[Place, ...]) -> str:
    return " and ".join(place.value for place in places)

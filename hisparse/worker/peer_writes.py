"""Pages that the writer of a shared host pool made in this very step, and peers on other devices that read them in it.

Everything else a peer reads from the pool was acknowledged in an earlier step, which is order enough. What a command copies
inside the pool (copy-on-write) is not: the writer records an event behind those copies, and peers make their compute stream
wait for it. An interprocess event means its latest recording, so a peer may look only after the writer has recorded: the ranks
meet at a barrier in between.

    writer                                  peer
    start_step(command): copies, record     start_step(command)
                          ---- barrier of the ranks ----
                                            wait()
    forward                                 forward

Two events take turns: the writer records one again only behind another barrier, which its peers reach after their wait.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from hisparse.errors import InvariantError

TURNS = 2


class PeerWrites:
    """Interprocess events, made by the writer, opened by its peers through `handle`. On the CPU nothing needs them.

    Args:
        device: of this rank. handle: of the writer's object, for a peer; None makes the writer's own.
    """

    def __init__(self, device: str | torch.device, handle: bytes | None = None) -> None:
        self._device = torch.device(device)
        self._events: list[Any] = []
        self._next = 0
        self.is_writer = handle is None
        if handle and self._device.type == "cuda":
            size = len(handle) // TURNS
            parts = [handle[i * size : (i + 1) * size] for i in range(TURNS)]
            self._events = [torch.cuda.Event.from_ipc_handle(self._device, part) for part in parts]  # type: ignore[no-untyped-call]

    @functools.cached_property
    def handle(self) -> bytes:
        """The writer's, for its peers; empty on the CPU. Until it was asked for, there are no peers and nothing is recorded."""
        if not self.is_writer:
            raise InvariantError("a peer has no handle to give on")
        if self._device.type == "cuda":
            self._events = [torch.cuda.Event(interprocess=True) for _ in range(TURNS)]  # type: ignore[no-untyped-call]
            for event in self._events:
                event.record(torch.cuda.current_stream(self._device))  # it has a handle once it was recorded
        return b"".join(event.ipc_handle() for event in self._events)

    def record(self) -> None:
        """Behind what the current stream was given so far. Raises InvariantError unless this is the writer's object."""
        if not self.is_writer:
            raise InvariantError("a peer waits for the writer's pages; it does not record them")
        if self._events:
            self._take().record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """What the current stream is given from now on runs behind the writer's recording. The CPU does not wait.

        Call it once for every `record`, behind the barrier. Raises InvariantError on the writer's object.
        """
        if self.is_writer:
            raise InvariantError("the writer's own stream is in order already")
        if self._events:
            torch.cuda.current_stream(self._device).wait_event(self._take())

    def _take(self) -> Any:
        event = self._events[self._next]
        self._next = (self._next + 1) % TURNS
        return event

"""A background thread that copies pages: the CPU's stand-in for a DMA stream.

Copies run in the order they were submitted; completion is looked up per transfer, never by waiting for the oldest.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hisparse.errors import InvariantError, TransferError


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """Outcome of one transfer. `row_mask` is what the copy returned; `error` is None on success."""

    transfer_id: int
    row_mask: int = 0
    error: str | None = None


class CopyQueue:
    """One thread, one event per transfer.

    Args:
        hook: called with the transfer id in the copy thread just before each copy: it may sleep, block, or raise to
            make the transfer fail. For tests.
    """

    def __init__(self, *, name: str = "hisparse-copy", hook: Callable[[int], None] | None = None) -> None:
        self.hook = hook
        self._work: queue.SimpleQueue[tuple[int, Callable[[], int]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._events: dict[int, threading.Event] = {}
        self._done: list[CopyResult] = []
        self._go = threading.Event()
        self._go.set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, transfer_id: int, copy: Callable[[], int]) -> None:
        """Queues `copy`, which returns the row mask to report. Never blocks.

        Raises:
            InvariantError: the id is in flight already, or the queue is closed.
        """
        with self._lock:
            if self._closed:
                raise InvariantError(f"transfer {transfer_id} submitted to a closed copy queue")
            if transfer_id in self._events:
                raise InvariantError(f"transfer {transfer_id} is already in flight")
            self._events[transfer_id] = threading.Event()
            self._work.put((transfer_id, copy))

    def wait(self, transfer_id: int, timeout_s: float) -> None:
        """Returns when the copy has run (or failed). An id that is not in flight has nothing to wait for.

        Raises:
            TransferError: not done in time.
        """
        with self._lock:
            event = self._events.get(transfer_id)
        if event is not None and not event.wait(timeout_s):
            raise TransferError(f"transfer {transfer_id} did not complete within {timeout_s} s")

    def take_done(self) -> list[CopyResult]:
        """Outcomes since the last call, in completion order. Never blocks."""
        with self._lock:
            done, self._done = self._done, []
        return done

    @property
    def num_pending(self) -> int:
        """Transfers submitted and not done."""
        with self._lock:
            return len(self._events)

    def pause(self) -> None:
        """Holds every copy that has not started."""
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def drain(self, timeout_s: float) -> None:
        """Returns when nothing is in flight. Raises TransferError with the ids left when time is up."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            events = dict(self._events)
        late = [i for i, event in events.items() if not event.wait(max(0.0, deadline - time.monotonic()))]
        if late:
            raise TransferError(f"{len(late)} transfers did not complete within {timeout_s} s: {late[:8]}")

    def close(self, timeout_s: float = 30.0) -> None:
        """Runs what is queued, then ends the thread. Idempotent. Raises TransferError when it does not end in time."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._work.put(None)
        self._go.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransferError(
                f"the copy thread did not end within {timeout_s} s; {self.num_pending} transfers are left"
            )

    def _run(self) -> None:
        while True:
            item = self._work.get()
            if item is None:
                return
            self._go.wait()
            transfer_id, copy = item
            try:
                if self.hook is not None:
                    self.hook(transfer_id)
                result = CopyResult(transfer_id=transfer_id, row_mask=copy())
            except Exception as error:
                result = CopyResult(transfer_id=transfer_id, error=f"{type(error).__name__}: {error}")
            with self._lock:
                self._done.append(result)
                event = self._events.pop(transfer_id)
            event.set()

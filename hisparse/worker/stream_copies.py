"""Copies on the DMA stream, in batches: one launch behind an event of the compute stream, one event behind the launch.

The same calls as CopyQueue. None of them waits for the device but `drain` and `close`, which are for the end and for tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hisparse.errors import InvariantError, TransferError
from hisparse.worker.copy_queue import CopyResult
from hisparse.worker.streams import Mark, Place, StepEvent, Streams

POLL_S = 0.0002
Finish = Callable[[], list[int]]
"""Row masks of a batch, in its order; called once its event was reached."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    ids: tuple[int, ...]
    done: Mark
    finish: Finish


class StreamCopies:
    """Batches of copies on the DMA stream. For the step's thread only.

    Args:
        hook: called with each transfer id just before its batch is launched; it may raise to make that transfer fail.
    """

    def __init__(self, streams: Streams, *, hook: Callable[[int], None] | None = None) -> None:
        self.hook = hook
        self._streams = streams
        self._batches: list[_Batch] = []
        self._batch_of: dict[int, _Batch] = {}
        self._done: list[CopyResult] = []
        self._closed = False

    def submit(self, transfer_ids: Sequence[int], launch: Callable[[Sequence[int]], Finish], behind: Mark) -> None:
        """Launches one batch on the DMA stream, behind `behind`. The CPU does not wait.

        A failing hook fails its transfer, a failing launch the whole batch: reported by `take_done`, nothing is raised.

        Args:
            launch: called at once, with the DMA stream current and the indices into `transfer_ids` to copy; it launches and
                returns what reads the row masks later.
        Raises:
            InvariantError: an id is in flight already, or the queue is closed.
        """
        if self._closed:
            raise InvariantError(f"transfer {transfer_ids[0]} submitted to a closed copy queue")
        for transfer_id in transfer_ids:
            if transfer_id in self._batch_of:
                raise InvariantError(f"transfer {transfer_id} is already in flight")
        kept = [i for i, transfer_id in enumerate(transfer_ids) if self._passes(transfer_id)]
        if not kept:
            return
        ids = tuple(transfer_ids[i] for i in kept)
        try:
            with self._streams.on(Place.DMA):
                self._streams.wait(behind, Place.DMA)
                finish = launch(kept)
                done = self._streams.record(StepEvent.SPILLS_DONE, Place.DMA)
        except Exception as error:
            self._fail(ids, error)
            return
        batch = _Batch(ids=ids, done=done, finish=finish)
        self._batches.append(batch)
        self._batch_of.update(dict.fromkeys(ids, batch))

    def wait(self, transfer_id: int, timeout_s: float = 0.0) -> None:
        """The compute stream waits for this transfer's batch; the CPU does not. Nothing if it is not in flight."""
        batch = self._batch_of.get(transfer_id)
        if batch is not None:
            self._streams.wait(batch.done, Place.COMPUTE)

    def take_done(self) -> list[CopyResult]:
        """Outcomes since the last call. Asks every batch in flight, whatever became of earlier ones. Never blocks."""
        self._poll()
        done, self._done = self._done, []
        return done

    @property
    def num_pending(self) -> int:
        """Transfers submitted and not done."""
        self._poll()
        return len(self._batch_of)

    def drain(self, timeout_s: float) -> None:
        """Returns when nothing is in flight. Raises TransferError with the ids left when time is up."""
        deadline = time.monotonic() + timeout_s
        while self.num_pending:
            if time.monotonic() >= deadline:
                late = sorted(self._batch_of)
                raise TransferError(f"{len(late)} transfers did not complete within {timeout_s} s: {late[:8]}")
            time.sleep(POLL_S)

    def close(self, timeout_s: float = 30.0) -> None:
        """Takes no more, and returns when nothing is in flight. Idempotent. Raises TransferError when time is up."""
        self._closed = True
        self.drain(timeout_s)

    def _passes(self, transfer_id: int) -> bool:
        try:
            if self.hook is not None:
                self.hook(transfer_id)
        except Exception as error:
            self._fail((transfer_id,), error)
            return False
        return True

    def _poll(self) -> None:
        left = []
        for batch in self._batches:
            try:
                if not self._streams.reached(batch.done):
                    left.append(batch)
                    continue
                masks = batch.finish()
                self._done += [CopyResult(transfer_id=i, row_mask=mask) for i, mask in zip(batch.ids, masks, strict=True)]
            except Exception as error:  # the device failed: nothing of this batch is known to be on the host
                self._fail(batch.ids, error)
            for transfer_id in batch.ids:
                del self._batch_of[transfer_id]
        self._batches = left

    def _fail(self, transfer_ids: Sequence[int], error: Exception) -> None:
        self._done += [CopyResult(transfer_id=i, error=f"{type(error).__name__}: {error}") for i in transfer_ids]

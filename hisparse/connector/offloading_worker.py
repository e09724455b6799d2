"""Worker half of the indexer offload: one rank's store of pages, and the thread that copies."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hisparse.connector.offloading import OffloadAck, OffloadCommand, OffloadJob, OffloadOutput
from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import KVCacheLayout

if TYPE_CHECKING:
    from hisparse.worker.device_cache import DeviceCache


class OffloadingWorker:
    """Worker half: the rank's store `[capacity_pages, indexer_page_bytes] uint8` and one copy thread (CPU backend).

    In a MultiWorkerConnector it comes after the hisparse child, so that generations are stored before a load writes.

    Args:
        cache: the packed device allocation; bytes of indexer blocks are copied as they are.
    """

    name = "offloading"

    def __init__(self, layout: KVCacheLayout, cache: DeviceCache, *, capacity_pages: int, rank: int) -> None:
        if capacity_pages < 1:
            raise ConfigError(f"offloading needs at least 1 page, got {capacity_pages}")
        self._rank = rank
        self._pages = cache.bytes[:, : layout.indexer_page_bytes]
        self._store = torch.empty((capacity_pages, layout.indexer_page_bytes), dtype=torch.uint8)
        self._stores: tuple[OffloadJob, ...] = ()
        self._jobs: queue.SimpleQueue[Callable[[], OffloadAck] | None] = queue.SimpleQueue()
        self._acks: queue.SimpleQueue[OffloadAck] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="hisparse-offload", daemon=True)
        self._thread.start()

    def start_step(self, metadata: OffloadCommand | None) -> None:
        """Queues loads now; remembers stores for end_step."""
        if self._thread is None:
            raise InvariantError("the offloading worker was shut down")
        command = metadata or OffloadCommand()
        for job in command.loads:
            self._jobs.put(lambda job=job: self._copy(job, load=True))  # type: ignore[misc]
        self._stores = command.stores

    def end_step(self) -> None:
        stores, self._stores = self._stores, ()
        for job in stores:
            self._jobs.put(lambda job=job: self._copy(job, load=False))  # type: ignore[misc]

    def output(self) -> OffloadOutput | None:
        acks: list[OffloadAck] = []
        while not self._acks.empty():
            acks.append(self._acks.get())
        return OffloadOutput(rank=self._rank, acks=tuple(acks)) if acks else None

    def shutdown(self) -> None:
        """Finishes queued copies, then ends the thread and drops the store."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
            self._store = torch.empty((0, 0), dtype=torch.uint8)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._acks.put(job())

    def _copy(self, job: OffloadJob, *, load: bool) -> OffloadAck:
        try:
            for slot, block in zip(job.slots, job.device_blocks, strict=True):
                if not 0 <= slot < self._store.shape[0] or not 0 < block < self._pages.shape[0]:
                    raise IndexError(f"slot {slot} or block {block} is out of range")
                if load:
                    self._pages[block].copy_(self._store[slot])
                else:
                    self._store[slot].copy_(self._pages[block])
        except Exception as error:  # reported, so that the scheduler half frees what the job holds
            return OffloadAck(job_id=job.job_id, reason=f"{type(error).__name__}: {error}")
        return OffloadAck(job_id=job.job_id)

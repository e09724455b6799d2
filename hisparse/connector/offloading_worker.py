"""Worker half of the indexer offload: one rank's store of pages, and the copies between it and the device."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hisparse.connector.offloading import OffloadAck, OffloadCommand, OffloadJob, OffloadOutput
from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.worker import host_memory, pinned
from hisparse.worker.copy_queue import CopyQueue
from hisparse.worker.stream_copies import Finish, StreamCopies
from hisparse.worker.streams import Place, StepEvent, Streams

if TYPE_CHECKING:
    from hisparse.worker.device_cache import DeviceCache

CHUNK_BYTES = 256 << 20
"""Of memory that is made to exist before it is registered, at a time."""


class OffloadingWorker:
    """Worker half: the rank's store `[capacity_pages, indexer_page_bytes] uint8` and what copies: a thread on the CPU; on CUDA,
    where the store is registered memory, the DMA stream.

    In a MultiWorkerConnector it comes after the hisparse child, so that generations are stored before a load writes.

    Args:
        cache: the packed device allocation; bytes of indexer blocks are copied as they are.
        streams: of the rank; default those of the cache's device. deadline_s: longest wait for copies at shutdown.
    Raises:
        ConfigError: no page, or (CUDA) no room for the store, in memory or in locked memory.
    """

    name = "offloading"

    def __init__(self, layout: KVCacheLayout, cache: DeviceCache, *, capacity_pages: int, rank: int,
                 streams: Streams | None = None, deadline_s: float = 30.0) -> None:
        if capacity_pages < 1:
            raise ConfigError(f"offloading needs at least 1 page, got {capacity_pages}")
        self._rank = rank
        self._deadline_s = deadline_s
        self._streams = streams or Streams(cache.device)
        self._pages = cache.bytes[:, : layout.indexer_page_bytes]
        self._pinned: pinned.PinnedMemory | None = None  # before the memory, so that it is forgotten first
        self._memory: mmap.mmap | None = None
        shape = (capacity_pages, layout.indexer_page_bytes)
        self._store = self._registered(shape) if self._streams.is_cuda else torch.empty(shape, dtype=torch.uint8)
        self._stores: tuple[OffloadJob, ...] = ()
        self._refused: list[OffloadAck] = []
        self._copies: CopyQueue | StreamCopies = (
            StreamCopies(self._streams) if self._streams.is_cuda else CopyQueue(name="hisparse-offload")
        )
        self._closed = False

    def start_step(self, metadata: OffloadCommand | None) -> None:
        """Queues loads now, behind everything that read their blocks before; remembers stores for end_step. Never waits."""
        if self._closed:
            raise InvariantError("the offloading worker was shut down")
        command = metadata or OffloadCommand()
        self._queue(command.loads, StepEvent.COMMAND_APPLIED, load=True)
        self._stores = command.stores

    def end_step(self) -> None:
        """Queues stores, behind the forward."""
        stores, self._stores = self._stores, ()
        self._queue(stores, StepEvent.FORWARD_DONE, load=False)

    def output(self) -> OffloadOutput | None:
        """Outcomes since the last call. Never waits."""
        acks, self._refused = self._refused, []
        acks += [OffloadAck(job_id=done.transfer_id, reason=done.error or "") for done in self._copies.take_done()]
        return OffloadOutput(rank=self._rank, acks=tuple(acks)) if acks else None

    def shutdown(self) -> None:
        """Finishes queued copies, then drops the store. Idempotent. Raises TransferError when they do not end in time."""
        if not self._closed:
            self._copies.close(self._deadline_s)
            self._closed = True
            self._store = torch.empty((0, 0), dtype=torch.uint8)
            if self._pinned is not None:
                self._pinned.unpin()
                self._pinned, self._memory = None, None

    def _queue(self, jobs: Sequence[OffloadJob], event: StepEvent, *, load: bool) -> None:
        sound = [job for job in jobs if self._is_sound(job)]
        if not sound:
            return
        if isinstance(self._copies, CopyQueue):
            for job in sound:
                self._copies.submit(job.job_id, lambda job=job: self._copy(job, load=load))  # type: ignore[misc]
            return

        def launch(kept: Sequence[int]) -> Finish:
            for i in kept:
                self._copy(sound[i], load=load)
            return lambda: [0] * len(kept)

        self._copies.submit([job.job_id for job in sound], launch, self._streams.record(event, Place.COMPUTE))

    def _is_sound(self, job: OffloadJob) -> bool:
        """Else it is reported, so that the scheduler half frees what the job holds."""
        for slot, block in zip(job.slots, job.device_blocks, strict=True):
            if not 0 <= slot < self._store.shape[0] or not 0 < block < self._pages.shape[0]:
                self._refused.append(OffloadAck(job_id=job.job_id, reason=f"IndexError: slot {slot} or block {block} is out of "
                                                                          "range"))
                return False
        return True

    def _copy(self, job: OffloadJob, *, load: bool) -> int:
        """On the CPU done when it returns; on CUDA on the current stream. The row mask, which these pages do not have: 0."""
        for slot, block in zip(job.slots, job.device_blocks, strict=True):
            target, source = (self._pages[block], self._store[slot]) if load else (self._store[slot], self._pages[block])
            target.copy_(source, non_blocking=True)
        return 0

    def _registered(self, shape: tuple[int, int]) -> Tensor:
        """The store as the device sees it; a page lies within one registration."""
        from hisparse.ops.cuda import mapped

        size = -(-shape[0] * shape[1] // mmap.PAGESIZE) * mmap.PAGESIZE
        host_memory.check_memory(size, what="the store of indexer pages (cache.offload_indexer)")
        host_memory.check_memlock(size, 1)
        self._memory = mmap.mmap(-1, size)
        host_memory.populate(self._memory, size, chunk_bytes=CHUNK_BYTES)
        with host_memory.pin_turn():
            self._pinned = pinned.pin(
                np.frombuffer(self._memory, dtype=np.uint8).ctypes.data, size, unit_bytes=shape[1], page_bytes=mmap.PAGESIZE,
                device=self._pages.device, registrar=mapped)
        return self._pinned.tensor[: shape[0] * shape[1]].view(shape)

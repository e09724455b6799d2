"""One rank's worker: applies the step's command, schedules copies, reports what it saw.

Knows transfer ids and physical coordinates, never a request. Allocates no block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hisparse import ops
from hisparse.errors import InvariantError
from hisparse.layout import NULL_BLOCK, KVCacheLayout
from hisparse.types import (
    AckKind,
    HiSparseWorkerOutput,
    NewBlocks,
    PageCopy,
    PageRestore,
    SeatReset,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    TransferAck,
)
from hisparse.worker.counters import Counters
from hisparse.worker.device_cache import POISON_BYTE, DeviceCache
from hisparse.worker.host_pool import HostPool
from hisparse.worker.page_copies import PageCopies
from hisparse.worker.peer_writes import PeerWrites
from hisparse.worker.runtime import HiSparseRuntime
from hisparse.worker.staging import PinnedRing
from hisparse.worker.streams import Place, StepEvent, Streams
from hisparse.worker.tables import KVTables


class HiSparseWorker:
    """start_step(command) -> forwards -> end_step() -> output(), once per step, on the step's thread.

    Args:
        is_writer: this rank writes the host pool. With a shared pool only one rank does, and the others send no
            acknowledgement of spills. A peer may read a host page once the writer's completion of it was acknowledged,
            which is before any command lets it be read. Only what a command copies inside the pool needs `host_writes`.
        copier: the backend's PageCopier over `cache` and `host_pool`.
        streams, staging: of the rank, shared with tables and counters.
        deadline_s: longest wait for a fenced copy (CPU), and for the device at shutdown.
        copy_hook: see CopyQueue and StreamCopies.
        poison_new_blocks: fill device blocks with NaN when they are handed out (tests).

    Attributes:
        copies: the queue of spills.
        host_writes: recorded by the writer behind a command's copies inside the pool; peers wait for it, see PeerWrites.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        *,
        cache: DeviceCache,
        host_pool: HostPool,
        copier: Any,
        tables: KVTables,
        runtimes: Sequence[HiSparseRuntime],
        counters: Counters,
        streams: Streams,
        staging: PinnedRing,
        rank: int,
        incarnation: int,
        is_writer: bool,
        deadline_s: float = 30.0,
        copy_hook: Callable[[int], None] | None = None,
        poison_new_blocks: bool = False,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.is_writer = is_writer
        self.poison_new_blocks = poison_new_blocks
        self._layout = layout
        self._cache = cache
        self._host = host_pool
        self._tables = tables
        self._runtimes = runtimes
        self._counters = counters
        self._deadline_s = deadline_s
        self._streams = streams
        self._staging = staging
        self._ops = ops.backend(cache.device)
        self._after_forward: list[SparseKVPageTransfer] = []
        self._in_flight: dict[int, SparseKVPageTransfer] = {}
        self._acks: list[TransferAck] = []
        self._step = -1
        self._closed = False
        self._pages = PageCopies(
            layout, copier=copier, host=host_pool, streams=streams, staging=staging, hook=copy_hook,
            name=f"hisparse-copy-{rank}",
        )
        self.copies = self._pages.queue
        self.host_writes = PeerWrites(cache.device)

    # ---- the step
    def start_step(self, command: SparseKVOffloadCommand | None) -> None:
        """Applies the command in the order of its fields. None = nothing to do (and nothing is mirrored).

        Stream: compute (torch's current one), and the DMA stream for spills. On CUDA nothing waits for the device: a fence
        makes the compute stream wait. On the CPU it makes the caller wait.
        Raises:
            InvariantError: a step out of order, an id outside a table or pool. TransferError (CPU): a fenced copy is late.
        """
        if command is None:
            self._tables.apply_mirrors(())
            return
        if command.step <= self._step:
            raise InvariantError(f"command of step {command.step} after step {self._step}")
        if self._after_forward:
            raise InvariantError(f"step {command.step} starts before end_step of step {self._step}")
        self._step = command.step
        self._cache.store_generations(command.new_device_blocks.ids, command.new_device_blocks.generations)
        self._hand_out(command.new_host_blocks)
        for transfer_id in dict.fromkeys(fence.transfer_id for fence in command.fences):
            self.copies.wait(transfer_id, self._deadline_s)
        if self.poison_new_blocks and command.new_device_blocks.ids:
            (blocks,) = self._staging.upload(np.array(command.new_device_blocks.ids, dtype=np.int64))
            self._cache.poison_blocks(blocks)
        # Nothing before the forward reads a table, so that mirrors may come with the others.
        self._tables.apply_step(command.table_updates, command.hot_rows, command.mirrors)
        self._reset_seats(command.seat_resets)
        self._copy_pages(command.page_copies, command.restores)
        self._spill([spill for spill in command.spills if not spill.after_forward], StepEvent.COMMAND_APPLIED)
        self._after_forward = [spill for spill in command.spills if spill.after_forward]

    def end_step(self) -> None:
        """Queues the spills that go behind the forward, and sends the step's counts on their way."""
        spills, self._after_forward = self._after_forward, []
        self._spill(spills, StepEvent.FORWARD_DONE)
        self._counters.snapshot()

    def follow_writer(self, handle: bytes) -> None:
        """A peer of a shared pool: from now on `wait_for_writer` waits for the rank whose `host_writes.handle` this is."""
        if not self.is_writer:
            self.host_writes = PeerWrites(self._cache.device, handle)

    def wait_for_writer(self) -> None:
        """The compute stream waits for what this step's command copied inside the pool. The writer has nothing to wait for.

        Call it on every rank in a step that copies host pages, when every rank has come out of `start_step`. The CPU does not
        wait.
        """
        if not self.is_writer:
            self.host_writes.wait()

    def output(self) -> HiSparseWorkerOutput:
        """Acknowledgements and counts since the last call. Never blocks."""
        for result in self.copies.take_done():
            spill = self._in_flight.pop(result.transfer_id)
            done = result.error is None and result.row_mask == self._host.full_mask
            if done:
                self._counters.spilled_pages += 1
                self._counters.spilled_bytes += self._layout.host_block_bytes if spill.copy_bytes else 0
            self._ack(spill.id, AckKind.COMPLETED if done else AckKind.FAILED, result.row_mask)
        acks, self._acks = tuple(self._acks), []
        stats, by_seat, by_group = self._counters.take()
        return HiSparseWorkerOutput(
            rank=self.rank, incarnation=self.incarnation, acks=acks, stats=stats, request_stats=by_seat, index_groups=by_group
        )

    def shutdown(self) -> None:
        """Runs the queued copies, ends their queue, closes the host pool (does not unlink it). Idempotent.

        Raises:
            TransferError: copies, or the device, did not end in time; the pool stays open then.
            InvariantError: somebody else has the pool registered: shut P/D down first.
        """
        if not self._closed:
            self._pages.close(self._deadline_s)
            self._streams.drain(self._deadline_s)
            self._host.close()
            self._closed = True

    def check(self) -> None:
        """Raises InvariantError unless hot states agree with tables and the null block was never written. Synchronises."""
        self._tables.check()
        for runtime in self._runtimes:
            runtime.check()
        if self._cache.poison and bool((self._cache.bytes[NULL_BLOCK] != POISON_BYTE).any()):
            raise InvariantError("the null block of the device cache was written")

    # ---- parts of a step
    def _hand_out(self, blocks: NewBlocks) -> None:
        if self.is_writer:
            self._host.hand_out(blocks.ids, blocks.generations, self.incarnation)
            self._pages.hand_out(blocks.ids)

    def _reset_seats(self, resets: Sequence[SeatReset]) -> None:
        """One upload, and one launch for each index group."""
        if not resets:
            return
        groups = sorted({runtime.hot_group for runtime in self._runtimes})
        rows = {
            g: np.array([r[:3] for r in resets if r.hot_group in (-1, g)], dtype=np.int32).reshape(-1, 3) for g in groups
        }
        uploaded = dict(zip(groups, self._staging.upload(*(rows[g] for g in groups)), strict=True))
        for runtime in self._runtimes:
            if runtime.state is not None and rows[runtime.hot_group].size:
                self._ops.reset_seats(runtime.state, uploaded[runtime.hot_group])

    def _copy_pages(self, copies: Sequence[PageCopy], restores: Sequence[PageRestore]) -> None:
        self._pages.copy(copies, host_too=self.is_writer)
        if self.is_writer and any(copy.host_pair is not None for copy in copies):
            self.host_writes.record()
        self._counters.restored_rows += self._pages.restore(restores)
        for transfer_id in [copy.id for copy in copies] + [restore.id for restore in restores]:
            self._ack(transfer_id, AckKind.COMPLETED)

    def _spill(self, spills: Sequence[SparseKVPageTransfer], event: StepEvent) -> None:
        """Queues spills behind what the compute stream has been given so far, which `event` names."""
        if not self.is_writer or not spills:
            return
        for spill in spills:
            if (
                not 0 < spill.host_block < self._host.num_blocks
                or len(spill.device_blocks) != self._layout.num_resident_groups
            ):
                raise InvariantError(
                    f"spill {spill.id}: host block {spill.host_block} of {self._host.num_blocks}, device blocks "
                    f"{spill.device_blocks} for {self._layout.num_resident_groups} resident groups"
                )
        self._pages.spill(spills, self._streams.record(event, Place.COMPUTE))
        for spill in spills:
            self._in_flight[spill.id] = spill
            self._ack(spill.id, AckKind.ENQUEUED)

    def _ack(self, transfer_id: int, kind: AckKind, row_mask: int = 0) -> None:
        self._acks.append(
            TransferAck(
                incarnation=self.incarnation, rank=self.rank, transfer_id=transfer_id, kind=kind, row_mask=row_mask
            )
        )

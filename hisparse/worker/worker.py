"""One rank's worker: applies the step's command, schedules copies, reports what it saw.

Knows transfer ids and physical coordinates, never a request. Allocates no block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hisparse import ops
from hisparse.config import CacheConfig
from hisparse.config import hot_rows_max as configured_hot_rows_max
from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import NULL_BLOCK, KVCacheLayout
from hisparse.types import (
    AckKind,
    HiSparseWorkerOutput,
    PageCopy,
    PageRestore,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    TransferAck,
)
from hisparse.worker.copy_queue import CopyQueue
from hisparse.worker.counters import Counters
from hisparse.worker.device_cache import POISON_BYTE, DeviceCache
from hisparse.worker.handle import HiSparseCacheHandle
from hisparse.worker.host_pool import HostPool
from hisparse.worker.indexer_pages import IndexerPages
from hisparse.worker.runtime import HiSparseRuntime
from hisparse.worker.tables import KVTables


class HiSparseWorker:
    """start_step(command) -> forwards -> end_step() -> output(), once per step, on the step's thread.

    Args:
        is_writer: this rank writes the host pool. With a shared pool only one rank does, and the others send no
            acknowledgement of spills. A peer may read a host page once the writer's completion of it was acknowledged,
            which is before any command lets it be read: peers need no event of their own.
        deadline_s: longest wait for a fenced copy.
        copy_hook: see CopyQueue.
        poison_new_blocks: fill device blocks with NaN when they are handed out (tests).

    Attributes:
        copies: the queue of spills.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        *,
        cache: DeviceCache,
        host_pool: HostPool,
        tables: KVTables,
        runtimes: Sequence[HiSparseRuntime],
        counters: Counters,
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
        self._ops = ops.backend(cache.device)
        self._views = [cache.view(layer) for layer in range(layout.shape.num_layers)]
        self._after_forward: list[SparseKVPageTransfer] = []
        self._in_flight: dict[int, SparseKVPageTransfer] = {}
        self._acks: list[TransferAck] = []
        self._step = -1
        self._closed = False
        self.copies = CopyQueue(name=f"hisparse-copy-{rank}", hook=copy_hook)

    # ---- the step
    def start_step(self, command: SparseKVOffloadCommand | None) -> None:
        """Applies the command in the order of its fields. None = nothing to do (and nothing is mirrored).

        Raises:
            InvariantError: a step out of order, an id outside a table or pool. TransferError: a fenced copy is late.
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
        if self.is_writer:
            self._host.hand_out(command.new_host_blocks.ids, command.new_host_blocks.generations, self.incarnation)
        for fence in command.fences:
            self.copies.wait(fence.transfer_id, self._deadline_s)
        if self.poison_new_blocks:
            self._cache.poison_blocks(list(command.new_device_blocks.ids))
        self._tables.apply(command.table_updates)
        self._tables.apply_hot_rows(command.hot_rows)
        for reset in command.seat_resets:
            for runtime in self._runtimes:
                if reset.hot_group in (-1, runtime.hot_group):
                    runtime.reset(reset.seat, reset.from_slot, reset.from_position)
        for copy in command.page_copies:
            self._copy_page(copy)
        self._restore(command.restores)
        self._tables.apply_mirrors(command.mirrors)
        for spill in command.spills:
            if spill.after_forward:
                self._after_forward.append(spill)
            else:
                self._spill(spill)

    def end_step(self) -> None:
        """Queues the spills that go behind the forward."""
        spills, self._after_forward = self._after_forward, []
        for spill in spills:
            self._spill(spill)

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
        stats, by_seat = self._counters.take()
        return HiSparseWorkerOutput(
            rank=self.rank, incarnation=self.incarnation, acks=acks, stats=stats, request_stats=by_seat
        )

    def shutdown(self) -> None:
        """Runs the queued copies, ends the copy thread, closes the host pool (does not unlink it). Idempotent."""
        if not self._closed:
            self._closed = True
            self.copies.close(self._deadline_s)
            self._host.close()

    def check(self) -> None:
        """Raises InvariantError unless hot states agree with tables and the null block was never written."""
        for runtime in self._runtimes:
            runtime.check()
        if self._cache.poison and bool((self._cache.bytes[NULL_BLOCK] != POISON_BYTE).any()):
            raise InvariantError("the null block of the device cache was written")

    # ---- copies
    def _spill(self, spill: SparseKVPageTransfer) -> None:
        if not self.is_writer:
            return
        if (
            not 0 < spill.host_block < self._host.num_blocks
            or len(spill.device_blocks) != self._layout.num_resident_groups
        ):
            raise InvariantError(
                f"spill {spill.id}: host block {spill.host_block} of {self._host.num_blocks}, device blocks "
                f"{spill.device_blocks} for {self._layout.num_resident_groups} resident groups"
            )
        self._in_flight[spill.id] = spill
        self.copies.submit(spill.id, lambda: self._run_spill(spill))
        self._ack(spill.id, AckKind.ENQUEUED)

    def _run_spill(self, spill: SparseKVPageTransfer) -> int:
        """In the copy thread: copies the page if asked to, and returns the page's row mask."""
        masks, page = self._host.row_masks, spill.host_block
        if spill.copy_bytes:
            first = page * self._layout.block_size
            for layer, view in enumerate(self._views):
                block = spill.device_blocks[self._layout.layer_group[layer]]
                self._host.rows(layer)[first : first + self._layout.block_size].copy_(view.page(block))
            masks[page] = self._host.full_mask
        return int(masks[page])

    def _copy_page(self, copy: PageCopy) -> None:
        for source, target in copy.device_pairs:
            self._cache.bytes[target].copy_(self._cache.bytes[source])
        if copy.host_pair is not None and self.is_writer:
            source, target = copy.host_pair
            size, rows = self._layout.block_size, copy.num_rows
            for layer in range(self._layout.shape.num_layers):
                host = self._host.rows(layer)
                host[target * size : target * size + rows].copy_(host[source * size : source * size + rows])
            kept = int(self._host.row_masks[source]) & ((1 << rows) - 1)
            self._host.row_masks[target] |= np.uint64(kept)
        self._ack(copy.id, AckKind.COMPLETED)

    def _restore(self, restores: Sequence[PageRestore]) -> None:
        """Host to device before the first kernel, pages of equal length together."""
        layout, size = self._layout, self._layout.block_size
        for num_rows in sorted({restore.num_rows for restore in restores}):
            alike = [restore for restore in restores if restore.num_rows == num_rows]
            host_first = torch.tensor([restore.host_block for restore in alike], dtype=torch.int64) * size
            blocks = torch.tensor([restore.device_blocks for restore in alike], dtype=torch.int64)
            for layer, view in enumerate(self._views):
                first = view.row_ids(blocks[:, layout.layer_group[layer]], torch.zeros((), dtype=torch.int64))
                self._ops.copy_pages(view.rows, first, self._host.rows(layer), host_first, num_rows)
            self._counters.restored_rows += len(alike) * num_rows * layout.shape.num_layers
        for restore in restores:
            self._ack(restore.id, AckKind.COMPLETED)

    def _ack(self, transfer_id: int, kind: AckKind, row_mask: int = 0) -> None:
        self._acks.append(
            TransferAck(
                incarnation=self.incarnation, rank=self.rank, transfer_id=transfer_id, kind=kind, row_mask=row_mask
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What build_worker made. `worker` and `host_pool` are None when HiSparse is off. One handle per layer.

    `is_writer`: this rank writes the host pool (rank 0 of a shared pool, every rank of private ones).
    """

    rank: int
    is_writer: bool
    cache: DeviceCache
    host_pool: HostPool | None
    tables: KVTables
    handles: list[HiSparseCacheHandle]
    indexer: IndexerPages
    worker: HiSparseWorker | None


def build_worker(
    layout: KVCacheLayout,
    config: CacheConfig,
    *,
    num_device_blocks: int,
    num_host_blocks: int,
    max_seats: int,
    max_model_len: int,
    rank: int,
    num_ranks: int,
    incarnation: int,
    host_pool: HostPool | None,
    device: str = "cpu",
    poison: bool = True,
    copy_hook: Callable[[int], None] | None = None,
    poison_new_blocks: bool = False,
) -> WorkerParts:
    """Allocates the device cache and wires tables, runtimes, handles and worker of one rank.

    With `config.enabled=False` and `host_pool=None` every context must be resident: apply `StepCommand.table_updates`
    with `tables.apply`. The worker owns `host_pool` from here on and closes it at shutdown.

    Raises:
        ConfigError: HiSparse is on without a host pool, the pool has another size, or rank is outside num_ranks.
    """
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"rank must be in 0..{num_ranks - 1}, got {rank}")
    if config.enabled != (host_pool is not None):
        raise ConfigError(
            f"cache.enabled is {config.enabled} but the host pool is {'given' if host_pool else 'missing'}"
        )
    if host_pool is not None and host_pool.num_blocks != num_host_blocks:
        raise ConfigError(f"the host pool has {host_pool.num_blocks} pages, the coordinator counts {num_host_blocks}")
    hot_max = configured_hot_rows_max(config, layout) if host_pool is not None else (0,) * len(layout.hots)
    cache = DeviceCache(layout, num_device_blocks, device, poison=poison)
    tables = KVTables(layout, max_seats=max_seats, max_model_len=max_model_len, hot_rows_max=hot_max, device=device)
    counters = Counters(layout, max_seats, device)
    runtimes = [
        HiSparseRuntime(layout, index, cache=cache, host_pool=host_pool, tables=tables, counters=counters)
        for index in range(len(layout.shape.index_groups))
    ]
    is_writer = host_pool is not None and (rank == 0 or not host_pool.is_shared)
    owner = {layer: runtime for runtime, group in zip(runtimes, layout.shape.index_groups) for layer in group.layers}
    handles = [
        HiSparseCacheHandle(
            layout,
            layer,
            cache=cache,
            host_pool=host_pool,
            tables=tables,
            runtime=owner[layer],
            counters=counters,
            is_writer=is_writer,
        )
        for layer in range(layout.shape.num_layers)
    ]
    worker = None
    if host_pool is not None:
        worker = HiSparseWorker(
            layout,
            cache=cache,
            host_pool=host_pool,
            tables=tables,
            runtimes=runtimes,
            counters=counters,
            rank=rank,
            incarnation=incarnation,
            is_writer=is_writer,
            deadline_s=config.transfer_deadline_s,
            copy_hook=copy_hook,
            poison_new_blocks=poison_new_blocks,
        )
    return WorkerParts(
        rank=rank,
        is_writer=is_writer,
        cache=cache,
        host_pool=host_pool,
        tables=tables,
        handles=handles,
        indexer=IndexerPages(cache, tables),
        worker=worker,
    )

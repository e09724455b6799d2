"""Allocates and wires the parts of one rank."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from hisparse import ops
from hisparse.config import GIB, CacheConfig
from hisparse.config import hot_rows_max as configured_hot_rows_max
from hisparse.errors import ConfigError
from hisparse.layout import KVCacheLayout
from hisparse.trace.recorder import SelectionRecorder
from hisparse.worker.counters import Counters
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.handle import HiSparseCacheHandle
from hisparse.worker.history import History
from hisparse.worker.host_mirrors import HostMirrors
from hisparse.worker.host_pool import HostPool
from hisparse.worker.indexer_pages import IndexerPages
from hisparse.worker.runtime import HiSparseRuntime
from hisparse.worker.staging import PinnedRing
from hisparse.worker.streams import Streams
from hisparse.worker.tables import KVTables
from hisparse.worker.worker import HiSparseWorker

_log = logging.getLogger(__name__)


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
    streams: Streams
    staging: PinnedRing
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
    recorder: SelectionRecorder | None = None,
    on_pinned: Callable[[int, int], None] | None = None,
) -> WorkerParts:
    """Allocates the device cache and wires tables, runtimes, handles and worker of one rank.

    With `config.enabled=False` and `host_pool=None` every context must be resident: apply `StepCommand.table_updates`
    with `tables.apply`. The worker owns `host_pool` from here on and closes it at shutdown. `on_pinned(bytes, bytes in all)` is
    called while it is being pinned.

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
    if host_pool is not None:
        host_pool.pin(device, progress=functools.partial(_log_progress, on_pinned))
    streams = Streams(device)
    staging = PinnedRing(streams)
    tables = KVTables(
        layout, max_seats=max_seats, max_model_len=max_model_len, hot_rows_max=hot_max, device=device,
        staging=staging if streams.is_cuda else None,
    )
    counters = Counters(layout, max_seats, device, streams)
    runtimes = [
        HiSparseRuntime(
            layout, index, cache=cache, host_pool=host_pool, tables=tables, counters=counters, streams=streams,
            hashed=streams.is_cuda and config.position_table == "hashed", recorder=recorder,
        )
        for index in range(len(layout.shape.index_groups))
    ]
    copier, history = None, None
    if host_pool is not None:
        host_rows = [host_pool.device_rows(layer) for layer in range(layout.shape.num_layers)]
        copier = ops.backend(cache.device).PageCopier(layout, cache.rows, host_rows)
        history = History(layout, cache=cache, host_pool=host_pool, tables=tables, copier=copier)
    is_writer = host_pool is not None and (rank == 0 or not host_pool.is_shared)
    mirrors = None
    if host_pool is not None and is_writer:
        mirrors = HostMirrors(layout, cache=cache, host_pool=host_pool, tables=tables, counters=counters)
    owner = {layer: runtime for runtime, group in zip(runtimes, layout.shape.index_groups) for layer in group.layers}
    handles = [
        HiSparseCacheHandle(
            layout,
            layer,
            cache=cache,
            mirrors=mirrors,
            tables=tables,
            runtime=owner[layer],
            counters=counters,
            history=history,
        )
        for layer in range(layout.shape.num_layers)
    ]
    worker = None
    if host_pool is not None:
        worker = HiSparseWorker(
            layout,
            cache=cache,
            host_pool=host_pool,
            copier=copier,
            tables=tables,
            runtimes=runtimes,
            counters=counters,
            streams=streams,
            staging=staging,
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
        streams=streams,
        staging=staging,
        worker=worker,
    )


def _log_progress(listener: Callable[[int, int], None] | None, done_bytes: int, total_bytes: int) -> None:
    if listener is not None:
        listener(done_bytes, total_bytes)
    _log.info("pinned %.1f/%.1f GiB of the host pool", done_bytes / GIB, total_bytes / GIB)

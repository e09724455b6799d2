"""One rank's worker: applies the step's command, schedules copies, reports what it saw. Skeleton."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.config import CacheConfig
from hisparse.layout import KVCacheLayout
from hisparse.types import HiSparseWorkerOutput, SparseKVOffloadCommand
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.handle import HiSparseCacheHandle
from hisparse.worker.host_pool import HostPool
from hisparse.worker.indexer_pages import IndexerPages
from hisparse.worker.tables import KVTables


class HiSparseWorker:
    """start_step(command) -> forwards -> end_step() -> output(), once per step, on the step's thread."""

    def start_step(self, command: SparseKVOffloadCommand | None) -> None:
        """Applies the command in the order of its fields. None = nothing to do (and nothing is mirrored)."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Queues the spills that go behind the forward."""
        raise NotImplementedError

    def output(self) -> HiSparseWorkerOutput:
        """Acknowledgements and counts since the last call. Never blocks."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Drains copies, ends the copy thread, closes the host pool (does not unlink). Idempotent."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What build_worker made. `worker` and `host_pool` are None when HiSparse is off."""

    cache: DeviceCache
    host_pool: HostPool | None
    tables: KVTables
    handles: list[HiSparseCacheHandle]
    indexer: IndexerPages
    worker: HiSparseWorker | None


def build_worker(layout: KVCacheLayout, config: CacheConfig, *, num_device_blocks: int, num_host_blocks: int, max_seats: int,
                 max_model_len: int, rank: int, num_ranks: int, incarnation: int, host_pool: HostPool | None) -> WorkerParts:
    """Allocates the device cache and wires tables, runtimes, handles and worker of one rank.

    With `host_pool=None` and `config.enabled=False` every context must be resident: apply `StepCommand.table_updates`
    with `tables.apply`.
    """
    raise NotImplementedError

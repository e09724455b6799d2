"""One rank's data plane: device cache, host pool, tables, runtimes, cache handles, copy queue, worker. Needs no Ray."""

from hisparse.worker.batch import RowBatch
from hisparse.worker.copy_queue import CopyQueue
from hisparse.worker.device_cache import DeviceCache, PagedCacheView
from hisparse.worker.handle import HiSparseCacheHandle
from hisparse.worker.host_pool import HostPool
from hisparse.worker.indexer_pages import IndexerPages
from hisparse.worker.runtime import HiSparseRuntime
from hisparse.worker.tables import KVTables
from hisparse.worker.worker import HiSparseWorker, WorkerParts, build_worker

__all__ = [
    "CopyQueue",
    "DeviceCache",
    "HiSparseCacheHandle",
    "HiSparseRuntime",
    "HiSparseWorker",
    "HostPool",
    "IndexerPages",
    "KVTables",
    "PagedCacheView",
    "RowBatch",
    "WorkerParts",
    "build_worker",
]

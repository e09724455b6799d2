"""One rank's data plane: device cache, host pool, tables, runtimes, cache handles, copy queue, worker. Needs no Ray."""

from hisparse.worker.assembly import WorkerParts, build_worker
from hisparse.worker.batch import RowBatch
from hisparse.worker.copy_queue import CopyQueue
from hisparse.worker.device_cache import DeviceCache, PagedCacheView
from hisparse.worker.handle import HiSparseCacheHandle
from hisparse.worker.host_pool import HostPool
from hisparse.worker.indexer_pages import IndexerPages
from hisparse.worker.peer_writes import PeerWrites
from hisparse.worker.runtime import HiSparseRuntime
from hisparse.worker.selected_rows import SelectedRows
from hisparse.worker.staging import PinnedRing
from hisparse.worker.stream_copies import StreamCopies
from hisparse.worker.streams import Mark, Place, StepEvent, Streams
from hisparse.worker.tables import KVTables
from hisparse.worker.worker import HiSparseWorker

__all__ = [
    "CopyQueue",
    "DeviceCache",
    "HiSparseCacheHandle",
    "HiSparseRuntime",
    "HiSparseWorker",
    "HostPool",
    "IndexerPages",
    "KVTables",
    "Mark",
    "PagedCacheView",
    "PeerWrites",
    "PinnedRing",
    "Place",
    "RowBatch",
    "SelectedRows",
    "StepEvent",
    "StreamCopies",
    "Streams",
    "WorkerParts",
    "build_worker",
]

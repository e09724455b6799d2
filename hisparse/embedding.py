"""What an engine of your own needs to embed hisparse, in one place: no Ray, and nothing of the engine in this repository.

The scheduler half (`CacheSetup.manager`) imports no torch; names of the worker half load it when they are first asked for.
docs/embedding.md explains every call, docs/examples/embed.py is a whole loop.
"""

from __future__ import annotations

import importlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hisparse.cache.kv_cache_manager import Admission, CacheStats, Fit, KVCacheManager, PrefixHit
from hisparse.cache.offload import IndexerStore
from hisparse.cache.prefix import ExtraKeys
from hisparse.config import CacheConfig, host_blocks
from hisparse.errors import ConfigError, HiSparseError, InvariantError, RequestError, TransferError
from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.types import HiSparseWorkerOutput, ResolveStats, SparseKVOffloadCommand

if TYPE_CHECKING:
    from hisparse.ops.status import check_status, describe, new_status
    from hisparse.worker import HiSparseCacheHandle, HiSparseWorker, HostPool, RowBatch, SelectedRows, WorkerParts

__all__ = [
    "Admission",
    "CacheConfig",
    "CacheSetup",
    "CacheStats",
    "ConfigError",
    "ExtraKeys",
    "Fit",
    "HiSparseCacheHandle",
    "HiSparseError",
    "HiSparseWorker",
    "HiSparseWorkerOutput",
    "HostPool",
    "IndexGroup",
    "IndexerStore",
    "InvariantError",
    "KVCacheLayout",
    "KVCacheManager",
    "ModelShape",
    "PrefixHit",
    "RequestError",
    "ResolveStats",
    "RowBatch",
    "SelectedRows",
    "SparseKVOffloadCommand",
    "TransferError",
    "WorkerParts",
    "check_status",
    "describe",
    "new_status",
]

_NEED_TORCH = {
    **dict.fromkeys(("HiSparseCacheHandle", "HiSparseWorker", "HostPool", "RowBatch", "SelectedRows", "WorkerParts"),
                    "hisparse.worker"),
    **dict.fromkeys(("check_status", "describe", "new_status"), "hisparse.ops.status"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSetup:
    """The sizes on which a scheduler and its workers must agree. Make it once, pickle it, send it to every rank.

    Attributes:
        layout: how rows are packed into blocks. config: both pools, hot regions, policy; `config.block_size` is the layout's.
        max_model_len: most tokens of one request, prompt and output. max_seats: requests that hold blocks at once.
        max_query_tokens: most tokens of one request in one step. lookahead_tokens: of them, drafts of a decode step.
        num_ranks: tensor-parallel ranks; each holds all rows. They share one host pool unless `config.host_pool` is "private".
        incarnation: distinct per start of the workers; block generations begin there.
    Raises:
        ConfigError: block sizes differ, or a pool cannot hold one request of `max_model_len`.
    """

    layout: KVCacheLayout
    config: CacheConfig
    max_model_len: int
    max_seats: int
    max_query_tokens: int
    lookahead_tokens: int = 0
    num_ranks: int = 1
    incarnation: int = field(default_factory=lambda: secrets.randbits(63))

    def __post_init__(self) -> None:
        if self.config.block_size != self.layout.block_size:
            raise ConfigError(f"the layout has pages of {self.layout.block_size} tokens, config.block_size is "
                              f"{self.config.block_size}; build the layout with block_size=config.block_size")
        host_blocks(self.config, self.layout, self.max_model_len)

    @property
    def num_host_blocks(self) -> int:
        """Pages of the host pool incl. its null block; 0 when HiSparse is off."""
        return host_blocks(self.config, self.layout, self.max_model_len)

    def manager(self, *, indexer_offload: IndexerStore | None = None) -> KVCacheManager:
        """The scheduler half. Imports no torch.

        Args:
            indexer_offload: where indexer pages outlive the device pool; None = nowhere.
        Raises:
            ConfigError: a pool is too small, with the numbers.
        """
        return KVCacheManager(
            self.layout, self.config, num_host_blocks=self.num_host_blocks, max_model_len=self.max_model_len,
            max_seats=self.max_seats, max_query_tokens=self.max_query_tokens, lookahead_tokens=self.lookahead_tokens,
            num_ranks=self.num_ranks, num_host_writers=self.num_ranks if self.config.host_pool == "private" else 1,
            indexer_offload=indexer_offload, incarnation=self.incarnation)

    def worker(self, *, rank: int = 0, device: str = "cpu", host_pool: HostPool | None = None) -> WorkerParts:
        """The worker half of one rank, on `device` ("cpu", "cuda", "cuda:1"): allocates the device pool, pins the host pool.

        Args:
            host_pool: default a private one. Ranks that share one: `HostPool.shared(layout, num_host_blocks, path)` in one
                process, `HostPool.attach(layout, num_host_blocks, path)` in every rank's. Closed by `worker.shutdown`.
        Raises:
            ConfigError: no memory for a pool, no such device, or several ranks without the pool that they share.
        """
        from hisparse.worker import HostPool, build_worker

        if host_pool is None and self.config.enabled:
            if self.num_ranks > 1 and self.config.host_pool != "private":
                raise ConfigError(f"{self.num_ranks} ranks share a host pool: make it with HostPool.shared, give each rank "
                                  "host_pool=HostPool.attach(...); or set config.host_pool to 'private' for one pool a rank")
            host_pool = HostPool.private(self.layout, self.num_host_blocks, ranks_on_node=self.num_ranks)
        return build_worker(
            self.layout, self.config, num_device_blocks=self.config.device_blocks, num_host_blocks=self.num_host_blocks,
            max_seats=self.max_seats, max_model_len=self.max_model_len, rank=rank, num_ranks=self.num_ranks,
            incarnation=self.incarnation, host_pool=host_pool, device=device)


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The keeper of one replica's shared host pool: creates the segment, outlives its workers, unlinks it at the end.

Heavy imports happen inside the actor, so that whoever starts it stays small.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hisparse.config import HiSparseConfig, host_blocks, kv_layout
from hisparse.errors import InvariantError

if TYPE_CHECKING:
    from hisparse.worker.host_pool import HostPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where the ranks find the pool. `nbytes`: of the file, page headers included."""

    path: str
    num_blocks: int
    nbytes: int


class KeeperActor:
    """Owns the segment of one replica. It writes nothing into it: the lowest rank is the writer."""

    def __init__(self, engine_id: str, directory: str = "/dev/shm") -> None:
        self._engine_id, self._directory = engine_id, directory
        self._pool: HostPool | None = None
        self._segment: Segment | None = None

    def create(self, config: HiSparseConfig) -> Segment:
        """Sweeps what dead owners left, then creates the pool.

        Raises:
            ConfigError: it does not fit; says needed and free bytes and the fix. No file is left.
        """
        from hisparse.worker import host_memory
        from hisparse.worker.host_pool import HostPool

        if self._segment is not None:
            raise InvariantError(f"the pool {self._segment.path} exists already")
        removed = host_memory.sweep(self._directory)
        if removed:
            logger.warning("removed %d host pools whose owners are dead: %s", len(removed), removed)
        layout = kv_layout(config)
        num_blocks = host_blocks(config.cache, layout, config.model.max_model_len)
        path = host_memory.pool_path(self._engine_id, self._directory)
        self._pool = HostPool.shared(layout, num_blocks, path)
        self._segment = Segment(path=str(path), num_blocks=num_blocks, nbytes=path.stat().st_size)
        return self._segment

    def segment(self) -> Segment:
        """The pool this keeper owns. Raises InvariantError before `create` and after `stop`."""
        if self._segment is None:
            raise InvariantError(f"the keeper of {self._engine_id} has no pool")
        return self._segment

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Unlinks and unmaps; who still maps the pool keeps it until it ends. Idempotent."""
        pool, self._pool, self._segment = self._pool, None, None
        if pool is not None:
            pool.unlink()
            pool.close()


def remove(segment: Segment) -> None:
    """Removes the file of a keeper that could not do so itself. Idempotent."""
    Path(segment.path).unlink(missing_ok=True)

"""The keeper of one replica's shared host pool: creates the segment, outlives its workers, unlinks it at the end.

Whoever maps a segment holds a shared lock on its file (`hold`). The kernel drops the lock with the process, so a file
that can be locked exclusively has no living user and a later start removes it, whatever killed the former owner.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hisparse.config import HiSparseConfig, host_blocks, model_shape
from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.worker.host_pool import HostPool

logger = logging.getLogger(__name__)

SEGMENT_DIR = Path("/dev/shm")
PREFIX, SUFFIX = "hisparse-", ".pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where the ranks find the pool."""

    path: str
    num_blocks: int
    nbytes: int


def segment_path(engine_id: str, directory: Path = SEGMENT_DIR) -> Path:
    """File of one engine's pool."""
    return directory / f"{PREFIX}{engine_id}{SUFFIX}"


def hold(path: str | Path) -> int:
    """Marks the segment as used by this process; returns the descriptor to close when done.

    Raises:
        ConfigError: the file is gone, or was removed while it was being opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise ConfigError(f"the host pool {path} cannot be opened: {error.strerror}; restart the replica") from error
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        raise ConfigError(f"the host pool {path} was removed while it was being opened; restart the replica")
    return descriptor


def sweep(directory: Path = SEGMENT_DIR) -> list[str]:
    """Removes segments that no living process uses; returns their paths. Never touches one in use."""
    with _directory_lock(directory):
        return _sweep(directory)


def _sweep(directory: Path) -> list[str]:
    removed = []
    for path in sorted(directory.glob(f"{PREFIX}*{SUFFIX}")):
        with suppress(OSError):  # another user's file, or gone by now
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(str(path))
            finally:
                os.close(descriptor)
    if removed:
        logger.warning("removed %d host pools whose owners are dead: %s", len(removed), ", ".join(removed))
    return removed


@contextmanager
def _directory_lock(directory: Path) -> Iterator[None]:
    """Between creating a file and locking it, nobody may sweep. One replica at a time creates its pool, too."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class KeeperActor:
    """Owns the segment of one replica."""

    def __init__(self, engine_id: str, directory: str = str(SEGMENT_DIR)) -> None:
        self._path = segment_path(engine_id, Path(directory))
        self._directory = Path(directory)
        self._pool: HostPool | None = None
        self._descriptor = -1
        self._segment: Segment | None = None

    def create(self, config: HiSparseConfig) -> Segment:
        """Sweeps what dead owners left, then creates the pool.

        Raises:
            ConfigError: it does not fit; says needed and free bytes and the fix. No file is left.
        """
        if self._segment is not None:
            raise InvariantError(f"the pool {self._path} exists already")
        layout = KVCacheLayout.build(
            model_shape(config.model), block_size=config.cache.block_size, dtype=config.model.dtype
        )
        num_blocks = host_blocks(config.cache, layout, config.model.max_model_len)
        with _directory_lock(self._directory):
            _sweep(self._directory)
            self._pool = HostPool.shared(layout, num_blocks, str(self._path))
            self._descriptor = hold(self._path)
        nbytes = os.fstat(self._descriptor).st_size
        self._segment = Segment(path=str(self._path), num_blocks=num_blocks, nbytes=nbytes)
        return self._segment

    def segment(self) -> Segment:
        """The pool this keeper owns. Raises InvariantError before `create`."""
        if self._segment is None:
            raise InvariantError(f"the pool {self._path} was not created yet")
        return self._segment

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Unmaps and unlinks. Idempotent."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        with suppress(FileNotFoundError):
            self._path.unlink()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._segment = None

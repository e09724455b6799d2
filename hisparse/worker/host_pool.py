"""The host pool: every layer's rows of every host page, and a header per page.

Owns memory and its life cycle; which page holds what is the coordinator's business. One writer, any number of readers.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.worker import host_memory

PAGE_BYTES = mmap.PAGESIZE
POPULATE_CHUNK_BYTES = 256 << 20
KEY_BYTES = 32
_PAGE_HEADER = np.dtype(
    [("key", np.uint8, (KEY_BYTES,)), ("row_mask", "<u8"), ("generation", "<u8"), ("incarnation", "<u8")]
)
_HEAD = struct.Struct("<8s32sQQQ")
"""Magic, layout fingerprint, number of blocks, offset of the body, ready flag."""
_MAGIC = b"hisparp1"
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class HostPool:
    """Body `[layer][host block][block_size][row_bytes]` and, per host page, key, row mask, generation and incarnation.

    Make one with `private`, `shared` or `attach`.

    Attributes:
        num_blocks: host pages incl. the null block 0.
        is_shared: other processes may map it; only the writer rank writes.
        path: file behind a shared pool, else None.
        keys: numpy uint8 [num_blocks, 32]; row_masks, generations, incarnations: numpy uint64 [num_blocks] (views).
        address, nbytes: of the body, page-aligned.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        num_blocks: int,
        memory: mmap.mmap,
        *,
        path: Path | None = None,
        fd: int | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.path = path
        self.is_shared = path is not None
        self.nbytes = num_blocks * layout.host_block_bytes
        self._memory: mmap.mmap | None = memory
        self._fd = fd
        start = _body_offset(num_blocks)
        header = np.frombuffer(memory, dtype=_PAGE_HEADER, count=num_blocks, offset=PAGE_BYTES)
        self.keys: np.ndarray[Any, Any] = header["key"]
        self.row_masks: np.ndarray[Any, Any] = header["row_mask"]
        self.generations: np.ndarray[Any, Any] = header["generation"]
        self.incarnations: np.ndarray[Any, Any] = header["incarnation"]
        body = torch.frombuffer(memory, dtype=torch.uint8, count=self.nbytes, offset=start)
        self.address = body.data_ptr()
        self._layers: tuple[Tensor, ...] = tuple(
            body.view(getattr(torch, layout.row.dtype)).view(layout.shape.num_layers, -1, layout.row.row_elems)
        )

    # ---- making one
    @classmethod
    def private(
        cls,
        layout: KVCacheLayout,
        num_blocks: int,
        *,
        ranks_on_node: int = 1,
        available_bytes: int | None = None,
        populate: bool = True,
        poison: bool = False,
        progress: Progress | None = None,
    ) -> HostPool:
        """Anonymous memory of this process; lost with it. A forked child sees the same bytes, never a copy.

        Args:
            ranks_on_node: pools like this one that the node must hold; all of them must fit.
            populate: touch every page now, in chunks. poison: fill the body with NaN instead (tests).
        Raises:
            ConfigError: not enough memory, with the numbers; nothing was allocated.
        """
        total = _total_bytes(layout, num_blocks)
        what = f"a private host pool on each of {ranks_on_node} ranks" if ranks_on_node > 1 else "the private host pool"
        host_memory.check_memory(total * ranks_on_node, what=what, available_bytes=available_bytes)
        memory = mmap.mmap(-1, total)
        if populate or poison:
            for first in range(0, total, POPULATE_CHUNK_BYTES):
                size = min(POPULATE_CHUNK_BYTES, total - first)
                np.frombuffer(memory, dtype=np.uint8, count=size, offset=first)[::PAGE_BYTES] = 0
                if progress is not None:
                    progress(first + size, total)
        _write_head(memory, layout, num_blocks)
        pool = cls(layout, num_blocks, memory)
        if poison:
            pool.poison()
        return pool

    @classmethod
    def shared(
        cls,
        layout: KVCacheLayout,
        num_blocks: int,
        path: str | Path,
        *,
        poison: bool = False,
        available_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> HostPool:
        """Creates the file behind a pool that other processes attach to. Room is checked before the file exists.

        `host_memory.pool_path(label)` makes a name that `host_memory.sweep` recognises. Every byte is allocated before
        this returns, so no later write can fail for lack of room.
        Raises:
            ConfigError: the path exists, or there is no room (needed, free, path, fix); no file is left behind.
        """
        path, total = Path(path), _total_bytes(layout, num_blocks)
        host_memory.check_file_room(path, total, available_bytes)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot create the shared host pool {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.fstat(fd).st_nlink == 0:
                raise ConfigError(f"the shared host pool {path} was removed while it was being created; start again")
            for first in range(0, total, POPULATE_CHUNK_BYTES):
                os.posix_fallocate(fd, first, min(POPULATE_CHUNK_BYTES, total - first))
                if progress is not None:
                    progress(min(first + POPULATE_CHUNK_BYTES, total), total)
            memory = mmap.mmap(fd, total, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise ConfigError(
                    f"the shared host pool {path} needs {total} bytes ({total / host_memory.GIB:.2f} GiB) and "
                    f"allocating them failed: {error.strerror}; lower cache.host_pool_gib"
                ) from error
            raise
        pool = cls(layout, num_blocks, memory, path=path, fd=fd)
        if poison:
            pool.poison()
        _write_head(memory, layout, num_blocks)
        return pool

    @classmethod
    def attach(cls, layout: KVCacheLayout, num_blocks: int, path: str | Path, *, timeout_s: float = 5.0) -> HostPool:
        """Maps a pool that its owner has created.

        Raises:
            ConfigError: the file does not appear, does not become ready in time, or has another layout or size.
        """
        path, total, deadline = Path(path), _total_bytes(layout, num_blocks), time.monotonic() + timeout_s
        why = "it does not exist"
        while True:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    why = _head_problem(os.pread(fd, _HEAD.size, 0), layout, num_blocks)
                    if not why:
                        if os.fstat(fd).st_size != total:
                            raise ConfigError(
                                f"the shared host pool {path} has {os.fstat(fd).st_size} bytes, expected {total}"
                            )
                        fcntl.flock(fd, fcntl.LOCK_SH)
                        if os.fstat(fd).st_nlink == 0:
                            raise ConfigError(f"the shared host pool {path} was removed while it was being opened")
                        memory = mmap.mmap(fd, total, mmap.MAP_SHARED | mmap.MAP_POPULATE)
                        return cls(layout, num_blocks, memory, path=path, fd=fd)
                except BaseException:
                    os.close(fd)
                    raise
                os.close(fd)
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"cannot attach to the shared host pool {path} within {timeout_s} s: {why}; "
                    "is its owner (the keeper) alive, and built from the same configuration?"
                )
            time.sleep(0.02)

    # ---- contents
    def rows(self, layer: int) -> Tensor:
        """[num_blocks * block_size, row_elems] of one layer; row `host_block * block_size + i` is row i of a page."""
        if self._memory is None:
            raise InvariantError("the host pool is closed")
        return self._layers[layer]

    @property
    def full_mask(self) -> int:
        """Row mask of a page whose every row is written."""
        return (1 << self.layout.block_size) - 1

    def set_rows(self, blocks: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> None:
        """Sets the mask bits of single rows: row `offsets[i]` of page `blocks[i]`."""
        np.bitwise_or.at(self.row_masks, blocks, np.uint64(1) << offsets.astype(np.uint64))

    def hand_out(self, ids: tuple[int, ...], generations: tuple[int, ...], incarnation: int) -> None:
        """Starts a new life of pages: generation and incarnation stored, row mask and key cleared. Writer only."""
        if ids:
            at = np.asarray(ids, dtype=np.int64)
            self.generations[at] = np.asarray(generations, dtype=np.uint64)
            self.incarnations[at] = np.uint64(incarnation)
            self.row_masks[at] = 0
            self.keys[at] = 0

    def poison(self) -> None:
        """Fills the body with NaN, so that a read of an unwritten row shows up."""
        for layer in self._layers:
            layer.view(torch.uint8).fill_(0xFF)

    # ---- life
    def close(self) -> None:
        """Drops this process's mapping (when the last view of it is gone) and lock. Idempotent."""
        if self._memory is None:
            return
        # torch does not export the buffer it borrows, so an explicit unmap would pull it from under live views;
        # the mapping ends with its last reference
        self._memory = None
        self._layers = ()
        nothing = np.zeros(0, dtype=_PAGE_HEADER)
        self.keys, self.row_masks = nothing["key"], nothing["row_mask"]
        self.generations, self.incarnations = nothing["generation"], nothing["incarnation"]
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def unlink(self) -> None:
        """Removes the file of a shared pool; processes that map it keep it until they close. Idempotent."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _body_offset(num_blocks: int) -> int:
    """Page-aligned, behind one page for the head and the page headers."""
    return PAGE_BYTES + -(-num_blocks * _PAGE_HEADER.itemsize // PAGE_BYTES) * PAGE_BYTES


def _total_bytes(layout: KVCacheLayout, num_blocks: int) -> int:
    if num_blocks < 2:
        raise ConfigError(f"a host pool needs at least 2 pages (one is the null block), got {num_blocks}")
    body = num_blocks * layout.host_block_bytes
    return _body_offset(num_blocks) + -(-body // PAGE_BYTES) * PAGE_BYTES


def _write_head(memory: mmap.mmap, layout: KVCacheLayout, num_blocks: int) -> None:
    """The ready flag is part of the last write of whoever makes the pool."""
    memory[: _HEAD.size] = _HEAD.pack(_MAGIC, layout.fingerprint().encode(), num_blocks, _body_offset(num_blocks), 1)


def _head_problem(head: bytes, layout: KVCacheLayout, num_blocks: int) -> str:
    """Why a pool is not ready yet ('' = it is). Raises ConfigError when it never will be."""
    if len(head) < _HEAD.size or head[:8] == bytes(8):
        return "its owner has not finished creating it"
    magic, fingerprint, blocks, body, ready = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise ConfigError(f"this is no host pool of this version (magic {magic!r})")
    if fingerprint != layout.fingerprint().encode() or blocks != num_blocks or body != _body_offset(num_blocks):
        raise ConfigError(
            f"the shared host pool holds {blocks} pages of layout {fingerprint.decode()}, expected {num_blocks} of "
            f"{layout.fingerprint()}; every rank must use the configuration its keeper has"
        )
    return "" if ready else "its owner has not finished creating it"

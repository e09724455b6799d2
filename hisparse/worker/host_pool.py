"""The host pool: every layer's rows of every host page, and a header per page.

Owns memory and its life cycle; which page holds what is the coordinator's business. One writer, any number of readers.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.config import GIB
from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.worker import host_memory, pinned
from hisparse.worker.host_head import HEAD, PAGE_BYTES, PAGE_HEADER, body_offset, head_problem, total_bytes, write_head

POPULATE_CHUNK_BYTES = 256 << 20
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
        address, nbytes: of the body, page-aligned. mapped_bytes: of body and headers.
        device_masks: int64 [num_blocks], where `mark_rows` sets bits. Once pinned, on the device: a page's mask is then this
            or'ed with `row_masks`, which has what the CPU knows (imports, completed spills). Else it *is* `row_masks`.
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
        self._pinned: pinned.PinnedMemory | None = None  # the first attribute, so that it is forgotten before the memory
        self.layout = layout
        self.num_blocks = num_blocks
        self.path = path
        self.is_shared = path is not None
        self.nbytes, self.mapped_bytes = num_blocks * layout.host_block_bytes, len(memory)
        self._memory: mmap.mmap | None = memory
        self._fd = fd
        start = body_offset(num_blocks)
        header = np.frombuffer(memory, dtype=PAGE_HEADER, count=num_blocks, offset=PAGE_BYTES)
        self.keys: np.ndarray[Any, Any] = header["key"]
        self.row_masks: np.ndarray[Any, Any] = header["row_mask"]
        self.generations: np.ndarray[Any, Any] = header["generation"]
        self.incarnations: np.ndarray[Any, Any] = header["incarnation"]
        body = torch.frombuffer(memory, dtype=torch.uint8, count=self.nbytes, offset=start)
        self.address = body.data_ptr()
        self._layers: tuple[Tensor, ...] = self._by_layer(body)
        self._device_layers = self._layers
        self.device_masks = torch.from_numpy(self.row_masks.view(np.int64))
        self._held_by: list[str] = []

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
        total = total_bytes(layout, num_blocks)
        what = f"a private host pool on each of {ranks_on_node} ranks" if ranks_on_node > 1 else "the private host pool"
        host_memory.check_memory(total * ranks_on_node, what=what, available_bytes=available_bytes)
        memory = mmap.mmap(-1, total)
        if populate or poison:
            host_memory.populate(memory, total, chunk_bytes=POPULATE_CHUNK_BYTES, progress=progress)
        write_head(memory, layout, num_blocks)
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
        path, total = Path(path), total_bytes(layout, num_blocks)
        host_memory.check_file_room(path, total, available_bytes)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot create the shared host pool {path}: {error.strerror}; its directory must be writable, "
                              "and a file of that name whose engine is dead may be removed") from error
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
                    f"the shared host pool {path} needs {total} bytes ({total / GIB:.2f} GiB) and "
                    f"allocating them failed: {error.strerror}; lower cache.host_pool_gib"
                ) from error
            raise
        pool = cls(layout, num_blocks, memory, path=path, fd=fd)
        if poison:
            pool.poison()
        write_head(memory, layout, num_blocks)
        return pool

    @classmethod
    def attach(cls, layout: KVCacheLayout, num_blocks: int, path: str | Path, *, timeout_s: float = 5.0) -> HostPool:
        """Maps a pool that its owner has created.

        Raises:
            ConfigError: the file does not appear, does not become ready in time, or has another layout or size.
        """
        path, total, deadline = Path(path), total_bytes(layout, num_blocks), time.monotonic() + timeout_s
        why = "it does not exist"
        while True:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    why = head_problem(os.pread(fd, HEAD.size, 0), layout, num_blocks, path)
                    if not why:
                        if os.fstat(fd).st_size != total:
                            raise ConfigError(
                                f"the shared host pool {path} has {os.fstat(fd).st_size} bytes, expected {total}; every rank "
                                "must use the configuration its keeper has"
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

    # ---- memory of a device
    def pin(
        self,
        device: str | torch.device,
        *,
        registrar: pinned.Registrar | None = None,
        chunk_bytes: int = pinned.CHUNK_BYTES,
        progress: Progress | None = None,
    ) -> None:
        """Registers the body with a device, so that its kernels read and write host rows in place (`device_rows`).

        Comes before anybody else registers the memory (`hold`). On the CPU there is nothing to do.

        Args:
            registrar: default CUDA's. chunk_bytes: most bytes of one registration. progress: after each.
        Raises:
            ConfigError: the limit of locked memory is too low, or a chunk was refused; nothing is registered.
            InvariantError: closed, pinned already, or held.
        """
        device = torch.device(device)
        if device.type == "cpu" and registrar is None:
            return
        if self._memory is None or self._pinned is not None or self._held_by:
            state = "closed" if self._memory is None else "pinned already" if self._pinned else f"held by {self._held_by}"
            raise InvariantError(f"the host pool cannot be pinned: it is {state}; CUDA registers first")
        if registrar is None:
            from hisparse.ops.cuda import mapped

            registrar = mapped
        if device.index is None and device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        size = -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES
        host_memory.check_memlock(size, 1)
        with host_memory.pin_turn():
            self._pinned = pinned.pin(
                self.address, size, unit_bytes=self.layout.layer_page_bytes, page_bytes=PAGE_BYTES, device=device,
                registrar=registrar, chunk_bytes=chunk_bytes, progress=progress,
            )
        self._device_layers = self._by_layer(self._pinned.tensor[: self.nbytes])
        self.device_masks = torch.zeros(self.num_blocks, dtype=torch.int64, device=self._pinned.tensor.device)

    @property
    def is_pinned(self) -> bool:
        return self._pinned is not None

    def device_rows(self, layer: int) -> Tensor:
        """`rows(layer)` as operations of the device take it: the same bytes. Unless pinned, that is `rows(layer)`."""
        if self._memory is None:
            raise InvariantError("the host pool is closed")
        return self._device_layers[layer]

    @property
    def device_body(self) -> Tensor:
        """[num_layers * num_blocks * block_size, row_elems]: `device_rows` of all layers, one behind the other."""
        rows = self.device_rows(0)
        return rows.as_strided((len(self._device_layers) * rows.shape[0], rows.shape[1]), rows.stride())

    def hold(self, owner: str) -> None:
        """`owner` has registered this memory, too: until `release` it can be neither pinned nor unpinned nor closed."""
        if self._memory is None:
            raise InvariantError(f"{owner} registers a host pool that is closed")
        self._held_by.append(owner)

    def release(self, owner: str) -> None:
        """Ends one `hold`. Raises InvariantError when `owner` does not hold."""
        if owner not in self._held_by:
            raise InvariantError(f"{owner} releases a host pool that it does not hold (held by {self._held_by})")
        self._held_by.remove(owner)

    def unpin(self) -> None:
        """Ends the registration, after everybody else's and when no kernel uses it any more. Idempotent.

        Raises:
            InvariantError: held, or the driver refused.
        """
        if self._pinned is not None:
            self._check_not_held("unpinned")
            memory, self._pinned = self._pinned, None
            self._device_layers = self._layers
            self.device_masks = torch.from_numpy(self.row_masks.view(np.int64))
            memory.unpin()

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
        """Ends the registration, drops this process's mapping (when its last view is gone) and lock. Idempotent.

        Raises:
            InvariantError: somebody holds it (NIXL is deregistered first).
        """
        if self._memory is None:
            return
        self._check_not_held("closed")
        self.unpin()
        # torch does not export the buffer it borrows, so an explicit unmap would pull it from under live views;
        # the mapping ends with its last reference
        self._memory = None
        self._layers = self._device_layers = ()
        nothing = np.zeros(0, dtype=PAGE_HEADER)
        self.device_masks = torch.zeros(0, dtype=torch.int64)
        self.keys, self.row_masks = nothing["key"], nothing["row_mask"]
        self.generations, self.incarnations = nothing["generation"], nothing["incarnation"]
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def unlink(self) -> None:
        """Removes the file of a shared pool; processes that map it keep it until they close. Idempotent."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _by_layer(self, body: Tensor) -> tuple[Tensor, ...]:
        layout = self.layout
        return tuple(body.view(getattr(torch, layout.row.dtype)).view(layout.shape.num_layers, -1, layout.row.row_elems))

    def _check_not_held(self, what: str) -> None:
        if self._held_by:
            raise InvariantError(f"the host pool cannot be {what} while {', '.join(self._held_by)} has it registered")

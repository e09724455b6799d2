"""Host memory of pools: is there room, whose file is it, and which files have no owner any more.

Checks come before anything is allocated, and say needed, free and how to fix it. Nothing here maps memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hisparse.config import GIB
from hisparse.errors import ConfigError

SHM = Path("/dev/shm")
_PATTERN = "hisparse-*.pool"
_OWNED = re.compile(r"hisparse-[\w-]+\.(?P<pid>\d+)\.(?P<start>\d+)\.(?P<space>\d+)\.pool")


def pool_path(label: str, directory: str | Path = SHM) -> Path:
    """Name of a shared pool owned by this process: label, pid, its start time (unique per boot) and pid namespace.

    Raises:
        ConfigError: the label has characters other than letters, digits, `_` and `-`.
    """
    if not re.fullmatch(r"[\w-]+", label):
        raise ConfigError(f"a pool label may hold letters, digits, '_' and '-' only, got {label!r}")
    pid = os.getpid()
    return Path(directory) / f"hisparse-{label}.{pid}.{process_start(pid)}.{_pid_namespace()}.pool"


def process_start(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when there is none (or it is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def sweep(directory: str | Path = SHM, *, remove: bool = True) -> list[Path]:
    """Removes pool files (`hisparse-*.pool`) that no live process owns or maps; returns them. Without `remove`, only that.

    A file is kept while anybody holds its lock: every process that maps a pool holds a shared lock on the file for as
    long as it lives, in whatever pid namespace. It is kept, too, while the owner that `pool_path` put in its name lives.
    """
    removed = []
    for path in sorted(Path(directory).glob(_PATTERN)):
        owner = _OWNED.fullmatch(path.name)
        here = owner is not None and int(owner["space"]) == _pid_namespace()
        if owner is not None and here and process_start(int(owner["pid"])) == int(owner["start"]):
            continue
        with contextlib.suppress(OSError):  # another user's file, in use, or gone by now
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if remove:
                    path.unlink()
                removed.append(path)
            finally:
                os.close(fd)
    return removed


def check_file_room(path: Path, needed_bytes: int, available_bytes: int | None = None) -> None:
    """Raises ConfigError unless the file system of `path`, and memory behind it, has room for `needed_bytes`."""
    try:
        stat = os.statvfs(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot place the shared host pool at {path}: {error.strerror}") from error
    free = stat.f_bavail * stat.f_frsize
    if needed_bytes > free:
        raise ConfigError(
            f"the shared host pool needs {needed_bytes} bytes ({needed_bytes / GIB:.2f} GiB) in {path.parent}, which "
            f"has {free} bytes free ({free / GIB:.2f} GiB), for {path}; enlarge it (docker --shm-size, a Memory "
            "volume's sizeLimit, mount -o remount,size=) or lower cache.host_pool_gib"
        )
    check_memory(needed_bytes, what=f"the shared host pool {path}", available_bytes=available_bytes)


def check_memory(needed_bytes: int, *, what: str, available_bytes: int | None = None) -> None:
    """Raises ConfigError unless this node (and cgroup) has `needed_bytes` of memory available."""
    free = available_memory() if available_bytes is None else available_bytes
    if needed_bytes > free:
        raise ConfigError(
            f"{what} needs {needed_bytes} bytes ({needed_bytes / GIB:.2f} GiB) of memory and {free} bytes "
            f"({free / GIB:.2f} GiB) are available; lower cache.host_pool_gib or share one pool between ranks "
            "(cache.host_pool: shared)"
        )


def available_memory(root: str | Path = "/") -> int:
    """Bytes that can be allocated now: MemAvailable, or what the cgroup (v2) leaves, whichever is less.

    File cache that the kernel can drop counts as available in both.
    """
    root, free = Path(root), 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or no cgroup v2
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, max(0, limit - used + int(stat.get("inactive_file", 0))))
    return free


def check_memlock(pool_bytes: int, num_devices: int, limit_bytes: int | None = None) -> None:
    """Raises ConfigError unless RLIMIT_MEMLOCK covers the pool once for each device that registers it.

    The limit does not bind a process with the capability IPC_LOCK, e.g. root outside of a container.
    """
    if limit_bytes is None:
        limit_bytes = resource.RLIM_INFINITY if may_lock_all() else resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    needed = pool_bytes * num_devices
    if limit_bytes != resource.RLIM_INFINITY and needed > limit_bytes:
        raise ConfigError(
            f"pinning the pool for {num_devices} devices needs {needed} bytes of locked memory ({pool_bytes} each) "
            f"and RLIMIT_MEMLOCK is {limit_bytes}; raise it (ulimit -l unlimited, docker --ulimit memlock=-1, IPC_LOCK)"
        )


def may_lock_all(status: str | Path = "/proc/self/status") -> bool:
    """Whether this process has the capability IPC_LOCK."""
    ipc_lock = 14
    for line in Path(status).read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> ipc_lock & 1)
    return False


def populate(memory: mmap.mmap, num_bytes: int, *, chunk_bytes: int, progress: Callable[[int, int], None] | None = None,
             threads: int | None = None) -> None:
    """Makes every page of [0, num_bytes) exist, without changing it: pinning untouched memory is ten times slower.

    Args:
        chunk_bytes: a thread's share at a time; a multiple of the page size. threads: default one per core, at most 16.
        progress: called with (bytes done, bytes in all), in order.
    """
    base = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    starts = range(0, num_bytes, chunk_bytes)
    workers = min(threads or min(os.cpu_count() or 1, 16), len(starts))

    def touch(first: int) -> int:
        size = min(chunk_bytes, num_bytes - first)
        if not _populate_pages(base + first, size):
            pages = np.frombuffer(memory, dtype=np.uint8, count=size, offset=first)[:: mmap.PAGESIZE]
            np.bitwise_or(pages, 0, out=pages)  # a write, which is what makes a page exist
        return first + size

    with ThreadPoolExecutor(max(workers, 1), thread_name_prefix="hisparse-populate") as pool:
        for done in pool.map(touch, starts):
            if progress is not None:
                progress(done, num_bytes)


@contextlib.contextmanager
def pin_turn(directory: str | Path | None = None) -> Iterator[None]:
    """One process of a node pins at a time: two at once fight over the same kernel locks. Blocks until it is our turn."""
    path = Path(directory or tempfile.gettempdir()) / f"hisparse-pin.{os.getuid()}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _populate_pages(address: int, num_bytes: int) -> bool:
    """MADV_POPULATE_WRITE; False where the kernel does not know it. Releases the interpreter's lock."""
    populate_write = 23
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), populate_write) == 0)


def use_large_pages(address: int, num_bytes: int) -> bool:
    """Asks for pages of 2 MiB (MADV_HUGEPAGE) where the system leaves that to programs; before the memory is first written.

    Copies between processes look up every page: of large ones they are a sixth faster (measured).
    Returns: False where the kernel refuses, or the range has no whole page; nothing has changed then.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size <= 0:
        return False
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE) == 0)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino

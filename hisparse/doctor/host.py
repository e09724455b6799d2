"""Memory, files and ports of the machine. Every probe reads below a root, so that tests can give it another one."""

from __future__ import annotations

import json
import os
import resource
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hisparse.config import GIB
from hisparse.doctor.findings import Finding, Needs, Status
from hisparse.worker import host_memory

NO_LIMIT = resource.RLIM_INFINITY
ENLARGE_SHM = "enlarge /dev/shm (docker --shm-size, a Memory volume's sizeLimit, mount -o remount,size=)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where to look.

    Attributes:
        root: of /proc and /sys. shm: directory of shared pools.
        memlock_bytes: RLIMIT_MEMLOCK, or NO_LIMIT, also where this process may lock all memory; None = ask.
    """

    root: Path = Path("/")
    shm: Path = host_memory.SHM
    memlock_bytes: int | None = None

    def read(self, path: str) -> str | None:
        """Text of a file below the root, stripped; None if there is none."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None

    def memory(self, needs: Needs) -> Iterator[Finding]:
        free = host_memory.available_memory(self.root)
        text = f"{gib(free)} can be allocated now"
        if needs.memory_bytes > free:
            yield Finding(check="host memory", status=Status.FAIL, text=f"{text}, the pools take {gib(needs.memory_bytes)}",
                          fix="lower cache.host_pool_gib or the number of replicas, or stop what uses the memory")
        else:
            yield Finding(check="host memory", status=Status.OK, text=text + _needed(needs.memory_bytes))

    def shared_memory(self, needs: Needs) -> Iterator[Finding]:
        try:
            stat = os.statvfs(self.shm)
        except OSError as error:
            yield Finding(check="shared memory", status=Status.FAIL if needs.shared_bytes else Status.WARN,
                          text=f"{self.shm}: {error.strerror}", fix="mount a tmpfs there: shared host pools live in it")
            return
        free, size = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
        text = f"{self.shm} has {gib(free)} free of {gib(size)}"
        if needs.shared_bytes > free:
            yield Finding(check="shared memory", status=Status.FAIL, text=f"{text}, the pools take {gib(needs.shared_bytes)}",
                          fix=f"{ENLARGE_SHM} or lower cache.host_pool_gib")
        elif size < GIB:
            yield Finding(check="shared memory", status=Status.WARN, text=text, fix=f"{ENLARGE_SHM}; Ray wants it, too")
        else:
            yield Finding(check="shared memory", status=Status.OK, text=text + _needed(needs.shared_bytes))

    def locked_memory(self, needs: Needs) -> Iterator[Finding]:
        limit = _memlock() if self.memlock_bytes is None else self.memlock_bytes
        text = "no limit" if limit == NO_LIMIT else f"limit of {gib(limit)}"
        fix = "ulimit -l unlimited (docker --ulimit memlock=-1 --cap-add IPC_LOCK; LimitMEMLOCK=infinity in systemd)"
        if limit != NO_LIMIT and needs.pinned_bytes > limit:
            yield Finding(check="locked memory", status=Status.FAIL, fix=fix,
                          text=f"{text}, pinning the pools for each rank takes {gib(needs.pinned_bytes)}")
        elif limit != NO_LIMIT and limit < GIB:
            yield Finding(check="locked memory", status=Status.WARN, fix=fix,
                          text=f"{text}: too little to pin a pool for a GPU or to register it with RDMA")
        else:
            yield Finding(check="locked memory", status=Status.OK, text=text + _needed(needs.pinned_bytes))

    def huge_pages(self, needs: Needs) -> Iterator[Finding]:
        """No verdict: pools do not ask for huge pages, and no gain was measured."""
        folder = "sys/kernel/mm/transparent_hugepage"
        found = {name: _chosen(self.read(f"{folder}/{name}")) for name in ("enabled", "shmem_enabled")}
        if None in found.values():
            yield Finding(check="huge pages", status=Status.SKIP, text="this kernel has no transparent huge pages")
        else:
            yield Finding(check="huge pages", status=Status.OK, text=f"transparent: private memory {found['enabled']}, "
                          f"shared memory {found['shmem_enabled']} (pools ask for none)")

    def numa(self, needs: Needs) -> Iterator[Finding]:
        nodes = sorted(path.name for path in (self.root / "sys/devices/system/node").glob("node[0-9]*"))
        if len(nodes) > 1:
            yield Finding(check="NUMA", status=Status.WARN, text=f"{len(nodes)} nodes; pools are bound to none of them",
                          fix="start Ray under numactl --cpunodebind=N --membind=N, with N the node of its GPUs")
        else:
            yield Finding(check="NUMA", status=Status.OK if nodes else Status.SKIP, text="one node" if nodes else "unknown")

    def leftovers(self, needs: Needs) -> Iterator[Finding]:
        files = host_memory.sweep(self.shm, remove=False)
        if files:
            size = sum(path.stat().st_size for path in files)
            yield Finding(check="leftovers", status=Status.WARN, text=f"{len(files)} host pools of dead engines hold up to "
                          f"{gib(size)}", fix=f"the next start removes them; or: rm {' '.join(map(str, files[:3]))}"
                          + (" ..." if len(files) > 3 else ""))
        else:
            yield Finding(check="leftovers", status=Status.OK, text=f"no pool of a dead engine in {self.shm}")


def probe_port(needs: Needs, *, ours_is_fine: bool = True) -> Iterator[Finding]:
    """A port that our own service answers on is no mistake, unless another one is to start there."""
    where = f"{needs.host}:{needs.port}"
    if not needs.port:
        yield Finding(check="HTTP port", status=Status.OK, text="any free one")
        return
    try:
        with socket.socket(socket.AF_INET6 if ":" in needs.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((needs.host, needs.port))
    except OSError as error:
        if _is_ours(needs):
            ours = f"a running hisparse answers on {where}"
            yield Finding(check="HTTP port", status=Status.OK, text=ours) if ours_is_fine else Finding(
                check="HTTP port", status=Status.FAIL, text=ours, fix="stop it, or choose another serve.port (0: any free one)")
            return
        yield Finding(check="HTTP port", status=Status.FAIL, text=f"{where}: {error.strerror or error}",
                      fix="stop what listens there (ss -ltnp), or choose another serve.port (0: any free one)")
        return
    yield Finding(check="HTTP port", status=Status.OK, text=f"{where} is free")


def gib(num_bytes: int) -> str:
    """For people. Examples: "1.5 GiB", "8 MiB"."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):,.0f} MiB"


def _needed(num_bytes: int) -> str:
    return f", {gib(num_bytes)} needed" if num_bytes else ""


def _memlock() -> int:
    return NO_LIMIT if host_memory.may_lock_all() else resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _chosen(text: str | None) -> str | None:
    """The bracketed word of "always [madvise] never"."""
    if text is None or "[" not in text:
        return None
    return text.partition("[")[2].partition("]")[0]


def _is_ours(needs: Needs) -> bool:
    try:
        with urllib.request.urlopen(f"http://{needs.host}:{needs.port}/health", timeout=3) as response:
            return "engines" in json.load(response)
    except urllib.error.HTTPError as error:
        return b'"engines"' in error.read(4096)
    except (OSError, ValueError, TypeError):
        return False

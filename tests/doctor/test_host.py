"""Probes of memory, files and ports, on a machine made of files."""

from __future__ import annotations

import fcntl
import http.server
import socket
import threading
from pathlib import Path

import pytest

from hisparse.doctor.findings import Finding, Needs, Status
from hisparse.doctor.host import NO_LIMIT, Host, gib, probe_port

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """16 GiB available, one NUMA node, transparent huge pages."""
    files = {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
             "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
             "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    (tmp_path / "shm").mkdir()
    return tmp_path


def host(root: Path, memlock_bytes: int = NO_LIMIT) -> Host:
    return Host(root=root, shm=root / "shm", memlock_bytes=memlock_bytes)


def one(found: object) -> Finding:
    (finding,) = found  # type: ignore[misc]
    assert isinstance(finding, Finding) and (finding.status in (Status.OK, Status.SKIP)) is not bool(finding.fix)
    return finding


def test_host_memory(root: Path) -> None:
    assert one(host(root).memory(Needs())).text == "16.0 GiB can be allocated now"
    assert one(host(root).memory(Needs(memory_bytes=16 * GIB))).status is Status.OK
    finding = one(host(root).memory(Needs(memory_bytes=16 * GIB + 1)))
    assert finding.status is Status.FAIL and "cache.host_pool_gib" in finding.fix
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in (("memory.max", str(3 * GIB)), ("memory.current", str(2 * GIB)), ("memory.stat", "inactive_file 0\n")):
        (group / name).write_text(text)
    assert one(host(root).memory(Needs())).text == "1.0 GiB can be allocated now"  # the container's limit counts


def test_shared_memory(root: Path) -> None:
    assert one(host(root).shared_memory(Needs(shared_bytes=4096))).status is Status.OK
    finding = one(host(root).shared_memory(Needs(shared_bytes=1 << 60)))
    assert finding.status is Status.FAIL and "--shm-size" in finding.fix and "take 1,073,741,824.0 GiB" in finding.text
    nowhere = Host(root=root, shm=root / "none")
    assert one(nowhere.shared_memory(Needs())).status is Status.WARN
    assert one(nowhere.shared_memory(Needs(shared_bytes=1))).status is Status.FAIL


def test_locked_memory(root: Path) -> None:
    assert one(host(root).locked_memory(Needs(pinned_bytes=1 << 50))).text.startswith("no limit")
    small = host(root, 8 << 20)
    assert one(small.locked_memory(Needs())).status is Status.WARN
    finding = one(small.locked_memory(Needs(pinned_bytes=GIB)))
    assert finding.status is Status.FAIL and "ulimit -l unlimited" in finding.fix and "8 MiB" in finding.text
    assert one(host(root, 2 * GIB).locked_memory(Needs(pinned_bytes=GIB))).status is Status.OK


def test_huge_pages_and_numa(root: Path) -> None:
    assert "private memory madvise, shared memory never" in one(host(root).huge_pages(Needs())).text
    assert one(host(root / "none").huge_pages(Needs())).status is Status.SKIP
    assert one(host(root).numa(Needs())).text == "one node"
    (root / "sys/devices/system/node/node1").mkdir()
    finding = one(host(root).numa(Needs()))
    assert finding.status is Status.WARN and "2 nodes" in finding.text and "numactl" in finding.fix


def test_leftovers_are_named_and_not_removed(root: Path) -> None:
    assert one(host(root).leftovers(Needs())).status is Status.OK
    dead, used = root / "shm" / "hisparse-dead.pool", root / "shm" / "hisparse-used.pool"
    dead.write_bytes(b"x" * (3 << 20))
    used.write_bytes(b"y")
    with used.open() as holder:
        fcntl.flock(holder, fcntl.LOCK_SH)  # as whoever maps a pool
        finding = one(host(root).leftovers(Needs()))
    assert finding.status is Status.WARN and "1 host pools" in finding.text and "3 MiB" in finding.text
    assert str(dead) in finding.fix and str(used) not in finding.fix and dead.exists()


def test_port() -> None:
    assert one(probe_port(Needs(port=0))).status is Status.OK
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = one(probe_port(Needs(port=port)))
    assert finding.status is Status.FAIL and str(port) in finding.text and "serve.port" in finding.fix
    assert one(probe_port(Needs(port=port))).status is Status.OK


@pytest.mark.parametrize(("code", "body", "status"), [(200, b'{"status": "ok", "engines": []}', Status.OK),
                                                      (503, b'{"status": "unhealthy", "engines": []}', Status.OK),
                                                      (200, b"<html>", Status.FAIL), (404, b"{}", Status.FAIL)])
def test_our_own_service_may_hold_the_port(code: int, body: bytes, status: Status) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert one(probe_port(Needs(port=server.server_port))).status is status
    finally:
        server.shutdown()
        server.server_close()


def test_sizes_for_people() -> None:
    assert [gib(n) for n in (8 << 20, GIB, 1536 << 20)] == ["8 MiB", "1.0 GiB", "1.5 GiB"]

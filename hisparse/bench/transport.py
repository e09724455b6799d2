"""READs between two processes over NIXL under several UCX settings, beside a memcpy of the same bytes; and notices.

2,048 pages of 64 rows of 656 bytes are read in a random order (a descriptor a page) and as one run. A READ is timed from its
post until the poll that saw its end, and every byte is compared before a number is given. A notice is timed one way.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from hisparse.bench import children, report
from hisparse.bench.progress import Progress

PAGE_BYTES, PAGES = 64 * 656, 2048


@dataclass(frozen=True, slots=True)
class Setting:
    """UCX_TLS ("" = UCX's own choice) and the error mode of its endpoints."""

    tls: str
    error_mode: str

    def __str__(self) -> str:
        return f"{self.tls or 'default'}, errors {self.error_mode}"


SETTINGS = (Setting("", "peer"), Setting("tcp,cma", "peer"), Setting("tcp", "peer"), Setting("", "none"),
            Setting("sm,self", "none"))


def content(pages: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, pages * PAGE_BYTES, dtype=np.uint8)


def serve(pipe: Connection, setting: Setting, pages: int) -> None:
    """The side that is read: an agent over `content`, which answers with when each notice came."""
    transport = _transport("far", setting)
    memory = content(pages)
    transport.register(memory.ctypes.data, memory.nbytes)
    pipe.send((transport.metadata(), memory.ctypes.data))
    while True:
        news = transport.notices()
        if news:
            pipe.send(time.monotonic())
        elif pipe.poll():
            break
        time.sleep(0)
    transport.close()


def _transport(name: str, setting: Setting):  # type: ignore[no-untyped-def]
    if setting.tls:
        os.environ["UCX_TLS"] = setting.tls
    from hisparse.pd.nixl import NixlTransport

    return NixlTransport(name, error_mode=setting.error_mode, threads=0)


def read(pipe: Connection, far: Connection, setting: Setting, pages: int, repeats: int) -> None:
    """The side that reads: (name, seconds of each repeat) of every measurement."""
    transport = _transport("near", setting)
    memory, want = np.zeros(pages * PAGE_BYTES, dtype=np.uint8), content(pages)
    transport.register(memory.ctypes.data, memory.nbytes)
    metadata, address = far.recv()
    transport.connect("far", metadata)
    starts = np.random.default_rng(2).permutation(pages).astype(np.int64) * PAGE_BYTES
    scattered = np.stack([address + starts, memory.ctypes.data + starts, np.full(pages, PAGE_BYTES)], axis=1)
    run = np.array([[address, memory.ctypes.data, memory.nbytes]], dtype=np.int64)
    for name, descriptors in (("scattered", scattered), ("one run", run)):
        seconds = []
        for _ in range(1 + repeats):  # the first one connects
            memory[:] = 0
            began = time.perf_counter()
            handle = transport.read("far", descriptors)
            while not transport.poll(handle):
                pass
            seconds.append(time.perf_counter() - began)
            if not np.array_equal(memory, want):
                raise AssertionError(f"{setting}: wrong bytes")
        pipe.send((name, seconds[1:]))
    delays = []
    for _ in range(repeats):
        began = time.monotonic()
        transport.notify("far", b"x")
        delays.append(far.recv() - began)
    pipe.send(("notice", delays))
    transport.close()


def memcpy_s(pages: int, repeats: int) -> float:
    """Median of copying the same pages in the same order by memmove, in one thread."""
    source, target = content(pages), np.zeros(pages * PAGE_BYTES, dtype=np.uint8)
    starts = (np.random.default_rng(2).permutation(pages) * PAGE_BYTES).tolist()
    move: Callable[[int, int, int], object] = ctypes.memmove
    near, far, seconds = target.ctypes.data, source.ctypes.data, []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        for start in starts:
            move(near + start, far + start, PAGE_BYTES)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def measure(pages: int, repeats: int) -> Iterator[report.Row]:
    context, gigabytes = mp.get_context("spawn"), pages * PAGE_BYTES / 1e9
    for setting in SETTINGS:
        copy = gigabytes / memcpy_s(pages, repeats)
        far, far_end = context.Pipe()
        near, near_end = context.Pipe()
        server = context.Process(target=serve, args=(far_end, setting, pages), daemon=True)
        reader = context.Process(target=read, args=(near_end, far, setting, pages, repeats), daemon=True)
        children.start(server)
        children.start(reader)
        far_end.close()
        near_end.close()
        try:
            for _ in range(3):
                if not near.poll(120):
                    raise AssertionError(f"{setting}: no answer within 120 s")
                name, seconds = near.recv()
                if name == "notice":
                    yield report.Row(case=f"notice, {setting}", value=statistics.median(seconds) * 1e3, unit="ms",
                                     best=min(seconds) * 1e3, max=max(seconds) * 1e3)
                else:
                    rates = [gigabytes / item for item in seconds]
                    yield report.Row(case=f"{name}, {setting}", value=statistics.median(rates), unit="GB/s",
                                     yardstick=(copy, "x memcpy"), best=max(rates), detail={"slowest": min(rates)})
        finally:
            far.send("end")
            server.join(10)
            for process in (server, reader):
                process.kill()
                process.join()


def run(*, quick: bool = False, progress: Progress | None = None) -> report.Result:
    """`quick`: few pages, two repeats: a smoke test."""
    progress = progress or Progress()
    header = report.facts("transport", report.Yardsticks.measure(repeats=1))
    rows = []
    progress.expect(3 * len(SETTINGS))
    for row in measure(*((64, 2) if quick else (PAGES, 15))):
        rows.append(row)
        progress.step(f"{row.case}: {row.value:.3g} {row.unit}")
    return header, rows

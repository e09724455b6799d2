"""What is measured: cases, their bars, and one run of each."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.imports.engines import Engine, Setup, layout_of, serve
from benchmarks.report import Row
from hisparse.pd.generations import GENERATION_BYTES
from hisparse.pd.importer import copy_now
from hisparse.pd.loopback import LoopbackNetwork, LoopbackTransport
from hisparse.pd.transport import Descriptors, Transport
from hisparse.pd.worker import ImportStream
from hisparse.types import Landing

PAGES, QUICK_PAGES = 2048, 64
MEMCPY_SHARE, CONTROL_US = 0.5, 3.0
HOST_GB_S, RESIDENT_GB_S = 40.0, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One import.

    Attributes:
        source: where prefill holds the pages, "gpu" (its packed allocation) or "host".
        runs: consecutive ids on the prefill side: 8 pages are a chunk of 512 tokens, 32 of 2,048; 1: each for itself, on the
            decode side, too, where the pages of one admission are consecutive otherwise.
        control: without the copies, CPU time a page.
    """

    layout: str
    landing: Landing
    path: str
    source: str
    transport: str = "nixl"
    device: str = "cpu"
    runs: int = 8
    control: bool = False

    @property
    def name(self) -> str:
        what = "control" if self.control else "bytes"
        return f"{what} {self.layout} {self.source} -> {self.landing.value} {self.path} runs {self.runs} {self.transport}"

    @property
    def prefill_device(self) -> str:
        return "cpu" if self.device == "cpu" else f"cuda:{torch.cuda.device_count() - 1}"


def all_cases(device: str) -> list[Case]:
    host, resident = Landing.HOST, Landing.RESIDENT
    if device == "cuda":
        landings = ((host, "staged", "gpu"), (resident, "staged", "gpu"), (host, "staged", "host"), (host, "direct", "host"),
                    (resident, "staged", "host"))
        return [Case(layout="mla", landing=landing, path=path, source=source, device="cuda", runs=runs)
                for landing, path, source in landings for runs in (32, 8, 1)]
    cases = [Case(layout=layout, landing=host, path=path, source=source, transport=transport)
             for layout in ("tiny", "mla") for transport in ("nixl", "loopback") for source in ("gpu", "host")
             for path in ("staged", "direct")]
    cases += [Case(layout=layout, landing=resident, path="staged", source="gpu") for layout in ("tiny", "mla")]
    cases += [Case(layout="mla", landing=host, path=path, source=source, runs=1)
              for source in ("gpu", "host") for path in ("staged", "direct")]
    controls = [replace(case, control=True) for case in cases if case.transport == "nixl"]
    return cases + [replace(case, transport="none") for case in controls] + [case for case in controls if case.runs > 1]


def measure(case: Case, *, quick: bool, repeats: int) -> list[Row]:
    num_pages, layout = QUICK_PAGES if quick else PAGES, layout_of(case.layout)
    slot_pages = 64 if case.device == "cuda" else 8
    config: dict[str, Any] = {"transport": "nixl" if case.transport == "nixl" else "loopback", "landing_path": case.path,
                              "staging_slots": 8, "staging_slot_pages": slot_pages}
    far = Setup(name="p", layout=case.layout, device=case.prefill_device, num_pages=num_pages, resident=case.source == "gpu",
                host=case.source == "host", runs=case.runs, config={**config, "staging_slots": 1})
    near = Setup(name="d", layout=case.layout, device="cuda:0" if case.device == "cuda" else "cpu", num_pages=num_pages,
                 resident=case.landing is Landing.RESIDENT, host=case.landing is Landing.HOST,
                 runs=1 if case.runs == 1 else num_pages, config=config)
    num_bytes = num_pages * (layout.host_block_bytes + layout.indexer_page_bytes)
    on_cpu = case.device == "cpu"
    copy_s, kernel_s = (memcpy_s(num_bytes), kernel_copy_s(num_bytes)) if on_cpu and not case.control else (None, None)
    transports: list[Transport] = []
    with _prefill(case, far, transports) as (grant, make_transport), _without_copies(case.control):
        engine = Engine(near, make_transport=make_transport)
        try:
            times = []
            for i in range(repeats + 1):
                source, target = far.pages(10 + i), near.pages(50 + i)
                seconds, busy_s = engine.load(f"r{i}", grant(f"r{i}", 10 + i), target, case.landing)
                if i == 0 and not case.control:
                    engine.assert_imported(source, target, case.landing, from_host=case.source == "host")
                if i:
                    times.append(busy_s if case.control else seconds)
        finally:
            engine.close()
    row = _row(case, times, num_pages, num_bytes, copy_s, quick, transports)
    return [row if kernel_s is None else replace(row, detail=row.detail | {"kernel copy GB/s": num_bytes / kernel_s / 1e9})]


def _row(case: Case, times: list[float], num_pages: int, num_bytes: int, copy_s: float | None, quick: bool,
         transports: list[Transport]) -> Row:
    middle, best, worst = statistics.median(times), min(times), max(times)
    counted = next((t for t in transports if isinstance(t, CutTransport)), None)
    if case.control:
        imports = len(times) + 1
        detail = {"reads": counted.reads / imports, "descriptors": counted.descriptors / imports} if counted else {}
        return Row(case=case.name, value=middle / num_pages * 1e6, unit="us/page",
                   bar=None if quick or case.transport == "nixl" else CONTROL_US,
                   best=best / num_pages * 1e6, max=worst / num_pages * 1e6, detail=detail)
    bar: float | None = HOST_GB_S if case.landing is Landing.HOST else RESIDENT_GB_S
    ceiling = None
    if copy_s is not None:
        bar = MEMCPY_SHARE * num_bytes / copy_s / 1e9
        ceiling = (num_bytes / copy_s / 1e9, "x memcpy")
    if quick or (case.device == "cuda" and (case.runs == 1 or case.source == "host")):
        bar = None
    return Row(case=case.name, value=num_bytes / middle / 1e9, unit="GB/s", bar=bar, more_is_better=True, yardstick=ceiling,
               best=num_bytes / best / 1e9, max=num_bytes / worst / 1e9, detail={"MB": num_bytes / 1e6, "ms": middle * 1e3})


def memcpy_s(num_bytes: int) -> float:
    """One thread copies so many bytes between two buffers that exist."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class _Piece(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]


def kernel_copy_s(num_bytes: int, piece_bytes: int = 336 << 10) -> float:
    """The same by the kernel's copy between processes (process_vm_readv), which is what UCX reads with inside a machine."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    libc, times = ctypes.CDLL(None, use_errno=True), []
    for _ in range(3):
        start = time.perf_counter()
        for at in range(0, num_bytes - piece_bytes + 1, piece_bytes):
            near, far = _Piece(target.ctypes.data + at, piece_bytes), _Piece(source.ctypes.data + at, piece_bytes)
            if libc.process_vm_readv(os.getpid(), ctypes.byref(near), 1, ctypes.byref(far), 1, 0) != piece_bytes:
                raise OSError(ctypes.get_errno(), "process_vm_readv")
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@contextmanager
def _prefill(case: Case, setup: Setup, transports: list[Transport]) -> Iterator[tuple[
        Callable[[str, int], dict[str, Any]], Callable[[str], Transport] | None]]:
    """A function that grants, and what makes the decode side's transport."""
    if case.transport != "nixl":
        network = LoopbackNetwork()
        kind = LoopbackTransport if case.transport == "loopback" else InstantTransport
        engine = Engine(setup, make_transport=lambda name: LoopbackTransport(name, network=network))
        engine.fill()
        try:
            yield (lambda name, seed: engine.grant(name, setup.pages(seed)),
                   lambda name: kind(name, network=network))
        finally:
            engine.close()
        return
    context = mp.get_context("spawn")
    pipe, far = context.Pipe()
    process = context.Process(target=serve, args=(far, setup), daemon=True)
    process.start()
    try:
        assert pipe.poll(120) and pipe.recv() == "ready", "the prefill process did not start"

        def grant(name: str, seed: int) -> dict[str, Any]:
            pipe.send(("grant", name, seed))
            assert pipe.poll(60), "no answer from the prefill process"
            return dict(pipe.recv())

        def cut(name: str) -> Transport:
            from hisparse.pd.nixl import NixlTransport

            transports.append(CutTransport(NixlTransport(name)))
            return transports[-1]

        yield grant, cut if case.control else None
        pipe.send(("stop",))
        pipe.poll(30)
    finally:
        process.join(20)
        if process.is_alive():
            process.kill()


@contextmanager
def _without_copies(wanted: bool) -> Iterator[None]:
    """Copies out of staging take no time."""
    with patch.object(ImportStream, "copy", lambda self, copy: copy_now(lambda: None)) if wanted else nullcontext():
        yield


def _is_data(descriptors: Descriptors) -> bool:
    """Else it is a READ of generations."""
    return descriptors.shape[0] > 2 or int(descriptors[:, 2].sum()) > GENERATION_BYTES


_OVER = object()


class InstantTransport(LoopbackTransport):
    """Data READs are over when they are posted, and move nothing: what is left is planning, posting and committing."""

    def read(self, peer: str, descriptors: Descriptors) -> Any:
        return _OVER if _is_data(descriptors) else super().read(peer, descriptors)

    def poll(self, handle: Any) -> bool:
        return handle is _OVER or super().poll(handle)


class CutTransport:
    """A transport whose data READs have all their descriptors, of 16 bytes each: posting without the copy."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self.name = transport, transport.name
        self.reads = self.descriptors = 0

    def read(self, peer: str, descriptors: Descriptors) -> Any:
        self.reads += 1
        self.descriptors += len(descriptors)
        if _is_data(descriptors):
            descriptors = descriptors.copy()
            descriptors[:, 2] = 16
        return self._transport.read(peer, descriptors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

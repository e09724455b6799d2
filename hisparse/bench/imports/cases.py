"""What is measured: cases, their bars, and one run of each."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from hisparse.bench import children
from hisparse.bench.imports.engines import Engine, Setup, serve
from hisparse.bench.report import Row
from hisparse.pd.copies import copy_now
from hisparse.pd.generations import GENERATION_BYTES
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
        slot_pages: of a staging slot; None = an engine's default.
        control: without the copies, CPU time a page.
    """

    layout: str
    landing: Landing
    path: str
    source: str
    transport: str = "nixl"
    device: str = "cpu"
    runs: int = 8
    slot_pages: int | None = None
    control: bool = False

    @property
    def name(self) -> str:
        what = "control" if self.control else "bytes"
        return f"{what} {self.layout} {self.source} -> {self.landing.value} {self.path} runs {self.runs} {self.transport}"

    def prefill_side(self) -> tuple[str, ...]:
        """Cases that agree in it can use one prefill engine."""
        return self.layout, self.source, self.device, "process" if self.transport == "nixl" else "here"


def all_cases(device: str, slot_pages: int | None = None) -> list[Case]:
    host, resident = Landing.HOST, Landing.RESIDENT
    if device == "cuda":
        landings = ((host, "staged", "gpu"), (resident, "staged", "gpu"), (host, "staged", "host"), (host, "direct", "host"),
                    (resident, "staged", "host"))
        return [Case(layout="mla", landing=landing, path=path, source=source, device="cuda", runs=runs,
                     slot_pages=slot_pages)
                for landing, path, source in landings for runs in (32, 8, 1)]
    cases = [Case(layout=layout, landing=host, path=path, source=source, transport=transport, slot_pages=slot_pages)
             for layout in ("tiny", "mla") for transport in ("nixl", "loopback") for source in ("gpu", "host")
             for path in ("staged", "direct")]
    cases += [Case(layout=layout, landing=resident, path="staged", source="gpu") for layout in ("tiny", "mla")]
    cases += [Case(layout="mla", landing=host, path=path, source=source, runs=1)
              for source in ("gpu", "host") for path in ("staged", "direct")]
    controls = [replace(case, control=True) for case in cases if case.transport == "nixl"]
    return cases + [replace(case, transport="none") for case in controls] + [case for case in controls if case.runs > 1]


def measure_all(cases: Sequence[Case], *, quick: bool, repeats: int) -> Iterator[Row]:
    """Rows, case by case; cases with the same engines share them."""
    num_pages = QUICK_PAGES if quick else PAGES
    for _, group in itertools.groupby(sorted(cases, key=Case.prefill_side), key=Case.prefill_side):
        alike = list(group)
        with Prefill(alike[0], num_pages) as prefill:
            for _, same in itertools.groupby(alike, key=lambda case: replace(case, runs=0)):
                yield from _measure(list(same), prefill, num_pages, quick, repeats)


def _measure(cases: Sequence[Case], prefill: Prefill, num_pages: int, quick: bool, repeats: int) -> Iterator[Row]:
    """Cases that differ in `runs` only."""
    case = cases[0]
    near = Setup(name="d", layout=case.layout, device="cuda:0" if case.device == "cuda" else "cpu", num_pages=num_pages,
                 resident=case.landing is Landing.RESIDENT, host=case.landing is Landing.HOST, config=config_of(case))
    num_bytes = num_pages * (near.kv.host_block_bytes + near.kv.indexer_page_bytes)
    with _without_copies(case.control):
        engine = Engine(near, make_transport=prefill.transport_of(case))
        try:
            for case in cases:
                times = _times(case, prefill, engine, repeats)
                if case.control:
                    yield _control_row(case, times, num_pages, quick, prefill.last)
                    continue
                copies = (memcpy_s(num_bytes), kernel_copy_s(num_bytes)) if case.device == "cpu" else None
                yield _bytes_row(case, times, num_bytes, quick, copies)
        finally:
            engine.close()


def _times(case: Case, prefill: Prefill, engine: Engine, repeats: int) -> list[float]:
    """Seconds of each import after the first, whose every byte is compared."""
    times = []
    for i in range(repeats + 1):
        name, seed = f"{case.name}-{i}", 10 + i
        source = prefill.setup.pages(seed, case.runs)
        target = engine.setup.pages(50 + i, 1 if case.runs == 1 else engine.setup.num_pages)
        seconds, busy_s = engine.load(name, prefill.grant(name, seed, case.runs), target, case.landing)
        if i == 0 and not case.control:
            engine.assert_imported(source, target, case.landing, from_host=case.source == "host")
        if i:
            times.append(busy_s if case.control else seconds)
    return times


def config_of(case: Case) -> dict[str, Any]:
    return {"transport": "nixl" if case.transport == "nixl" else "loopback", "landing_path": case.path,
            "staging_slot_pages": case.slot_pages}


def _control_row(case: Case, times: list[float], num_pages: int, quick: bool, transport: Transport | None) -> Row:
    per_page = [seconds / num_pages * 1e6 for seconds in times]
    detail = {}
    if isinstance(transport, CutTransport):
        imports = len(times) + 1
        detail = {"reads": transport.reads / imports, "descriptors": transport.descriptors / imports}
    return Row(case=case.name, value=statistics.median(per_page), unit="us/page", best=min(per_page), max=max(per_page),
               bar=None if quick or case.transport == "nixl" else CONTROL_US, detail=detail)


def _bytes_row(case: Case, times: list[float], num_bytes: int, quick: bool, copies: tuple[float, float] | None) -> Row:
    """`copies`: fewest seconds of a memcpy and of the kernel's copy of the same bytes; then the fastest import counts, too."""
    rates = [num_bytes / seconds / 1e9 for seconds in times]
    detail = {"MB": num_bytes / 1e6, "ms": statistics.median(times) * 1e3}
    bar: float | None = HOST_GB_S if case.landing is Landing.HOST else RESIDENT_GB_S
    ceiling = None
    if copies is not None:
        memcpy, kernel = (num_bytes / seconds / 1e9 for seconds in copies)
        bar, ceiling = MEMCPY_SHARE * memcpy, (memcpy, "x memcpy")
        detail["kernel copy GB/s"] = kernel
    if quick or (case.device == "cuda" and (case.runs == 1 or case.source == "host")):
        bar = None
    value = statistics.median(rates) if copies is None else max(rates)
    return Row(case=case.name, value=value, unit="GB/s", bar=bar, more_is_better=True, yardstick=ceiling,
               best=max(rates), max=min(rates), detail=detail)


def _shared(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory of the kind that host pools are: shared, in small pages, all of which exist."""
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    memory[:] = 1
    return memory


def memcpy_s(num_bytes: int) -> float:
    """One thread copies so many bytes; the fastest of many, as it is for imports on a CPU that others use, too."""
    source, target = _shared(num_bytes), _shared(num_bytes)
    times = []
    for _ in range(12):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return min(times)


class _Piece(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]


def kernel_copy_s(num_bytes: int, piece_bytes: int = 336 << 10) -> float:
    """The same by the kernel's copy between processes (process_vm_readv), which is what UCX reads with inside a machine."""
    source, target = _shared(num_bytes), _shared(num_bytes)
    libc, times = ctypes.CDLL(None, use_errno=True), []
    for _ in range(6):
        start = time.perf_counter()
        for at in range(0, num_bytes - piece_bytes + 1, piece_bytes):
            near, far = _Piece(target.ctypes.data + at, piece_bytes), _Piece(source.ctypes.data + at, piece_bytes)
            if libc.process_vm_readv(os.getpid(), ctypes.byref(near), 1, ctypes.byref(far), 1, 0) != piece_bytes:
                raise OSError(ctypes.get_errno(), "process_vm_readv")
        times.append(time.perf_counter() - start)
    return min(times)


class Prefill:
    """The prefill side of some cases: a process of its own with NIXL, or an engine in this one.

    Attributes:
        last: the decode side's transport of the latest case, where the benchmark made it.
    """

    def __init__(self, case: Case, num_pages: int) -> None:
        device = f"cuda:{torch.cuda.device_count() - 1}" if case.device == "cuda" else "cpu"
        self.setup = Setup(name="p", layout=case.layout, device=device, num_pages=num_pages, resident=case.source == "gpu",
                           host=case.source == "host", config={**config_of(case), "staging_slots": 1})
        self.last: Transport | None = None
        self._engine: Engine | None = None
        self._network = LoopbackNetwork()
        if case.transport != "nixl":
            self._engine = Engine(self.setup, make_transport=lambda name: LoopbackTransport(name, network=self._network))
            self._engine.fill()
            return
        context = mp.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far, self.setup), daemon=True)
        children.start(self._process)
        assert self._pipe.poll(120) and self._pipe.recv() == "ready", "the prefill process did not start"

    def __enter__(self) -> Prefill:
        return self

    def grant(self, name: str, seed: int, runs: int) -> dict[str, Any]:
        if self._engine is not None:
            return self._engine.grant(name, self.setup.pages(seed, runs))
        self._pipe.send(("grant", name, seed, runs))
        assert self._pipe.poll(60), "no answer from the prefill process"
        return dict(self._pipe.recv())

    def transport_of(self, case: Case) -> Callable[[str], Transport] | None:
        """What makes the decode side's transport; None = as an engine does."""
        if case.transport == "nixl" and not case.control:
            return None

        def make(name: str) -> Transport:
            if case.transport == "nixl":
                from hisparse.pd.nixl import READ_THREADS, NixlTransport

                self.last = CutTransport(NixlTransport(name, threads=READ_THREADS if self.setup.device == "cpu" else 0))
            else:
                kind = LoopbackTransport if case.transport == "loopback" else InstantTransport
                self.last = kind(name, network=self._network)
            return self.last

        return make

    def __exit__(self, *error: object) -> None:
        if self._engine is not None:
            self._engine.close()
            return
        with suppress(OSError):
            self._pipe.send(("stop",))
            self._pipe.poll(30)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()


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

"""What is measured: cases, their bars, and one run of each."""

from __future__ import annotations

import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.imports.engines import Engine, Setup, layout_of, serve
from benchmarks.report import Row
from hisparse.pd.generations import GENERATION_BYTES
from hisparse.pd.loopback import LoopbackNetwork, LoopbackTransport
from hisparse.pd.transport import Descriptors, Transport
from hisparse.types import Landing

PAGES, QUICK_PAGES = 2048, 64
CHUNK_PAGES = 8
"""Pages of a prefill chunk of 512 tokens: so long are runs of blocks on a prefill engine. An admission takes all at once."""
MEMCPY_SHARE, CONTROL_US = 0.5, 3.0
HOST_GB_S, RESIDENT_GB_S = 40.0, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One import. `source`: where prefill holds the pages, "gpu" (its packed allocation) or "host"."""

    layout: str
    landing: Landing
    path: str
    source: str
    transport: str = "nixl"
    device: str = "cpu"
    scattered: bool = False
    control: bool = False

    @property
    def name(self) -> str:
        place = "scattered" if self.scattered else "runs"
        what = "control" if self.control else "bytes"
        return f"{what} {self.layout} {self.source} -> {self.landing.value} {self.path} {place} {self.transport}"

    @property
    def prefill_device(self) -> str:
        return "cpu" if self.device == "cpu" else f"cuda:{torch.cuda.device_count() - 1}"


def all_cases(device: str) -> list[Case]:
    host, resident = Landing.HOST, Landing.RESIDENT
    if device == "cuda":
        cases = [Case(layout="mla", landing=landing, path=path, source=source, device="cuda", scattered=scattered)
                 for source in ("gpu", "host") for landing, path in ((host, "staged"), (resident, "staged"), (host, "direct"))
                 for scattered in (False, True) if not (source == "gpu" and path == "direct")]
        return cases
    cases = [Case(layout=layout, landing=host, path=path, source=source, transport=transport)
             for layout in ("tiny", "mla") for transport in ("nixl", "loopback") for source in ("gpu", "host")
             for path in ("staged", "direct")]
    cases += [Case(layout=layout, landing=resident, path="staged", source="gpu") for layout in ("tiny", "mla")]
    cases += [Case(layout="mla", landing=host, path=path, source=source, scattered=True)
              for source in ("gpu", "host") for path in ("staged", "direct")]
    return cases + [replace(case, control=True) for case in cases if case.transport == "nixl"]


def measure(case: Case, *, quick: bool, repeats: int) -> list[Row]:
    num_pages, layout = QUICK_PAGES if quick else PAGES, layout_of(case.layout)
    slot_pages = 64 if case.device == "cuda" else 4
    config: dict[str, Any] = {"transport": case.transport, "landing_path": case.path, "staging_slots": 8,
                              "staging_slot_pages": slot_pages}
    far = Setup(name="p", layout=case.layout, device=case.prefill_device, num_pages=num_pages, resident=case.source == "gpu",
                host=case.source == "host", runs=1 if case.scattered else CHUNK_PAGES, config={**config, "staging_slots": 1})
    near = Setup(name="d", layout=case.layout, device="cuda:0" if case.device == "cuda" else "cpu", num_pages=num_pages,
                 resident=case.landing is Landing.RESIDENT, host=case.landing is Landing.HOST,
                 runs=1 if case.scattered else num_pages, config=config)
    num_bytes = num_pages * (layout.host_block_bytes + layout.indexer_page_bytes)
    copy_s = memcpy_s(num_bytes) if case.device == "cpu" else None
    transports: list[Transport] = []
    with _prefill(case, far, transports) as (grant, make_transport):
        engine = Engine(near, make_transport=make_transport)
        try:
            times = []
            for i in range(repeats + 1):
                source, target = far.pages(10 + i), near.pages(50 + i)
                seconds = engine.load(f"r{i}", grant(f"r{i}", 10 + i), target, case.landing)
                if i == 0 and not case.control:
                    engine.assert_imported(source, target, case.landing, from_host=case.source == "host")
                if i:
                    times.append(seconds)
        finally:
            engine.close()
    return [_row(case, times, num_pages, num_bytes, copy_s, quick, transports)]


def _row(case: Case, times: list[float], num_pages: int, num_bytes: int, copy_s: float | None, quick: bool,
         transports: list[Transport]) -> Row:
    middle, best, worst = statistics.median(times), min(times), max(times)
    counted = next((t for t in transports if isinstance(t, CutTransport)), None)
    if case.control:
        imports = len(times) + 1
        detail = {"reads": counted.reads / imports, "descriptors": counted.descriptors / imports} if counted else {}
        return Row(case=case.name, value=middle / num_pages * 1e6, unit="us/page", bar=None if quick else CONTROL_US,
                   best=best / num_pages * 1e6, max=worst / num_pages * 1e6, detail=detail)
    bar: float | None = HOST_GB_S if case.landing is Landing.HOST else RESIDENT_GB_S
    ceiling = None
    if copy_s is not None:
        bar = MEMCPY_SHARE * num_bytes / copy_s / 1e9
        ceiling = (num_bytes / copy_s / 1e9, "x memcpy")
    if quick or (case.device == "cuda" and (case.scattered or case.source == "host")):
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


@contextmanager
def _prefill(case: Case, setup: Setup, transports: list[Transport]) -> Iterator[tuple[
        Callable[[str, int], dict[str, Any]], Callable[[str], Transport] | None]]:
    """A function that grants, and what makes the decode side's transport."""
    if case.transport == "loopback":
        network = LoopbackNetwork()
        engine = Engine(setup, make_transport=lambda name: LoopbackTransport(name, network=network))
        engine.fill()
        try:
            yield (lambda name, seed: engine.grant(name, setup.pages(seed)),
                   lambda name: LoopbackTransport(name, network=network))
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


class CutTransport:
    """A transport whose data READs have all their descriptors, of 16 bytes each: posting without the copy."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self.name = transport, transport.name
        self.reads = self.descriptors = 0

    def read(self, peer: str, descriptors: Descriptors) -> Any:
        self.reads += 1
        self.descriptors += len(descriptors)
        if descriptors.shape[0] > 2 or descriptors[0, 2] > GENERATION_BYTES:  # else: generations
            descriptors = descriptors.copy()
            descriptors[:, 2] = 16
        return self._transport.read(peer, descriptors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

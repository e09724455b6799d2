"""Steps of a decode engine whose requests come and go: what Python's garbage collector takes of them.

In CPU time of the thread: the worst of many steps would else be the one in which something else had the core.
"""

from __future__ import annotations

import gc
import statistics
import time

import hisparse.actors.coordinator
import hisparse.actors.handles
import hisparse.engine.core  # noqa: F401  # with Ray, what a coordinator's process holds
from hisparse.bench.control_plane.context import Collections, Context, K, size
from hisparse.bench.control_plane.rig import Rig, prompt
from hisparse.bench.report import Row
from hisparse.engine.garbage import IdleCollector
from hisparse.types import Landing

GUEST_BLOCKS = 4096


def churn(context: Context) -> list[Row]:
    """The worst step, by Python's own rules and as an engine's coordinator has it; in each step one request in 256 ends."""
    sizes = (256,) if context.quick else (1024, 2048)
    return [_worst(context, num_requests, engine=engine) for num_requests in sizes for engine in (False, True)]


def _worst(context: Context, num_requests: int, *, engine: bool) -> Row:
    load = context.load(num_requests, 8 * K, spare_blocks=GUEST_BLOCKS)
    steps = 8 if context.quick else 300
    collector = IdleCollector()
    gc.collect()
    if engine:
        collector.begin()
    try:
        guests = _Guests(Rig(context.layout, load))
        times = []
        with Collections(time.thread_time) as collections:
            for _ in range(steps):
                times.append(guests.step() * 1e3)
                if engine:
                    collector.worked()
        within_ms = collections.longest_s * 1e3
        with Collections(time.thread_time) as collections:
            gc.collect()
    finally:
        if engine:
            collector.end()
    guests.rig.manager.check()
    name = f"come and go, {'engine' if engine else 'Python'} collects, {load.num_requests}x{size(load.num_tokens)}"
    return context.row(f"worst step, {name}", max(times), "ms", best=statistics.median(times), detail={
        "longest_collection_within_ms": within_ms, "full_collection_at_rest_ms": collections.longest_s * 1e3, "steps": steps})


class _Guests:
    """Ends some of the requests of a rig in each step, the oldest, and lets as many new ones arrive by HOST landings."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._num = max(rig.load.num_requests // 256, 1)
        self._arriving: list[str] = []
        self._count = 0

    def step(self) -> float:
        """Seconds of CPU, without making the prompts."""
        manager, rig = self.rig.manager, self.rig
        prompts = [prompt(rig.load.num_tokens, 1_000_000 + self._count + i) for i in range(self._num)]
        began_s = time.thread_time()
        for request_id in self._arriving:
            rig.computed[request_id] = manager.finish_load(request_id, failed=False)
            manager.extend(request_id, [1])
            rig.ids.append(request_id)
        self._arriving = []
        for tokens in prompts:
            old = rig.ids.pop(0)
            manager.close(old)
            del rig.computed[old]
            self._arrive(tokens)
        rig.step()
        return time.thread_time() - began_s

    def _arrive(self, tokens: list[int]) -> None:
        self._count += 1
        manager, request_id = self.rig.manager, f"guest-{self._count}"
        manager.open(request_id, tokens, max_tokens=1 << 12)
        hit = manager.prefix(request_id)
        if manager.admit(request_id, hit, landing=Landing.HOST, import_tokens=len(tokens), chunk_tokens=1) is None:
            raise RuntimeError(f"{request_id} found no room; {manager.stats()}")
        self._arriving.append(request_id)

"""Engines' residency reports without engines: made by the real sample from scripted requests."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

from hisparse.cache.report import RequestTiers
from hisparse.cache.residency import PageState
from hisparse.cache.spills import PendingTransfer
from hisparse.cache.values import CacheStats
from hisparse.engine.residency import EndedRequest, RequestSample, ResidencySample
from hisparse.engine.stats import EngineStats
from hisparse.types import ResolveStats

S = PageState
STARTED_S = 1_796_000_000.0


class ScriptedEngine:
    """One engine whose requests decode: each call of `report` is a second later.

    Args:
        names: ids of its requests; default made up. tenants: dealt in turn.
    """

    def __init__(self, name: str = "decode-3fa9c1d2e4b5", *, role: str = "decode", requests: int = 3, longest_pages: int = 60,
                 names: list[str] | None = None, tenants: tuple[str, ...] = (), seed: int = 0) -> None:
        self.name, self.role, self.longest = name, role, longest_pages
        self.random = random.Random(seed)
        made_up = [f"cmpl-{self.random.randbytes(16).hex()}-0" for _ in range(requests)]
        self.names = made_up if names is None else names
        self.tenants = {item: tenants[i % len(tenants)] for i, item in enumerate(self.names) if tenants}
        self.pages = [longest_pages if not i else 1 + self.random.randrange(longest_pages) for i in range(len(self.names))]
        self.rows = [ResolveStats() for _ in self.names]
        self.second = 0
        self.health: dict[str, Any] = {"ok": True, "reason": ""}
        self.landings: list[dict[str, Any]] = []
        if role == "decode" and longest_pages:
            for i, item in enumerate(self.names[:20]):
                failed = i % 7 == 2
                self.landings.append({
                    "number": i + 1, "at_s": STARTED_S - 3 * i, "request_id": item, "peer": "prefill-90d1f3a2c4e6",
                    "landing": "host" if i % 3 == 1 else "resident", "tokens": 64 * self.pages[i],
                    "num_bytes": 369664 * self.pages[i], "seconds": 0.02 + 0.004 * i, "failure": "generation" if failed else "",
                    "reason": "page 12 of host blocks was reused while it was read" if failed else ""})

    def tiers(self, i: int) -> RequestTiers | None:
        """Of four requests, one is resident, two live on the host with a hot region, one imports; a few wait."""
        pages, kind = self.pages[i], i % 4
        if i and i % 29 == 0:
            return None
        if kind == 0:
            states = [S.CLEAN_PINNED] * (pages - 1) + [S.GPU_ONLY]
        elif kind == 3:
            states = [S.IMPORTING] * pages
        else:
            states = [S.HOST_ONLY if p % (3 + kind) else S.CLEAN_LOOSE for p in range(pages)]
            states[-2:] = [S.SPILLING, S.GPU_ONLY][-len(states[-2:]):]
        return RequestTiers(64 * pages, bytes(states), (5, 4) if kind in (1, 2) else ())

    def sample(self) -> ResidencySample:
        self.second += 1
        ids = random.Random(5)
        samples, states = [], bytearray()
        for i, name in enumerate(self.names):
            tiers = self.tiers(i)
            states += tiers.states if tiers else b""
            state = "waiting" if tiers is None else "loading" if S.IMPORTING in tiers.states else "running"
            if state == "running":
                miss = self.random.randrange(60) if tiers and tiers.hot_blocks else 0
                self.rows[i] += ResolveStats(resident_rows=300 if miss else 900, hot_rows=12 * miss, miss_rows=miss)
            landing = ("resident", "host")[i % 2] if self.role == "decode" and state != "waiting" else ""
            tokens = 64 * self.pages[i]
            samples.append(RequestSample(name, state, tokens - 9, tokens + self.second, landing, i % 5 // 4, self.rows[i],
                                         tiers))
        counts = {state.name.lower(): states.count(state) for state in S if state is not S.NONE}
        device = sum(counts[n] for n in ("gpu_only", "spilling", "clean_pinned"))
        hot = 9 * sum(bool(s.tiers and s.tiers.hot_blocks) for s in samples)
        total = 3 * device + hot + counts["clean_loose"] + 40
        host = len(states) - counts["gpu_only"]
        cache = CacheStats(
            device_blocks_total=total, device_blocks_free=total - 3 * device - hot, device_blocks_loose=counts["clean_loose"],
            host_blocks_total=host + 100, host_blocks_free=100, host_pages_published=host // 2, hot_seats=hot // 9,
            hot_blocks=hot, transfers_in_flight=counts["spilling"], spills_completed=40 * self.second,
            **{f"pages_{name}": count for name, count in counts.items()})
        state_of, decodes = [s.state for s in samples], self.role == "decode" and bool(self.names)
        stats = EngineStats(
            engine_id=self.name, role=self.role, steps=self.second, step_seconds={}, held=0, finished=7, preemptions=1,
            running=state_of.count("running"), waiting=state_of.count("waiting"), loading=state_of.count("loading"),
            admissions=len(samples), resident_landings=12 * decodes, host_landings=6 * decodes,
            import_failures=3 * decodes, indexer_loads=0,
            local_prefill_tokens=0, generated_tokens=41 * self.second * bool(self.names),
            resolve=sum(self.rows, ResolveStats()), cache={},
            pd={"import_bytes": 7_310_000_000 * decodes, "imports_in_flight": state_of.count("loading")})
        pending = tuple(PendingTransfer(s.request_id, len(s.tiers.states) - 2, "enqueued", 0.004 * (i + 1))
                        for i, s in enumerate(samples) if s.tiers and S.SPILLING in s.tiers.states)[:16]
        ended = tuple(
            EndedRequest(f"cmpl-{ids.randbytes(16).hex()}-0", STARTED_S - 5 * i, ("stop", "length")[i % 2], 900 + i, 16,
                         64 * i, "host", 0, (100, 50, i))
            for i in range(6 if self.names else 0))
        return ResidencySample(stats=replace(stats, cache=asdict(cache)).asdict(), block_size=64, requests=samples,
                               groups=((13, 320), (11, 256)), pending=pending, landings=self.landings, ended=ended)

    def report(self) -> dict[str, Any]:
        return {"engine": self.name, "health": self.health, "tenants": self.tenants, **self.sample().report()}


def service(requests: int, *, longest_pages: int = 60, tenants: tuple[str, ...] = ()) -> Any:
    """A function that reports a decode engine with so many requests and an idle prefill engine."""
    engines = [ScriptedEngine(requests=requests, longest_pages=longest_pages, tenants=tenants),
               ScriptedEngine("prefill-90d1f3a2c4e6", role="prefill", requests=0)]
    return lambda: [engine.report() for engine in engines]

"""Where an engine's requests live: a sample taken between two steps, and its report as JSON types.

The sample copies a byte per page and a few counters, so that it costs the step path microseconds; what takes longer (counts,
strips) happens in `report`, on another thread. Request ids, sizes and times only: no prompt, no token, no salt.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hisparse.cache.report import RequestTiers
from hisparse.cache.residency import DURABLE, READABLE_ON_GPU, PageState
from hisparse.cache.spills import PendingTransfer
from hisparse.engine.request import Request
from hisparse.layout import KVCacheLayout
from hisparse.types import ResolveStats

STRIP_CELLS = 48
"""A strip shows a request's pages in at most so many cells."""
NUM_ENDED = NUM_PENDING = 16
MAX_REQUESTS = 256
"""Requests listed of one engine; the others are counted."""

_ON_DEVICE, _IMPORTING = (bytes([state in chosen for state in PageState]).ljust(256)
                          for chosen in (READABLE_ON_GPU, {PageState.IMPORTING}))
"""By state: 1 = it is one of those. For `bytes.translate`, which is faster than an index."""
_PAGE_STATES = bytes(PageState)


class RequestSample(NamedTuple):
    """What one open request was doing. `tiers`: None = it holds nothing (it waits)."""

    request_id: str
    state: str
    prompt_tokens: int
    tokens: int
    landing: str
    preemptions: int
    resolve: ResolveStats
    tiers: RequestTiers | None


class EndedRequest(NamedTuple):
    """How a request ended. `at_s`: Unix time. `reason`: a FinishReason's value, or "lease ended"."""

    request_id: str
    at_s: float
    reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    landing: str
    preemptions: int
    rows: tuple[int, int, int]
    """Selected rows that were resident, hot, missing."""


class EndedLog:
    """The last requests that ended. Keeps numbers, never a request."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._ended: deque[EndedRequest] = deque(maxlen=NUM_ENDED)

    def add(self, request: Request, reason: str) -> None:
        self._ended.append(EndedRequest(
            request.name, self._wall_clock(), reason, request.num_prompt_tokens, request.num_output_tokens,
            request.cached_tokens or 0, _landing(request), request.preemptions, _rows(request.resolve)))

    def newest(self) -> tuple[EndedRequest, ...]:
        return tuple(reversed(self._ended))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySample:
    """One engine at one moment.

    Attributes:
        stats: `EngineStats.asdict()`.
        groups: per hot group, layers and starting rows of a region. landings: newest first, see `LandingLog`.
    """

    stats: Mapping[str, Any]
    block_size: int
    requests: Sequence[RequestSample]
    groups: Sequence[tuple[int, int]]
    pending: Sequence[PendingTransfer]
    landings: Sequence[Mapping[str, Any]]
    ended: Sequence[EndedRequest]

    def report(self, max_requests: int = MAX_REQUESTS) -> dict[str, Any]:
        """JSON types only. Lists the requests that hold most pages; `requests_hidden` counts the others.

        Per request: id, state, tokens, pages by where they are (`device` readable on the GPU, `both` also durable on the
        host, `host` only there, `importing`, `spilling`), rows of its hot region over all groups, selected rows by tier, and
        `strip`: a character per cell of consecutive pages, "0" (none on the device) to "9" (all), "i" = being imported.
        """
        listed = heapq.nlargest(max_requests, self.requests, key=_num_pages)
        strips = draw_strips([sample.tiers.states if sample.tiers else b"" for sample in listed])
        stats, cache, pd = self.stats, self.stats["cache"], self.stats["pd"] or {}
        return {
            "role": stats["role"], "block_size": self.block_size,
            "open": {name: stats[name] for name in ("running", "waiting", "loading", "held")},
            "totals": {
                "finished": stats["finished"], "preemptions": stats["preemptions"], "tokens": stats["generated_tokens"],
                "steps": stats["steps"], "resident_landings": stats["resident_landings"],
                "host_landings": stats["host_landings"], "import_failures": stats["import_failures"],
                "import_bytes": pd.get("import_bytes", 0), "imports_in_flight": pd.get("imports_in_flight", 0),
                "spills": cache["spills_completed"], "spills_failed": cache["spills_failed"]},
            "rows": {"resident": stats["resolve"]["resident_rows"], "hot": stats["resolve"]["hot_rows"],
                     "miss": stats["resolve"]["miss_rows"]},
            "pools": _pools(cache),
            "pages": {"spilling": cache["pages_spilling"], "importing": cache["pages_importing"],
                      "device": sum(cache[f"pages_{name}"] for name in ("gpu_only", "spilling", "clean_pinned", "clean_loose")),
                      "host": cache["pages_host_only"]},
            "groups": self._groups(),
            "transfers": cache["transfers_in_flight"], "pending": [list(item) for item in self.pending],
            "landings": [dict(item) for item in self.landings], "ended": [item._asdict() for item in self.ended],
            "requests": [self._request(sample, strip) for sample, strip in zip(listed, strips, strict=True)],
            "requests_hidden": len(self.requests) - len(listed),
        }

    def _groups(self) -> list[dict[str, int]]:
        blocks = [0] * len(self.groups)
        for sample in self.requests:
            for g, count in enumerate(sample.tiers.hot_blocks if sample.tiers else ()):
                blocks[g] += count
        return [{"layers": layers, "start_rows": rows, "hot_blocks": count}
                for (layers, rows), count in zip(self.groups, blocks, strict=True)]

    def _request(self, sample: RequestSample, strip: str) -> dict[str, Any]:
        tiers = sample.tiers or RequestTiers(0, b"", ())
        counts = [tiers.states.count(state) for state in _PAGE_STATES]

        def pages(states: frozenset[PageState]) -> int:
            return sum(counts[state] for state in states)

        return {
            "id": sample.request_id, "state": sample.state, "prompt_tokens": sample.prompt_tokens, "tokens": sample.tokens,
            "landing": sample.landing, "preemptions": sample.preemptions, "pages": len(tiers.states),
            "device": pages(READABLE_ON_GPU), "both": pages(READABLE_ON_GPU & DURABLE),
            "host": counts[PageState.HOST_ONLY], "importing": counts[PageState.IMPORTING],
            "spilling": counts[PageState.SPILLING], "hot_rows": sum(tiers.hot_blocks) * self.block_size,
            "rows": _rows(sample.resolve), "strip": strip,
        }


def sample_request(request: Request, tiers: RequestTiers | None) -> RequestSample:
    """What the sample keeps of an open request."""
    return RequestSample(request.name, request.state.value, request.num_prompt_tokens, len(request.token_ids),
                         _landing(request), request.preemptions, request.resolve, tiers)


def group_facts(layout: KVCacheLayout, hot_rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Per hot group, its layers and the rows of a region at its start; () without HiSparse."""
    return tuple((len(group.layers), rows) for group, rows in zip(layout.hots, hot_rows))


def draw_strips(states: Sequence[bytes], cells: int = STRIP_CELLS) -> list[str]:
    """A strip per request, see `ResidencySample.report`; "" where it has no page.

    Args:
        states: a PageState per page. cells: at most so many characters.
    """
    pages = np.array([len(item) for item in states], np.int64)
    counts = np.minimum(pages, cells)
    if not counts.any():
        return [""] * len(states)
    flat = b"".join(states)
    cell = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # within its request
    first = np.repeat(np.cumsum(pages) - pages, counts) + cell * np.repeat(pages, counts) // np.repeat(counts, counts)
    size = np.diff(first, append=len(flat))
    on_device, importing = (np.add.reduceat(np.frombuffer(flat.translate(table), np.uint8), first, dtype=np.uint32)
                            .astype(np.int64) for table in (_ON_DEVICE, _IMPORTING))
    share = np.where(on_device == size, 9, np.where(on_device == 0, 0, 1 + on_device * 8 // (size + 1)))
    drawn = np.where(2 * importing >= size, ord("i"), ord("0") + share).astype(np.uint8).tobytes().decode()
    ends = np.cumsum(counts).tolist()
    return [drawn[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


def _pools(cache: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    total, free, loose = (cache[f"device_blocks_{name}"] for name in ("total", "free", "loose"))
    host_total, host_free = cache["host_blocks_total"], cache["host_blocks_free"]
    return {
        "device": {"total": total, "hot": cache["hot_blocks"], "pages": total - free - cache["hot_blocks"], "loose": loose,
                   "free": free - loose, "hot_regions": cache["hot_seats"]},
        "host": {"total": host_total, "pages": host_total - host_free, "free": host_free,
                 "reserved": cache["host_blocks_reserved"], "published": cache["host_pages_published"]},
    }


def _num_pages(sample: RequestSample) -> int:
    return len(sample.tiers.states) if sample.tiers is not None else -1


def _landing(request: Request) -> str:
    return request.landing.value if request.landing is not None else ""


def _rows(stats: ResolveStats) -> tuple[int, int, int]:
    return (stats.resident_rows, stats.hot_rows, stats.miss_rows)

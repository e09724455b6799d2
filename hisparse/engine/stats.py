"""An engine's gauges and counters, and how it counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hisparse.engine.request import Request
from hisparse.layout import KVCacheLayout
from hisparse.types import ResolveStats, StepResult, TierRows


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges now and counters since start.

    Attributes:
        step_seconds: where the turns of the loop went: "schedule" (who runs, admission, commands), "rank" (the slowest rank
            worked), "wire" (the rest of the wait for the ranks), "retire" (tokens, acknowledgements).
    """

    engine_id: str
    role: str
    steps: int
    step_seconds: dict[str, float]
    running: int
    waiting: int
    loading: int
    held: int
    finished: int
    preemptions: int
    admissions: int
    resident_landings: int
    host_landings: int
    import_failures: int
    indexer_loads: int
    local_prefill_tokens: int
    generated_tokens: int
    resolve: ResolveStats
    cache: dict[str, Any]
    pd: dict[str, Any] | None = None
    """PDStats; None when colocated."""
    indexer_store: dict[str, Any] | None = None
    """OffloadStats of the indexer pages on the host; None = there is no such store."""
    draining: bool = False
    """It takes no new request, because it is about to stop."""
    index_groups: tuple[dict[str, Any], ...] = ()
    """The rows of `resolve` by index group: its layers, and the fields of TierRows."""

    def asdict(self) -> dict[str, Any]:
        return asdict(self) | {"resolve": self.resolve._asdict()}


class Tally:
    """Counters since the start.

    Attributes:
        resolve: of all steps. finished: requests. generated: tokens. step_seconds: see `EngineStats`.
    """

    def __init__(self, layout: KVCacheLayout) -> None:
        self._index_groups = layout.shape.index_groups
        self._rows = np.zeros((len(self._index_groups), len(TierRows._fields)), dtype=np.int64)
        self.resolve = ResolveStats()
        self.finished = self.generated = 0
        self.step_seconds = dict.fromkeys(("schedule", "rank", "wire", "retire"), 0.0)

    def add_step(self, results: Sequence[StepResult], seats: Mapping[int, Request | None]) -> None:
        """Adds what rank 0 counted, also to the requests of its seats."""
        output = next((result.kv.get("hisparse") for result in results if result.rank == 0), None)
        if output is None:
            return
        self.resolve = self.resolve + output.stats
        if output.index_groups:
            self._rows += np.array(output.index_groups)
        for seat, stats in output.request_stats.items():
            request = seats.get(seat)
            if request is not None:
                request.resolve = request.resolve + stats

    def add_times(self, *, began_s: float, sent_s: float, answered_s: float, ended_s: float, rank_s: float) -> None:
        """Splits one step's time. Args: times on one clock; rank_s: seconds that the slowest rank worked."""
        seconds = self.step_seconds
        seconds["schedule"] += sent_s - began_s
        seconds["rank"] += rank_s
        seconds["wire"] += max(answered_s - sent_s - rank_s, 0.0)
        seconds["retire"] += ended_s - answered_s

    def index_groups(self) -> tuple[dict[str, Any], ...]:
        """Rows by index group: its layers, and the fields of TierRows."""
        return tuple({"layers": list(group.layers), **TierRows(*counts)._asdict()}
                     for group, counts in zip(self._index_groups, self._rows.tolist()))

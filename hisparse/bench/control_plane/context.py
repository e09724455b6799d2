"""One run of the benchmark: which shape, which size, and how its numbers become rows."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hisparse.bench.control_plane.rig import LAYOUTS, MAX_MODEL_LEN, Load
from hisparse.bench.report import Row, Yardsticks
from hisparse.layout import KVCacheLayout

BAR_FACTOR = {"glm-5.2": 1.0, "deepseek-v3.2": 2.5}
K = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One run on one shape. `quick`: tiny sizes, no bars."""

    shape: str
    quick: bool
    yardsticks: Yardsticks

    @property
    def layout(self) -> KVCacheLayout:
        return LAYOUTS[self.shape]()

    @property
    def max_model_len(self) -> int:
        return 16 * K if self.quick else MAX_MODEL_LEN

    @property
    def longest_tokens(self) -> int:
        """Of the prompts that are admitted: 1M."""
        return 4 * K if self.quick else MAX_MODEL_LEN

    def load(self, num_requests: int, num_tokens: int, **options: Any) -> Load:
        if self.quick:
            num_requests, num_tokens = max(2, num_requests // 128), 2 * K
        return Load(num_requests=num_requests, num_tokens=num_tokens, max_model_len=self.max_model_len, **options)

    def row(self, case: str, value: float, unit: str, *, bar: float | None = None, more_is_better: bool = False,
            **others: Any) -> Row:
        """A row whose bar is that of glm-5.2, for other shapes scaled; times are also given in dictionary lookups."""
        factor = BAR_FACTOR[self.shape]
        if bar is not None:
            bar = None if self.quick else bar / factor if more_is_better else bar * factor
        in_seconds = {"ms": 1e3, "us": 1e6, "us/page": 1e6}.get(unit)
        if in_seconds and "yardstick" not in others:
            others["yardstick"] = (self.yardsticks.lookup_ns * 1e-9 * in_seconds * 1000, "k lookups")
        return Row(case=f"{self.shape} {case}", value=value, unit=unit, bar=bar, more_is_better=more_is_better, **others)


def size(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}k"


def p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]


class Collections:
    """What the garbage collector takes while this is entered. `clock`: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.total_s = self.longest_s = self._began_s = 0.0

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        now = self._clock()
        if phase == "start":
            self._began_s = now
        else:
            self.total_s += now - self._began_s
            self.longest_s = max(self.longest_s, now - self._began_s)


class Stopwatch:
    """Named lists of milliseconds, and how much of them the garbage collector took."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = {}
        self.collector_ms: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls, and notes the time under `name`; once per repeat for each name."""
        with Collections() as collections:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            seconds = time.perf_counter() - start
        self.ms.setdefault(name, []).append(seconds * 1e3)
        self.collector_ms.setdefault(name, []).append(collections.total_s * 1e3)
        return result

    def row(self, context: Context, case: str, names: Sequence[str], bar: float | None = None, **detail: Any) -> Row:
        """The sum of the named parts of each repeat."""
        values = [sum(parts) for parts in zip(*(self.ms[name] for name in names), strict=True)]
        collector = [sum(parts) for parts in zip(*(self.collector_ms[name] for name in names), strict=True)]
        return context.row(case, statistics.median(values), "ms", bar=bar, best=min(values), max=max(values),
                           detail=detail | {"collector_ms": statistics.median(collector)})

    def total_s(self, name: str) -> float:
        return sum(self.ms[name]) / 1e3

    def median(self, name: str) -> float:
        return statistics.median(self.ms[name])

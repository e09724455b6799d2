"""An engine's statistics into metrics: gauges as they are, counters as what was added since the last time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hisparse.metrics.catalogue import CATALOGUE, ENGINE_UP, LOOP_AGE
from hisparse.metrics.metric import Kind, Metric
from hisparse.metrics.sinks import Sink

_READ = tuple(metric for metric in CATALOGUE if metric.readings)


class EngineFeed:
    """Of one engine. Call `update` about once a second, never per step: the step path knows nothing of metrics.

    Args:
        model, role, engine: values of the common labels.
    """

    def __init__(self, sink: Sink, *, model: str, role: str, engine: str) -> None:
        self._sink = sink
        self._labels = {"model": model, "role": role, "engine": engine}
        self._before: dict[tuple[str, tuple[str, ...]], float] = {}

    def update(self, stats: Mapping[str, Any]) -> None:
        """Takes `EngineCore.stats().asdict()`, or the same from /stats. What it lacks (no P/D connector) is left out."""
        for metric in _READ:
            for reading in metric.readings:
                for own, value in reading.values(stats):
                    if metric.kind is Kind.GAUGE:
                        self._sink.set(metric, value, self._with(metric, own))
                    else:
                        self._count(metric, own, value)

    def health(self, ok: bool, loop_age_s: float) -> None:
        """Known without the engine's help, also while a step is stuck."""
        self._sink.set(ENGINE_UP, float(ok), self._labels)
        self._sink.set(LOOP_AGE, loop_age_s, self._labels)

    def _count(self, metric: Metric, own: tuple[str, ...], value: float) -> None:
        key = (metric.name, own)
        before = self._before.get(key)
        if before is None or value != before:
            # Smaller than before: the engine began anew, and all of it is new.
            added = value if before is None or value < before else value - before
            self._sink.add(metric, added, self._with(metric, own))
        self._before[key] = value

    def _with(self, metric: Metric, own: tuple[str, ...]) -> dict[str, str]:
        return self._labels | dict(zip(metric.own, own, strict=True))

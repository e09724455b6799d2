"""Metrics through Ray: each node's agent exports them to Prometheus. The only door to `ray.util.metrics`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ray.util import metrics

from hisparse.config import ServeConfig
from hisparse.metrics.metric import Kind, Metric
from hisparse.metrics.sinks import NullSink, Sink


class RaySink:
    """Works inside a Ray actor, replica or driver. A value reaches the agent's page within Ray's report interval (10 s)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {}

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        made = self._of(metric)
        if value > 0:
            made.inc(value, tags=dict(labels))
        else:  # inc() refuses 0, but a series that is absent until its first event hides that event from increase()
            made._record(0.0, tags=dict(labels))

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._of(metric).set(value, tags=dict(labels))

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._of(metric).observe(value, tags=dict(labels))

    def _of(self, metric: Metric) -> Any:
        with self._lock:
            made = self._made.get(metric.name)
            if made is None:
                made = self._made[metric.name] = _make(metric)
            return made


def _make(metric: Metric) -> Any:
    if metric.kind is Kind.COUNTER:
        return metrics.Counter(metric.name, metric.help, metric.labels)
    if metric.kind is Kind.GAUGE:
        return metrics.Gauge(metric.name, metric.help, metric.labels)
    return metrics.Histogram(metric.name, metric.help, list(metric.buckets), metric.labels)


def make_sink(config: ServeConfig) -> Sink:
    """Ray's, or none with `serve.metrics_interval_s: 0`."""
    return RaySink() if config.metrics_interval_s else NullSink()

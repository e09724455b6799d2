"""Where metrics go: nowhere, or into memory, from which an embedder serves Prometheus' text. Ray's sink is `ray_sink`."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from typing import Protocol

from hisparse.metrics.metric import Kind, Metric


class Sink(Protocol):
    """Takes values of metrics. `labels` has a value for each of `metric.labels`. Thread-safe; never blocks."""

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Counts. 0 makes the series visible before its first event."""

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Sets a gauge."""

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """One more value of a histogram."""


class NullSink:
    """Keeps nothing."""

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None: ...
    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None: ...
    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None: ...


_Key = tuple[str, tuple[str, ...]]


class _Histogram:
    def __init__(self, buckets: int) -> None:
        self.counts = [0] * (buckets + 1)
        self.total = 0.0


class MemorySink:
    """Keeps the current values; for embedders without Ray, and for tests.

    Example:
        >>> sink = MemorySink()
        >>> feed = EngineFeed(sink, model="m", role="colocated", engine="e")
        >>> feed.update(core.stats().asdict())
        >>> sink.text()   # what a Prometheus endpoint answers
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}
        self._numbers: dict[_Key, float] = {}
        self._histograms: dict[_Key, _Histogram] = {}

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        if value < 0:
            raise ValueError(f"{metric.name} is a counter; it cannot go down by {-value}")
        with self._lock:
            key = self._key(metric, Kind.COUNTER, labels)
            self._numbers[key] = self._numbers.get(key, 0.0) + value

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        with self._lock:
            self._numbers[self._key(metric, Kind.GAUGE, labels)] = value

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        with self._lock:
            key = self._key(metric, Kind.HISTOGRAM, labels)
            histogram = self._histograms.setdefault(key, _Histogram(len(metric.buckets)))
            histogram.counts[bisect_left(metric.buckets, value)] += 1
            histogram.total += value

    def value(self, metric: Metric, **labels: str) -> float | None:
        """Of a counter or gauge; the number of values of a histogram. None = never reported."""
        with self._lock:
            key = self._key(metric, metric.kind, labels)
            histogram = self._histograms.get(key)
            return self._numbers.get(key) if histogram is None else float(sum(histogram.counts))

    def text(self) -> str:
        """Everything in Prometheus' text format, under the names that Ray exports."""
        with self._lock:
            lines = []
            for metric in self._metrics.values():
                lines += [f"# HELP {metric.exported} {metric.help}", f"# TYPE {metric.exported} {metric.kind.value}"]
                for (name, values), number in self._numbers.items():
                    if name == metric.name:
                        lines.append(f"{metric.exported}{_labels(metric, values)} {number:.17g}")
                for (name, values), histogram in self._histograms.items():
                    if name == metric.name:
                        lines += _histogram_lines(metric, values, histogram)
            return "\n".join([*lines, ""])

    def _key(self, metric: Metric, kind: Kind, labels: Mapping[str, str]) -> _Key:
        if metric.kind is not kind:
            raise ValueError(f"{metric.name} is a {metric.kind.value}, not a {kind.value}")
        if set(labels) != set(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, got {tuple(labels)}")
        self._metrics.setdefault(metric.name, metric)
        return metric.name, tuple(labels[name] for name in metric.labels)


def _labels(metric: Metric, values: tuple[str, ...], extra: str = "") -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(metric.labels, values)]
    return "{" + ",".join([*pairs, *([extra] if extra else [])]) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _histogram_lines(metric: Metric, values: tuple[str, ...], histogram: _Histogram) -> list[str]:
    lines, seen = [], 0
    for bound, count in zip([*map(str, metric.buckets), "+Inf"], histogram.counts):
        seen += count
        bucket = f'le="{bound}"'
        lines.append(f"{metric.exported}_bucket{_labels(metric, values, bucket)} {seen}")
    return [*lines, f"{metric.exported}_sum{_labels(metric, values)} {histogram.total:.17g}",
            f"{metric.exported}_count{_labels(metric, values)} {seen}"]

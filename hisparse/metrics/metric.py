"""What one metric is: name, kind, unit, labels, and where an engine's statistics have its values."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "ray_"
"""Ray puts it before every name it exports."""


class Kind(enum.Enum):
    """As Prometheus has them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Reading:
    """Where in an engine's statistics (`/stats`) the values of one metric are.

    Args:
        path: dotted; a part `*` stands for every key of a dictionary or index of a list, which becomes the value of the first
            of the metric's own labels.
        minus: path of a number to subtract. over: path of a number to divide by.
        label: value of the metric's last own label; "" where it has none, or where `*` gives it.
        known: keys of the dictionary that are reported as 0 while it lacks them.
    """

    path: str
    label: str = ""
    minus: str = ""
    over: str = ""
    known: tuple[str, ...] = ()

    def values(self, stats: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
        """(own labels, value) of everything that these statistics have; nothing where they have no such path."""
        own = (self.label,) if self.label else ()
        if "*" in self.path.split("."):
            yield from (((key, *own), value) for key, value in self._each(stats))
            return
        value = _at(stats, self.path)
        if value is None:
            return
        number = float(value) - float(_at(stats, self.minus) or 0.0 if self.minus else 0.0)
        if self.over:
            whole = float(_at(stats, self.over) or 0.0)
            number = number / whole if whole else 0.0
        yield own, number

    def _each(self, stats: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        before, _, behind = self.path.partition(".*")
        found = _at(stats, before)
        if found is None:
            return
        items = found.items() if isinstance(found, Mapping) else enumerate(found)
        inner = behind.removeprefix(".")
        values = ((str(key), _at(item, inner) if inner else item) for key, item in items)
        yield from (dict.fromkeys(self.known, 0.0) | {key: float(value) for key, value in values if value is not None}).items()

    def __str__(self) -> str:
        text = f"{self.path} - {self.minus}" if self.minus else self.path
        return f"({text}) / {self.over}" if self.over and self.minus else f"{text} / {self.over}" if self.over else text


def _at(stats: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(stats, Mapping) or part not in stats:
            return None
        stats = stats[part]
    return stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: as given to Ray. unit: of a value. help: one line.
        common: labels that the feed sets for all of its metrics. own: the label that tells this metric's series apart.
        buckets: upper bounds of a histogram.
        readings: () = observed when the event happens, not read from statistics.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    common: tuple[str, ...]
    own: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    readings: tuple[Reading, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return (*self.common, *self.own)

    @property
    def exported(self) -> str:
        """The name in Prometheus; a histogram's series add _bucket, _sum and _count."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"

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
        path: dotted; a last part `*` stands for every key of a dictionary, which becomes the value of the own label.
        minus: path of a number to subtract. over: path of a number to divide by.
        label: value of the metric's own label; "" where it has none, or where `*` gives it.
        known: keys of the dictionary that are reported as 0 while it lacks them.
    """

    path: str
    label: str = ""
    minus: str = ""
    over: str = ""
    known: tuple[str, ...] = ()

    def values(self, stats: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        """(own label, value) of everything that these statistics have; nothing where they have no such path."""
        if self.path.endswith(".*"):
            found = _at(stats, self.path[:-2])
            if found is not None:
                yield from ({key: 0.0 for key in self.known} | {str(key): float(value) for key, value in found.items()}).items()
            return
        value = _at(stats, self.path)
        if value is None:
            return
        number = float(value) - float(_at(stats, self.minus) or 0.0 if self.minus else 0.0)
        if self.over:
            whole = float(_at(stats, self.over) or 0.0)
            number = number / whole if whole else 0.0
        yield self.label, number

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

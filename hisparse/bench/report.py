"""Rows of a benchmark: yardsticks of the machine, the aligned table, and the files that are kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from hisparse.errors import ConfigError

ROOT = Path(__file__).parents[2]
COLUMNS = ("case", "value", "unit", "bar", "value/bar", "yardsticks", "best", "p90", "max", "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardsticks:
    """What this machine does in this run, so that results of different machines can be compared."""

    lookup_ns: float
    """One dictionary lookup in a plain Python loop, of keys that the processor's cache holds."""
    cold_lookup_ns: float
    """The same of keys all over the memory: rises when others use up the shared cache or the memory's bandwidth."""
    sha256_bytes_per_s: float

    @classmethod
    def measure(cls, repeats: int = 5) -> Yardsticks:
        """Medians of `repeats`: 1,000,000 lookups among 1,024 keys; 262,144 among as many, shuffled; SHA-256 over 32 MiB."""
        table, cold = {key: key for key in range(1024)}, {key: key for key in range(1 << 18)}
        keys, cold_keys = list(range(1024)) * 977, list(cold)
        random.Random(0).shuffle(cold_keys)
        data = bytes(32 << 20)
        lookup_s = statistics.median(_time_lookups(table, keys) for _ in range(repeats))
        cold_s = statistics.median(_time_lookups(cold, cold_keys) for _ in range(repeats))
        hash_s = statistics.median(_time_hash(data) for _ in range(repeats))
        return cls(lookup_ns=lookup_s / len(keys) * 1e9, cold_lookup_ns=cold_s / len(cold_keys) * 1e9,
                   sha256_bytes_per_s=len(data) / hash_s)


def _time_lookups(table: dict[int, int], keys: list[int]) -> float:
    start = time.perf_counter()
    for key in keys:
        table[key]
    return time.perf_counter() - start


def _time_hash(data: bytes) -> float:
    start = time.perf_counter()
    hashlib.sha256(data).digest()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number.

    Attributes:
        bar: the number to reach, or None. more_is_better: the bar is a least value, not a greatest one.
        yardstick: the ceiling or baseline of the same run in the unit of `value`, and its name.
        best, p90, max: of the same measurement, in the same unit. detail: whatever else was seen.
        around: the machine's yardsticks before and after.
    """

    case: str
    value: float
    unit: str
    bar: float | None = None
    more_is_better: bool = False
    yardstick: tuple[float, str] | None = None
    best: float | None = None
    p90: float | None = None
    max: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    around: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """At most 1 when the bar is reached."""
        if self.bar is None:
            return None
        return self.bar / self.value if self.more_is_better else self.value / self.bar

    @property
    def ok(self) -> bool | None:
        return None if self.ratio is None else self.ratio <= 1

    @property
    def yardsticks(self) -> float | None:
        """Value in units of its yardstick."""
        return None if self.yardstick is None else self.value / self.yardstick[0]

    def cells(self) -> tuple[str, ...]:
        bar = "" if self.bar is None else f"{'>=' if self.more_is_better else '<='} {_number(self.bar)}"
        yard = "" if self.yardstick is None else f"{_number(self.yardsticks)} {self.yardstick[1]}"
        verdict = {None: "", True: "yes", False: "NO"}[self.ok]
        return (self.case, _number(self.value), self.unit, bar, _number(self.ratio), yard, _number(self.best),
                _number(self.p90), _number(self.max), verdict)

    def asdict(self) -> dict[str, Any]:
        return {
            "case": self.case, "value": self.value, "unit": self.unit, "bar": self.bar, "ratio_to_bar": self.ratio,
            "ok": self.ok, "ceiling": self.yardstick[0] if self.yardstick else None,
            "ceiling_name": self.yardstick[1] if self.yardstick else None, "ratio_to_ceiling": self.yardsticks,
            "best": self.best, "p90": self.p90, "max": self.max, **self.detail, **self.around,
        }


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


Result = tuple[dict[str, Any], list[Row]]
"""Facts of a run, and its rows."""


def table(rows: Sequence[Row]) -> str:
    """An aligned table that is also valid Markdown."""
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def details(rows: Sequence[Row]) -> str:
    """What each measurement saw besides its number, one line per row."""
    return "\n".join(
        f"- {row.case}: " + ", ".join(f"{name} {_number(value) if isinstance(value, (int, float)) else value}"
                                      for name, value in row.detail.items())
        for row in rows if row.detail)


def facts(bench: str, yardsticks: Yardsticks | None = None) -> dict[str, Any]:
    """Where, when and with what the numbers were measured. No yardsticks: a GPU benchmark, which has ceilings of its own."""
    gpu = _gpu() if yardsticks is None else {}
    host = {} if yardsticks is None else {
        "lookup_ns": round(yardsticks.lookup_ns, 2), "cold_lookup_ns": round(yardsticks.cold_lookup_ns, 2),
        "sha256_mb_per_s": round(yardsticks.sha256_bytes_per_s / 1e6)}
    return {
        "bench": bench, "date": time.strftime("%Y-%m-%d"), "hardware": f"{_cpu_model()}, {os.cpu_count()} cores", **gpu,
        "python": platform.python_version(), "commit": _commit(),
        "command": shlex.join(["hisparse", *sys.argv[1:]]),
        "load_average": os.getloadavg()[0], **host,
    }


def _gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"gpu": "none"}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__}


def write(path: Path, header: dict[str, Any], rows: Sequence[Row]) -> None:
    """One JSON object a line, each with the facts of the run; and a readable table beside it (suffix .md)."""
    path.write_text("".join(json.dumps(header | row.asdict()) + "\n" for row in rows))
    head = "\n".join(f"- {name}: {value}" for name, value in header.items() if name != "bench")
    path.with_suffix(".md").write_text(f"# {header['bench']}\n\n{head}\n\n{table(rows)}\n\n{details(rows)}\n")


def missed(rows: Sequence[Row]) -> list[str]:
    """Cases whose bar was not reached."""
    return [row.case for row in rows if row.ok is False]


def chosen(option: str, given: Sequence[str], known: Collection[str]) -> list[str]:
    """The given names, or all that are known. Raises ConfigError for another one; lists them."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{option} {name}: there are {', '.join(known)}")
    return list(dict.fromkeys(given)) or list(known)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _commit() -> str:
    """HISPARSE_COMMIT where the tree travelled without its history; the version where hisparse is installed without a tree."""
    if os.environ.get("HISPARSE_COMMIT"):
        return os.environ["HISPARSE_COMMIT"]
    if not (ROOT / ".git").exists():
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"hisparse {metadata.version('hisparse')}, installed"
        return "unknown"

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")

"""A trace file: the selections of some layers over some steps, as numpy arrays in one `.npz`.

| array | dtype, shape | content |
|---|---|---|
| `version` | int64 [] | 1 |
| `names` | unicode [series] | of each series: a kind of layer ("sticky"), or what was recorded ("request 7, layer 12") |
| `positions` | int32 [series, steps, top_k] | distinct positions that a step selects, as the indexer ordered them; -1 = none |
| `lengths` | int64 [series, steps] | tokens of the sequence in that step, above every position; 0 = the series has ended |
| `source` | unicode [] | where it comes from: the command or the recorder, in words |

A *series* is one layer that owns an indexer, of one request. Files hold no pickled objects and are read without any.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparse.errors import ConfigError

VERSION = 1
ARRAYS = {"version": 0, "names": 1, "positions": 3, "lengths": 2, "source": 0}
"""Dimensions of each array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One layer of one request.

    Attributes:
        steps: distinct positions of each step, int64 [<= top_k]. lengths: tokens of the sequence in each step.
    """

    name: str
    steps: tuple[NDArray[np.int64], ...]
    lengths: tuple[int, ...]

    @property
    def num_positions(self) -> int:
        """Above every position."""
        return max(self.lengths, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a trace file holds."""

    series: tuple[Series, ...]
    source: str

    def save(self, path: Path) -> None:
        """Writes the file, which must be named `*.npz`.

        Raises:
            ConfigError: another name, or the file cannot be written.
        """
        check_name(path)
        num_steps = max((len(series.steps) for series in self.series), default=0)
        top_k = max((len(step) for series in self.series for step in series.steps), default=0)
        positions = np.full((len(self.series), num_steps, top_k), -1, dtype=np.int32)
        lengths = np.zeros((len(self.series), num_steps), dtype=np.int64)
        for i, series in enumerate(self.series):
            lengths[i, : len(series.lengths)] = series.lengths
            for j, step in enumerate(series.steps):
                positions[i, j, : len(step)] = step
        names = np.array([series.name for series in self.series], dtype=np.str_)
        try:
            np.savez_compressed(path, version=np.int64(VERSION), names=names, positions=positions, lengths=lengths,
                                source=np.array(self.source, dtype=np.str_))
        except OSError as error:
            raise ConfigError(f"cannot write the trace {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Reads a file and checks all of it.

        Raises:
            ConfigError: unreadable, no trace, of another version, or inconsistent; says where.
        """
        try:
            found = np.load(path, allow_pickle=False)
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise ConfigError(f"{path} is no selection trace but one array; 'hisparse trace synth' makes a trace")
            with found:
                if set(ARRAYS) - set(found.files):
                    raise ConfigError(f"{path} is no selection trace: it lacks some of {', '.join(ARRAYS)}; "
                                      "'hisparse trace synth' makes one")
                data = {name: found[name] for name in ARRAYS}
        except ConfigError:
            raise
        except OSError as error:
            raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from error
        except (ValueError, zipfile.BadZipFile, EOFError) as error:
            raise ConfigError(f"{path} is no selection trace: {error}") from error
        _check(path, data)
        series = []
        for name, rows, lengths in zip(data["names"].tolist(), data["positions"], data["lengths"].tolist(), strict=True):
            alive = [j for j, length in enumerate(lengths) if length > 0]
            series.append(Series(name=name, steps=tuple(rows[j][rows[j] >= 0].astype(np.int64) for j in alive),
                                 lengths=tuple(lengths[j] for j in alive)))
        return cls(series=tuple(series), source=str(data["source"]))


def check_name(path: Path) -> None:
    """Raises ConfigError unless a trace may be written to `path`."""
    if path.suffix != ".npz":
        raise ConfigError(f"a trace is a .npz file, got {path}; name it {path.with_suffix('.npz')}")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write the trace {path}: there is no directory {path.parent}")


def _check(path: Path, data: dict[str, NDArray[Any]]) -> None:
    for name, dimensions in ARRAYS.items():
        if data[name].ndim != dimensions:
            raise ConfigError(f"{path}: array '{name}' must have {dimensions} dimensions, got {data[name].ndim}")
    for name in ("version", "positions", "lengths"):
        if not np.issubdtype(data[name].dtype, np.integer):
            raise ConfigError(f"{path}: array '{name}' must hold integers, got {data[name].dtype}")
    if int(data["version"]) != VERSION:
        raise ConfigError(f"{path} is a trace of version {data['version']}, this hisparse reads version {VERSION}")
    positions, lengths, names = data["positions"], data["lengths"], data["names"]
    if positions.shape[:2] != lengths.shape or len(names) != len(lengths):
        raise ConfigError(f"{path}: positions {list(positions.shape)}, lengths {list(lengths.shape)} and {len(names)} names do "
                          "not belong together")
    ordered = np.sort(positions, axis=2)
    problems: Sequence[tuple[str, NDArray[np.bool_]]] = (
        ("a position at or beyond the length of the sequence", (positions >= lengths[:, :, None]) & (positions >= 0)),
        ("a position twice in one step", (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)),
        ("a position below -1", positions < -1),
    )
    for what, where in problems:
        if where.any():
            i, j, _ = np.argwhere(where)[0]
            raise ConfigError(f"{path}: {what}, series {i} ({names[i]}), step {j}")

"""Trace files: what is written is read, as documented; what is no trace is refused with the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hisparse.errors import ConfigError
from hisparse.trace.trace_file import Series, Trace


def good() -> dict[str, Any]:
    return {"version": np.int64(1), "names": np.array(["a", "b"]), "source": np.array("by hand"),
            "positions": np.array([[[4, 2, 0], [1, 5, -1]], [[0, 1, 2], [-1, -1, -1]]], dtype=np.int32),
            "lengths": np.array([[5, 6], [3, 0]])}


def test_a_file_by_hand_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, **good())
    trace = Trace.load(path)
    assert trace.source == "by hand" and [series.name for series in trace.series] == ["a", "b"]
    assert [step.tolist() for step in trace.series[0].steps] == [[4, 2, 0], [1, 5]]
    assert trace.series[0].lengths == (5, 6) and trace.series[0].num_positions == 6
    assert len(trace.series[1].steps) == 1


def test_series_of_unequal_length_survive(tmp_path: Path) -> None:
    one = Series(name="layer 3", steps=(np.array([7, 1]), np.array([2])), lengths=(8, 9))
    two = Series(name="layer 5", steps=(np.array([0, 3, 1]),), lengths=(4,))
    path = tmp_path / "t.npz"
    Trace(series=(one, two), source="x").save(path)
    with np.load(path) as data:
        assert data["positions"].dtype == np.int32 and data["positions"].shape == (2, 2, 3)
        assert data["lengths"].tolist() == [[8, 9], [4, 0]] and int(data["version"]) == 1
    for written, read in zip((one, two), Trace.load(path).series):
        assert (written.name, written.lengths) == (read.name, read.lengths)
        assert all(np.array_equal(a, b) for a, b in zip(written.steps, read.steps, strict=True))


@pytest.mark.parametrize(("name", "value", "text"), [
    ("version", np.int64(2), "version 2, this hisparse reads version 1"),
    ("lengths", np.array([[4, 6], [3, 0]]), r"at or beyond the length of the sequence, series 0 \(a\), step 0"),
    ("lengths", np.array([[5, 6, 7], [3, 0, 0]]), "do not belong together"),
    ("lengths", np.array([[5.0, 6.0], [3.0, 0.0]]), "must hold integers"),
    ("names", np.array("a"), "must have 1 dimensions, got 0"),
    ("positions", np.array([[[4, 2, 0], [1, 5, 5]], [[0, 1, 2], [-1, -1, -1]]]), "twice in one step, series 0 .*step 1"),
    ("positions", np.array([[[4, 2, 0], [1, 5, -1]], [[0, 1, -2], [-1, -1, -1]]]), r"below -1, series 1 \(b\), step 0"),
    ("names", np.array([{}, {}], dtype=object), "no selection trace"),
    ("lengths", None, "lacks some of"),
])
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, value: Any, text: str) -> None:
    data = good()
    data.pop(name)
    if value is not None:
        data[name] = value
    path = tmp_path / "t.npz"
    np.savez(path, **data)
    with pytest.raises(ConfigError, match=text):
        Trace.load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        Trace.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no zip")
    with pytest.raises(ConfigError, match="no selection trace"):
        Trace.load(tmp_path / "text.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="no selection trace"):
        Trace.load(tmp_path / "array.npy")
    with pytest.raises(ConfigError, match=r"name it .*trace\.npz"):
        Trace(series=(), source="").save(tmp_path / "trace.parquet")
    with pytest.raises(ConfigError, match="cannot write"):
        Trace(series=(), source="").save(tmp_path / "no" / "trace.npz")

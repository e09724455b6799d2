"""`hisparse trace` as a user runs it: files, tables, charts, mistakes."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from tests.test_cli import run

SMALL = ("--top-k", "32", "--pool", "100", "--context", "500", "--steps", "20", "--recent", "4")


def test_synth_then_replay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, chart = tmp_path / "t.npz", tmp_path / "misses.svg"
    assert run(monkeypatch, "trace", "synth", str(path), "--kind", "scan", "--kind", "sticky", *SMALL, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["series"] == ["scan", "sticky"] and facts["bytes"] == path.stat().st_size
    assert "top_k 32" in facts["source"] and "seed 0" in facts["source"]
    with np.load(path) as data:
        assert data["positions"].shape == (2, 20, 32)
    arguments = ("trace", "replay", str(path), "--hot-rows", "64", "--hot-rows", "40")
    assert run(monkeypatch, *arguments, "--plot", str(chart), "--json") == 0
    misses = json.loads(capsys.readouterr().out)["misses"]
    assert [(row["series"], row["hot_rows"]) for row in misses[::6]] == [("scan", 40), ("scan", 64), ("sticky", 40),
                                                                         ("sticky", 64)]
    assert {row["policy"] for row in misses} == {"clock", "lru", "stamp", "fifo", "lfu", "belady"}
    assert run(monkeypatch, *arguments) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 80 and "sticky" in table and "Belady" in table
    wanted = next(row["mean"] for row in misses if (row["series"], row["hot_rows"], row["policy"]) == ("scan", 40, "lru"))
    (line,) = [line for line in table.splitlines() if line.startswith("│ scan")]
    assert line.split("│")[4].strip() == f"{wanted:,.0f}"
    root = ElementTree.parse(chart).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"scan", "sticky", "LRU", "Belady", "hot rows", "rows missed"} <= set(texts)
    assert len(root.findall(".//{http://www.w3.org/2000/svg}g")) == 2


def test_record_then_replay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The bundled checkpoint: layers 0, 2 and 4 own an indexer of top_k 256."""
    prompt, path = tmp_path / "prompt.txt", tmp_path / "mine.npz"
    prompt.write_text("The access code of the harbor is 4921. " * 12)
    assert run(monkeypatch, "trace", "record", str(path), "--model", "recall", "--prompt", str(prompt), "--max-tokens", "6",
               "--set", "cache.host_pool_gib=0.05", "--set", "model.max_model_len=1024", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["series"] == [f"request 0, layer {layer}" for layer in (0, 2, 4)] and facts["steps"] == 6
    with np.load(path) as data:
        first = facts["prompt_tokens"] + 1
        assert data["lengths"].tolist() == [list(range(first, first + 6))] * 3
        assert data["positions"].shape == (3, 6, min(256, first + 5))
    assert run(monkeypatch, "trace", "replay", str(path), "--hot-rows", "512", "--policy", "lru", "--policy", "clock") == 0
    table = capsys.readouterr().out
    assert all(f"│ request 0, layer {layer} " in table for layer in (0, 2, 4))


@pytest.mark.parametrize(("args", "text"), [
    (["record", "t.npz", "--model", "recall", "--prompt", "/no/such.txt"], "cannot read the prompt"),
    (["record", "t.csv", "--model", "recall", "--prompt", "README.md"], "name it t.npz"),
    (["record", "t.npz", "--model", "/no/model", "--prompt", "README.md"], "no checkpoint"),
    (["replay", "--kind", "lazy"], "no kind of layer is named 'lazy'"),
    (["replay", "/no/such.npz"], "cannot read the trace"),
    (["replay", "/no/such.npz", "--kind", "scan"], "leave one of them out"),
    (["replay", "--plot", "misses.pdf"], "name it misses.svg"),
    (["replay", "--plot", "/no/where/misses.svg"], "no directory /no/where"),
    (["replay", "--kind", "scan", "--steps", "2", "--hot-rows", "100"], "must hold a whole step"),
    (["replay", "--kind", "scan", "--steps", "2", "--policy", "mru"], "no policy is named 'mru'"),
    (["synth", "x.npz", "--order", "up"], "--order must be"),
    (["synth", "x.npz", "--pool", "9", "--context", "8"], "must fit context 8"),
    (["synth", "x.npz", "--steps", "0"], "greater than or equal to 1"),
])
def test_mistakes_are_usage_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str],
                                   text: str) -> None:
    assert run(monkeypatch, "trace", *args) == 2
    assert text in " ".join(capsys.readouterr().err.replace("│", " ").split())

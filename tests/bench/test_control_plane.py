"""The benchmark of the scheduler's side runs, and every measurement gives a number. No timing is judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse.bench import scheduling
from hisparse.bench.report import Row, chosen, missed, table
from hisparse.errors import ConfigError
from tests.test_cli import run

CASES = {
    "steady decode 2x2k", "steady decode, hot_rows_max=hot_rows 2x2k", "steady decode, regions growing 2x2k",
    "steady decode 8x2k", "all seal in one step 2x2k", "page keys 4k", "admit 4k by host landing",
    "admit 4k by prefix hit", "admit 4k by host landing beside 2x2k", "admit 4k by prefix hit beside 2x2k", "spills 128",
    "metadata 2x2k", "growth, per changed page, 2x2k", "growth, per changed page, 4x2k",
    "growth, per changed page, most/least", "growth, keys, 2k", "growth, host landing, 2k", "growth, prefix hit, 2k",
    "growth, keys, 4k", "growth, host landing, 4k", "growth, prefix hit, 4k",
    "worst step, come and go, Python collects, 2x2k", "worst step, come and go, engine collects, 2x2k",
}


def test_everything_is_measured_at_a_tiny_size(tmp_path: Path) -> None:
    path = tmp_path / "control_plane.jsonl"
    # In a process of its own: it collects garbage again and again, slow among all that the other tests have loaded.
    command = [sys.executable, "-m", "hisparse.cli", "bench", "control-plane", "--quick", "--check", "--out", str(path)]
    shown = subprocess.run(command, env=os.environ | {"COLUMNS": "80"}, text=True, capture_output=True, timeout=240)
    assert shown.returncode == 0, shown.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["case"] for row in rows} == {f"{shape} {case}" for shape in ("glm-5.2", "deepseek-v3.2") for case in CASES}
    for row in rows:
        assert row["value"] > 0 and row["unit"] and row["bar"] is None, row
        assert row["bench"] == "control-plane" and row["hardware"] and row["commit"], row
        assert row["command"] == f"hisparse bench control-plane --quick --check --out {path}"
    assert "| glm-5.2 page keys 4k" in path.with_suffix(".md").read_text()
    assert max(map(len, shown.stdout.splitlines()[10:])) <= 80 and "glm-5.2 page keys" in shown.stdout
    assert "glm-5.2 steady: " in shown.stderr, "without a terminal, each step is a line"


@pytest.mark.parametrize(("value", "more_is_better", "ok"), [(2.0, False, True), (2.1, False, False), (1.9, True, False)])
def test_a_missed_bar_is_told(value: float, more_is_better: bool, ok: bool) -> None:
    row = Row(case="x", value=value, unit="ms", bar=2.0, more_is_better=more_is_better)
    assert row.ok is ok and (row.ratio is not None and (row.ratio <= 1) is ok)
    assert ("NO" in table([row])) is not ok and missed([row]) == ([] if ok else ["x"])


def test_check_fails_on_a_missed_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Row(case="too slow", value=3.0, unit="ms", bar=2.0)
    monkeypatch.setattr(scheduling, "CASES", {"steady": lambda context: [slow]})
    arguments = ("bench", "control-plane", "--quick", "--shape", "glm-5.2")
    assert run(monkeypatch, *arguments) == 0
    assert run(monkeypatch, *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missed"] == ["too slow"]
    assert run(monkeypatch, *arguments, "--check") == 1
    assert "missed: too slow" in capsys.readouterr().err


def test_names_are_chosen() -> None:
    assert chosen("--only", [], {"a": 1, "b": 2}) == ["a", "b"] and chosen("--only", ["b", "b"], ["a", "b"]) == ["b"]
    with pytest.raises(ConfigError, match="--only c: there are a, b"):
        chosen("--only", ["c"], ["a", "b"])

"""`hisparse plan` as a user runs it: table, JSON, chart, mistakes."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hisparse.capacity.presets import MODELS
from tests.test_cli import run

H200 = ("plan", "--model", "glm-5.2", "--gpu", "h200", "--tp", "8")


def test_table_and_json_say_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *H200, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert run(monkeypatch, *H200) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    cells = {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in text.splitlines()
             if line.startswith("│")}
    assert list(cells) == ["8k", "16k", "32k", "64k", "128k", "256k", "512k", "1M"]
    for row, found in zip(data["rows"], cells.values(), strict=True):
        assert found[:2] == [f"{row['requests_device_only']:,}", f"{row['requests_hisparse']:,}"]
        assert found[4] == f"{row['host_bytes'] / 2**30:,.0f}" and found[5] == f"{row['fixed_bytes'] / 2**20:,.0f}"
    assert f"from {data['crossover_tokens']:,} tokens" in text
    plain = " ".join(text.split()).replace(" - ", " ")
    assert all(line in plain for line in data["assumptions"])


def test_a_config_file_and_a_chart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                   tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["deepseek-v3.2"]))
    chart = tmp_path / "plan.svg"
    answers = []
    for model in (str(tmp_path), str(tmp_path / "config.json"), "deepseek-v3.2"):
        assert run(monkeypatch, "plan", "--model", model, "--tp", "8", "--context", "96k", "--context", "8192", "--json",
                   "--plot", str(chart)) == 0
        answers.append(json.loads(capsys.readouterr().out)["rows"])
    assert answers[0] == answers[1] == answers[2]
    assert [row["context_tokens"] for row in answers[0]] == [8192, 98_304]
    texts = [element.text for element in ElementTree.parse(chart).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert {"device only", "HiSparse", "requests that fit", "8k"} <= set(texts)


@pytest.mark.parametrize(("args", "text"), [
    (["--model", "gpt-2"], "neither a preset (deepseek-v3.2, glm-5, glm-5.1, glm-5.2) nor a checkpoint"),
    (["--model", "glm5.2"], "did you mean glm-5.2?"),
    (["--model", "glm-5.2", "--gpu", "a100"], "give its memory with --gpu-gib"),
    (["--model", "glm-5.2", "--row-dtype", "int4"], "--row-dtype must be bf16 or fp8"),
    (["--model", "glm-5.2", "--context", "many"], "8192, 96k or 1M"),
    (["--model", "glm-5.2", "--plot", "plan.pdf"], "name it plan.svg"),
    (["--model", "glm-5.2", "--tp", "1"], "no room for KV"),
    ([], "Missing option"),
])
def test_mistakes_are_usage_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str],
                                   text: str) -> None:
    assert run(monkeypatch, "plan", *args) == 2
    assert text in " ".join(capsys.readouterr().err.replace("│", " ").split())

"""Every benchmark is a verb, a script and a module, and says what it lacks instead of failing somewhere inside."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

import pytest
import torch

from hisparse.bench import report, transport
from hisparse.bench.catalogue import BENCHMARKS, Needs, why_no_gpu
from hisparse.cli import bench
from tests.test_cli import run

ROOT = Path(__file__).parents[2]
GPU = [name for name, found in BENCHMARKS.items() if found.needs is Needs.GPU]
MODULES = ("resolver", "copies", "attention", "indexer", "step", "pd_import", "transport", "scheduling", "policy", "serve")


def test_verbs_scripts_and_catalogue_agree() -> None:
    verbs = {command.name or getattr(command.callback, "__name__", "") for command in bench.app.registered_commands}
    assert verbs == {*BENCHMARKS, "list"}
    started = set()
    for script in (ROOT / "benchmarks").glob("bench_*.py"):
        (call,) = [node for node in ast.walk(ast.parse(script.read_text()))
                   if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "main"]
        first, verb, _ = call.args[0].elts  # type: ignore[attr-defined]
        assert first.value == "bench"
        started.add(verb.value)
    assert started == set(BENCHMARKS)


@pytest.mark.parametrize("name", MODULES)
def test_modules_load_without_a_gpu_and_say_what_they_measure(name: str) -> None:
    module = importlib.import_module(f"hisparse.bench.{name}")
    assert callable(module.run) and module.__doc__ and "python -m" not in module.__doc__


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", GPU)
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(monkeypatch, "bench", name) == 1
    assert f"bench {name} needs a CUDA device: torch" in (error := capsys.readouterr().err)
    assert "'hisparse bench list' says what runs here" in error and "Traceback" not in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "bench", "list", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["no_gpu"] == why_no_gpu() and {item["name"] for item in data["benchmarks"] if not item["here"]} == set(GPU)
    assert run(monkeypatch, "bench", "import", "--device", "cuda") == 1
    assert "bench import --device cuda needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(("args", "text"), [
    (["policy", "--order", "up"], "--order up: there are ascending, score, random"),
    (["control-plane", "--only", "x"], "--only x: there are steady"),
    (["control-plane", "--shape", "x"], "--shape x: there are glm-5.2, deepseek-v3.2"),
    (["import", "--device", "tpu"], "--device must be cpu or cuda"),
    (["policy", "--out", "/no/where/p.jsonl"], "a directory that exists"),
    (["policy", "--out", "p.md"], "name a FILE.jsonl"),
])
def test_mistakes_are_usage_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str],
                                   text: str) -> None:
    assert run(monkeypatch, "bench", *args) == 2
    assert text in capsys.readouterr().err


def test_a_wrong_answer_is_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                     tmp_path: Path) -> None:
    def wrong(*args: object) -> object:
        raise AssertionError("tcp: wrong bytes")

    monkeypatch.setattr(transport, "measure", wrong)
    assert run(monkeypatch, "bench", "transport", "--quick", "--out", str(tmp_path / "t.jsonl")) == 1
    shown = capsys.readouterr()
    assert "bench transport gives no number: tcp: wrong bytes" in shown.err and not shown.out
    assert not (tmp_path / "t.jsonl").exists()


def test_a_run_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/hisparse", "bench", "x", "--only", "two words"])
    facts = report.facts("x")
    assert facts["command"] == "hisparse bench x --only 'two words'" and facts["hardware"] and len(facts["date"]) == 10
    monkeypatch.setenv("HISPARSE_COMMIT", "abc1234")
    assert report.facts("x")["commit"] == "abc1234"
    monkeypatch.delenv("HISPARSE_COMMIT")
    monkeypatch.setattr(report, "ROOT", tmp_path)  # as where it is installed
    assert report.facts("x")["commit"].startswith("hisparse ") or report.facts("x")["commit"] == "unknown"

"""Help, version, completion and colours of every command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse.bench.catalogue import BENCHMARKS
from hisparse.cli import console
from tests.test_cli import run

ROOT = Path(__file__).parents[1]
COMMANDS = [("serve",), ("plan",), ("doctor",), ("status",), ("demo",), ("trace",), ("trace", "synth"), ("trace", "record"),
            ("trace", "replay"), ("config",), ("config", "reference"), ("bench",), ("bench", "list"),
            *(("bench", name) for name in BENCHMARKS)]
GROUPS = [("trace",), ("config",), ("bench",)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_examples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                              command: tuple[str, ...]) -> None:
    assert run(monkeypatch, *command, "--help") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    if command not in GROUPS:
        examples = [line.strip() for line in text.splitlines() if re.match(rf"\s+hisparse {' '.join(command)}\b", line)]
        assert len(examples) >= 2 and "Examples:" in text
        assert not re.search(r"\S\n \S+\n", text.partition("Examples:")[0]), "a paragraph is broken after one word"
        assert "--json" in text


def test_the_root_lists_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert all(f"│ {command[0]} " in text for command in COMMANDS) and "--install-completion" in text
    assert "Exit codes: 0 ok, 1 failed, 2 usage." in text
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("hisparse")


def test_completion_of_a_shell() -> None:
    asked = {"_HISPARSE_COMPLETE": "complete_bash", "COMP_WORDS": "hisparse tr", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", "from hisparse.cli import main; main()"], capture_output=True, text=True,
                          env=asked, cwd=ROOT, check=False)
    assert done.stdout.split() == ["trace"], done


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color_is_respected(variables: dict[str, str], coloured: bool) -> None:
    code = "from hisparse.cli.console import out; out.print('[red]fail[/red]')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True,
                          env=variables | {"TERM": "xterm", "FORCE_COLOR": "1"})
    assert ("\x1b[31m" in done.stdout) is coloured and "fail" in done.stdout


def test_a_pipe_gets_no_escapes() -> None:
    assert not console.out.is_terminal

"""`hisparse doctor` as a user runs it, with faked findings: table, JSON, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hisparse.doctor import node
from hisparse.doctor.findings import Finding, Needs, Status
from tests.test_cli import LOCAL, run

OK = Finding(check="python", status=Status.OK, text="3.12 [final]")
WARN = Finding(check="GPU", status=Status.WARN, text="none", fix="none needed for the CPU backend " + "word " * 20)
FAIL = Finding(check="shared memory", status=Status.FAIL, text="too small", fix="enlarge /dev/shm")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Needs]:
    """What was asked of the machine; it answers with OK and WARN, and with FAIL if pools are to lie in /dev/shm."""
    seen: list[Needs] = []

    def examine_node(needs: Needs) -> Iterator[Finding]:
        seen.append(needs)
        yield from (OK, WARN, FAIL) if needs.shared_bytes else (OK, WARN)

    monkeypatch.setattr(node, "examine_node", examine_node)
    return seen


def test_warnings_do_not_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[Needs]) -> None:
    assert run(monkeypatch, "doctor") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 and "3.12 [final]" in text and "fix: none needed" in text
    assert "0 failed, 1 warnings, 1 ok" in text and asked == [Needs()] and "\x1b" not in text


def test_a_failure_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                  asked: list[Needs]) -> None:
    assert run(monkeypatch, "doctor", str(LOCAL), "--set", "serve.port=9", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is False and data["count"] == {"ok": 1, "warn": 1, "fail": 1, "skip": 0}
    assert data["nodes"] == [{"node": "this machine", "findings": [OK.asdict(), WARN.asdict(), FAIL.asdict()]}]
    assert asked[0].port == 9 and asked[0].shared_bytes > 2 * 255 << 20


@pytest.mark.parametrize(("args", "text"), [(["/no/such.yaml"], "cannot read"), (["--model", "/no/model"], "no checkpoint"),
                                            (["--set", "a=1"], "either CONFIG.yaml or --model")])
def test_mistakes_are_usage_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[Needs],
                                   args: list[str], text: str) -> None:
    assert run(monkeypatch, "doctor", *args) == 2
    assert text in capsys.readouterr().err and not asked

"""docs/api.md says what the code does: its tables against the models, and each row tried."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from hisparse.config import ServeConfig
from hisparse.serve import errors, fields, requests
from hisparse.serve.body import MAX_KEYS
from hisparse.serve.fields import Ignored, Unsupported
from hisparse.serve.ingress import create_api
from hisparse.serve.requests import ChatMessage, ChatRequest, CompletionRequest
from tests.serve.conftest import small_config
from tests.serve.fakes import FakeBackend
from tests.serve.field_marks import fields_marked

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
COLUMNS: list[tuple[str, int, type[BaseModel]]] = [("field", 1, CompletionRequest), ("field", 2, ChatRequest),
                                                   ("field of a message", 1, ChatMessage)]


def tables(head: str) -> list[list[str]]:
    """Rows of every table whose first column is called `head`."""
    rows, inside = [], False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        inside = bool(cells) and (inside or cells[0] == head)
        if inside and cells[0] != head and not cells[0].startswith("---"):
            rows.append(cells)
    return rows


def status(kind: type[BaseModel], name: str) -> str:
    for mark, word in ((Ignored, "ignored"), (Unsupported, "refused")):
        if name in fields_marked(kind, mark):
            return word
    return "yes"


@pytest.mark.parametrize(("head", "column", "kind"), COLUMNS)
def test_every_field_is_listed_with_what_becomes_of_it(head: str, column: int, kind: type[BaseModel]) -> None:
    listed = {row[0].strip("`"): row[column] for row in tables(head) if row[column] != "-"}
    assert listed == {name: status(kind, name) for name in kind.model_fields}


@pytest.mark.parametrize(("head", "column", "kind"), COLUMNS)
def test_the_values_that_are_not_refused_are_the_ones_listed(head: str, column: int, kind: type[BaseModel]) -> None:
    for row in tables(head):
        if row[column] == "refused":
            listed = [None, *(json.loads(value) for value in re.findall("`([^`]+)`", row[-1]))]
            mark = next(item for item in kind.model_fields[row[0].strip("`")].metadata if isinstance(item, Unsupported))
            assert listed == list(mark.neutral), row


def test_every_row_behaves_as_it_says(client: TestClient) -> None:
    bodies: list[tuple[str, int, dict[str, Any]]] = [
        ("/v1/completions", 1, {"model": "recall", "prompt": "x"}),
        ("/v1/chat/completions", 2, {"model": "recall", "messages": [{"role": "user", "content": "x"}]}),
    ]
    tried = 0
    for path, column, body in bodies:
        for row in tables("field"):
            name, what = row[0].strip("`"), row[column]
            answer = client.post(path, json=body | {name: {"surely": "wrong"}} if what != "ignored" else body | {
                name: {"a": "b"} if name == "metadata" else True if name == "parallel_tool_calls" else "x"})
            if what == "ignored":
                assert f"{name} has no effect on this server" in answer.json()["hisparse"]["warnings"]
                continue
            code = {"-": "unknown_parameter", "refused": "unsupported_value"}.get(what)
            assert answer.status_code == 400, (path, row)
            assert code is None or answer.json()["error"]["code"] == code, (path, row)
            tried += 1
    assert tried > 60


def test_errors_are_those_of_the_code() -> None:
    listed = {int(row[0]): re.findall("`([^`]+)`", row[1]) for row in tables("status")}
    usual = {code: names[1] for code, names in errors._TYPES.items()}
    assert set(listed) == set(usual) - {409}, "a request id is ours to choose, so it never is in use"
    source = "".join(path.read_text() for path in (ROOT / "hisparse" / "serve").glob("*.py"))
    for number, codes in listed.items():
        assert usual[number] in codes or number == 403
        assert all(f'"{code}"' in source for code in codes)
    document = create_api(small_config(api_keys=["k"]), FakeBackend).openapi()
    documented = document["paths"]["/v1/completions"]["post"]["responses"]
    assert {int(number) for number in documented} == {200, *listed} - {403, 405}, "403 is for servers without keys"


def test_limits_are_those_of_the_code() -> None:
    limits = {row[0]: row[1] for row in tables("what")}
    assert limits["prompts x `n`"] == str(fields.MAX_CHOICES)
    assert limits["stop strings, stop tokens"] == f"{fields.MAX_STOPS}, {requests.MAX_STOP_TOKENS}"
    assert limits["alternatives per token"] == str(fields.MAX_TOP_LOGPROBS)
    assert f"{ServeConfig().max_body_bytes >> 20} MiB" in limits["body"] and f"{MAX_KEYS} keys" in limits["body"]
    assert f"{ServeConfig().request_timeout_s:g} s" in next(value for name, value in limits.items() if name.startswith("time"))
    assert f"{fields.MAX_STOP_CHARS:,} characters" in PAGE and f"completions: {requests.COMPLETION_TOKENS} or" in PAGE
    listed = {path.split("`")[0] for path in re.findall(r"(?:GET|POST) (/[^`]*)`", PAGE)}
    assert {path.partition("?")[0] for path in listed} - {"/openapi.json"} <= set(
        create_api(small_config(), FakeBackend).openapi()["paths"])

"""Bodies: what they may cost, what an error says of them, and what becomes of every field OpenAI has."""

from __future__ import annotations

import json
import logging
import time
import typing
from collections.abc import Callable
from typing import Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from fastapi.testclient import TestClient

from hisparse.serve.body import parse_body
from hisparse.serve.errors import ApiError
from hisparse.serve.fields import Ignored, Unsupported
from hisparse.serve.requests import ChatRequest, CompletionRequest
from tests.serve.fakes import FakeBackend
from tests.serve.field_marks import fields_marked

Request = CompletionRequest | ChatRequest

COMPLETION: dict[str, Any] = {"model": "recall", "prompt": "hi"}
CHAT: dict[str, Any] = {"model": "recall", "messages": [{"role": "user", "content": "hi"}]}
BODIES: list[tuple[type[Request], dict[str, Any], Any]] = [
    (CompletionRequest, COMPLETION, completion_params.CompletionCreateParamsBase),
    (ChatRequest, CHAT, chat_params.CompletionCreateParamsBase),
]


def refusal(kind: type[Request], body: bytes | dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    return caught.value


@pytest.mark.parametrize("depth", [10, 500, 900, 990, 1100, 100_000])
@pytest.mark.parametrize("field", ["prompt", "stop", "logit_bias", "stream_options", "unknown"])
def test_any_nesting_is_a_bad_request(depth: int, field: str) -> None:
    for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
        body = b'{"model":"recall",' + b'"prompt":"x",' * (field != "prompt") + b'"%s":' % field.encode()
        error = refusal(CompletionRequest, body + opened * depth + b"1" + closed * depth + b"}")
        assert error.status == 400 and len(error.message) < 300


@pytest.mark.parametrize("body", [
    COMPLETION | {"prompt": [1.5] * 200_000}, COMPLETION | {"prompt": [[[]]] * 100_000}, COMPLETION | {"stop": [1] * 200_000},
    COMPLETION | {"stop_token_ids": ["x"] * 200_000}, CHAT | {"messages": [1] * 200_000},
    CHAT | {"messages": [{"role": "user", "content": [1] * 200_000}]}, COMPLETION | {f"k{i}": 1 for i in range(100_000)},
    CHAT | {"messages": [{"role": "user", "content": "x"} | {f"k{i}": 1 for i in range(100_000)}]},
], ids=range(8))
def test_a_body_with_a_million_problems_costs_one(body: dict[str, Any]) -> None:
    """Collecting them all took gigabytes and seconds."""
    data = json.dumps(body).encode()
    began = time.process_time()
    json.loads(data)
    parse_s = time.process_time() - began
    began = time.process_time()
    error = refusal(ChatRequest if "messages" in body else CompletionRequest, data)
    assert time.process_time() - began < 20 * parse_s + 0.5
    assert error.status == 400 and len(error.message) < 300


def test_errors_describe_and_do_not_quote() -> None:
    secret = "xylophone"
    for kind, body in (
        (CompletionRequest, {"prompt": [secret, 5]}), (CompletionRequest, {"prompt": {"text": secret}}),
        (CompletionRequest, {"max_tokens": secret}), (CompletionRequest, {"stop": [secret] * 5}),
        (CompletionRequest, {"stream": secret}), (CompletionRequest, {"suffix": secret}),
        (CompletionRequest, {"cache_salt": secret * 50}), (CompletionRequest, {"user": [secret]}),
        (ChatRequest, {"messages": secret}), (ChatRequest, {"messages": [secret]}),
        (ChatRequest, {"messages": [{"role": secret, "content": "x"}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": {"a": secret}}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": secret, "text": "x"}]}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [secret]}]}),
    ):
        error = refusal(kind, (COMPLETION if kind is CompletionRequest else CHAT) | body)
        assert error.status == 400 and secret not in str(error.body()) and error.param


@pytest.mark.parametrize(("kind", "body", "params"), BODIES)
def test_every_field_of_openais_client_is_taken_ignored_or_refused_by_name(kind: type[Request], body: dict[str, Any],
                                                                           params: Any) -> None:
    """The outside list: what the installed client can send. Fields that it may learn are refused by name, too."""
    theirs = {*typing.get_type_hints(params), "stream"}
    assert len(theirs) > 15
    unsupported = {*fields_marked(kind, Unsupported)}
    for name in theirs - set(kind.model_fields):
        assert refusal(kind, body | {name: "x"}).code == "unknown_parameter"
    for name in unsupported:
        error = refusal(kind, body | {name: {"x": 1}})
        assert (error.code, error.param) == ("unsupported_value", name) and name in error.message
        parse_body(json.dumps(body | {name: None}).encode(), kind)
    ours = set(kind.model_fields) - theirs
    assert ours <= {"top_k", "stop_token_ids", "ignore_eos", "return_token_ids", "cache_salt", "web_search_options",
                    "verbosity", "prediction", "audio"}, "extensions are few, and docs/api.md lists them"


def test_ignored_fields_are_checked_and_named_in_the_answer(client: TestClient, backend: FakeBackend) -> None:
    body = CHAT | {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True,
                   "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
                   "messages": [{"role": "user", "content": "x", "name": "n"}]}
    assert {*fields_marked(ChatRequest, Ignored)} <= set(body)
    for stream in (False, True):
        response = client.post("/v1/chat/completions", json=body | {"stream": stream})
        data = json.loads(response.text.split("\n\n")[-3].removeprefix("data: ")) if stream else response.json()
        warnings = data["hisparse"]["warnings"]
        assert warnings == [f"{name} has no effect on this server" for name in (
            "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
            "safety_identifier", "service_tier", "user", "messages[].name")]
    assert client.post("/v1/chat/completions", json=CHAT | {"metadata": {"a": 1}}).status_code == 400


def test_whole_numbers_may_be_written_with_a_point(client: TestClient, backend: FakeBackend) -> None:
    body = COMPLETION | {"prompt": [5.0, 6], "max_tokens": 4.0, "n": 1.0, "seed": 3.0, "stop_token_ids": [7.0]}
    assert client.post("/v1/completions", json=body).status_code == 200
    call = backend.calls[0]
    assert call.token_ids == (5, 6) and call.max_tokens == 4 and call.sampling.seed == 3
    assert call.sampling.stop_token_ids == (7,)


def test_nulls_mean_the_default(client: TestClient, backend: FakeBackend) -> None:
    nulls = {name: None for name, field in CompletionRequest.model_fields.items() if name not in ("model", "prompt")}
    assert client.post("/v1/completions", json=COMPLETION | nulls).status_code == 200
    assert client.post("/v1/completions", json=COMPLETION).status_code == 200
    assert backend.calls[0].sampling == backend.calls[1].sampling
    nulls = {name: None for name in ChatRequest.model_fields if name not in ("model", "messages")}
    assert client.post("/v1/chat/completions", json=CHAT | nulls).status_code == 200


def test_wrong_paths_and_methods_say_what_is_right(client: TestClient) -> None:
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("DELETE", "/v1/chat/completions", "POST"),
                                  ("POST", "/v1/models", "GET"), ("PUT", "/health", "GET")):
        response = client.request(method, path)
        assert response.status_code == 405 and response.headers["allow"] == allowed
        assert response.json()["error"]["code"] == "method_not_allowed"
    assert "/openapi.json" in client.get("/v1/completion").json()["error"]["message"]
    response = client.get("/stats?check=perhaps")
    assert response.status_code == 400 and response.json()["error"]["param"] == "check"


def test_the_fingerprint_follows_the_configuration(make_client: Callable[..., TestClient]) -> None:
    found = {make_client(**serve).post("/v1/completions", json=COMPLETION).json()["system_fingerprint"]
             for serve in ({}, {"request_timeout_s": 7.0})}
    assert len(found) == 1, "a deadline changes no token"


def test_a_body_that_does_not_come_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    import asyncio

    from hisparse.serve.ingress import create_api
    from tests.serve.conftest import small_config

    async def talk(leaves: bool) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        parts = [{"type": "http.request", "body": b'{"mod', "more_body": True}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            if leaves:
                return {"type": "http.disconnect"}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "scheme": "http",
                 "query_string": b"", "root_path": "", "http_version": "1.1", "client": ("::1", 1), "server": ("t", 80),
                 "headers": [(b"content-type", b"application/json")]}
        await create_api(small_config(request_timeout_s=0.2), FakeBackend)(scope, receive, send)
        return sent

    sent = asyncio.run(talk(leaves=False))
    assert sent[0]["status"] == 408 and b"request_timeout" in sent[1]["body"]
    with caplog.at_level(logging.WARNING):
        asyncio.run(talk(leaves=True))
    assert caplog.records == [], "a client that leaves is no error of ours"

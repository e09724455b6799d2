"""The HTTP API over a scripted backend: validation, framing, deadlines, disconnects. No Ray."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from hisparse.serve.errors import ApiError
from hisparse.serve.ingress import create_api
from tests.serve.conftest import small_config
from tests.serve.fakes import STATS, FakeBackend

COMPLETION = {"model": "recall", "prompt": "hi"}
CHAT = {"model": "recall", "messages": [{"role": "user", "content": "hi"}]}
JSON = {"Content-Type": "application/json"}


def test_neutral_values_of_unsupported_fields_are_accepted(client: TestClient) -> None:
    body = COMPLETION | {"frequency_penalty": 0, "presence_penalty": 0.0, "echo": False, "suffix": None, "logit_bias": {}}
    assert client.post("/v1/completions", json=body).status_code == 200
    body = CHAT | {"tools": [], "response_format": {"type": "text"}, "store": False}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_completion(client: TestClient, backend: FakeBackend) -> None:
    data = client.post("/v1/completions", json=COMPLETION | {"max_tokens": 5, "temperature": 0}).json()
    assert data["object"] == "text_completion" and data["model"] == "recall"
    assert data["choices"] == [{"index": 0, "text": "Hello big world", "logprobs": None, "finish_reason": "stop"}]
    assert data["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10,
                             "prompt_tokens_details": {"cached_tokens": 3}}
    assert data["hisparse"] == {"choices": [STATS]}
    call = backend.calls[0]
    assert (call.text, call.max_tokens, call.sampling.temperature) == ("hi", 5, 0.0)
    assert backend.aborted == []


def test_fields_reach_the_engine(client: TestClient, backend: FakeBackend) -> None:
    client.post("/v1/completions", json={
        "model": "recall", "prompt": [5, 6], "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 11, "stop": ["a", "b"],
        "stop_token_ids": [9], "ignore_eos": True, "cache_salt": "tenant", "user": "u", "logprobs": 2})
    call = backend.calls[0]
    sampling = call.sampling
    assert call.token_ids == (5, 6) and call.text is None and call.cache_salt == "tenant"
    assert call.max_tokens is None and call.default_tokens == 16
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 4, 11)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("a", "b"), (9,), True)
    assert sampling.logprobs == 2


def test_n_choices_have_their_own_seeds_and_the_prompt_counts_once(client: TestClient, backend: FakeBackend) -> None:
    data = client.post("/v1/completions", json=COMPLETION | {"n": 3, "seed": 5}).json()
    assert [choice["index"] for choice in data["choices"]] == [0, 1, 2]
    assert data["usage"]["prompt_tokens"] == 7 and data["usage"]["completion_tokens"] == 9
    assert sorted(call.sampling.seed or 0 for call in backend.calls) == [5, 6, 7]
    assert len({call.request_id for call in backend.calls}) == 3


def test_list_of_prompts(client: TestClient, backend: FakeBackend) -> None:
    data = client.post("/v1/completions", json=COMPLETION | {"prompt": ["a", "b"]}).json()
    assert len(data["choices"]) == 2 and data["usage"]["prompt_tokens"] == 14
    assert sorted(call.text or "" for call in backend.calls) == ["a", "b"]
    client.post("/v1/completions", json=COMPLETION | {"prompt": [[1, 2], [3]]})
    assert [call.token_ids for call in backend.calls[2:]] == [(1, 2), (3,)]


def events(response: httpx.Response) -> list[str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    lines = response.text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def test_completion_stream_framing(client: TestClient) -> None:
    *chunks, done = events(client.post("/v1/completions", json=COMPLETION | {"stream": True}))
    assert done == "[DONE]"
    data = [json.loads(chunk) for chunk in chunks]
    assert [item["choices"][0]["text"] for item in data] == ["Hello", " big", " world"]
    assert [item["choices"][0]["finish_reason"] for item in data] == [None, None, "stop"]
    assert len({item["id"] for item in data}) == 1 and all("usage" not in item for item in data)
    assert data[-1]["hisparse"] == {"choices": [STATS]} and "hisparse" not in data[0]


def test_chat_stream_framing_with_usage(client: TestClient) -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events(client.post("/v1/chat/completions", json=body))
    data = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]" and data[0]["object"] == "chat.completion.chunk"
    assert data[0]["choices"][0]["delta"] == {"role": "assistant", "content": "Hello"}
    assert data[1]["choices"][0]["delta"] == {"content": " big"}
    assert [item["usage"] for item in data[:-1]] == [None] * 3
    assert data[-1]["choices"] == [] and data[-1]["usage"]["total_tokens"] == 10
    assert data[-1]["hisparse"] == {"choices": [STATS]}


def test_chat(client: TestClient, backend: FakeBackend) -> None:
    data = client.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 4}).json()
    assert data["choices"][0]["message"] == {"role": "assistant", "content": "Hello big world", "refusal": None}
    assert backend.calls[0].messages == (("user", "hi"),) and backend.calls[0].max_tokens == 4
    client.post("/v1/chat/completions", json=CHAT)
    assert backend.calls[1].max_tokens is None


def test_logprobs(client: TestClient) -> None:
    data = client.post("/v1/completions", json=COMPLETION | {"logprobs": 2}).json()["choices"][0]["logprobs"]
    assert data["tokens"] == ["Hello", " big", " world"] and data["text_offset"] == [0, 5, 9]
    assert data["token_logprobs"] == [-0.5] * 3 and data["top_logprobs"][0] == {"Hello": -0.5, "x": -1.5}
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    content = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["bytes"] == list(b"Hello") and content[0]["top_logprobs"][1]["token"] == "x"


def test_the_openai_client_understands_everything(backend: FakeBackend, client: TestClient) -> None:
    api = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=client, max_retries=0)
    whole = api.chat.completions.create(model="recall", messages=[{"role": "user", "content": "hi"}])
    assert whole.choices[0].message.content == "Hello big world"
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    assert (whole.model_extra or {})["hisparse"]["choices"][0]["landing"] == "host"
    parts = list(api.completions.create(model="recall", prompt="hi", stream=True))
    assert "".join(part.choices[0].text for part in parts) == "Hello big world"
    assert (parts[-1].model_extra or {})["hisparse"]["choices"][0]["prefill"] == "remote"
    assert [model.id for model in api.models.list()] == ["recall"]
    with pytest.raises(openai.NotFoundError, match="nope"):
        api.completions.create(model="nope", prompt="hi")


def test_unknown_paths_and_models(client: TestClient) -> None:
    assert client.get("/v1/models/recall").json()["id"] == "recall"
    for response in (client.get("/v1/models/other"), client.get("/v2/x"),
                     client.post("/v1/completions", json=COMPLETION | {"model": "x"})):
        assert response.status_code == 404 and set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert client.get("/v1/completions").status_code == 405


def test_error_before_the_first_token_is_a_status(client: TestClient, backend: FakeBackend) -> None:
    for status in (413, 429, 503):
        backend.error = ApiError(status, "because", "prompt")
        for stream in (False, True):
            response = client.post("/v1/completions", json=COMPLETION | {"stream": stream})
            assert response.status_code == status and response.json()["error"]["message"] == "because"
            assert ("retry-after" in response.headers) == (status in (429, 503))
    assert backend.aborted == []


def test_error_after_the_first_token(client: TestClient, backend: FakeBackend) -> None:
    backend.error, backend.error_at = ApiError(503, "rank 0 is dead"), 2
    lines = events(client.post("/v1/completions", json=COMPLETION | {"stream": True}))
    assert json.loads(lines[-1])["error"]["message"] == "rank 0 is dead" and "[DONE]" not in lines
    assert client.post("/v1/completions", json=COMPLETION).status_code == 503


def test_unexpected_errors_do_not_leak(client: TestClient, backend: FakeBackend) -> None:
    backend.error = KeyError("secret of the inside")
    response = client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 500 and "secret" not in response.text


def test_one_failed_choice_ends_and_aborts_the_others(client: TestClient, backend: FakeBackend) -> None:
    backend.error, backend.error_at = ApiError(503, "lost"), 1
    response = client.post("/v1/completions", json=COMPLETION | {"n": 3})
    assert response.status_code == 503
    assert len(backend.aborted) == 2


def test_deadline_is_504_and_aborts(make_client: Callable[..., TestClient], backend: FakeBackend) -> None:
    client = make_client(request_timeout_s=0.2)
    backend.hang_at = 0
    began = time.monotonic()
    for stream in (False, True):
        assert client.post("/v1/completions", json=COMPLETION | {"stream": stream}).status_code == 504
    backend.hang_at = 1
    lines = events(client.post("/v1/completions", json=COMPLETION | {"stream": True}))
    assert json.loads(lines[-1])["error"]["code"] == "deadline_exceeded"
    assert time.monotonic() - began < 5 and len(backend.aborted) == len(backend.cancelled) == 3


def test_body_limit(make_client: Callable[..., TestClient], backend: FakeBackend) -> None:
    client = make_client(max_body_bytes=1024)
    big = json.dumps(COMPLETION | {"prompt": "x" * 2000}).encode()
    assert client.post("/v1/completions", content=big, headers=JSON).status_code == 413
    # Chunked: no Content-Length to trust.
    parts = (big[i : i + 100] for i in range(0, len(big), 100))
    assert client.post("/v1/completions", content=parts, headers=JSON).status_code == 413
    assert backend.calls == []


def test_api_keys(make_client: Callable[..., TestClient], backend: FakeBackend) -> None:
    client = make_client(api_keys=["right", "other"])
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}, {"Authorization": "Bearer ké"}):
        raw = {key: value.encode("utf-8") for key, value in headers.items()}
        for response in (client.post("/v1/completions", json=COMPLETION, headers=raw), client.get("/stats", headers=raw),
                         client.get("/v1/models", headers=raw)):
            assert response.status_code == 401 and "right" not in response.text
    assert backend.calls == []
    headers = {"Authorization": "Bearer other"}
    assert client.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200
    assert client.get("/health").status_code == 200


def test_health_and_stats(client: TestClient, backend: FakeBackend) -> None:
    assert client.get("/health").json()["status"] == "ok"
    stats = client.get("/stats", params={"check": 1}).json()
    assert stats["model"] == "recall" and [item["check"] for item in stats["engines"]] == ["ok", "ok"]
    backend.state[1]["health"] = {"ok": False, "reason": "the engine loop has not turned"}
    response = client.get("/health")
    assert response.status_code == 503 and "not turned" in response.json()["reason"]
    del backend.state[1]
    response = client.get("/health")
    assert response.status_code == 503 and response.json()["reason"] == "1 of 2 engines are ready"


def test_health_while_engines_start(client: TestClient, backend: FakeBackend) -> None:
    backend.state[1]["health"] = {"ok": False, "starting": True, "reason": "pinning 24.0/64.0 GiB of host memory"}
    state = client.get("/health")
    assert state.status_code == 503 and state.json()["status"] == "starting"
    assert state.json()["reason"] == "1 of 2 engines are ready; decode-1: pinning 24.0/64.0 GiB of host memory"


def test_health_is_about_the_engines_a_service_has_at_least(make_client: Callable[..., TestClient],
                                                            backend: FakeBackend) -> None:
    """One more that starts because of load is no reason to send nobody here; one that is sick is."""
    client = make_client(decode_replicas=2, decode_autoscaling={"min_replicas": 1, "max_replicas": 4})
    assert client.get("/health").json()["status"] == "ok"
    backend.state.append({"engine": "decode-2", "health": {"ok": False, "starting": True, "reason": "loading"}})
    assert client.get("/health").status_code == 200
    backend.state[2]["health"] = {"ok": False, "reason": "a step is stuck"}
    assert client.get("/health").json() == {"status": "unhealthy", "reason": "decode-2: a step is stuck",
                                            "engines": client.get("/health").json()["engines"]}
    backend.state = backend.state[:1]
    assert client.get("/health").json()["reason"] == "1 of 2 engines are ready"


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(backend: FakeBackend, stream: bool) -> None:
    """The raw ASGI conversation of a client that leaves after the first chunk (or before any, without streaming)."""
    backend.hang_at = 1
    api = create_api(small_config(), lambda: backend)
    body = json.dumps(COMPLETION | {"stream": stream}).encode()
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
             "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
             "scheme": "http", "headers": [(b"content-type", b"application/json")], "server": ("t", 80), "client": ("::1", 1)}

    async def talk() -> None:
        left = asyncio.Event()
        sent: list[dict[str, Any]] = []
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message.get("body"):
                left.set()

        task = asyncio.create_task(api(scope, receive, send))
        await asyncio.sleep(0.1)
        left.set()
        await asyncio.wait_for(task, 5)
        await asyncio.sleep(0.05)
        if stream:
            assert any(b"Hello" in message.get("body", b"") for message in sent)

    asyncio.run(talk())
    assert len(backend.aborted) == len(backend.cancelled) == 1


def test_token_ids_come_on_request_only(client: TestClient) -> None:
    plain = client.post("/v1/completions", json=COMPLETION).json()["hisparse"]["choices"][0]
    assert "token_ids" not in plain
    for stream in (False, True):
        response = client.post("/v1/completions", json=COMPLETION | {"return_token_ids": True, "stream": stream})
        data = json.loads(events(response)[-2]) if stream else response.json()
        assert len(data["hisparse"]["choices"][0]["token_ids"]) > 0

"""Bad bodies: 400, the field's name, and nothing asked of an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.serve.fakes import FakeBackend

COMPLETION = {"model": "recall", "prompt": "hi"}
CHAT = {"model": "recall", "messages": [{"role": "user", "content": "hi"}]}
JSON = {"Content-Type": "application/json"}
BAD_BODIES: list[tuple[str, Any, str | None]] = [
    ("/v1/completions", b"{", None),
    ("/v1/completions", b"[]", None),
    ("/v1/completions", b"\xff\xfe", None),
    ("/v1/completions", b"[" * 100_000, None),
    ("/v1/completions", json.dumps(COMPLETION).encode("utf-16"), None),
    ("/v1/completions", b"\xef\xbb\xbf" + json.dumps(COMPLETION).encode(), None),
    ("/v1/completions", b"", None),
    ("/v1/completions", {"model": "recall"}, "prompt"),
    ("/v1/completions", {"prompt": "hi"}, "model"),
    ("/v1/completions", COMPLETION | {"prompt": ""}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": []}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": [""]}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": [[]]}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": 5}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": None}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": ["a"] * 17}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": ["a"] * 9, "n": 2}, "prompt"),
    ("/v1/completions", COMPLETION | {"max_tokens": 0}, "max_tokens"),
    ("/v1/completions", COMPLETION | {"max_tokens": -1}, "max_tokens"),
    ("/v1/completions", COMPLETION | {"max_tokens": "many"}, "max_tokens"),
    ("/v1/completions", COMPLETION | {"temperature": -0.1}, "temperature"),
    ("/v1/completions", COMPLETION | {"temperature": 2.1}, "temperature"),
    ("/v1/completions", COMPLETION | {"temperature": "hot"}, "temperature"),
    ("/v1/completions", COMPLETION | {"top_p": -0.1}, "top_p"),
    ("/v1/completions", b'{"model": "recall", "prompt": "x", "temperature": NaN}', None),
    ("/v1/completions", b'{"model": "recall", "prompt": "x", "model": "y"}', None),
    ("/v1/completions", b'{"model": "recall", "prompt": "x", "\\ud800": 1}', None),
    ("/v1/completions", b'{"model": "recall", "prompt": "x\\ud800"}', "prompt"),
    ("/v1/completions", b'{"model": "recall", "prompt": "x", "temperature": 1e999}', "temperature"),
    ("/v1/completions", b'{"model": "recall", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", None),
    ("/v1/completions", COMPLETION | {"prompt": [True]}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": [-1]}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": [1.5]}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": ["a", 5]}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": [[1], "a"]}, "prompt"),
    ("/v1/completions", COMPLETION | {"max_tokens": "5"}, "max_tokens"),
    ("/v1/completions", COMPLETION | {"max_tokens": True}, "max_tokens"),
    ("/v1/completions", COMPLETION | {"stream": "true"}, "stream"),
    ("/v1/completions", COMPLETION | {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ("/v1/completions", COMPLETION | {"stop": "x" * 1025}, "stop"),
    ("/v1/completions", COMPLETION | {"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ("/v1/completions", COMPLETION | {"stop_token_ids": [-1]}, "stop_token_ids"),
    ("/v1/completions", COMPLETION | {"temperature": 10**400}, "temperature"),
    ("/v1/completions", COMPLETION | {"seed": 2**63}, "seed"),
    ("/v1/completions", COMPLETION | {"logprobs": True}, "logprobs"),
    ("/v1/completions", COMPLETION | {"suffix": "end"}, "suffix"),
    ("/v1/completions", COMPLETION | {"user": 5}, "user"),
    ("/v1/completions", COMPLETION | {"messages": []}, "messages"),
    ("/v1/completions", COMPLETION | {"a-b": 1}, "a-b"),
    ("/v1/completions", COMPLETION | {f"x{i}": 1 for i in range(300)}, None),
    ("/v1/completions", COMPLETION | {"top_p": 1.5}, "top_p"),
    ("/v1/completions", COMPLETION | {"top_k": -1}, "top_k"),
    ("/v1/completions", COMPLETION | {"n": 0}, "n"),
    ("/v1/completions", COMPLETION | {"n": 17}, "n"),
    ("/v1/completions", COMPLETION | {"stop": [""]}, "stop"),
    ("/v1/completions", COMPLETION | {"stop": 3}, "stop"),
    ("/v1/completions", COMPLETION | {"logprobs": 21}, "logprobs"),
    ("/v1/completions", COMPLETION | {"seed": "x"}, "seed"),
    ("/v1/completions", COMPLETION | {"cache_salt": ""}, "cache_salt"),
    ("/v1/completions", COMPLETION | {"stream_options": {"include_usage": True}}, "stream_options"),
    ("/v1/completions", COMPLETION | {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ("/v1/completions", COMPLETION | {"frequency_penalty": 0.5}, "frequency_penalty"),
    ("/v1/completions", COMPLETION | {"echo": True}, "echo"),
    ("/v1/completions", COMPLETION | {"best_of": 2}, "best_of"),
    ("/v1/completions", COMPLETION | {"wat": 1}, "wat"),
    ("/v1/chat/completions", {"model": "recall"}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": []}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user"}]}, "messages.0.content"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ("/v1/chat/completions", CHAT | {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ("/v1/chat/completions", CHAT | {"logprobs": 2}, "logprobs"),
    ("/v1/chat/completions", CHAT | {"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens"),
    ("/v1/chat/completions", CHAT | {"prompt": "x"}, "prompt"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": None}]}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
     "messages.0.tool_calls"),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, "tools"),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD_BODIES)
def test_bad_input_is_400_and_names_the_field(client: TestClient, backend: FakeBackend, path: str, body: Any,
                                              param: str | None) -> None:
    response = client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param and error["message"]
    assert backend.calls == []

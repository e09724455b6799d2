"""Keys and prompts stay out of logs, errors and print; nothing a client sends is unpickled; tenants share nothing."""

from __future__ import annotations

import ast
import base64
import json
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hisparse import cli
from hisparse.serve.errors import ApiError
from hisparse.serve.ingress import create_api
from tests.serve.fakes import FakeBackend
from tests.serve.real_service import RealBackend, Served, real_config, serving_here

KEYS = ("sk-configured-in-yaml", "sk-configured-in-file")
WORD = "xylophone"
"""What every prompt has, and nothing else."""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"red {KEYS[1]}\n")
    return file


@pytest.fixture
def client(keys_file: Path) -> Iterator[TestClient]:
    """Over everything of a replica but the model."""
    config = real_config(max_model_len=64, api_keys=[KEYS[0]], api_keys_file=str(keys_file))
    backend = RealBackend(config, scripted=True)
    with TestClient(create_api(config, lambda: backend), raise_server_exceptions=False) as client:
        client.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield client
    backend.close()


def requests_with(word: str) -> list[tuple[str, dict[str, Any]]]:
    """Good and bad, each with the word wherever a text can be."""
    text: dict[str, Any] = {"model": "recall", "prompt": f"The {word}", "max_tokens": 3, "user": word, "cache_salt": word,
                            "stop": [word]}
    chat: dict[str, Any] = {"model": "recall", "messages": [{"role": "user", "content": f"{word}?", "name": word}],
                            "max_tokens": 3, "metadata": {"a": word}}
    return [
        ("/v1/completions", text), ("/v1/completions", text | {"stream": True, "n": 2, "logprobs": 1}),
        ("/v1/completions", text | {"prompt": f"{word} " * 500}), ("/v1/completions", text | {"prompt": [word, 5]}),
        ("/v1/completions", text | {"suffix": word}), ("/v1/completions", text | {"temperature": word}),
        ("/v1/completions", text | {"stop": [word] * 9}), ("/v1/completions", text | {"prompt": {"x": word}}),
        ("/v1/completions", text | {"logit_bias": {word: 1}}), ("/v1/completions", text | {"max_tokens": 500}),
        ("/v1/chat/completions", chat), ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": [{"type": word}]}]}),
        ("/v1/chat/completions", chat | {"messages": [{"role": word, "content": word}]}),
        ("/v1/chat/completions", chat | {"messages": [*chat["messages"], {"role": "assistant", "content": word}]}),
        ("/v1/chat/completions", chat | {"tools": [{"type": "function", "function": {"name": word}}]}),
        ("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": word * 500}]}),
    ]


def printed(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> str:
    out, err = capfd.readouterr()
    return "\n".join([caplog.text, *(repr(vars(record)) for record in caplog.records), out, err])


def test_logs_and_errors_have_neither_keys_nor_prompts(client: TestClient, caplog: pytest.LogCaptureFixture,
                                                       capfd: pytest.CaptureFixture[str]) -> None:
    statuses = set()
    with caplog.at_level(logging.DEBUG):
        for path, body in requests_with(WORD):
            for key in (KEYS[0], KEYS[1], f"{KEYS[0]}-guessed"):
                response = client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
                statuses.add(response.status_code)
                if response.status_code != 200:
                    assert WORD not in response.text, response.text
                assert "sk-" not in response.text
        for text in (f'{{"model": "recall", "prompt": "{WORD}"', f'"{WORD}"', f'{{"prompt": "{WORD}", "prompt": "{WORD}"}}'):
            response = client.post("/v1/completions", content=text, headers={"Content-Type": "application/json"})
            assert response.status_code == 400 and WORD not in response.text
        assert "sk-" not in client.get("/stats").text + client.get("/health").text + client.get("/openapi.json").text
    assert statuses == {200, 400, 401, 413}
    found = printed(caplog, capfd)
    assert "request ended" in found, "the logs were captured"
    assert WORD not in found and "sk-" not in found


def test_what_fails_inside_is_logged_without_them(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend()
    client = TestClient(create_api(real_config(api_keys=[KEYS[0]]), lambda: backend), raise_server_exceptions=False)
    with caplog.at_level(logging.DEBUG):
        for error in (RuntimeError("the engine broke"), ApiError(503, "rank 0 is dead"), TimeoutError()):
            backend.error = error
            for path, body in requests_with(WORD)[:2]:
                answer = client.post(path, json=body, headers={"Authorization": f"Bearer {KEYS[0]}"})
                assert answer.status_code >= 500 and WORD not in answer.text and "sk-" not in answer.text
    found = printed(caplog, capfd)
    assert "the engine broke" in found and WORD not in found and "sk-" not in found


def test_a_dry_run_shows_no_key(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path,
                                keys_file: Path) -> None:
    yaml = tmp_path / "config.yaml"
    yaml.write_text(f"model: {{path: recall}}\nserve: {{api_keys: [{KEYS[0]}], api_keys_file: {keys_file}}}\n")
    for environ in (None, "sk-configured-in-environment,sk-second"):
        if environ is not None:
            monkeypatch.setenv("HISPARSE_SERVE__API_KEYS", environ)
        for options in ([], ["--json"], ["--set", "serve.api_keys=[sk-on-the-command-line]"]):
            monkeypatch.setattr("sys.argv", ["hisparse", "serve", str(yaml), "--dry-run", *options])
            with pytest.raises(SystemExit) as caught:
                cli.main()
            out, err = capfd.readouterr()
            assert not caught.value.code and "***" in out + err and "sk-" not in out + err


# ------------------------------------------------------------------------------------------- no pickle


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


PICKLED_TYPES = ("application/octet-stream", "application/x-pickle", "application/python-pickle",
                 "application/x-python-serialize", "application/vnd.ray.serve+pickle", "application/json",
                 "application/x-numpy", "application/x-yaml", "multipart/form-data; boundary=x", "text/plain", "")


def test_nothing_that_a_client_sends_is_unpickled(client: TestClient, tmp_path: Path) -> None:
    file = tmp_path / "exploded"
    bombs = [pickle.dumps(Bomb(file), protocol=protocol) for protocol in (0, 2, 5)]
    pickle.loads(bombs[0])
    assert file.exists(), "it works where something unpickles"
    file.unlink()
    paths = [*json.loads(client.get("/openapi.json").text)["paths"], "/openapi.json"]
    for bomb in bombs:
        text = base64.b64encode(bomb).decode()
        for path in paths:
            for kind in PICKLED_TYPES:
                response = client.request("POST", path, content=bomb, headers={
                    "Content-Type": kind, "X-Serialized": text, "Cookie": f"session={text}"}, params={"check": text})
                assert response.status_code in (400, 405, 415)
        for field in ("prompt", "user", "cache_salt", "stop"):
            body = {"model": "recall", "prompt": "x", "max_tokens": 1} | {field: text[:250]}
            client.post("/v1/completions", json=body | {field: f"data:application/x-pickle;base64,{text}"[:250]})
            client.post("/v1/completions", json=body)
    assert not file.exists()


def calls_of(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_no_module_of_ours_can_read_code_from_data() -> None:
    root = Path(cli.__file__).parents[1]
    modules = sorted(root.rglob("*.py"))
    assert len(modules) > 100
    for module in modules:
        tree = ast.parse(module.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.name for node in imports for alias in node.names} | {getattr(node, "module", None) for node in imports}
        bad = names & {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
        assert not bad, f"{module}: {bad}"
        for name, call in calls_of(tree):
            keywords = {item.arg: ast.unparse(item.value) for item in call.keywords}
            assert name not in ("eval", "exec", "yaml.load", "yaml.unsafe_load"), f"{module}:{call.lineno}"
            assert name not in ("np.load", "numpy.load") or keywords.get("allow_pickle") == "False", f"{module}:{call.lineno}"
            assert name != "torch.load" or keywords.get("weights_only") == "True", f"{module}:{call.lineno}"


# ------------------------------------------------------------------------------------------- tenants


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[Served]:
    keys = tmp_path / "keys"
    keys.write_text("red r1\nred r2\nblue b1\nlone\n")
    with serving_here(real_config(api_keys_file=str(keys))) as served:
        yield served


def test_no_hit_across_tenants_or_salts(tenants: Served, record_property: Callable[[str, object], None]) -> None:
    """`cached_tokens` decides; the times to the first token are written into the report as what an attacker would see."""
    prompt = [(11 * i) % 500 + 300 for i in range(64 * 6 + 5)]

    def ask(key: str, salt: str | None) -> int:
        with tenants.client(key) as client:
            began, first_s, usage = time.monotonic(), None, None
            for chunk in client.completions.create(
                model="recall", prompt=prompt, max_tokens=2, temperature=0, stream=True,
                stream_options={"include_usage": True}, extra_body={"cache_salt": salt, "ignore_eos": True},
            ):
                first_s, usage = first_s or time.monotonic() - began, chunk.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        record_property(f"key {key}, salt {salt!r}, {cached} cached: seconds to the first token", round(first_s or 0, 4))
        assert cached is not None
        return cached

    assert ask("r1", "s") == 0 and ask("r1", "s") == 64 * 6, "the owner's second request"
    assert ask("r2", "s") == 64 * 6, "another key of the same tenant"
    for key, salt in (("b1", "s"), ("lone", "s"), ("b1", "red\ns"), ("b1", None), ("lone", "red"), ("r1", None), ("r1", "t"),
                      ("r2", "s "), ("r1", "red\ns")):
        assert ask(key, salt) == 0, f"{key} with {salt!r} sees what red has cached"
    assert ask("b1", "s") == 64 * 6, "and each has its own"

"""The guard before every endpoint, and the count of what passed it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hisparse.metrics import MemorySink
from hisparse.metrics.catalogue import HTTP_REQUESTS, HTTP_SECONDS
from hisparse.serve.errors import ApiError
from hisparse.serve.guard import is_local, is_own_name
from hisparse.serve.ingress import create_api
from tests.serve.conftest import small_config
from tests.serve.fakes import FakeBackend

COMPLETION = {"model": "recall", "prompt": "hi", "cache_salt": "mine"}
FAR = ("203.0.113.9", 4000)


def client_of(backend: FakeBackend, peer: tuple[str, int] = ("127.0.0.1", 4000), sink: MemorySink | None = None,
              **serve: Any) -> TestClient:
    return TestClient(create_api(small_config(**serve), lambda: backend, sink), client=peer, raise_server_exceptions=False)


@pytest.mark.parametrize("path", ["/stats", "/v1/models", "/v1/models/recall", "/v1/completions", "/v1/chat/completions",
                                  "/nowhere", "/health/../stats", "//stats", "/docs", "/openapi.json"])
def test_without_a_key_nothing_but_health_answers(backend: FakeBackend, path: str) -> None:
    client = client_of(backend, api_keys=["k"])
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        response = client.request(method, path)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/health", headers={"Authorization": "Bearer k"}).json()["engines"]
    assert backend.calls == []


def test_without_keys_only_this_machine_is_served(backend: FakeBackend) -> None:
    far = client_of(backend, FAR)
    response = far.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 403 and "serve.api_keys_file" in response.json()["error"]["message"]
    assert far.get("/stats").status_code == 403 and far.get("/health").status_code == 200 and backend.calls == []
    assert client_of(backend).post("/v1/completions", json=COMPLETION).status_code == 200
    assert client_of(backend, FAR, allow_no_keys=True).post("/v1/completions", json=COMPLETION).status_code == 200
    keyed = client_of(backend, FAR, api_keys=["k"])
    assert keyed.post("/v1/completions", json=COMPLETION, headers={"Authorization": "bearer k"}).status_code == 200


@pytest.mark.parametrize(("host", "local"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False),
    ("10.0.0.1", False), ("0.0.0.0", False), ("fe80::1", False), ("unknown", False), ("", False), ("localhost", False),
])
def test_who_is_local(host: str, local: bool) -> None:
    assert is_local((host, 1)) is local
    assert is_local(None), "a UNIX socket"


@pytest.mark.parametrize(("host", "own"), [
    ("127.0.0.1:8000", True), ("127.0.0.1", True), ("[::1]:8000", True), ("[::1]", True), ("localhost:8000", True), ("", True),
    ("LOCALHOST", True), ("app.localhost:80", True), ("my-machine:8000", True), ("10.1.2.3:8000", True), ("localhost.", True),
    ("evil.example", False), ("evil.example:8000", False), ("127.0.0.1.evil.example", False), ("evil.example.", False),
    ("localhost.evil.example:80", False), ("::1.evil.example", False), ("x:y.example", False),
])
def test_a_web_page_cannot_claim_to_be_this_machine(backend: FakeBackend, host: str, own: bool) -> None:
    """A name that an attacker's DNS lets point here (rebinding) comes from a local peer, but with that name in Host."""
    assert is_own_name(host) is own
    if host:
        response = client_of(backend).get("/v1/models", headers={"Host": host})
        assert response.status_code == (200 if own else 403)
        assert client_of(backend, api_keys=["k"]).get("/v1/models", headers={"Host": host, "Authorization": "Bearer k"}
                                                      ).status_code == 200, "whoever has a key may use any name"
        assert client_of(backend, allow_no_keys=True).get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
                                  "text/plain; application/json"])
def test_a_web_page_cannot_post_here_behind_its_readers_back(backend: FakeBackend, kind: str | None) -> None:
    """These types need no leave from a browser's preflight, which in turn gets none here."""
    headers = {} if kind is None else {"Content-Type": kind}
    response = client_of(backend).post("/v1/completions", content=b'{"model": "recall", "prompt": "x"}', headers=headers)
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"] and backend.calls == []
    preflight = client_of(backend).options("/v1/completions", headers={
        "Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 405 and not any("access-control" in name for name in preflight.headers)
    for good in ("application/json", "Application/JSON; charset=utf-8"):
        assert client_of(backend).post("/v1/completions", content=b'{"model": "recall", "prompt": "x"}',
                                       headers={"Content-Type": good}).status_code == 200


def salts(backend: FakeBackend, key: str, share: bool, body: dict[str, Any], keys: Path) -> str | None:
    client = client_of(backend, api_keys_file=str(keys), share_prefixes=share)
    headers = {"Authorization": f"Bearer {key}"}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assert client.post(path, json={"model": "recall"} | body, headers=headers).status_code == 200
    return backend.calls[-1].cache_salt


def test_tenants_get_their_own_prefixes_whatever_salt_they_send(backend: FakeBackend, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("red r1\nred r2\nblue b1\nlone\n")
    for body in ({"prompt": "x"}, {"prompt": "x", "cache_salt": "red"},
                 {"messages": [{"role": "user", "content": "x"}], "cache_salt": "red\n"}):
        found = {key: salts(backend, key, False, body, keys) for key in ("r1", "r2", "b1", "lone")}
        assert found["r1"] == found["r2"] and len(set(found.values())) == 3
        assert not any(key in (salt or "") for salt in found.values() for key in ("r1", "b1", "lone"))
        assert {salts(backend, key, True, body, keys) for key in ("r1", "b1")} == {body.get("cache_salt")}


def test_every_answer_names_its_request(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    client, headers = client_of(backend, api_keys=["k"]), {"Authorization": "Bearer k"}
    seen = set()
    for stream in (False, True):
        response = client.post("/v1/completions", json=COMPLETION | {"n": 2, "stream": stream}, headers=headers)
        request_id = response.headers["x-request-id"]
        assert f'"cmpl-{request_id}"' in response.text, "the client's id of the answer has it"
        assert {call.request_id for call in backend.calls} == {f"cmpl-{request_id}-{i}" for i in range(2)}
        seen.add(request_id)
        backend.calls.clear()
    for response in (client.post("/v1/completions", json={}, headers=headers), client.get("/stats"),
                     client.get("/x", headers=headers)):
        seen.add(response.headers["x-request-id"])

    async def broken(check: bool) -> list[dict[str, Any]]:
        raise KeyError("inside")

    monkeypatch.setattr(backend, "engines", broken)
    response = client.get("/stats", headers=headers)
    assert response.status_code == 500
    seen.add(response.headers["x-request-id"])
    assert len(seen) == 6 and all(len(item) == 32 for item in seen)


def test_a_request_that_has_a_name_keeps_it(backend: FakeBackend) -> None:
    """As Ray Serve's proxy names every request; then it also puts the name into the answer's head."""
    for proxied in (False, True):
        app = create_api(small_config(), lambda: backend, proxied=proxied)
        client = TestClient(app, client=("127.0.0.1", 4000), raise_server_exceptions=False)
        answers = [client.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "trace-7.a_b"}) for _ in range(2)]
        ids = {answer.json()["id"] for answer in answers}
        assert len(ids) == 2 and all(item.startswith("cmpl-trace-7.a_b-") for item in ids), "engines need distinct ids"
        for answer in answers:
            assert answer.headers.get_list("x-request-id") == ([] if proxied else ["trace-7.a_b"])
            assert answer.headers["x-content-type-options"] == "nosniff"
    for odd in ("x" * 65, "a b", '{"level": "ERROR"}', "", "é"):
        answer = client_of(backend).post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": odd.encode()})
        assert len(answer.headers["x-request-id"]) == 32 and answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


def test_requests_are_counted_and_timed_to_their_end(make_client: Callable[..., TestClient]) -> None:
    backend, sink = FakeBackend(), MemorySink()
    client = client_of(backend, sink=sink, api_keys=["k"])
    headers = {"Authorization": "Bearer k"}

    def count(endpoint: str, status: int) -> float | None:
        return sink.value(HTTP_REQUESTS, model="recall", endpoint=endpoint, status=str(status))

    began = time.monotonic()
    for stream in (False, True):
        assert client.post("/v1/completions", json=COMPLETION | {"stream": stream}, headers=headers).status_code == 200
    took = time.monotonic() - began
    client.post("/v1/completions", json=COMPLETION)
    client.post("/v1/chat/completions", json={}, headers=headers)
    client.get("/wp-login.php", headers=headers)
    backend.error = ApiError(503, "rank 0 is dead")
    client.post("/v1/completions", json=COMPLETION, headers=headers)
    assert (count("/v1/completions", 200), count("/v1/completions", 401), count("/v1/completions", 503)) == (2, 1, 1)
    assert count("/v1/chat/completions", 400) == 1 and count("other", 404) == 1
    assert sink.value(HTTP_SECONDS, model="recall", endpoint="/v1/completions") == 4
    sums = [line for line in sink.text().splitlines() if "_seconds_sum" in line and "/v1/completions" in line]
    backend.error = KeyError("secret of the inside")
    response = client.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.status_code == 500 and count("/v1/completions", 500) == 1 and "secret" not in response.text
    assert 0 < float(sums[0].split()[-1]) < took + 1

"""Who is a stranger, as Ray Serve's own proxy tells it: the address of the peer must reach the guard."""

from __future__ import annotations

import socket

import httpx
import pytest
from fastapi import FastAPI
from ray import serve

from hisparse.cli import free_port
from hisparse.config import load_config
from hisparse.serve.ingress import create_api
from tests.serve.fakes import FakeBackend

pytestmark = pytest.mark.usefixtures("cluster")


def other_address() -> str | None:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            found = str(probe.getsockname()[0])
        except OSError:
            return None
    return None if found.startswith("127.") else found


def build() -> FastAPI:
    backend = FakeBackend()
    return create_api(load_config({"model": {"path": "recall"}}, environ={}), lambda: backend)


class Ingress:
    pass


def test_without_keys_only_this_machine_is_served_whatever_serve_listens_on() -> None:
    address = other_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    port = free_port("127.0.0.1")
    serve.start(http_options={"host": "0.0.0.0", "port": port})
    try:
        deployment = serve.deployment(name="ingress", ray_actor_options={"num_cpus": 0})(serve.ingress(build)(Ingress))
        serve.run(deployment.bind(), name="guarded", route_prefix="/")
        body = {"model": "recall", "prompt": "hi"}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30).status_code == 200
        far = httpx.post(f"http://{address}:{port}/v1/completions", json=body, timeout=30)
        assert far.status_code == 403 and far.json()["error"]["code"] == "no_api_keys"
        assert httpx.get(f"http://{address}:{port}/stats", timeout=30).status_code == 403
        assert httpx.get(f"http://{address}:{port}/health", timeout=30).status_code == 200
    finally:
        serve.shutdown()

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hisparse.config import HiSparseConfig, load_config
from hisparse.serve.ingress import create_api
from tests.serve.fakes import FakeBackend


def small_config(**serve: Any) -> HiSparseConfig:
    return load_config({"model": {"path": "recall", "max_model_len": 512}, "serve": serve}, environ={})


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def make_client(backend: FakeBackend) -> Iterator[Callable[..., TestClient]]:
    clients = []

    def make(**serve: Any) -> TestClient:
        client = TestClient(create_api(small_config(**serve), lambda: backend), client=("127.0.0.1", 4000),
                            raise_server_exceptions=False)
        clients.append(client.__enter__())
        return client

    yield make
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    return make_client()

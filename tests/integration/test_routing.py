"""The router in Ray Serve: replicas without engines, requests of conversations, one replica that is busy, one that goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from hisparse.cli import free_port
from hisparse.serve.app import retry_routing
from hisparse.serve.calls import GenerateCall, PrefillCall

pytestmark = pytest.mark.usefixtures("cluster")
SLACK = 2


@serve.deployment(num_replicas=3, max_ongoing_requests=100, ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=1.0,
                  request_router_config=RequestRouterConfig(request_router_class="hisparse.serve.affinity.PrefixRouter",
                                                            request_router_kwargs={"slack": SLACK}))
class Named:
    """Answers its name, then holds the request open as long as the client wants."""

    async def generate(self, call: GenerateCall) -> AsyncIterator[str]:
        yield serve.get_replica_context().replica_id.unique_id
        await asyncio.sleep(call.timeout_s)


@pytest.fixture(scope="module")
def handle(cluster: str) -> Iterator[DeploymentHandle[Any]]:
    serve.start(http_options={"host": "127.0.0.1", "port": free_port("127.0.0.1")})
    try:
        yield serve.run(Named.bind(), name="named", route_prefix="/named").options(stream=True)
    finally:
        serve.shutdown()


def send(handle: DeploymentHandle[Any], text: str, hold_s: float = 0.0) -> tuple[str, Any]:
    """(replica, open response)."""
    response = handle.generate.remote(GenerateCall(request_id="r", text=text, timeout_s=hold_s))
    return next(response), response


def ask(handle: DeploymentHandle[Any], asked: str | GenerateCall) -> str:
    """The replica that answered, once the request has ended."""
    call = GenerateCall(request_id="r", text=asked, timeout_s=0.0) if isinstance(asked, str) else asked
    (name,) = handle.generate.remote(call)
    return str(name)


def test_conversations_stay_where_they_began(handle: DeploymentHandle[Any]) -> None:
    talks = {f"{i}": f"conversation {i} " * 40 for i in range(12)}
    homes = {name: ask(handle, text) for name, text in talks.items()}
    assert len(set(homes.values())) == 3, "new conversations are spread"
    for turn in range(4):
        for name in talks:
            talks[name] += f"turn {turn} " * 40
            assert ask(handle, talks[name]) == homes[name], (name, turn)


def test_a_busy_home_is_left_for_others(handle: DeploymentHandle[Any]) -> None:
    text = "a very popular prompt " * 60
    home = ask(handle, text)
    held = [send(handle, text, hold_s=60.0) for _ in range(3 * (SLACK + 2))]
    try:
        places = [name for name, _ in held]
        assert places[0] == home and places.count(home) >= SLACK, "as long as it has little more to do than others"
        assert set(places) - {home}, "the others have nothing to do"
    finally:
        for _, response in held:
            response.cancel()


@pytest.mark.parametrize("text", ["short", "a prompt with a home " * 60])
def test_a_repeated_request_goes_elsewhere(handle: DeploymentHandle[Any], text: str) -> None:
    """However little the replica that failed has to do, and although it has the prefix."""
    for i in range(4):
        first = GenerateCall(request_id=f"{text[:5]}{i}", text=text, timeout_s=0.0)
        attempts = [first, *(replace(first, request_id=f"{first.request_id}-r{n}", retry_of=first.request_id) for n in (2, 3))]
        places = [ask(handle, call) for call in attempts]
        assert places[0] != places[1] != places[2], places


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=1.0,
                  request_router_config=retry_routing())
class Prefill:
    """Answers its name."""

    async def prefill(self, call: PrefillCall) -> str:
        return serve.get_replica_context().replica_id.unique_id


def test_a_repeated_call_goes_to_another_prefill_replica(handle: DeploymentHandle[Any]) -> None:
    prefill = serve.run(Prefill.bind(), name="prefill", route_prefix="/prefill")
    for i in range(8):
        first = PrefillCall(request_id=f"d{i}-p1", prompt_token_ids=(1, 2, 3))
        attempts = [first, *(replace(first, request_id=f"d{i}-p{n}", retry_of=first.request_id) for n in (2, 3))]
        places = [prefill.prefill.remote(call).result(timeout_s=60) for call in attempts]
        assert places[0] != places[1] != places[2], places


def test_a_home_that_is_gone_is_replaced(handle: DeploymentHandle[Any]) -> None:
    text = "whose home goes away " * 60
    home = ask(handle, text)
    serve.run(Named.options(num_replicas=1).bind(), name="named", route_prefix="/named")
    deadline = time.monotonic() + 60
    while len(serve.status().applications["named"].deployments["Named"].replica_states) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    places = {ask(handle, text) for _ in range(4)}
    assert len(places) == 1, f"one replica is left; the conversation began at {home}"

"""Handles, executor, coordinator and placement on a real cluster, with an engine that has no model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from hisparse.actors import handles
from hisparse.actors.coordinator import CoordinatorActor
from hisparse.actors.executor import RayExecutor
from hisparse.actors.handles import Actor, find_actors, gather, start_actor
from hisparse.actors.placement import Placement
from hisparse.config import load_config
from hisparse.errors import ConfigError, EngineDeadError, RequestError
from hisparse.types import FinishReason, RequestOutput, ScheduledChunk, StepCommand, StepResult
from tests.actors.fakes import FakeCore
from tests.actors.test_coordinator import request

pytestmark = pytest.mark.usefixtures("cluster")


class Rank:
    """A rank without a model."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def pid(self) -> int:
        return os.getpid()

    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self, text: str) -> None:
        raise RequestError(text, field="prompt", status=413)

    def execute(self, command: StepCommand) -> StepResult:
        if command.step == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if command.step == 14:
            time.sleep(60)
        return StepResult(step=command.step, rank=self.rank, incarnation=1, worked_s=float(len(command.chunks)))


class Counter:
    """An async actor with a stream."""

    async def count(self, limit: int) -> AsyncIterator[int]:
        for i in range(limit):
            yield i
        if limit == 3:
            raise EngineDeadError("three")

    async def fail(self) -> None:
        raise RequestError("no", field="n")


async def until_dead(actor: Actor) -> None:
    """Calls until the kill has arrived: it is Ray's to send, so a call right behind it may still be answered."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(RequestError):
            await actor.acall("fail", timeout_s=30)
        await asyncio.sleep(0.01)
    raise TimeoutError(f"{actor.label} still answers 30 s after its kill")


@pytest.fixture
def ranks() -> Iterator[list[Actor]]:
    actors = [start_actor(Rank, i, label=f"rank {i} of e") for i in range(2)]
    gather([actor.start("pid") for actor in actors], 60)
    yield actors
    for actor in actors:
        actor.kill()


def test_calls_errors_and_deadlines(ranks: list[Actor]) -> None:
    with pytest.raises(RequestError, match="too long") as caught:
        ranks[0].call("fail", "too long", timeout_s=10)
    assert caught.value.field == "prompt" and caught.value.status == 413
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="rank 1 of e.nap"):
        gather([ranks[0].start("pid"), ranks[1].start("nap", 3.0)], 0.5)
    with pytest.raises(RequestError):  # the first failure counts, even while another still runs
        gather([ranks[1].start("nap", 1.0), ranks[0].start("fail", "x")], 10)
    assert time.monotonic() - began < 2.5
    assert gather([ranks[0].start("nap", 0.1), ranks[1].start("nap", 0.0)], 10) == [0.1, 0.0]


def test_streams_and_async_calls() -> None:
    async def body() -> None:
        actor = start_actor(Counter, label="counter", name="coordinator/test/c-1")
        assert [i async for i in actor.stream("count", 5)] == [0, 1, 2, 3, 4]
        three = actor.stream("count", 3)
        assert [await anext(three) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(EngineDeadError, match="three"):
            await anext(three)
        with pytest.raises(RequestError, match="no"):
            await actor.acall("fail", timeout_s=5)
        assert [found.label for found in await asyncio.to_thread(find_actors, "coordinator/test/")] == ["coordinator/test/c-1"]
        actor.kill()
        actor.kill()
        with pytest.raises(EngineDeadError, match="counter"):
            await until_dead(actor)
        with pytest.raises(EngineDeadError, match="counter"):
            await anext(actor.stream("count", 2))

    asyncio.run(body())


def test_executor_steps(ranks: list[Actor]) -> None:
    executor = RayExecutor(ranks, 30.0)
    chunk = ScheduledChunk(request_id="r", seat=0, first_position=0, token_ids=tuple(range(512)))
    for step in (1, 2):
        executor.submit(StepCommand(step=step, chunks=(chunk,) * step))
    assert [[r.worked_s for r in executor.collect(30.0)] for _ in (1, 2)] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_killed_rank_is_noticed_at_once(ranks: list[Actor]) -> None:
    executor = RayExecutor(ranks, 30.0)
    executor.submit(StepCommand(step=13))
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"step 13.*rank \d of e.* dead"):
        executor.collect(30.0)
    assert time.monotonic() - began < 5


def test_a_stopped_rank_is_noticed_at_the_deadline(ranks: list[Actor]) -> None:
    pid = ranks[1].call("pid", timeout_s=10)
    os.kill(pid, signal.SIGSTOP)
    try:
        executor = RayExecutor(ranks, 0.5)
        executor.submit(StepCommand(step=1))
        with pytest.raises(EngineDeadError, match="rank 1 of e.* stuck"):
            executor.collect(30.0)
    finally:
        os.kill(pid, signal.SIGCONT)


def fake_core(step_s: float = 0.0) -> FakeCore:
    return FakeCore(step_s)


def test_coordinator_streams_and_aborts() -> None:
    async def body() -> None:
        actor = start_actor(CoordinatorActor, label="coordinator", max_concurrency=100)
        await actor.acall("start", {}, fake_core, 0.002, timeout_s=60)

        async def collect(asked: Any) -> list[RequestOutput]:
            return [output async for output in actor.stream("generate", asked)]

        answers = await asyncio.gather(*(collect(request(f"r{i}", 5 + i)) for i in range(8)))
        assert [sum(len(o.new_token_ids) for o in outputs) for outputs in answers] == [5 + i for i in range(8)]
        endless = asyncio.create_task(collect(request("long", 1_000_000)))
        await asyncio.sleep(0.2)
        await actor.acall("abort", "long", timeout_s=5)
        assert (await asyncio.wait_for(endless, 5))[-1].finish_reason is FinishReason.ABORT
        with pytest.raises(RequestError, match="empty"):
            await collect(request("bad", 3, ()))
        assert (await actor.acall("stats", True, timeout_s=5))["check"] == "ok"
        assert await actor.acall("shutdown", timeout_s=15)
        assert not (await actor.acall("health", timeout_s=5))["ok"]
        actor.kill()

    asyncio.run(body())


def test_b39_a_group_that_cannot_be_had_fails_in_time_and_leaves_nothing() -> None:
    config = load_config({"model": {"path": "recall"}, "tensor_parallel_size": 8}, environ={})
    before = handles.ray.available_resources().get("CPU")
    with pytest.raises(ConfigError, match="9 GPU"):
        handles.create_placement([{"GPU": 1.0}] * 9, timeout_s=1.0)
    placement = Placement.acquire(config, timeout_s=20.0)
    actor = start_actor(Rank, 7, label="rank 7", placement=placement.group, bundle=placement.rank_bundle(7), num_cpus=0.1)
    assert actor.call("pid", timeout_s=60) > 0
    placement.release()
    with pytest.raises(EngineDeadError):
        actor.call("nap", 5.0, timeout_s=20)
    deadline = time.monotonic() + 10
    while handles.ray.available_resources().get("CPU") != before:
        assert time.monotonic() < deadline, "the bundles were not given back"
        time.sleep(0.2)

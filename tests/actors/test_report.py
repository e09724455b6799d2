"""The coordinator's reports to a metrics sink: they go on while a step is stuck, and say so when the engine has failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from hisparse.actors.coordinator import CoordinatorActor
from hisparse.errors import EngineDeadError
from hisparse.metrics import CATALOGUE, MemorySink
from hisparse.metrics.catalogue import ENGINE_UP, LOOP_AGE
from tests.actors.fakes import FakeCore
from tests.actors.test_coordinator import collect, request, with_actor

WHO = {"model": "m", "role": "colocated", "engine": "e"}
REQUESTS = next(metric for metric in CATALOGUE if metric.name == "hisparse_requests")


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 3 s")


def test_reports_follow_the_engine() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        sink = MemorySink()
        await actor.report(lambda: sink, WHO, 0.01)
        await until(lambda: sink.value(REQUESTS, **WHO, state="running") == 0)
        assert sink.value(ENGINE_UP, **WHO) == 1
        core.step_s = 0.005
        task = asyncio.create_task(collect(actor, request(tokens=200)))
        await until(lambda: sink.value(REQUESTS, **WHO, state="running") == 1)
        await actor.abort("r")
        await task
        await until(lambda: sink.value(REQUESTS, **WHO, state="running") == 0)

    with_actor(body)


def test_a_stuck_step_is_reported_and_so_is_its_end() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        sink = MemorySink()
        core.block = threading.Event()
        await actor.report(lambda: sink, WHO, 0.01)
        task = asyncio.create_task(collect(actor, request()))
        await until(lambda: sink.value(ENGINE_UP, **WHO) == 0)
        assert (sink.value(LOOP_AGE, **WHO) or 0) > 0.2
        core.block.set()
        await task
        await until(lambda: sink.value(ENGINE_UP, **WHO) == 1)

    with_actor(body, stall_s=0.2)


def test_a_dead_engine_is_down_and_reports_do_not_end() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        sink = MemorySink()
        await actor.report(lambda: sink, WHO, 0.01)
        core.fail = EngineDeadError("rank 1 is dead")
        await collect(actor, request())
        await until(lambda: sink.value(ENGINE_UP, **WHO) == 0)
        age = sink.value(LOOP_AGE, **WHO) or 0
        await until(lambda: (sink.value(LOOP_AGE, **WHO) or 0) > age)

    with_actor(body)

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from hisparse.actors.coordinator import CoordinatorActor, EngineRequest
from hisparse.actors.output_streams import merge
from hisparse.errors import EngineDeadError, InvariantError, RequestError
from hisparse.types import FinishReason, RequestOutput, RequestStats, SamplingParams
from tests.actors.fakes import FakeCore


def request(request_id: str = "r", tokens: int = 3, prompt: tuple[int, ...] = (1, 2)) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=tokens))


def with_actor(body: Callable[[CoordinatorActor, FakeCore], Awaitable[Any]], core: FakeCore | None = None,
               stall_s: float = 60.0) -> Any:
    async def run() -> Any:
        fake = core or FakeCore()
        actor = CoordinatorActor(stall_s)
        await actor.start({"rank_pids": [7]}, lambda: fake)
        try:
            return await asyncio.wait_for(body(actor, fake), 10)
        finally:
            if fake.block is not None:
                fake.block.set()
            assert await actor.shutdown()

    return asyncio.run(run())


async def collect(actor: CoordinatorActor, asked: EngineRequest) -> list[RequestOutput]:
    return [output async for output in actor.generate(asked)]


def test_streams_of_several_requests_do_not_mix() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        answers = await asyncio.gather(*(collect(actor, request(f"r{i}", i + 1)) for i in range(5)))
        for i, outputs in enumerate(answers):
            assert {output.request_id for output in outputs} == {f"r{i}"}
            assert sum(len(output.new_token_ids) for output in outputs) == i + 1
            assert [output.finish_reason for output in outputs][-1] is FinishReason.LENGTH
        assert core.aborted == []

    with_actor(body)


def test_a_slow_listener_gets_merged_increments() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        outputs = []
        async for output in actor.generate(request(tokens=50)):
            outputs.append(output)
            await asyncio.sleep(0.05)
        assert len(outputs) < 10
        assert [token for output in outputs for token in output.new_token_ids] == list(range(1, 51))
        assert "".join(output.new_text for output in outputs) == "".join(f"{i} " for i in range(1, 51))

    with_actor(body)


def test_merge_keeps_the_end() -> None:
    first = RequestOutput(request_id="r", new_token_ids=(1,), new_text="a")
    last = RequestOutput(request_id="r", new_token_ids=(2,), new_text="b", finish_reason=FinishReason.STOP,
                         stats=RequestStats(prompt_tokens=2), kv_transfer_params={"x": 1})
    whole = merge(first, last)
    assert (whole.new_token_ids, whole.new_text) == ((1, 2), "ab")
    assert (whole.finish_reason, whole.stats, whole.kv_transfer_params) == (last.finish_reason, last.stats, {"x": 1})


def test_refused_requests_leave_nothing() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        with pytest.raises(RequestError, match="empty"):
            await collect(actor, request(prompt=()))
        assert len(await collect(actor, request())) >= 1, "the id is free again"
        assert core.aborted == []

    with_actor(body)


def test_ids_in_use_are_refused_and_the_first_one_goes_on() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        core.step_s = 0.002
        first = asyncio.create_task(collect(actor, request(tokens=20)))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="in use"):
            await collect(actor, request())
        assert sum(len(output.new_token_ids) for output in await first) == 20

    with_actor(body)


@pytest.mark.parametrize("how", ["close", "cancel", "abort"])
def test_who_stops_listening_aborts(how: str) -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        core.step_s = 0.002
        if how == "close":
            stream = actor.generate(request(tokens=100_000))
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
        else:
            task = asyncio.create_task(collect(actor, request(tokens=100_000)))
            await asyncio.sleep(0.05)
            if how == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await actor.abort("r")
                assert (await task)[-1].finish_reason is FinishReason.ABORT
        await asyncio.sleep(0.05)
        assert core.aborted == ["r"] and core.left == {}

    with_actor(body)


def test_the_event_loop_answers_while_a_step_is_stuck() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        core.block = threading.Event()
        task = asyncio.create_task(collect(actor, request()))
        await asyncio.sleep(0.3)
        health = await asyncio.wait_for(actor.health(), 1.0)
        assert not health["ok"] and "stuck" in health["reason"]
        core.block.set()
        await task
        assert (await actor.health())["ok"]

    with_actor(body, stall_s=0.2)


def test_a_dead_rank_ends_every_request_with_the_reason() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        core.step_s = 0.002
        tasks = [asyncio.create_task(collect(actor, request(f"r{i}", 100_000))) for i in range(3)]
        await asyncio.sleep(0.05)
        core.fail = EngineDeadError("step 9: rank 1 is dead")
        for task in tasks:
            last = (await task)[-1]
            assert last.finish_reason is FinishReason.ERROR and "rank 1 is dead" in (last.error or "")
        with pytest.raises(EngineDeadError, match="rank 1"):
            await collect(actor, request("late"))
        health = await actor.health()
        assert not health["ok"] and "rank 1" in health["reason"]
        stats = await actor.stats(True)
        assert not stats["health"]["ok"] and "check" not in stats
        await actor.abort("r0")

    with_actor(body)


def test_stats_and_check() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        stats = await actor.stats(True)
        assert stats["running"] == 0 and stats["rank_pids"] == [7] and stats["check"] == "ok" and stats["health"]["ok"]
        core.broken = "block 5 is free and referenced"
        assert (await actor.stats(True))["check"] == core.broken
        assert "check" not in await actor.stats()
        with pytest.raises(InvariantError, match="block 5"):
            await actor.check()

    with_actor(body)


def test_residency_names_tenants_of_the_requests_it_lists() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        core.step_s = 0.002
        asked = [replace(request(name, 100_000), tenant=tenant) for name, tenant in (("r0", "red"), ("r1", ""), ("r2", "blue"))]
        tasks = [asyncio.create_task(collect(actor, item)) for item in asked]
        await collect(actor, replace(request("past", 1), tenant="red"))
        view = await actor.residency()
        assert {item["id"] for item in view["requests"]} == {"r0", "r1", "r2"} and view["health"]["ok"]
        assert view["tenants"] == {"r0": "red", "r2": "blue", "past": "red"}, "also of requests that have ended"
        assert core.threads == {"hisparse-engine-loop"}, "the engine is asked between its steps"
        for item in asked:
            await actor.abort(item.request_id)
        await asyncio.gather(*tasks)

    with_actor(body)


def test_who_only_looks_does_not_wait_for_a_stuck_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse.actors.coordinator.SAMPLE_TIMEOUT_S", 0.05)

    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        core.block = threading.Event()
        task = asyncio.create_task(collect(actor, request()))
        await asyncio.sleep(0.05)
        view = await actor.residency()
        assert "requests" not in view and "ok" in view["health"]
        core.block.set()
        await task
        assert (await actor.residency())["requests"] == []
        core.fail = EngineDeadError("rank 1 is dead")
        await collect(actor, request())
        assert (await actor.residency())["health"]["reason"] == "rank 1 is dead"

    with_actor(body)


def test_complete_is_the_whole_answer() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        whole = await actor.complete(request(tokens=4))
        assert whole.new_token_ids == (1, 2, 3, 4) and whole.finish_reason is FinishReason.LENGTH

    with_actor(body)


def test_shutdown_ends_open_requests() -> None:
    async def run() -> list[RequestOutput]:
        core = FakeCore(step_s=0.002)
        actor = CoordinatorActor()
        await actor.start({}, lambda: core)
        task = asyncio.create_task(collect(actor, request(tokens=100_000)))
        await asyncio.sleep(0.05)
        assert await actor.shutdown() and await actor.shutdown()
        return await asyncio.wait_for(task, 5)

    assert asyncio.run(run())[-1].finish_reason in (FinishReason.ERROR, FinishReason.ABORT)


def test_before_the_start_everything_is_refused() -> None:
    async def run() -> None:
        actor = CoordinatorActor()
        with pytest.raises(EngineDeadError, match="not started"):
            await collect(actor, request())
        assert not (await actor.health())["ok"]
        assert await actor.shutdown()

    asyncio.run(run())


def test_requests_travel() -> None:
    asked = request()
    assert pickle.loads(pickle.dumps(asked)) == asked

"""The orderly end of an engine: admission stops, streams end, then the stages in their order, each within its time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hisparse.actors.coordinator import CoordinatorActor
from hisparse.actors.engine import EngineActors, EngineIdentity
from hisparse.actors.keeper import Segment
from hisparse.actors.memory_plan import MemoryPlan
from hisparse.actors.stop_budget import KEEPER_S, LOOP_S, RANKS_S, StopBudget
from hisparse.config import load_config
from hisparse.errors import EngineDeadError
from tests.actors.fakes import FakeCore
from tests.actors.test_coordinator import collect, request, with_actor

GIB = 1 << 30


def test_a_drain_waits_for_streams() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        core.step_s, core.never_begun = 0.005, 2
        stream = asyncio.create_task(collect(actor, request(tokens=60)))
        while core.steps < 3:
            await asyncio.sleep(0.005)
        report = await actor.drain(5.0)
        assert core.draining and report["drained"] and report["cancelled"] == 2 and report["open"] == {}
        assert stream.done() or (await stream)[-1].finish_reason is not None
        assert sum(len(output.new_token_ids) for output in await stream) == 60, "nothing was cut"

    with_actor(body)


def test_a_drain_that_takes_too_long_says_what_is_open() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        core.step_s = 0.005
        stream = asyncio.create_task(collect(actor, request(tokens=100_000)))
        while core.steps < 3:
            await asyncio.sleep(0.005)
        report = await actor.drain(0.2)
        assert not report["drained"] and report["open"] == {"running": 1} and 0.2 <= report["seconds"] < 3
        assert not stream.done(), "who stops the engine ends it"
        await actor.shutdown()
        assert (await stream)[-1].finish_reason is not None

    with_actor(body)


def test_an_idle_or_dead_engine_drains_at_once() -> None:
    async def body(actor: CoordinatorActor, core: FakeCore) -> None:
        assert (await actor.drain(30.0))["drained"]
        core.leases = True
        report = await actor.drain(0.1)
        assert report["open"] == {"copies or notices": 1}
        core.fail = EngineDeadError("rank 0 is dead")
        while (await actor.health())["ok"]:  # the lease makes the loop step
            await asyncio.sleep(0.005)
        with pytest.raises(EngineDeadError):
            await collect(actor, request())
        assert (await actor.drain(30.0))["drained"]

    with_actor(body)


# ------------------------------------------------------------------------------------------- readiness
def test_before_its_start_a_coordinator_says_how_far_the_ranks_are() -> None:
    async def body() -> None:
        actor = CoordinatorActor()
        assert (await actor.stats())["health"] == {"ok": False, "starting": True, "reason": "loading"}
        await actor.pinned(0, 16 * GIB, 64 * GIB)
        await actor.pinned(1, 8 * GIB, 64 * GIB)
        assert (await actor.health())["reason"] == "pinning 24.0/128.0 GiB of host memory"
        for rank in (0, 1):
            await actor.pinned(rank, 64 * GIB, 64 * GIB)
        assert (await actor.health())["reason"] == "loading"
        core = FakeCore()
        await actor.start({}, lambda: core)
        health = await actor.health()
        assert health["ok"] and "starting" not in health
        assert await actor.shutdown()

    asyncio.run(body())


def test_ranks_tell_how_far_their_pinning_is(tmp_path: Path) -> None:
    """From the chunks of the pool's registration to the coordinator, with a driver that only keeps books."""
    from hisparse.actors.rank_worker import RankSetup, _tell
    from hisparse.worker.assembly import _log_progress
    from tests.worker.test_pinned import LAYOUT, PAGE, FakeDriver, HostPool

    told: list[tuple[Any, ...]] = []

    class Front:
        def start(self, *call: Any) -> None:
            told.append(call)

    setup = RankSetup(engine_id="e", incarnation=1, rank=3, segment=None, front=Front(), rendezvous="")  # type: ignore[arg-type]
    pool = HostPool.private(LAYOUT, 40)
    pool.pin("cpu", registrar=FakeDriver(), chunk_bytes=3 * PAGE,
             progress=lambda done, total: _log_progress(lambda *sizes: _tell(setup, *sizes), done, total))
    assert len(told) > 5 and {call[:2] for call in told} == {("pinned", 3)} and len({call[3] for call in told}) == 1
    assert [call[2] for call in told] == sorted(call[2] for call in told) and told[-1][2] == told[-1][3]
    pool.close()


# ------------------------------------------------------------------------------------------- stages
class FakeActor:
    """Notes what was asked of it; `late` methods do not answer in time."""

    def __init__(self, name: str, log: list[str], late: str = "") -> None:
        self.name, self.log, self.late = name, log, late

    def start(self, method: str) -> tuple[FakeActor, str]:
        self.log.append(f"{self.name}.{method}")
        return self, method

    def call(self, method: str, *args: Any, timeout_s: float) -> dict[str, Any]:
        self.log.append(f"{self.name}.{method}")
        if method == self.late:
            raise TimeoutError(f"{self.name} did not answer")
        return {"drained": True}

    def kill(self) -> None:
        self.log.append(f"kill {self.name}")


class FakePlacement:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def release(self) -> None:
        self.log.append("release")


@pytest.mark.parametrize("late", ["", "drain", "coordinator.shutdown", "rank 0.shutdown", "keeper.stop"])
def test_b40_stages_of_a_stop_and_their_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, late: str) -> None:
    """Stop admission and drain, end the loop, deregister and unpin, unlink, exit; a late stage costs its time, not the rest."""
    config = load_config({"model": {"path": "recall", "device": "cuda", "dtype": "bfloat16"}, "tensor_parallel_size": 2,
                          "cache": {"host_pool_gib": 64}, "serve": {"drain_timeout_s": 25}}, environ={})
    log: list[str] = []
    limits: dict[str, float] = {}

    def gather(pendings: list[tuple[FakeActor, str]], timeout_s: float) -> list[Any]:
        for actor, method in pendings:
            limits[f"{actor.name}.{method}"] = timeout_s
            if f"{actor.name}.{method}" == late:
                raise TimeoutError(late)
        return []

    monkeypatch.setattr("hisparse.actors.engine.gather", gather)
    pool = tmp_path / "hisparse-e.pool"
    pool.write_bytes(b"x")
    engine: Any = EngineActors(config, EngineIdentity.new("decode"))
    engine.coordinator = FakeActor("coordinator", log, late)
    engine.ranks = [FakeActor(f"rank {i}", log) for i in range(2)]
    engine.keeper, engine.placement = FakeActor("keeper", log), FakePlacement(log)
    engine.segment = Segment(path=str(pool), num_blocks=8, nbytes=64 * GIB)
    assert engine.drain(25.0) == ({} if late == "drain" else {"drained": True})
    engine.stop()
    engine.stop()
    assert engine.drain(25.0) == {}
    assert log == ["coordinator.drain", "coordinator.shutdown", "kill coordinator", "rank 0.shutdown", "rank 1.shutdown",
                   "kill rank 0", "kill rank 1", "keeper.stop", "kill keeper", "release"]
    assert not pool.exists(), "the next start finds nothing to clean up"
    budget = StopBudget.of(config, 64 * GIB)
    expected = {"coordinator.shutdown": LOOP_S, "rank 0.shutdown": RANKS_S + 16, "rank 1.shutdown": RANKS_S + 16,
                "keeper.stop": KEEPER_S}
    assert limits.items() <= expected.items() and limits.keys() >= {late} - {"", "drain"}
    assert budget.total_s == 25 + LOOP_S + RANKS_S + 16 + KEEPER_S


def test_the_time_a_stop_needs_is_reported() -> None:
    """Pinned memory is given back at a rate; on the CPU nothing is pinned."""
    sizes = {"model": {"path": "recall", "dtype": "bfloat16"}, "cache": {"host_pool_gib": 8.0}}
    cpu = MemoryPlan.of(load_config(sizes, environ={}))
    cuda = MemoryPlan.of(load_config(sizes, {"model": {"device": "cuda"}}, environ={}))
    assert cuda.stop_s - cpu.stop_s == pytest.approx(2.0, rel=0.01)
    assert dict(cuda.rows())["time to stop a replica, at most"] == f"{cuda.stop_s:,.0f} s"

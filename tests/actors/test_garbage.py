"""Full collections happen while an engine rests, and never look at what was there when it started."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hisparse.actors import rank_worker
from hisparse.actors.coordinator import CoordinatorActor
from hisparse.actors.engine_loop import EngineLoop
from hisparse.actors.rank_worker import RankSetup, RankWorkerActor
from hisparse.config import load_config
from hisparse.engine.garbage import MAX_BUSY_S, NEVER, YOUNG, IdleCollector, freeze_heap
from hisparse.types import RequestOutput, SamplingParams
from tests.actors.fakes import FakeCore

Found = list[tuple[str, int]]
"""Of each full collection: where, and how many objects it could have looked at."""


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    after = gc.get_threshold()
    gc.set_threshold(*before)
    gc.unfreeze()
    assert after == before


@pytest.fixture
def found() -> Iterator[Callable[[str], Found]]:
    """Call it with where the process is from now on."""
    where, full = [""], Found()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append((where[0], len(gc.get_objects())))

    def at(place: str) -> Found:
        where[0] = place
        return full

    gc.callbacks.append(note)
    yield at
    gc.callbacks.remove(note)


class GrowingCore(FakeCore):
    """Each step leaves 20,000 objects that stay: requests and their pages."""

    def __init__(self, at: Callable[[str], Found]) -> None:
        super().__init__()
        self.kept: list[list[Any]] = []
        self._at = at

    def step(self) -> list[RequestOutput]:
        self._at("step")
        self.kept += [[] for _ in range(20_000)]
        outputs = super().step()
        self._at("between")
        return outputs


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def run_steps(collector: IdleCollector | None, at: Callable[[str], Found], *, rest: bool) -> Found:
    core = GrowingCore(at)
    loop = EngineLoop(core, lambda outputs: None, collector=collector)
    loop.start()
    full = at("between")
    full.clear()  # `begin` collects, too
    loop.call(lambda core: core.add_request("r", [1], SamplingParams(max_tokens=12))).result(5.0)
    until(lambda: core.steps == 12)
    if rest:
        until(lambda: full)
    assert loop.stop(5.0)
    return list(full)


def test_no_full_collection_within_a_step(found: Callable[[str], Found]) -> None:
    (only,) = run_steps(IdleCollector(), found, rest=True)
    assert only[0] == "between"
    assert 240_000 <= only[1] < 290_000, "what was there at the start was frozen"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="collections of old objects are incremental there")
def test_by_its_own_rules_python_collects_within_steps(found: Callable[[str], Found]) -> None:
    """What the collector is for; without it the test above would fail."""
    freeze_heap()
    assert "step" in [place for place, _ in run_steps(None, found, rest=False)]


def test_an_engine_collects_once_after_it_worked(found: Callable[[str], Found]) -> None:
    now = [0.0]
    collector = IdleCollector(lambda: now[0])
    collector.begin()
    full = found("")
    full.clear()
    collector.rest()
    assert not full, "nothing has happened since the start"
    for _ in range(3):
        collector.worked()
    collector.rest()
    collector.rest()
    assert len(full) == 1
    collector.end()


def test_an_engine_that_never_rests_is_collected_at_times(found: Callable[[str], Found]) -> None:
    now = [0.0]
    collector = IdleCollector(lambda: now[0])
    collector.begin()
    full = found("")
    full.clear()
    for _ in range(30):
        now[0] += MAX_BUSY_S / 10
        collector.worked()
    assert len(full) == 3
    collector.end()


def test_a_coordinator_takes_the_collector_and_gives_it_back() -> None:
    async def body() -> None:
        actor = CoordinatorActor()
        await actor.start({}, FakeCore)
        try:
            assert gc.get_threshold() == (*YOUNG, NEVER) and gc.get_freeze_count() > 10_000
        finally:
            assert await actor.shutdown()

    before = gc.get_threshold()
    asyncio.run(body())
    assert gc.get_threshold() == before and not gc.get_freeze_count()


def test_a_failed_engine_gives_it_back_too() -> None:
    before, core = gc.get_threshold(), FakeCore()
    core.fail = RuntimeError("broken")
    loop = EngineLoop(core, lambda outputs: None, collector=IdleCollector())
    loop.start()
    loop.call(lambda core: core.add_request("r", [1], SamplingParams(max_tokens=1))).result(5.0)
    until(lambda: loop.dead)
    assert loop.stop(5.0) and gc.get_threshold() == before and not gc.get_freeze_count()


def test_a_rank_freezes_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(*args: Any, **options: Any) -> Any:
        assert not gc.get_freeze_count(), "nothing of the model would be frozen"
        return SimpleNamespace(handshakes={})

    modules = {"engine.rank": {"RankEngine": engine}, "engine.parallel": {"join_group": lambda *args: None},
               "pd.connector": {"make_pd_worker": lambda: None}}
    for name, parts in modules.items():  # the real ones load torch
        monkeypatch.setitem(sys.modules, f"hisparse.{name}", SimpleNamespace(**parts))
    monkeypatch.setattr(rank_worker.logs, "configure", lambda *args, **fields: None)
    config = load_config({"model": {"path": "recall"}, "cache": {"enabled": False}}, environ={})
    RankWorkerActor(config).setup(RankSetup(engine_id="e", incarnation=1, rank=0, segment=None, front=None, rendezvous=""))
    assert gc.get_freeze_count() > 10_000

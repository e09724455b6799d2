"""When a replica ends itself: only if its engine has failed, once, after the engine's own end, and never during a stop."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from hisparse.errors import EngineDeadError
from hisparse.serve import replicas
from hisparse.telemetry import NullTracer


class Engine:
    """`healths`: answers to the probes; the last one repeats."""

    identity = type("Identity", (), {"engine_id": "decode-1"})

    def __init__(self, log: list[str], *healths: dict[str, Any]) -> None:
        self.log, self.healths = log, list(healths)

    async def probe(self) -> dict[str, Any]:
        return self.healths.pop(0) if len(self.healths) > 1 else self.healths[0]

    def drain(self, timeout_s: float) -> None:
        self.log.append(f"drain {timeout_s:g}")

    def stop(self) -> None:
        self.log.append("stop")


DEAD = {"ok": False, "reason": "step 4: rank 0 is dead"}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(os, "_exit", lambda code: done.append(f"exit {code}"))
    monkeypatch.setattr(replicas, "LEAVE_S", 0.0)
    return done


class Replica:
    """What `EngineReplica` has after its start. No instance of it: its `__del__` is asynchronous, and Serve's to call."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tracer, self._leaving, self._drain_timeout_s = engine, NullTracer(), False, 25.0

    async def leave_if_dead(self) -> None:
        await replicas.EngineReplica.leave_if_dead(self)  # type: ignore[arg-type]

    async def end(self) -> None:
        await replicas.EngineReplica.__del__(self)  # type: ignore[arg-type]


@pytest.mark.parametrize("health", [{"ok": True}, {"ok": False, "starting": True, "reason": "loading"}])
def test_it_stays_while_its_engine_lives(log: list[str], health: dict[str, Any]) -> None:
    """A request that was refused by a draining engine is no sign of death."""
    asyncio.run(Replica(Engine(log, health)).leave_if_dead())
    assert log == []


def test_it_leaves_once_and_cleans_up_before(log: list[str]) -> None:
    async def many() -> None:
        made = Replica(Engine(log, DEAD))
        await asyncio.gather(*(made.leave_if_dead() for _ in range(5)))
        await made.end()

    asyncio.run(many())
    assert log == ["stop", "exit 1"]


def test_a_stop_is_never_cut_short(log: list[str]) -> None:
    async def stop() -> None:
        made = Replica(Engine(log, DEAD))
        await made.end()
        await made.leave_if_dead()

    asyncio.run(stop())
    assert log == ["drain 25", "stop"]


def test_an_engine_that_does_not_answer_is_dead() -> None:
    from hisparse.actors.engine import EngineActors, EngineIdentity
    from hisparse.config import load_config

    engine = EngineActors(load_config({"model": {"path": "recall"}}, environ={}), EngineIdentity.new("decode"))

    def outcome(error: Exception) -> dict[str, Any]:
        async def health() -> dict[str, Any]:
            raise error

        engine.__class__ = type("Mute", (EngineActors,), {"health": lambda self: health(), "__slots__": ()})
        return asyncio.run(engine.probe())

    for error in (EngineDeadError("it is dead"), TimeoutError("it is late")):
        assert outcome(error) == {"ok": False, "reason": str(error)}

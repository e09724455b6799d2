from __future__ import annotations

from typing import Any

import pytest

from hisparse.actors import executor as module
from hisparse.actors.executor import RayExecutor
from hisparse.engine.executor import Executor
from hisparse.errors import EngineDeadError, InvariantError
from hisparse.types import StepCommand, StepResult


class FakeRank:
    """Answers `execute` with a result of its rank, or with what is in `script` for the step."""

    def __init__(self, rank: int, script: dict[int, Any] | None = None) -> None:
        self.rank, self.script = rank, script or {}
        self.steps: list[int] = []

    def start(self, method: str, command: StepCommand) -> Any:
        assert method == "execute"
        self.steps.append(command.step)
        return self.script.get(command.step, StepResult(step=command.step, rank=self.rank, incarnation=1))


@pytest.fixture
def timeouts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seen: list[float] = []

    def gather(pendings: list[Any], timeout_s: float) -> list[Any]:
        seen.append(timeout_s)
        for item in pendings:
            if isinstance(item, Exception):
                raise item
        return pendings

    monkeypatch.setattr(module, "gather", gather)
    return seen


def test_every_rank_gets_every_step_and_answers_come_in_order(timeouts: list[float]) -> None:
    ranks = [FakeRank(1), FakeRank(0)]
    executor = RayExecutor(ranks, 9.0)  # type: ignore[arg-type]
    assert isinstance(executor, Executor) and executor.num_ranks == 2
    for step in (1, 2, 3):
        executor.submit(StepCommand(step=step))
    assert all(rank.steps == [1, 2, 3] for rank in ranks)
    for step in (1, 2, 3):
        results = executor.collect(300.0)
        assert [(result.step, result.rank) for result in results] == [(step, 0), (step, 1)]
    executor.submit(StepCommand(step=4))
    executor.collect(2.0)
    assert timeouts == [9.0, 9.0, 9.0, 2.0]


@pytest.mark.parametrize(("error", "text"), [
    (EngineDeadError("rank 1 of e is dead"), "rank 1 of e is dead"), (TimeoutError("no answer within 5 s"), "stuck"),
    (RuntimeError("gloo: connection closed"), "RuntimeError: gloo"),
])
def test_any_failure_of_a_rank_is_the_engines_end(timeouts: list[float], error: Exception, text: str) -> None:
    executor = RayExecutor([FakeRank(0), FakeRank(1, {7: error})], 9.0)  # type: ignore[list-item]
    executor.submit(StepCommand(step=7))
    with pytest.raises(EngineDeadError, match=f"step 7.*{text}"):
        executor.collect(5.0)


def test_misuse(timeouts: list[float]) -> None:
    wrong = StepResult(step=3, rank=0, incarnation=1)
    executor = RayExecutor([FakeRank(0, {4: wrong})], 9.0)  # type: ignore[list-item]
    with pytest.raises(InvariantError, match="without a step"):
        executor.collect(1.0)
    executor.submit(StepCommand(step=4))
    with pytest.raises(InvariantError, match="step 4.*step 3"):
        executor.collect(1.0)
    executor.submit(StepCommand(step=5))
    executor.shutdown()
    with pytest.raises(InvariantError):
        executor.collect(1.0)
    with pytest.raises(InvariantError):
        RayExecutor([], 9.0)

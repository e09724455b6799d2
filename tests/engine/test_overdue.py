"""A copy that never completes ends the engine; a step that takes long does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hisparse.config import load_config
from hisparse.engine.core import EngineCore
from hisparse.errors import EngineDeadError
from hisparse.types import FinishReason, SamplingParams, StepCommand
from tests.engine.fake_executor import FakeExecutor, expected_tokens
from tests.engine.test_core import TINY, prompt

DEADLINE_S = 5.0


@pytest.fixture
def make(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    now = [0.0]

    def build(copy_steps: int, step_s: float) -> EngineCore:
        config = load_config({
            "model": {"path": str(tmp_path), "max_model_len": 512},
            "cache": {"block_size": 16, "device_blocks": 400, "host_pool_gib": 0.01, "transfer_deadline_s": DEADLINE_S},
        }, environ={})

        def tick(command: StepCommand) -> None:
            now[0] += step_s

        executor = FakeExecutor(7, copy_steps=copy_steps, block_size=16, on_command=tick)
        return EngineCore(config, executor, engine_id="e", incarnation=7, clock=lambda: now[0])

    return build


def test_an_overdue_copy_ends_the_engine(make: Any) -> None:
    core = make(copy_steps=10**6, step_s=0.5)
    core.add_request("a", prompt(100), SamplingParams(max_tokens=60, ignore_eos=True))
    tokens: list[int] = []
    with pytest.raises(EngineDeadError, match=r"rank 0 did not finish \d+ copies .*transfer_deadline_s = 5 s .*failed"):
        for _ in range(40):
            tokens += [token for output in core.step() for token in output.new_token_ids]
    last = core.take_outputs()
    tokens += [token for output in last for token in output.new_token_ids]
    assert tokens == expected_tokens(prompt(100), 60)[: len(tokens)] and 9 <= len(tokens) < 14
    assert last[-1].finish_reason is FinishReason.ERROR and "did not finish" in str(last[-1].error)
    assert core.cache.stats().spills_completed == 0 and core.cache.stats().host_pages_published == 0
    with pytest.raises(EngineDeadError, match="did not finish"):
        core.step()
    with pytest.raises(EngineDeadError, match="did not finish"):
        core.add_request("b", prompt(5), SamplingParams())


def test_an_overdue_copy_of_a_finished_request_counts_too(make: Any) -> None:
    core = make(copy_steps=10**6, step_s=0.5)
    core.add_request("a", prompt(100), SamplingParams(max_tokens=2, ignore_eos=True))
    with pytest.raises(EngineDeadError, match="that worker has failed"):
        for _ in range(40):
            core.step()
    assert not core.take_outputs()


@pytest.mark.parametrize("copy_steps", [0, 1])
def test_steps_longer_than_the_deadline_are_no_failure(make: Any, copy_steps: int) -> None:
    """The copy of a step is enqueued at its end and seen with the next one, however long they take."""
    core = make(copy_steps=copy_steps, step_s=3 * DEADLINE_S)
    core.add_request("a", prompt(100), SamplingParams(max_tokens=40, ignore_eos=True))
    tokens: list[int] = []
    while core.has_work():
        tokens += [token for output in core.step() for token in output.new_token_ids]
    assert tokens == expected_tokens(prompt(100), 40)

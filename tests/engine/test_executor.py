"""Executors: one rank inline, several spawned; equal results, and no hang when a rank fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from hisparse.engine.executor import Executor, LocalExecutor
from hisparse.errors import ConfigError, EngineDeadError, InvariantError
from hisparse.types import ScheduledChunk, StepCommand
from tests.engine.hand_driver import HandDriver, engine_config
from tests.engine.test_hf_parity import check, prompt


def run_scenario(driver: HandDriver, path: Path):
    """Prefill, decode, spill, host history and a batch: every path that reads or writes the host pool."""
    seats = [driver.open(3, prompt(path, 100)), driver.open(0, prompt(path, 41, start=20))]
    driver.prefill(seats[0], (64, 36))
    driver.prefill(seats[1], (41,))
    driver.spill(seats[0], range(4))
    driver.give_hot_region(seats[0])
    driver.drop(seats[0], range(4))
    driver.decode(seats, 8)
    return seats


def test_two_ranks_equal_one_rank_and_the_oracle(tiny_checkpoints) -> None:
    """glm52 has shared index layers; each rank attends for 2 of the 4 heads and rank 0 alone writes the shared pool."""
    path = tiny_checkpoints["glm52"]
    with HandDriver(engine_config(path), mirror=True) as one:
        alone = run_scenario(one, path)
    with HandDriver(engine_config(path, tensor_parallel_size=2), mirror=True) as two:
        assert two.executor.num_ranks == 2 and isinstance(two.executor, Executor)
        split = run_scenario(two, path)
        with pytest.raises(ConfigError, match="no inline rank"):
            _ = two.executor.rank_engine
    for left, right, chunks in zip(alone, split, [(64, 36), (41,)]):
        assert left.generated == right.generated
        assert (torch.stack(left.logprobs) - torch.stack(right.logprobs)).abs().max() < 1e-5
        check(path, right, chunks)
    assert one.stats.miss_rows == two.stats.miss_rows > 0


def submit_and_collect(executor: LocalExecutor, command: StepCommand) -> None:
    executor.submit(command)
    executor.collect(30.0)


def test_a_rank_that_dies_ends_the_executor_at_once(tiny_checkpoints) -> None:
    before = set(os.listdir("/dev/shm"))
    executor = LocalExecutor(engine_config(tiny_checkpoints["glm5"], tensor_parallel_size=2), incarnation=1)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "hisparse" in name}, "already unlinked"
    processes = list(executor._ranks._processes)
    executor.submit(StepCommand(step=1))
    assert [result.rank for result in executor.collect(30.0)] == [0, 1]
    os.kill(processes[1].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 died with exit code -9|a rank is gone"):
        submit_and_collect(executor, StepCommand(step=2))
    assert time.monotonic() - began < 10
    assert not any(process.is_alive() for process in processes)
    with pytest.raises(EngineDeadError):
        executor.submit(StepCommand(step=3))
    executor.shutdown()


def test_an_error_on_a_spawned_rank_comes_back_with_its_text(tiny_checkpoints) -> None:
    executor = LocalExecutor(engine_config(tiny_checkpoints["glm5"], tensor_parallel_size=2), incarnation=1)
    chunk = ScheduledChunk(request_id="r", seat=99, first_position=0, token_ids=(1, 2))
    executor.submit(StepCommand(step=1, chunks=(chunk,)))
    with pytest.raises(EngineDeadError, match=r"step 1: rank . failed: InvariantError: chunk of r: seat 99"):
        executor.collect(30.0)


def test_an_error_on_the_inline_rank_ends_it(tiny_checkpoints) -> None:
    executor = LocalExecutor(engine_config(tiny_checkpoints["glm5"]), incarnation=1)
    executor.submit(StepCommand(step=5))
    executor.submit(StepCommand(step=5))
    assert executor.collect(1.0)[0].step == 5
    with pytest.raises(EngineDeadError, match=r"step 5: InvariantError: step 5 came after step 5"):
        executor.collect(1.0)
    with pytest.raises(EngineDeadError):
        executor.submit(StepCommand(step=6))
    executor.shutdown()
    executor.shutdown()


def test_collect_without_a_step_is_an_error(tiny_checkpoints) -> None:
    executor = LocalExecutor(engine_config(tiny_checkpoints["glm5"]), incarnation=1)
    with pytest.raises(InvariantError, match="without a step"):
        executor.collect(1.0)
    executor.shutdown()


def test_impossible_configurations_are_refused_before_anything_starts(tiny_checkpoints) -> None:
    path = tiny_checkpoints["glm5"]
    with pytest.raises(ConfigError, match="does not divide"):
        LocalExecutor(engine_config(path, tensor_parallel_size=3), incarnation=1)
    with pytest.raises(ConfigError, match="host_pool = private needs tensor_parallel_size = 1"):
        LocalExecutor(engine_config(path, tensor_parallel_size=2, cache={"host_pool": "private"}), incarnation=1)


def test_table_updates_beside_the_hisparse_command_are_refused(tiny_checkpoints) -> None:
    from hisparse.types import BlockTableUpdate

    executor = LocalExecutor(engine_config(tiny_checkpoints["glm5"]), incarnation=1)
    update = BlockTableUpdate(group_id=0, seat=0, first_page=0, ids=(1,), num_pages=1)
    executor.submit(StepCommand(step=1, table_updates=(update,)))
    with pytest.raises(EngineDeadError, match="table updates belong"):
        executor.collect(1.0)
    executor.shutdown()

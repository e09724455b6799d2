"""Executors: one rank inline, several spawned; equal results, and no hang when a rank fails."""

from __future__ import annotations

import gc
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from hisparse.engine.executor import Executor, LocalExecutor, _RankProcesses
from hisparse.errors import ConfigError, EngineDeadError, InvariantError
from hisparse.types import StepCommand
from tests.engine.hand_driver import INCARNATION, HandDriver, engine_config
from tests.engine.light_rank import light_main
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


class Beacon:
    """A connector that answers with what it was sent."""

    name = "beacon"

    def __init__(self, parts) -> None:
        self.num_layers = len(parts.handles)
        self.log: list[object] = []

    def handshake(self) -> tuple[str, int]:
        return ("beacon", self.num_layers)

    def start_step(self, metadata) -> None:
        self.log.append(metadata)

    def end_step(self) -> None:
        self.log.append("frozen" if gc.get_freeze_count() > 10_000 else "end")

    def output(self):
        log, self.log = self.log, []
        return log

    def shutdown(self) -> None:
        self.log.append("down")


def check_connectors(executor: LocalExecutor, first_step: int, incarnation: int) -> None:
    """A class is a factory too, although it has every attribute of a connector. The heap of a rank's own process is frozen."""
    size = executor.num_ranks
    end = "end" if size == 1 else "frozen"
    assert executor.handshakes == [("beacon", 6)] * size
    executor.submit(StepCommand(step=first_step, kv={"beacon": "hello"}))
    executor.submit(StepCommand(step=first_step + 1))
    for step, seen in ((first_step, ["hello", end]), (first_step + 1, [None, end])):
        results = executor.collect(30.0)
        assert [(r.step, r.rank, r.incarnation) for r in results] == [(step, i, incarnation) for i in range(size)]
        assert all(result.kv["beacon"] == seen for result in results)


def test_two_ranks_equal_one_rank_and_the_oracle(tiny_checkpoints) -> None:
    """glm52 has shared index layers; each rank attends for 2 of the 4 heads and rank 0 alone writes the shared pool."""
    path = tiny_checkpoints["glm52"]
    with HandDriver(engine_config(path), mirror=True, connectors=[Beacon]) as one:
        alone = run_scenario(one, path)
        check_connectors(one.executor, 1000, INCARNATION)
    with HandDriver(engine_config(path, tensor_parallel_size=2), mirror=True, connectors=[Beacon]) as two:
        assert two.executor.num_ranks == 2 and isinstance(two.executor, Executor)
        split = run_scenario(two, path)
        with pytest.raises(ConfigError, match="no inline rank"):
            _ = two.executor.rank_engine
        check_connectors(two.executor, 1000, INCARNATION)
    for left, right, chunks in zip(alone, split, [(64, 36), (41,)]):
        assert left.generated == right.generated
        assert (torch.stack(left.logprobs) - torch.stack(right.logprobs)).abs().max() < 1e-5
        check(path, right, chunks)
    assert one.stats.miss_rows == two.stats.miss_rows > 0


@pytest.fixture
def light(tiny_checkpoints):
    """Makes process groups of light ranks; checks that each is gone in the end and left no file."""
    before, made = pools(), []

    def make(*behaviours: str) -> _RankProcesses:
        config = engine_config(tiny_checkpoints["glm5"], tensor_parallel_size=len(behaviours))
        made.append(_RankProcesses(config, 7, behaviours, main=light_main))
        return made[-1]

    yield make
    for ranks in made:
        ranks.stop()
    assert pools() == before and not multiprocessing.active_children()


def pools() -> set[str]:
    """Of this process: another test run on the same machine has pools of its own."""
    return {name for name in os.listdir("/dev/shm") if "hisparse-ranks" in name and f".{os.getpid()}." in name}


def test_the_shared_pool_has_no_name_once_every_rank_has_mapped_it(light) -> None:
    before = pools()
    ranks = light("ok", "ok")
    assert pools() == before, "whatever dies now, nothing is left behind"
    for step in (1, 2):
        ranks.send(StepCommand(step=step))
    assert [[(r.step, r.rank) for r in ranks.receive(30.0)] for _ in "ab"] == [[(1, 0), (1, 1)], [(2, 0), (2, 1)]]
    ranks.stop()
    ranks.stop()
    with pytest.raises(EngineDeadError, match="shut down"):
        ranks.send(StepCommand(step=3))


@pytest.mark.parametrize(("behaviour", "why"), [
    ("hang", r"step 1: no answer of ranks \[1\] within 0\.5 s"),
    ("die", r"step 1: rank 1 died with exit code 3"),
    ("error", r"step 1: rank 1 failed: InvariantError: seat 99"),
])
def test_a_rank_that_fails_ends_all_of_them(light, behaviour: str, why: str) -> None:
    ranks = light("ok", behaviour)
    ranks.send(StepCommand(step=1))
    with pytest.raises(EngineDeadError, match=why):
        ranks.receive(0.5 if behaviour == "hang" else 30.0)
    assert not multiprocessing.active_children()
    with pytest.raises(EngineDeadError, match=why):
        ranks.send(StepCommand(step=2))


def test_an_answer_of_another_step_is_refused(light) -> None:
    ranks = light("ok", "late")
    for step in (1, 2):
        ranks.send(StepCommand(step=step))
    assert len(ranks.receive(30.0)) == 2
    with pytest.raises(InvariantError, match="asked for step 2, a rank answered step 1"):
        ranks.receive(30.0)


def test_a_rank_that_cannot_start_is_a_config_error(light) -> None:
    before = pools()
    with pytest.raises(ConfigError, match="cannot load it"):
        light("ok", "config")
    assert pools() == before and not multiprocessing.active_children()


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

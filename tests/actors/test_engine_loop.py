from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hisparse.actors.engine_loop import EngineLoop
from hisparse.errors import EngineDeadError, InvariantError, RequestError
from hisparse.types import RequestOutput, SamplingParams
from tests.actors.fakes import FakeCore

Make = Callable[..., tuple[EngineLoop, FakeCore, list[RequestOutput]]]


@pytest.fixture
def make() -> Iterator[Make]:
    loops: list[tuple[EngineLoop, FakeCore]] = []

    def build(**options: float) -> tuple[EngineLoop, FakeCore, list[RequestOutput]]:
        core, got = FakeCore(), list[RequestOutput]()
        loop = EngineLoop(core, got.extend, **options)
        loops.append((loop, core))
        loop.start()
        return loop, core, got

    yield build
    for loop, core in loops:
        if core.block is not None:
            core.block.set()
        assert loop.stop(5.0)


def add(loop: EngineLoop, request_id: str, tokens: int = 3) -> None:
    loop.call(lambda core: core.add_request(request_id, [1], SamplingParams(max_tokens=tokens))).result(5.0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_requests_run_to_their_end_on_one_thread(make: Make) -> None:
    loop, core, got = make()
    add(loop, "a")
    add(loop, "b", 5)
    until(lambda: not core.has_work())
    assert [output.request_id for output in got].count("b") == 5
    assert got[-1].finish_reason is not None and core.threads == {"hisparse-engine-loop"}


def test_errors_of_a_call_go_to_its_caller_only(make: Make) -> None:
    loop, _, _ = make()
    with pytest.raises(RequestError, match="empty"):
        loop.call(lambda core: core.add_request("a", [], SamplingParams())).result(5.0)
    assert loop.health().ok
    add(loop, "b")


def test_idle_loop_sleeps_and_wakes_at_once(make: Make) -> None:
    loop, core, _ = make()
    time.sleep(0.3)
    turns = loop.health().turns
    assert turns <= 4, f"{turns} turns in 0.3 s without work"
    began = time.monotonic()
    add(loop, "a", 1)
    assert time.monotonic() - began < 0.3
    until(lambda: core.steps == 1)


def test_open_leases_do_not_spin(make: Make) -> None:
    loop, core, _ = make(idle_wait_s=0.02)
    core.leases = True
    add(loop, "a", 1)
    time.sleep(0.5)
    before = core.steps
    time.sleep(0.4)
    assert 5 <= core.steps - before <= 25, "about 50 turns a second, so that heartbeats go out"


def test_slow_empty_steps_back_off_too(make: Make) -> None:
    """Ranks behind a network take milliseconds to say nothing."""
    loop, core, _ = make(idle_wait_s=0.05)
    core.leases, core.step_s = True, 0.006
    add(loop, "a", 1)
    time.sleep(0.5)
    before = core.steps
    time.sleep(0.4)
    assert core.steps - before <= 9


def test_health_repeats_the_problem_of_a_core_that_still_steps(make: Make) -> None:
    loop, core, _ = make()
    core.leases = True  # turns go on
    core.trouble = "the transfer thread of rank 1 does not go on"
    until(lambda: not loop.health().ok)
    assert loop.health().reason == core.trouble and loop.dead is None
    core.trouble = ""
    until(lambda: loop.health().ok)


def test_health_sees_a_stuck_step(make: Make) -> None:
    loop, core, _ = make(stall_s=0.15)
    core.block = threading.Event()
    add(loop, "a", 1)
    assert loop.health().ok
    until(lambda: not loop.health().ok)
    assert "stuck" in loop.health().reason
    core.block.set()
    until(lambda: loop.health().ok)


@pytest.mark.parametrize("error", [EngineDeadError("step 4: rank 0 is dead"), InvariantError("block 7 twice")])
def test_a_failed_engine_answers_everybody(make: Make, error: Exception) -> None:
    loop, core, _ = make()
    core.block = threading.Event()
    add(loop, "a", 100)
    late = loop.call(lambda core: core.stats())
    core.fail = error
    core.block.set()
    with pytest.raises(EngineDeadError, match=str(error)):
        late.result(5.0)
    until(lambda: loop.dead is not None)
    assert str(error) in (loop.dead or "") and not loop.health().ok
    with pytest.raises(EngineDeadError, match=str(error)):
        loop.call(lambda core: core.stats()).result(5.0)
    until(lambda: core.shut)


def test_stop_shuts_the_core_down_on_its_thread(make: Make) -> None:
    loop, core, got = make()
    core.step_s = 0.01
    add(loop, "a", 10_000)
    assert loop.stop(5.0) and core.shut
    assert got[-1].request_id == "a" and got[-1].finish_reason is not None
    with pytest.raises(EngineDeadError, match="shut"):
        loop.call(lambda core: core.stats()).result(5.0)
    assert loop.stop(5.0)

"""Engines of several ranks on the two sides, over NIXL between their processes: tokens are those of unmodified transformers.

One rank runs in the test's process, where a gate brings a fault before a chosen READ; two run in processes of their own on a
GPU each, and share these with the other engine's ranks. Rank r of a decode engine reads from one prefill rank.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.testing.local_engine import LocalEngine
from hisparse.types import FinishReason, Landing
from tests.gpu.engine_world import move_to_cuda
from tests.integration.nixl_decode import GatedTransport
from tests.integration.nixl_prefill import wait_for_state
from tests.parity import rig
from tests.parity.rig import Rig, assert_full, engine_config, prompt_of

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
TOKENS = 12
LENGTHS = (1, 15, 16, 17, 150, 290)
DEADLINE_S = 1.0
"""Of imports that are going to hang."""
NUMBERS = itertools.count()
LANDINGS = pytest.mark.parametrize("landing", list(Landing), ids=lambda landing: landing.value)


class Engines:
    """Engines by role and number of ranks, started on demand; "prefill" always has the same id."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._running: dict[tuple[str, int], LocalEngine] = {}
        self._gates: dict[LocalEngine, GatedTransport] = {}

    def get(self, role: str, ranks: int) -> LocalEngine:
        if (role, ranks) not in self._running:
            config = engine_config(
                self.path, role, tensor_parallel_size=ranks,
                pd={"transport": "nixl", "lease_s": 120.0, "landing_path": "direct" if ranks == 2 else "staged"})
            self._running[role, ranks] = LocalEngine(config, engine_id=f"{role}-{ranks}")
        return self._running[role, ranks]

    def pair(self, prefill: int, decode: int) -> Rig:
        return Rig(self.path, decode=self.get("decode", decode), prefill=self.get("prefill", prefill))

    def gate_of(self, engine: LocalEngine) -> GatedTransport:
        """Of an engine in this process."""
        if engine not in self._gates:
            worker = next(child for child in engine.executor.rank_engine._connectors.children if child.name == "pd")
            self._gates[engine] = GatedTransport.of(worker)
        return self._gates[engine]

    def kill(self, role: str, ranks: int) -> None:
        """SIGKILL of every rank that still lives; the engine is gone."""
        engine = self._running.pop((role, ranks))
        for pid in rank_pids(engine):
            os.kill(pid, signal.SIGKILL)
        engine.executor.shutdown()

    def close(self) -> None:
        for engine in self._running.values():
            for pid in rank_pids(engine):
                os.kill(pid, signal.SIGCONT)  # a failed test may have left it stopped
            engine.close()


def rank_pids(engine: LocalEngine) -> list[int]:
    ranks = engine.executor._ranks
    return [process.pid or 0 for process in ranks._processes] if ranks is not None else []


@pytest.fixture(scope="module")
def engines(tiny_checkpoints: dict[str, Path]) -> Iterator[Engines]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cuda":
            move_to_cuda(patch, graphs=True, modules=(rig,))
        engines = Engines(tiny_checkpoints["glm52"])
        yield engines
        engines.close()


def land(monkeypatch: pytest.MonkeyPatch, engine: LocalEngine, landing: Landing) -> None:
    """There is room for either; from here on only one fits."""
    assert engine.pd is not None
    choose = engine.pd.choose_landing
    monkeypatch.setattr(engine.pd, "choose_landing",
                        lambda name, resident, host: choose(name, resident and landing is Landing.RESIDENT, host))


def put(pair: Rig, prompts: list[tuple[int, ...]]) -> list[str]:
    """Prefill has answered for all of them; decode has not taken a step. A salt each: nothing is shared."""
    names = [f"r{next(NUMBERS)}" for _ in prompts]
    for name, prompt in zip(names, prompts):
        pair.put(name, prompt, TOKENS, salt=name)
    deadline = time.monotonic() + 60.0
    assert pair.prefill is not None
    while pair.at_prefill:
        for output in pair.prefill.step():
            if output.finish_reason is not None:
                pair.hand_over(output)
        assert time.monotonic() < deadline, pair.prefill.core.stats()
    assert not pair.refused, pair.refused
    return names


def finish(pair: Rig, names: list[str], *, watch: Callable[[], None] = lambda: None) -> None:
    """Decode alone goes on, to the end of these requests; each answer is transformers'."""
    deadline = time.monotonic() + 60.0
    while not all(pair.ended(name) for name in names):
        if not pair.decode.step():
            time.sleep(0.0003)
        watch()
        assert time.monotonic() < deadline, pair.decode.core.stats()
    pair.check(*names)
    assert all(pair.answer(name).finish_reason is FinishReason.LENGTH for name in names)


def drain_decode(pair: Rig) -> None:
    deadline = time.monotonic() + 60.0
    while pair.decode.core.has_work():
        pair.decode.step()
        time.sleep(0.0003)
        assert time.monotonic() < deadline, pair.decode.core.stats()
    assert_full(pair.decode)
    assert pair.decode.pd is not None
    stats = pair.decode.pd.stats()
    assert stats.staging_slots_free == stats.staging_slots and not stats.stuck and not stats.imports_overdue, stats


def failures(pair: Rig) -> dict[str, int]:
    assert pair.decode.pd is not None
    return dict(pair.decode.pd.stats().imports_failed)


@LANDINGS
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2)])
def test_numbers_of_ranks_may_differ(engines: Engines, monkeypatch: pytest.MonkeyPatch, prefill: int, decode: int,
                                     landing: Landing) -> None:
    """Prompts of one token up to 19 pages, all at once."""
    pair = engines.pair(prefill, decode)
    land(monkeypatch, pair.decode, landing)
    before = pair.decode.pd.stats()
    names = put(pair, [prompt_of(length, length) for length in LENGTHS])
    finish(pair, names)
    pair.drain()
    stats = [pair.answer(name).stats for name in names]
    assert not failures(pair), (failures(pair), pair.decode.pd.landing_log())
    assert [line.imported_tokens for line in stats] == list(LENGTHS) and {line.landing for line in stats} == {landing}
    after = pair.decode.pd.stats()
    assert after.imports_ok == before.imports_ok + len(LENGTHS) and after.imports_failed == before.imports_failed
    assert after.peers[f"prefill-{prefill}"].connects == decode, "every rank reads, from one peer"
    drain_decode(pair)


@LANDINGS
@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "rows", "later"])
def test_a_rank_that_is_stopped_in_a_read_and_goes_on(engines: Engines, monkeypatch: pytest.MonkeyPatch, landing: Landing,
                                                      at: int) -> None:
    """The prefill rank that is read from hangs from that READ on: own KV if the READs go on without it, else recomputed."""
    pair = engines.pair(2, 1)
    land(monkeypatch, pair.decode, landing)
    names = put(pair, [prompt_of(150, 700 + at)])
    victim, before, transport = rank_pids(pair.prefill)[0], failures(pair), engines.gate_of(pair.decode)
    settings = pair.decode.pd._config
    monkeypatch.setattr(pair.decode.pd, "_config", settings.model_copy(update={"transfer_deadline_s": DEADLINE_S}))

    def stop(number: int, descriptors: Any) -> None:
        if number == at:
            os.kill(victim, signal.SIGSTOP)
            wait_for_state(victim, "T")

    transport.restart(stop)
    try:
        finish(pair, names)
        assert transport.posted > at
        drain_decode(pair)
    finally:
        os.kill(victim, signal.SIGCONT)
    print(f"stopped before READ {at}, {landing.value}: failures {failures(pair)} were {before}")
    transport.restart()
    monkeypatch.setattr(pair.decode.pd, "_config", settings)
    again = put(pair, [prompt_of(90, 710 + at)])
    finish(pair, again)
    pair.drain()
    assert pair.answer(again[0]).stats.imported_tokens == 90, "the rank serves again"


@pytest.mark.parametrize(("decode", "landing"), [(1, Landing.RESIDENT), (2, Landing.HOST)])
def test_a_rank_that_is_killed_among_reads_and_its_successor(engines: Engines, monkeypatch: pytest.MonkeyPatch, decode: int,
                                                             landing: Landing) -> None:
    """Several imports are under way when a prefill rank dies: own KV or recomputed. The engine starts anew under its id."""
    pair = engines.pair(2, decode)
    land(monkeypatch, pair.decode, landing)
    finish(pair, put(pair, [prompt_of(20, 799)]))  # every rank is connected
    names = put(pair, [prompt_of(length, 800 + length) for length in (40, 90, 150, 200, 290)])
    victim, before, killed = rank_pids(pair.prefill)[-1 if decode == 2 else 0], failures(pair), []

    def kill() -> None:
        if not killed and pair.decode.pd.stats().imports_in_flight:
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    finish(pair, names, watch=kill)
    drain_decode(pair)
    print(f"killed under {decode} decode ranks, {landing.value}: failures {failures(pair)} were {before}")
    assert killed
    engines.kill("prefill", 2)
    pair = engines.pair(2, decode)
    (again,) = put(pair, [prompt_of(90, 810)])
    finish(pair, [again])
    pair.drain()
    assert pair.answer(again).stats.imported_tokens == 90, "the successor serves"

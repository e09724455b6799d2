"""Imports into and out of GPU memory: bytes, order, reuse, quarantine, and two engines whose tokens are transformers'."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.pd.loopback import LoopbackNetwork
from hisparse.types import Landing
from hisparse.worker.streams import Place
from tests.gpu import pd_world
from tests.gpu.engine_world import move_to_cuda, on_cuda
from tests.gpu.gate import Gate, no_waiting
from tests.gpu.pd_world import (
    SOURCES,
    Half,
    assert_elsewhere_untouched,
    assert_imported,
    source_pages,
)
from tests.integration.nixl_prefill import CANARY, SEED, PrefillProcess
from tests.parity import cells, rig, test_matrix
from tests.parity.cells import Cell, Engines
from tests.parity.conftest import make_rig  # noqa: F401
from tests.parity.rig import Rig, engine_config
from tests.parity.test_stress import play, workload
from tests.pd.rig import RankMemory

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
HELD_S = 0.3
"""How long a test looks on while something is held up."""


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[Half, Half]]]:
    halves: list[Half] = []

    def make(**config: Any) -> tuple[Half, Half]:
        network = LoopbackNetwork()
        halves.append(Half("p", 1, role="prefill", device=DEVICE, network=network))
        halves.append(Half("d", 2, role="decode", device=DEVICE, network=network, **config))
        return halves[-2], halves[-1]

    yield make
    for half in reversed(halves):
        half.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("kind", list(SOURCES))
def test_every_byte_lands(pair: Callable[..., tuple[Half, Half]], kind: str, landing: Landing, path: str) -> None:
    prefill, decode = pair(landing_path=path)
    source, before = source_pages(kind), decode.memory.snapshot()
    target = decode.start("r", prefill.grant("r", source), landing, seed=22)
    assert decode.outcome("r") == ""
    assert_imported(prefill.memory, source, decode.memory, target, landing)
    assert_elsewhere_untouched(before, decode.memory, target)
    decode.step()
    prefill.until(lambda events: prefill.scheduler.take_expired() == ("r",))


@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("kind", ["resident", "host"])
def test_pages_reused_in_the_middle_of_a_read_are_found_out(pair: Callable[..., tuple[Half, Half]], kind: str,
                                                            landing: Landing) -> None:
    """Between two halves of one READ all pages get another owner; the next request is served again."""
    prefill, decode = pair()
    source = source_pages(kind)
    params, torn = prefill.grant("r", source), []

    def tear() -> None:
        if not torn:
            torn.append(1)
            prefill.memory.give_away(source, CANARY)

    assert decode.transport is not None
    decode.transport.faults.tear = tear
    target = decode.start("r", params, landing, seed=22)
    assert "was reused while it was read" in decode.outcome("r") and torn
    if landing is Landing.HOST:
        assert not decode.memory.pool.row_masks[list(target.host_blocks)].any(), "rows of a failed import are selectable"
    decode.transport.faults.tear = None
    target = decode.start("s", prefill.grant("s", source), landing, seed=23)
    assert decode.outcome("s") == ""
    assert_imported(prefill.memory, source, decode.memory, target, landing)


@pytest.mark.parametrize("kind", ["resident", "host"])
def test_an_import_waits_for_the_event_of_its_copies(pair: Callable[..., tuple[Half, Half]], gate: Gate, kind: str) -> None:
    """Neither loaded, nor a slot free, nor a cancelled request drained while the copies out of staging have not happened."""
    prefill, decode = pair(staging_slots=4)
    source = source_pages(kind)
    first = decode.start("r", prefill.grant("r", source), Landing.HOST, seed=22)
    gate.hold(decode.streams.raw(Place.IMPORT))
    decode.step()
    deadline = time.monotonic() + HELD_S
    while time.monotonic() < deadline:
        events = decode.step()
        assert not events.loaded and not events.failed
    gate.open()
    assert decode.outcome("r") == ""
    assert_imported(prefill.memory, source, decode.memory, first, Landing.HOST)

    decode.start("s", prefill.grant("s", source), Landing.HOST, seed=23)
    gate.hold(decode.streams.raw(Place.IMPORT))
    decode.step()
    time.sleep(HELD_S / 3)
    decode.scheduler.request_closed("s")
    deadline = time.monotonic() + HELD_S
    while time.monotonic() < deadline:
        assert "s" not in decode.step().drained, "its pages would be handed out while a kernel still writes to them"
    gate.open()
    decode.until(lambda events: "s" in events.drained)


@pytest.mark.parametrize("landing", list(Landing))
def test_nothing_is_read_before_the_device_has_come_to_the_command(pair: Callable[..., tuple[Half, Half]], gate: Gate,
                                                                   landing: Landing) -> None:
    """The compute stream is held up in an earlier step: the step does not wait, and no byte of the destination changes."""
    prefill, decode = pair()
    source = source_pages("mixed")
    params = prefill.grant("r", source)
    before = decode.memory.snapshot()
    target = decode.start("r", params, landing, seed=22)
    gate.hold(torch.cuda.current_stream())
    with no_waiting():
        decode.step()
    time.sleep(HELD_S)
    assert decode.transport is not None and not decode.transport.posted
    assert decode.memory.memory.host is not None and (decode.memory.memory.host == before[1]).all()
    gate.open()
    assert decode.outcome("r") == ""
    assert_imported(prefill.memory, source, decode.memory, target, landing)


def test_a_read_that_hangs_is_over_when_its_endpoint_is_closed(pair: Callable[..., tuple[Half, Half]]) -> None:
    """Failed at the deadline, acknowledged when closed; then every slot serves again."""
    prefill, decode = pair(transfer_deadline_s=0.3, staging_slots=3)
    source = source_pages("mixed")
    assert decode.transport is not None
    decode.transport.faults.hang = lambda number: True
    started = time.monotonic()
    decode.start("r", prefill.grant("r", source), Landing.HOST, seed=22)
    assert "not done within 0.3 s" in decode.outcome("r")
    assert time.monotonic() - started > 1.0 and decode.transport.aborted, "acknowledged before the endpoint was closed"
    decode.transport.faults.hang = lambda number: False
    target = decode.start("s", prefill.grant("s", source), Landing.HOST, seed=23)
    assert decode.outcome("s") == ""
    assert_imported(prefill.memory, source, decode.memory, target, Landing.HOST)


def loopback_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of the parity tests on one GPU, over the loopback transport."""
    move_to_cuda(monkeypatch, graphs=True, modules=(cells, rig, test_matrix))
    load = on_cuda(cells.load_config, graphs=True)
    monkeypatch.setattr(cells, "load_config", lambda source, overrides=None, environ=None: load(
        {**source, "pd": {**source["pd"], "transport": "loopback"}}, overrides, environ))


@pytest.mark.parametrize("tier", ["resident", "tight"])
@pytest.mark.parametrize("model", cells.MODELS)
def test_tokens_of_a_pair_equal_transformers(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, model: str,
                                             tier: str) -> None:
    """Prefill and decode on one GPU in float32: landings in both tiers, replayed graphs, greedy tokens of the whole answer."""
    loopback_on_cuda(monkeypatch)
    engines, excused = Engines(), []
    for prompt in (31, 65, 300):
        excused.append(test_matrix.check(engines, Cell(model, prompt, tier, 1, "pd"), tiny_checkpoints[model]))
    engines.close()
    assert len([line for line in excused if line]) <= 1, excused


@pytest.mark.parametrize("seed", range(2))
def test_requests_and_failing_reads_through_tight_pools(make_rig: Callable[..., Rig], tiny_checkpoints: dict[str, Path],  # noqa: F811
                                                        monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Arrivals, aborts, shared prefixes, and every fifth READ breaks off: finished answers are the oracle's, nothing leaks."""
    move_to_cuda(monkeypatch, graphs=True, modules=(rig, test_matrix))
    path = tiny_checkpoints[cells.MODELS[seed]]
    running = make_rig(engine_config(path, "decode", slack=20, host_pages=60, pd={"role": "decode"}),
                       engine_config(path, "prefill", pd={"role": "prefill"}))
    draw = random.Random(seed)
    broken = {number for number in range(10_000) if draw.random() < 0.2}
    running.faults.fail = broken.__contains__
    play(running, workload(seed))
    stats = running.decode.core.stats()
    assert running.decode.pd is not None and running.decode.pd.stats().imports_failed, stats
    assert stats.host_landings + stats.resident_landings > 0, stats


@pytest.fixture(scope="module")
def process() -> Iterator[PrefillProcess]:
    """A prefill engine in another process."""
    pytest.importorskip("nixl", reason="needs NIXL")
    started = PrefillProcess("p", 5, device=pd_world.FAR, lease_s=30.0)
    yield started.wait_ready()
    started.end()


@pytest.fixture(scope="module", params=["staged-mapped", "direct-mapped", "staged-ucx"])
def over_nixl(request: pytest.FixtureRequest, process: PrefillProcess) -> Iterator[Half]:
    path, gpu_reads = request.param.split("-")
    half = Half(f"d-{request.param}", 2, role="decode", device=pd_world.NEAR, landing_path=path, gpu_reads=gpu_reads)
    yield half
    half.close()


@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("kind", list(SOURCES))
def test_nixl_between_two_processes(process: PrefillProcess, over_nixl: Half, kind: str, landing: Landing) -> None:
    name, source, far = f"{over_nixl.steps}-{kind}-{landing.value}", source_pages(kind), RankMemory(SEED)
    before = over_nixl.memory.snapshot()
    target = over_nixl.start(name, process.grant(name, source), landing, seed=31)
    assert over_nixl.outcome(name) == ""
    assert_imported(far, source, over_nixl.memory, target, landing)
    assert_elsewhere_untouched(before, over_nixl.memory, target)
    over_nixl.step()
    assert process.wait_expired(5.0)[0] == [name], "prefill was not told"
    transport = over_nixl.worker._thread._metered._transport
    mapped = [bool(peer.ranges) for peer in transport._peers.values()]
    assert mapped == [transport._gpu is not None], "GPU memory of the other process is mapped, unless UCX shall read it"


def test_pages_reused_in_another_process_are_found_out(process: PrefillProcess, over_nixl: Half) -> None:
    name, source = f"reused-{over_nixl.steps}", source_pages("mixed")
    params = process.grant(name, source)
    process.ask("reuse", source)
    target = over_nixl.start(name, params, Landing.HOST, seed=32)
    over_nixl.memory.pool.row_masks[list(target.host_blocks)] = 0
    assert "was reused while it was read" in over_nixl.outcome(name)
    assert not over_nixl.memory.pool.row_masks[list(target.host_blocks)].any()
    over_nixl.step()
    assert process.wait_expired(5.0)[0] == [name]
    process.ask("fill")

"""Imports over real NIXL between two processes: bytes, notices, page reuse, a hung peer, a killed peer, a restarted peer."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from hisparse.types import Landing
from tests.integration.nixl_decode import SOURCE, Decode
from tests.integration.nixl_prefill import PrefillProcess, wait_for_state

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, PrefillProcess]]:
    """Both start at once: imports take longer than tests."""
    started = {"first": PrefillProcess("p", 1, lease_s=30.0), "second": PrefillProcess("p", 2, lease_s=1.0)}
    yield started
    for process in started.values():
        process.end()


@pytest.fixture(scope="module")
def decode() -> Iterator[Decode]:
    engine = Decode(transfer_deadline_s=1.0)
    yield engine
    engine.worker.shutdown()


@pytest.fixture(scope="module")
def prefill(processes: dict[str, PrefillProcess]) -> PrefillProcess:
    return processes["first"].wait_ready()


@pytest.mark.parametrize("landing", list(Landing))
def test_bytes_arrive_and_prefill_is_told_within_a_second(prefill: PrefillProcess, decode: Decode, landing: Landing) -> None:
    name = f"good-{landing.value}"
    target = decode.start(f"d-{name}", prefill.grant(name, SOURCE), landing, seed=31)
    reason, _ = decode.run(f"d-{name}", 10.0)
    assert reason == ""
    decode.check_bytes(target, landing)
    ended, seconds = prefill.wait_expired(1.0)
    assert ended == [name] and seconds < 1.0


def test_idle_agent_does_not_spin(prefill: PrefillProcess, decode: Decode) -> None:
    before, started = time.process_time(), time.monotonic()
    time.sleep(1.0)
    assert (time.process_time() - before) / (time.monotonic() - started) < 0.25, "a connected agent costs a core"


def test_page_reused_on_prefill_fails_the_import(prefill: PrefillProcess, decode: Decode) -> None:
    params = prefill.grant("reused", SOURCE)
    prefill.ask("bump", [SOURCE.resident_blocks[0][2]])
    decode.memory.pool.row_masks[:] = 0
    decode.start("d-reused", params, Landing.HOST, seed=32)
    reason, _ = decode.run("d-reused", 10.0)
    assert "generation" in reason and not decode.memory.pool.row_masks.any()
    assert prefill.wait_expired(1.0)[0] == ["reused"]


def test_b28_early_rejection_frees_prefill_within_a_second(prefill: PrefillProcess, decode: Decode) -> None:
    decode.scheduler.add_remote("d-closed", prefill.grant("closed", SOURCE))
    decode.scheduler.request_closed("d-closed")
    decode.scheduler.reject_remote(prefill.grant("rejected", SOURCE), "max_tokens is not a number")
    decode.step()
    ended, _ = prefill.wait_expired(1.0)
    time.sleep(0.1)
    assert sorted(ended + prefill.ask("expired")) == ["closed", "rejected"]


def test_stopped_peer_fails_at_the_deadline_and_writes_nothing_after(prefill: PrefillProcess) -> None:
    """From a newcomer, who is not connected yet: who is connected can read a stopped process of its own host (CMA)."""
    newcomer = Decode(incarnation=79, transfer_deadline_s=1.0)
    try:
        params = prefill.grant("stopped", SOURCE)
        prefill.freeze()
        try:
            target = newcomer.start("d-stopped", params, Landing.RESIDENT, seed=33)
            reason, seconds = newcomer.run("d-stopped", 15.0)
            assert "timeout" in reason and 0.9 < seconds < 6.0, (reason, seconds)
            newcomer.scribble(target, 0x5A)  # drained: they may belong to somebody else now
        finally:
            prefill.signal(signal.SIGCONT)
        again = newcomer.start("d-again", prefill.grant("again", SOURCE), Landing.RESIDENT, seed=34, upper=True)
        assert newcomer.run("d-again", 10.0)[0] == "", "the peer is connected again"
        newcomer.check_bytes(again, Landing.RESIDENT)
        assert newcomer.untouched(target, 0x5A)
    finally:
        newcomer.worker.shutdown()


def test_killed_peer_fails_the_import_and_its_successor_is_used(processes: dict[str, PrefillProcess], prefill: PrefillProcess,
                                                                decode: Decode) -> None:
    decode.memory.pool.row_masks[:] = 0
    stale = prefill.grant("stale", SOURCE)
    params = prefill.grant("killed", SOURCE)
    prefill.signal(signal.SIGKILL)
    wait_for_state(prefill.pid, "ZX")
    settings = decode.scheduler._config
    decode.scheduler._config = settings.model_copy(update={"transfer_deadline_s": 20.0})
    decode.start("d-killed", params, Landing.HOST, seed=35)
    decode.scheduler._config = settings
    reason, seconds = decode.run("d-killed", 15.0)
    assert ("transfer" in reason or "refused" in reason) and seconds < 6.0, "noticed long before the deadline of 20 s"
    assert not decode.memory.pool.row_masks.any()
    successor = processes["second"].wait_ready()
    decode.start("d-new", successor.grant("new", SOURCE), Landing.HOST, seed=36)
    assert decode.run("d-new", 10.0)[0] == ""
    assert decode.memory.pool.row_masks.any()
    with pytest.raises(Exception, match="restarted"):
        decode.scheduler.add_remote("d-stale", stale)


def test_b27_heartbeats_keep_a_short_lease_and_silence_ends_it(processes: dict[str, PrefillProcess], decode: Decode) -> None:
    successor = processes["second"].wait_ready()
    decode.offer("d-kept", successor.grant("kept", SOURCE))  # and waits for three lease times
    successor.grant("forgotten", SOURCE)
    ended: list[str] = []
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        decode.step()
        ended += successor.ask("expired")
        time.sleep(0.01)
    assert "forgotten" in ended and "kept" not in ended
    decode.start("d-kept", None, Landing.HOST, seed=37)
    assert decode.run("d-kept", 10.0)[0] == ""
    assert successor.wait_expired(1.0)[0] == ["kept"]
    assert np.count_nonzero(decode.memory.pool.row_masks)

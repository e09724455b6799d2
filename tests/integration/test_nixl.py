"""Imports over real NIXL between two processes: bytes, notices, page reuse, a hung peer, a killed peer, a restarted peer."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hisparse.config import PDConfig
from hisparse.connector.base import LoadEvents
from hisparse.pd.connector import PDConnectorScheduler, PDConnectorWorker
from hisparse.types import ImportTarget, Landing, RequestPages
from tests.integration.nixl_prefill import SEED, PrefillProcess
from tests.pd.rig import LAYOUT, RankMemory, expected_page, pick_pages

pytestmark = pytest.mark.integration
PAGES = 6
TOKENS = 22
HELD = [True, False, True, True, False, True]


class Decode:
    """A decode engine without a model, in this process."""

    def __init__(self, **config: Any) -> None:
        settings = PDConfig(role="decode", staging_slots=2, staging_slot_pages=2, **config)
        self.memory = RankMemory(2)
        self.worker = PDConnectorWorker(LAYOUT, settings, cache=self.memory.cache, host_pool=self.memory.pool,
                                        engine_id="d", incarnation=77, rank=0, host_writer=True)
        self.scheduler = PDConnectorScheduler(LAYOUT, settings, engine_id="d", incarnation=77, num_ranks=1)
        self.scheduler.set_endpoints([self.worker.handshake()])
        self.steps = 0

    def step(self) -> LoadEvents:
        self.steps += 1
        self.worker.start_step(self.scheduler.build_metadata(self.steps))
        self.worker.end_step()
        output = self.worker.output()
        events = self.scheduler.update([output] if output is not None else [])
        self.scheduler.check()
        return events

    def run(self, request_id: str, timeout_s: float) -> tuple[str, float]:
        """Steps until the request's load ends: ("" or the reason, seconds)."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            events = self.step()
            if request_id in events.loaded:
                self.step()
                return "", time.monotonic() - started
            if request_id in events.failed:
                self.step()
                return events.failed[request_id], time.monotonic() - started
            time.sleep(0.002)
        raise AssertionError(f"{request_id} neither loaded nor failed within {timeout_s} s")

    def start(self, request_id: str, params: dict[str, Any], landing: Landing, seed: int) -> RequestPages:
        assert self.scheduler.add_remote(request_id, params) == TOKENS
        resident = [True] * PAGES if landing is Landing.RESIDENT else [i == PAGES - 1 for i in range(PAGES)]
        target = pick_pages(seed, PAGES, TOKENS, resident=resident, host=[True] * PAGES)
        assert self.scheduler.choose_landing(request_id, landing is Landing.RESIDENT, True) is landing
        self.scheduler.start_import(request_id, ImportTarget(landing=landing, pages=target))
        return target


SOURCE = pick_pages(5, PAGES, TOKENS, resident=HELD, host=[not held for held in HELD])


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
    far, name = RankMemory(SEED), f"good-{landing.value}"
    target = decode.start(f"d-{name}", prefill.grant(name, SOURCE), landing, seed=31)
    reason, _ = decode.run(f"d-{name}", 10.0)
    assert reason == ""
    for i in range(PAGES):
        near = decode.memory
        assert (near.indexer_row(target.indexer_blocks[i]) == far.indexer_row(SOURCE.indexer_blocks[i])).all()
        for layer in range(LAYOUT.shape.num_layers):
            want = expected_page(far, SOURCE, i, layer)
            if landing is Landing.HOST:
                assert (near.host_row(layer, target.host_blocks[i]) == want).all()
            blocks = [group[i] for group in target.resident_blocks]
            if all(blocks):
                assert (near.resident_row(layer, blocks) == want).all()
    if landing is Landing.HOST:
        assert decode.memory.pool.row_masks[target.host_blocks[-1]] == 0b11, "22 tokens: 2 rows in page 5"
        assert decode.memory.pool.row_masks[target.host_blocks[0]] == 0b1111
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


def test_stopped_peer_fails_at_the_deadline_and_writes_nothing_after(prefill: PrefillProcess, decode: Decode) -> None:
    params = prefill.grant("stopped", SOURCE)
    prefill.signal(signal.SIGSTOP)
    try:
        target = decode.start("d-stopped", params, Landing.RESIDENT, seed=33)
        reason, seconds = decode.run("d-stopped", 15.0)
        assert "timeout" in reason and 0.9 < seconds < 6.0, (reason, seconds)
        blocks = [*target.indexer_blocks, *(block for group in target.resident_blocks for block in group)]
        decode.memory.memory.device[blocks] = 0x5A  # drained: they may belong to somebody else now
    finally:
        prefill.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert (decode.memory.memory.device[blocks] == 0x5A).all()
    again = decode.start("d-again", prefill.grant("again", SOURCE), Landing.RESIDENT, seed=34)
    assert decode.run("d-again", 10.0)[0] == "", "the peer is connected again"
    want = RankMemory(SEED).indexer_row(SOURCE.indexer_blocks[0])
    assert (decode.memory.indexer_row(again.indexer_blocks[0]) == want).all()


def test_killed_peer_fails_the_import_and_its_successor_is_used(processes: dict[str, PrefillProcess], prefill: PrefillProcess,
                                                                decode: Decode) -> None:
    decode.memory.pool.row_masks[:] = 0
    stale = prefill.grant("stale", SOURCE)
    params = prefill.grant("killed", SOURCE)
    prefill.signal(signal.SIGSTOP)  # so that the kill comes while a READ is in progress
    settings = decode.scheduler._config
    decode.scheduler._config = settings.model_copy(update={"transfer_deadline_s": 20.0})
    decode.start("d-killed", params, Landing.HOST, seed=35)
    decode.scheduler._config = settings
    for _ in range(50):
        decode.step()
        time.sleep(0.002)
    prefill.signal(signal.SIGKILL)
    reason, seconds = decode.run("d-killed", 15.0)
    assert "transfer" in reason and seconds < 6.0, "the dead peer is noticed long before the deadline of 20 s"
    assert not decode.memory.pool.row_masks.any()
    successor = processes["second"].wait_ready()
    decode.start("d-new", successor.grant("new", SOURCE), Landing.HOST, seed=36)
    assert decode.run("d-new", 10.0)[0] == ""
    assert decode.memory.pool.row_masks.any()
    with pytest.raises(Exception, match="restarted"):
        decode.scheduler.add_remote("d-stale", stale)


def test_b27_heartbeats_keep_a_short_lease_and_silence_ends_it(processes: dict[str, PrefillProcess], decode: Decode) -> None:
    successor = processes["second"].wait_ready()
    decode.start("d-kept", successor.grant("kept", SOURCE), Landing.HOST, seed=37)
    successor.grant("forgotten", SOURCE)
    plans = decode.scheduler._plans
    decode.scheduler._plans = []  # the import waits for three lease times
    ended: list[str] = []
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        decode.step()
        ended += successor.ask("expired")
        time.sleep(0.01)
    assert "forgotten" in ended and "kept" not in ended
    decode.scheduler._plans = plans
    assert decode.run("d-kept", 10.0)[0] == ""
    assert successor.wait_expired(1.0)[0] == ["kept"]
    assert np.count_nonzero(decode.memory.pool.row_masks)

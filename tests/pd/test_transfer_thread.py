"""A transfer thread that does not go on, seen from the step's thread; and what its transport counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from hisparse.errors import TransferError
from hisparse.pd import worker as pd_worker
from hisparse.pd.commands import OutgoingNotice, PDCommand, PeerTraffic
from hisparse.pd.endpoint import agent_name
from hisparse.pd.loopback import LoopbackNetwork, LoopbackTransport
from hisparse.pd.metered import MAX_PEERS, OTHERS, MeteredTransport
from tests.pd.rig import FakeClock
from tests.pd.test_connector import Replica, until
from tests.pd.test_connector import start as start_import

LIMIT_S = 0.2


class BlockingTransport(LoopbackTransport):
    """Every call of `method` waits for `gate`, and says so in `entered`."""

    def block(self, method: str) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        plain = getattr(self, method)

        def wait(*args: object) -> object:
            self.entered.set()
            assert self.gate.wait(30)
            return plain(*args)

        setattr(self, method, wait)


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Replica, Replica, BlockingTransport]]:
    monkeypatch.setattr(pd_worker, "DRAIN_S", 0.1)
    monkeypatch.setattr(pd_worker, "CLOSE_S", 0.1)
    network = LoopbackNetwork()
    made: list[BlockingTransport] = []

    def make(agent: str) -> BlockingTransport:
        made.append(BlockingTransport(agent, network=network))
        return made[-1]

    prefill = Replica("p", network, role="prefill")
    engine = Replica("d", network, seed=2, role="decode", transfer_deadline_s=LIMIT_S, make_transport=make)
    yield prefill, engine, made[0]
    if hasattr(made[0], "gate"):
        made[0].gate.set()
    for replica in (prefill, engine):
        for rank in replica.ranks:
            rank.shutdown()


@pytest.mark.parametrize("method", ["connect", "read", "poll", "disconnect"])
def test_a_call_that_blocks_fails_its_import_in_time_and_keeps_the_quarantine(
        decode: tuple[Replica, Replica, BlockingTransport], method: str) -> None:
    prefill, engine, transport = decode
    transport.block(method)
    if method == "disconnect":  # a READ that hangs beyond its deadline makes the thread close the endpoint
        transport.faults.hang = lambda number: True
    began = time.monotonic()
    start_import(prefill, engine, "1")
    until(lambda: engine.overdue, engine)
    assert time.monotonic() - began >= LIMIT_S + 2 * 0.1, "draining and closing had their time"
    assert f"{method}(p/" in engine.overdue["d-1"] and "quarantine" in engine.overdue["d-1"]
    until(engine.pd.problem, engine)
    assert f"inside one transport call {method}(p/" in engine.pd.problem()
    assert engine.pd.stats().imports_overdue == 1 and not engine.failed and not engine.loaded
    engine.scheduler.request_closed("d-1")  # as the engine does
    for _ in range(20):
        engine.step()
    assert engine.overdue == {"d-1": engine.overdue["d-1"]} and not engine.drained, "its pages may still be written"
    assert engine.pd.stats().imports_in_flight == 1
    transport.gate.set()
    until(lambda: engine.drained, engine)
    until(lambda: not engine.pd.problem(), engine)
    assert engine.drained == ["d-1"] and engine.pd.stats().imports_in_flight == 0
    transport.faults.hang = lambda number: False
    start_import(prefill, engine, "2")
    until(lambda: engine.loaded, engine)
    stats = engine.pd.stats()
    assert engine.loaded == ["d-2"] and stats.staging_slots_free == stats.staging_slots == 8


def test_an_endpoint_that_cannot_be_closed_is_overdue_but_not_stuck(
        decode: tuple[Replica, Replica, BlockingTransport]) -> None:
    prefill, engine, transport = decode
    close, tries = transport.disconnect, []

    def refuse(peer: str) -> None:
        tries.append(peer)
        raise TransferError("busy")

    transport.faults.hang = lambda number: True
    transport.disconnect = refuse  # type: ignore[method-assign]
    start_import(prefill, engine, "1")
    until(lambda: engine.overdue, engine)
    assert "cannot close the endpoint" in engine.overdue["d-1"] and engine.pd.problem() == "" and tries
    engine.scheduler.request_closed("d-1")
    transport.disconnect = close  # type: ignore[method-assign]
    until(lambda: engine.drained, engine)


def test_long_work_within_the_limit_is_not_stuck(decode: tuple[Replica, Replica, BlockingTransport]) -> None:
    prefill, engine, transport = decode
    transport.block("read")
    start_import(prefill, engine, "1")
    engine.step()
    assert transport.entered.wait(5)
    engine.step()
    assert engine.pd.problem() == "" and not engine.overdue
    transport.gate.set()
    until(lambda: engine.loaded, engine)


def test_a_notice_to_a_successor_ends_the_imports_from_its_predecessor() -> None:
    network = LoopbackNetwork()
    prefill = Replica("p", network, role="prefill")
    engine = Replica("d", network, seed=2, role="decode", transfer_deadline_s=60.0)
    engine.faults.hang = lambda number: True
    try:
        start_import(prefill, engine, "1")
        engine.step()
        successor = LoopbackTransport(agent_name("p", 6, 0), network=network)
        endpoint = replace(prefill.workers[0].handshake(), agent=successor.name, metadata=successor.metadata())
        notice = OutgoingNotice(peer_id="p", endpoint=endpoint, payload=b"release")
        engine.workers[0].start_step(PDCommand(notices=(notice,)))
        until(lambda: engine.failed, engine)
        assert "restarted: p/" in engine.failed["d-1"] and successor.notices() == [b"release"]
    finally:
        for rank in (*prefill.ranks, *engine.ranks):
            rank.shutdown()


# ------------------------------------------------------------------------------------------- counters
class Metered:
    """One metered agent, one peer, a buffer on either side."""

    def __init__(self) -> None:
        self.network, self.clock = LoopbackNetwork(), FakeClock()
        self.far, self.near = np.arange(256, dtype=np.uint8), np.zeros(256, dtype=np.uint8)
        self.plain = LoopbackTransport("d/0/0", network=self.network)
        self.transport = MeteredTransport(self.plain, self.clock)
        self.transport.register(self.near.ctypes.data, 256)
        self.add_peer("p/a/0")

    def add_peer(self, agent: str) -> None:
        peer = LoopbackTransport(agent, network=self.network)
        peer.register(self.far.ctypes.data, 256)
        self.transport.connect(agent, peer.metadata())

    def read(self, agent: str, pieces: int = 4) -> object:
        size = 256 // pieces
        starts = np.arange(pieces, dtype=np.int64) * size
        return self.transport.read(agent, np.stack([self.far.ctypes.data + starts, self.near.ctypes.data + starts,
                                                    np.full(pieces, size)], axis=1))


def test_traffic_is_counted_by_engine_and_not_by_incarnation() -> None:
    box = Metered()
    first = box.read("p/a/0")
    box.clock.advance(0.25)
    assert box.transport.poll(first) and (box.near == box.far).all()
    box.transport.notify("p/a/0", b"hello")
    box.add_peer("p/b/1")
    second = box.read("p/b/1", pieces=1)
    box.clock.advance(1.0)
    assert box.transport.poll(second)
    assert box.transport.changed
    assert box.transport.take_traffic() == {"p": PeerTraffic(
        reads=2, num_descriptors=5, num_bytes=512, seconds=1.25, slowest_s=1.0, connects=2, notices_sent=1)}
    assert not box.transport.changed and box.transport.call is None


@pytest.mark.parametrize("fault", ["broken", "dead", "refused", "closed"])
def test_failures_are_counted_once_and_nothing_is_counted_as_read(fault: str) -> None:
    box = Metered()
    if fault == "refused":
        with pytest.raises(TransferError):
            box.transport.read("p/a/0", np.array([[1, 2, 3]], dtype=np.int64))
    else:
        read = box.read("p/a/0")
        if fault == "closed":
            box.transport.disconnect("p/a/0")
        else:
            box.plain.faults.fail = lambda number: True
            if fault == "dead":
                box.network.kill("p/a/0")
            with pytest.raises(TransferError):
                box.transport.poll(read)
    box.transport.close()
    assert box.transport.take_traffic() == {"p": PeerTraffic(failures=1, connects=1)}


def test_many_peers_keep_the_table_small_and_the_sums_right() -> None:
    box = Metered()
    poll: Callable[[object], bool] = box.transport.poll
    for number in range(MAX_PEERS + 20):
        box.add_peer(f"p{number}/a/0")
        assert poll(box.read(f"p{number}/a/0", pieces=1))
    traffic = box.transport.take_traffic()
    assert len(traffic) == MAX_PEERS + 1 and OTHERS in traffic and f"p{MAX_PEERS + 19}" in traffic
    assert sum(item.reads for item in traffic.values()) == MAX_PEERS + 20

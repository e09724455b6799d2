"""Faults at every stage of an import over real NIXL between two processes.

A gate on the decode side's transfer thread brings the fault before a chosen READ is posted, so that each stage is hit
exactly. UCX runs over TCP here: READs then need the peer's process at every stage, as over a network; its copies within a
host can read a stopped process. Oracle: each page's bytes by prefill's content rule, or a clear failure in time;
afterwards nobody writes to the pages, every staging slot is free, the transfer threads live, and another transfer works.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hisparse.errors import ProtocolError
from hisparse.pd import worker as pd_worker
from hisparse.pd.nixl import NixlTransport
from hisparse.pd.transport import Descriptors, PeerLost
from hisparse.types import Landing
from tests.integration.nixl_decode import SOURCE, Decode
from tests.integration.nixl_prefill import PrefillProcess, wait_for_state

pytestmark = pytest.mark.integration
STAGES = ("before", "first", "middle", "generations")
"""Before the import begins, before its first data READ, between data READs, between the data and the generation READ."""
DEADLINE_S, LEASE_S, DRAIN_S = 0.5, 0.3, 0.3
SCRIBBLE = 0x5A
NUM_BYTES, PIECES = 32 << 20, 512
"""Of the memory of `far_agent`."""
_NUMBERS = itertools.count(1)


class Fleet:
    """Prefill engine "p", started anew on demand; the next one is always being forked."""

    def __init__(self, tls: str) -> None:
        self._tls = tls
        self._spare = self._fork()
        self.current = self._next()

    def _fork(self) -> PrefillProcess:
        return PrefillProcess("p", next(_NUMBERS), tls=self._tls, lease_s=30.0)

    def _next(self) -> PrefillProcess:
        current, self._spare = self._spare.wait_ready(), self._fork()
        return current

    def restart(self) -> PrefillProcess:
        """The old process is gone; a new incarnation serves under the same engine id."""
        self.current.end()
        self.current = self._next()
        return self.current

    def end(self) -> None:
        self.current.end()
        self._spare.end()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet("tcp")
    yield fleet
    fleet.end()


@pytest.fixture(scope="module")
def decode() -> Iterator[Decode]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pd_worker, "DRAIN_S", DRAIN_S)
        patch.setenv("UCX_TLS", "tcp")
        engine = Decode(transfer_deadline_s=DEADLINE_S)
    yield engine
    engine.worker.shutdown()


def reads_generations(params: dict[str, Any]) -> Callable[[Descriptors], bool]:
    """Tells the generation READ from data READs by where it reads."""
    arrays = params["ranks"][0]["generations"]
    spans = [(array["address"], array["address"] + array["num_pages"] * array["stride"]) for array in arrays]

    def tell(descriptors: Descriptors) -> bool:
        return any(first <= address < end for address in descriptors[:, 0].tolist() for first, end in spans)

    return tell


class Attempt:
    """One import with a fault at a stage: `cause` runs once, before that stage's READ is posted."""

    def __init__(self, decode: Decode, prefill: PrefillProcess, landing: Landing, stage: str,
                 cause: Callable[[], None]) -> None:
        self.decode, self.name = decode, f"r{next(_NUMBERS)}"
        self.params = prefill.grant(self.name, SOURCE)
        self.hit, self.at = False, 1 << 30
        middle = 2 if landing is Landing.HOST else 1  # RESIDENT: indexer pages, then rows, both posted at once
        is_generations = reads_generations(self.params)

        def gate(number: int, descriptors: Descriptors) -> None:
            last = is_generations(descriptors)
            here = {"first": number == 0, "middle": number == middle, "generations": last}[stage]
            if here and not self.hit:
                self.hit, self.at = True, number
                cause()

        assert decode.transport is not None
        decode.transport.restart(gate if stage != "before" else lambda number, descriptors: None)
        decode.memory.pool.row_masks[:] = 0
        if stage == "before":
            self.hit, self.at = True, 0
            cause()
        self.target = decode.start(f"d-{self.name}", self.params, landing, seed=40)

    def run(self, timeout_s: float, watch: Callable[[], None] = lambda: None) -> tuple[str, float]:
        outcome = self.decode.run(f"d-{self.name}", timeout_s, watch=watch)
        assert self.hit, "the stage was never reached"
        return outcome

    def check_failed(self) -> None:
        """Nothing of it may be selected, and nothing writes to its pages: somebody else gets them."""
        assert not self.decode.memory.pool.row_masks.any()
        self.decode.check_quiet()
        self.decode.scribble(self.target, SCRIBBLE)

    def check_untouched(self) -> None:
        assert self.decode.untouched(self.target, SCRIBBLE), "a transfer wrote to pages after its import had failed"


def check_works(decode: Decode, prefill: PrefillProcess, landing: Landing) -> None:
    """Another import has the right bytes, and prefill has nothing left to hold."""
    assert decode.transport is not None
    decode.transport.restart(lambda number, descriptors: None)
    decode.memory.pool.row_masks[:] = 0
    name = f"r{next(_NUMBERS)}"
    target = decode.start(f"d-{name}", prefill.grant(name, SOURCE), landing, seed=50, upper=True)
    assert decode.run(f"d-{name}", 10.0)[0] == ""
    decode.check_bytes(target, landing)
    decode.check_quiet()
    deadline = time.monotonic() + 5.0
    while prefill.ask("stats").leases_held:
        decode.step()
        assert time.monotonic() < deadline, "prefill was not told"


@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("stage", STAGES)
def test_sigstop_of_prefill(fleet: Fleet, decode: Decode, stage: str, landing: Landing) -> None:
    """A hung peer: no error comes from the transport, our deadline ends it. Woken up, it cannot write to our pages.

    UCX often aborts a process that wakes up to answer READs of a connection closed meanwhile, so a new one is used after.
    """
    prefill = fleet.current
    attempt = Attempt(decode, prefill, landing, stage, prefill.freeze)
    try:
        reason, seconds = attempt.run(15.0)
        assert "timeout" in reason and DEADLINE_S <= seconds < DEADLINE_S + DRAIN_S + 2.0, (reason, seconds)
        attempt.check_failed()
    finally:
        prefill.signal(signal.SIGCONT)
    prefill.wait_awake()
    attempt.check_untouched()
    check_works(decode, fleet.restart(), landing)
    attempt.check_untouched()


@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("stage", STAGES)
def test_sigkill_of_prefill(fleet: Fleet, decode: Decode, stage: str, landing: Landing) -> None:
    """Killed with that stage's READ in progress: found long before a deadline of 20 s; its successor is used."""
    prefill, transport = fleet.current, decode.transport
    assert transport is not None
    settings = decode.scheduler._config
    decode.scheduler._config = settings.model_copy(update={"transfer_deadline_s": 20.0})
    killed = False

    def kill() -> None:
        nonlocal killed
        killed = True
        prefill.signal(signal.SIGKILL)
        wait_for_state(prefill.pid, "ZX")

    def kill_when_posted() -> None:
        if not killed and transport.posted > attempt.at:
            assert transport.done <= attempt.at, "the READ was over before the kill"
            kill()

    try:
        attempt = Attempt(decode, prefill, landing, stage, kill if stage == "before" else prefill.freeze)
        reason, seconds = attempt.run(15.0, watch=kill_when_posted)
    finally:
        decode.scheduler._config = settings
    assert killed and ("transfer" in reason or "refused" in reason) and seconds < 5.0, (reason, seconds)
    attempt.check_failed()
    check_works(decode, fleet.restart(), landing)
    attempt.check_untouched()


@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("stage", STAGES)
def test_lease_that_expires_and_pages_that_are_reused(fleet: Fleet, decode: Decode, stage: str, landing: Landing) -> None:
    """Held back beyond its lease, without a heartbeat, an import finds other pages; READs after that stage read a canary."""
    prefill = fleet.restart()  # its memory is as the content rule says
    prefill.ask("lease", LEASE_S)

    def expire() -> None:
        assert len(prefill.wait_expired(5.0)[0]) == 1
        prefill.ask("reuse", SOURCE)

    attempt = Attempt(decode, prefill, landing, stage, expire)
    reason, _ = attempt.run(10.0)
    assert "generation" in reason and "reused" in reason
    attempt.check_failed()
    assert prefill.ask("stats").leases_expired == 1
    check_works(decode, fleet.restart(), landing)
    attempt.check_untouched()


def test_prefill_restarts_and_its_old_metadata_is_refused(fleet: Fleet, decode: Decode) -> None:
    old = fleet.current
    stale = [old.grant(f"stale{i}", SOURCE) for i in range(2)]
    target = decode.start("d-old", old.grant("old", SOURCE), Landing.RESIDENT, seed=60)
    assert decode.run("d-old", 10.0)[0] == ""
    decode.check_bytes(target, Landing.RESIDENT)
    fresh = fleet.restart()
    check_works(decode, fresh, Landing.HOST)
    with pytest.raises(ProtocolError, match="restarted"):
        decode.scheduler.add_remote("d-stale", stale[0])
    newcomer = Decode(incarnation=78, transfer_deadline_s=20.0)  # has never met either of them
    try:
        newcomer.memory.pool.row_masks[:] = 0
        newcomer.start("d-stale", stale[1], Landing.HOST, seed=61)
        reason, seconds = newcomer.run("d-stale", 15.0)
        assert ("refused" in reason or "transfer" in reason) and seconds < 5.0, (reason, seconds)
        assert not newcomer.memory.pool.row_masks.any()
        newcomer.check_quiet()
        check_works(newcomer, fresh, Landing.HOST)
    finally:
        newcomer.worker.shutdown()


def doomed_decode(conn: Connection) -> None:
    """A decode process that is killed inside its import."""
    engine = Decode(incarnation=1, transfer_deadline_s=60.0)
    assert engine.transport is not None

    def hold(number: int, descriptors: Descriptors) -> None:
        if number == 2:
            conn.send("reading")
            time.sleep(60)

    engine.transport.restart(hold)
    conn.send("ready")
    engine.start("d-1", conn.recv(), Landing.HOST, seed=70)
    engine.run("d-1", 60.0)


def test_decode_restarts(fleet: Fleet) -> None:
    """Killed in the middle of its READs: prefill's lease runs out, its agent lives, and decode's successor is served."""
    context = mp.get_context("forkserver")
    near, far = context.Pipe()
    process = context.Process(target=doomed_decode, args=(far,), daemon=True)
    process.start()
    prefill = fleet.restart()
    try:
        assert near.poll(20) and near.recv() == "ready"
        prefill.ask("lease", 1.0)
        name = f"r{next(_NUMBERS)}"
        near.send(prefill.grant(name, SOURCE))
        assert near.poll(20) and near.recv() == "reading"
        assert prefill.ask("stats").leases_held == 1
    finally:
        process.kill()
        process.join(10)
    ended, seconds = prefill.wait_expired(5.0)
    assert ended == [name] and seconds < 2.0
    prefill.ask("lease", 30.0)
    successor = Decode(incarnation=2, transfer_deadline_s=DEADLINE_S)
    try:
        for landing in Landing:
            check_works(successor, prefill, landing)
    finally:
        successor.worker.shutdown()


def far_agent(conn: Connection, name: str, seed: int) -> None:
    """An agent that serves `NUM_BYTES` random bytes over TCP until its process is killed."""
    os.environ["UCX_TLS"] = "tcp"
    agent, memory = NixlTransport(name), content(seed)
    agent.register(memory.ctypes.data, NUM_BYTES)
    conn.send((agent.metadata(), memory.ctypes.data))
    conn.recv()


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, NUM_BYTES, dtype=np.uint8)


def test_a_hung_peer_is_silenced_and_reads_of_others_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    context = mp.get_context("forkserver")
    pipes, processes = [], []
    for seed, name in enumerate(("hung", "fine")):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        processes.append(context.Process(target=far_agent, args=(theirs, name, seed), daemon=True))
        processes[-1].start()
    transport, near = NixlTransport("near"), np.zeros((2, NUM_BYTES), dtype=np.uint8)
    try:
        transport.register(near.ctypes.data, near.nbytes)
        starts = np.random.default_rng(0).permutation(PIECES).astype(np.int64) * (NUM_BYTES // PIECES)
        reads = []
        for i, name in enumerate(("hung", "fine")):
            assert pipes[i].poll(60)
            metadata, address = pipes[i].recv()
            transport.connect(name, metadata)
            if name == "hung":
                os.kill(processes[i].pid or 0, signal.SIGSTOP)
                wait_for_state(processes[i].pid or 0, "T")
            reads.append(transport.read(name, np.stack([
                address + starts, near[i].ctypes.data + starts, np.full(PIECES, NUM_BYTES // PIECES)], axis=1)))
        assert not transport.poll(reads[0]) and not transport.poll(reads[1]), "32 MB are still on their way"
        transport.disconnect("hung")
        assert transport.replaced == 1
        near[0] = SCRIBBLE
        os.kill(processes[0].pid or 0, signal.SIGCONT)
        deadline = time.monotonic() + 20.0
        while not transport.poll(reads[1]):
            assert time.monotonic() < deadline
        assert (near[1] == content(1)).all(), "the other peer's READ is whole"
        assert (near[0] == SCRIBBLE).all(), "the hung peer's is not even begun"
    finally:
        transport.close()
        for process in processes:
            process.kill()
            process.join(10)


def test_the_agent_of_a_lost_peer_has_ended_when_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads could still write behind `disconnect`, were it kept alive by the error that is being handled."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    ours, theirs = mp.get_context("forkserver").Pipe()
    process = mp.get_context("forkserver").Process(target=far_agent, args=(theirs, "lost", 0), daemon=True)
    process.start()
    transport, near, alive = NixlTransport("near"), np.zeros(NUM_BYTES, dtype=np.uint8), list[bool]()
    make, agent = transport._make, weakref.ref(transport._agent)

    def next_agent() -> object:
        alive.append(agent() is not None)
        return make()

    monkeypatch.setattr(transport, "_make", next_agent)
    try:
        transport.register(near.ctypes.data, near.nbytes)
        assert ours.poll(60)
        metadata, address = ours.recv()
        transport.connect("lost", metadata)
        process.kill()
        process.join(10)
        starts = np.arange(PIECES, dtype=np.int64) * (NUM_BYTES // PIECES)
        whole = np.stack([address + starts, near.ctypes.data + starts, np.full(PIECES, NUM_BYTES // PIECES)], axis=1)
        deadline = time.monotonic() + 20.0
        try:
            read = transport.read("lost", whole)
            while not transport.poll(read):
                assert time.monotonic() < deadline
        except PeerLost:
            transport.disconnect("lost")
        assert transport.replaced == 1 and alive == [False]
    finally:
        transport.close()
        process.kill()

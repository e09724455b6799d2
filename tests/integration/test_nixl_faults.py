"""Faults at every stage of an import over real NIXL between two processes.

A gate on the decode side's transfer thread brings the fault before a chosen READ is posted, so that each stage is hit
exactly. UCX runs over TCP here: READs then need the peer's process at every stage, as over a network; its copies within a
host can read a stopped process. Oracle: each page's bytes by prefill's content rule, or a clear failure in time;
afterwards nobody writes to the pages, every staging slot is free, the transfer threads live, and another transfer works.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from torch import Tensor

from hisparse.errors import ProtocolError
from hisparse.pd.nixl import NixlTransport
from hisparse.pd.transport import Descriptors, PeerLost
from hisparse.types import Landing
from tests.integration.nixl_decode import SOURCE, Decode
from tests.integration.nixl_faults import (
    CASES,
    DEADLINE_S,
    DRAIN_S,
    LEASE_S,
    NUMBERS,
    SCRIBBLE,
    WAYS,
    Attempt,
    Fleet,
    Way,
    check_works,
    decode_engines,
)
from tests.integration.nixl_prefill import wait_for_state

pytestmark = pytest.mark.integration
NUM_BYTES, PIECES = 32 << 20, 512
"""Of the memory of `far_agent`."""


@pytest.fixture(scope="module")
def device() -> str:
    """Where decode's packed allocation lies."""
    return "cpu"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet("tcp")
    yield fleet
    fleet.end()


@pytest.fixture(scope="module")
def decodes() -> Iterator[dict[str, Decode]]:
    yield from decode_engines("tcp")


@pytest.mark.parametrize(("way", "stage"), CASES)
def test_sigstop_of_prefill(fleet: Fleet, decodes: dict[str, Decode], way: Way, stage: str) -> None:
    """A hung peer: no error comes from the transport, our deadline ends it. Woken up, it cannot write to our pages.

    UCX often aborts a process that wakes up to answer READs of a connection closed meanwhile, so a new one is used after.
    """
    prefill, decode = fleet.current, decodes[way.path]
    attempt = Attempt(decode, prefill, way, stage, prefill.freeze)
    try:
        reason, seconds = attempt.run(15.0)
        if reason or not fleet.one_sided:
            assert "timeout" in reason and DEADLINE_S <= seconds < DEADLINE_S + DRAIN_S + 4.0, (reason, seconds)
        attempt.check(reason)
    finally:
        prefill.signal(signal.SIGCONT)
    prefill.wait_awake()
    attempt.check_untouched()
    check_works(decode, fleet.restart(), way.landing)
    attempt.check_untouched()


@pytest.mark.parametrize(("way", "stage"), CASES)
def test_sigkill_of_prefill(fleet: Fleet, decodes: dict[str, Decode], way: Way, stage: str) -> None:
    """Killed with that stage's READ in progress: found long before a deadline of 20 s; its successor is used."""
    prefill, decode = fleet.current, decodes[way.path]
    transport = decode.transport
    killed = False

    def kill() -> None:
        nonlocal killed
        killed = True
        prefill.signal(signal.SIGKILL)
        wait_for_state(prefill.pid, "ZX")

    def kill_when_posted() -> None:
        if not killed and transport.posted > attempt.at:
            assert fleet.one_sided or transport.done <= attempt.at, "the READ was over before the kill"
            kill()

    with decode.deadline(20.0):
        attempt = Attempt(decode, prefill, way, stage, kill if stage == "before" else prefill.freeze)
        reason, seconds = attempt.run(15.0, watch=kill_when_posted)
    assert killed and seconds < 8.0, (reason, seconds)
    assert "transfer" in reason or "refused" in reason or (fleet.one_sided and not reason), reason
    attempt.check(reason)
    check_works(decode, fleet.restart(), way.landing)
    attempt.check_untouched()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_prefill_restarts_in_the_middle_of_a_read(fleet: Fleet, decodes: dict[str, Decode], way: Way) -> None:
    """The peer hangs in a READ; a new incarnation answers on the same address. The READ is over for good, and the new import
    has its own bytes, although the old process is still there and goes on."""
    decode, transport, name = decodes[way.path], decodes[way.path].transport, f"d-{next(NUMBERS)}"
    old, fresh, target = fleet.current, None, None

    def restart() -> None:
        nonlocal fresh, target
        if fresh is None and transport.posted > attempt.at:
            _, fresh = fleet.succeed()
            target = decode.start(name, fresh.grant(name, SOURCE), way.landing, seed=50, upper=True)

    with decode.deadline(20.0):
        attempt = Attempt(decode, old, way, "middle", old.freeze)
        reason, seconds = attempt.run(15.0, watch=restart)
        assert "restarted" in reason or (fleet.one_sided and not reason), (reason, seconds)
        assert target is not None and decode.run(name, 10.0)[0] == ""
    decode.check_bytes(target, way.landing)
    decode.scribble(attempt.target, SCRIBBLE)
    old.signal(signal.SIGCONT)
    old.wait_awake()
    attempt.check_untouched()
    decode.check_bytes(target, way.landing)
    old.end()
    decode.check_quiet()
    check_works(decode, fleet.restart(), way.landing)


@pytest.mark.parametrize(("way", "stage"), CASES)
def test_lease_that_expires_and_pages_that_are_reused(fleet: Fleet, decodes: dict[str, Decode], way: Way, stage: str) -> None:
    """Held back beyond its lease, without a heartbeat, an import finds other pages; READs after that stage read a canary."""
    prefill, decode = fleet.restart(), decodes[way.path]  # its memory is as the content rule says
    prefill.ask("lease", LEASE_S)

    def expire() -> None:
        assert len(prefill.wait_expired(5.0)[0]) == 1
        prefill.ask("reuse", SOURCE)

    with decode.deadline(10.0):
        attempt = Attempt(decode, prefill, way, stage, expire)
        reason, _ = attempt.run(15.0)
    assert "generation" in reason and "reused" in reason
    attempt.check(reason)
    assert prefill.ask("stats").leases_expired == 1
    check_works(decode, fleet.restart(), way.landing)
    attempt.check_untouched()


def test_prefill_restarts_and_its_old_metadata_is_refused(fleet: Fleet, decodes: dict[str, Decode], device: str) -> None:
    old, decode = fleet.current, decodes["staged"]
    stale = [old.grant(f"stale{i}", SOURCE) for i in range(2)]
    target = decode.start("d-old", old.grant("old", SOURCE), Landing.RESIDENT, seed=60)
    assert decode.run("d-old", 10.0)[0] == ""
    decode.check_bytes(target, Landing.RESIDENT)
    fresh = fleet.restart()
    check_works(decode, fresh, Landing.HOST)
    with pytest.raises(ProtocolError, match="restarted"):
        decode.scheduler.add_remote("d-stale", stale[0])
    newcomer = Decode(incarnation=79, device=device, transfer_deadline_s=20.0)  # has never met either of them
    try:
        newcomer.memory.pool.row_masks[:] = 0
        newcomer.start("d-stale", stale[1], Landing.HOST, seed=61)
        reason, seconds = newcomer.run("d-stale", 15.0)
        assert ("refused" in reason or "transfer" in reason) and seconds < 8.0, (reason, seconds)
        assert not newcomer.memory.pool.row_masks.any()
        newcomer.check_quiet()
        check_works(newcomer, fresh, Landing.HOST)
    finally:
        newcomer.worker.shutdown()


def doomed_decode(conn: Connection, device: str) -> None:
    """A decode process that is killed inside its import."""
    if device != "cpu":
        torch.cuda.set_device(device)
    engine = Decode(incarnation=1, device=device, transfer_deadline_s=60.0)

    def hold(number: int, descriptors: Descriptors) -> None:
        if number == 2:
            conn.send("reading")
            time.sleep(60)

    engine.transport.restart(hold)
    conn.send("ready")
    engine.start("d-1", conn.recv(), Landing.HOST, seed=70)
    engine.run("d-1", 60.0)


def test_decode_restarts(fleet: Fleet, device: str) -> None:
    """Killed in the middle of its READs: prefill's lease runs out, its agent lives, and decode's successor is served."""
    context = mp.get_context("forkserver")
    near, far = context.Pipe()
    process = context.Process(target=doomed_decode, args=(far, device), daemon=True)
    process.start()
    prefill = fleet.restart()
    try:
        assert near.poll(30) and near.recv() == "ready"
        prefill.ask("lease", 3.0)  # time enough for a busy machine to come to the READ
        name = f"r{next(NUMBERS)}"
        near.send(prefill.grant(name, SOURCE))
        assert near.poll(20) and near.recv() == "reading"
        assert prefill.ask("stats").leases_held == 1
    finally:
        process.kill()
        process.join(10)
    ended, _ = prefill.wait_expired(10.0)
    assert ended == [name]
    prefill.ask("lease", 30.0)
    successor = Decode(incarnation=2, device=device, transfer_deadline_s=5.0)
    try:
        for landing in Landing:
            check_works(successor, prefill, landing)
    finally:
        successor.worker.shutdown()


def far_agent(conn: Connection, name: str, seed: int, device: str) -> None:
    """An agent that serves `NUM_BYTES` random bytes over TCP until its process is killed."""
    os.environ["UCX_TLS"] = "tcp,cuda_copy" if device != "cpu" else "tcp"
    agent, memory = NixlTransport(name), content(seed).to(device)
    agent.register(memory.data_ptr(), NUM_BYTES, memory.device.index)
    conn.send((agent.metadata(), memory.data_ptr()))
    conn.recv()


def content(seed: int) -> Tensor:
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_hung_peer_is_silenced_and_reads_of_others_are_whole(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    context = mp.get_context("forkserver")
    pipes, processes = [], []
    for seed, name in enumerate(("hung", "fine")):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        processes.append(context.Process(target=far_agent, args=(theirs, name, seed, device), daemon=True))
        processes[-1].start()
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy" if device != "cpu" else "tcp")
    transport, near = NixlTransport("near"), torch.zeros((2, NUM_BYTES), dtype=torch.uint8, device=device)
    try:
        transport.register(near.data_ptr(), near.nbytes, near.device.index)
        starts = torch.randperm(PIECES).numpy() * (NUM_BYTES // PIECES)
        reads = []
        for i, name in enumerate(("hung", "fine")):
            assert pipes[i].poll(60)
            metadata, address = pipes[i].recv()
            transport.connect(name, metadata)
            if name == "hung":
                os.kill(processes[i].pid or 0, signal.SIGSTOP)
                wait_for_state(processes[i].pid or 0, "T")
            reads.append(transport.read(name, np.stack([
                address + starts, near[i].data_ptr() + starts, np.full(PIECES, NUM_BYTES // PIECES)], axis=1)))
        assert not transport.poll(reads[0]) and not transport.poll(reads[1]), "32 MB are still on their way"
        transport.disconnect("hung")
        assert transport.replaced == 1
        near[0] = SCRIBBLE
        os.kill(processes[0].pid or 0, signal.SIGCONT)
        deadline = time.monotonic() + 20.0
        while not transport.poll(reads[1]):
            assert time.monotonic() < deadline
        assert torch.equal(near[1].cpu(), content(1)), "the other peer's READ is whole"
        assert bool((near[0] == SCRIBBLE).all()), "the hung peer's is not even begun"
    finally:
        transport.close()
        for process in processes:
            process.kill()
            process.join(10)


def test_the_agent_of_a_lost_peer_has_ended_when_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads could still write behind `disconnect`, were it kept alive by the error that is being handled."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    ours, theirs = mp.get_context("forkserver").Pipe()
    process = mp.get_context("forkserver").Process(target=far_agent, args=(theirs, "lost", 0, "cpu"), daemon=True)
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

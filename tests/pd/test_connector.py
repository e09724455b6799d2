"""Both halves together, with real transfer threads over the loopback network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hisparse.config import PDConfig
from hisparse.connector.base import RemoteDecode, RemotePrefill, SchedulerConnector, WorkerConnector
from hisparse.connector.multi import MultiSchedulerConnector, MultiWorkerConnector
from hisparse.errors import InvariantError, TransferError
from hisparse.pd.commands import PDCommand
from hisparse.pd.connector import PDConnectorScheduler, PDConnectorWorker
from hisparse.pd.loopback import LoopbackFaults, LoopbackNetwork, LoopbackTransport
from hisparse.pd.transport import Transport
from hisparse.types import ImportTarget, Landing, RequestPages
from tests.pd.rig import LAYOUT, RankMemory, expected_page, pick_pages

PAGES, TOKENS = 6, 24


class Replica:
    """An engine without a model: `num_ranks` workers and the scheduler half, joined by Multi connectors."""

    def __init__(self, name: str, network: LoopbackNetwork, *, num_ranks: int = 1, seed: int = 1, incarnation: int = 5,
                 make_transport: Callable[[str], Transport] | None = None, **config: Any) -> None:
        settings = PDConfig(**config)
        self.faults = LoopbackFaults()
        self.memories = [RankMemory(seed) for _ in range(num_ranks)]
        self.pd = PDConnectorScheduler(LAYOUT, settings, engine_id=name, incarnation=incarnation, num_ranks=num_ranks)
        pools = self.memories[0].pool
        self.workers = [PDConnectorWorker(
            LAYOUT, settings, cache=memory.cache, host_pool=pools if rank == 0 else memory.pool, engine_id=name,
            incarnation=incarnation, rank=rank, host_writer=rank == 0,
            make_transport=make_transport or (lambda agent: LoopbackTransport(agent, network=network, faults=self.faults)))
            for rank, memory in enumerate(self.memories)]
        self.pd.set_endpoints([worker.handshake() for worker in self.workers])
        self.scheduler = MultiSchedulerConnector([self.pd])
        self.ranks = [MultiWorkerConnector([worker]) for worker in self.workers]
        self.steps = 0
        self.loaded: list[str] = []
        self.failed: dict[str, str] = {}
        self.drained: list[str] = []
        self.overdue: dict[str, str] = {}
        self.ended: list[str] = []

    def step(self) -> None:
        self.steps += 1
        metadata = self.scheduler.build_metadata(self.steps)
        outputs = []
        for rank in self.ranks:
            rank.start_step(metadata)
            rank.end_step()
            output = rank.output()
            if output is not None:
                outputs.append(output)
        events = self.scheduler.update(outputs)
        self.loaded += events.loaded
        self.failed |= events.failed
        self.drained += events.drained
        self.overdue |= events.overdue
        self.ended += self.pd.take_expired()
        self.scheduler.check()


Pair = tuple[Replica, Replica]


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


@pytest.fixture
def pair(network: LoopbackNetwork) -> Iterator[Pair]:
    prefill = Replica("p", network, num_ranks=2, seed=1, role="prefill")
    decode = Replica("d", network, num_ranks=2, seed=2, role="decode", transfer_deadline_s=0.3, staging_slot_pages=1)
    yield prefill, decode
    for replica in (prefill, decode):
        for rank in replica.ranks:
            rank.shutdown()
            rank.shutdown()


def until(condition: Any, *replicas: Replica, timeout_s: float = 5.0) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "nothing happened in time"
        for replica in replicas:
            replica.step()
        time.sleep(0.001)
    return time.monotonic() - started


SOURCE = pick_pages(5, PAGES, TOKENS, resident=[True, False] * 3, host=[False, True] * 3)


def start(prefill: Replica, decode: Replica, name: str, landing: Landing = Landing.HOST, seed: int = 7) -> RequestPages:
    params = prefill.pd.grant(f"p-{name}", SOURCE, prefill.memories[0].generations_of(SOURCE), prompt_digest="d" * 64)
    decode.pd.add_remote(f"d-{name}", params)
    resident = [landing is Landing.RESIDENT or i == PAGES - 1 for i in range(PAGES)]
    target = pick_pages(seed, PAGES, TOKENS, resident=resident, host=[True] * PAGES)
    decode.pd.start_import(f"d-{name}", ImportTarget(landing=landing, pages=target))
    return target


def test_the_first_rank_sends_the_notices(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would connect to prefill's rank 0 for nothing else."""
    prefill, decode = pair
    calls, connect, notify = list[tuple[str, str, str]](), LoopbackTransport.connect, LoopbackTransport.notify
    monkeypatch.setattr(LoopbackTransport, "connect", lambda self, peer, metadata: (
        calls.append(("connect", self.name[-1], peer[-1])), connect(self, peer, metadata))[1])
    monkeypatch.setattr(LoopbackTransport, "notify", lambda self, peer, message: (
        calls.append(("notify", self.name[-1], peer[-1])), notify(self, peer, message))[1])
    for name in ("one", "two"):
        start(prefill, decode, name)
        until(lambda name=name: f"p-{name}" in prefill.ended, decode, prefill)
    assert sorted(calls) == [("connect", "0", "0"), ("connect", "1", "1"), *[("notify", "0", "0")] * 2]


def test_halves_fit_the_protocols_of_the_boundary(pair: Pair) -> None:
    prefill, _ = pair
    pd: Any = prefill.pd
    scheduler: SchedulerConnector = pd
    remote_prefill: RemotePrefill = pd
    remote_decode: RemoteDecode = pd
    assert isinstance(prefill.workers[0], WorkerConnector) and isinstance(scheduler, SchedulerConnector)
    assert remote_prefill is remote_decode and scheduler.name == prefill.workers[0].name == "pd"


@pytest.mark.parametrize("landing", list(Landing))
def test_two_ranks_import_and_prefill_is_released(pair: Pair, landing: Landing) -> None:
    prefill, decode = pair
    target = start(prefill, decode, "1", landing)
    until(lambda: decode.loaded, decode)
    assert decode.loaded == ["d-1"] and not decode.failed
    assert until(lambda: prefill.ended, prefill, decode) < 1.0
    assert prefill.ended == ["p-1"]
    far = prefill.memories[0]
    for rank, near in enumerate(decode.memories):
        for i in range(PAGES):
            assert (near.indexer_row(target.indexer_blocks[i]) == far.indexer_row(SOURCE.indexer_blocks[i])).all()
            for layer in range(5):
                want = expected_page(far, SOURCE, i, layer)
                if landing is Landing.HOST and rank == 0:
                    assert (near.host_row(layer, target.host_blocks[i]) == want).all()
                blocks = [group[i] for group in target.resident_blocks]
                if all(blocks):
                    assert (near.resident_row(layer, blocks) == want).all()
    assert not decode.scheduler.has_pending_work()


def test_b24_one_failing_rank_fails_the_import_on_all(pair: Pair) -> None:
    """Generations of the prefill rank that only decode rank 1 reads have moved on: no rank's pages count."""
    prefill, decode = pair
    start(prefill, decode, "1")
    prefill.memories[1].cache.generations[SOURCE.indexer_blocks[0]] += 1
    until(lambda: decode.failed, decode)
    assert "rank 1: generation" in decode.failed["d-1"] and not decode.loaded
    assert until(lambda: prefill.ended, prefill, decode) < 1.0


def test_hung_transfer_fails_and_the_next_import_works(pair: Pair) -> None:
    prefill, decode = pair
    decode.faults.hang = lambda number: True
    start(prefill, decode, "1")
    seconds = until(lambda: decode.failed, decode)
    assert "timeout" in decode.failed["d-1"] and 1.2 < seconds < 3.0, "deadline 0.3 s, then 1 s to drain"
    decode.faults.hang = lambda number: False
    start(prefill, decode, "2", seed=8)
    until(lambda: decode.loaded, decode)
    assert decode.loaded == ["d-2"]


def test_abort_in_mid_import_releases_prefill_at_once_and_drains(pair: Pair) -> None:
    prefill, decode = pair
    decode.faults.hang = lambda number: True
    start(prefill, decode, "1")
    for _ in range(20):
        decode.step()
    decode.scheduler.request_closed("d-1")
    assert until(lambda: prefill.ended, prefill, decode) < 1.0, "although the READs are not over here"
    assert decode.drained == []
    decode.faults.hang = lambda number: False
    until(lambda: decode.drained, decode)
    assert decode.drained == ["d-1"] and not decode.loaded and not decode.failed
    assert not decode.scheduler.has_pending_work()


def test_lost_release_is_made_up_for_by_the_lease(network: LoopbackNetwork) -> None:
    prefill = Replica("p", network, seed=1, role="prefill", lease_s=0.4)
    decode = Replica("d", network, seed=2, role="decode")
    decode.faults.drop_notices = True
    start(prefill, decode, "1")
    until(lambda: decode.loaded, decode)
    assert 0.2 < until(lambda: prefill.ended, prefill, decode) < 2.0
    assert prefill.pd.stats().leases_expired == 1
    for replica in (prefill, decode):
        replica.ranks[0].shutdown()


def test_shutdown_in_mid_import_ends_in_time(pair: Pair) -> None:
    prefill, decode = pair
    decode.faults.hang = lambda number: True
    start(prefill, decode, "1")
    decode.step()
    started = time.monotonic()
    for rank in decode.ranks:
        rank.shutdown()
    assert time.monotonic() - started < 6.0
    with pytest.raises(InvariantError, match="ended"):
        decode.workers[0].start_step(PDCommand(cancels=(1,)))


def test_transport_that_cannot_start_says_so_at_the_handshake(network: LoopbackNetwork) -> None:
    def broken(agent: str) -> LoopbackTransport:
        raise TransferError("no such device")

    memory = RankMemory(1)
    worker = PDConnectorWorker(LAYOUT, PDConfig(), cache=memory.cache, host_pool=memory.pool, engine_id="p", incarnation=1,
                               rank=0, host_writer=True, make_transport=broken)
    with pytest.raises(TransferError, match="no such device"):
        worker.handshake()
    with pytest.raises(TransferError, match="died"):
        worker.output()
    worker.shutdown()


def test_transfer_thread_that_dies_is_not_silent(pair: Pair) -> None:
    _, decode = pair

    def crash(number: int) -> bool:
        raise RuntimeError("boom")

    decode.faults.hang = crash
    start(*pair, "1")
    with pytest.raises(TransferError, match="boom"):
        until(lambda: decode.loaded, decode)


def test_engine_without_host_pool_lands_resident_only(network: LoopbackNetwork) -> None:
    memory, far = RankMemory(2), RankMemory(1)
    workers = [PDConnectorWorker(
        LAYOUT, PDConfig(), cache=m.cache, host_pool=None, engine_id=name, incarnation=1, rank=0, host_writer=True,
        make_transport=lambda agent: LoopbackTransport(agent, network=network)) for name, m in (("p", far), ("d", memory))]
    halves = [PDConnectorScheduler(LAYOUT, PDConfig(), engine_id=name, incarnation=1, num_ranks=1) for name in ("p", "d")]
    for worker, half in zip(workers, halves):
        half.set_endpoints([worker.handshake()])
    pages = pick_pages(5, PAGES, TOKENS, resident=[True] * PAGES, host=[False] * PAGES)
    halves[1].add_remote("d-1", halves[0].grant("p-1", pages, far.generations_of(pages), prompt_digest="d" * 64))
    target = pick_pages(6, PAGES, TOKENS, resident=[True] * PAGES, host=[False] * PAGES)
    halves[1].start_import("d-1", ImportTarget(landing=Landing.RESIDENT, pages=target))
    workers[1].start_step(halves[1].build_metadata(1))
    for _ in range(2000):
        output = workers[1].output()
        if output is not None and halves[1].update([output]).loaded:
            break
        time.sleep(0.001)
    assert (memory.indexer_row(target.indexer_blocks[3]) == far.indexer_row(pages.indexer_blocks[3])).all()
    assert halves[1].stats().imports_ok == 1
    for worker in workers:
        worker.shutdown()

"""Imports over the loopback transport: bytes, order, faults, and what is visible after each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hisparse.errors import InvariantError, TransferError
from hisparse.pd.commands import ImportFailure
from hisparse.pd.copies import CopyEvent, copy_now
from hisparse.pd.loopback import LoopbackFaults, LoopbackNetwork, LoopbackTransport
from hisparse.pd.transport import Descriptors
from hisparse.types import Landing, RequestPages
from tests.pd.fake_gpu import FakeGpuRank, fake_gpu
from tests.pd.rig import (
    GROUPS,
    LAYOUT,
    FakeClock,
    Side,
    event_log,
    expected_page,
    make_plan,
    pick_pages,
    run_to_end,
)

PAGES = 7
SOURCES = {
    "resident": [True] * PAGES,
    "host": [False] * PAGES,
    "mixed": [True, False, True, True, False, False, True],
}


def pair(**decode: object) -> tuple[Side, Side]:
    network = LoopbackNetwork()
    return Side("p", network, seed=1), Side("d", network, seed=2, **decode)  # type: ignore[arg-type]


def tables(kind: str, mirrors: set[int] = frozenset({PAGES - 1})) -> tuple[RequestPages, RequestPages]:  # type: ignore[assignment]
    held = SOURCES[kind]
    source = pick_pages(11, PAGES, PAGES * 4, resident=held, host=[not h for h in held])
    target = pick_pages(22, PAGES, PAGES * 4, resident=[i in mirrors for i in range(PAGES)], host=[True] * PAGES)
    assert not set(source.indexer_blocks) & set(target.indexer_blocks) or source.indexer_blocks != target.indexer_blocks
    return source, target


def assert_host_landing(prefill: Side, decode: Side, source: RequestPages, target: RequestPages, tail_rows: int) -> None:
    far, near = prefill.ranks[0], decode.ranks[0]
    for i in range(PAGES):
        assert (near.indexer_row(target.indexer_blocks[i]) == far.indexer_row(source.indexer_blocks[i])).all()
        for layer in range(5):
            want = expected_page(far, source, i, layer)
            assert (near.host_row(layer, target.host_blocks[i]) == want).all(), (i, layer)
            blocks = [group[i] for group in target.resident_blocks]
            if all(blocks):
                assert (near.resident_row(layer, blocks) == want).all(), (i, layer)
        full = i < PAGES - 1
        assert near.pool.row_masks[target.host_blocks[i]] == ((1 << 4) - 1 if full else (1 << tail_rows) - 1)


def assert_only_written(before: tuple[np.ndarray, np.ndarray], decode: Side, target: RequestPages, *, host: bool) -> None:
    """Bytes outside the destination pages, padding of their blocks included, are as before."""
    device, pool = decode.ranks[0].snapshot()
    for block in target.indexer_blocks:
        device[block, : LAYOUT.indexer_page_bytes] = before[0][block, : LAYOUT.indexer_page_bytes]
    for g, blocks in enumerate(target.resident_blocks):
        for block in filter(None, blocks):
            size = LAYOUT.resident_page_bytes(g)
            device[block, :size] = before[0][block, :size]
    if host:
        pool[:, list(target.host_blocks)] = before[1][:, list(target.host_blocks)]
    assert (device == before[0]).all()
    assert (pool == before[1]).all()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("kind", SOURCES)
def test_host_landing_moves_every_layer_of_every_page(kind: str, direct: bool) -> None:
    prefill, decode = pair(direct=direct)
    source, target = tables(kind, mirrors={2, PAGES - 1})
    before = decode.ranks[0].snapshot()
    decode.importers[0].submit(make_plan(prefill, source, target, Landing.HOST, tail_rows=3))
    (ack,) = run_to_end(decode.importers[0])
    assert ack.failure is None and ack.reason == ""
    assert_host_landing(prefill, decode, source, target, tail_rows=3)
    assert_only_written(before, decode, target, host=True)
    masks = decode.ranks[0].pool.row_masks.copy()
    masks[list(target.host_blocks)] = 0
    assert not masks.any()


@pytest.mark.parametrize("kind", SOURCES)
def test_resident_landing_reads_straight_into_resident_pages(kind: str) -> None:
    prefill, decode = pair()
    source, _ = tables(kind)
    target = pick_pages(33, PAGES, PAGES * 4, resident=[True] * PAGES, host=[True] * PAGES)
    before = decode.ranks[0].snapshot()
    decode.importers[0].submit(make_plan(prefill, source, target, Landing.RESIDENT))
    (ack,) = run_to_end(decode.importers[0])
    assert ack.failure is None
    far, near = prefill.ranks[0], decode.ranks[0]
    for i in range(PAGES):
        assert (near.indexer_row(target.indexer_blocks[i]) == far.indexer_row(source.indexer_blocks[i])).all()
        for layer in range(5):
            blocks = [group[i] for group in target.resident_blocks]
            assert (near.resident_row(layer, blocks) == expected_page(far, source, i, layer)).all()
    assert_only_written(before, decode, target, host=False)
    assert not near.pool.row_masks.any(), "a resident landing makes no host page durable"


def test_other_ranks_read_indexer_and_mirrored_pages_only() -> None:
    network = LoopbackNetwork()
    prefill, decode = Side("p", network, seed=1, num_ranks=4), Side("d", network, seed=2, num_ranks=2)
    prefill.replicate()
    source, target = tables("mixed", mirrors={1, PAGES - 1})
    plan = make_plan(prefill, source, target, Landing.HOST, num_ranks=2)
    assert [endpoint.rank for endpoint in plan.sources] == [0, 2]
    before = decode.ranks[1].snapshot()
    for importer in decode.importers:
        importer.submit(plan)
        assert run_to_end(importer)[0].failure is None
    other = decode.ranks[1]
    assert (other.snapshot()[1] == before[1]).all(), "only the pool's writer writes host pages"
    assert not other.pool.row_masks.any()
    for i in range(PAGES):
        assert (other.indexer_row(target.indexer_blocks[i]) == prefill.ranks[0].indexer_row(source.indexer_blocks[i])).all()
        blocks = [group[i] for group in target.resident_blocks]
        if all(blocks):
            for layer in range(5):
                assert (other.resident_row(layer, blocks) == expected_page(prefill.ranks[0], source, i, layer)).all()
    assert {peer for peer, _ in decode.transports[1].posted} == {prefill.endpoints[2].agent}


def test_contiguous_runs_are_merged_and_scattered_pages_are_not() -> None:
    prefill, decode = pair(slot_pages=8)
    run = RequestPages(first_page=0, num_tokens=16, indexer_blocks=(5, 6, 7, 8), resident_blocks=((0,) * 4,) * GROUPS,
                       host_blocks=(10, 11, 12, 13))
    target = RequestPages(first_page=0, num_tokens=16, indexer_blocks=(20, 21, 22, 23),
                          resident_blocks=((0,) * 4,) * GROUPS, host_blocks=(3, 4, 5, 6))
    decode.importers[0].submit(make_plan(prefill, run, target, Landing.HOST))
    assert run_to_end(decode.importers[0])[0].failure is None
    posted = [len(descriptors) for _, descriptors in decode.transports[0].posted]
    assert sorted(posted) == [2, 4, 5], "two generation slices; 4 padded indexer pages; one run per layer"


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_completions_gives_the_same_bytes(seed: int) -> None:
    prefill, decode = pair(faults=LoopbackFaults(reorder=random.Random(seed)), slots=3, slot_pages=1)
    source, target = tables("mixed", mirrors={0, 4, PAGES - 1})
    decode.importers[0].submit(make_plan(prefill, source, target, Landing.HOST, tail_rows=1))
    assert run_to_end(decode.importers[0])[0].failure is None
    assert_host_landing(prefill, decode, source, target, tail_rows=1)
    spans = [(a.address, a.address + a.num_pages * a.stride) for a in prefill.endpoints[0].generations]
    reads_generations = [any(first <= far < last for far in descriptors[:, 0] for first, last in spans)
                         for _, descriptors in decode.transports[0].posted]
    assert reads_generations[-1] and not any(reads_generations[:-1]), "the generation READ comes after every data READ"


@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("victim", ["indexer", "rows", "last_rows"])
def test_b27_page_reused_while_it_is_read_fails_the_import(kind: str, victim: str, landing: Landing) -> None:
    prefill, decode = pair()
    source, target = tables(kind)
    if landing is Landing.RESIDENT:
        target = pick_pages(33, PAGES, PAGES * 4, resident=[True] * PAGES, host=[True] * PAGES)
    far = prefill.ranks[0]
    plan = make_plan(prefill, source, target, landing)
    page = PAGES - 1 if victim == "last_rows" else 1

    def reuse() -> None:
        if victim == "indexer":
            far.cache.generations[source.indexer_blocks[page]] += np.uint64(1)
        elif all(group[page] for group in source.resident_blocks):
            far.cache.generations[source.resident_blocks[1][page]] += np.uint64(1)
        else:
            far.pool.generations[source.host_blocks[page]] += np.uint64(1)
        decode.faults.tear = None

    decode.faults.tear = reuse  # the bump happens in the middle of the first READ
    decode.importers[0].submit(plan)
    (ack,) = run_to_end(decode.importers[0])
    assert ack.failure is ImportFailure.GENERATION
    assert "reused" in ack.reason
    assert not decode.ranks[0].pool.row_masks.any(), "no page of a failed import becomes durable"


def test_generation_read_that_moves_nothing_is_not_trusted() -> None:
    prefill, decode = pair()
    source, target = tables("resident")
    decode.importers[0].submit(make_plan(prefill, source, target, Landing.HOST))
    assert run_to_end(decode.importers[0])[0].failure is None
    last = len(decode.transports[0].posted) - 1
    count = last + 1
    decode.faults.silent = lambda number: number == count + last  # the same READ of the second import
    decode.ranks[0].pool.row_masks[:] = 0
    decode.importers[0].submit(make_plan(prefill, source, target, Landing.HOST, job_id=2))
    (ack,) = run_to_end(decode.importers[0])
    assert ack.failure is ImportFailure.GENERATION
    assert not decode.ranks[0].pool.row_masks.any()


@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_failed_read_fails_the_import_after_the_others_drained(number: int) -> None:
    prefill, decode = pair(faults=LoopbackFaults(delay_polls=3, fail=lambda n: n == number), slots=6)
    source, target = tables("resident")
    importer = decode.importers[0]
    importer.submit(make_plan(prefill, source, target, Landing.HOST))
    (ack,) = run_to_end(importer)
    assert ack.failure is ImportFailure.TRANSFER
    assert importer.slots.cpu.num_free == 6
    assert not decode.ranks[0].pool.row_masks.any()
    decode.faults.fail = lambda n: False
    importer.submit(make_plan(prefill, source, target, Landing.HOST, job_id=2))
    assert run_to_end(importer)[0].failure is None, "the peer is usable again"


def test_slots_on_a_gpu_count_as_taken_while_they_are_read_into() -> None:
    with fake_gpu():
        network = LoopbackNetwork()
        prefill, decode = (Side(name, network, seed=seed, make_rank=FakeGpuRank, faults=LoopbackFaults(delay_polls=5))
                           for name, seed in (("p", 1), ("d", 2)))
        source, target = tables("resident")
        importer = decode.importers[0]
        assert importer.slots.num_staging_free == importer.slots.num_staging == 2 * decode.slots
        importer.submit(make_plan(prefill, source, target, Landing.HOST))
        importer.pump()
        taken = importer.slots.num_staging - importer.slots.num_staging_free
        assert taken == decode.slots // 2 and importer.slots.cpu.num_free == decode.slots, "the quota, all on the GPU"
        assert run_to_end(importer)[0].failure is None
        assert importer.slots.num_staging_free == importer.slots.num_staging


def test_reads_that_need_no_slot_of_a_full_pool_are_posted() -> None:
    """While the slots on the GPU are taken by a READ that hangs: pages of the host pool, and whatever is read straight."""
    with fake_gpu():
        network = LoopbackNetwork()
        prefill, decode = (Side(name, network, seed=seed, make_rank=FakeGpuRank, slots=2, slot_pages=4)
                           for name, seed in (("p", 1), ("d", 2)))
        importer, transport = decode.importers[0], decode.transports[0]
        decode.faults.hang = lambda number: number == 0
        importer.submit(make_plan(prefill, *tables("resident"), Landing.HOST))
        importer.pump()
        assert importer.slots.gpu is not None and importer.slots.gpu.num_free == 1, "the peer's quota is taken"
        posted = len(transport.posted)
        source = pick_pages(55, PAGES, PAGES * 4, resident=SOURCES["mixed"], host=[not held for held in SOURCES["mixed"]])
        target = pick_pages(66, PAGES, PAGES * 4, resident=[i == PAGES - 1 for i in range(PAGES)], host=[True] * PAGES)
        plan = make_plan(prefill, source, target, Landing.HOST, job_id=2)
        importer.submit(plan)
        for _ in range(20):
            importer.pump()
            importer.check()
        assert importer.slots.gpu.num_free == 1 and not importer.take_acks()
        assert sum(len(pieces) for _, pieces in transport.posted[posted:]) > 1
        near, far = decode.ranks[0], prefill.ranks[0]
        for i in range(PAGES):
            assert (near.indexer_row(target.indexer_blocks[i]) == far.indexer_row(source.indexer_blocks[i])).all()
            if not SOURCES["mixed"][i]:
                assert (near.host_row(3, target.host_blocks[i]) == expected_page(far, source, i, 3)).all()
        assert not (near.host_row(3, target.host_blocks[0]) == expected_page(far, source, 0, 3)).all(), "it needs the slot"
        decode.faults.hang = lambda number: False
        assert [ack.failure for ack in run_to_end(importer)] == [None, None]
        assert_host_landing(prefill, decode, source, target, tail_rows=4)


def test_a_slot_that_is_given_back_is_for_the_oldest_import_that_needs_one() -> None:
    prefill, decode = pair(slots=2, slot_pages=1)
    importer, transport = decode.importers[0], decode.transports[0]
    ready = {2, 3}
    importer._ready = ready.__contains__
    wide = pick_pages(11, 3 * PAGES, 3 * PAGES * 4, resident=[False] * 3 * PAGES, host=[True] * 3 * PAGES)
    plans = {}
    for job_id in (1, 2, 3):
        pages = slice((job_id - 1) * PAGES, job_id * PAGES)
        source, target = (replace(wide, num_tokens=PAGES * 4, indexer_blocks=wide.indexer_blocks[pages],
                                  resident_blocks=tuple(group[pages] for group in wide.resident_blocks),
                                  host_blocks=wide.host_blocks[pages]) for _ in range(2))
        plans[job_id] = make_plan(prefill, source, target, Landing.HOST, job_id=job_id)
        importer.submit(plans[job_id])
    slab = importer.slots.cpu

    def job_of(pieces: Descriptors) -> int | None:
        """Whose pages are read into a slot."""
        if not slab.address <= int(pieces[0, 1]) < slab.address + slab.num_bytes:
            return None
        page = (int(pieces[0, 0]) - prefill.ranks[0].pool.address) // LAYOUT.layer_page_bytes
        return next(job_id for job_id, plan in plans.items() if page in plan.source.host)

    importer.pump()
    assert [job_of(pieces) for _, pieces in transport.posted if job_of(pieces)] == [2], "the first is not ready yet"
    ready.add(1)
    run_to_end(importer)
    order = [job_of(pieces) for _, pieces in transport.posted if job_of(pieces)]
    assert order == [2, *[1] * PAGES, *[2] * (PAGES - 1), *[3] * PAGES], "oldest first, however often a younger one gave back"


def test_a_post_that_takes_long_closes_no_endpoint_of_a_read_that_ended_meanwhile() -> None:
    clock = FakeClock()
    prefill, decode = pair(clock=clock, drain_s=1.0, faults=LoopbackFaults(delay_polls=1))
    importer, transport = decode.importers[0], decode.transports[0]
    ready, read = {2}, transport.read
    importer._ready = ready.__contains__
    importer.submit(make_plan(prefill, *tables("resident"), Landing.HOST, job_id=1, deadline_s=100.0))
    importer.submit(make_plan(prefill, *tables("host"), Landing.HOST, job_id=2, deadline_s=10.0))
    importer.pump()
    assert transport.posted

    def slow(peer: str, descriptors: Descriptors) -> object:
        clock.advance(20.0 if not slowed else 0.0)
        slowed.append(peer)
        return read(peer, descriptors)

    slowed: list[str] = []
    ready.add(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopbackTransport, "read", lambda self, *args: slow(*args))
        importer.pump()
    assert slowed
    acks = {ack.job_id: ack.failure for ack in run_to_end(importer)}
    assert acks == {1: None, 2: ImportFailure.TIMEOUT} and not transport.aborted


def test_b31_hung_read_fails_at_its_deadline_and_is_quarantined_until_the_endpoint_is_closed() -> None:
    clock = FakeClock()
    prefill, decode = pair(faults=LoopbackFaults(hang=lambda n: n == 0), clock=clock, drain_s=2.0)
    source, target = tables("resident")
    importer = decode.importers[0]
    importer.submit(make_plan(prefill, source, target, Landing.HOST, deadline_s=10.0))
    for _ in range(50):
        importer.pump()
    clock.advance(10.5)
    for _ in range(50):
        importer.pump()
    assert importer.take_acks() == [], "past the deadline, but the READ may still write: no word yet"
    assert importer.slots.cpu.num_free == 3, "its slot is quarantined"
    clock.advance(2.0)
    (ack,) = run_to_end(importer)
    assert ack.failure is ImportFailure.TIMEOUT
    assert decode.transports[0].aborted == 1 and importer.slots.cpu.num_free == 4
    importer.submit(make_plan(prefill, source, target, Landing.HOST, job_id=2))
    assert run_to_end(importer)[0].failure is None, "the next import connects again"
    assert importer.peers.handshakes == 2


def test_hung_read_that_ends_late_needs_no_closing() -> None:
    clock, stuck = FakeClock(), [True]
    prefill, decode = pair(faults=LoopbackFaults(hang=lambda n: stuck[0]), clock=clock)
    source, target = tables("resident")
    decode.importers[0].submit(make_plan(prefill, source, target, Landing.HOST, deadline_s=5.0))
    decode.importers[0].pump()
    clock.advance(5.1)
    decode.importers[0].pump()
    stuck[0] = False
    (ack,) = run_to_end(decode.importers[0])
    assert ack.failure is ImportFailure.TIMEOUT and decode.transports[0].aborted == 0


def test_one_hung_peer_leaves_staging_for_the_others() -> None:
    network, clock = LoopbackNetwork(), FakeClock()
    hung, healthy = Side("hung", network, seed=1), Side("healthy", network, seed=3)
    decode = Side("d", network, seed=2, clock=clock, slots=4, slot_pages=1)
    source, target = tables("resident")
    other = pick_pages(44, PAGES, PAGES * 4, resident=[False] * PAGES, host=[True] * PAGES)
    decode.faults.hang = lambda n: decode.transports[0].posted[n][0] == hung.endpoints[0].agent
    importer = decode.importers[0]
    importer.submit(make_plan(hung, source, target, Landing.HOST))
    for _ in range(20):
        importer.pump()
    assert importer.slots.cpu.num_free == 2, "an idle pool grants the quota at once, and no more"
    importer.submit(make_plan(healthy, source, other, Landing.HOST, job_id=2))
    for _ in range(200):
        importer.pump()
    (ack,) = importer.take_acks()
    assert (ack.job_id, ack.failure) == (2, None)


def test_dead_peer_fails_the_import_and_the_next_one_is_refused() -> None:
    prefill, decode = pair(faults=LoopbackFaults(delay_polls=5))
    source, target = tables("resident")
    importer = decode.importers[0]
    importer.submit(make_plan(prefill, source, target, Landing.HOST))
    importer.pump()
    decode.network.kill(prefill.endpoints[0].agent)
    (ack,) = run_to_end(importer)
    assert ack.failure is ImportFailure.TRANSFER
    importer.submit(make_plan(prefill, source, target, Landing.HOST, job_id=2))
    (ack,) = run_to_end(importer)
    assert ack.failure is ImportFailure.REFUSED


def test_endpoint_that_cannot_be_closed_keeps_the_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    prefill, decode = pair(faults=LoopbackFaults(delay_polls=5), clock=clock)
    source, target = tables("resident")
    importer = decode.importers[0]
    importer.submit(make_plan(prefill, source, target, Landing.HOST))
    importer.pump()
    close = importer.peers.disconnect
    monkeypatch.setattr(importer.peers, "disconnect", lambda agent: False)
    decode.network.kill(prefill.endpoints[0].agent)
    for _ in range(20):
        importer.pump()
        clock.advance(1.0)
    assert importer.take_acks() == [] and importer.busy()
    importer.submit(make_plan(prefill, source, target, Landing.HOST, job_id=2))
    importer.pump()
    assert [ack.failure for ack in importer.take_acks()] == [ImportFailure.REFUSED]
    monkeypatch.setattr(importer.peers, "disconnect", close)
    clock.advance(2.0)
    assert run_to_end(importer)[0].failure is ImportFailure.TRANSFER


def test_b31_restarted_peer_replaces_the_old_agent_for_good() -> None:
    network = LoopbackNetwork()
    old, decode = Side("p", network, seed=1, incarnation=1), Side("d", network, seed=2)
    source, target = tables("resident")
    importer = decode.importers[0]
    decode.faults.delay_polls = 1000
    stale = make_plan(old, source, target, Landing.HOST)
    importer.submit(stale)
    importer.pump()
    new = Side("p", network, seed=5, incarnation=2)
    other = pick_pages(44, PAGES, PAGES * 4, resident=[False] * PAGES, host=[True] * PAGES)
    decode.faults.delay_polls = 0
    importer.submit(make_plan(new, source, other, Landing.HOST, job_id=2))
    acks = {ack.job_id: ack.failure for ack in run_to_end(importer)}
    assert acks == {1: ImportFailure.RESTARTED, 2: None}
    importer.submit(make_plan(old, source, target, Landing.HOST, job_id=3))
    (ack,) = run_to_end(importer)
    assert ack.failure is ImportFailure.REFUSED and "newer incarnation" in ack.reason


@pytest.mark.parametrize("was_lost", [False, True])
def test_imports_from_an_agent_end_with_it_also_if_its_successor_cannot_be_reached(was_lost: bool) -> None:
    network = LoopbackNetwork()
    old, decode = Side("p", network, seed=1, incarnation=1), Side("d", network, seed=2)
    importer, transport = decode.importers[0], decode.transports[0]
    decode.faults.hang = lambda number: True
    importer.submit(make_plan(old, *tables("resident"), Landing.HOST))
    importer.pump()
    if was_lost:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LoopbackTransport, "disconnect", refuse_to_disconnect)
            decode.clock.advance(100.0)
            importer.pump()
            assert importer.busy() and not importer.take_acks(), "in quarantine, as its endpoint is open"
    new = Side("p", network, seed=5, incarnation=2)
    network.kill(new.endpoints[0].agent)
    with pytest.raises(TransferError):
        importer.peers.connect("p", new.endpoints[0])
    importer.pump()
    (ack,) = importer.take_acks()
    assert ack.failure is (ImportFailure.TIMEOUT if was_lost else ImportFailure.RESTARTED)
    assert not importer.busy() and not transport._reads
    importer.check()


def refuse_to_disconnect(self: LoopbackTransport, peer: str) -> None:
    raise TransferError("busy")


def test_cancel_posts_nothing_more_and_drains() -> None:
    prefill, decode = pair(faults=LoopbackFaults(delay_polls=4), slots=2, slot_pages=1)
    source, target = tables("resident")
    importer = decode.importers[0]
    importer.submit(make_plan(prefill, source, target, Landing.HOST))
    importer.pump()
    posted = len(decode.transports[0].posted)
    importer.cancel(1)
    importer.cancel(77)
    importer.pump()
    assert importer.take_acks() == [], "READs in flight are not over"
    (ack,) = run_to_end(importer)
    assert ack.failure is ImportFailure.CANCELLED
    assert len(decode.transports[0].posted) == posted


def test_slot_is_free_only_after_the_event_of_its_copies() -> None:
    log, engine = event_log()
    prefill, decode = pair(slots=2, slot_pages=2, copy_engine=engine)
    source, target = tables("resident", mirrors={0, PAGES - 1})
    importer = decode.importers[0]
    importer.submit(make_plan(prefill, source, target, Landing.HOST, tail_rows=4))
    acks, seen = [], 0
    for _ in range(100):
        for _ in range(5):
            importer.pump()
            importer.check()
        acks = importer.take_acks()
        if acks:
            break
        assert importer.slots.cpu.num_free == 1, "the quota's slot is taken until its copy was seen"
        assert len(log) == seen + 1
        log[seen].complete()
        seen += 1
    assert seen == 4 and acks[0].failure is None
    assert_host_landing(prefill, decode, source, target, tail_rows=4)


@pytest.mark.parametrize("staged_reads", [1, 2])
def test_the_next_slot_is_being_read_when_the_last_one_is_copied(staged_reads: int) -> None:
    posted: list[int] = []

    def engine(copy: Callable[[], None]) -> CopyEvent:
        posted.append(len(decode.transports[0].posted))
        return copy_now(copy)

    prefill, decode = pair(slots=8, slot_pages=1, staged_reads=staged_reads, copy_engine=engine,
                           faults=LoopbackFaults(delay_polls=1))
    source, target = tables("resident")
    importer = decode.importers[0]
    importer.submit(make_plan(prefill, source, target, Landing.HOST, tail_rows=4))
    while importer.busy():
        importer.pump()
        importer.check()
        staged = [read for job in importer._jobs.values() for read in job.posted if read.pages is not None]
        assert len(staged) <= staged_reads
    assert importer.take_acks()[0].failure is None
    indexer = 1
    assert all(count >= indexer + min(PAGES, slot + 2) for slot, count in enumerate(posted)) and len(posted) == PAGES
    assert_host_landing(prefill, decode, source, target, tail_rows=4)


def test_an_import_that_fails_when_a_slot_has_landed_copies_nothing_and_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log, engine = event_log()
    prefill, decode = pair(slots=4, slot_pages=1, staged_reads=1, copy_engine=engine)
    source, target = tables("resident")
    importer = decode.importers[0]
    importer.submit(make_plan(prefill, source, target, Landing.HOST))
    before = decode.ranks[0].snapshot()[1]
    importer.pump()  # the first slot's READ is posted

    def refuse(self: LoopbackTransport, peer: str, descriptors: Descriptors) -> None:
        raise TransferError("not posted")

    monkeypatch.setattr(LoopbackTransport, "read", refuse)
    (ack,) = run_to_end(importer)
    assert ack.failure is ImportFailure.TRANSFER and not log and importer.slots.cpu.num_free == 4
    assert (decode.ranks[0].snapshot()[1] == before).all()


def test_destination_outside_the_pools_is_our_bug_and_writes_nothing() -> None:
    prefill, decode = pair()
    source, target = tables("resident")
    before = decode.ranks[0].snapshot()
    bad = [
        {"indexer_blocks": (0, *target.indexer_blocks[1:])},
        {"host_blocks": (32, *target.host_blocks[1:])},
        {"host_blocks": (0, *target.host_blocks[1:])},
        {"resident_blocks": ((64, *target.resident_blocks[0][1:]), target.resident_blocks[1])},
        {"resident_blocks": ((9, *target.resident_blocks[0][1:]), target.resident_blocks[1])},
    ]
    for change in bad:
        fields = {name: getattr(target, name) for name in
                  ("first_page", "num_tokens", "indexer_blocks", "resident_blocks", "host_blocks")}
        with pytest.raises(InvariantError):
            decode.importers[0].submit(
                make_plan(prefill, source, RequestPages(**{**fields, **change}), Landing.HOST))  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match="resident"):
        decode.importers[0].submit(make_plan(prefill, source, target, Landing.RESIDENT))
    assert not decode.importers[0].busy()
    assert (decode.ranks[0].snapshot()[0] == before[0]).all()

"""Copy-on-write: children share durable pages, copy the rest, and both ends stay leased until every rank reports."""

from __future__ import annotations

import pytest

from hisparse.cache.residency import PageState
from hisparse.errors import InvariantError, TransferError
from hisparse.types import AckKind, HiSparseWorkerOutput
from tests.cache.harness import Harness, Req


def forked(h: Harness, parent: Req, max_tokens: int = 6) -> Req:
    admission = h.manager.fork(parent.request_id, "child", max_tokens=max_tokens)
    assert admission is not None
    child = Req("child", list(parent.tokens), max_tokens, len(parent.tokens), parent.extra, "running",
                admission.cached_tokens, admission.seat)
    h.reqs["child"] = child
    h.manager.check()
    return child


def test_a_fork_inside_a_page_copies_only_that_page_and_both_go_on() -> None:
    h = Harness(device_blocks=200)
    parent = h.add("p", list(range(22)), 12)
    while parent.computed < 22:
        h.step()
    used = h.manager.stats().device_blocks_free
    forked(h, parent)
    assert h.manager.core.live["child"].states == bytes([PageState.CLEAN_PINNED] * 5 + [PageState.GPU_ONLY])
    assert used - h.manager.stats().device_blocks_free == 1 + 2, "one page in the indexer and both resident groups"
    inc, parent_inc = h.manager.core.live["child"], h.manager.core.live["p"]
    chosen = h.schedule()
    command = h.dispatch(chosen)
    (copy,) = command.page_copies
    assert copy.num_rows == 2 and copy.host_pair == (parent_inc.host[5], inc.host[5])
    assert {source for source, _ in copy.device_pairs} == {parent_inc.indexer[5], *parent_inc.blocks(5)}
    assert {destination for _, destination in copy.device_pairs} == {inc.indexer[5], *inc.blocks(5)}
    assert h.manager.core.pool.refs(parent_inc.blocks(5)[0]) == 2
    h.retire(chosen)
    assert h.manager.core.pool.refs(parent_inc.blocks(5)[0]) == 2, "leased until every rank reports"
    h.worker.complete_all(h.rng)
    h.step()
    assert h.manager.core.pool.refs(parent_inc.blocks(5)[0]) == 1
    h.drain()


def test_both_ends_stay_leased_when_parent_and_child_go() -> None:
    h = Harness(device_blocks=200)
    parent = h.add("p", list(range(22)), 12)
    while parent.computed < 22:
        h.step()
    h.worker.complete_all(h.rng)
    child = forked(h, parent)
    h.complete_each_step = False
    h.step()
    total = h.manager.stats().device_blocks_total
    for req in (parent, child):
        h.finish(req, finished=False)
    assert total - h.manager.stats().device_blocks_free == 2 * 3
    h.worker.complete_all(h.rng)
    h.complete_each_step = True
    h.drain()


def test_a_failed_page_copy_is_never_taken_for_a_success() -> None:
    h = Harness(device_blocks=200)
    parent = h.add("p", list(range(22)), 12)
    while parent.computed < 22:
        h.step()
    forked(h, parent)
    command = h.dispatch(h.schedule())
    ack = h.worker.ack(command.page_copies[0].id, AckKind.FAILED)
    with pytest.raises(TransferError, match="failed; its worker must be replaced"):
        h.manager.on_worker_output([HiSparseWorkerOutput(rank=0, incarnation=1000, acks=(ack,))])


def test_no_room_opens_nothing() -> None:
    h = Harness(device_blocks=200, seats=1)
    parent = h.add("p", list(range(22)), 12)
    h.step()
    assert h.manager.fork("p", "child", max_tokens=4) is None
    h.manager.open("child", [1], max_tokens=1)
    with pytest.raises(InvariantError, match="open already"):
        h.manager.fork("p", "child", max_tokens=4)
    h.manager.close("child")
    assert parent.state == "running"
    h.drain()


def test_a_page_to_copy_is_never_taken_for_the_copies_own_blocks() -> None:
    """The first page's spill failed, the ones behind it are loose: they are not shared, and copying them would take their
    blocks. The fork waits until the first page is durable."""
    h = Harness(groups=1, device_blocks=80, watermark=0.9, hot_rows=4)
    h.complete_each_step = False
    parent = h.add("p", list(range(22)), 12)
    while parent.computed < 22:
        h.step()
    ids = list(h.worker.copies)
    for transfer_id in ids:
        h.worker.complete(transfer_id, fail=transfer_id == ids[0])
    h.manager.on_worker_output([h.worker.output()])
    states = [view.state for view in h.manager.page_views("p")]
    assert states[:4] == [PageState.GPU_ONLY] + [PageState.CLEAN_LOOSE] * 3
    pool = h.manager.core.pool
    ballast = pool.allocate(pool.num_free - pool.num_readable - (6 * 2 - 1))
    assert ballast is not None and pool.num_free >= 6 * 2, "room for every copy, if loose blocks are taken for them"
    assert h.manager.fork("p", "child", max_tokens=6) is None
    assert [view.state for view in h.manager.page_views("p")] == states
    pool.free(ballast.tolist())
    h.complete_each_step = True
    while h.manager.page_views("p")[0].state is PageState.GPU_ONLY:
        h.step()
    forked(h, parent)
    h.drain()

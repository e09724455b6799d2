"""The laws of the cache: what must be true after every move of a random life."""

from __future__ import annotations

from collections import Counter

from hisparse.cache.report import PageView
from hisparse.cache.residency import DURABLE, PINNED, READABLE_ON_GPU, PageState
from tests.cache.fake_worker import show
from tests.cache.harness import Req
from tests.cache.steps import SIZE
from tests.cache.world import World


def check(world: World) -> None:
    """What must be true after every move."""
    world.m.check()
    check_pages(world)
    check_held(world)
    stats = world.m.stats()
    assert (stats.acks_repeated, stats.acks_old_incarnation) == (world.mail.num_repeated, world.mail.num_old)
    assert stats.transfers_in_flight >= len(world.mail.issued)
    if not world.flights and not world.fallen:  # else blocks of an import that failed may still be on their way back
        promised = stats.host_blocks_free - stats.host_blocks_reserved
        assert promised >= 0, f"{-promised} host blocks promised beyond the free ones"
    source = world.m.core.source
    assert source is not None
    for flight in world.flights:
        for block in (block for span in flight.command.mirrors for block in span.host_blocks if block >= 0):
            assert source.pool.refs(block), f"host block {block} is free while step {flight.step} may mirror rows to it"
    for block in world.m.published_host_blocks():
        assert world.dropped.get(block) != int(source.pool.generations[block]), f"host block {block} was published too late"
        for worker in world.h.writers:
            rows = worker.host.rows[block]
            assert worker.host.masks[block] == worker.full, f"host block {block} is published with holes"
            assert tuple(rows) in world.pages, f"host block {block} is published with rows {show(rows)}"


def check_pages(world: World) -> None:
    """Every valid row is, right now and on every rank, in each tier where the coordinator says it is; and every block
    has the references of those who list it (at least; exactly these when nothing is under way)."""
    device: Counter[int] = Counter()
    host: Counter[int] = Counter()
    resident: Counter[int] = Counter()
    for req in world.h.reqs.values():
        if req.state == "waiting":
            continue
        views = world.m.page_views(req.request_id)
        for view in views:
            device[view.indexer] += 1
            host[view.host] += 1
            if view.state in PINNED or view.state is PageState.IMPORTING:
                resident.update(view.resident)
        if req.state != "loading":
            check_request(world, req, views)
            check_tail(world, req, views)
    pool, source = world.m.core.pool, world.m.core.source
    assert source is not None
    assert not device.keys() & resident.keys(), "a block is an indexer page and a resident page"
    device.update(resident.keys())  # the holders of one resident page may share a reference
    for refs, held, what in ((pool.refs, device, "device"), (source.pool.refs, host, "host")):
        for block, count in held.items():
            assert refs(block) >= count, f"{what} block {block} has {refs(block)} references, {count} pages list it"
    stats = world.m.stats()
    busy = stats.transfers_in_flight or stats.loads_in_flight or stats.hot_blocks or world.flights or (
        world.h.store is not None and world.h.store.stores)
    if not busy:
        shared = resident.total() - len(resident)
        for refs, held, num, more in ((pool.refs, device, pool.num_blocks, shared),
                                      (source.pool.refs, host, source.pool.num_blocks, 0)):
            assert 0 <= sum(map(refs, range(1, num))) - held.total() <= more, "a reference is held by nobody"


def check_request(world: World, req: Req, views: tuple[PageView, ...]) -> None:
    who, rows = req.request_id, req.rows()
    assert world.m.computed_tokens(who) == req.computed
    assert len(views) * SIZE >= req.computed
    for page, view in enumerate(views):
        want = rows[page * SIZE : (page + 1) * SIZE]
        valid = want[: max(0, req.computed - page * SIZE)]
        num = len(valid)
        assert (view.state in READABLE_ON_GPU) == bool(view.resident)
        if num:
            for worker, unfilled in zip(world.h.workers, world.unfilled, strict=True):
                for block in (view.indexer, *view.resident):
                    if worker.device[block][:num] != valid and block not in unfilled:
                        raise AssertionError(
                            f"rank {worker.rank}: page {page} ({view.state.name}) of {who} is in device block {block} "
                            f"with rows {show(worker.device[block])}, not {show(valid)}")
        if view.state in DURABLE:
            for worker in world.h.writers:
                got = worker.host.rows[view.host]
                if got != want or worker.host.masks[view.host] != worker.full:
                    raise AssertionError(
                        f"rank {worker.rank}: page {page} ({view.state.name}) of {who} is on host block {view.host} "
                        f"with rows {show(got)}, mask {worker.host.masks[view.host]:b}, not {show(want)}")


def check_tail(world: World, req: Req, views: tuple[PageView, ...]) -> None:
    """The last two table entries are never unpinned."""
    key = (req.request_id, world.admissions[req.request_id])
    old, world.tiers[key] = world.tiers.get(key, []), [view.state for view in views]
    for page in range(max(0, len(views) - 2), len(views)):
        if page < len(old) and old[page] in PINNED:
            assert views[page].state in PINNED, f"page {page} of {req.request_id} was unpinned, the tail starts before it"


def check_held(world: World) -> None:
    """A remote reader sees the right rows under unchanged generations, on every rank."""
    pool, source = world.m.core.pool, world.m.core.source
    assert source is not None
    for request_id, (pages, generations) in world.held.items():
        rows = world.h.reqs[request_id].rows(pages.num_tokens)
        for page in range(pages.num_pages):
            want = rows[page * SIZE : (page + 1) * SIZE]
            device = [(pages.indexer_blocks[page], generations.indexer[page]), *(
                (blocks[page], listed[page])
                for blocks, listed in zip(pages.resident_blocks, generations.resident, strict=True) if blocks[page])]
            for block, generation in device:
                assert int(pool.generations[block]) == generation
                for worker in world.h.workers:
                    assert worker.device[block][: len(want)] == want, f"held page {page} of {request_id} changed"
            host = pages.host_blocks[page]
            assert host or all(blocks[page] for blocks in pages.resident_blocks)
            if host:
                assert int(source.pool.generations[host]) == generations.host[page]
                for worker in world.h.writers:
                    assert worker.host.rows[host] == want, f"held host page {page} of {request_id} changed"

"""Hot regions grow while blocks are plenty, and give them back before anybody has to do without."""

from __future__ import annotations

from hisparse.cache.elastic import MAX_GROWN_REGIONS
from hisparse.cache.request import Incarnation
from hisparse.types import BlockTableUpdate, HotRows, Landing, SeatReset
from tests.cache.fake_worker import flat
from tests.cache.harness import Harness, Req

GROUPS = 2
REGION = 2 * GROUPS
"""Blocks of a region of 8 rows."""


def landed(h: Harness, name: str = "a", length: int = 40, max_tokens: int = 24) -> tuple[Req, Incarnation]:
    """A request whose prompt landed on the host: all its pages but the last two are absent."""
    req = h.add(name, [len(name) * 100 + ord(name[0]) + i for i in range(length)], max_tokens)
    assert h.admit(req, Landing.HOST, length) is not None
    h.dispatch([])
    h.retire([])
    h.finish_load(name)
    return req, h.manager.core.live[name]


def region(inc: Incarnation) -> int:
    """Blocks per hot group."""
    sizes = {len(blocks) for blocks in inc.hot}
    assert len(inc.hot) == GROUPS and len(sizes) == 1
    return sizes.pop()


def spare(h: Harness) -> int:
    """Free blocks that nobody was promised, beyond the watermark."""
    core = h.manager.core
    return core.pool.num_free - core.reserved_device - core.watermark_blocks


def weigh(h: Harness, leave: int) -> list[int]:
    """Takes free blocks out of the pool, without asking regions for theirs, until only `leave` are left."""
    ids = h.manager.core.pool.allocate(h.manager.core.pool.num_free - leave)
    assert ids is not None
    return ids.tolist()


def grown(blocks: int = 400, **config: object) -> tuple[Harness, Req, Incarnation]:
    """A region of 6 blocks per group, of which 4 are elastic."""
    h = Harness(device_blocks=blocks, hot_rows_max=24, groups=GROUPS, **config)  # type: ignore[arg-type]
    req, inc = landed(h)
    for _ in range(6):
        h.step()
    assert region(inc) == 6 and h.manager.stats().hot_blocks_elastic == 4 * GROUPS
    return h, req, inc


def test_a_region_grows_a_page_a_step_up_to_its_limit_and_no_row_is_moved() -> None:
    h = Harness(device_blocks=200, hot_rows_max=24, groups=GROUPS)
    req, inc = landed(h)
    h.step()
    assert region(inc) == 3, "one page when the first step retired"
    for size in (3, 4, 5, 6, 6):
        before = [list(blocks) for blocks in inc.hot]
        new = region(inc)
        h.step()
        assert [list(blocks[:new]) for blocks in inc.hot] == before
        changed = [u for u in flat(h.last.table_updates, h.layout) if u.group_id in {group.group_id for group in h.layout.hots}]
        if new == size and any(r.rows == size * 4 for r in h.last.hot_rows):
            assert h.last.hot_rows == tuple(HotRows(seat=req.seat, hot_group=g, rows=size * 4) for g in range(GROUPS))
            assert changed == [
                BlockTableUpdate(group_id=h.layout.hots[g].group_id, seat=req.seat, first_page=size - 1,
                                 ids=(inc.hot[g][size - 1],), num_pages=size) for g in range(GROUPS)]
        else:
            assert changed == [] and h.last.hot_rows == ()
        assert h.last.seat_resets == (), "growth keeps tags"
    assert region(inc) == 6 and h.worker.highest_slot == 23
    assert h.manager.stats().hot_blocks_grown == 4 * GROUPS == h.manager.stats().hot_blocks_elastic
    assert h.manager.stats().hot_blocks == 6 * GROUPS
    h.drain()
    assert h.manager.stats().hot_blocks_elastic == 0 == h.manager.stats().hot_blocks_taken_back


def test_a_region_never_has_more_rows_than_its_request_has_absent() -> None:
    h = Harness(device_blocks=400, hot_rows_max=64, groups=GROUPS)
    _, inc = landed(h, length=24)
    for _ in range(12):
        h.step()
    assert inc.num_absent == 4 and region(inc) == 4
    h.add("b", list(range(300, 320)), 1)
    while "b" in h.reqs:
        h.step()
    h.add("c", [*range(300, 320), 7], 20)
    for _ in range(6):
        h.step()
    inc = h.manager.core.live["c"]
    assert inc.has_hot and inc.num_absent == 0 and region(inc) == 2, "everything is resident: slots are of no use"
    h.drain()


def test_growth_stops_one_region_above_the_watermark() -> None:
    stopped = False
    for blocks in range(30, 48, 2):
        h = Harness(device_blocks=blocks, hot_rows_max=32, groups=GROUPS, host_blocks=80)
        _, inc = landed(h, length=44, max_tokens=18)
        while "a" in h.reqs:
            before = h.manager.stats().hot_blocks_grown
            h.step()
            if h.manager.stats().hot_blocks_grown > before:
                assert spare(h) >= REGION
            elif "a" in h.reqs and region(inc) < 8:
                assert spare(h) < REGION + GROUPS
                stopped = stopped or region(inc) > 2
        h.drain()
    assert stopped, "some pool let it grow a bit, and no further"


def test_few_regions_grow_in_one_step_and_each_gets_its_turn() -> None:
    h = Harness(device_blocks=2000, host_blocks=400, hot_rows_max=24, seats=12, groups=GROUPS, chunk=8)
    incs = []
    for i in range(12):
        req = h.add(f"r{i}", [i * 37 + k for k in range(40)], 24)
        assert h.admit(req, Landing.HOST, 40) is not None
        incs.append(h.manager.core.live[req.request_id])
    h.dispatch([])
    h.retire([])
    for i in range(12):
        h.finish_load(f"r{i}")
    sizes = [[region(inc) for inc in incs]]
    while min(sizes[-1]) < 6:
        h.step()
        sizes.append([region(inc) for inc in incs])
        assert 0 < sum(sizes[-1]) - sum(sizes[-2]) <= MAX_GROWN_REGIONS
        assert max(sizes[-1]) - min(sizes[-1]) <= 1
    h.drain()


def test_taken_back_before_a_preemption_last_page_first() -> None:
    h, req, inc = grown()
    before = [list(blocks) for blocks in inc.hot]
    b = h.add("b", list(range(500, 508)), 20)
    h.admit(b)
    assert h.manager.allocate("b", 8)
    ballast = weigh(h, 1)
    assert h.manager.allocate("b", 12), "one more page: 3 blocks"
    assert region(inc) == 5 and [list(blocks) for blocks in inc.hot] == [blocks[:5] for blocks in before]
    assert h.manager.core.pool.num_free == 0
    assert not b.preemptions and h.manager.stats().hot_blocks_taken_back == GROUPS
    for blocks in inc.hot:
        blocks_of_b = {block for page in h.manager.core.live["b"].resident.values() for block in page.blocks}
        assert not blocks_of_b & set(blocks)
    command = h.dispatch([(b, 0, 8)])
    assert SeatReset(seat=req.seat, from_slot=5 * 4 - 4 * 3, from_position=-1) in command.seat_resets
    assert region(inc) == 2, "the rest went for the watermark, never below the starting size"
    assert {hot.rows for hot in command.hot_rows} == {8}
    hots = {group.group_id: g for g, group in enumerate(h.layout.hots)}
    assert {(hots[u.group_id], u.ids, u.num_pages) for u in flat(command.table_updates, h.layout) if u.group_id in hots} == {
        (0, (), 2), (1, (), 2)}
    h.worker.complete_all(h.rng)
    h.retire([(b, 0, 8)])
    h.manager.core.pool.free(ballast)
    h.drain()


def test_taken_back_before_an_admission_is_refused() -> None:
    h, _, inc = grown()
    core = h.manager.core
    b = h.add("b", list(range(500, 520)), 8)
    prefix = h.manager.prefix("b")
    need = 1 + 6 * (1 + GROUPS)
    ballast = weigh(h, need - 4 * GROUPS + core.reserved_device)
    for _ in range(50):
        fit = h.manager.fits("b", prefix, landing=None, chunk_tokens=8)
    assert fit.now and region(inc) == 6, "a query takes nothing"
    assert h.admit(b) is not None
    assert h.manager.allocate("b", 20)
    assert region(inc) < 6 and h.manager.stats().preemptions == 0
    h.manager.check()
    h.finish(b, finished=False)
    core.pool.free(ballast)
    h.drain()


def test_taken_back_before_anybody_must_go_hot() -> None:
    h, _, inc = grown(watermark=0.05)
    core = h.manager.core
    h.add("b", list(range(500, 510)), 20)
    h.step()
    h.step()
    other = core.live["b"]
    assert core.watermark_blocks == 20 and not other.hot_required
    ballast = weigh(h, core.watermark_blocks - 2 * GROUPS)
    h.dispatch([])
    assert not other.hot_required and region(inc) == 4
    assert core.pool.num_free == core.watermark_blocks
    h.retire([])
    ballast += weigh(h, 1)
    h.dispatch([])
    assert other.hot_required and region(inc) == 2, "all of it is back, and it was not enough"
    h.retire([])
    core.pool.free(ballast)
    h.drain()


def test_outside_writers_get_given_back_blocks_only_once_steps_have_retired_and_before_they_grow_again() -> None:
    h, a, inc = grown()
    core = h.manager.core
    chosen = h.schedule()
    h.dispatch(chosen)
    b = h.add("b", list(range(500, 519)), 4)
    ballast = weigh(h, 5 * (1 + GROUPS) - 1)
    before = [list(blocks) for blocks in inc.hot]
    assert core.clock.outstanding and h.admit(b, Landing.RESIDENT, 19) is None, "its blocks are not quiet yet"
    size = region(inc)
    given = [block for blocks in before for block in blocks[size:]]
    assert size < 6 and all(core.clock.is_busy(block) and core.pool.is_free(block) for block in given)
    core.pool.free(ballast)
    h.worker.complete_all(h.rng)
    h.retire(chosen)
    assert region(inc) == size and spare(h) > 50, "no growth before the load had its turn"
    assert h.admit(b, Landing.RESIDENT, 19) is not None
    h.step()
    assert region(inc) == size + 1
    h.drain()
    assert len(h.finished["a"]) == len(a.tokens)


def test_a_grown_region_ends_with_its_request_or_its_worker() -> None:
    h, a, _ = grown()
    h.preempt(a)
    h.manager.check()
    assert h.manager.stats().hot_blocks == 0 == h.manager.stats().hot_blocks_elastic
    h.drain()
    h, a, _ = grown()
    h.manager.worker_lost(2_000_000)
    h.manager.check()
    assert h.manager.stats().hot_blocks_elastic == 0
    h.manager.close("a")
    assert h.manager.stats().device_blocks_free == h.manager.stats().device_blocks_total

"""Roomy pools stay resident; tight ones spill, go hot, loosen and reuse, in the order the design says."""

from __future__ import annotations

import pytest

from hisparse.cache.admission import min_device_blocks
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.residency import PageEvent, PageState
from hisparse.config import CacheConfig
from hisparse.errors import ConfigError, RequestError
from hisparse.types import Landing
from tests.cache.fake_worker import flat
from tests.cache.harness import Harness, Store, small_layout


def test_roomy_pool_everything_stays_resident_and_is_still_written_back() -> None:
    h = Harness(device_blocks=200)
    req = h.add("a", list(range(22)), 8)
    while req.state != "finished":
        h.step()
        assert {tier for *_, tier in h.tiers} == {"resident"}
        assert h.last.hot_rows == () and h.last.seat_resets == ()
    h.drain()
    stats = h.manager.stats()
    assert (stats.hot_required, stats.pages_unpinned, stats.spills_completed) == (0, 0, (22 + 7) // 4)
    assert stats.host_pages_published == 7


def test_roomy_pool_a_hit_adopts_the_copies_and_reads_no_host_row() -> None:
    h = Harness(device_blocks=200)
    h.add("a", list(range(20)), 1)
    h.run()
    b = h.add("b", [*range(20), 90, 91], 4)
    while b.state != "finished":
        h.step()
        assert {tier for *_, tier in h.tiers} <= {"resident"}
    assert h.manager.stats().prefix_hit_tokens == 20 and h.manager.stats().pages_adopted == 5
    h.drain()


def test_two_hits_share_one_copy_and_both_lose_it_at_reuse() -> None:
    h = Harness(device_blocks=1 + 16 + 4 + 2 * 4 + 30, host_blocks=80, max_model_len=64, groups=2)
    h.add("a", list(range(20)), 1)
    h.run()
    pair = [h.add(name, [*range(20), 90 + i], 30) for i, name in enumerate("bc")]
    h.step()
    incs = [h.manager.core.live[req.request_id] for req in pair]
    assert incs[0].blocks(0) == incs[1].blocks(0) != ()
    assert incs[0].state(0) is PageState.CLEAN_LOOSE
    big = h.add("big", list(range(200, 260)), 2)
    for _ in range(60):
        h.step()
        if incs[0].states[:1] == bytes([PageState.HOST_ONLY]):
            break
    assert incs[1].state(0) is PageState.HOST_ONLY, "for every owner"
    assert big.state in ("running", "finished")
    h.drain()


def test_pressure_requires_hot_then_allocates_then_unpins_last_page_first_outside_the_tail() -> None:
    h = Harness(device_blocks=50, host_blocks=60, max_model_len=64, watermark=0.55, seats=2)
    h.add("a", list(range(30)), 20)
    for _ in range(4):
        h.step()
    inc = h.manager.core.live["a"]
    assert inc.hot_required and not inc.has_hot, "marked only"
    assert inc.states[:6] == bytes([PageState.CLEAN_PINNED] * 6)
    h.step()
    assert inc.has_hot
    rows = {(hot.seat, hot.hot_group, hot.rows) for hot in h.last.hot_rows}
    assert rows == {(0, 0, 8), (0, 1, 8)}
    assert inc.states[: inc.tail_start] == bytes([PageState.CLEAN_LOOSE] * inc.tail_start)
    assert all(state != PageState.CLEAN_LOOSE for state in inc.states[inc.tail_start :])
    order = [block for block in h.manager.core.pool.free_blocks() if h.manager.core.pool.is_watched(block)]
    first = [block for page in reversed(range(inc.tail_start)) for block in inc.blocks(page)]
    assert order[: len(first)] == first, "the last page is reused first"
    assert {tier for *_, tier in h.tiers} == {"resident"}, "loose pages are still read"
    h.drain()


def test_reuse_nulls_the_page_in_every_group_in_the_command_that_hands_it_out() -> None:
    h = Harness(device_blocks=1 + 16 + 4 + 8 + 14, host_blocks=60, max_model_len=64, groups=2, seats=2)
    h.add("a", list(range(40)), 24)
    seen = False
    for _ in range(27):
        before = {(g.group_id, p): b for g in h.layout.residents
                  for p, b in enumerate(h.worker.tables.get((g.group_id, 0), []))}
        h.step()
        nulled = {(u.group_id, u.first_page + i) for u in flat(h.last.table_updates, h.layout) for i, b in enumerate(u.ids)
                  if b == 0 and before.get((u.group_id, u.first_page + i))}
        groups = {group for group, _ in nulled}
        assert groups in (set(), {g.group_id for g in h.layout.residents})
        assert len(nulled) == 2 * len({page for _, page in nulled})
        seen |= bool(nulled)
    assert seen and any(tier == "host" for *_, tier in h.tiers)
    h.drain()


def test_a_long_chunked_prefill_on_the_smallest_pool_neither_preempts_nor_restarts() -> None:
    layout = small_layout(groups=2)
    config = CacheConfig(block_size=4, device_blocks=2, hot_rows=8, hot_rows_max=8)
    need = min_device_blocks(layout, config, max_model_len=64, max_query_tokens=8)
    assert need == 1 + 16 + 2 * 2 + 2 * (2 + 2)
    h = Harness(device_blocks=need, host_blocks=18, max_model_len=64, groups=2)
    h.add("a", list(range(60)), 5)
    h.drain()
    assert h.manager.stats().preemptions == 0 and h.manager.stats().pages_reused > 0
    with pytest.raises(ConfigError, match=f"device_blocks = {need - 1} .* it needs {need} blocks"):
        Harness(device_blocks=need - 1, host_blocks=18, max_model_len=64, groups=2)
    with pytest.raises(ConfigError, match=r"host pool has 17 pages.* needs 18"):
        Harness(device_blocks=need, host_blocks=17, max_model_len=64, groups=2)


def test_has_pending_reclamation_while_a_window_of_spills_is_under_way() -> None:
    layout_blocks = 1 + 16 + 4 + 8
    h = Harness(device_blocks=layout_blocks, host_blocks=18, max_model_len=64, groups=2)
    h.complete_each_step = False
    req = h.add("a", list(range(60)), 4)
    while h.step():
        pass
    assert req.state == "running" and req.preemptions == 0 and h.manager.has_pending_reclamation()
    h.worker.complete_all(h.rng)
    h.complete_each_step = True
    h.drain()


def test_adoption_without_a_region_pins_and_keeps_the_watermark() -> None:
    h = Harness(device_blocks=200)
    h.add("a", list(range(20)), 1)
    h.run()
    h.add("b", [*range(20), 90, 91], 4)
    core, residency = h.manager.core, h.manager.residency
    for page in residency.copies.values():
        assert all(core.pool.is_free(b) for b in page.blocks)
    h.manager.admit("b", h.manager.prefix("b"), chunk_tokens=2)
    inc = core.live["b"]
    # Take the adopted pages away again and adopt them as a request without a region would.
    keys = inc.identity.keys.keys
    for page in range(2):
        del inc.resident.pop(page).owners[inc]
        core.move(inc, page, PageEvent.REUSED)
    region, inc.hot = inc.hot, []
    assert residency.adopt_page(inc, 0, residency.copies[keys[0]])
    assert inc.state(0) is PageState.CLEAN_PINNED and core.pool.refs(inc.blocks(0)[0]) == 1
    core.watermark_blocks = core.pool.num_free - core.reserved_device - 1
    assert not residency.adopt_page(inc, 1, residency.copies[keys[1]]), "it would take free - reserved below the watermark"
    inc.hot = region
    h.manager.check()
    h.manager.free("b")
    h.manager.check()


def test_loose_pages_of_a_preempted_request_stay_with_the_steps_that_read_them() -> None:
    h = Harness(device_blocks=120)
    h.add("a", list(range(20)), 1)
    h.run()
    b = h.add("b", [*range(20), 90, 91], 8)
    h.step()
    core = h.manager.core
    inc = core.live["b"]
    loose = [block for page in range(inc.tail_start) for block in inc.blocks(page)]
    assert loose and all(core.pool.refs(block) == 0 for block in loose)
    chosen = h.schedule()
    h.dispatch(chosen)
    h.manager.residency.copies.clear()
    for page in inc.resident.values():
        page.key = None
    h.preempt(b)
    assert not any(core.pool.is_watched(block) or core.is_quiet(block) for block in loose), "ordinary, but not quiet yet"
    h.worker.complete_all(h.rng)
    h.retire(chosen)
    assert all(core.is_quiet(block) for block in loose)
    h.drain()


def test_preemption_resumes_as_a_host_hit_with_indexer_pages_from_the_store() -> None:
    store = Store()
    h = Harness(device_blocks=1 + 16 + 4 + 8 + 6, host_blocks=60, max_model_len=64, groups=2, store=store)
    a = h.add("a", list(range(40)), 8)
    while a.computed < 40:
        h.step()
    for _ in range(3):
        h.step()
    h.preempt(a)
    while store.stores:
        store.finish(h)
    a.state = "paused"
    h.add("b", list(range(100, 158)), 3)
    while "b" in h.reqs:
        h.step()
    a.state = "waiting"
    hit = h.manager.prefix("a")
    assert hit.host_pages >= 9 and hit.indexer_load_pages > 0
    assert hit.indexer_gpu_pages + hit.indexer_load_pages == hit.host_pages
    h.step()
    h.drain()
    assert len(h.finished["a"]) == 47


def test_without_the_store_every_group_falls_back_to_the_shorter_prefix() -> None:
    h = Harness(device_blocks=1 + 16 + 4 + 8 + 6, host_blocks=60, max_model_len=64, groups=2)
    h.add("a", list(range(40)), 1)
    h.run()
    h.add("b", list(range(100, 158)), 3)
    h.run()
    h.add("a2", list(range(40)), 1)
    keys = h.manager._identities["a2"].keys.keys
    host, indexer = h.manager.core.index.find(keys)
    gpu = len(indexer)
    assert gpu < len(host)
    assert h.manager.prefix("a2").host_pages == gpu
    h.drain()


def test_failed_indexer_load_falls_back_to_what_is_on_the_gpu() -> None:
    store = Store()
    h = Harness(device_blocks=1 + 16 + 4 + 8 + 6, host_blocks=60, max_model_len=64, groups=2, store=store)
    h.add("a", list(range(40)), 1)
    h.run()
    h.add("b", list(range(100, 158)), 3)
    h.run()
    req = h.add("a2", list(range(40)), 4)
    hit = h.manager.prefix("a2")
    assert hit.indexer_load_pages > 0
    assert h.admit(req) is not None and req.state == "loading"
    h.dispatch([])
    h.retire([])
    assert h.finish_load("a2", failed=True) == hit.indexer_gpu_pages * 4
    h.manager.check()
    h.drain()


@pytest.mark.parametrize("landing", Landing)
def test_a_failed_import_is_recomputed_in_fresh_pages(landing: Landing) -> None:
    h = Harness(device_blocks=120, host_blocks=60)
    req = h.add("a", list(range(19)), 4)
    h.admit(req, landing, 19)
    h.dispatch([])
    h.retire([])
    assert h.finish_load("a", failed=True, num_rows=11) == 0
    assert h.manager.stats().host_pages_published == 0 and h.manager.core.live["a"].num_pages == 0
    assert req.state == "running"
    if landing is Landing.HOST:
        h.step()
        assert any(reset.seat == req.seat and reset.from_slot == 0 for reset in h.last.seat_resets)
    h.drain()


def test_hold_gives_the_seat_back_and_freezes_the_pages() -> None:
    h = Harness(device_blocks=100, seats=1)
    req = h.add("p", list(range(10)), 2)
    while req.computed < 10:
        h.step()
    pages, generations = h.manager.hold("p")
    req.state = "held"
    assert h.manager.seat("p") == -1
    assert pages.num_tokens == 10 and pages.num_pages == 3 and all(pages.indexer_blocks)
    assert [all(g) for g in pages.resident_blocks] == [True, True]
    assert [bool(block) for block in pages.host_blocks] == [True, True, False], "durable pages only"
    assert all(all(g) for g in generations.resident) and all(generations.indexer)
    q = h.add("q", list(range(50, 60)), 2)
    h.step()
    assert q.seat == 0, "the seat serves the next request"
    while "q" in h.reqs:
        h.step()
    h.finish(req)
    h.drain()


def test_host_reservation_full_reserves_every_output_token() -> None:
    for mode, now in (("window", True), ("full", False)):
        h = Harness(groups=1, device_blocks=400, host_blocks=32, max_model_len=100, host_reserve_tokens=8,
                    host_reservation=mode)
        for i, name in enumerate("ab"):
            h.add(name, [i * 100 + k for k in range(20)], 60)
        assert h.admit(h.reqs["a"]) is not None
        prefix = h.manager.prefix("b")
        fit = h.manager.fits("b", prefix, landing=None, chunk_tokens=8)
        assert (fit.now, fit.ever) == (now, True)


def test_hisparse_off_is_an_ordinary_device_cache() -> None:
    layout = small_layout(groups=2)
    manager = KVCacheManager(layout, CacheConfig(enabled=False, block_size=4, device_blocks=31), num_host_blocks=0,
                             max_model_len=40, max_seats=2, max_query_tokens=8, num_ranks=1)
    assert manager.coordinator is None
    manager.open("r", list(range(10)), max_tokens=5)
    assert manager.prefix("r").tokens == 0
    assert not manager.fits("r", manager.prefix("r"), landing=Landing.HOST, import_tokens=10, chunk_tokens=1).ever
    admission = manager.admit("r", manager.prefix("r"), chunk_tokens=8)
    assert manager.allocate("r", 10)
    assert manager.plan_step(1, [("r", 0, 10)]) is None
    updates = flat(manager.take_table_updates(), manager.layout)
    assert {u.group_id for u in updates if u.ids and u.ids[0]} == {0, 2, 3} and admission.seat == 0
    manager.retire(1, {"r": 10})
    assert manager.all_context_pages_resident(["r"]) and not manager.has_pending_work()
    manager.open("s", list(range(30)), max_tokens=5)
    assert manager.admit("s", manager.prefix("s"), chunk_tokens=8) is None
    pages, _ = manager.hold("r")
    assert pages.host_blocks == (0, 0, 0) and all(all(g) for g in pages.resident_blocks)
    manager.free("r")
    manager.check()
    assert manager.stats().device_blocks_free == 30
    with pytest.raises(RequestError, match="at least 1 token"):
        manager.open("e", [], max_tokens=1)

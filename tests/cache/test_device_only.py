"""HiSparse off: an ordinary device cache, with the same facade."""

from __future__ import annotations

import pytest

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.config import CacheConfig
from hisparse.types import Landing
from tests.cache.harness import small_layout

PER_PAGE = 3
"""Blocks of a page: indexer and two resident groups."""


def make(pages: int = 12) -> KVCacheManager:
    return KVCacheManager(small_layout(groups=2), CacheConfig(enabled=False, block_size=4, device_blocks=1 + pages * PER_PAGE),
                          num_host_blocks=0, max_model_len=40, max_seats=3, max_query_tokens=40, num_ranks=1)


def admit(m: KVCacheManager, name: str, length: int, landing: Landing | None = None, max_tokens: int = 4) -> bool:
    m.open(name, list(range(length)), max_tokens=max_tokens)
    return m.admit(name, m.prefix(name), landing=landing, import_tokens=length if landing else 0, chunk_tokens=8) is not None


def test_growth_ends_where_the_pool_does() -> None:
    m = make()
    assert admit(m, "a", 24) and m.allocate("a", 24)
    assert admit(m, "b", 16) and m.allocate("b", 16)
    assert not m.allocate("b", 40), "no room now"
    m.check()
    assert not admit(m, "c", 24)
    fit = m.fits("c", m.prefix("c"), landing=None, chunk_tokens=8)
    assert not fit.now and fit.ever and fit.reason == "device: needs 21 of 0 available (36 in all)", "b may still want a page"
    m.preempt("b")
    assert m.allocate("a", 32)
    m.free("a")
    m.check()
    assert m.stats().device_blocks_free == 36


@pytest.mark.parametrize("failed", [False, True])
def test_imports_land_resident(failed: bool) -> None:
    m = make()
    m.open("r", list(range(18)), max_tokens=4)
    admission = m.admit("r", m.prefix("r"), landing=Landing.RESIDENT, import_tokens=18, chunk_tokens=1)
    assert admission is not None and admission.import_target is not None
    pages = admission.import_target.pages
    assert pages.num_pages == 5 and all(pages.indexer_blocks) and not any(pages.host_blocks)
    assert all(all(blocks) for blocks in pages.resident_blocks)
    assert m.plan_step(1, []) is None and m.has_pending_work()
    m.retire(1, {})
    assert m.finish_load("r", failed=failed) == (0 if failed else 18)
    assert not m.has_pending_work()
    m.check()
    if not failed:
        assert m.allocate("r", 1) and m.plan_step(2, [("r", 18, 1)]) is None
        m.retire(2, {"r": 19})
        assert m.computed_tokens("r") == 19
    m.close("r")
    m.check()
    assert m.stats().device_blocks_free == 36


def test_an_import_outlives_its_request() -> None:
    m = make()
    assert admit(m, "r", 18, Landing.RESIDENT)
    m.free("r", finished=False)
    assert m.stats().device_blocks_free == 36 - 5 * PER_PAGE
    assert m.finish_load("r", failed=False) == 0 == m.finish_load("r", failed=False)
    assert m.stats().device_blocks_free == 36 and m.stats().late_completions == 2
    m.check()


def test_a_lost_worker_voids_everything() -> None:
    m = make()
    assert admit(m, "a", 12) and m.allocate("a", 12) and admit(m, "b", 8, Landing.RESIDENT)
    m.plan_step(1, [("a", 0, 12)])
    m.worker_lost(77)
    m.check()
    assert m.stats().device_blocks_free == 36 and not m.has_pending_work() and m.computed_tokens("a") == 0
    assert m.admit("a", m.prefix("a"), chunk_tokens=8) is not None
    assert m.allocate("a", 12)
    m.plan_step(2, [("a", 0, 12)])
    m.retire(2, {"a": 12})
    assert m.computed_tokens("a") == 12


def test_prefixes_are_not_cached_and_forks_are_refused() -> None:
    m = make()
    assert admit(m, "a", 8) and m.allocate("a", 8)
    m.plan_step(1, [("a", 0, 8)])
    m.retire(1, {"a": 8})
    m.extend("a", [5])
    m.free("a")
    m.open("again", list(range(8)), max_tokens=2)
    assert m.prefix("again").tokens == 0 and m.take_sealed_indexer_pages() == []
    assert m.published_host_blocks() == () and m.overdue_transfers() == ()

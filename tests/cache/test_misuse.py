"""Calls that cannot be right are refused with the ids, and change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hisparse.cache.block_pool import BlockPool
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.prefix import ExtraKeys
from hisparse.cache.retention import Retention
from hisparse.cache.values import PrefixHit
from hisparse.config import CacheConfig
from hisparse.errors import ConfigError, InvariantError, RequestError
from hisparse.types import Landing
from tests.cache.harness import Harness, small_layout
from tests.cache.snapshot import snapshot

NOTHING = PrefixHit()


def engine() -> Harness:
    """`run` is running, `load` waits for an import, `held` is leased to a peer, `open` waits."""
    h = Harness(device_blocks=200, host_blocks=60, seats=4)
    h.add("run", list(range(9)), 8)
    h.add("held", list(range(100, 109)), 8)
    h.step()
    h.step()
    h.manager.hold("held")
    h.reqs["held"].state = "held"
    load = h.add("load", list(range(200, 220)), 4)
    assert h.admit(load, Landing.HOST, 20) is not None
    h.dispatch([])
    h.retire([])
    h.add("open", list(range(300, 310)), 4)
    return h


MISUSE: list[tuple[Callable[[KVCacheManager], object], type[Exception], str]] = [
    (lambda m: m.open("run", [1], max_tokens=1), InvariantError, "'run' is open already"),
    (lambda m: m.open("new", [], max_tokens=1), RequestError, "at least 1 token"),
    (lambda m: m.open("new", [1], max_tokens=0), RequestError, "max_tokens >= 1, got 1 and 0"),
    (lambda m: m.open("new", [1] * 65, max_tokens=1), RequestError, "65 tokens, more than max_model_len = 64"),
    (lambda m: m.open("new", [1, -1, 3, 4], max_tokens=1), RequestError, "token ids must be integers in 0..4294967295"),
    (lambda m: m.open("new", [1, 2**32, 3, 4], max_tokens=1), RequestError, "token ids must be integers"),
    (lambda m: m.extend("gone", [1]), InvariantError, "'gone' is not open"),
    (lambda m: m.prefix("gone"), InvariantError, "'gone' is not open"),
    (lambda m: m.spilled_pages("gone"), InvariantError, "'gone' is not open"),
    (lambda m: m.fits("gone", NOTHING, landing=None, chunk_tokens=1), InvariantError, "'gone' is not open"),
    (lambda m: m.admit("run", NOTHING, chunk_tokens=1), InvariantError, "'run' is admitted already"),
    (lambda m: m.admit("open", NOTHING, landing=Landing.HOST, import_tokens=11, chunk_tokens=1), InvariantError,
     "import of 11 tokens into 'open' of 10 tokens"),
    (lambda m: m.allocate("open", 1), InvariantError, "'open' holds nothing"),
    (lambda m: m.allocate("load", 1), InvariantError, "'load' cannot run: a load is pending"),
    (lambda m: m.allocate("held", 1), InvariantError, "'held' cannot run: held"),
    (lambda m: m.fork("load", "child", max_tokens=1), InvariantError, "'load' cannot be forked now"),
    (lambda m: m.fork("held", "child", max_tokens=1), InvariantError, "'held' cannot be forked now"),
    (lambda m: m.fork("open", "child", max_tokens=1), InvariantError, "'open' holds nothing"),
    (lambda m: m.fork("run", "open", max_tokens=1), InvariantError, "'open' is open already"),
    (lambda m: m.hold("load"), InvariantError, "'load' cannot be held while a load is pending"),
    (lambda m: m.hold("open"), InvariantError, "'open' holds nothing"),
    (lambda m: m.plan_step(9, [("open", 0, 1)]), InvariantError, "'open'"),
    (lambda m: m.plan_step(9, [("load", 0, 1)]), InvariantError, "'load' scheduled for 1 tokens .*loading: True"),
    (lambda m: m.plan_step(9, [("held", 9, 1)]), InvariantError, "'held' scheduled for 1 tokens .*held: True"),
    (lambda m: m.plan_step(9, [("run", 30, 1)]), InvariantError, "'run' scheduled for 1 tokens from position 30"),
    (lambda m: m.plan_step(9, [("run", 9, 40)]), InvariantError, "'run' scheduled for 40 tokens from position 9"),
    (lambda m: m.retire(99, {}), InvariantError, "step 99 retired"),
    (lambda m: m.retire(1, {}), InvariantError, "step 1 retired, but .* already retired is 3"),
]


@pytest.mark.parametrize(("call", "error", "words"), MISUSE, ids=[words for *_, words in MISUSE])
def test_misuse_is_refused_and_changes_nothing(call: Callable[[KVCacheManager], object], error: type[Exception],
                                               words: str) -> None:
    h = engine()
    before = snapshot(h.manager)
    with pytest.raises(error, match=words):
        call(h.manager)
    assert snapshot(h.manager) == before
    h.manager.check()


def test_steps_are_numbered_upwards_and_rows_fit_their_step() -> None:
    h = engine()
    m = h.manager
    with pytest.raises(InvariantError, match="step 3 was planned after step 3; step numbers must increase"):
        m.plan_step(3, [])
    assert m.allocate("run", 1)
    m.plan_step(9, [("run", 9, 1)])
    with pytest.raises(InvariantError, match="'run': 14 rows after a step that had 9, planned 10"):
        m.retire(9, {"run": 14})
    h = engine()
    assert h.manager.allocate("run", 1)
    h.manager.plan_step(9, [("run", 9, 1)])
    with pytest.raises(InvariantError, match="'run': 3 rows after a step that had 9"):
        h.manager.retire(9, {"run": 3})


def test_ending_what_is_not_there_is_harmless() -> None:
    h = engine()
    before = snapshot(h.manager)
    for request_id in ("open", "gone"):
        h.manager.preempt(request_id)
        h.manager.free(request_id)
    h.manager.close("gone")
    h.manager.unpin_indexer([7])
    assert h.manager.computed_tokens("gone") == 0 and h.manager.seat("open") == -1
    assert snapshot(h.manager) == before


def test_holding_twice_lists_the_same_pages() -> None:
    h = engine()
    assert h.manager.hold("held") == h.manager.hold("held")


def test_no_seat_is_an_answer() -> None:
    h = Harness(device_blocks=200, seats=1)
    h.add("a", [1, 2, 3], 2)
    h.add("b", [4, 5, 6], 2)
    h.step()
    fit = h.manager.fits("b", NOTHING, landing=None, chunk_tokens=1)
    assert not fit.now and fit.ever and fit.reason.startswith("all 1 seats are taken; device: needs")
    assert h.manager.admit("b", NOTHING, chunk_tokens=1) is None
    assert h.manager.fork("a", "child", max_tokens=2) is None
    h.drain()


def test_a_load_that_drains_blocks_its_request_only() -> None:
    h = engine()
    h.manager.preempt("load")
    fit = h.manager.fits("load", NOTHING, landing=None, chunk_tokens=1)
    assert not fit.now and fit.reason.startswith("a load of an earlier admission has not drained")
    assert h.manager.admit("load", NOTHING, chunk_tokens=1) is None
    assert h.manager.admit("open", NOTHING, chunk_tokens=1) is not None
    assert h.manager.finish_load("load", failed=False) == 0
    assert h.manager.admit("load", NOTHING, chunk_tokens=1) is not None


@pytest.mark.parametrize("enabled", [True, False])
def test_pools_too_small_for_one_request_are_refused_with_the_numbers(enabled: bool) -> None:
    def make(device_blocks: int) -> KVCacheManager:
        config = CacheConfig(enabled=enabled, block_size=4, device_blocks=device_blocks, hot_rows=8, hot_rows_max=8)
        return KVCacheManager(small_layout(), config, num_host_blocks=40, max_model_len=64, max_seats=1, max_query_tokens=8,
                              num_ranks=1)

    need = 1 + 16 + 4 + 8 if enabled else 1 + 16 * 3
    assert make(need).stats().device_blocks_total == need - 1
    words = f"device_blocks = {need - 1} .* it needs {need} blocks .* raise device_blocks to {need}"
    with pytest.raises(ConfigError, match=words):
        make(need - 1)


def test_without_prefix_cache_nothing_is_found_or_published() -> None:
    h = Harness(device_blocks=60, prefix_cache=False)
    for name in "ab":
        h.add(name, list(range(20)), 4, ExtraKeys())
        h.run()
    stats = h.manager.stats()
    assert (stats.prefix_hit_tokens, stats.host_pages_published) == (0, 0) and stats.spills_completed > 0
    h.drain()


def test_a_pool_refuses_impossible_numbers() -> None:
    pool = BlockPool(4)
    with pytest.raises(InvariantError, match="asked for -1 blocks"):
        pool.allocate(-1)
    with pytest.raises(InvariantError, match=r"block 0 .*not in 1\.\.3"):
        pool.touch([0])


@pytest.mark.parametrize(("arguments", "words"), [
    ({"interval_tokens": 0}, "interval must be at least 1 token, got 0"),
    ({"replay_boundaries": (4, 0)}, r"boundaries must be at least 1 token, got \(4, 0\)"),
])
def test_impossible_retentions_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Retention(**arguments)  # type: ignore[arg-type]

"""Reported failures of other systems that are about pools, lifetimes and hashes; labels as in the scenario list."""

from __future__ import annotations

import itertools

import pytest

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.prefix import ExtraKeys
from hisparse.config import CacheConfig
from hisparse.errors import RequestError
from hisparse.types import Landing
from tests.cache.harness import Harness, Store, small_layout


def free_blocks(h: Harness) -> tuple[int, int]:
    stats = h.manager.stats()
    return stats.device_blocks_free, stats.host_blocks_free


# ----------------------------------------------------------------------------------------------------------- B03


@pytest.mark.parametrize("landing", Landing)
@pytest.mark.parametrize(("block_size", "prompt", "pages", "full", "offset"), [
    (64, 32_019, 501, 500, 19), (64, 1, 1, 0, 1), (64, 63, 1, 0, 63), (64, 64, 1, 1, 0), (64, 65, 2, 1, 1),
    (32, 32_019, 1001, 1000, 19),
])
def test_b03_import_of_a_prompt_that_does_not_fill_its_last_page(
        landing: Landing, block_size: int, prompt: int, pages: int, full: int, offset: int) -> None:
    h = Harness(device_blocks=4 * pages + 200, host_blocks=pages + 40, max_model_len=prompt + 80, block_size=block_size,
                hot_rows=block_size, groups=1, chunk=64)
    h.manager.open("d", list(range(prompt)), max_tokens=70)
    admission = h.manager.admit("d", h.manager.prefix("d"), landing=landing, import_tokens=prompt, chunk_tokens=1)
    assert admission is not None and admission.import_target is not None
    target = admission.import_target.pages
    assert (target.first_page, target.num_tokens, target.num_pages) == (0, prompt, pages)
    assert all(target.host_blocks) and all(target.indexer_blocks)
    needed_at_once = sum(bool(block) for block in target.resident_blocks[0])
    assert needed_at_once == (pages if landing is Landing.RESIDENT else min(2, pages))
    inc = h.manager.core.live["d"]
    assert inc.valid == 0, "nothing is selectable before the import is over"
    h.manager.plan_step(1, [])
    assert h.manager.finish_load("d", failed=False) == prompt
    published = h.manager.stats().host_pages_published
    assert published == (full if landing is Landing.HOST else 0), "a page with holes is never published"
    h.manager.extend("d", [1])
    assert h.manager.allocate("d", 1)
    command = h.manager.plan_step(2, [("d", prompt, 1)])
    (mirror,) = command.mirrors
    assert (mirror.first_page, prompt % block_size) == (prompt // block_size, offset)


def test_b03_the_partial_page_is_published_once_its_rows_are_real() -> None:
    h = Harness(groups=2, device_blocks=100, host_blocks=40)
    req = h.add("d", list(range(18)), 8)  # 4 full pages and 2 rows
    h.admit(req, Landing.HOST, 18)
    h.step()
    assert h.manager.stats().host_pages_published == 4
    while req.computed < 20:
        h.step()
        assert h.manager.stats().host_pages_published == 4 + (req.computed >= 20)
    h.drain()


def test_b03_full_aligned_hit_replays_the_last_token_and_writes_nothing() -> None:
    h = Harness(device_blocks=100)
    h.add("a", list(range(16)), 1)
    h.run()
    req = h.add("b", list(range(16)), 3)
    assert h.manager.prefix("b").tokens == 16
    chosen = h.schedule()
    assert chosen == [(req, 15, 1)]
    command = h.dispatch(chosen)
    assert command.mirrors == () and command.spills == ()
    h.retire(chosen)
    h.drain()


# ----------------------------------------------------------------------------------------------------------- B06


def test_b06_admission_counts_clean_resident_pages_as_room() -> None:
    """100 blocks, most of them clean resident pages of running requests; a newcomer that needs 20 gets in."""
    h = Harness(groups=1, device_blocks=101, host_blocks=400, max_model_len=120, seats=8, chunk=8, watermark=0.05,
                hot_rows=4)
    for name in "abc":
        h.add(name, list(ord(name) + i for i in range(56)), 60)
    for _ in range(12):
        h.step()
    assert h.manager.stats().device_blocks_free < 20
    pages_before = h.manager.stats().pages_reused
    late = h.add("late", list(range(300, 334)), 4)
    for _ in range(40):
        h.step()
        if late.state == "running" and late.computed >= 32:
            break
    assert late.state == "running" and late.computed >= 32
    assert h.manager.stats().pages_reused > pages_before and h.manager.stats().preemptions == 0
    h.drain()


def test_b06_lengths_come_from_the_host_pool_not_the_gpu_pool() -> None:
    """GPU room for about 100 tokens, host room for 200: a prompt of 150 with 10 more runs host-backed."""
    groups, size = 1, 4
    h = Harness(groups=groups, device_blocks=1 + 50 + 1 + 4 + 10, host_blocks=52, max_model_len=200, block_size=size,
                hot_rows=4)
    assert h.layout.device_blocks_resident(150) > h.config.device_blocks, "it could never be resident"
    h.add("long", list(range(150)), 10)
    prefix = h.manager.prefix("long")
    assert h.manager.fits("long", prefix, landing=None, chunk_tokens=8).now
    h.run()
    assert len(h.finished["long"]) == 150 + 9
    h.add("longest", list(range(199)), 1)
    with pytest.raises(RequestError, match="201 tokens, more than max_model_len = 200"):
        h.manager.open("too long", list(range(201)), max_tokens=1)
    h.drain()


# ----------------------------------------------------------------------------------------------------------- B08


@pytest.mark.parametrize("reserve", [1024, 0])
def test_b08_output_tokens_need_host_pages_too(reserve: int) -> None:
    """Two requests of 7 pages that grow to 11, 15 usable host pages: deferred, or preempted on a defined path."""
    h = Harness(groups=1, device_blocks=400, host_blocks=16, max_model_len=56, seats=4, host_reserve_tokens=reserve)
    h.add("a", list(range(24)), 21)
    h.add("b", list(range(100, 124)), 21)
    first = h.step()
    assert first == (1 if reserve else 2), "the reservation defers the second"
    h.drain()
    assert {name: len(tokens) for name, tokens in h.finished.items()} == {"a": 24 + 20, "b": 24 + 20}
    assert (h.manager.stats().preemptions > 0) == (reserve == 0)


def test_b08_growth_takes_unreferenced_published_pages_before_it_preempts() -> None:
    h = Harness(groups=1, device_blocks=400, host_blocks=16, max_model_len=56)
    h.add("old", list(range(24)), 1)
    h.run()
    assert h.manager.stats().host_pages_published == 6
    h.add("new", list(range(200, 240)), 16)
    h.drain()
    assert h.manager.stats().host_pages_evicted > 0 and h.manager.stats().preemptions == 0


# ----------------------------------------------------------------------------------------------------------- B09


@pytest.mark.parametrize("store", [True, False])
def test_b09_a_preempted_request_continues_with_the_same_rows(store: bool) -> None:
    """Dirty pages at preemption; another request takes the released pages at once; R resumes with the same rows."""
    h = Harness(groups=2, device_blocks=80, host_blocks=60, store=Store() if store else None)
    r = h.add("r", list(range(24)), 12)
    for _ in range(4):
        h.step()
    h.complete_each_step = False
    h.step()
    assert h.manager.stats().pages_spilling + h.manager.stats().pages_gpu_only > 0
    h.preempt(r)
    other = h.add("other", list(range(300, 340)), 4)
    r.state = "paused"
    for _ in range(6):
        h.step()
    assert other.computed > 0
    h.complete_each_step = True
    r.state = "waiting"
    h.drain()
    assert len(h.finished["r"]) == 24 + 11, "every row it read was checked in every step"


def test_b09_without_a_host_block_no_partial_backup_is_published() -> None:
    h = Harness(groups=1, device_blocks=400, host_blocks=18, max_model_len=60)
    a = h.add("a", list(range(30)), 20)
    b = h.add("b", list(range(100, 130)), 20)
    h.step()
    running = [req for req in (a, b) if req.state == "running"]
    h.complete_each_step = False
    h.step()
    h.preempt(running[-1])
    published = h.manager.stats().host_pages_published
    h.worker.complete_all(h.rng)
    h.manager.on_worker_output([h.worker.output()])
    assert h.manager.stats().host_pages_published == published, "its pending publication was dropped"
    h.complete_each_step = True
    h.drain()


# ----------------------------------------------------------------------------------------------------------- B17


@pytest.mark.parametrize("order", ["recv-send", "send-recv", "together", "recv-before-abort"])
def test_b17_blocks_come_back_after_the_last_of_two_pending_transfers_exactly_once(order: str) -> None:
    h = Harness(groups=1, device_blocks=60, host_blocks=20, max_model_len=32)
    total = free_blocks(h)
    h.complete_each_step = False
    req = h.add("r", list(range(16)), 8)
    # Two admissions of one id: the first leaves spills pending, the second an import.
    h.step()
    h.step()
    assert h.manager.stats().transfers_in_flight
    h.preempt(req)
    assert h.admit(req, Landing.RESIDENT, 16) is not None
    h.dispatch([])
    h.manager.retire(h.step_number, {})
    if order == "recv-before-abort":
        h.finish_load("r")
    h.finish(req, finished=False)

    def recv() -> None:
        if order != "recv-before-abort":
            h.imports.pop("r", None)
            assert h.manager.finish_load("r", failed=False) == 0

    def send() -> None:
        h.worker.complete_all()
        h.manager.on_worker_output([h.worker.output()])

    for action in {"recv-send": (recv, send), "send-recv": (send, recv), "together": (recv, send),
                   "recv-before-abort": (send,)}[order]:
        assert free_blocks(h) < total
        action()
        h.manager.check()
    assert free_blocks(h) == total
    late = h.manager.stats().late_completions
    assert h.manager.finish_load("r", failed=False) == 0
    assert h.manager.stats().late_completions == late + 1 and free_blocks(h) == total
    assert h.manager.stats().host_pages_published == 0


# ----------------------------------------------------------------------------------------------------------- B18


def test_b18_a_hundred_aborted_imports_leak_nothing() -> None:
    h = Harness(groups=1, device_blocks=400, host_blocks=65, max_model_len=64, seats=100)
    total = free_blocks(h)
    due: dict[int, list[str]] = {}
    for i in range(100):
        req = h.add(f"r{i}", [i * 16 + k for k in range(16)], 1)
        assert h.admit(req, Landing.RESIDENT, 16) is not None, f"request {i} is not admitted"
        h.dispatch([])
        h.manager.retire(h.step_number, {})
        h.finish(req, finished=False)
        h.imports.pop(req.request_id)
        due.setdefault(i + 3, []).append(req.request_id)
        for name in due.pop(i, []):
            assert h.manager.finish_load(name, failed=i % 2 == 0) == 0
    assert h.manager.has_pending_work()
    for names in due.values():
        for name in names:
            h.manager.finish_load(name, failed=False)
    assert free_blocks(h) == total and not h.manager.has_pending_work()
    assert h.manager.stats().late_completions == 100
    h.manager.check()


# ----------------------------------------------------------------------------------------------------------- B19


def test_b19_a_block_of_a_dispatched_step_goes_to_no_import_before_that_step_retires() -> None:
    h = Harness(groups=1, device_blocks=1 + 16 + 10, host_blocks=40, max_model_len=40, seats=4, hot_rows=4)
    a = h.add("a", list(range(30)), 8)
    for _ in range(4):
        h.step()
    chosen = h.schedule()
    h.dispatch(chosen)  # step N + 1, still running on the device
    inc = h.manager.core.live["a"]
    blocks = {b for page in inc.resident.values() for b in page.blocks} | set(inc.indexer)
    h.manager.free("a")
    a.state = "gone"
    b = h.add("b", list(range(100, 136)), 2)
    prefix = h.manager.prefix("b")
    assert h.manager.fits("b", prefix, landing=Landing.HOST, import_tokens=36, chunk_tokens=1).now
    admission = h.admit(b, Landing.HOST, 36)
    assert admission is None, "the only free blocks are those the dispatched step may touch"
    h.manager.on_worker_output([h.worker.output()])
    h.worker.complete_all()
    h.manager.on_worker_output([h.worker.output()])
    h.manager.retire(h.step_number, {"a": a.computed + 1})
    admission = h.admit(b, Landing.HOST, 36)
    assert admission is not None
    target = admission.import_target.pages
    assert blocks & ({*target.indexer_blocks} | {x for g in target.resident_blocks for x in g})
    del h.reqs["a"]
    h.drain()


def test_b19_host_blocks_of_an_aborted_request_wait_for_its_dispatched_step() -> None:
    h = Harness(groups=1, device_blocks=100, host_blocks=20, max_model_len=40)
    req = h.add("a", list(range(10)), 8)
    total = h.manager.stats().host_blocks_total
    chosen = h.schedule()
    h.dispatch(chosen)
    h.finish(req, finished=False)
    assert h.manager.stats().host_blocks_free == total - 2, "step 1 mirrors rows into them"
    assert h.manager.has_pending_work()
    h.worker.complete_all()
    h.manager.on_worker_output([h.worker.output()])
    assert h.manager.stats().host_blocks_free < total
    h.manager.retire(h.step_number, {})
    assert h.manager.stats().host_blocks_free == total


def test_b19_readmission_with_a_pending_spill_does_not_inherit_it() -> None:
    h = Harness(groups=1, device_blocks=100, host_blocks=40, max_model_len=40)
    req = h.add("a", list(range(16)), 8)
    h.complete_each_step = False
    h.step()
    assert h.manager.stats().transfers_in_flight == 2
    h.preempt(req)
    h.step()
    assert req.state == "running" and h.manager.stats().prefix_hit_tokens == 0
    old = h.manager.core.live["a"].pending_spills
    h.worker.complete_all(h.rng)
    h.manager.on_worker_output([h.worker.output()])
    h.manager.check()
    assert old > 0 and h.manager.core.live["a"].published >= 1
    h.complete_each_step = True
    h.drain()


# ----------------------------------------------------------------------------------------------------------- B23


def test_b23_another_tenant_never_hits() -> None:
    tokens = list(range(16))
    h = Harness(device_blocks=100)
    h.add("x", tokens, 1, ExtraKeys(lora_id="X"))
    h.run()
    for i, extra in enumerate([ExtraKeys(), ExtraKeys(cache_salt="X"), ExtraKeys(multimodal_hash="X"), ExtraKeys(lora_id="")]):
        h.manager.open(f"q{i}", tokens, extra_keys=extra, max_tokens=1)
        assert h.manager.prefix(f"q{i}").tokens == 0
    h.manager.open("same", tokens, extra_keys=ExtraKeys(lora_id="X"), max_tokens=1)
    assert h.manager.prefix("same").tokens == 16


def test_b23_published_pages_survive_a_worker_and_are_found_by_a_new_manager_with_equal_keys() -> None:
    layout = small_layout()
    managers = [
        KVCacheManager(layout, CacheConfig(block_size=4, device_blocks=64, hot_rows=8, hot_rows_max=8), num_host_blocks=32,
                       max_model_len=32, max_seats=1, max_query_tokens=8, num_ranks=1, incarnation=i) for i in range(2)]
    for manager in managers:
        manager.open("r", list(range(32)), max_tokens=1)
    a, b = (manager._identities["r"].keys.keys for manager in managers)
    assert a == b and len(a) == 8


# ----------------------------------------------------------------------------------------------------------- B26


def test_b26_two_half_loaded_requests_do_not_lock_each_other() -> None:
    """Both hold imported prefixes and must still prefill; the pool is too small for both to be resident."""
    h = Harness(groups=2, device_blocks=1 + 16 + 4 + 2 * 4 + 12, host_blocks=60, max_model_len=64, seats=4)
    for name, base in (("l", 0), ("w", 200)):
        req = h.add(name, [base + i for i in range(30)], 4)
        h.admit(req, Landing.HOST, 18)
    for i, length in enumerate((20, 5)):
        h.add(f"h{i}", [400 + 50 * i + k for k in range(length)], 3)
    h.drain()
    assert len(h.finished) == 4


def test_arrival_orders_end_and_leave_nothing() -> None:
    """Every order of three requests that cannot all run at once."""
    sizes = {"s": (4, 3), "m": (22, 6), "l": (50, 8)}
    for order in itertools.permutations(sizes):
        h = Harness(groups=2, device_blocks=1 + 16 + 4 + 2 * 4, host_blocks=18, max_model_len=64)
        for name in order:
            tokens, more = sizes[name]
            h.add(name, [ord(name) + i for i in range(tokens)], more)
        h.drain()
        assert {name: len(tokens) for name, tokens in h.finished.items()} == {n: a + b - 1 for n, (a, b) in sizes.items()}


def test_requests_that_never_fit_are_named_with_numbers() -> None:
    h = Harness(groups=2, device_blocks=60, host_blocks=18, max_model_len=64)
    h.add("r", list(range(64)), 1)
    fit = h.manager.fits("r", h.manager.prefix("r"), landing=Landing.RESIDENT, import_tokens=64, chunk_tokens=1)
    assert fit.now and fit.reason == (
        "device: needs 48 of 59 available (59 in all); host: needs 16 of 17 available (17 in all)")
    h = Harness(groups=2, device_blocks=40, host_blocks=18, max_model_len=64)
    h.add("r", list(range(64)), 1)
    fit = h.manager.fits("r", h.manager.prefix("r"), landing=Landing.RESIDENT, import_tokens=64, chunk_tokens=1)
    assert not fit.now and not fit.ever and "needs 48 of 39 available" in fit.reason

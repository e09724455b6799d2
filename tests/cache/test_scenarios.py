"""Reported failures of other systems that are about room: lengths, admission, growth, preemption. Labels as in the list of
scenarios; each test states the right outcome given there."""

from __future__ import annotations

import itertools

import pytest

from hisparse.cache.residency import DURABLE, PageState
from hisparse.errors import RequestError
from hisparse.types import Landing
from tests.cache.harness import Harness, Store, needs

# ----------------------------------------------------------------------------------------------------------- B03


@pytest.mark.parametrize("landing", Landing)
@pytest.mark.parametrize(("block_size", "prompt", "pages", "full", "offset"), [
    (64, 32_019, 501, 500, 19), (64, 1, 1, 0, 1), (64, 63, 1, 0, 63), (64, 64, 1, 1, 0), (64, 65, 2, 1, 1),
    (32, 32_019, 1001, 1000, 19),
])
def test_b03_import_of_a_prompt_that_does_not_fill_its_last_page(
        landing: Landing, block_size: int, prompt: int, pages: int, full: int, offset: int) -> None:
    """Every row arrives, the rest of the last page stays a hole; D replays the last token, then writes at the offset."""
    h = Harness(device_blocks=4 * pages + 200, host_blocks=pages + 40, max_model_len=prompt + 80, block_size=block_size,
                hot_rows=block_size, groups=1, chunk=64)
    req = h.add("d", list(range(prompt)), max_tokens=70)
    admission = h.admit(req, landing, prompt)
    assert admission is not None and admission.import_target is not None
    target = admission.import_target.pages
    assert (target.first_page, target.num_tokens, target.num_pages) == (0, prompt, pages)
    assert all(target.host_blocks) and all(target.indexer_blocks)
    at_once = sum(bool(block) for block in target.resident_blocks[0])
    assert at_once == (pages if landing is Landing.RESIDENT else min(2, pages))
    assert h.manager.computed_tokens("d") == 0, "nothing is selectable before the import is over"
    h.dispatch([])
    h.retire([])
    assert h.manager.stats().host_pages_published == 0
    assert h.finish_load("d") == prompt == h.manager.computed_tokens("d")
    if landing is Landing.HOST and full < pages:
        holes = block_size - bin(h.worker.host.masks[target.host_blocks[-1]]).count("1")
        assert holes == pages * block_size - prompt, "45 of 64, or 13 of 32"
    assert h.manager.stats().host_pages_published == (full if landing is Landing.HOST else 0)
    assert h.schedule() == [(req, prompt - 1, 1)], "D replays only the last token"
    command = h.dispatch([(req, prompt - 1, 1)])
    assert command.mirrors == (), "which writes nothing"
    assert len(h.tiers) == prompt, "no position beyond the prompt is selectable"
    h.retire([(req, prompt - 1, 1)])
    assert h.schedule() == [(req, prompt, 1)]
    (mirror,) = h.dispatch([(req, prompt, 1)]).mirrors
    assert (mirror.first_page, prompt % block_size) == (prompt // block_size, offset)
    assert len(h.tiers) == prompt + 1


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


def test_b06_a_request_of_20_blocks_gets_in_with_10_plain_free_blocks_and_90_clean_ones() -> None:
    """GPU pool of 100 blocks, 90 of them clean pages, 10 free; host pool of 400, 200 of them free."""
    h = Harness(groups=1, device_blocks=101, host_blocks=401, max_model_len=80, hot_rows=4)
    for i in range(5):
        h.add(f"old{i}", [i * 50 + k for k in range(36)], 1)  # 9 pages of 2 blocks each
    h.run()
    h.add("new", [300 + i for i in range(39)], 2)
    ballast = h.manager.core.source.pool.allocate(200)
    before = h.manager.stats()
    assert (before.device_blocks_free, before.device_blocks_loose, before.host_blocks_free) == (100, 90, 200)
    fit = h.manager.fits("new", h.manager.prefix("new"), landing=None, chunk_tokens=8)
    assert fit.now and needs(fit)["device"] <= 20
    new = h.reqs["new"]
    while new.computed < 39:
        assert h.step() == 1
    stats = h.manager.stats()
    assert (stats.device_blocks_free, stats.device_blocks_loose) == (80, 80), "10 clean blocks were reclaimed, and no more"
    assert stats.preemptions == 0 and stats.pages_reused > 0
    h.manager.core.source.pool.free(ballast.tolist())
    h.drain()


def test_b06_admission_counts_clean_resident_pages_of_running_requests_as_room() -> None:
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
    """GPU room for 100 tokens, host room for 200: a prompt of 150 with 10 more is served in full; 199 is the longest."""
    resident_100 = 25 * 2
    h = Harness(groups=1, device_blocks=1 + resident_100 + 1 + 4 + 10, host_blocks=52, max_model_len=200, hot_rows=4)
    assert h.layout.device_blocks_resident(100) == resident_100
    assert h.layout.device_blocks_resident(150) > h.config.device_blocks, "it could never be resident"
    h.add("long", list(range(150)), 10)
    assert h.manager.fits("long", h.manager.prefix("long"), landing=None, chunk_tokens=8).now
    h.run()
    assert len(h.finished["long"]) == 150 + 9, "10 tokens were sampled; the last one is no part of the cache"
    h.add("longest", list(range(199)), 1)
    h.run()
    assert len(h.finished["longest"]) == 199
    with pytest.raises(RequestError, match="201 tokens, more than max_model_len = 200"):
        h.manager.open("too long", list(range(201)), max_tokens=1)
    h.drain()


# ----------------------------------------------------------------------------------------------------------- B08


@pytest.mark.parametrize("reserve", [1024, 0])
def test_b08_output_tokens_need_host_pages_too(reserve: int) -> None:
    """A host pool of 16 blocks of 64; two requests of 7 blocks that grow to 11: 14 fit, 22 do not. The second one is
    deferred, or preempted on a defined path; no allocation fails, both finish."""
    h = Harness(groups=1, device_blocks=120, host_blocks=17, max_model_len=704, seats=4, block_size=64, hot_rows=64,
                chunk=448, host_reserve_tokens=reserve)
    for i, name in enumerate("ab"):
        h.add(name, [i * 1000 + k for k in range(448)], 256)
    fit = h.manager.fits("a", h.manager.prefix("a"), landing=None, chunk_tokens=448)
    assert needs(fit)["host"] == (11 if reserve else 8), "7 pages of the prompt, and those of the reserved output"
    assert h.step() == (1 if reserve else 2), "the reservation defers the second"
    h.drain()
    assert {name: len(tokens) for name, tokens in h.finished.items()} == {"a": 448 + 255, "b": 448 + 255}
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


def b09(*, preempted: bool, store: bool) -> Harness:
    """R has 10 blocks of 64 and 3 dirty pages when it is chosen; another request takes the released blocks at once."""
    h = Harness(groups=2, device_blocks=60, host_blocks=40, max_model_len=704, block_size=64, hot_rows=64, chunk=64,
                store=Store() if store else None)
    r = h.add("r", [i * 7 % 501 for i in range(639)], 4)
    while r.computed < 448:
        h.step()
    h.complete_each_step = False
    while r.computed < 640:
        h.step()
    dirty = [page for page, view in enumerate(h.manager.page_views("r")[:10]) if view.state not in DURABLE]
    assert dirty == [7, 8, 9]
    if preempted:
        free = h.manager.stats().device_blocks_free
        h.preempt(r)
        assert h.manager.stats().device_blocks_free > free
        other = h.add("other", [(500 - i) % 509 for i in range(600)], 2)
        r.state = "paused"
        while other.computed < 256:
            h.step()
        h.complete_each_step = True
        h.step()
        r.state = "waiting"
    h.complete_each_step = True
    h.drain()
    return h


@pytest.mark.parametrize("store", [True, False])
def test_b09_a_preempted_request_continues_as_if_it_had_not_been(store: bool) -> None:
    """Its 641st token, and every row that any step read, is that of the unpreempted run."""
    never, once = b09(preempted=False, store=store), b09(preempted=True, store=store)
    assert once.finished["r"] == never.finished["r"] and len(once.finished["r"]) == 639 + 3
    assert once.manager.stats().preemptions >= 1 and never.manager.stats().preemptions == 0


def test_b09_without_a_free_host_block_no_partial_backup_is_published() -> None:
    """The victim's dirty pages were being written; its pending publication is dropped, and it is computed again."""
    h = Harness(groups=1, device_blocks=400, host_blocks=19, max_model_len=60, host_reserve_tokens=0)
    reqs = [h.add(name, list(range(i * 100, i * 100 + 31)), 20) for i, name in enumerate("ab")]
    h.complete_each_step = False
    while h.manager.stats().host_blocks_free:
        h.step()
    assert all(req.state == "running" for req in reqs) and h.manager.stats().pages_spilling
    dirty = {view.host for view in h.manager.page_views("b") if view.state not in DURABLE}
    assert len(dirty) >= 8 and not set(h.manager.published_host_blocks()) & dirty
    for _ in range(8):
        h.step()  # the next page of either finds no host block
    assert reqs[1].preemptions == 1
    h.complete_all()
    h.manager.on_worker_output(h.outputs())
    assert not set(h.manager.published_host_blocks()) & dirty
    h.manager.open("copy of b", h.reqs["b"].tokens, max_tokens=1)
    assert h.manager.prefix("copy of b").tokens == 0
    h.manager.close("copy of b")
    h.complete_each_step = True
    h.drain()
    assert {len(tokens) for tokens in h.finished.values()} == {31 + 19}


# ----------------------------------------------------------------------------------------------------------- B20


def test_b20_whole_pages_of_a_prompt_hit_and_its_tail_is_computed_again() -> None:
    """1,000 tokens with pages of 64: 15 pages (960 tokens) are stored and hit; the tail of 40 rows is rebuilt, not read."""
    store = Store()
    h = Harness(groups=1, device_blocks=30, host_blocks=60, max_model_len=1088, block_size=64, hot_rows=64, chunk=128,
                store=store)
    tokens = [i * 11 % 499 for i in range(1000)]
    h.add("a", tokens, 1)
    h.run()
    assert len(store.pages) == 15, "the tail is left out"
    h.add("b", [498 - i % 400 for i in range(1080)], 1)
    h.run()
    again = h.add("again", tokens, 2)
    hit = h.manager.prefix("again")
    assert (hit.tokens, hit.host_pages) == (960, 15) and hit.indexer_load_pages > 0
    assert h.admit(again) is not None and again.state == "loading"
    h.step()
    assert again.computed == 960
    assert h.schedule() == [(again, 960, 40)]
    h.drain()


# ------------------------------------------------------------------------------------------------- neighbours


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


def test_pages_of_a_running_request_are_in_one_of_the_design_states() -> None:
    h = Harness(groups=2, device_blocks=60, host_blocks=18)
    h.add("r", list(range(20)), 4)
    h.step()
    assert {view.state for view in h.manager.page_views("r")} <= set(PageState) - {PageState.NONE}
    h.drain()

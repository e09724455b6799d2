"""What becomes findable, in which order, and what never does."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hisparse.cache.residency import PageState
from hisparse.cache.retention import Retention
from tests.cache.harness import Harness, Req


def spilling(h: Harness, name: str = "r", length: int = 12, max_tokens: int = 6, base: int = 0) -> Req:
    """A request whose first pages are sealed and under a copy each."""
    h.complete_each_step = False
    req = h.add(name, [base + i for i in range(length)], max_tokens)
    while req.computed < length:
        h.step()
    assert h.manager.stats().host_pages_published == 0
    return req


def say(h: Harness, transfer_id: int, *, fail: bool = False) -> None:
    """One copy is over, and the manager hears it."""
    h.worker.complete(transfer_id, fail=fail)
    h.manager.on_worker_output([h.worker.output()])
    h.manager.check()


def hit(h: Harness, tokens: list[int]) -> int:
    """Pages that a newcomer with these tokens finds."""
    h.manager.open("probe", tokens, max_tokens=1)
    pages = h.manager.prefix("probe").host_pages
    h.manager.close("probe")
    return pages


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_only_a_contiguous_durable_prefix_is_found_however_acknowledgements_come(order: tuple[int, ...]) -> None:
    h = Harness(groups=2, device_blocks=100)
    req = spilling(h)
    ids = list(h.worker.copies)
    done: set[int] = set()
    for page in order:
        say(h, ids[page])
        done.add(page)
        run = next((page for page in range(3) if page not in done), 3)
        assert h.manager.stats().host_pages_published == run == hit(h, req.tokens[:12])
    h.complete_each_step = True
    h.drain()


def test_pages_written_while_decoding_are_published_one_by_one() -> None:
    h = Harness(groups=2, device_blocks=100)
    req = h.add("r", list(range(6)), 20)
    seen = []
    while "r" in h.reqs:
        h.step()
        seen.append((req.computed // 4, h.manager.stats().host_pages_published))
    assert sorted({published for _, published in seen}) == list(range(seen[0][1], 7)), "each by itself"
    assert all(published <= sealed + ("r" not in h.reqs) for sealed, published in seen)
    h.drain()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_finished_request_is_published_by_its_late_copies(order: tuple[int, ...]) -> None:
    """Detached: its host blocks stay leased until the last word, whatever the order; then the same prompt hits."""
    h = Harness(groups=2, device_blocks=100)
    total = h.manager.stats().host_blocks_free
    req = spilling(h)
    ids = list(h.worker.copies)
    h.finish(req)
    assert not h.manager.core.live and h.manager.has_pending_work()
    for page in order:
        assert h.manager.stats().host_blocks_free == total - 3
        say(h, ids[page])
    stats = h.manager.stats()
    assert (stats.host_pages_published, stats.host_blocks_free) == (3, total) and not h.manager.has_pending_work()
    assert hit(h, req.tokens[:12]) == 3
    h.complete_each_step = True
    again = h.add("again", req.tokens[:12], 3)
    h.step()
    assert again.computed >= 12 and h.manager.stats().pages_adopted == 3, "its resident pages were still there"
    h.drain()


def test_a_failed_late_copy_publishes_nothing_from_it_on() -> None:
    h = Harness(groups=2, device_blocks=100)
    total = h.manager.stats().host_blocks_free
    req = spilling(h)
    ids = list(h.worker.copies)
    h.finish(req)
    say(h, ids[0])
    say(h, ids[1], fail=True)
    say(h, ids[2])
    assert h.manager.stats().host_pages_published == 1 == hit(h, req.tokens[:12])
    assert h.manager.stats().host_blocks_free == total and not h.manager.has_pending_work()
    h.complete_each_step = True
    h.drain()


@pytest.mark.parametrize("how", ["preempt", "abort"])
def test_pages_durable_before_stay_and_pending_ones_are_dropped(how: str) -> None:
    h = Harness(groups=2, device_blocks=100)
    req = spilling(h)
    ids = list(h.worker.copies)
    say(h, ids[0])
    pending = {view.host for view in h.manager.page_views("r") if view.state is PageState.SPILLING}
    if how == "preempt":
        h.preempt(req)
    else:
        h.finish(req, finished=False)
    for transfer_id in ids[1:]:
        say(h, transfer_id)
    assert hit(h, req.tokens[:12]) == 1 and not pending & set(h.manager.published_host_blocks())
    h.complete_each_step = True
    h.drain()


def test_a_second_request_of_the_same_prompt_leaves_the_hash_with_the_first_block() -> None:
    h = Harness(groups=2, device_blocks=200, seats=2)
    a = spilling(h, "a")
    b = spilling(h, "b")
    ids = list(h.worker.copies)
    for transfer_id in ids[:3]:
        say(h, transfer_id)
    first = h.manager.published_host_blocks()
    assert first == tuple(view.host for view in h.manager.page_views("a")[:3])
    for transfer_id in ids[3:]:
        say(h, transfer_id)
    assert h.manager.published_host_blocks() == first and h.manager.stats().spills_completed == 6
    h.finish(a)
    h.finish(b)
    h.complete_each_step = True
    h.drain()


@pytest.mark.parametrize(("length", "max_tokens"), [(11, 2), (12, 1), (10, 3), (8, 5)])
def test_the_last_sampled_token_has_no_row_and_its_page_is_not_published(length: int, max_tokens: int) -> None:
    """12 tokens and 1 sampled last: 3 pages; when the last sampled token is the 12th, 2."""
    h = Harness(groups=2, device_blocks=100)
    req = h.add("r", list(range(length)), max_tokens)
    while "r" in h.reqs:
        chosen = h.schedule()
        h.dispatch(chosen)
        h.complete_all()
        if len(req.tokens) - req.prompt + 1 == max_tokens and req.computed + chosen[0][2] == len(req.tokens):
            h.manager.extend("r", [7])  # as an engine does, before it finishes
        h.retire(chosen)
    h.drain()
    rows = length + max_tokens - 1
    assert h.manager.stats().host_pages_published == rows // 4


def test_rows_of_rejected_drafts_seal_no_page() -> None:
    """Four drafts that would fill the page are rejected: not sealed, not spilled, not published; real rows are."""
    h = Harness(groups=2, device_blocks=100)
    req = h.add("r", list(range(9)), 12)
    while req.computed < 9:
        h.step()
    assert h.manager.stats().host_pages_published == 2
    m, worker = h.manager, h.worker
    assert req.computed == 9 and len(req.tokens) == 10
    assert m.allocate("r", 4)
    h.step_number += 1
    command = m.plan_step(h.step_number, [("r", 9, 4)])
    assert command is not None and command.spills == ()
    worker.receive(command)
    worker.start(command)
    worker.write(req.seat, 9, req.draft_rows([401, 402, 403])[9:])
    worker.reject(req.seat, 10, 13)
    worker.end()
    m.on_worker_output([worker.output()])
    m.retire(h.step_number, {"r": 10})
    req.computed = 10
    req.tokens.append(77)
    m.extend("r", [77])
    m.check()
    assert m.computed_tokens("r") == 10 and m.stats().pages_spilling == 0
    while req.computed < 12:
        assert h.manager.stats().host_pages_published == 2
        h.step()
    h.step()
    assert h.manager.stats().host_pages_published == 3 and h.manager.stats().spills_failed == 0
    h.drain()


# ------------------------------------------------------------------------------------------- retention


@given(interval=st.none() | st.integers(1, 30), boundaries=st.lists(st.integers(1, 60), max_size=4), limit=st.integers(0, 15))
def test_a_retention_ends_at_the_last_boundary_within_the_pages(interval: int | None, boundaries: list[int],
                                                               limit: int) -> None:
    retention = Retention(interval_tokens=interval, replay_boundaries=tuple(boundaries))
    every = [*boundaries, *(range(interval, 200, interval) if interval else ())]
    assert retention.pages(limit, 4) == max((b // 4 for b in every if b // 4 <= limit), default=0)


@pytest.mark.parametrize("late", [False, True])
def test_pages_between_boundaries_become_findable_together(late: bool) -> None:
    """An interval of 8 tokens and a turn that ends at token 14: 2, then 3 (where that page starts), then 4 pages..."""
    h = Harness(groups=2, device_blocks=100)
    req = h.add("r", list(range(6)), 20, retention=Retention(interval_tokens=8, replay_boundaries=(14,)))
    seen = []
    while "r" in h.reqs:
        if late and req.computed == 12:
            h.complete_each_step = False
        h.step()
        seen.append(h.manager.stats().host_pages_published)
    h.complete_each_step = True
    h.drain()
    assert sorted(set(seen)) == ([0, 2, 3] if late else [0, 2, 3, 4, 6])
    assert h.manager.stats().host_pages_published == 6 == hit(h, req.tokens[:24]), "25 rows: the last boundary is 24"


def test_pages_behind_the_last_boundary_are_never_findable() -> None:
    h = Harness(groups=2, device_blocks=100)
    req = h.add("r", list(range(20)), 4, retention=Retention(replay_boundaries=(9, 400)))
    h.drain()
    stats = h.manager.stats()
    assert (stats.spills_completed, stats.host_pages_published) == (5, 2) and hit(h, req.tokens) == 2

"""Nobody waits for ever: chunked prefill moves on, loaded requests end, and nothing is computed again without end."""

from __future__ import annotations

import pytest

from hisparse.cache.admission import min_device_blocks
from hisparse.config import CacheConfig
from hisparse.types import Landing
from tests.cache.harness import Harness, small_layout


def least_blocks(groups: int, max_model_len: int, chunk: int) -> int:
    config = CacheConfig(block_size=4, device_blocks=2, hot_rows=8, hot_rows_max=8)
    return min_device_blocks(small_layout(groups=groups), config, max_model_len=max_model_len, max_query_tokens=chunk)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("chunk", [4, 8, 16])
@pytest.mark.parametrize("spare", [0, 1, 5])
def test_a_chunked_prefill_moves_on_in_every_step_in_which_a_copy_ends(groups: int, chunk: int, spare: int) -> None:
    """On the smallest pool it moves to the host; it neither preempts nor starts again, and every chunk adds rows."""
    h = Harness(device_blocks=least_blocks(groups, 64, chunk) + spare, host_blocks=18, max_model_len=64, groups=groups,
                chunk=chunk)
    req = h.add("a", list(range(60)), 4)
    computed, idle = 0, 0
    while "a" in h.reqs:
        h.step()
        idle = idle + 1 if req.computed == computed else 0
        assert req.computed >= computed and idle <= 2
        computed = req.computed
    assert h.manager.stats().preemptions == 0 and h.step_number <= 3 * (64 // min(chunk, 4) + 4)
    h.drain()


@pytest.mark.parametrize("spare", range(0, 30, 3))
def test_two_long_prefills_in_a_pool_for_one_both_end(spare: int) -> None:
    """Preemption may restart the later one, a bounded number of times."""
    h = Harness(device_blocks=least_blocks(2, 64, 8) + spare, host_blocks=34, max_model_len=64, groups=2)
    for i in range(2):
        h.add(f"r{i}", [i * 100 + k for k in range(60)], 4)
    steps = h.run(300)
    assert steps < 200 and h.manager.stats().preemptions <= 4
    h.drain()


@pytest.mark.parametrize("landing", Landing)
@pytest.mark.parametrize("device_blocks", range(40, 90, 5))
def test_loaded_requests_that_all_want_one_more_page_all_end(landing: Landing, device_blocks: int) -> None:
    """Each was admitted with what it needs to reach its first step, so none holds blocks for a step it cannot take."""
    h = Harness(device_blocks=device_blocks, host_blocks=34, max_model_len=64, groups=2, seats=6)
    admitted = []
    for i in range(6):
        req = h.add(f"r{i}", [i * 100 + k for k in range(20)], 5)
        if h.admit(req, landing, 20) is not None:
            admitted.append(req)
    assert admitted
    h.dispatch([])
    h.retire([])
    for req in admitted:
        assert h.finish_load(req.request_id) == 20
    h.step()
    assert all(req.computed >= 20 for req in admitted)
    assert not any(req.preemptions for req in admitted), "the first step finds its room"
    h.drain()
    assert len(h.finished) == 6


def test_a_request_that_waits_for_copies_says_so() -> None:
    """While a full window of spills is under way the scheduler must wait, not preempt; when they end it goes on."""
    h = Harness(device_blocks=least_blocks(2, 64, 8), host_blocks=18, max_model_len=64, groups=2)
    h.complete_each_step = False
    req = h.add("a", list(range(60)), 4)
    while h.step():
        pass
    for _ in range(5):
        assert h.manager.has_pending_reclamation() and h.manager.has_pending_work()
        assert h.step() == 0
    computed = req.computed
    h.complete_all()
    h.complete_each_step = True
    h.step()
    h.step()
    assert req.computed > computed and req.preemptions == 0
    h.drain()

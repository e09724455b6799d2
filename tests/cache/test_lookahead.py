"""Draft tokens count: in admission, in the rows planned, and in the size of hot regions."""

from __future__ import annotations

import pytest

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.config import CacheConfig
from hisparse.errors import ConfigError, InvariantError
from tests.cache.harness import needs, small_layout


def manager(lookahead_tokens: int, hot_rows: int = 20) -> KVCacheManager:
    return KVCacheManager(
        small_layout(groups=2), CacheConfig(block_size=4, device_blocks=90, hot_rows=hot_rows, hot_rows_max=hot_rows),
        num_host_blocks=30, max_model_len=60, max_seats=2, max_query_tokens=8, num_ranks=1, incarnation=5,
        lookahead_tokens=lookahead_tokens)


@pytest.mark.parametrize(("lookahead", "pages"), [(0, 2), (1, 3), (4, 3)])
def test_admission_reserves_the_rows_of_drafts(lookahead: int, pages: int) -> None:
    """7 tokens of prompt and the next one fill 2 pages of 4; a draft needs a third."""
    m = manager(lookahead)
    m.open("r", list(range(7)), max_tokens=20)
    fit = m.fits("r", m.prefix("r"), landing=None, chunk_tokens=7)
    assert needs(fit)["device"] >= pages * (1 + 2)
    before = m.stats().device_blocks_reserved
    assert m.admit("r", m.prefix("r"), chunk_tokens=7) is not None
    assert m.stats().device_blocks_reserved - before == pages * (1 + 2)
    assert m.allocate("r", 8 + lookahead), "the first decode step with its drafts"
    assert m.stats().device_blocks_reserved == 0
    m.check()


def test_drafts_beyond_the_last_token_are_not_counted() -> None:
    m = manager(4)
    m.open("r", list(range(7)), max_tokens=1)
    assert m.admit("r", m.prefix("r"), chunk_tokens=7) is not None
    assert m.stats().device_blocks_reserved == 2 * 3


def test_a_hot_region_must_hold_a_whole_verification_step() -> None:
    with pytest.raises(ConfigError, match="lookahead_tokens = 2"):
        manager(2, hot_rows=8)
    manager(2, hot_rows=12)


def test_steps_of_one_request_follow_each_other_in_flight() -> None:
    """The second starts where the first ends, drafts included; whatever is accepted, rows and spans stay right."""
    m = manager(3)
    m.open("r", list(range(6)), max_tokens=40)
    assert m.admit("r", m.prefix("r"), chunk_tokens=6) and m.allocate("r", 6)
    m.plan_step(1, [("r", 0, 6)])
    m.retire(1, {"r": 6})
    m.extend("r", [6])
    assert m.allocate("r", 4)
    m.plan_step(2, [("r", 6, 4)])
    with pytest.raises(InvariantError, match="scheduled for 4 tokens from position 9: it has 6 valid rows \\(10 planned\\)"):
        m.plan_step(3, [("r", 9, 4)])
    assert m.allocate("r", 4)
    command = m.plan_step(3, [("r", 10, 4)])
    assert command is not None
    (span,) = command.mirrors
    assert (span.first_page, len(span.host_blocks)) == (1, 3), "from row 7, certain by then, to row 13 at the furthest"
    m.retire(2, {"r": 8})
    assert m.computed_tokens("r") == 8 and m.core.live["r"].planned == 12
    m.extend("r", [7, 8])
    m.retire(3, {"r": 12})
    assert m.computed_tokens("r") == m.core.live["r"].planned == 12
    m.check()

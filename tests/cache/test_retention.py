"""Which prefixes are published: boundaries of an interval and of a conversation's turns."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.retention import Retention
from hisparse.config import CacheConfig
from hisparse.errors import ConfigError
from hisparse.types import AckKind, HiSparseWorkerOutput, TransferAck
from tests.cache.harness import small_layout

TOKENS = list(range(30))


def published(retention: Retention | None, *, finish_first: bool = False) -> list[int]:
    """Published pages of a request of 30 tokens (pages of 4: 7 whole ones) after each completed spill, in page order."""
    manager = KVCacheManager(
        small_layout(groups=1), CacheConfig(block_size=4, device_blocks=60, hot_rows=8, hot_rows_max=8),
        num_host_blocks=30, max_model_len=40, max_seats=2, max_query_tokens=32, num_ranks=1, incarnation=5)
    manager.open("r", TOKENS, max_tokens=4, retention=retention)
    assert manager.admit("r", manager.prefix("r"), chunk_tokens=30) and manager.allocate("r", 30)
    command = manager.plan_step(1, [("r", 0, 30)])
    assert command is not None and len(command.spills) == 7
    manager.retire(1, {"r": 30})
    if finish_first:
        manager.free("r")
    counts = []
    for spill in command.spills:
        ack = TransferAck(incarnation=5, rank=0, transfer_id=spill.id, kind=AckKind.COMPLETED, row_mask=0b1111)
        manager.on_worker_output([HiSparseWorkerOutput(rank=0, incarnation=5, acks=(ack,))])
        manager.check()
        counts.append(manager.stats().host_pages_published)
    manager.close("r")
    manager.open("again", TOKENS, max_tokens=4)
    assert manager.prefix("again").host_pages == counts[-1]
    return counts


@pytest.mark.parametrize("finish_first", [False, True])
@pytest.mark.parametrize(("retention", "counts"), [
    (None, [1, 2, 3, 4, 5, 6, 7]),
    (Retention(interval_tokens=12), [0, 0, 3, 3, 3, 6, 6]),
    (Retention(replay_boundaries=(9, 20)), [0, 2, 2, 2, 5, 5, 5]),
    (Retention(interval_tokens=16, replay_boundaries=(21,)), [0, 0, 0, 4, 5, 5, 5]),
    (Retention(interval_tokens=1), [1, 2, 3, 4, 5, 6, 7]),
    (Retention(interval_tokens=6), [1, 1, 3, 4, 4, 6, 7]),
    (Retention(), [0] * 7),
])
def test_a_prefix_is_published_up_to_a_boundary(
    retention: Retention | None, counts: list[int], finish_first: bool
) -> None:
    """Also by the acknowledgements that come after the request has finished."""
    assert published(retention, finish_first=finish_first) == counts


@given(interval=st.none() | st.integers(1, 40), boundaries=st.lists(st.integers(1, 60), max_size=4),
       limit=st.integers(0, 12), block_size=st.sampled_from([4, 8]))
def test_pages_is_the_longest_prefix_that_ends_at_a_boundary(
    interval: int | None, boundaries: list[int], limit: int, block_size: int
) -> None:
    marks = set(boundaries) | (set(range(interval, 200, interval)) if interval else set())
    want = max((mark // block_size for mark in marks if mark // block_size <= limit), default=0)
    assert Retention(interval_tokens=interval, replay_boundaries=tuple(boundaries)).pages(limit, block_size) == want


@pytest.mark.parametrize("bad", [{"interval_tokens": 0}, {"replay_boundaries": (4, 0)}])
def test_impossible_boundaries_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="at least 1 token"):
        Retention(**bad)  # type: ignore[arg-type]


def test_a_fork_keeps_the_retention_of_its_parent() -> None:
    manager = KVCacheManager(
        small_layout(groups=1), CacheConfig(block_size=4, device_blocks=60, hot_rows=8, hot_rows_max=8),
        num_host_blocks=30, max_model_len=40, max_seats=2, max_query_tokens=32, num_ranks=1, incarnation=5)
    manager.open("r", TOKENS, max_tokens=4, retention=Retention())
    assert manager.admit("r", manager.prefix("r"), chunk_tokens=30) and manager.allocate("r", 30)
    manager.plan_step(1, [("r", 0, 30)])
    manager.retire(1, {"r": 30})
    assert manager.fork("r", "child", max_tokens=4) is not None
    assert manager.core.live["child"].identity.retention == Retention()

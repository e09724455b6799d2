"""Hot groups of different sizes: what a region starts with, how it grows, and what goes back first."""

from __future__ import annotations

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.config import CacheConfig
from hisparse.types import HotRows, Landing, SeatReset
from tests.cache.fake_worker import flat
from tests.cache.harness import Harness, small_layout


def grown(**config: object) -> Harness:
    """A request whose pages are on host: 9 of them not resident."""
    h = Harness(device_blocks=300, host_blocks=60, max_model_len=64, groups=2, **config)
    req = h.add("a", list(range(44)), 20)
    assert h.admit(req, Landing.HOST, 44) is not None
    h.dispatch([])
    h.retire([])
    h.finish_load("a")
    return h


def test_a_region_starts_with_the_rows_of_each_group_and_stops_at_the_limit_of_each() -> None:
    h = grown(hot_rows=[8, 16], hot_rows_max=[12, 32])
    inc = h.manager.core.live["a"]
    sizes = []
    for _ in range(8):
        sizes.append([len(blocks) for blocks in inc.hot])
        h.step()
    assert sizes[0] == [2, 4]
    assert [2, 4] in sizes and [3, 5] in sizes and [3, 6] in sizes
    assert all(b - a == 2 for a, b in sizes if a < 3) and max(a for a, _ in sizes) == 3 and max(b for _, b in sizes) <= 8
    h.manager.check()
    h.drain()


def test_a_region_costs_the_sum_of_its_groups() -> None:
    layout = small_layout(groups=2)

    def watermark(**rows: object) -> int:
        manager = KVCacheManager(layout, CacheConfig(block_size=4, device_blocks=100, watermark=0.01, **rows),
                                 num_host_blocks=30, max_model_len=40, max_seats=2, max_query_tokens=8, num_ranks=1)
        return manager.core.watermark_blocks

    assert watermark(hot_rows=[8, 16]) == 2 + 4
    assert watermark(hot_rows_total=32) == 4 + 4
    assert watermark(hot_rows_total=32, hot_rows_weights=[0, 1]) == 1 + 7, "top_k for each, the rest by weight"


def test_what_a_level_added_goes_back_together_and_each_group_hears_of_its_own_rows() -> None:
    h = grown(hot_rows=[8, 16], hot_rows_max=[12, 32])
    inc = h.manager.core.live["a"]
    for _ in range(9):
        if [len(blocks) for blocks in inc.hot] == [3, 6]:
            break
        h.step()
    h.dispatch(h.schedule())
    h.manager.elastic.take_back(2)
    assert [len(blocks) for blocks in inc.hot] == [2, 4], "a block of group 1, then one of both"
    assert h.manager.core.hot is not None and h.manager.core.hot.elastic_blocks == 0
    h.manager.check()
    command = h.manager.plan_step(h.step_number + 1, [])
    assert command is not None
    assert set(command.hot_rows) == {HotRows(inc.seat, 0, 8), HotRows(inc.seat, 1, 16)}
    assert set(command.seat_resets) == {SeatReset(inc.seat, 8, -1, 0), SeatReset(inc.seat, 16, -1, 1)}
    hots = [group.group_id for group in h.layout.hots]
    assert {(u.group_id, u.num_pages) for u in flat(command.table_updates, h.layout) if u.group_id in hots} == {
        (hots[0], 2), (hots[1], 4)}

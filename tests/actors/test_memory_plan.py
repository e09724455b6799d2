"""The memory plan's arithmetic, with hot groups of one size and of several."""

from __future__ import annotations

import pytest

from hisparse.actors.memory_plan import MemoryPlan
from hisparse.config import load_config
from hisparse.errors import ConfigError


def plan(**cache: object) -> MemoryPlan:
    """The bundled checkpoint: top_k 256, three groups, blocks of 64 x 3 x 256 bytes; 8,192 tokens are 128 pages."""
    return MemoryPlan.of(load_config({"model": {"path": "recall"}, "cache": cache}, environ={}))


def test_one_size_for_every_group() -> None:
    got = plan()
    assert got.hot_rows == (832,) * 3 and got.hot_rows_max == (3328,) * 3
    assert got.hot_bytes == 3 * 13 * 64 * 3 * 256
    assert got.requests_hisparse == 2047 // (128 + 3 * 13 + 3 * 2)
    rows = dict(got.rows())
    assert rows["hot region per request"] == "1.8 MiB (832 rows per hot group)"
    assert rows["hot region grows to at most"] == "3,328 rows"


def test_sizes_by_group_are_summed_and_shown() -> None:
    got = plan(hot_rows=[256, 2048, 8192], hot_rows_max=[256, 2048, 32768])
    assert got.hot_rows == (256, 2048, 8192) and got.hot_rows_max == (256, 2048, 32768)
    assert got.hot_bytes == (4 + 32 + 128) * 64 * 3 * 256
    assert got.requests_hisparse == 2047 // (128 + 4 + 32 + 128 + 3 * 2)
    rows = dict(got.rows())
    assert rows["hot region per request"] == "7.7 MiB (256..8,192 rows, 10,496 in 3 hot groups)"
    assert rows["hot region grows to at most"] == "256..32,768 rows"
    assert [line.split()[-2:] for line in got.packing_text().splitlines()[-3:]] == [
        ["256", "0-1"], ["2,048", "2-3"], ["8,192", "4-5"]]
    assert got.asdict()["hot_rows"] == (256, 2048, 8192) and got.asdict()["packing"]["num_groups"] == 3


def test_without_hisparse_there_are_no_hot_rows() -> None:
    got = plan(enabled=False)
    assert got.hot_rows == got.hot_rows_max == () and got.hot_bytes == got.requests_hisparse == 0
    assert dict(got.rows())["hot region per request"] == "0.0 MiB (HiSparse is off)"
    assert "hot rows" not in got.packing_text()


def test_a_pool_too_small_for_the_sum_is_refused_with_the_rows() -> None:
    need = 1 + 128 + (4 + 32 + 128) + (2 + 8) * 3  # null, indexer, regions, tail and one chunk in every group
    assert plan(hot_rows=[256, 2048, 8192], device_blocks=need).device_blocks == need
    with pytest.raises(ConfigError, match=rf"256\.\.8,192 rows in 3 groups.*raise device_blocks to {need}"):
        plan(hot_rows=[256, 2048, 8192], device_blocks=need - 1)

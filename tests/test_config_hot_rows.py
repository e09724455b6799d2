"""Rows of hot regions per hot group: options, budget, limits, messages; and the warning about a wasteful layout."""

from __future__ import annotations

import logging
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.config import CacheConfig, hot_rows, hot_rows_max, kv_layout, load_config
from hisparse.config.loading import warn_once
from hisparse.errors import ConfigError
from hisparse.layout import KVCacheLayout, check_query_rows, rows_text, split_rows
from tests.test_layout import shape

LAYOUT = KVCacheLayout.build(shape(), block_size=64)  # top_k 32, three groups
BASE = {"model": {"path": "recall"}}


def cache(**options: object) -> CacheConfig:
    return load_config({**BASE, "cache": options}, environ={}).cache


# ---- hot_rows and hot_rows_max


def test_one_number_counts_for_every_hot_group() -> None:
    assert len(LAYOUT.hots) == 3
    assert hot_rows(cache(), LAYOUT) == (192,) * 3  # 3 * 32 + 64 = 160 -> 3 pages
    assert hot_rows(cache(hot_rows=32), LAYOUT) == (64,) * 3
    assert hot_rows_max(cache(), LAYOUT) == (768,) * 3
    assert hot_rows_max(cache(hot_rows=32, hot_rows_max=300), LAYOUT) == (256,) * 3
    wide = KVCacheLayout.build(shape(), block_size=64, num_groups=1)
    assert hot_rows(cache(), wide) == (192,) and hot_rows_max(cache(hot_rows=32768), wide) == (32768,)


def test_a_list_has_one_number_per_hot_group() -> None:
    config = cache(hot_rows=[32, 129, 20_000])
    assert config.hot_rows == (32, 129, 20_000) and load_config(
        {**BASE, "cache": config.model_dump()}, environ={}).cache == config
    assert hot_rows(config, LAYOUT) == (64, 192, 20_032)
    assert hot_rows_max(config, LAYOUT) == (256, 768, 32_768)
    assert hot_rows_max(cache(hot_rows=[32, 129, 64], hot_rows_max=[64, 200, 1000]), LAYOUT) == (64, 192, 960)


@pytest.mark.parametrize(("options", "words"), [
    ({"hot_rows": 31}, "cache.hot_rows must be at least top_k = 32 rows of this model, got 31"),
    ({"hot_rows": 40_000}, "cache.hot_rows must be at most 32768"),
    ({"hot_rows": [64, 31, 64]}, r"cache.hot_rows\[1\] must be at least top_k = 32 .*got 31"),
    ({"hot_rows": [64, 64, 32_769]}, r"cache.hot_rows\[2\] must be at most 32768 rows, got 32769"),
    ({"hot_rows": [64, 128]}, "cache.hot_rows has 2 entries.* has 3 hot groups.*--dry-run --set cache.hot_rows=null"),
    ({"hot_rows": [64] * 4}, "has 4 entries"),
    ({"hot_rows_total": 960, "hot_rows_weights": [1.0, 2.0]},
     "cache.hot_rows_weights has 2 entries.* 3 hot groups.*--set cache.hot_rows_weights=null"),
    ({"hot_rows_total": 191},
     "hot_rows_total = 191 rows cannot give each of 3 hot groups top_k = 32 rows .1 pages of 64.*at least 192"),
])
def test_rows_that_cannot_be(options: dict[str, object], words: str) -> None:
    config = cache(**options)
    for function in (hot_rows, hot_rows_max):
        with pytest.raises(ConfigError, match=words):
            function(config, LAYOUT)


@pytest.mark.parametrize(("options", "words"), [
    ({"hot_rows_max": 128}, r"hot_rows_max of hot group 0 must be in 192\.\.32768 .*got 128"),
    ({"hot_rows_max": 40_000}, r"192\.\.32768"),
    ({"hot_rows": [64, 640, 64], "hot_rows_max": 512}, r"hot group 1 must be in 640\.\.32768 .*got 512.*a list"),
    ({"hot_rows": 64, "hot_rows_max": [64, 64, 63]}, r"hot group 2 must be in 64\.\.32768 .*got 0"),
    ({"hot_rows_max": [1024]}, "cache.hot_rows_max has 1 entries.* 3 hot groups"),
])
def test_limits_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hot_rows_max(cache(**options), LAYOUT)


@pytest.mark.parametrize(("options", "words"), [
    ({"hot_rows": "many"}, "cache.hot_rows: must be a number of rows >= 1, or a list of them.*got 'many'"),
    ({"hot_rows": [64, 1.5]}, "cache.hot_rows: must be a number"),
    ({"hot_rows": []}, "cache.hot_rows: must be a number"),
    ({"hot_rows": True}, "cache.hot_rows: must be a number"),
    ({"hot_rows": 0}, "cache.hot_rows: must be a number"),
    ({"hot_rows_max": [64, 0, 64]}, "cache.hot_rows_max: must be a number"),
    ({"hot_rows_total": 0}, "cache.hot_rows_total: .*greater than or equal to 1"),
    ({"hot_rows": 64, "hot_rows_total": 960}, r"hot_rows \(64\) and hot_rows_total \(960\) exclude each other"),
    ({"hot_rows_weights": [1, 2, 3]}, "hot_rows_weights split hot_rows_total, which is not set"),
    ({"hot_rows_total": 960, "hot_rows_weights": [0, 0, 0]}, "must not all be 0"),
    ({"hot_rows_total": 960, "hot_rows_weights": [1, -2, 3]}, r"hot_rows_weights.1: .*greater than or equal to 0"),
    ({"hot_rows_total": 960, "hot_rows_weights": [1, float("nan"), 3]}, r"hot_rows_weights.1: .*finite"),
    ({"num_groups": 0}, "cache.num_groups"),
])
def test_options_that_are_no_rows(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        cache(**options)
    assert str(caught.value).count("\n") == 1, "one problem, one line"


def test_the_environment_takes_lists() -> None:
    environ = {"HISPARSE_CACHE__HOT_ROWS": "[128, 256]", "HISPARSE_CACHE__HOT_ROWS_MAX": "512"}
    config = load_config(BASE, environ=environ)
    assert (config.cache.hot_rows, config.cache.hot_rows_max) == ((128, 256), 512)
    assert config.for_role("prefill").cache == config.for_role("decode").cache == config.cache
    instead = {**environ, "HISPARSE_CACHE__HOT_ROWS": "null", "HISPARSE_CACHE__HOT_ROWS_TOTAL": "4096",
               "HISPARSE_CACHE__HOT_ROWS_WEIGHTS": "[1, 0.5]"}
    budget = load_config({**BASE, "cache": {"hot_rows": 64}}, environ=instead).cache
    assert (budget.hot_rows, budget.hot_rows_total, budget.hot_rows_weights) == (None, 4096, (1.0, 0.5))


# ---- a budget


def test_a_budget_is_split_by_hand_computed_shares() -> None:
    assert hot_rows(cache(hot_rows_total=960), LAYOUT) == (320, 320, 320)
    # 16 pages, one each; of the other 13: 4.33 each, the odd one to the lowest group
    assert hot_rows(cache(hot_rows_total=16 * 64 + 63), LAYOUT) == (6 * 64, 5 * 64, 5 * 64)
    # 13 pages in shares of 1, 36 and 2: 0.33, 12 and 0.67
    assert hot_rows(cache(hot_rows_total=16 * 64, hot_rows_weights=[1, 36, 2]), LAYOUT) == (64, 13 * 64, 2 * 64)
    assert hot_rows(cache(hot_rows_total=192, hot_rows_weights=[9, 1, 1]), LAYOUT) == (64, 64, 64)
    assert hot_rows(cache(hot_rows_total=16 * 64, hot_rows_weights=[0, 1, 1]), LAYOUT) == (64, 8 * 64, 7 * 64)
    assert split_rows(1000, (1, 3), top_k=128, block_size=64) == (320, 640)  # the docstring's example


def test_a_full_group_leaves_its_share_to_the_others() -> None:
    """1,024 pages = three groups of 512 at most: the first is full, the rest is split 1 : 3."""
    assert split_rows(1024 * 64, (1000, 1, 3), top_k=64, block_size=64) == (32_768, 129 * 64, 383 * 64)
    assert split_rows(10**9, (1, 2, 3), top_k=64, block_size=64) == (32_768,) * 3
    assert split_rows(10**9, (1, 0), top_k=64, block_size=64) == (32_768, 64), "a group of weight 0 gets top_k"
    with pytest.raises(ConfigError, match="top_k = 40000 rows, more than the 32768"):
        split_rows(10**9, (1, 0), top_k=40_000, block_size=64)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3_000_000), st.lists(st.floats(0, 1e6), min_size=1, max_size=61).filter(any),
       st.sampled_from([1, 32, 60, 2048]), st.sampled_from([4, 16, 64]))
def test_a_split_keeps_the_rules(total: int, weights: list[float], top_k: int, page: int) -> None:
    least = -(-top_k // page) * page
    if total < least * len(weights) // page * page:
        with pytest.raises(ConfigError, match=f"at least {least * len(weights)}"):
            split_rows(total, weights, top_k=top_k, block_size=page)
        return
    rows = split_rows(total, weights, top_k=top_k, block_size=page)
    assert rows == split_rows(total, list(weights), top_k=top_k, block_size=page)
    assert sum(rows) <= total and all(least <= count <= 32_768 and count % page == 0 for count in rows)
    open_groups = [g for g, weight in enumerate(weights) if weight > 0 and rows[g] < 32_768]
    if open_groups:
        assert total - sum(rows) < page, "rows are left over although a group could take them"
        for g in open_groups:
            for other in open_groups:
                if weights[g] >= weights[other]:
                    assert rows[g] >= rows[other] - page, "a heavier group is behind by more than one page"
        scale = sum(rows[g] - least for g in open_groups) / sum(Fraction(weights[g]) for g in open_groups)
        for g in open_groups:
            assert abs(rows[g] - least - Fraction(weights[g]) * scale) <= page, "off its share by more than a page"


@pytest.mark.parametrize("factor", [1.0, 2.0**-40, 7.0, 1e30])
def test_only_the_ratio_of_weights_counts(factor: float) -> None:
    """Of 40 pages one each, the other 37 as 7.4, 11.1 and 18.5."""
    weights = [factor * weight for weight in (2.0, 3.0, 5.0)]
    assert split_rows(64 * 40, weights, top_k=64, block_size=64) == (8 * 64, 12 * 64, 20 * 64)


# ---- speculation


def test_verification_rows_must_fit_every_group() -> None:
    check_query_rows((6208, 6208), 2048, 0)
    check_query_rows((6208, 6144), 2048, 2)
    with pytest.raises(ConfigError) as caught:
        check_query_rows((8256, 6143, 2048), 2048, 2)
    text = str(caught.value)
    assert "lookahead_tokens = 2" in text and "6144 different rows (top_k = 2048)" in text
    assert "hot group 1 has 6143, group 2 has 2048" in text and "group 0" not in text and "raise cache.hot_rows" in text
    with pytest.raises(ConfigError, match="group 3 has 4096 and 57 more are too small"):
        check_query_rows((4096,) * 61, 2048, 2)
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        check_query_rows((8256,), 2048, -1)
    check_query_rows((), 2048, 5)  # HiSparse is off


def test_rows_for_people() -> None:
    assert (rows_text((64, 64)), rows_text((2112, 8256, 4096)), rows_text(())) == (
        "64 rows", "2,112..8,256 rows", "no rows")


# ---- the layout's warning


def test_a_wasteful_layout_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    wasteful = load_config({**BASE, "cache": {"num_groups": 1}}, environ={})
    with caplog.at_level(logging.WARNING, logger="hisparse"):
        for _ in range(3):
            assert kv_layout(wasteful).num_resident_groups == 1
        assert kv_layout(load_config(BASE, environ={})).waste_fraction == 0.0
    (record,) = caplog.records
    assert record.name == "hisparse"
    assert "33.3% of the packed device bytes" in record.message and "cache.num_groups = 3 wastes 0.0%" in record.message
    with pytest.raises(ConfigError, match=r"num_groups must be in 1\.\.3"):
        kv_layout(load_config({**BASE, "cache": {"num_groups": 4}}, environ={}))

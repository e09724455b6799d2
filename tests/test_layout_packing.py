"""Packing of index groups into blocks: hand-computed numbers of real models, the optimum, the invariants, the report."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.config import CacheConfig, hot_rows
from hisparse.errors import ConfigError
from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.layout.packing import best_packing, pack
from hisparse.layout.waste import layer_ranges
from tests.test_layout import GLM52, V32, shape

GLM51 = {**GLM52, "index_topk_freq": 1, "index_skip_topk_offset": 0}


def real(config: dict[str, object], dtype: str = "bfloat16", num_groups: int | None = None) -> KVCacheLayout:
    return KVCacheLayout.build(ModelShape.from_hf_config(config), dtype=dtype, num_groups=num_groups)


# ---- real models. Pages of 64: a layer is 64 x 576 x 2 = 73,728 bytes, an indexer layer 64 x 128 x 2 = 16,384.


def test_glm52_packs_pairs_of_four_layers() -> None:
    """Nineteen index groups of 4 layers and two of 1: nine pairs, and {0}, {1}, {2-5} together."""
    layout = real(GLM52)
    assert layout.block_bytes == 8 * 73_728 == 589_824
    assert [group.layers for group in layout.residents] == [tuple(range(6)), *(tuple(range(i, i + 8)) for i in range(6, 78, 8))]
    report = layout.waste_report()
    assert (report.num_groups, report.used_bytes + report.wasted_bytes) == (10, 11 * 589_824)
    assert report.groups[0].used_bytes == 21 * 16_384 == 344_064 and report.groups[0].wasted_bytes == 245_760
    assert [group.wasted_bytes for group in report.groups[1:]] == [2 * 73_728] + [0] * 9
    assert layout.waste_fraction == (245_760 + 147_456) / 6_488_064 and layout.waste_advice() is None


def test_glm52_in_twenty_groups_fills_the_indexer_block_and_wastes_the_others() -> None:
    """21 x 16,384 bytes are 298.7 rows of 1,152: blocks of 299 rows, of which 4 layers fill 256."""
    layout = real(GLM52, num_groups=20)
    assert layout.block_bytes == 299 * 1152 == 344_448 and layout.num_resident_groups == 20
    assert layout.waste_fraction == pytest.approx(1 - (344_064 + 78 * 73_728) / (21 * 344_448))
    advice = layout.waste_advice()
    assert advice is not None and "15.7%" in advice and "cache.num_groups = 10 wastes 6.1%" in advice


@pytest.mark.parametrize(("num_groups", "mebibytes"), [(10, 1709), (20, 1323)])
def test_glm52_host_backed_request_of_128k(num_groups: int, mebibytes: int) -> None:
    """2,048 indexer blocks, and 97 pages of hot rows and 2 of the tail in every group: small blocks take less here."""
    layout = real(GLM52, num_groups=num_groups)
    (rows, *_) = hot_rows(CacheConfig(), layout)
    blocks = layout.pages(131_072) + (layout.hot_blocks(rows) + 2) * num_groups
    assert (rows, blocks) == (6208, 2048 + 99 * num_groups) and round(layout.device_bytes(blocks) / 2**20) == mebibytes


@pytest.mark.parametrize(("config", "groups", "layers", "fraction"), [
    (V32, 4, [16, 16, 16, 13], 1 - (61 * 16_384 + 61 * 73_728) / (5 * 16 * 73_728)),
    (GLM51, 4, [20, 20, 20, 18], 1 - (78 * 16_384 + 78 * 73_728) / (5 * 20 * 73_728)),
], ids=["v32", "glm51"])
def test_an_indexer_in_every_layer_makes_few_large_groups(config: dict[str, object], groups: int, layers: list[int],
                                                          fraction: float) -> None:
    """One group per layer would waste nine tenths: the indexer block alone is 13.6 (V3.2) or 17.3 layers long."""
    layout = real(config)
    assert [len(group.layers) for group in layout.residents] == layers and layout.num_resident_groups == groups
    assert layout.waste_fraction == pytest.approx(fraction) and layout.waste_fraction < 0.07
    assert real(config, num_groups=len(layout.shape.index_groups)).waste_fraction > 0.9


@pytest.mark.parametrize("config", [GLM52, V32, GLM51], ids=["glm52", "v32", "glm51"])
def test_float32_packs_like_bfloat16(config: dict[str, object]) -> None:
    """Rows and keys double together."""
    half, full = real(config), real(config, "float32")
    assert full.block_bytes == 2 * half.block_bytes and full.residents == half.residents
    assert full.waste_report().fraction == half.waste_report().fraction


# ---- the optimum


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.sampled_from([1, 16, 72]), st.integers(0, 300),
       st.sampled_from([1, 16, 48]))
def test_no_packing_has_fewer_bytes_per_page(sizes: list[int], layer_bytes: int, indexer_bytes: int, unit: int) -> None:
    def cost(bins: list[list[int]]) -> int:
        block = max(max(sum(sizes[i] for i in members) for members in bins) * layer_bytes, indexer_bytes)
        return (len(bins) + 1) * math.ceil(block / unit) * unit

    every = [(cost(bins), len(bins)) for bins in partitions(list(range(len(sizes))))]
    for num_groups in (None, *range(1, len(sizes) + 1)):
        got = best_packing(sizes, layer_bytes=layer_bytes, indexer_bytes=indexer_bytes, unit_bytes=unit,
                           num_groups=num_groups)
        allowed = [pair for pair in every if num_groups in (None, pair[1])]
        assert ((len(got.bins) + 1) * got.block_bytes, len(got.bins)) == min(allowed)
        assert cost([list(members) for members in got.bins]) == (len(got.bins) + 1) * got.block_bytes
        assert sorted(i for members in got.bins for i in members) == list(range(len(sizes)))


def test_longest_first_alone_would_waste_more() -> None:
    """3, 3, 2, 2, 2 in two bins: longest first gives 7 and 5, the best is 6 and 6."""
    assert pack([3, 3, 2, 2, 2], 2) == [[0, 1], [2, 3, 4]]
    assert pack([3, 2, 3, 2, 2], 2) == [[0, 2], [1, 3, 4]]
    assert pack([1, 1, 4, 4, 2], 2) == [[0, 1, 2], [3, 4]], "neighbours stay together where that costs nothing"
    assert pack([1] * 6, 4) == [[0, 1], [2, 3], [4], [5]], "no bin is empty"
    assert pack([1] * 6, 4, free=3) == [[0, 1, 2], [3], [4], [5]]


def test_packing_of_large_and_uneven_models_is_quick() -> None:
    draw = random.Random(3)
    began = time.process_time()
    for _ in range(20):
        sizes = [draw.choice([1, 2, 3, 5, 7, 11]) for _ in range(60)]
        layer, indexer = 64 * 1152, len(sizes) * 64 * 256
        first, again = (best_packing(sizes, layer_bytes=layer, indexer_bytes=indexer, unit_bytes=1152) for _ in range(2))
        assert first == again
    assert time.process_time() - began < 5.0


def test_num_groups_out_of_range_is_refused() -> None:
    for num_groups in (0, 4):
        with pytest.raises(ConfigError, match=rf"1\.\.3 .*got {num_groups}"):
            KVCacheLayout.build(shape(), num_groups=num_groups)


# ---- invariants


@st.composite
def layouts(draw: st.DrawFn) -> KVCacheLayout:
    kinds = "f" + draw(st.text("fs", max_size=14))
    block_size = draw(st.sampled_from([4, 16, 64]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    num_groups = draw(st.one_of(st.none(), st.integers(1, kinds.count("f"))))
    model = shape(len(kinds), kinds, latent=draw(st.sampled_from([16, 64, 512])), rope=draw(st.sampled_from([8, 64])),
                  index=draw(st.sampled_from([4, 32, 128])))
    return KVCacheLayout.build(model, block_size=block_size, dtype=dtype, num_groups=num_groups,
                               indexer_dtype=draw(st.sampled_from([None, "float32", "bfloat16", "uint8"])))


@settings(max_examples=150, deadline=None)
@given(layouts(), st.data())
def test_every_layer_has_rows_of_its_own_in_one_group(layout: KVCacheLayout, data: st.DataObject) -> None:
    layers = range(layout.shape.num_layers)
    for groups in (layout.residents, layout.hots):
        assert sorted(layer for group in groups for layer in group.layers) == list(layers)
        assert sorted(i for group in groups for i in group.index_groups) == list(range(len(layout.shape.index_groups)))
        for group in groups:
            assert group.block_pool_id == layout.indexer.block_pool_id == 0
            members = [layout.shape.index_groups[i].layers for i in group.index_groups]
            assert group.layers == tuple(layer for layers_of in members for layer in layers_of), "whole index groups"
    assert [(r.layers, r.index_groups) for r in layout.residents] == [(h.layers, h.index_groups) for h in layout.hots]
    assert [group.group_id for group in layout.groups] == list(range(2 + 2 * layout.num_resident_groups))
    assert layout.source.block_pool_id is None and layout.source.layers == tuple(layers)
    for g, group in enumerate(layout.residents):
        assert {layout.layer_group[layer] for layer in group.layers} == {g}

    # offsets fit the block and do not overlap: each row of a block has at most one owner
    assert layout.block_bytes == layout.rows_per_block * layout.row.row_bytes and layout.block_bytes % 16 == 0
    assert layout.indexer_page_bytes <= layout.block_bytes
    owner = np.full((layout.num_resident_groups, layout.rows_per_block), -1)
    for layer in layers:
        first = layout.layer_row_offset[layer]
        assert layout.layer_byte_offset(layer) == first * layout.row.row_bytes
        mine = owner[layout.layer_group[layer], first : first + layout.block_size]
        assert len(mine) == layout.block_size and (mine == -1).all(), f"layer {layer} overlaps or leaves the block"
        mine[:] = layer

    # flat row ids, in blocks that belong to one group each, resident and hot alike: never two (layer, row) with one id
    num_blocks = 1 + 2 * layout.num_resident_groups
    groups = data.draw(st.permutations(list(layout.residents + layout.hots)))
    seen: dict[int, tuple[int, int]] = {}
    for block, group in enumerate(groups, start=1):
        for layer in group.layers:
            for row in (0, 1, layout.block_size - 1):
                flat = block * layout.rows_per_block + layout.layer_row_offset[layer] + row
                assert layout.rows_per_block <= flat < num_blocks * layout.rows_per_block
                assert seen.setdefault(flat, (block, layer)) == (block, layer)


@settings(max_examples=50, deadline=None)
@given(layouts())
def test_the_waste_report_adds_up(layout: KVCacheLayout) -> None:
    report = layout.waste_report()
    assert [group.name for group in report.groups] == ["indexer", *map(str, range(layout.num_resident_groups))]
    assert all(group.used_bytes + group.wasted_bytes == report.block_bytes == layout.block_bytes for group in report.groups)
    assert report.groups[0].used_bytes == layout.indexer_page_bytes and report.groups[0].layers == layout.indexer.layers
    assert [group.layers for group in report.groups[1:]] == [group.layers for group in layout.residents]
    assert sum(group.used_bytes for group in report.groups[1:]) == layout.host_block_bytes
    assert report.fraction == pytest.approx(
        sum(group.fraction for group in report.groups) / len(report.groups)) and 0 <= report.fraction < 1
    assert (layout.waste_advice() is None) == (layout.waste_fraction <= 0.1)
    lines = report.text([123_456] * layout.num_resident_groups).splitlines()
    assert max(map(len, lines)) <= 80


# ---- the report


def test_the_table_names_layers_and_rows() -> None:
    text = real(GLM52).waste_report().text([2112] * 9 + [32768])
    assert text.splitlines()[0] == "10 groups, blocks of 589,824 bytes, 6.1% of a page holds nothing"
    assert "0            442,368      147,456  25.0%    2,112  0-5\n" in text
    assert text.endswith("9            589,824            0   0.0%   32,768  70-77")
    assert "indexer      344,064      245,760  41.7%           0-2, 6, 10, 14" in text
    assert "hot rows" not in real(GLM52).waste_report().text()
    for config in (GLM52, V32, GLM51):
        for num_groups in (None, 1, 21):
            lines = real(config, num_groups=num_groups).waste_report().text().splitlines()
            assert max(map(len, lines)) <= 80


def test_layer_ranges() -> None:
    assert layer_ranges((0, 1, 2, 6, 8, 9)) == "0-2, 6, 8-9" and layer_ranges((5,)) == "5"


def test_advice_says_what_to_change_or_that_nothing_helps() -> None:
    assert "cache.num_groups = 10 wastes 6.1%" in str(real(GLM52, num_groups=5).waste_advice())
    lonely = ModelShape(model_type="deepseek_v32", num_layers=1, num_heads=1, kv_lora_rank=64, rope_dim=0, index_head_dim=16,
                        top_k=32, max_positions=64, vocab_size=8, index_groups=(IndexGroup(leader=0, layers=(0,)),))
    layout = KVCacheLayout.build(lonely)
    assert layout.waste_fraction == pytest.approx(0.375)  # an indexer block uses a quarter, the resident block all
    assert "no other cache.num_groups or cache.block_size wastes less" in str(layout.waste_advice())
    # rows of 128 bytes; keys of 200: a page of 4 rounds 800 bytes up to 896, a page of 64 fills its 12,800
    small = KVCacheLayout.build(shape(1, "f", latent=64, rope=0, index=100), block_size=4, dtype="bfloat16")
    assert small.waste_fraction == pytest.approx(1 - (800 + 512) / (2 * 896))
    assert "cache.num_groups = 1 with cache.block_size = 64 wastes 18.0%" in str(small.waste_advice())

"""Page copies of the reference against copies of single byte ranges, over whole pools."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.ops.page_list import ListRules, page_list, pair_list
from hisparse.ops.reference import PageCopier
from tests.ops.page_world import POISON, Pools, as_rows, distinct, make_layout

LAYOUTS = {
    "bfloat16": make_layout(),
    "float32": make_layout(dtype="float32", block_size=8),
    "fp8_ds_mla": make_layout(row_format="fp8_ds_mla"),
    "one group": make_layout(num_groups=1),
}
DEVICE, HOST = 30, 20


@pytest.fixture(params=LAYOUTS)
def pools(request):
    return Pools.random(LAYOUTS[request.param], DEVICE, HOST)


def random_pages(pools, count, seed=1, whole=False):
    """Distinct host blocks, and device blocks distinct over all groups."""
    rng, groups, size = np.random.default_rng(seed), pools.layout.num_resident_groups, pools.layout.block_size
    blocks = np.array(distinct(count * groups, DEVICE, rng)).reshape(count, groups)
    return page_list(distinct(count, HOST, rng), blocks, size if whole else rng.integers(0, size + 1, count))


def same(got, want):
    assert torch.equal(got.device, want.device) and torch.equal(got.host, want.host)


@pytest.mark.parametrize("operation", ["spill", "restore"])
def test_between_device_and_host(pools, operation):
    for count, seed in ((1, 0), (9, 1), (0, 2)):
        pages, want = random_pages(pools, count, seed), pools.clone()
        getattr(want, operation)(pages)
        getattr(PageCopier(pools.layout, pools.rows, pools.host_rows), operation)(pages)
        same(pools, want)


@pytest.mark.parametrize("layered", [True, False])
def test_scatter_fills_the_host_pages_and_blocks_that_are_named(pools, layered):
    pages = random_pages(pools, 7)
    pages[[1, 4], 2:] = 0
    pages[5, -1] = 0
    pages[[2, 4], 1] = 0
    staging = torch.randint(0, 256, (9 * pools.layout.staged_page_bytes + 32,), dtype=torch.uint8)
    want = pools.clone()
    want.scatter(staging, pages, layered, 9)
    PageCopier(pools.layout, pools.rows, pools.host_rows).scatter(staging, pages, layered=layered, slot_pages=9)
    same(pools, want)


def test_copies_for_forks(pools):
    rng, copier, want = np.random.default_rng(4), PageCopier(pools.layout, pools.rows, pools.host_rows), pools.clone()
    blocks = pair_list(np.array(distinct(12, DEVICE, rng)).reshape(-1, 2), 1)
    hosts = pair_list(np.array(distinct(12, HOST, rng)).reshape(-1, 2), [0, 1, 2, 3, 4, 1])
    copier.copy_blocks(blocks)
    copier.copy_host_pages(hosts)
    want.copy_blocks(blocks)
    want.copy_host_pages(hosts)
    same(pools, want)


@pytest.mark.parametrize("copy_resident", [False, True])
def test_gather_is_in_the_order_of_positions(pools, copy_resident):
    layout, rng = pools.layout, np.random.default_rng(5)
    source, resident = (torch.zeros(3, 12, dtype=torch.int32) for _ in range(2))
    source[1, 2:9] = torch.tensor(distinct(7, HOST, rng))
    resident[1, [3, 6]] = torch.tensor(distinct(2, DEVICE, rng), dtype=torch.int32)
    source[1, 6] = 0
    copier, size = PageCopier(layout, pools.rows, pools.host_rows), layout.block_size
    for layer in range(layout.shape.num_layers):
        raw = torch.full((8, layout.layer_page_bytes), POISON, dtype=torch.uint8)
        copier.gather_pages(layer, 1, source, resident, as_rows(layout, raw), first_page=2, num_pages=7,
                            copy_resident=copy_resident)
        for place in range(8):
            block, host = int(resident[1, 2 + place]), int(source[1, 2 + place])
            if place == 7 or (block and not copy_resident):
                assert bool((raw[place] == POISON).all())
            else:
                assert torch.equal(raw[place], pools.page(layer, block) if block else pools.host[layer, host])
    assert size * 8 == as_rows(layout, raw).shape[0]
    source[1, 4] = 0
    with pytest.raises(InvariantError, match="page 4 of seat 1 is neither"):
        copier.gather_pages(0, 1, source, resident, as_rows(layout, raw), first_page=2, num_pages=7)
    with pytest.raises(InvariantError, match="page 3 of seat 1 is neither"):
        copier.gather_pages(0, 1, None, torch.zeros_like(resident), as_rows(layout, raw), first_page=3, num_pages=1)
    with pytest.raises(InvariantError, match=r"pages 8\.\.13 are not in a table of 12"):
        copier.gather_pages(0, 1, source, resident, as_rows(layout, raw), first_page=8, num_pages=5)
    with pytest.raises(InvariantError, match="a workspace for"):
        copier.gather_pages(0, 1, source, resident, as_rows(layout, raw), first_page=2, num_pages=9)


@pytest.mark.parametrize(("column", "value", "words"), [
    (0, 5, "rows 5, outside 0..4"), (0, -1, "rows -1"), (1, 0, r"host block 0, outside 1\.\.19"), (1, 20, "host block 20"),
    (2, 0, r"device block 0, outside 1\.\.29"), (3, 30, "device block 30"),
])
def test_ids_outside_the_pools_are_refused(column, value, words):
    pools = Pools.random(LAYOUTS["bfloat16"], DEVICE, HOST)
    copier, before = PageCopier(pools.layout, pools.rows, pools.host_rows), pools.clone()
    pages = random_pages(pools, 4, whole=True)
    pages[2, column] = value
    for operation in (copier.spill, copier.restore):
        with pytest.raises(InvariantError, match=words):
            operation(pages)
    with pytest.raises(InvariantError, match=r"int32 \[m, 4\], got int64"):
        copier.spill(pages.astype(np.int64))
    with pytest.raises(InvariantError, match=r"int32 \[m, 4\]"):
        copier.spill(pages[:, :3])
    staging = torch.zeros(3 * pools.layout.staged_page_bytes, dtype=torch.uint8)
    with pytest.raises(InvariantError, match=r"4 pages from a slot of 3|a page list"):
        copier.scatter(staging, pages, layered=True, slot_pages=3)
    for operation, pair in ((copier.copy_blocks, (3, 0)), (copier.copy_blocks, (30, 1)), (copier.copy_host_pages, (1, 20))):
        with pytest.raises(InvariantError, match="block (0|20|30), outside 1"):
            operation(pair_list([pair], 1))
    same(pools, before)


@pytest.mark.parametrize(("at", "column", "value"), [(0, 2, 30), (1023, 1, 0), (1024, 3, -5), (2499, 0, 5)])
def test_long_lists_are_checked_to_their_end(at, column, value):
    pools = Pools.random(LAYOUTS["bfloat16"], DEVICE, HOST)
    rules, pages = ListRules(pools.layout, DEVICE, HOST), np.repeat(random_pages(pools, 1), 2500, axis=0)
    rules.check_pages(pages)
    pages[at, column] = value
    with pytest.raises(InvariantError, match=rf" {value}, outside"):
        rules.check_pages(pages)
    rules.check_pages(pages[:at])
    rules.check_pages(pages[at + 1 :])

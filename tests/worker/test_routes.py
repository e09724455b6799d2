"""B01: distinct values written through every layer are read back by every route. The oracle is arithmetic."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from hisparse.config import CacheConfig
from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.types import AckKind, BlockTableUpdate, PageCopy, PageRestore, SeatReset, SparseKVPageTransfer
from hisparse.worker import HostPool, RowBatch, build_worker
from tests.worker.rig import BLOCK, Rig, acked, make_layout, make_shape


def value(layer, positions):
    return 1000.0 * layer + positions


def resident_tables(rig, seat, first, pages):
    """`pages` fresh blocks per resident group for one seat; every group gets blocks of its own."""
    groups = rig.layout.num_resident_groups
    return {(seat, g): tuple(first + g * pages + i for i in range(pages)) for g in range(groups)}


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.shutdown()


def filled(rig, *, tokens=10, mirrored=True, spill=None):
    """Seat 1 holds `tokens` positions in resident pages 1.. and host pages 1.., written by a prefill chunk."""
    pages = -(-tokens // BLOCK)
    tables = resident_tables(rig, 1, 1, pages)
    host = tuple(range(1, 1 + pages))
    batch = RowBatch.build([1] * tokens, range(tokens), is_prefill=True)
    spills = ()
    if spill is not None:
        spills = tuple(
            SparseKVPageTransfer(
                id=100 + page,
                host_block=host[page],
                copy_bytes=spill,
                device_blocks=tuple(tables[1, g][page] for g in range(rig.layout.num_resident_groups)),
            )
            for page in range(tokens // BLOCK)
        )
    output = rig.step(
        lambda: rig.append(batch, value),
        resident=tables,
        source={1: host},
        mirrors={1: host} if mirrored else {},
        new_host=host,
        new_device=tuple(b for ids in tables.values() for b in ids),
        spills=spills,
    )
    return tables, host, output


def go_hot(rig, seat=1, first=40):
    """Drops every resident page of a seat and gives it a hot region of 8 rows in each group."""
    groups = range(rig.layout.num_resident_groups)
    rig.step(
        resident={(seat, g): () for g in groups},
        hot={(seat, g): (first + 2 * g, first + 2 * g + 1) for g in groups},
        hot_rows={(seat, g): 8 for g in groups},
    )


def test_b01_three_packed_layers_by_every_route():
    """The report's own numbers: slot 5 of layer 0 is 5 by the resident, hot and host routes, never 2005."""
    rig = Rig(make_layout(((0,), (1,), (2,)), num_groups=1), device_blocks=12, host_blocks=8)
    assert rig.layout.num_resident_groups == 1
    _, host, _ = filled(rig, tokens=8, mirrored=False, spill=True)
    assert [rig.attended_value(layer, 1, 5) for layer in range(3)] == [5.0, 1005.0, 2005.0]
    rig.finish_copies()
    assert [float(rig.host.rows(layer)[host[1] * BLOCK + 1][0]) for layer in range(3)] == [5.0, 1005.0, 2005.0]
    go_hot(rig, first=8)
    assert [rig.attended_value(layer, 1, 5) for layer in range(3)] == [5.0, 1005.0, 2005.0]
    rig.shutdown()


def test_b01_every_layer_of_every_group_by_every_route(rig):
    """Index groups with followers, two packed groups, all positions: resident, plain, prefill, mirror, hot."""
    layers, tokens = range(rig.layout.shape.num_layers), 10
    assert rig.layout.num_resident_groups == 2 and len(set(rig.layout.layer_row_offset)) > 2
    filled(rig, tokens=tokens)
    want = {(layer, p): value(layer, p) for layer in layers for p in range(tokens)}
    for kind in ("decode", "plain", "prefill"):
        assert {(layer, p): rig.attended_value(layer, 1, p, kind) for layer, p in want} == want, kind
    host = {(layer, p): float(rig.host.rows(layer)[(1 + p // BLOCK) * BLOCK + p % BLOCK][0]) for layer, p in want}
    assert host == want
    go_hot(rig)
    for kind in ("decode", "decode", "prefill"):  # missed, then hot, then gathered
        assert {(layer, p): rig.attended_value(layer, 1, p, kind) for layer, p in want} == want, kind
    with pytest.raises(InvariantError, match="seat 1, position 9 is not resident"):
        rig.attended_value(0, 1, 9, "plain")


def test_spilled_bytes_equal_mirrored_rows():
    """A page spilled with bytes and the same page mirrored row by row are byte-equal on the host."""
    rigs = [Rig(), Rig()]
    filled(rigs[0], tokens=8, mirrored=True)
    _, _, output = filled(rigs[1], tokens=8, mirrored=False, spill=True)
    assert acked(output, AckKind.ENQUEUED) == [100, 101]
    done = output.acks + rigs[1].finish_copies().acks
    assert [(a.transfer_id, a.row_mask) for a in done if a.kind is AckKind.COMPLETED] == [(100, 15), (101, 15)]
    for layer in range(rigs[0].layout.shape.num_layers):
        written = slice(BLOCK, 3 * BLOCK)
        assert torch.equal(rigs[0].host.rows(layer)[written], rigs[1].host.rows(layer)[written])
    assert rigs[0].host.row_masks[1:3].tolist() == rigs[1].host.row_masks[1:3].tolist() == [15, 15]
    for rig in rigs:
        rig.shutdown()


def test_restored_page_is_read_resident(rig):
    """Host to device in every group; only the rows asked for arrive, the rest of the page stays poisoned."""
    filled(rig, tokens=10)
    tables = resident_tables(rig, 2, 20, 3)
    output = rig.step(
        resident=tables,
        source={2: (1, 2, 3)},
        restores=tuple(
            PageRestore(
                id=300 + page, host_block=1 + page, num_rows=rows, device_blocks=tuple(tables[2, g][page] for g in range(2))
            )
            for page, rows in enumerate((4, 4, 2))
        ),
    )
    assert acked(output, AckKind.COMPLETED) == [300, 301, 302]
    rows = 10 * rig.layout.shape.num_layers
    assert output.stats.host_to_device_bytes == rows * rig.layout.row.row_bytes
    for layer in range(rig.layout.shape.num_layers):
        assert [rig.attended_value(layer, 2, p, "plain") for p in range(10)] == [value(layer, p) for p in range(10)]
        page = rig.cache.view(layer).page(tables[2, rig.layout.layer_group[layer]][2])
        assert bool(page[2:].isnan().all())


def test_copy_on_write_page(rig):
    """A fork inside page 2 (10 tokens): fresh device blocks and a fresh host page with the mask bits below the fork."""
    tables, _, _ = filled(rig, tokens=10)
    pairs = tuple((tables[1, g][2], 30 + g) for g in range(2))
    child = {(2, g): (*tables[1, g][:2], 30 + g) for g in range(2)}
    output = rig.step(
        resident=child,
        source={2: (1, 2, 9)},
        new_device=(30, 31),
        new_host=(9,),
        page_copies=(PageCopy(id=7, device_pairs=pairs, host_pair=(3, 9), num_rows=1),),
    )
    assert acked(output, AckKind.COMPLETED) == [7] and int(rig.host.row_masks[9]) == 0b1
    for layer in range(rig.layout.shape.num_layers):
        assert rig.attended_value(layer, 2, 8) == value(layer, 8)
        host = rig.host.rows(layer)
        assert float(host[9 * BLOCK][0]) == value(layer, 8) and bool(host[9 * BLOCK + 1 : 10 * BLOCK].isnan().all())
    batch = RowBatch.build([2], [9])
    rig.step(lambda: rig.append(batch, lambda layer, p: value(layer, p) + 0.5), mirrors={2: (-1, -1, 9)})
    assert rig.attended_value(3, 2, 9) == 3009.5 and rig.attended_value(3, 1, 9) == 3009.0
    assert int(rig.host.row_masks[9]) == 0b11 and int(rig.host.row_masks[3]) == 0b11


def test_a_copied_page_takes_only_mask_bits_its_source_has(rig):
    filled(rig, tokens=10, mirrored=False)
    rig.step(source={2: (9,)}, new_host=(9,), page_copies=(PageCopy(id=8, device_pairs=(), host_pair=(3, 9), num_rows=2),))
    assert int(rig.host.row_masks[9]) == 0


def test_mirror_skips_pages_by_themselves(rig):
    """A page without a host block is skipped, its neighbours are not; spans hold for one step."""
    tables = resident_tables(rig, 1, 1, 3)
    batch = RowBatch.build([1] * 10, range(10), is_prefill=True)
    output = rig.step(lambda: rig.append(batch, value), resident=tables, mirrors={1: (5, -1, 6)}, new_host=(5, 6))
    assert rig.host.row_masks[[5, 6]].tolist() == [15, 3]
    for layer in range(rig.layout.shape.num_layers):
        written = (~rig.host.rows(layer).isnan().any(1)).nonzero().flatten().tolist()
        assert written == [20, 21, 22, 23, 24, 25]
    assert output.stats.mirrored_rows == 6 * rig.layout.shape.num_layers
    again = RowBatch.build([1], [10])
    rig.step(lambda: rig.append(again, value))
    assert rig.host.row_masks[[5, 6]].tolist() == [15, 3] and rig.attended_value(2, 1, 10) == 2010.0


def test_row_mask_waits_for_the_last_layer(rig):
    tables = resident_tables(rig, 1, 1, 1)
    batch = RowBatch.build([1, 1], [0, 1], is_prefill=True)

    def forward():
        for handle in rig.handles[:-1]:
            handle.append(torch.ones(2, rig.layout.row.row_elems), batch)
        assert int(rig.host.row_masks[5]) == 0
        rig.handles[-1].append(torch.ones(2, rig.layout.row.row_elems), batch)
        assert int(rig.host.row_masks[5]) == 0b11

    rig.step(forward, resident=tables, mirrors={1: (5,)}, new_host=(5,))


def test_replayed_and_padding_rows_write_nothing(rig):
    tables = resident_tables(rig, 1, 1, 1)
    before = rig.cache.bytes.clone()
    batch = RowBatch.build([1, -1, 0], [2, 0, 0], writes=[False, True, False])
    rig.step(lambda: rig.append(batch, value), resident=tables, mirrors={1: (5,)})
    for i in range(len(rig.layout.indexer.layers)):
        rig.parts.indexer.write(i, torch.ones(3, 4), batch)
    assert torch.equal(before, rig.cache.bytes) and int(rig.host.row_masks[5]) == 0


def test_a_written_position_needs_a_resident_page(rig):
    batch = RowBatch.build([2], [5])
    rig.step()
    with pytest.raises(InvariantError, match=r"position 5 of seat 2 is written, but has no page \(resident block 0\)"):
        rig.handles[0].append(torch.ones(1, rig.layout.row.row_elems), batch)


def test_misuse_of_a_batch_is_named(rig):
    filled(rig, tokens=4)
    batch = RowBatch.build([1], [3], writes=False)
    q, topk = torch.ones(1, 2, rig.layout.row.row_elems), torch.tensor([[0, 1]])
    with pytest.raises(InvariantError, match="layer 1 attends before its leader, layer 0"):
        rig.handles[1].attend(q, topk, batch, 1.0)
    rig.handles[0].attend(q, topk, batch, 1.0)
    with pytest.raises(InvariantError, match="layer 0 attends twice"):
        rig.handles[0].attend(q, topk, batch, 1.0)
    rig.handles[0].append(torch.ones(1, 12), batch)
    with pytest.raises(InvariantError, match="layer 0 appends twice"):
        rig.handles[0].append(torch.ones(1, 12), batch)
    with pytest.raises(InvariantError, match=r"rows must be \[1, 12\], got \[1, 11\]"):
        rig.handles[1].append(torch.ones(1, 11), batch)
    with pytest.raises(InvariantError, match="top-k of 2 rows for a batch of 1"):
        rig.handles[2].attend(q, topk.repeat(2, 1), batch, 1.0)


def test_a_request_without_a_region_fails_loudly(rig):
    filled(rig, tokens=8)
    rig.step(resident={(1, g): () for g in range(2)})
    with pytest.raises(InvariantError, match="seat 1 selects more non-resident rows than its hot region of 0 holds"):
        rig.attended_value(0, 1, 5)


def test_reset_after_rewind_forgets_hot_rows(rig):
    """A position whose hot copy is stale after a rewind is read from its new home."""
    filled(rig, tokens=8)
    go_hot(rig)
    assert rig.attended_value(0, 1, 6) == 6.0
    rig.host.rows(0)[2 * BLOCK + 2] = 99.0
    assert rig.attended_value(0, 1, 6) == 6.0  # still hot
    rig.step(seat_resets=(SeatReset(seat=1, from_slot=-1, from_position=6),))
    assert rig.attended_value(0, 1, 6) == 99.0


def test_a_reset_of_one_hot_group_leaves_the_others(rig):
    filled(rig, tokens=8)
    go_hot(rig)
    for layer in range(7):
        rig.attended_value(layer, 1, 6)
    rig.step(seat_resets=(SeatReset(seat=1, hot_group=1),))
    held = {}
    for handle in rig.handles:
        runtime = handle._runtime
        held.setdefault(runtime.hot_group, set()).add(int((runtime.state.slot_tag[1] >= 0).sum()))
    assert held == {0: {1}, 1: {0}}


def test_b14_blocks_whose_bytes_lie_beyond_2_gib():
    """Append, resident read, spill, hot miss, restore and indexer keys at block ids whose byte offsets exceed 2^31.

    The memory is virtual: only the pages that are touched exist.
    """
    shape = dataclasses.replace(make_shape(((0,), (1,)), top_k=4), kv_lora_rank=448, rope_dim=64, index_head_dim=64)
    layout = KVCacheLayout.build(shape, block_size=64, num_groups=1)
    blocks = 2**31 // layout.block_bytes + 60
    layer_pages = 2**31 // layout.layer_page_bytes + 60
    host = HostPool.private(layout, layer_pages, populate=False, available_bytes=2**40)
    config = CacheConfig(hot_rows=64, hot_rows_max=64)
    parts = build_worker(
        layout,
        config,
        num_device_blocks=blocks,
        num_host_blocks=layer_pages,
        max_seats=1,
        max_model_len=128,
        rank=0,
        num_ranks=1,
        incarnation=1,
        host_pool=host,
        poison=False,
    )
    assert (blocks - 1) * layout.block_bytes > 2**31 and (layer_pages - 1) * layout.layer_page_bytes > 2**31
    rig = Rig.around(layout, parts)
    top, hot, page = blocks - 1, blocks - 2, layer_pages - 1
    batch = RowBatch.build([0] * 64, range(64), is_prefill=True)
    spill = SparseKVPageTransfer(id=1, host_block=page, device_blocks=(top,))
    rig.step(
        lambda: rig.append(batch, value), resident={(0, 0): (top,)}, source={0: (page,)}, new_host=(page,), spills=(spill,)
    )
    parts.tables.apply([_indexer_update(layout, blocks - 3)])
    for i in range(2):
        parts.indexer.write(i, torch.full((64, 64), 5.0 + i), batch)
        assert bool((parts.cache.indexer_keys(i)[blocks - 3] == 5.0 + i).all())
    rig.finish_copies()
    assert rig.attended_value(1, 0, 63) == 1063.0
    rig.step(resident={(0, 0): ()}, hot={(0, 0): (hot,)}, hot_rows={(0, 0): 64})
    assert rig.attended_value(1, 0, 63) == 1063.0 and rig.attended_value(0, 0, 62) == 62.0
    restore = PageRestore(id=2, host_block=page, device_blocks=(blocks - 4,), num_rows=64)
    rig.step(resident={(0, 0): (blocks - 4,)}, restores=(restore,))
    assert rig.attended_value(1, 0, 61, "plain") == 1061.0
    assert np.count_nonzero(host.row_masks) == 1
    parts.worker.shutdown()


def _indexer_update(layout, block):
    return BlockTableUpdate(group_id=layout.indexer.group_id, seat=0, first_page=0, ids=(block,), num_pages=1)

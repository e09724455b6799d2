"""Tables, batches, indexer pages, the device cache and the copy queue, each by itself."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import ConfigError, InvariantError, TransferError
from hisparse.types import BlockTableUpdate, HotRows, MirrorSpan, ResidentPagesUpdate
from hisparse.worker import CopyQueue, DeviceCache, IndexerPages, KVTables, PinnedRing, RowBatch, Streams
from hisparse.worker.tables import ranges
from tests.worker.rig import BLOCK, make_layout

LAYOUT = make_layout()
RESIDENT0 = LAYOUT.residents[0].group_id
HOT1 = LAYOUT.hots[1].group_id


def tables():
    return KVTables(LAYOUT, max_seats=3, max_model_len=30, hot_rows_max=(8, 16))


def update(group_id, seat, first_page, ids, num_pages):
    return BlockTableUpdate(group_id=group_id, seat=seat, first_page=first_page, ids=ids, num_pages=num_pages)


# ---- tables


def test_updates_replace_from_the_first_changed_page_and_clear_the_rest():
    t = tables()
    assert t.pages == 8 and t.source.shape == (3, 8) and t.hot(1).shape == (3, 4)
    t.apply([update(RESIDENT0, 1, 0, (5, 6, 7, 8), 4)])
    t.apply([update(RESIDENT0, 1, 2, (9,), 3)])
    assert t.resident(0)[1].tolist() == [5, 6, 9, 0, 0, 0, 0, 0] and not t.resident(1).any() and not t.source.any()
    t.apply([update(RESIDENT0, 1, 1, (0,), 3)])  # a hole; what follows keeps
    assert t.resident(0)[1].tolist()[:4] == [5, 0, 9, 0]
    t.apply([update(RESIDENT0, 1, 0, (), 0), update(RESIDENT0, 1, 0, (3,), 1)])  # freed and taken again in one command
    assert t.resident(0)[1].tolist() == [3] + [0] * 7 and not t.resident(0)[[0, 2]].any()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (update(99, 0, 0, (), 0), "group 99"),
        (update(RESIDENT0, 3, 0, (), 0), "seat 3; seats are 0..2"),
        (update(RESIDENT0, -1, 0, (), 0), "seat -1"),
        (update(RESIDENT0, 0, 7, (1, 2), 9), r"entries 7..9 of 9, but the table has 8"),
        (update(RESIDENT0, 0, -1, (1,), 1), r"entries -1..0"),
    ],
)
def test_updates_outside_the_tables_are_refused(bad, message):
    with pytest.raises(InvariantError, match=message):
        tables().apply([bad])


@pytest.mark.parametrize("update", [
    ResidentPagesUpdate(seat=1, first_page=2, blocks=((5, 6), (), (9, 10)), num_pages=6),
    ResidentPagesUpdate(seat=1, first_page=4, blocks=(), num_pages=4),
    ResidentPagesUpdate(seat=1, first_page=0, blocks=((3, 4),), num_pages=1),
])
def test_a_resident_update_is_one_update_for_each_resident_group(update):
    assert len(LAYOUT.residents) == 2
    once, apart = tables(), tables()
    for t in (once, apart):
        t.apply([ResidentPagesUpdate(seat=s, first_page=0, blocks=((11, 12),) * 5, num_pages=5) for s in (0, 1)])
    once.apply([update])
    apart.apply(update.by_group([group.group_id for group in LAYOUT.residents]))
    for a, b in zip(once.tables, apart.tables, strict=True):
        assert torch.equal(a, b)
    assert once.resident(0)[0].tolist() == [11] * 5 + [0] * 3 and once.resident(1)[0].tolist() == [12] * 5 + [0] * 3


@pytest.mark.parametrize(("bad", "message"), [
    (ResidentPagesUpdate(seat=3, first_page=0, blocks=(), num_pages=0), "seat 3; seats are 0..2"),
    (ResidentPagesUpdate(seat=0, first_page=7, blocks=((1, 2), (3, 4)), num_pages=9),
     r"pages 7..9 of 9, but the tables have 8"),
    (ResidentPagesUpdate(seat=0, first_page=0, blocks=((1, 2, 3),), num_pages=1),
     r"pages of \[3\] blocks for 2 resident groups"),
])
def test_resident_updates_outside_the_tables_are_refused(bad, message):
    with pytest.raises(InvariantError, match=message):
        tables().apply([bad])


def test_hot_rows_need_blocks_behind_them():
    t = tables()
    with pytest.raises(InvariantError, match="seat 2, hot group 1: 8 hot rows need 2 blocks, the table holds 0 of at most 4"):
        t.apply_hot_rows([HotRows(seat=2, hot_group=1, rows=8)])
    t.apply([update(HOT1, 2, 0, (4, 5), 2)])
    t.apply_hot_rows([HotRows(seat=2, hot_group=1, rows=8)])
    assert t.hot_rows.tolist() == [[0, 0, 0], [0, 0, 8]]
    for rows, group in ((12, 1), (20, 1), (-1, 1), (4, 2)):
        with pytest.raises(InvariantError, match="hot rows|hot group"):
            t.apply_hot_rows([HotRows(seat=2, hot_group=group, rows=rows)])
    t.apply([update(HOT1, 2, 0, (), 0)])
    t.apply_hot_rows([HotRows(seat=2, hot_group=1, rows=0)])
    assert not t.hot_rows.any()


def test_mirrors_hold_for_one_command():
    t = tables()
    t.apply_mirrors(
        [MirrorSpan(seat=1, first_page=2, host_blocks=(7, -1, 0, 9)), MirrorSpan(seat=1, first_page=7, host_blocks=(3,))]
    )
    assert t.mirrors[1].tolist() == [0, 0, 7, 0, 0, 9, 0, 3]
    t.apply_mirrors([MirrorSpan(seat=0, first_page=0, host_blocks=(4,))])
    assert t.mirrors.tolist() == [[4] + [0] * 7, [0] * 8, [0] * 8]
    t.apply_mirrors(())
    assert not t.mirrors.any()
    with pytest.raises(InvariantError, match=r"covers pages 7..9 of 8"):
        t.apply_mirrors([MirrorSpan(seat=0, first_page=7, host_blocks=(4, 5))])


@pytest.mark.parametrize("seed", range(3))
def test_mirrors_are_those_of_the_last_command_whatever_came_before(seed):
    """Most spans stay as they were; others go, change, come in between or change places."""
    r, t, spans = random.Random(seed), tables(), []
    for _ in range(200):
        kind = r.random()
        if kind < 0.2:
            r.shuffle(spans)
        elif kind < 0.5 and spans:
            spans.pop(r.randrange(len(spans)))
        elif kind < 0.9:
            first = r.randint(0, 7)
            hosts = tuple(r.randint(-1, 9) for _ in range(r.randint(0, 8 - first)))
            spans.insert(r.randint(0, len(spans)), MirrorSpan(seat=r.randrange(3), first_page=first, host_blocks=hosts))
        t.apply_mirrors(spans)
        fresh = tables()
        fresh.apply_mirrors(spans)
        assert torch.equal(t.mirrors, fresh.mirrors), spans


# ---- tables on another device: what the CPU knows is brought there


class CountingRing(PinnedRing):
    uploads = 0

    def upload(self, *arrays, **kw):
        self.uploads += 1
        return super().upload(*arrays, **kw)


def random_step(r):
    """Updates of every kind, several of them for one row, regions that have blocks, mirrors with holes."""
    updates, hot_rows, mirrors = [], [], []
    for _ in range(r.randint(0, 6)):
        seat, pages = r.randrange(3), r.randint(0, 8)
        first = r.randint(0, pages)
        if r.random() < 0.4:
            blocks = tuple((r.randint(1, 99), r.randint(1, 99)) if r.random() < 0.8 else () for _ in range(pages - first))
            updates.append(ResidentPagesUpdate(seat=seat, first_page=first, blocks=blocks, num_pages=r.randint(first, 8)))
        else:
            group = r.choice([LAYOUT.indexer.group_id, LAYOUT.source.group_id, RESIDENT0])
            ids = tuple(r.randint(0, 99) for _ in range(pages - first))
            updates.append(update(group, seat, first, ids, r.randint(first, 8)))
    for seat in range(3):
        if r.random() < 0.4:
            blocks = r.randint(0, 4)
            updates.append(update(HOT1, seat, 0, tuple(r.randint(1, 99) for _ in range(blocks)), blocks))
            hot_rows.append(HotRows(seat=seat, hot_group=1, rows=4 * r.randint(0, blocks)))
        for _ in range(r.randint(0, 2)):
            first = r.randint(0, 7)
            hosts = tuple(r.choice([-1, 0, r.randint(1, 50)]) for _ in range(r.randint(0, 8 - first)))
            mirrors.append(MirrorSpan(seat=seat, first_page=first, host_blocks=hosts))
    return updates, hot_rows, mirrors


@pytest.mark.parametrize("seed", range(5))
def test_one_upload_a_step_makes_the_device_equal(seed):
    r, ring = random.Random(seed), CountingRing(Streams("cpu"))
    here = tables()
    there = KVTables(LAYOUT, max_seats=3, max_model_len=30, hot_rows_max=(8, 16), staging=ring)
    addresses = [t.data_ptr() for t in (*there.tables, there.hot_rows, there.mirrors)]
    for step in range(1, 60):
        updates, hot_rows, mirrors = random_step(r)
        before = ring.uploads
        here.apply(updates)
        here.apply_hot_rows(hot_rows)
        here.apply_mirrors(mirrors)
        there.apply_step(updates, hot_rows, mirrors)
        assert ring.uploads - before <= 1
        for a, b in zip((*here.tables, here.hot_rows, here.mirrors), (*there.tables, there.hot_rows, there.mirrors)):
            assert torch.equal(a, b), step
        there.check()
    assert addresses == [t.data_ptr() for t in (*there.tables, there.hot_rows, there.mirrors)]
    there.mirrors[0, 0] += 1
    with pytest.raises(InvariantError, match="on the device and should be"):
        there.check()


def test_the_last_of_several_writers_wins_and_is_uploaded_once(monkeypatch):
    ring = CountingRing(Streams("cpu"))
    t = KVTables(LAYOUT, max_seats=3, max_model_len=30, hot_rows_max=(8, 16), staging=ring)
    uploaded = []
    real = ring.upload
    monkeypatch.setattr(ring, "upload", lambda *a, **kw: uploaded.append(a) or real(*a, **kw))
    t.apply([update(RESIDENT0, 1, 0, (5, 6, 7), 3), update(RESIDENT0, 1, 0, (), 0), update(RESIDENT0, 1, 1, (9, 8), 3)])
    ((index, values),) = uploaded
    assert values.tolist() == [0, 9, 8] and len(set(index.tolist())) == 3
    assert t.resident(0)[1].tolist() == [0, 9, 8] + [0] * 5
    t.apply([update(RESIDENT0, 1, 0, (1,), 1)])  # clears what was there, and not the whole width
    assert uploaded[1][1].tolist() == [1, 0, 0]
    t.apply([])
    t.apply_mirrors(())
    assert len(uploaded) == 2


def test_tables_elsewhere_need_staging():
    with pytest.raises(InvariantError, match="tables on meta need a staging ring"):
        KVTables(LAYOUT, max_seats=3, max_model_len=30, hot_rows_max=(8, 16), device="meta")


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=1, max_size=20))
def test_ranges_are_the_distinct_members(pairs):
    first, count = np.array(pairs, dtype=np.int64).T
    assert ranges(first, count).tolist() == sorted({x for f, c in pairs for x in range(f, f + c)})


# ---- batches


def test_batch_of_numbers():
    batch = RowBatch.build([2, -1, 0], [7, 0, 9], writes=[True, True, False])
    assert batch.seats.dtype == torch.int32 and batch.positions.dtype == torch.int64 and batch.num_rows == 3
    assert batch.context_len.tolist() == [8, 1, 10] and batch.max_len == 10 and not batch.is_prefill
    assert RowBatch.build([2, 2], [3, 4], is_prefill=True).prefill_seat == 2


@pytest.mark.parametrize(
    ("seats", "positions", "kw"),
    [
        ([1, 1], [3], {}),
        ([1], [3], {"writes": [True, False]}),
        ([1, 2], [3, 4], {"is_prefill": True}),
        ([1, 1], [3, 5], {"is_prefill": True}),
    ],
)
def test_malformed_batches_are_refused(seats, positions, kw):
    with pytest.raises(InvariantError, match="batch"):
        RowBatch.build(seats, positions, **kw)


# ---- device cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fresh_memory_is_nan_and_aligned(dtype):
    cache = DeviceCache(make_layout(dtype=dtype, wide=True), 5)
    assert bool(cache.rows.isnan().all()) and all(bool(cache.indexer_keys(i).isnan().all()) for i in range(4))
    assert cache.address % 64 == 0 and cache.nbytes == cache.bytes.numel() == 5 * cache.layout.block_bytes
    assert cache.rows.data_ptr() == cache.address == cache.indexer_keys(0).data_ptr()


def test_views_of_layers_and_indexer_keys_do_not_overlap_within_a_block():
    cache = DeviceCache(LAYOUT, 5)
    for group in LAYOUT.residents:
        for layer in group.layers:
            cache.view(layer).page(3).fill_(float(layer))
        assert [float(cache.view(layer).page(3).sum()) for layer in group.layers] == [48.0 * layer for layer in group.layers]
    ids = cache.view(3).row_ids(torch.tensor([2, 4], dtype=torch.int32), torch.tensor([1, 3]))
    want = [b * LAYOUT.rows_per_block + LAYOUT.layer_row_offset[3] + r for b, r in ((2, 1), (4, 3))]
    assert ids.tolist() == want and ids.dtype == torch.int64
    for i in range(4):
        cache.indexer_keys(i)[2] = float(i)
    assert [float(cache.indexer_keys(i)[2].sum()) for i in range(4)] == [16.0 * i for i in range(4)]
    page = cache.bytes[2][: LAYOUT.indexer_page_bytes].view(torch.float32)
    assert page.tolist() == [float(i) for i in range(4) for _ in range(16)]
    assert bool(cache.bytes[1].eq(255).all()) and bool(cache.bytes[2][LAYOUT.indexer_page_bytes :].eq(255).all())
    cache.poison_blocks([3])
    assert bool(cache.bytes[3].eq(255).all())


def test_generations():
    cache = DeviceCache(LAYOUT, 5)
    cache.store_generations((2, 4), (2**64 - 1, 7))
    cache.store_generations((), ())
    assert cache.generations.tolist() == [0, 0, 2**64 - 1, 0, 7] and cache.generations.dtype == np.uint64
    with pytest.raises(ConfigError, match="at least 2"):
        DeviceCache(LAYOUT, 1)


# ---- indexer pages


def indexer(seats=3):
    cache, t = DeviceCache(LAYOUT, 12), tables()
    t.apply([update(LAYOUT.indexer.group_id, 0, 0, (3, 9, 5), 3), update(LAYOUT.indexer.group_id, 2, 0, (7,), 1)])
    return cache, t, IndexerPages(cache, t)


def stored(cache, t, i, seat, length):
    """[length] first value of each key of a seat."""
    blocks = t.indexer[seat, : -(-length // BLOCK)].long()
    return cache.indexer_keys(i)[blocks].flatten(0, 1)[:length, 0]


def test_indexer_keys_of_every_layer_lie_apart():
    cache, t, pages = indexer()
    long, short = RowBatch.build([0] * 10, range(10), is_prefill=True), RowBatch.build([2] * 3, range(3), is_prefill=True)
    for i in range(4):
        pages.write(i, torch.arange(10.0)[:, None].repeat(1, 4) + 100 * i, long)
        pages.write(i, torch.arange(3.0)[:, None].repeat(1, 4) + 100 * i + 50, short)
    for i in range(4):
        assert torch.equal(stored(cache, t, i, 0, 10), torch.arange(10.0) + 100 * i)
        assert torch.equal(stored(cache, t, i, 2, 3), torch.arange(3.0) + 100 * i + 50)


def test_top_k_of_different_lengths_never_reads_what_is_not_written():
    """Keys 1, 2, .. score by their position; rows beyond a context are NaN in memory; a padding seat selects nothing."""
    _, _, pages = indexer()
    for seat, length in ((0, 10), (2, 3)):
        batch = RowBatch.build([seat] * length, range(length), is_prefill=True)
        pages.write(1, torch.arange(1.0, length + 1)[:, None].repeat(1, 4), batch)
    batch = RowBatch.build([2, 0, -1], [2, 8, 5], writes=False)
    got = pages.top_k(1, torch.ones(3, 2, 4), torch.ones(3, 2), batch, 4, 0.5)
    assert got.tolist() == [[0, 1, 2, -1], [5, 6, 7, 8], [-1] * 4] and got.dtype == torch.int32
    assert pages.top_k(1, torch.ones(1, 2, 4), torch.ones(1, 2), RowBatch.build([2], [1]), 4, 0.5).tolist() == [[0, 1]]


def test_indexer_rows_that_do_not_write_are_skipped():
    cache, t, pages = indexer()
    batch = RowBatch.build([0, -1, 2], [1, 0, 2], writes=[True, True, False])
    pages.write(1, torch.tensor([[1.0] * 4, [2.0] * 4, [3.0] * 4]), batch)
    assert stored(cache, t, 1, 0, 2)[1] == 1.0
    assert bool(stored(cache, t, 1, 2, 3).isnan().all())


def test_missing_indexer_pages_are_named():
    _, _, pages = indexer()
    with pytest.raises(InvariantError, match="seat 2 has no indexer page for position 4"):
        pages.write(0, torch.zeros(1, 4), RowBatch.build([2], [4]))
    with pytest.raises(InvariantError, match="seat 2 has no indexer page for position 4"):
        pages.top_k(0, torch.ones(1, 2, 4), torch.ones(1, 2), RowBatch.build([2], [5]), 2, 1.0)


# ---- copy queue


@pytest.fixture
def queue():
    q = CopyQueue()
    yield q
    q.resume()
    q.close(5)


def test_copies_run_in_order_and_report_what_they_returned(queue):
    ran = []
    for i in range(5):
        queue.submit(i, lambda i=i: ran.append(i) or 10 + i)
    queue.drain(5)
    assert ran == list(range(5)) and [(r.transfer_id, r.row_mask, r.error) for r in queue.take_done()] == [
        (i, 10 + i, None) for i in range(5)
    ]
    assert queue.take_done() == [] and queue.num_pending == 0


def test_waiting_for_one_transfer_does_not_wait_for_later_ones(queue):
    gate = threading.Event()
    queue.submit(1, lambda: 0)
    queue.submit(2, lambda: gate.wait(5) and 0)
    queue.wait(1, 5)
    queue.wait(77, 0)  # not in flight: nothing to wait for
    with pytest.raises(TransferError, match=r"transfer 2 did not complete within 0.01 s"):
        queue.wait(2, 0.01)
    with pytest.raises(TransferError, match=r"1 transfers did not complete within 0.01 s: \[2\]"):
        queue.drain(0.01)
    gate.set()
    queue.drain(5)


def test_an_exception_fails_its_transfer_only(queue):
    def broken():
        raise ValueError("bad page")

    queue.submit(1, broken)
    queue.submit(2, lambda: 3)
    queue.drain(5)
    first, second = queue.take_done()
    assert first.error == "ValueError: bad page" and second.row_mask == 3 and second.error is None


def test_pause_holds_copies_that_have_not_started(queue):
    queue.pause()
    queue.submit(1, lambda: 0)
    with pytest.raises(TransferError):
        queue.wait(1, 0.02)
    with pytest.raises(InvariantError, match="already in flight"):
        queue.submit(1, lambda: 0)
    queue.resume()
    queue.wait(1, 5)
    queue.submit(1, lambda: 0)  # an id that is done may be used again


def test_closing_late_copies_says_how_many():
    q, gate = CopyQueue(), threading.Event()
    q.submit(1, lambda: gate.wait(5) and 0)
    with pytest.raises(TransferError, match="1 transfers are left"):
        q.close(0.02)
    gate.set()
    q.close(5)

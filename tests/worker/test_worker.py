"""The worker's command, acknowledgements, fences and counts; shared pools with several ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hisparse.config import CacheConfig
from hisparse.errors import ConfigError, InvariantError, TransferError
from hisparse.types import AckKind, Fence, ResolveStats, SparseKVOffloadCommand, SparseKVPageTransfer
from hisparse.worker import HostPool, RowBatch, build_worker
from tests.worker.rig import BLOCK, HEADS, Rig, acked, make_layout, shared_pool

ENQUEUED, COMPLETED, FAILED = AckKind.ENQUEUED, AckKind.COMPLETED, AckKind.FAILED


def value(layer, positions):
    return 100.0 * layer + positions


def spill(transfer_id, host_block=5, blocks=(1, 2), **kw):
    return SparseKVPageTransfer(id=transfer_id, host_block=host_block, device_blocks=blocks, **kw)


def write_page(rig, count=BLOCK, **command):
    """Seat 1's page 0 in blocks 1 and 2 gets `count` rows."""
    batch = RowBatch.build([1] * count, range(count), is_prefill=True)
    return rig.step(lambda: rig.append(batch, value), resident={(1, 0): (1,), (1, 1): (2,)}, source={1: (5,)}, **command)


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.worker.copies.resume()
    rig.worker.copies.hook = None
    rig.shutdown()


# ---- spills


def test_enqueued_at_once_completed_when_the_copy_is_done(rig):
    rig.worker.copies.pause()
    first = write_page(rig, spills=(spill(11), spill(12, 6)), new_host=(5, 6))
    assert [(a.transfer_id, a.kind, a.rank, a.incarnation) for a in first.acks] == [
        (11, ENQUEUED, 0, 77),
        (12, ENQUEUED, 0, 77),
    ]
    assert rig.worker.output().acks == () and int(rig.host.row_masks[5]) == 0
    rig.worker.copies.resume()
    done = rig.finish_copies()
    assert [(a.transfer_id, a.kind, a.row_mask) for a in done.acks] == [(11, COMPLETED, 15), (12, COMPLETED, 15)]
    size = 2 * rig.layout.host_block_bytes
    assert done.stats == ResolveStats(spilled_pages=2, spilled_bytes=size, device_to_host_bytes=size)
    assert done.request_stats == {} and rig.worker.output().acks == ()


def test_a_spill_of_mirrored_rows_copies_nothing_and_trusts_only_the_mask(rig):
    """copy_bytes=False: durable only if append really wrote every row; the host bytes stay as they are."""
    write_page(rig, 3, mirrors={1: (5,)}, new_host=(5,), spills=(spill(1, copy_bytes=False),))
    assert [(a.kind, a.row_mask) for a in rig.finish_copies().acks] == [(FAILED, 0b111)]
    last = RowBatch.build([1], [3])
    marker = rig.host.rows(0)[5 * BLOCK].clone().fill_(-8.0)
    rig.host.rows(0)[5 * BLOCK] = marker
    output = rig.step(lambda: rig.append(last, value), mirrors={1: (5,)}, spills=(spill(2, copy_bytes=False),))
    done = (*output.acks, *rig.finish_copies().acks)
    assert [(a.kind, a.row_mask) for a in done if a.kind is not ENQUEUED] == [(COMPLETED, 15)]
    assert torch.equal(rig.host.rows(0)[5 * BLOCK], marker)


def test_a_spill_with_bytes_repairs_a_page_that_failed_without(rig):
    write_page(rig, spills=(spill(1, copy_bytes=False),), new_host=(5,))
    assert acked(rig.finish_copies(), FAILED) == [1]
    rig.step(spills=(spill(2, copy_bytes=True, after_forward=False),))
    assert acked(rig.finish_copies(), COMPLETED) == [2]
    assert [float(rig.host.rows(layer)[5 * BLOCK + 3][0]) for layer in range(7)] == [100.0 * layer + 3 for layer in range(7)]


def test_after_forward_sees_this_steps_rows_and_before_forward_does_not(rig):
    write_page(rig)
    again = RowBatch.build([1], [0])

    def overwrite():
        rig.worker.copies.drain(5)  # the copy that goes before the forward
        rig.append(again, lambda layer, p: value(layer, p) + 0.5)

    rig.step(overwrite, spills=(spill(1, 5, after_forward=False), spill(2, 6)), new_host=(5, 6))
    rig.finish_copies()
    assert [float(rig.host.rows(3)[block * BLOCK][0]) for block in (5, 6)] == [300.0, 300.5]


def test_a_failed_copy_is_reported_and_sets_no_mask(rig):
    def broken(transfer_id):
        if transfer_id == 1:
            raise OSError("the bus is on fire")

    rig.worker.copies.hook = broken
    write_page(rig, spills=(spill(1), spill(2, 6)), new_host=(5, 6))
    done = rig.finish_copies()
    assert acked(done, FAILED) == [1] and acked(done, COMPLETED) == [2] and int(rig.host.row_masks[5]) == 0
    assert done.stats.spilled_pages == 1


def test_completion_is_found_per_transfer_and_never_awaited(rig):
    gate = threading.Event()
    rig.worker.copies.hook = lambda transfer_id: gate.wait(5) if transfer_id == 2 else None
    write_page(rig, spills=(spill(1), spill(2, 6)), new_host=(5, 6))
    rig.worker.copies.wait(1, 5)
    start = time.monotonic()
    assert acked(rig.worker.output(), COMPLETED) in ([1], [])  # 1 may have been taken by the step's own output
    assert rig.worker.copies.num_pending == 1 and time.monotonic() - start < 1
    gate.set()
    assert acked(rig.finish_copies(), COMPLETED) == [2]


def test_malformed_spills_are_refused(rig):
    for bad in (spill(1, 0), spill(1, 32), spill(1, blocks=(1,))):
        with pytest.raises(InvariantError, match="spill 1: host block"):
            rig.step(spills=(bad,))
        rig.worker._after_forward.clear()
    rig.worker.copies.pause()
    rig.step(spills=(spill(1),))
    with pytest.raises(InvariantError, match="transfer 1 is already in flight"):
        rig.step(spills=(spill(1),))


# ---- fences


def test_a_fenced_block_is_written_only_after_its_copy(rig):
    """The block is handed out while its spill is still queued: the next command waits, and the host page is right."""
    released = threading.Timer(0.2, rig.worker.copies.resume)
    rig.worker.copies.pause()
    write_page(rig, spills=(spill(1),), new_host=(5,))
    released.start()
    start = time.monotonic()
    batch = RowBatch.build([2] * BLOCK, range(BLOCK), is_prefill=True)
    rig.step(
        lambda: rig.append(batch, lambda layer, p: -value(layer, p) - 1),
        resident={(2, 0): (1,), (2, 1): (2,)},
        new_device=(1, 2),
        fences=(Fence(block=1, transfer_id=1), Fence(block=2, transfer_id=1)),
    )
    assert time.monotonic() - start > 0.15
    assert [float(rig.host.rows(layer)[5 * BLOCK + 2][0]) for layer in range(7)] == [100.0 * layer + 2 for layer in range(7)]
    rig.step(fences=(Fence(block=3, transfer_id=1), Fence(block=3, transfer_id=999)))  # long done, and not ours


def test_a_late_fence_fails_the_step(rig):
    rig.worker._deadline_s = 0.05
    rig.worker.copies.pause()
    write_page(rig, spills=(spill(1),), new_host=(5,))
    with pytest.raises(TransferError, match=r"transfer 1 did not complete within 0.05 s"):
        rig.step(fences=(Fence(block=1, transfer_id=1),))
    rig.worker._deadline_s = 5.0


# ---- order and identity


def test_generations_and_masks_of_new_blocks(rig):
    rig.host.row_masks[7], rig.host.keys[7] = 9, 1
    rig.step(new_device=(3, 4), new_host=(7,))
    assert rig.cache.generations[[3, 4]].tolist() == [903, 904] and int(rig.host.generations[7]) == 507
    assert int(rig.host.row_masks[7]) == 0 and not rig.host.keys[7].any() and int(rig.host.incarnations[7]) == 77


def test_steps_must_go_up(rig):
    command = rig.command()
    rig.worker.start_step(command)
    rig.worker.end_step()
    with pytest.raises(InvariantError, match="command of step 1 after step 1"):
        rig.worker.start_step(command)
    rig.worker.start_step(rig.command(spills=(spill(1),)))
    with pytest.raises(InvariantError, match="step 3 starts before end_step of step 2"):
        rig.worker.start_step(SparseKVOffloadCommand(step=3))
    rig.worker.end_step()


def test_no_command_mirrors_nothing(rig):
    batch = RowBatch.build([1], [0])
    write_page(rig, mirrors={1: (5,)}, new_host=(5,))
    rig.worker.start_step(None)
    rig.append(batch, lambda layer, p: value(layer, p) - 7)
    assert float(rig.host.rows(2)[5 * BLOCK][0]) == 200.0
    rig.worker.end_step()


def test_check_finds_a_written_null_block(rig):
    rig.worker.check()
    rig.cache.bytes[0, 5] = 0
    with pytest.raises(InvariantError, match="null block"):
        rig.worker.check()
    rig.cache.bytes[0, 5] = 255


def test_shutdown_runs_what_is_queued_and_is_idempotent():
    rig = Rig()
    rig.worker.copies.pause()
    write_page(rig, spills=(spill(1),), new_host=(5,))
    rows = rig.host.rows(6)
    for _ in range(2):
        rig.worker.shutdown()
    assert float(rows[5 * BLOCK + 1][0]) == 601.0
    with pytest.raises(InvariantError, match="closed copy queue"):
        rig.worker.copies.submit(9, lambda: 0)


# ---- counts


def test_counts_by_tier_and_seat(rig):
    """Two seats: one resident, one hot; every layer counts; a repeated miss is a hit."""
    layers = rig.layout.shape.num_layers
    for seat, blocks in ((1, (1, 2)), (2, (3, 4))):
        batch = RowBatch.build([seat] * 4, range(4), is_prefill=True)
        output = rig.step(
            lambda batch=batch: rig.append(batch, value),
            resident={(seat, g): (blocks[g],) for g in range(2)},
            source={seat: (seat,)},
            mirrors={seat: (seat,)},
            new_host=(seat,),
        )
    size = rig.layout.row.row_bytes
    assert output.request_stats == {2: ResolveStats(mirrored_rows=4 * layers, device_to_host_bytes=4 * layers * size)}
    rig.step(
        resident={(2, g): () for g in range(2)},
        hot={(2, g): (10 + 2 * g, 11 + 2 * g) for g in range(2)},
        hot_rows={(2, g): 8 for g in range(2)},
    )

    def attend(positions):
        batch = RowBatch.build([1, 2, -1], [3, 3, 3], writes=False)
        topk = torch.tensor([positions] * 3, dtype=torch.int32)
        for handle in rig.handles:
            handle.attend(torch.ones(3, HEADS, rig.layout.row.row_elems), topk, batch, 1.0)

    output = rig.step(lambda: attend([0, 1, -1, 9]))
    assert output.request_stats == {
        1: ResolveStats(resident_rows=2 * layers),
        2: ResolveStats(miss_rows=2 * layers, host_to_device_bytes=2 * layers * size),
    }
    assert output.stats == output.request_stats[1] + output.request_stats[2]
    output = rig.step(lambda: attend([1, 2, 0, -1]))
    assert output.request_stats[2] == ResolveStats(hot_rows=2 * layers, miss_rows=layers, host_to_device_bytes=layers * size)

    def prefill():
        batch = RowBatch.build([2, 2], [2, 3], writes=False, is_prefill=True)
        for handle in rig.handles:
            handle.attend(torch.ones(2, HEADS, rig.layout.row.row_elems), torch.tensor([[0, 1, 2]] * 2), batch, 1.0)

    output = rig.step(prefill)
    assert output.request_stats == {2: ResolveStats(prefill_host_rows=3 * layers, host_to_device_bytes=3 * layers * size)}
    assert rig.worker.output().stats == ResolveStats()


def test_plain_tables_and_resident_rows_never_read_the_host(rig):
    """A resident context works while the whole host pool is poison and the source table is empty."""
    write_page(rig)
    rig.step(source={1: ()})
    assert (
        rig.attended_value(5, 1, 2) == rig.attended_value(5, 1, 2, "plain") == rig.attended_value(5, 1, 2, "prefill") == 502.0
    )
    assert all(bool(rig.host.rows(layer).isnan().all()) for layer in range(7))


# ---- ranks


def test_a_shared_pool_has_one_writer_and_peers_read_it(tmp_path):
    """Rank 1 mirrors nothing, spills nothing, acknowledges no spill; it reads rank 0's host rows by every host route."""
    layout = make_layout()
    owner = shared_pool(layout, 32, tmp_path / "hisparse-tp.pool")
    peer = HostPool.attach(layout, 32, owner.path)
    rigs = [Rig(layout, host_pool=pool, rank=rank, num_ranks=2) for rank, pool in enumerate((owner, peer))]
    outputs = []
    for rig in rigs:
        write_page(rig, mirrors={1: (6,)}, new_host=(5, 6), spills=(spill(1),))
        outputs.append(rig.finish_copies())
    assert [rig.worker.is_writer for rig in rigs] == [True, False]
    assert outputs[1].acks == () and outputs[1].stats == ResolveStats() and rigs[1].worker.copies.num_pending == 0
    assert int(peer.row_masks[5]) == int(peer.row_masks[6]) == 15 and int(peer.generations[5]) == 505
    rigs[1].step(
        resident={(1, g): () for g in range(2)},
        hot={(1, g): (10 + 2 * g, 11 + 2 * g) for g in range(2)},
        hot_rows={(1, g): 8 for g in range(2)},
        fences=(Fence(block=10, transfer_id=1),),
    )
    for kind in ("decode", "prefill"):
        assert [rigs[1].attended_value(layer, 1, 3, kind) for layer in range(7)] == [100.0 * layer + 3 for layer in range(7)]
    for rig in rigs:
        rig.shutdown()
    owner.unlink()


def test_with_private_pools_every_rank_writes():
    rigs = [Rig(rank=rank, num_ranks=2) for rank in range(2)]
    for rank, rig in enumerate(rigs):
        output = write_page(rig, spills=(spill(1),), new_host=(5,))
        acks = output.acks + rig.finish_copies().acks
        assert [(a.rank, a.kind) for a in acks] == [(rank, ENQUEUED), (rank, COMPLETED)]
        rig.shutdown()


def test_build_worker_checks_its_arguments():
    layout = make_layout()
    kw = dict(num_device_blocks=8, max_seats=1, max_model_len=16, incarnation=1)
    config = CacheConfig(block_size=4, hot_rows=8)
    with pytest.raises(ConfigError, match=r"rank must be in 0..1, got 2"):
        build_worker(layout, config, num_host_blocks=0, rank=2, num_ranks=2, host_pool=None, **kw)
    with pytest.raises(ConfigError, match="enabled is True but the host pool is missing"):
        build_worker(layout, config, num_host_blocks=4, rank=0, num_ranks=1, host_pool=None, **kw)
    pool = HostPool.private(layout, 4)
    with pytest.raises(ConfigError, match="has 4 pages, the coordinator counts 5"):
        build_worker(layout, config, num_host_blocks=5, rank=0, num_ranks=1, host_pool=pool, **kw)
    with pytest.raises(ConfigError, match="device_blocks must be at least 2"):
        build_worker(layout, config, num_host_blocks=4, rank=0, num_ranks=1, host_pool=pool, **{**kw, "num_device_blocks": 1})


def test_without_hisparse_block_tables_alone_work():
    rig = Rig(enabled=False)
    assert rig.parts.worker is None and rig.host is None and int(rig.tables.hot_rows.sum()) == 0
    rig.tables.apply(rig.command(resident={(1, 0): (1,), (1, 1): (2,)}).table_updates)
    rig.append(RowBatch.build([1] * 3, range(3), is_prefill=True), value)
    for kind in ("decode", "plain", "prefill"):
        assert rig.attended_value(4, 1, 2, kind) == 402.0
    with pytest.raises(InvariantError, match="seat 1, position 5 is not resident"):
        rig.attended_value(4, 1, 5)


def test_bfloat16_rows_take_float32_activations():
    layout = make_layout(dtype="bfloat16", wide=True)
    rig = Rig(layout)
    write_page(rig, mirrors={1: (5,)}, new_host=(5,))
    assert rig.cache.rows.dtype == rig.host.rows(0).dtype == torch.bfloat16
    assert rig.attended_value(1, 1, 3) == 103.0 and float(rig.host.rows(1)[5 * BLOCK + 3][0]) == 103.0
    rig.shutdown()

"""The spill transaction: who must acknowledge, what each word releases, what is never believed."""

from __future__ import annotations

import pytest

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.residency import PageState
from hisparse.config import CacheConfig
from hisparse.errors import InvariantError
from hisparse.types import AckKind, HiSparseWorkerOutput, SparseKVOffloadCommand, TransferAck
from tests.cache.harness import Harness, small_layout

FULL = 0b1111


class Direct:
    """One manager driven by hand: one request of 2 pages prefilled, its first spill sent."""

    def __init__(self, *, num_ranks: int = 1, num_writers: int = 1, max_tokens: int = 8) -> None:
        self.now_s = 0.0
        self.m = KVCacheManager(
            small_layout(groups=2), CacheConfig(block_size=4, device_blocks=60, hot_rows=8, hot_rows_max=8),
            num_host_blocks=20, max_model_len=40, max_seats=2, max_query_tokens=8, num_ranks=num_ranks,
            num_host_writers=num_writers, incarnation=5, clock=lambda: self.now_s)
        self.m.open("r", list(range(6)), max_tokens=max_tokens)
        assert self.m.admit("r", self.m.prefix("r"), chunk_tokens=6)
        assert self.m.allocate("r", 6)
        self.first = self.plan(1, [("r", 0, 6)])
        self.inc = self.m.core.live["r"]

    def plan(self, step: int, scheduled: list[tuple[str, int, int]] | None = None) -> SparseKVOffloadCommand:
        command = self.m.plan_step(step, scheduled or [])
        assert command is not None
        return command

    def ack(self, kind: AckKind, transfer_id: int = 1, *, mask: int = FULL, rank: int = 0, incarnation: int = 5) -> None:
        ack = TransferAck(incarnation=incarnation, rank=rank, transfer_id=transfer_id, kind=kind, row_mask=mask)
        self.m.on_worker_output([HiSparseWorkerOutput(rank=rank, incarnation=incarnation, acks=(ack,))])
        self.m.check()

    def pins(self) -> tuple[int, int]:
        """(holders of page 0's resident blocks, references on its host block)."""
        page = self.inc.resident[0]
        assert [self.m.core.pool.refs(block) for block in page.blocks] == [1, 1], "one for all holders together"
        return page.pins, self.m.core.source.pool.refs(self.inc.host[0])


def test_a_page_sealed_by_this_step_is_spilled_behind_its_forward_with_bytes() -> None:
    d = Direct()
    (spill,) = d.first.spills
    assert (spill.id, spill.device_blocks, spill.host_block) == (1, d.inc.blocks(0), d.inc.host[0])
    assert spill.after_forward and spill.copy_bytes
    assert d.inc.states == bytes([PageState.SPILLING, PageState.GPU_ONLY])
    (mirror,) = d.first.mirrors
    assert (mirror.seat, mirror.first_page, mirror.host_blocks) == (0, 1, (d.inc.host[1],)), "the sealed page is skipped"


def test_pins_go_one_by_one() -> None:
    d = Direct()
    assert d.pins() == (2, 2)
    d.ack(AckKind.ENQUEUED)
    assert d.pins() == (1, 2) and d.inc.state(0) is PageState.SPILLING
    d.ack(AckKind.COMPLETED)
    assert d.pins() == (1, 1) and d.inc.state(0) is PageState.CLEAN_PINNED


def test_completed_implies_enqueued() -> None:
    d = Direct()
    d.ack(AckKind.COMPLETED)
    assert d.pins() == (1, 1)
    d.ack(AckKind.ENQUEUED)
    assert d.m.stats().acks_repeated == 1


def test_nothing_is_published_before_completed() -> None:
    d = Direct()
    d.m.retire(1, {"r": 6})
    d.ack(AckKind.ENQUEUED)
    assert d.m.stats().host_pages_published == 0
    d.ack(AckKind.COMPLETED)
    assert d.m.stats().host_pages_published == 1


@pytest.mark.parametrize("mask", [0, 0b0111, 0b1110, 0b11110000])
def test_a_mask_with_a_hole_is_a_failure_and_the_page_goes_again_with_bytes(mask: int) -> None:
    d = Direct()
    d.ack(AckKind.COMPLETED, mask=mask)
    d.m.retire(1, {"r": 6})
    assert d.inc.state(0) is PageState.GPU_ONLY and d.m.stats().spills_failed == 1
    assert d.m.stats().host_pages_published == 0 and d.pins() == (1, 1)
    (again,) = d.plan(2).spills
    assert again.id == 2 and again.copy_bytes and not again.after_forward


def test_a_decode_page_that_spans_covered_copies_no_bytes_until_its_mask_disappoints() -> None:
    d = Direct(max_tokens=12)
    d.ack(AckKind.COMPLETED)
    d.m.retire(1, {"r": 6})
    step = 1
    for position in range(6, 12):
        d.m.extend("r", [position])
        assert d.m.allocate("r", 1)
        step += 1
        command = d.plan(step, [("r", position, 1)])
        assert [span.host_blocks for span in command.mirrors] == [(d.inc.host[position // 4],)]
        d.m.retire(step, {"r": position + 1})
        if position == 7:
            assert not command.spills[0].copy_bytes, "rows 4, 5 came by the chunk's span, 6 and 7 by decode spans"
            assert command.spills[0].after_forward
            d.ack(AckKind.COMPLETED, command.spills[0].id)
    assert not command.spills[0].copy_bytes
    d.ack(AckKind.COMPLETED, command.spills[0].id, mask=0b0111)
    (again,) = d.plan(step + 1).spills
    assert again.copy_bytes


def test_private_pools_every_writer_must_acknowledge_and_every_mask_must_be_full() -> None:
    d = Direct(num_ranks=2, num_writers=2)
    d.ack(AckKind.ENQUEUED, rank=0)
    d.ack(AckKind.ENQUEUED, rank=0)
    assert d.pins()[0] == 2 and d.m.stats().acks_repeated == 1
    d.ack(AckKind.COMPLETED, rank=1)
    assert d.pins() == (1, 2), "rank 1's completed implies its enqueued; rank 0 has not completed"
    assert d.inc.state(0) is PageState.SPILLING
    d.ack(AckKind.COMPLETED, rank=0)
    assert d.inc.state(0) is PageState.CLEAN_PINNED
    d = Direct(num_ranks=2, num_writers=2)
    d.ack(AckKind.COMPLETED, rank=0)
    d.ack(AckKind.COMPLETED, rank=1, mask=1)
    assert d.inc.state(0) is PageState.GPU_ONLY


def test_failed_waits_for_every_writer_before_pins_go() -> None:
    d = Direct(num_ranks=2, num_writers=2)
    d.ack(AckKind.FAILED, rank=0)
    assert d.pins() == (2, 2)
    d.ack(AckKind.COMPLETED, rank=1)
    assert d.pins() == (1, 1) and d.inc.state(0) is PageState.GPU_ONLY


def test_acknowledgements_of_an_older_incarnation_are_dropped() -> None:
    d = Direct()
    d.ack(AckKind.COMPLETED, incarnation=4)
    assert d.m.stats().acks_old_incarnation == 1 and d.pins() == (2, 2)


def test_ids_never_issued_or_not_sent_are_our_bug() -> None:
    d = Direct()
    for transfer_id in (0, -1, 2, 99):
        with pytest.raises(InvariantError, match="never issued"):
            d.ack(AckKind.ENQUEUED, transfer_id)
    d.m.retire(1, {"r": 6})
    d.m.extend("r", [1, 2])
    d.m.allocate("r", 2)
    d.m.coordinator.plan_prefix_materialization([("r", 6, 2)])
    with pytest.raises(InvariantError, match="not sent"):
        d.ack(AckKind.ENQUEUED, 2)


def test_the_command_that_hands_out_a_block_under_a_copy_lists_the_fence() -> None:
    d = Direct()
    blocks = d.inc.blocks(0)
    d.ack(AckKind.ENQUEUED)
    d.m.retire(1, {"r": 6})
    d.m.preempt("r")
    assert d.m.core.pool.num_free == 59, "free, but fenced"
    assert not any(d.m.core.is_quiet(block) for block in blocks)
    d.m.open("b", [9] * 30, max_tokens=4)
    assert d.m.admit("b", d.m.prefix("b"), chunk_tokens=8)
    assert d.m.allocate("b", 30)
    command = d.plan(2, [("b", 0, 30)])
    assert {(f.block, f.transfer_id) for f in command.fences} == {(b, 1) for b in blocks}
    d.ack(AckKind.COMPLETED)
    assert d.m.core.fences == {}


def test_overdue_copies_are_named_and_their_pins_stay() -> None:
    d = Direct()
    d.now_s = 29.0
    assert d.m.overdue_transfers() == ()
    d.now_s = 31.0
    assert d.m.overdue_transfers() == ((0, 1),)
    assert d.pins() == (2, 2) and d.m.has_pending_work()
    d.m.worker_lost(6)
    assert d.m.stats().device_blocks_free == 59 and d.m.stats().host_blocks_free == 19
    assert not d.m.has_pending_work()
    d.ack(AckKind.COMPLETED, incarnation=5)
    assert d.m.stats().acks_old_incarnation == 1


def test_a_finished_request_is_published_by_its_last_acknowledgement() -> None:
    d = Direct()
    d.m.retire(1, {"r": 6})
    d.m.free("r")
    stats = d.m.stats()
    assert stats.host_blocks_free == 19 - 2, "its host blocks stay leased"
    assert d.m.has_pending_work() and d.m.has_pending_reclamation()
    d.ack(AckKind.ENQUEUED)
    assert d.m.stats().host_pages_published == 0
    d.ack(AckKind.COMPLETED)
    stats = d.m.stats()
    assert (stats.host_pages_published, stats.host_blocks_free) == (1, 19)
    assert stats.device_blocks_loose == 1 + 2, "its indexer page and its resident page stay readable"
    d.m.close("r")
    d.m.open("again", list(range(6)), max_tokens=4)
    assert d.m.prefix("again").tokens == 4
    d.m.admit("again", d.m.prefix("again"), chunk_tokens=2)
    assert d.m.stats().pages_adopted == 1
    d.m.check()


@pytest.mark.parametrize("how", ["preempt", "abort"])
def test_a_preempted_or_aborted_request_publishes_nothing_more(how: str) -> None:
    d = Direct()
    d.m.retire(1, {"r": 6})
    if how == "preempt":
        d.m.preempt("r")
    else:
        d.m.free("r", finished=False)
    d.ack(AckKind.COMPLETED)
    assert d.m.stats().host_pages_published == 0 and d.m.stats().host_blocks_free == 19


def test_a_hash_already_published_stays_with_its_first_block() -> None:
    h = Harness(device_blocks=100)
    for name in "ab":
        h.add(name, list(range(8)), 1)
    h.drain()
    assert h.manager.stats().host_pages_published == 2 and h.manager.stats().spills_completed == 4


def test_the_budget_of_one_command_spans_all_requests() -> None:
    h = Harness(device_blocks=300, host_blocks=60, max_model_len=16, chunk=16, seats=4)
    for i in range(4):
        h.add(f"r{i}", [i * 50 + k for k in range(13)], 3)
    h.step()
    assert len(h.last.spills) == 4, "max_model_len // block_size"
    h.step()
    assert len(h.last.spills) == 4
    h.drain()


def test_rejected_drafts_uncover_their_rows() -> None:
    d = Direct(max_tokens=12)
    d.m.retire(1, {"r": 6})
    d.m.extend("r", [7])
    assert d.m.allocate("r", 2)
    d.plan(2, [("r", 6, 2)])
    assert d.inc.covered == {1: 0b1111}
    d.m.retire(2, {"r": 7})
    assert d.inc.covered == {1: 0b0111}
    assert d.inc.spill_target == 1, "a page with a rejected row is not sealed"


def test_a_row_never_goes_to_a_page_that_is_not_exclusively_ours() -> None:
    d = Direct()
    d.m.retire(1, {"r": 6})
    d.inc.valid = d.inc.planned = d.inc.settled = 3
    with pytest.raises(InvariantError, match="step would write page 0 of 'r', which is SPILLING"):
        d.plan(2, [("r", 3, 1)])

"""Offload of indexer pages: what can be hit and when, pins, eviction, aborted loads, and the bytes."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse.connector.base import IndexerOffload, SchedulerConnector, WorkerConnector
from hisparse.connector.offloading import OffloadAck, OffloadingScheduler, OffloadOutput
from hisparse.connector.offloading_worker import OffloadingWorker
from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.worker.device_cache import DeviceCache

SHAPE = ModelShape(
    model_type="deepseek_v32", num_layers=3, num_heads=2, kv_lora_rank=8, rope_dim=8, index_head_dim=8, top_k=8,
    max_positions=4096, vocab_size=64, index_groups=tuple(IndexGroup(leader=i, layers=(i,)) for i in range(3)))


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def ack(job_id: int, rank: int = 0, reason: str = "") -> OffloadOutput:
    return OffloadOutput(rank=rank, acks=(OffloadAck(job_id=job_id, reason=reason),))


def stored(scheduler: OffloadingScheduler, *numbers: int, ranks: int = 1) -> None:
    for i in numbers:
        assert scheduler.plan_store(key(i), 100 + i)
    command = scheduler.build_metadata(1)
    assert command is not None
    for job in command.stores:
        for rank in range(ranks):
            scheduler.update([ack(job.job_id, rank)])


def test_page_can_be_hit_only_when_every_rank_stored_it() -> None:
    scheduler = OffloadingScheduler(4, num_ranks=2)
    assert scheduler.plan_store(key(1), 11)
    assert not scheduler.plan_store(key(1), 12), "already on its way: no second copy, no pin"
    command = scheduler.build_metadata(1)
    assert command is not None and [(job.slots, job.device_blocks) for job in command.stores] == [((0,), (11,))]
    (job,) = command.stores
    assert scheduler.hit([key(1)], 0) == 0
    assert scheduler.update([ack(job.job_id, 1)]).released_device_blocks == ()
    assert scheduler.hit([key(1)], 0) == 0, "rank 0 may still be copying"
    assert scheduler.update([ack(job.job_id, 1)]).released_device_blocks == (), "a repeated ack is ignored"
    assert scheduler.update([ack(job.job_id, 0)]).released_device_blocks == (11,)
    assert scheduler.hit([key(1)], 0) == 1
    assert not scheduler.has_pending_work() and scheduler.stats().late_acks_ignored == 1
    scheduler.check()


def test_hit_counts_consecutive_pages_from_the_first_and_is_pure() -> None:
    scheduler = OffloadingScheduler(4, num_ranks=1)
    stored(scheduler, 0, 1, 3)
    keys = [key(i) for i in range(5)]
    for _ in range(1000):
        assert [scheduler.hit(keys, first) for first in range(6)] == [2, 1, 0, 1, 0, 0]
    stored(scheduler, 7, 8)
    assert scheduler.hit(keys, 0) == 0, "asking did not make page 0 younger: it was the first to go"


def test_failed_store_frees_slot_and_pin_and_is_never_hit() -> None:
    scheduler = OffloadingScheduler(1, num_ranks=2)
    scheduler.plan_store(key(1), 11)
    (job,) = scheduler.build_metadata(1).stores  # type: ignore[union-attr]
    assert not scheduler.plan_store(key(2), 12), "no slot can be freed: its copy is in flight"
    scheduler.update([ack(job.job_id, 0, "disk on fire")])
    assert scheduler.update([ack(job.job_id, 1)]).released_device_blocks == (11,)
    assert scheduler.hit([key(1)], 0) == 0
    assert scheduler.plan_store(key(2), 12)
    scheduler.check()
    assert scheduler.stats().refused_pages == 1


def test_least_recently_used_page_goes_and_a_page_being_loaded_does_not() -> None:
    scheduler = OffloadingScheduler(3, num_ranks=1)
    stored(scheduler, 0, 1, 2)
    scheduler.plan_load("r", [key(0)], [50])
    (load,) = scheduler.build_metadata(2).loads  # type: ignore[union-attr]
    assert scheduler.plan_store(key(3), 60) and scheduler.plan_store(key(4), 61)
    assert scheduler.hit([key(1)], 0) == 0 and scheduler.hit([key(2)], 0) == 0
    assert not scheduler.plan_store(key(5), 62), "slots: one being read, two being written"
    assert scheduler.hit([key(0)], 0) == 1
    assert scheduler.update([ack(load.job_id)]).loaded == {"r"}
    assert scheduler.plan_store(key(5), 62)
    assert scheduler.hit([key(0)], 0) == 0
    scheduler.check()


def test_load_is_done_when_every_rank_says_so_and_failed_when_any_fails() -> None:
    scheduler = OffloadingScheduler(4, num_ranks=2)
    stored(scheduler, 0, 1, ranks=2)
    scheduler.plan_load("good", [key(0), key(1)], [50, 51])
    scheduler.plan_load("bad", [key(0)], [52])
    good, bad = scheduler.build_metadata(2).loads  # type: ignore[union-attr]
    assert good.device_blocks == (50, 51) and scheduler.loading() == {"good", "bad"}
    assert scheduler.update([ack(good.job_id, 0), ack(bad.job_id, 0, "boom")]).failed == {}
    events = scheduler.update([ack(good.job_id, 1), ack(bad.job_id, 1)])
    assert events.loaded == {"good"} and events.failed == {"bad": "rank 0: boom"}
    assert not scheduler.loading() and not scheduler.has_pending_work()
    assert scheduler.stats().loaded_pages == 2


def test_load_of_a_page_that_was_evicted_since_the_hit_fails_without_a_copy() -> None:
    scheduler = OffloadingScheduler(1, num_ranks=1)
    stored(scheduler, 0)
    assert scheduler.hit([key(0)], 0) == 1
    assert scheduler.plan_store(key(9), 60)
    scheduler.plan_load("r", [key(0)], [50])
    assert scheduler.loading() == {"r"} and scheduler.has_pending_work()
    assert scheduler.build_metadata(2).loads == ()  # type: ignore[union-attr]
    events = scheduler.update([])
    assert list(events.failed) == ["r"] and scheduler.update([]).failed == {}


def test_a_load_that_failed_at_once_and_was_closed_unheard_is_drained_once() -> None:
    """Whoever saw it loading waits for its end."""
    scheduler = OffloadingScheduler(4, num_ranks=2)
    scheduler.plan_load("r", [key(1)], [9])
    assert scheduler.loading() == {"r"}
    scheduler.request_closed("r")
    assert scheduler.loading() == frozenset() and scheduler.has_pending_work()
    events = scheduler.update([])
    assert events.drained == ("r",) and not events.failed
    assert scheduler.update([]).drained == () and not scheduler.has_pending_work()


@pytest.mark.parametrize("order", list(itertools.permutations(["ack0", "ack1", "close"])))
def test_b17_b18_abort_in_any_order_ends_the_load_once(order: tuple[str, ...]) -> None:
    scheduler = OffloadingScheduler(1, num_ranks=2)
    stored(scheduler, 0, ranks=2)
    scheduler.plan_load("r", [key(0)], [50])
    (job,) = scheduler.build_metadata(2).loads  # type: ignore[union-attr]
    loaded: list[str] = []
    drained: list[str] = []
    for event in order:
        if event == "close":
            scheduler.request_closed("r")
            scheduler.request_closed("r")
            if order[-1] != "close":
                assert not scheduler.plan_store(key(1), 60), "the slot is being read although nobody waits for it"
        else:
            events = scheduler.update([ack(job.job_id, int(event[-1]))])
            loaded += events.loaded
            drained += events.drained
        scheduler.check()
    assert (loaded, drained) == ((["r"], []) if order[-1] == "close" else ([], ["r"]))
    assert scheduler.plan_store(key(1), 60)


def test_readmitted_request_loads_again_while_its_old_load_drains() -> None:
    scheduler = OffloadingScheduler(2, num_ranks=1)
    stored(scheduler, 0)
    scheduler.plan_load("r", [key(0)], [50])
    (old,) = scheduler.build_metadata(2).loads  # type: ignore[union-attr]
    with pytest.raises(InvariantError, match="already loading"):
        scheduler.plan_load("r", [key(0)], [51])
    scheduler.request_closed("r")
    scheduler.plan_load("r", [key(0)], [51])
    (new,) = scheduler.build_metadata(3).loads  # type: ignore[union-attr]
    events = scheduler.update([ack(old.job_id)])
    assert events.drained == ("r",) and not events.loaded
    assert scheduler.update([ack(new.job_id)]).loaded == {"r"}
    scheduler.check()


def test_restarted_workers_hold_nothing() -> None:
    scheduler = OffloadingScheduler(4, num_ranks=1)
    stored(scheduler, 0)
    scheduler.plan_store(key(1), 11)
    scheduler.plan_load("live", [key(0)], [50])
    scheduler.plan_load("gone", [key(0)], [51])
    command = scheduler.build_metadata(2)
    assert command is not None
    scheduler.request_closed("gone")
    scheduler.workers_restarted()
    assert scheduler.loading() == {"live"} and scheduler.has_pending_work()
    events = scheduler.update([])
    assert list(events.failed) == ["live"] and events.drained == ("gone",)
    assert events.released_device_blocks == (), "block 11 is gone with the ranks; it may be another store's by now"
    assert scheduler.hit([key(0)], 0) == 0 and not scheduler.has_pending_work()
    late = scheduler.update([ack(command.stores[0].job_id), *(ack(job.job_id) for job in command.loads)])
    assert late.released_device_blocks == () and not late.loaded and not late.drained
    scheduler.check()


def test_impossible_calls_are_refused() -> None:
    with pytest.raises(ConfigError):
        OffloadingScheduler(0, num_ranks=1)
    scheduler = OffloadingScheduler(1, num_ranks=1)
    with pytest.raises(InvariantError, match="never issued"):
        scheduler.update([ack(1)])
    with pytest.raises(InvariantError, match="2 keys for 1 blocks"):
        scheduler.plan_load("r", [key(0), key(1)], [5])
    with pytest.raises(InvariantError):
        scheduler.plan_load("r", [], [])


# ------------------------------------------------------------------------------------ with bytes


class Rig:
    """Scheduler half and the workers of `num_ranks` ranks over real device caches."""

    def __init__(self, *, block_size: int = 64, num_ranks: int = 2, blocks: int = 48, capacity: int = 32) -> None:
        self.layout = KVCacheLayout.build(SHAPE, block_size=block_size, dtype="float32")
        self.caches = [DeviceCache(self.layout, blocks) for _ in range(num_ranks)]
        self.workers = [OffloadingWorker(self.layout, cache, capacity_pages=capacity, rank=rank)
                        for rank, cache in enumerate(self.caches)]
        self.scheduler = OffloadingScheduler(capacity, num_ranks=num_ranks)
        self.step_number = 0

    def step(self) -> Any:
        self.step_number += 1
        command = self.scheduler.build_metadata(self.step_number)
        outputs = []
        for worker in self.workers:
            worker.start_step(command)
            worker.end_step()
            output = worker.output()
            if output is not None:
                outputs.append(output)
        return self.scheduler.update(outputs)

    def settle(self) -> tuple[set[str], list[int]]:
        loaded: set[str] = set()
        released: list[int] = []
        for _ in range(5000):
            events = self.step()
            loaded |= events.loaded
            released += events.released_device_blocks
            assert not events.failed
            if not self.scheduler.has_pending_work():
                return loaded, released
            time.sleep(0.001)
        raise AssertionError("offload jobs did not end")


def test_b20_whole_pages_of_a_prompt_are_stored_and_loaded_and_its_tail_is_left_out() -> None:
    """A prompt of 1,000 tokens has 15 whole pages of 64; the tail of 40 tokens is no page and is rebuilt, not read."""
    rig = Rig()
    whole, tail = 1000 // 64, 1000 % 64
    assert (whole, tail) == (15, 40)
    keys = [key(i) for i in range(whole)]
    source = list(range(1, whole + 1))
    for rank, cache in enumerate(rig.caches):
        cache.bytes.copy_(torch.arange(cache.bytes.numel()).view_as(cache.bytes).remainder(251 - rank).to(torch.uint8))
    originals = [cache.bytes.clone() for cache in rig.caches]
    for page, block in zip(keys, source):
        assert rig.scheduler.plan_store(page, block)
    _, released = rig.settle()
    assert sorted(released) == source, "each pin is dropped once"
    assert rig.scheduler.hit([*keys, key(99)], 0) == 15
    for cache in rig.caches:
        cache.bytes[source] = 0  # the blocks went on to somebody else
    target = [40, 21, 33, 22, 34, 23, 35, 24, 36, 25, 37, 26, 38, 27, 39]
    rig.scheduler.plan_load("r", keys, target)
    assert rig.settle()[0] == {"r"}
    size = rig.layout.indexer_page_bytes
    for cache, original in zip(rig.caches, originals):
        for to, origin in zip(target, source):
            assert torch.equal(cache.bytes[to, :size], original[origin, :size])
            assert torch.equal(cache.bytes[to, size:], original[to, size:]), "padding of the block is not touched"
    for worker in rig.workers:
        worker.shutdown()
        worker.shutdown()
    with pytest.raises(InvariantError):
        rig.workers[0].start_step(None)


def test_stores_start_after_the_forward() -> None:
    rig = Rig(num_ranks=1)
    rig.caches[0].bytes[7] = 1
    rig.scheduler.plan_store(key(0), 7)
    worker = rig.workers[0]
    worker.start_step(rig.scheduler.build_metadata(1))
    time.sleep(0.05)
    assert worker.output() is None
    rig.caches[0].bytes[7] = 2  # the forward of this step writes
    worker.end_step()
    assert rig.settle()[1] == [7]
    rig.scheduler.plan_load("r", [key(0)], [9])
    rig.settle()
    assert (rig.caches[0].bytes[9, : rig.layout.indexer_page_bytes] == 2).all()
    worker.shutdown()


def test_copy_that_raises_is_reported_as_failed() -> None:
    rig = Rig(num_ranks=1)
    rig.scheduler.plan_store(key(0), 1000)
    events = None
    for _ in range(1000):
        events = rig.step()
        if events.released_device_blocks:
            break
        time.sleep(0.001)
    assert events is not None and events.released_device_blocks == (1000,)
    assert rig.scheduler.hit([key(0)], 0) == 0
    rig.scheduler.check()
    rig.workers[0].shutdown()


def test_halves_fit_the_protocols_of_the_boundary() -> None:
    rig = Rig(num_ranks=1)
    offload: IndexerOffload = rig.scheduler
    assert isinstance(rig.scheduler, SchedulerConnector) and isinstance(rig.workers[0], WorkerConnector)
    assert offload.hit([], 0) == 0
    rig.workers[0].shutdown()


class StoreMachine(RuleBasedStateMachine):
    """Random life of a small store with 2 ranks; a plain model says which keys were stored and never evicted wrongly."""

    @initialize(capacity=st.integers(1, 4))
    def begin(self, capacity: int) -> None:
        self.scheduler = OffloadingScheduler(capacity, num_ranks=2)
        self.flying: list[tuple[Any, bool, set[int]]] = []  # job, is load, ranks still to answer
        self.pins: dict[int, int] = {}
        self.slots: dict[int, bytes] = {}  # what every rank's store holds, by slot
        self.keys_of_block: dict[int, bytes] = {}
        self.live: set[str] = set()
        self.closed: list[str] = []
        self.block = 100

    @rule(number=st.integers(0, 6))
    def store(self, number: int) -> None:
        self.block += 1
        if self.scheduler.plan_store(key(number), self.block):
            self.pins[self.block] = 1
            self.keys_of_block[self.block] = key(number)

    @rule(numbers=st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True))
    def load(self, numbers: list[int]) -> None:
        keys = [key(i) for i in numbers]
        if self.scheduler.hit(keys, 0) == len(keys):
            self.block += 10
            name = f"r{self.block}"
            self.scheduler.plan_load(name, keys, list(range(self.block - len(keys) + 1, self.block + 1)))
            self.live.add(name)
            self.wanted = keys

    @rule()
    def dispatch(self) -> None:
        command = self.scheduler.build_metadata(1)
        if command is not None:
            self.flying += [(job, True, {0, 1}) for job in command.loads]
            self.flying += [(job, False, {0, 1}) for job in command.stores]

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.flying) - 1))
        job, is_load, ranks = self.flying[i]
        rank = data.draw(st.sampled_from(sorted(ranks)))
        reason = data.draw(st.sampled_from(["", "", "", "boom"]))
        ranks.discard(rank)
        if not is_load:
            for slot, block in zip(job.slots, job.device_blocks):
                self.slots[slot] = self.keys_of_block[block]
        if not ranks:
            del self.flying[i]
        events = self.scheduler.update([ack(job.job_id, rank, reason)])
        for block in events.released_device_blocks:
            del self.pins[block]
        for name in (*events.loaded, *events.failed):
            self.live.remove(name)
        for name in events.drained:
            self.closed.remove(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.live.remove(name)
        self.closed.append(name)
        self.scheduler.request_closed(name)

    @invariant()
    def accounts_hold(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert self.scheduler.loading() == self.live
        for job, is_load, _ in self.flying:
            for other, other_load, _ in self.flying:
                if job is not other and not (is_load and other_load):
                    assert not set(job.slots) & set(other.slots), "a slot is written while somebody else uses it"
        for name, entry in self.scheduler._entries.items():
            if self.scheduler.hit([name], 0):
                assert self.slots[entry.slot] == name, "a hit names a slot that holds another page"


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase

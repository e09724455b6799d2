"""Reported failures of other systems that are about several ranks and about who waits for whom. Labels as in the list of
scenarios."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hisparse.types import Landing
from tests.cache.harness import Harness, available
from tests.cache.laws import check
from tests.cache.world import World

# ----------------------------------------------------------------------------------------------------------- B24

NUM_STEPS = 1000
FAILING_STEP = 100
MAX_DELAY_MS = 5.0


class Ranks:
    """Four ranks on one shared pool. Each runs the steps in order, up to 5 ms after they were sent, so that ranks are in
    different steps at the same time; what each was told is written down."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(seed, groups=2, spare=20, host=30, store=0, drafts=True, elastic=3, ranks=4)
        self.told: list[list[str]] = [[] for _ in range(4)]
        self.durable: set[int] = set()
        """Host pages whose writer has reported them complete since they were handed out."""
        self.host_reads = Counter[int]()
        for worker in self.world.h.workers:
            self.watch(worker.rank)

    def watch(self, rank: int) -> None:
        """Writes down what a rank is told, and which host pages it reads."""
        worker = self.world.h.workers[rank]
        start, check_rows = worker.start, worker.check_rows

        def started(command) -> None:
            self.told[rank].append(repr(command))
            start(command)

        def read(seat: int, rows: list[int], who: str) -> list[str]:
            tiers = check_rows(seat, rows, who)
            for page, tier in enumerate(tiers):
                if tier == "host":
                    block = worker.table(worker.layout.source.group_id, seat)[page]
                    assert block in self.durable, f"rank {rank} reads host block {block} before its writer completed it"
                    self.host_reads[rank] += 1
            return tiers

        worker.start, worker.check_rows = started, read  # type: ignore[method-assign]

    def send(self) -> None:
        """One step is dispatched; every rank will run it after a delay of its own."""
        world = self.world
        world.dispatch(use_drafts=self.rng.random() < 0.5, most=4)
        self.durable -= set(world.flights[-1].command.new_host_blocks.ids)

    def run(self) -> None:
        """Every rank runs what it has, in the order in which delays end; then the oldest step's output is complete."""
        world = self.world
        due = sorted((step * MAX_DELAY_MS + self.rng.uniform(0.0, MAX_DELAY_MS), rank)
                     for step, flight in enumerate(world.flights) for rank in range(4) if rank not in flight.done)
        for _, rank in due:
            if self.rng.random() < 0.7 or len(world.flights) == 3:
                world.execute(rank)
        writer = world.h.workers[0]
        for transfer_id in [i for i in writer.copies if self.rng.random() < 0.5]:
            block = writer.copies[transfer_id].transfer.host_block
            writer.complete(transfer_id)
            if writer.host.masks[block] == writer.full:
                self.durable.add(block)
        for rank in range(4):
            world.report_page_copies(rank)
        world.mail.hear(self.rng.choice((3, 100)))
        world.retire()

    def traffic(self) -> None:
        """Requests come, are admitted or imported, and end."""
        world, rng = self.world, self.rng
        if rng.random() < 0.3:
            world.arrive(rng.randint(4, 36), rng.randint(0, 5), rng.choice((3, 9, 20)))
        if rng.random() < 0.5:
            world.admit(rng.choice((None, None, Landing.HOST)))
        if rng.random() < 0.3:
            self.load_done(failed=False)
        if rng.random() < 0.02:
            world.end_request(finished=rng.random() < 0.5)
        if not world.m.stats().device_blocks_free and not world.m.has_pending_reclamation():
            world.preempt()

    def load_done(self, *, failed: bool) -> None:
        h = self.world.h
        blocks = {request_id: [b for b in load.target.pages.host_blocks] for request_id, load in h.imports.items()
                  if load.target.landing is Landing.HOST}
        self.world.load_done(failed, num_rows=self.rng.randint(0, 12))
        if not failed:
            for request_id in blocks.keys() - h.imports.keys():
                self.durable.update(blocks[request_id])


def test_b24_four_ranks_decide_alike_for_a_thousand_steps_and_fail_together() -> None:
    """One shared pool, 1,000 steps, delays of 0..5 ms per rank; on step 100 rank 2 finds no host memory for an import.

    Every rank is told the same in every step and skips none; the failed import is rolled back for all; no rank reads a host
    page before the writer's completion of it was seen.
    """
    ranks = Ranks(seed=24)
    world, h = ranks.world, ranks.world.h
    failed_at = 0
    while h.step_number < NUM_STEPS:
        if h.step_number >= FAILING_STEP and not failed_at:
            failed_at = fail_an_import_on_rank_2(ranks)
        ranks.traffic()
        if len(world.flights) < 3:
            ranks.send()
        ranks.run()
        check(world)
    while world.flights:
        ranks.run()
    stats = world.m.stats()
    assert failed_at == FAILING_STEP and stats.imports_failed == 1
    assert [len(told) for told in ranks.told] == [NUM_STEPS] * 4, "no rank skips a step"
    assert ranks.told[0] == ranks.told[1] == ranks.told[2] == ranks.told[3]
    assert min(ranks.host_reads[rank] for rank in range(4)) > 100
    assert stats.spills_completed > 200 and stats.host_pages_published > 10 and stats.imports_completed > 3
    for worker in h.workers:
        del worker.start, worker.check_rows  # nobody watches the end
    world.settle()


def fail_an_import_on_rank_2(ranks: Ranks) -> int:
    """Three ranks have every byte of it, rank 2 none. Returns the step."""
    world, h = ranks.world, ranks.world.h
    while world.flights:
        ranks.run()
    for req in list(h.reqs.values()):
        world.finish(req, finished=False)
    req = world.open("imported", [7 * i % 11 for i in range(30)], 4)
    for request_id in [*h.imports, *h.loads]:
        h.finish_load(request_id, failed=True)
    published = world.m.published_host_blocks()
    before = world.m.stats()
    admission = h.admit(req, Landing.HOST, 30)
    assert admission is not None and admission.import_target is not None
    world.admissions["imported"] += 1
    world.landable["imported"] = 0
    load = h.imports.pop("imported")
    step = h.step_number
    for worker in h.workers:
        if worker.rank != 2:
            worker.land(load)
    assert world.m.finish_load("imported", failed=True) == 0
    h.reqs["imported"].state, h.reqs["imported"].computed = "running", 0
    check(world)
    assert world.m.page_views("imported") == ()
    assert set(world.m.published_host_blocks()) <= set(published), "nothing of it is published"
    world.preempt()
    after = world.m.stats()
    assert (after.device_blocks_free, after.host_blocks_free) == (before.device_blocks_free, before.host_blocks_free)
    assert (after.device_blocks_reserved, after.host_blocks_reserved) == (before.device_blocks_reserved,
                                                                         before.host_blocks_reserved)
    return step


# ----------------------------------------------------------------------------------------------------------- B26


def b26(landing: Landing) -> Harness:
    """270 pages of 16. L has 4,000 of 4,080 tokens loaded: it holds 250 pages and needs 5; 20 are free."""
    groups = 1
    blocks = 270 * (1 + groups) if landing is Landing.RESIDENT else 600
    h = Harness(groups=groups, block_size=16, hot_rows=16, chunk=80, seats=4, device_blocks=1 + blocks, host_blocks=271,
                max_model_len=4096)
    loaded = h.add("L", list(range(4080)), 1)
    assert h.admit(loaded, landing, 4000) is not None
    h.dispatch([])
    h.retire([])
    assert h.finish_load("L") == 4000
    h.add("H", [9000 + i for i in range(1600)], 1)
    h.add("W", [20_000 + i for i in range(160)], 1)
    return h


@pytest.mark.parametrize("landing", Landing)
def test_b26_a_loaded_request_runs_although_the_head_of_the_queue_does_not_fit(landing: Landing) -> None:
    h = b26(landing)
    stats = h.manager.stats()
    assert len(h.manager.page_views("L")) == 250 and stats.host_blocks_free == 20
    if landing is Landing.RESIDENT:
        assert stats.device_blocks_free == 20 * 2
    assert available(stats, "host") == 15, "5 of the 20 are L's"
    prefix = h.manager.prefix("H")
    assert not h.manager.fits("H", prefix, landing=None, chunk_tokens=80).now
    assert h.manager.fits("W", h.manager.prefix("W"), landing=None, chunk_tokens=80).now
    ended: list[str] = []
    for _ in range(34):
        h.step()
        ended += [name for name in "LHW" if name in h.finished and name not in ended]
        if len(ended) == 3:
            break
    assert ended[0] == "L" and sorted(ended) == ["H", "L", "W"], f"only {ended} ended within 34 steps"
    assert h.manager.stats().preemptions == 0
    h.drain()


def test_b26_two_loaded_requests_do_not_lock_each_other() -> None:
    """Each needs more than what is left once both prefixes are loaded: the second gets in only where both can go on."""
    for host_blocks in (271, 400, 510, 511, 540):
        h = Harness(groups=1, block_size=16, hot_rows=16, chunk=80, seats=4, device_blocks=700, host_blocks=host_blocks,
                    max_model_len=4096)
        both = [h.add(name, [base + i for i in range(4080)], 1) for name, base in (("L1", 0), ("L2", 50_000))]
        admitted = [h.admit(req, Landing.HOST, 4000) is not None for req in both]
        assert admitted == [True, host_blocks > 2 * 255]
        assert available(h.manager.stats(), "host") >= 0
        for _ in range(6 + 120 * (not admitted[1])):
            h.step()
        assert set(h.finished) == {"L1", "L2"} and h.manager.stats().preemptions == 0
        h.drain()


@pytest.mark.parametrize("device_blocks", range(1 + 16 + 4 + 2 * 4, 1 + 16 + 4 + 2 * 4 + 26, 2))
def test_b26_half_loaded_requests_in_a_small_pool_all_end(device_blocks: int) -> None:
    """Both hold imported prefixes and must still prefill; the pool is too small for both to be resident."""
    h = Harness(groups=2, device_blocks=device_blocks, host_blocks=60, max_model_len=64, seats=4)
    for name, base in (("l", 0), ("w", 200)):
        req = h.add(name, [base + i for i in range(30)], 4)
        h.admit(req, Landing.HOST, 18)
    for i, length in enumerate((20, 5)):
        h.add(f"h{i}", [400 + 50 * i + k for k in range(length)], 3)
    h.drain()
    assert len(h.finished) == 4

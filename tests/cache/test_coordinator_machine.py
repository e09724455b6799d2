"""Random lives of requests against the dictionary worker; commands run late, copies finish in any order.

A dispatched step executes on the worker only when a rule says so, so anything that writes a block too early (an import
into a block that a dispatched step still reads, a copy that reads a block too late) shows as a wrong row.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse.errors import InvariantError
from hisparse.types import AckKind, HiSparseWorkerOutput, Landing, SparseKVOffloadCommand, TransferAck
from tests.cache.fake_worker import FakeWorker, Row
from tests.cache.harness import Harness, Req, Store

MAX_LEN = 40


@dataclass
class Chunk:
    req: Req
    seat: int
    first: int
    start: int
    rows: list[Row]
    """Written at positions start, start + 1, ..."""
    expect: list[Row]
    """Every row attention may select, by position."""
    accepted: int
    """Rows in cache after the step."""
    drafts: list[int]
    incarnation: int
    """Admissions of the request so far."""


@dataclass
class Flight:
    step: int
    command: SparseKVOffloadCommand
    chunks: list[Chunk]
    plain: bool
    executed: bool = False
    drafts: list[int] = field(default_factory=list)


class Lives(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16), groups=st.integers(1, 3), spare=st.integers(0, 40), host=st.integers(0, 20),
                store=st.booleans(), drafts=st.booleans(), elastic=st.integers(0, 6))
    def start(self, seed: int, groups: int, spare: int, host: int, store: bool, drafts: bool, elastic: int = 0) -> None:
        pages = MAX_LEN // 4
        self.h = Harness(device_blocks=1 + pages + 2 * groups + 4 * groups + spare, host_blocks=pages + 2 + host,
                         max_model_len=MAX_LEN, seats=4, chunk=8, groups=groups, seed=seed, hot_rows_max=8 + 4 * elastic,
                         store=Store(capacity=12) if store else None)
        self.m = self.h.manager
        self.rng = random.Random(seed)
        self.drafts = drafts
        self.flights: list[Flight] = []
        self.count = 0
        self.admissions: dict[str, int] = {}
        self.landable: dict[str, int] = {}
        """Request -> step whose command must have arrived before its bytes may land; it need not have run."""
        self.old_acks: list[TransferAck] = []
        self.held: dict[str, tuple[Req, object, object]] = {}
        self.lost: set[int] = set()

    @property
    def worker(self) -> FakeWorker:
        return self.h.worker

    def in_flight(self, req: Req) -> bool:
        return any(chunk.req is req for flight in self.flights for chunk in flight.chunks)

    def pick(self, state: str) -> Req | None:
        reqs = [req for req in self.h.reqs.values() if req.state == state]
        return self.rng.choice(reqs) if reqs else None

    # ------------------------------------------------------------------------------------------- requests
    @precondition(lambda self: len(self.h.reqs) < 6)
    @rule(length=st.integers(1, MAX_LEN - 4), kind=st.integers(0, 2), max_tokens=st.integers(1, 9))
    def arrive(self, length: int, kind: int, max_tokens: int) -> None:
        self.count += 1
        tokens = [(kind * 7 + i) % 11 for i in range(length)]
        self.h.add(f"r{self.count}", tokens, min(max_tokens, MAX_LEN - length))

    @rule(landing=st.sampled_from([None, None, Landing.HOST, Landing.RESIDENT]))
    def admit(self, landing: Landing | None) -> None:
        req = self.pick("waiting")
        if req is None:
            return
        before = self.m.stats()
        prefix = self.m.prefix(req.request_id)
        for other in Landing:
            self.m.fits(req.request_id, prefix, landing=other, import_tokens=len(req.tokens), chunk_tokens=8)
        assert self.m.stats() == before, "a query changed something"
        if self.h.admit(req, landing, len(req.tokens) if landing is not None else 0) is not None:
            self.admissions[req.request_id] = self.admissions.get(req.request_id, 0) + 1
            self.landable[req.request_id] = self.h.step_number + 1

    @rule(failed=st.booleans(), partial=st.booleans())
    def load_done(self, failed: bool, partial: bool) -> None:
        ready = [r for r in [*self.h.imports, *self.h.loads] if self.landable[r] <= self.h.step_number]
        if ready:
            request_id = self.rng.choice(ready)
            late = self.m.stats().late_completions
            live = self.h.reqs.get(request_id)
            waiting = live is not None and live.state == "loading"
            self.h.finish_load(request_id, failed=failed, partial=partial)
            assert self.m.stats().late_completions == late + (not waiting)

    @rule()
    def late_load(self) -> None:
        """A completion nobody waits for."""
        before = self.m.stats()
        assert self.m.finish_load("nobody", failed=False) == 0
        assert self.m.stats().late_completions == before.late_completions + 1

    @rule(finished=st.booleans())
    def end_request(self, finished: bool) -> None:
        """Finish or abort, at any moment, also while steps are in flight."""
        if self.h.reqs:
            req = self.rng.choice(list(self.h.reqs.values()))
            self.h.finish(req, finished=finished)
            self.m.free(req.request_id)

    @rule()
    def preempt(self) -> None:
        req = self.pick("running")
        if req is not None:
            self.h.preempt(req)
            self.m.preempt(req.request_id)

    # ------------------------------------------------------------------------------------------- steps
    @precondition(lambda self: len(self.flights) < 3)
    @rule(use_drafts=st.booleans(), most=st.integers(0, 4))
    def dispatch(self, use_drafts: bool, most: int) -> None:
        picked: list[tuple[Req, int, int, list[int]]] = []
        for req in [r for r in self.h.reqs.values() if r.state == "running" and not self.in_flight(r)][:most]:
            if req.computed >= len(req.tokens):
                picked.append((req, len(req.tokens) - 1, 1, []))
                continue
            tokens, drafts = min(self.h.chunk, len(req.tokens) - req.computed), []
            room = req.prompt + req.max_tokens - 1 - len(req.tokens)
            if self.drafts and use_drafts and req.computed + 1 == len(req.tokens) and room > 0:
                drafts = [self.rng.randrange(500) for _ in range(min(room, 5))]
            if self.m.allocate(req.request_id, tokens + len(drafts)):
                picked.append((req, req.computed, tokens + len(drafts), drafts))
        plain = self.m.all_context_pages_resident([req.request_id for req, *_ in picked])
        self.h.step_number += 1
        command = self.m.plan_step(self.h.step_number, [(r.request_id, first, n) for r, first, n, _ in picked])
        assert command is not None
        self.worker.receive(command)
        chunks = []
        for req, first, n, drafts in picked:
            tokens = req.tokens + drafts
            row = Req("", tokens, 0, 0, req.extra).row
            start = max(first, req.computed)
            accepted = first + n - len(drafts) + self.rng.randint(0, len(drafts))
            chunks.append(Chunk(req, req.seat, first, start, [row(p) for p in range(start, first + n)],
                                [row(p) for p in range(first + n)], max(accepted, req.computed), drafts,
                                self.admissions[req.request_id]))
        self.flights.append(Flight(self.h.step_number, command, chunks, plain))

    def execute_next(self) -> None:
        flight = next(f for f in self.flights if not f.executed)
        self.worker.start(flight.command)
        for chunk in flight.chunks:
            self.worker.write(chunk.seat, chunk.start, chunk.rows)
        for chunk in flight.chunks:
            for position, expected in enumerate(chunk.expect):
                tier, value = self.worker.resolve(chunk.seat, position)
                assert value == expected, f"{chunk.req.request_id} position {position} from {tier}: {value}"
                assert self.worker.indexer_row(chunk.seat, position) == expected
                assert tier == "resident" or not flight.plain
            self.worker.reject(chunk.seat, chunk.accepted, chunk.first + len(chunk.rows))
        self.worker.end()
        flight.executed = True

    @precondition(lambda self: any(not f.executed for f in self.flights))
    @rule()
    def execute(self) -> None:
        self.execute_next()

    def retire_next(self) -> None:
        flight = self.flights.pop(0)
        live = [c for c in flight.chunks
                if c.req.state == "running" and self.admissions[c.req.request_id] == c.incarnation]
        self.m.retire(flight.step, {c.req.request_id: c.accepted for c in live})
        for chunk in live:
            req = chunk.req
            req.computed = chunk.accepted
            new = chunk.drafts[: max(0, chunk.accepted - len(req.tokens))]
            if req.computed >= len(req.tokens):
                new = [*new, self.rng.randrange(500)]
                if len(req.tokens) + len(new) - req.prompt >= req.max_tokens:
                    self.h.finish(req)
                    continue
            req.tokens += new
            self.m.extend(req.request_id, new)
        if self.h.store is not None and self.rng.random() < 0.7:
            for key, block in self.m.take_sealed_indexer_pages():
                if not self.h.store.plan_store(key, block):
                    self.m.unpin_indexer([block])

    @precondition(lambda self: self.flights and self.flights[0].executed)
    @rule()
    def retire(self) -> None:
        self.retire_next()

    @precondition(lambda self: self.h.store is not None and self.h.store.stores)
    @rule()
    def store_done(self) -> None:
        store = self.h.store
        assert store is not None
        key, block = store.stores.pop(0)
        store.pages[key] = [self.worker.device[block, row] for row in range(4)]
        self.m.unpin_indexer([block])

    @precondition(lambda self: len(self.h.reqs) < 6)
    @rule(max_tokens=st.integers(1, 6))
    def fork(self, max_tokens: int) -> None:
        parent = self.pick("running")
        if parent is None or self.in_flight(parent) or len(parent.tokens) + max_tokens > MAX_LEN:
            return
        self.count += 1
        name = f"r{self.count}"
        before = self.m.stats()
        admission = self.m.fork(parent.request_id, name, max_tokens=max_tokens)
        if admission is None:
            assert self.m.stats() == before
            return
        self.h.reqs[name] = Req(name, list(parent.tokens), max_tokens, len(parent.tokens), parent.extra, "running",
                                admission.cached_tokens, admission.seat)
        self.admissions[name] = 1

    @rule()
    def report_page_copies(self) -> None:
        self.worker.report_page_copies()

    # ------------------------------------------------------------------------------------------- copies
    @rule(fail=st.integers(0, 5))
    def complete(self, fail: int) -> None:
        ids = [i for i in self.worker.copies if i not in self.lost]
        if ids:
            self.worker.complete(self.rng.choice(ids), fail=fail == 0)

    @rule()
    def hear(self) -> None:
        """Acknowledgements arrive."""
        output = self.worker.output()
        self.old_acks += output.acks
        self.m.on_worker_output([output])

    @precondition(lambda self: self.old_acks)
    @rule()
    def hear_again(self) -> None:
        ack = self.rng.choice(self.old_acks)
        before = self.m.stats()
        self.m.on_worker_output([HiSparseWorkerOutput(rank=0, incarnation=ack.incarnation, acks=(ack,))])
        after = self.m.stats()
        assert after.acks_repeated + after.acks_old_incarnation == before.acks_repeated + before.acks_old_incarnation + 1
        assert after.device_blocks_free == before.device_blocks_free

    # ------------------------------------------------------------------------------------------- P/D prefill side
    @precondition(lambda self: len(self.held) < 2)
    @rule()
    def hold(self) -> None:
        req = self.pick("running")
        if req is None or self.in_flight(req):
            return
        assert self.m.coordinator is not None
        if self.m.coordinator.spills.awaits_copy(self.m.core.live[req.request_id]):
            with pytest.raises(InvariantError, match="before its forked pages are filled"):
                self.m.hold(req.request_id)
            return
        pages, generations = self.m.hold(req.request_id)
        req.state = "held"
        self.held[req.request_id] = (req, pages, generations)
        self.read_held()

    def read_held(self) -> None:
        """A remote reader sees the right rows under unchanged generations."""
        if any(not f.executed for f in self.flights):
            return
        for request_id, (req, pages, generations) in list(self.held.items()):
            if req.state != "held":
                del self.held[request_id]
                continue
            for position in range(pages.num_tokens):
                page, offset = divmod(position, 4)
                block = pages.indexer_blocks[page]
                assert self.worker.device[block, offset] == req.row(position)
                assert int(self.m.core.pool.generations[block]) == generations.indexer[page]
                for blocks in pages.resident_blocks:
                    assert not blocks[page] or self.worker.device[blocks[page], offset] == req.row(position)
                host = pages.host_blocks[page]
                assert host or all(blocks[page] for blocks in pages.resident_blocks)
                assert not host or self.worker.host[host, offset] == req.row(position)

    # ------------------------------------------------------------------------------------------- faults
    @rule(host_lost=st.booleans(), chance=st.integers(0, 9))
    def crash(self, host_lost: bool, chance: int) -> None:
        if chance:
            return
        self.crash_now(host_lost)

    @precondition(lambda self: self.worker.copies)
    @rule(chance=st.integers(0, 4))
    def lose_a_copy(self, chance: int) -> None:
        """A copy never completes; after the deadline its worker is given up."""
        if chance:
            return
        self.lost.add(next(iter(self.worker.copies)))
        self.hear()
        self.h.clock[0] += self.h.config.transfer_deadline_s + 1
        late = {transfer_id for _, transfer_id in self.m.overdue_transfers()}
        assert self.lost <= late
        self.crash_now(False)

    def crash_now(self, host_lost: bool) -> None:
        old = self.worker
        self.m.worker_lost(old.incarnation + 1_000_000, host_pool_lost=host_lost)
        new = FakeWorker(self.h.layout, old.num_device_blocks, old.num_host_blocks, 4, old.incarnation + 1_000_000)
        if not host_lost:
            new.host, new.masks = old.host, old.masks
            new.seen_generations = {k: v for k, v in old.seen_generations.items() if k[0] == "host"}
        self.h.worker = new
        self.flights.clear()
        self.lost.clear()
        self.h.imports.clear()
        self.h.loads.clear()
        if self.h.store is not None:
            self.h.store.stores.clear()
        for req in self.h.reqs.values():
            req.state, req.seat, req.computed = "waiting", -1, 0
        self.held.clear()

    # ------------------------------------------------------------------------------------------- laws
    @invariant()
    def laws(self) -> None:
        if hasattr(self, "h"):
            self.m.check()
            self.read_held()
            assert self.m.core.source is not None
            for block in self.m.core.source.published.blocks():
                assert self.worker.masks[block] == self.worker.full, f"host block {block} is published with holes"

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        while self.flights:
            if not self.flights[0].executed:
                self.execute_next()
            self.retire_next()
        for req in list(self.h.reqs.values()):
            if req.state == "held":
                self.h.finish(req)
        self.held.clear()
        while self.h.store is not None and self.h.store.stores:
            self.store_done()
        self.dispatch(False, 0)
        self.execute_next()
        self.retire_next()
        for request_id in [*self.h.imports, *self.h.loads]:
            if request_id in self.h.imports or request_id in self.h.loads:
                self.h.finish_load(request_id)
        self.h.drain()


Lives.TestCase.settings = settings(
    max_examples=int(os.environ.get("HISPARSE_LIVES", "30")), stateful_step_count=60, deadline=None,
    report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate] + [Phase.shrink] * ("HISPARSE_SHRINK" in os.environ))
TestLives = Lives.TestCase


def test_a_never_issued_id_is_our_bug() -> None:
    h = Harness()
    ack = TransferAck(incarnation=1000, rank=0, transfer_id=1, kind=AckKind.ENQUEUED)
    with pytest.raises(InvariantError, match="never issued"):
        h.manager.on_worker_output([HiSparseWorkerOutput(rank=0, incarnation=1000, acks=(ack,))])



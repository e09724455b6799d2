"""Steps of a random life: what is scheduled, what each rank does with it and when, what the scheduler hears of it."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field

from hisparse.cache.prefix import ExtraKeys
from hisparse.cache.residency import PageState
from hisparse.cache.retention import Retention
from hisparse.types import PageGenerations, RequestPages, SparseKVOffloadCommand
from tests.cache.fake_worker import Row
from tests.cache.harness import Harness, Req, Store, is_host_backed, region_blocks, watermark_blocks
from tests.cache.mail import Mail

MAX_LEN = 40
SIZE = 4


@dataclass
class Chunk:
    """One request's share of a dispatched step. What its ranks will sample is decided at once."""

    req: Req
    incarnation: int
    """Admissions of the request so far."""
    seat: int
    start: int
    """First position that is written."""
    rows: list[Row]
    """Every row attention may select, by position."""
    num_rows: int
    """Rows planned for it, drafts included; 0 = the last token is replayed."""
    accepted: int
    """Rows in cache after the step."""
    tokens: list[int]
    new: list[int]
    """Tokens that follow `tokens` once the step is over."""


@dataclass
class Flight:
    step: int
    command: SparseKVOffloadCommand
    chunks: list[Chunk]
    plain: bool
    done: set[int] = field(default_factory=set)
    """Ranks that have run it."""


def retained(retention: Retention | None, num_pages: int) -> int:
    """How many of the first pages a retention lets others find: boundary by boundary, as its words say."""
    if retention is None:
        return num_pages
    boundaries = list(retention.replay_boundaries)
    if retention.interval_tokens is not None:
        boundaries += range(retention.interval_tokens, (num_pages + 1) * SIZE, retention.interval_tokens)
    return max((boundary // SIZE for boundary in boundaries if boundary // SIZE <= num_pages), default=0)


class Steps:
    """Dispatches steps, runs them on each rank when told to, and retires them.

    Args:
        spare, host: blocks beyond the least that a pool may have. store: pages of the indexer store, 0 = none.
        elastic: pages by which a hot region may grow. uneven: 0 = alike in every hot group.
        private: every rank writes a host pool of its own.
        pipelined: a request may be in several dispatched steps at once.
        trace: keep a digest of every command.
    """

    def __init__(self, seed: int, *, groups: int, spare: int, host: int, store: int, drafts: bool, elastic: int = 0,
                 uneven: int = 0, ranks: int = 1, private: bool = False, pipelined: bool = False, trace: bool = False) -> None:
        pages = MAX_LEN // SIZE
        hot = [8 + SIZE * (uneven * group % 3) for group in range(groups)]
        limit = [rows + SIZE * ((elastic + uneven * group) % 7) for group, rows in enumerate(hot)]
        self.rng = random.Random(seed)
        self.h = Harness(device_blocks=1 + pages + sum(hot) // SIZE + 4 * groups + spare, host_blocks=pages + 2 + host,
                         max_model_len=MAX_LEN, seats=4, chunk=8, groups=groups, seed=seed, hot_rows=hot, hot_rows_max=limit,
                         store=Store(capacity=store) if store else None, num_ranks=ranks, private=private,
                         watermark=self.rng.choice((0.1, 0.1, 0.3, 0.6)),
                         host_reserve_tokens=self.rng.choice((1024, 1024, 0, 4)),
                         host_reservation=self.rng.choice(("window", "window", "full")))
        self.m = self.h.manager
        self.drafts = drafts
        self.pipelined = pipelined
        self.trace = hashlib.sha256() if trace else None
        self.flights: list[Flight] = []
        self.count = 0
        self.admissions: Counter[str] = Counter()
        self.landable: dict[str, int] = {}
        """Request -> step whose command must have arrived before its bytes may land; it need not have run."""
        self.held: dict[str, tuple[RequestPages, PageGenerations]] = {}
        self.history: list[tuple[list[int], ExtraKeys]] = []
        """Tokens of requests that ended."""
        self.mail = Mail(self.h, self.rng)
        # ---- forks
        self.unfilled: list[dict[int, tuple[str, int]]] = [{} for _ in range(ranks)]
        """By rank: device blocks of a fork whose page copy has not run -> (child, admission)."""
        self.copying: dict[int, tuple[str, int]] = {}
        """Page copies sent -> the fork they fill."""
        self.dropped: dict[int, int] = {}
        """Host blocks under a spill of a request that was preempted or aborted -> their generation."""
        self.tiers: dict[tuple[str, int], list[PageState]] = {}
        """(request, admission) -> states of its pages after the last move."""
        # ---- what was seen
        self.pages: set[tuple[Row, ...]] = set()
        """Every page of accepted tokens."""
        self.known: dict[str, int] = {}
        """Request -> how many of its pages are in `pages`."""
        self.events: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------- picks
    def ahead(self, req: Req) -> list[Chunk]:
        """Its share of dispatched steps."""
        return [chunk for flight in self.flights for chunk in flight.chunks if chunk.req is req and self.is_live(chunk)]

    def is_live(self, chunk: Chunk) -> bool:
        return (chunk.req.state == "running" and self.h.reqs.get(chunk.req.request_id) is chunk.req
                and self.admissions[chunk.req.request_id] == chunk.incarnation)

    def pick(self, state: str) -> Req | None:
        reqs = [req for req in self.h.reqs.values() if req.state == state]
        return self.rng.choice(reqs) if reqs else None

    def name(self) -> str:
        """An id that is free; ids come back, also while work of their earlier owner is under way."""
        self.count += 1
        return next(name for i in range(12) if (name := f"r{(self.count + i) % 12}") not in self.h.reqs)

    def learn(self, req: Req) -> None:
        """Its accepted tokens make pages that may be published: those before a boundary of its retention."""
        rows = req.rows()
        end = retained(req.retention, len(rows) // SIZE)
        known = self.known.get(req.request_id, 0)
        self.pages.update(tuple(rows[page * SIZE : (page + 1) * SIZE]) for page in range(known, end))
        self.known[req.request_id] = end

    # ------------------------------------------------------------------------------------------- steps
    def dispatch(self, use_drafts: bool, most: int) -> None:
        if len(self.flights) >= 3:
            return
        chunks, scheduled = [], []
        for req in [r for r in self.h.reqs.values() if r.state == "running"][:most]:
            ahead = self.ahead(req)
            if ahead and not self.pipelined:
                continue
            chunk = self.plan(req, ahead, use_drafts)
            if chunk is not None:
                planned = req.computed + sum(other.num_rows for other in ahead)
                replay = not chunk.num_rows
                self.events["planned behind its own step"] += bool(ahead)
                self.events["planned behind rejected drafts"] += chunk.start < planned
                chunks.append(chunk)
                scheduled.append((req.request_id, planned - replay, chunk.num_rows + replay))
        plain = self.m.all_context_pages_resident([request_id for request_id, _, _ in scheduled])
        self.h.step_number += 1
        command = self.m.plan_step(self.h.step_number, scheduled)
        assert command is not None
        self.after_plan(command)
        for worker in self.h.workers:
            worker.receive(command)
        self.flights.append(Flight(self.h.step_number, command, chunks, plain))

    def plan(self, req: Req, ahead: list[Chunk], use_drafts: bool) -> Chunk | None:
        """What the request runs next: a part of its prompt, its last token again, or one token and drafts. Steps ahead of
        it have told the ranks more than the scheduler, which knows how many rows they were planned to write."""
        last = ahead[-1] if ahead else None
        tokens = [*last.tokens, *last.new] if last else list(req.tokens)
        computed = last.accepted if last else req.computed
        planned = req.computed + sum(chunk.num_rows for chunk in ahead)
        drafts: list[int] = []
        num_rows = max(0, min(self.h.chunk, len(tokens) - computed))
        if num_rows:
            room = min(MAX_LEN, req.prompt + req.max_tokens - 1) - planned - num_rows
            if room < 0:
                return None
            if self.drafts and use_drafts and computed + 1 == len(tokens) and room:
                drafts = [self.rng.randrange(500) for _ in range(min(room, 5))]
            replays = any(not chunk.num_rows for chunk in ahead)  # asked for from the replayed token on
            if not self.m.allocate(req.request_id, num_rows + len(drafts) + replays):
                return None
        rows = Req("", tokens, 0, 0, req.extra).draft_rows(drafts)[: computed + num_rows + len(drafts)]
        accepted = computed + num_rows + self.rng.randint(0, len(drafts))
        new = drafts[: max(0, accepted - len(tokens))]
        if accepted >= len(tokens):
            new.append(self.rng.randrange(500))
        return Chunk(req, self.admissions[req.request_id], req.seat, computed, rows, num_rows + len(drafts), accepted, tokens,
                     new)

    def after_plan(self, command: SparseKVOffloadCommand) -> None:
        """Notes what was sent; checks that pressure asked everybody."""
        if self.trace is not None:
            self.trace.update(repr(command).encode())
        assert len(command.spills) <= MAX_LEN // SIZE, f"{len(command.spills)} spills in one command"
        for spill in command.spills:
            self.mail.issue(spill.id, len(self.h.writers))
        for copy in command.page_copies:
            self.mail.issue(copy.id, len(self.h.workers))
            child = next(owner for _, block in copy.device_pairs if (owner := self.unfilled[0].get(block)))
            self.copying[copy.id] = child
        stats = self.m.stats()
        if stats.device_blocks_free + stats.hot_blocks_elastic < watermark_blocks(self.m):
            self.events["below the watermark"] += 1
            for req in self.h.reqs.values():
                if req.state == "running":
                    assert is_host_backed(self.m, req.request_id), f"{req.request_id} was not required to go hot"

    def execute(self, rank: int) -> None:
        """The next step that this rank has not run."""
        rank %= len(self.h.workers)
        flight = next((f for f in self.flights if rank not in f.done), None)
        if flight is None:
            return
        worker, unfilled = self.h.workers[rank], self.unfilled[rank]
        worker.start(flight.command)
        for copy in flight.command.page_copies:
            for _, destination in copy.device_pairs:
                unfilled.pop(destination, None)
        for chunk in flight.chunks:
            worker.write(chunk.seat, chunk.start, chunk.rows[chunk.start :])
        for chunk in flight.chunks:
            tiers = worker.check_rows(chunk.seat, chunk.rows, f"rank {rank} {chunk.req.request_id}")
            assert not flight.plain or set(tiers) == {"resident"}
            worker.reject(chunk.seat, chunk.accepted, len(chunk.rows))
            self.events["read from host"] += "host" in tiers
            self.events["drafts rejected"] += chunk.accepted < len(chunk.rows)
        worker.end()
        flight.done.add(rank)

    def retire(self) -> None:
        """The oldest step, if every rank has run it."""
        if not self.flights or len(self.flights[0].done) < len(self.h.workers):
            return
        flight = self.flights[0]
        live = [chunk for chunk in flight.chunks if self.is_live(chunk)]
        before = self.m.stats()
        self.flights.pop(0)
        self.m.retire(flight.step, {chunk.req.request_id: chunk.accepted for chunk in live})
        stats = self.m.stats()
        if stats.hot_blocks_grown > before.hot_blocks_grown:
            spare = stats.device_blocks_free - stats.device_blocks_reserved - watermark_blocks(self.m)
            assert spare >= region_blocks(self.m), f"a hot region grew and left {spare} blocks above the watermark"
        for chunk in live:
            req = chunk.req
            req.computed = chunk.accepted
            ends = len(chunk.tokens) + len(chunk.new) - req.prompt >= req.max_tokens and chunk.accepted >= len(chunk.tokens)
            if chunk.new and (not ends or self.rng.random() < 0.5):
                req.tokens += chunk.new
                self.m.extend(req.request_id, chunk.new)
                self.learn(req)
            if ends:
                self.finish(req)
        if self.h.store is not None and self.rng.random() < 0.7:
            for key, block in self.m.take_sealed_indexer_pages():
                if not self.h.store.plan_store(key, block):
                    self.m.unpin_indexer([block])

    def turn(self) -> None:
        """The oldest step ends on every rank, and is retired."""
        if self.flights:
            for rank in range(len(self.h.workers)):
                if rank not in self.flights[0].done:
                    self.execute(rank)
            self.retire()

    def finish(self, req: Req, *, finished: bool = True) -> None:
        raise NotImplementedError

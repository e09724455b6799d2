"""Random lives of requests against workers of plain lists: the moves, and the laws that hold after each of them.

A dispatched step runs on a rank only when a move says so, copies finish in any order, every rank's words arrive late,
repeated, out of order or never. So anything that touches a block too early or too late shows as a wrong row.
"""

from __future__ import annotations

import pytest

from hisparse.cache.prefix import ExtraKeys
from hisparse.cache.residency import PageState
from hisparse.cache.retention import Retention
from hisparse.errors import InvariantError
from hisparse.types import Landing
from tests.cache.harness import Req
from tests.cache.steps import MAX_LEN, SIZE, Steps

RETENTIONS = (*[None] * 8, Retention(interval_tokens=8), Retention(interval_tokens=5, replay_boundaries=(9,)),
              Retention(replay_boundaries=(4, 18)))
LANDINGS = (None, None, Landing.HOST, Landing.RESIDENT)


class World(Steps):
    """One engine's life. Every move is legal at any time: it does nothing where it does not apply."""

    # ------------------------------------------------------------------------------------------- requests
    def arrive(self, length: int, kind: int, max_tokens: int, salt: bool = False) -> None:
        """kind 0..2: prompts with common prefixes, and with equal pages behind different ones. 3..5: a prompt that
        continues what an earlier request left, or part of it."""
        if len(self.h.reqs) >= 6:
            return
        extra = ExtraKeys(cache_salt="x") if salt else ExtraKeys()
        tokens = [(kind * 4 + i) % 11 for i in range(length)]
        if kind > 2 and self.history:
            earlier, extra = self.history[-(1 + kind % 3) % len(self.history)]
            extra = ExtraKeys() if salt else extra
            tokens = [*earlier, *tokens[: kind - 3]] if length % 2 else [*earlier[:length], *tokens[: kind - 3]]
        tokens = tokens[: MAX_LEN - 4]
        self.open(self.name(), tokens, min(max_tokens, MAX_LEN - len(tokens)), extra, self.rng.choice(RETENTIONS))

    def open(self, name: str, tokens: list[int], max_tokens: int, extra: ExtraKeys | None = None,
             retention: Retention | None = None) -> Req:
        self.known[name] = 0
        req = self.h.add(name, tokens, max_tokens, extra, retention)
        self.learn(req)
        return req

    def come_back(self) -> None:
        """A waiting request goes, and its id comes back at once with another prompt of the same length."""
        req = self.pick("waiting")
        if req is None or len(req.tokens) >= MAX_LEN:
            return
        self.m.prefix(req.request_id)  # the answer may be remembered
        self.finish(req, finished=False)
        tokens = [(token + 5) % 11 for token in req.tokens]
        self.admit(None, self.open(req.request_id, tokens, min(req.max_tokens, MAX_LEN - len(tokens)), req.extra))

    def admit(self, landing: Landing | None, req: Req | None = None) -> None:
        req = req or self.pick("waiting")
        if req is None:
            return
        before = self.m.stats()
        prefix = self.m.prefix(req.request_id)
        for other in Landing:
            self.m.fits(req.request_id, prefix, landing=other, import_tokens=len(req.tokens), chunk_tokens=8)
        assert self.m.stats() == before, "a query changed something"
        part = self.rng.choice((len(req.tokens), len(req.tokens), self.rng.randint(1, len(req.tokens))))
        if self.h.admit(req, landing, part if landing is not None else 0) is None:
            assert self.m.stats().requests_admitted == before.requests_admitted
            self.events["admission refused"] += 1
            return
        self.admissions[req.request_id] += 1
        self.landable[req.request_id] = self.h.step_number + 1
        if prefix.tokens:
            self.events["prefix hit"] += 1
            self.events["hit of the whole prompt"] += prefix.tokens == len(req.tokens)
            self.events["indexer pages loaded"] += bool(prefix.indexer_load_pages)

    def load_done(self, failed: bool, num_rows: int) -> None:
        """The outcome of a load, also of one whose request is gone."""
        ready = [r for r in {**self.h.imports, **self.h.loads} if self.landable[r] <= self.h.step_number]
        if not ready:
            return
        request_id = self.rng.choice(ready)
        late = self.m.stats().late_completions
        live = self.h.reqs.get(request_id)
        waiting = live is not None and live.state == "loading"
        self.events[f"load {'failed' if failed else 'ok'}, {'in time' if waiting else 'late'}"] += 1
        self.h.finish_load(request_id, failed=failed, num_rows=num_rows)
        assert self.m.stats().late_completions == late + (not waiting)
        if waiting and failed and self.rng.random() < 0.5:
            self.drop(self.h.reqs[request_id])
            self.h.preempt(self.h.reqs[request_id])

    def late_load(self) -> None:
        """A completion nobody waits for."""
        before = self.m.stats()
        assert self.m.finish_load("nobody", failed=False) == 0
        assert self.m.stats().late_completions == before.late_completions + 1

    def end_request(self, finished: bool) -> None:
        """Finish or abort, at any moment, also while steps are in flight."""
        if self.h.reqs:
            self.finish(self.rng.choice(list(self.h.reqs.values())), finished=finished)

    def finish(self, req: Req, *, finished: bool = True) -> None:
        before = self.m.stats()
        if not finished:
            self.drop(req)
        self.h.finish(req, finished=finished)
        self.m.free(req.request_id)
        self.held.pop(req.request_id, None)
        self.history = [*self.history[-3:], (req.tokens, req.extra)]
        if finished and before.pages_spilling > self.m.stats().pages_spilling:
            self.events["finished with spills under way"] += 1

    def preempt(self) -> None:
        req = self.pick("running")
        if req is not None:
            self.drop(req)
            self.h.preempt(req)
            self.m.preempt(req.request_id)

    def drop(self, req: Req) -> None:
        """What it has not published yet never will be."""
        source = self.m.core.source
        assert source is not None
        if req.state not in ("waiting", "finished"):
            for view in self.m.page_views(req.request_id):
                if view.state is PageState.SPILLING:
                    self.dropped[view.host] = int(source.pool.generations[view.host])

    def store_done(self) -> None:
        if self.h.store is not None and self.h.store.stores:
            self.h.store.finish(self.h, self.rng.randrange(len(self.h.store.stores)))

    def fork(self, max_tokens: int) -> None:
        parent = self.pick("running")
        if parent is None or len(self.h.reqs) >= 6 or len(parent.tokens) + max_tokens > MAX_LEN:
            return
        name = self.name()
        before = self.m.stats()
        views = self.m.page_views(parent.request_id)
        admission = self.m.fork(parent.request_id, name, max_tokens=max_tokens)
        if admission is None:
            assert self.m.stats() == before
            return
        self.admissions[name] += 1
        child = Req(name, list(parent.tokens), max_tokens, len(parent.tokens), parent.extra, "running",
                    admission.cached_tokens, admission.seat, retention=parent.retention)
        self.h.reqs[name] = child
        self.known[name] = 0
        for view in self.m.page_views(name):
            if view.state is PageState.GPU_ONLY:
                for unfilled in self.unfilled:
                    unfilled.update(dict.fromkeys((view.indexer, *view.resident), (name, self.admissions[name])))
        for view in views:
            self.events[f"fork of a page {view.state.name}"] += 1
        self.events[f"fork {'at' if admission.cached_tokens % SIZE == 0 else 'inside'} a page border"] += 1
        self.events["fork of a request in flight"] += bool(self.ahead(parent))

    # ------------------------------------------------------------------------------------------- copies and words
    def report_page_copies(self, rank: int) -> None:
        self.h.workers[rank % len(self.h.workers)].report_page_copies()

    def complete(self, rank: int, fail: bool, mask_only: bool = False) -> None:
        writers = self.h.writers
        worker = writers[rank % len(writers)]
        if worker.copies:
            transfer_id = self.rng.choice(list(worker.copies))
            transfer = worker.copies[transfer_id].transfer
            if not transfer.copy_bytes:
                self.events["spill without bytes"] += 1
                if worker.host.masks[transfer.host_block] != worker.full:
                    self.events["spill with an incomplete mask"] += 1
                    assert transfer.host_block in worker.dropped, f"spill {transfer_id} without bytes: spans missed rows"
            worker.complete(transfer_id, fail=fail, mask_only=mask_only)

    def drop_rows(self, rank: int, num_rows: int) -> None:
        """The next mirrored rows do not reach the host."""
        writers = self.h.writers
        writers[rank % len(writers)].rows_to_drop = num_rows

    # ------------------------------------------------------------------------------------------- P/D prefill side
    def hold(self) -> None:
        req = self.pick("running")
        if req is None or len(self.held) >= 2 or self.ahead(req):
            return
        owner = (req.request_id, self.admissions[req.request_id])
        unreported = [self.copying[transfer_id] for transfer_id in self.copying if transfer_id in self.mail.issued]
        if owner in unreported or owner in self.unfilled[0].values():
            with pytest.raises(InvariantError, match="before its forked pages are filled"):
                self.m.hold(req.request_id)
            return
        self.held[req.request_id] = self.m.hold(req.request_id)
        req.state, req.seat = "held", -1
        self.events["held"] += 1

    # ------------------------------------------------------------------------------------------- faults
    def time_out(self) -> None:
        """The deadline of lost copies passes."""
        if not self.mail.lost:
            return
        self.mail.hear(10_000)
        self.h.clock[0] += self.h.config.transfer_deadline_s + 1
        late = self.m.overdue_transfers()
        assert self.mail.lost <= set(late), f"{self.mail.lost} are lost, {late} are overdue"
        for rank, transfer_id in late:
            assert transfer_id in self.mail.issued and rank not in self.mail.reported[transfer_id]
        self.events["timed out"] += 1
        self.crash(False)

    def crash(self, host_lost: bool) -> None:
        """Every rank is replaced. The old ones' words may still arrive; so may bytes of their copies, before that."""
        self.mail.crash()
        incarnation = self.h.worker.incarnation + 1_000_000
        self.m.worker_lost(incarnation, host_pool_lost=host_lost)
        hosts = None if host_lost else [worker.host for worker in self.h.writers]
        self.h.workers = self.h.new_workers(incarnation, hosts)
        for mess in (self.flights, self.copying, self.held, self.h.imports, self.h.loads, self.dropped,
                     self.tiers, *self.unfilled):
            mess.clear()
        if self.h.store is not None:
            self.h.store.stores.clear()
        for req in self.h.reqs.values():
            req.state, req.seat, req.computed = "waiting", -1, 0
        self.events[f"crash, host pool {'lost' if host_lost else 'kept'}"] += 1

    # ------------------------------------------------------------------------------------------- the end
    def settle(self) -> None:
        """Everything under way ends, every request runs to its end, and nothing may be left."""
        while self.flights:
            for rank in range(len(self.h.workers)):
                self.execute(rank)
            self.retire()
        if self.mail.lost:
            self.time_out()
        for req in list(self.h.reqs.values()):
            if req.state == "held":
                self.finish(req)
        while self.h.store is not None and self.h.store.stores:
            self.store_done()
        self.mail.hear(10_000)
        self.h.manager.on_worker_output(self.h.outputs())
        self.h.dispatch([])
        self.h.complete_all()
        self.h.retire([])
        for request_id in [*self.h.imports, *self.h.loads]:
            if request_id in self.h.imports or request_id in self.h.loads:
                self.h.finish_load(request_id)
        self.h.drain()
        stats = self.m.stats()
        if not stats.workers_lost:
            assert stats.spills_planned == stats.spills_completed + stats.spills_failed

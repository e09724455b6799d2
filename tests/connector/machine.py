"""The decode side of an engine with all three connectors over the real cache manager, against a plain model of who waits.

Ranks are workers of plain lists, which check every row that attention may select. Everything the connectors send to a rank
becomes a task that is done late, in any order, well or badly. The model knows one thing: which words are still due for a
request's load. When the last one was heard, and not before, the request must be told its end: once, and the right one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hisparse.cache.kv_cache_manager import Admission
from hisparse.cache.prefix import ExtraKeys
from hisparse.config import PDConfig
from hisparse.connector.base import LoadEvents
from hisparse.connector.hisparse import HiSparseConnectorScheduler
from hisparse.connector.multi import MultiSchedulerConnector
from hisparse.connector.offloading import OffloadAck, OffloadingScheduler, OffloadOutput
from hisparse.pd.commands import ImportAck, ImportFailure, PDOutput
from hisparse.pd.connector import PDConnectorScheduler
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.types import HiSparseWorkerOutput, Landing
from tests.cache.fake_worker import Import
from tests.cache.harness import Harness, Req, Row
from tests.pd.rig import FakeClock, Side, pick_pages

RANKS = 2
MAX_REQUESTS = 5
FAILURES = (ImportFailure.GENERATION, ImportFailure.TRANSFER, ImportFailure.TIMEOUT, ImportFailure.REFUSED)


class Store(OffloadingScheduler):
    """The real scheduler half; the harness, which knows a store of its own, finds nothing to finish in it."""

    stores = ()


@dataclass
class Task:
    """What one rank has to do for one job of a connector."""

    child: str
    rank: int
    job_id: int
    load: Import | None = None
    kind: str = ""
    slots: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    cancelled: bool = False


@dataclass
class Due:
    """The model of one load: who still has a word to say, and whether one was bad."""

    request_id: str
    words: set[tuple[str, int]]
    bad: bool = False
    closed: bool = False
    jobs: set[tuple[str, int]] = field(default_factory=set)


class Machine(Harness):
    """Attributes:
        due: loads that have not ended. fills: those no rank has heard of, by connector and the device blocks they fill.
        met: events.
    """

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.offload = Store(rng.choice((2, 8, 40)), num_ranks=RANKS)
        super().__init__(device_blocks=rng.choice((44, 60, 110)), host_blocks=rng.choice((24, 60)), max_model_len=48, seats=4,
                         num_ranks=RANKS, store=self.offload, seed=seed)  # type: ignore[arg-type]
        network = LoopbackNetwork()
        self.side = Side("p", network, layout=self.layout, incarnation=1)
        self.far = PDConnectorScheduler(self.layout, PDConfig(), engine_id="p", incarnation=1, num_ranks=1, clock=FakeClock())
        self.far.set_endpoints(self.side.endpoints)
        self.near = Side("d", network, layout=self.layout, num_ranks=RANKS)
        self.pd = PDConnectorScheduler(self.layout, PDConfig(), engine_id="d", incarnation=1000, num_ranks=RANKS,
                                     clock=FakeClock())
        self.multi = MultiSchedulerConnector([HiSparseConnectorScheduler(self.manager), self.offload, self.pd])
        self.stored: list[dict[int, list[Row]]] = [{} for _ in range(RANKS)]
        self.tasks: list[Task] = []
        self.said: list[dict[str, Any]] = []
        self.due: list[Due] = []
        self.fills: dict[tuple[str, tuple[int, ...]], tuple[Due, Import | None]] = {}
        self.met: Counter[str] = Counter()
        self.failing = rng.choice((0.0, 0.1, 0.4))
        self.count = 0

    # ---- requests
    def arrive(self) -> None:
        """A prompt of one of few families, with prefill's answer, an answer that another one used, or without any."""
        if len(self.reqs) >= MAX_REQUESTS:
            return
        rng, kind = self.random, self.random.randrange(3)
        tokens = [(kind * 4 + i) % 11 for i in range(rng.randint(1, 30))]
        names = [f"d-{self.count + i}" for i in range(rng.choice((1, 1, 2)))]
        self.count += len(names)
        params = self.answer(names[0], len(tokens)) if rng.random() < 0.6 else None
        self.met["siblings"] += len(names) > 1 and params is not None
        for name in names:
            self.add(name, tokens, rng.randint(1, 4), ExtraKeys())
            if params is not None:
                self.pd.add_remote(name, params)

    def answer(self, name: str, num_tokens: int) -> Mapping[str, Any]:
        count = self.layout.pages(num_tokens)
        pages = pick_pages(self.count, count, num_tokens, resident=[True] * count, host=[True] * count,
                           groups=self.layout.num_resident_groups)
        return self.far.grant(f"p-{name}", pages, self.side.ranks[0].generations_of(pages), prompt_digest="d" * 64)

    def admit(self, req: Req, landing: Landing | None = None, import_tokens: int = 0) -> Admission | None:
        """As the engine's scheduler does: an import where prefill has more than the prefix that is here."""
        prefix, offered = self.manager.prefix(req.request_id), self.pd.remote_tokens(req.request_id)
        if offered > prefix.tokens:
            fits = {place: self.manager.fits(req.request_id, prefix, landing=place, import_tokens=offered, chunk_tokens=1).now
                    for place in Landing}
            landing = self.pd.choose_landing(req.request_id, fits[Landing.RESIDENT] and self.random.random() < 0.5,
                                             fits[Landing.HOST])
            if landing is None or not fits[landing]:
                return None
            import_tokens = offered
        elif offered:
            self.pd.release_unused(req.request_id, "the whole prefix is already here")
        admission = super().admit(req, landing, import_tokens)
        if admission is None:
            return None
        due = Due(req.request_id, set())
        if admission.indexer_blocks:
            keys = admission.indexer_keys
            if self.random.random() < 0.3:  # as if the store had lost a page since it was asked
                keys = (*keys[:-1], b"?" * 32)
            self.offload.plan_load(req.request_id, keys, admission.indexer_blocks)
            if req.request_id in self.offload._failed_at_once:
                due.bad = True
                self.met["load failed at once"] += 1
            else:
                due.words |= {("offloading", rank) for rank in range(RANKS)}
                self.fills["offloading", tuple(admission.indexer_blocks)] = due, None
        if admission.import_target is not None:
            self.pd.start_import(req.request_id, admission.import_target)
            due.words |= {("pd", rank) for rank in range(RANKS)}
            self.fills["pd", admission.import_target.pages.indexer_blocks] = due, self.imports[req.request_id]
        if req.state == "loading":
            children = sorted({child for child, _ in due.words})
            self.met["load of " + (" and ".join(children) or "nothing that is left")] += 1
            self.due.append(due)
        return admission

    def close(self, req: Req) -> None:
        """The client is gone."""
        self.met[f"closed while {req.state}"] += 1
        self.multi.request_closed(req.request_id)
        self.pd.release_unused(req.request_id, "abort")
        for due in self.due:
            due.closed |= due.request_id == req.request_id
        for key, (due, _) in list(self.fills.items()):
            if due.closed and key[0] == "pd":  # no rank has seen the import; an offload load that was planned goes on
                due.words -= {("pd", rank) for rank in range(RANKS)}
                del self.fills[key]
        self.finish(req, finished=False)

    def finish(self, req: Req, *, finished: bool = True) -> None:
        if finished:
            self.multi.request_closed(req.request_id)
            self.pd.release_unused(req.request_id, "done")
        super().finish(req, finished=finished)
        self.imports.pop(req.request_id, None)
        self.loads.pop(req.request_id, None)

    # ---- one step
    def pass_(self) -> None:
        """Schedule, run, hear: as `EngineCore` does."""
        chosen = self.schedule()
        self.dispatch(chosen)
        loading = [req for req in self.reqs.values() if req.state == "loading"]
        if loading and self.random.random() < 0.1:
            self.close(self.random.choice(loading))
        self.tell(self.multi.build_metadata(self.step_number) or {})
        for worker in self.workers:
            if self.random.random() < 0.7:
                worker.complete_all(self.rng)
        outputs: list[dict[str, Any]] = [{"hisparse": output} for output in self.outputs()]
        outputs += [self.said.pop(self.random.randrange(len(self.said))) for _ in range(self.random.randint(0, len(self.said)))]
        for output in outputs:
            self.note(output)
        self.retire(chosen, acks=False)
        events = self.multi.update(outputs)
        self.check_events(events)
        self.apply(events)
        self.multi.check()
        self.manager.check()

    def tell(self, metadata: dict[str, Any]) -> None:
        """Every rank gets its tasks. Only the names of the three children may occur."""
        assert set(metadata) <= {"hisparse", "offloading", "pd"}
        command = metadata.get("offloading")
        for kind in ("loads", "stores"):
            for job in getattr(command, kind, ()):
                due = self.fills.pop(("offloading", job.device_blocks))[0] if kind == "loads" else None
                self.give("offloading", due, job_id=job.job_id, kind=kind, slots=job.slots, blocks=job.device_blocks)
        command = metadata.get("pd")
        if command is None:
            return
        for plan in command.imports:
            due, load = self.fills.pop(("pd", tuple(plan.destination.indexer.tolist())))
            self.give("pd", due, job_id=plan.job_id, load=load)
        for task in self.tasks:
            task.cancelled |= task.child == "pd" and task.job_id in command.cancels
        self.far.update([PDOutput(rank=0, incarnation=1, notices=tuple(notice.payload for notice in command.notices))])
        self.far.take_expired()

    def give(self, child: str, due: Due | None, **task: Any) -> None:
        self.tasks += [Task(child=child, rank=rank, **task) for rank in range(RANKS)]
        if due is not None:
            due.jobs.add((child, task["job_id"]))

    def work(self) -> None:
        """One rank does one of its tasks, well or not."""
        if not self.tasks:
            return
        task = self.tasks.pop(self.random.randrange(len(self.tasks)))
        bad = self.random.random() < self.failing
        if task.child == "pd":
            assert task.load is not None
            failure = self.random.choice(FAILURES) if bad else ImportFailure.CANCELLED if task.cancelled else None
            rows = len(task.load.rows) if failure is None else self.random.randint(0, len(task.load.rows))
            self.workers[task.rank].land(task.load, rows)
            ack = ImportAck(job_id=task.job_id, failure=failure, reason="as the schedule wants it" if failure else "")
            self.said.append({"pd": PDOutput(rank=task.rank, incarnation=self.pd.incarnation, acks=(ack,))})
            return
        worker, store = self.workers[task.rank], self.stored[task.rank]
        for slot, block in zip(task.slots, task.blocks, strict=True):
            if bad and self.random.random() < 0.5:
                break
            if task.kind == "stores":
                store[slot] = list(worker.device[block])
            else:
                worker.outside_write(block, store[slot])
        word = OffloadAck(job_id=task.job_id, reason="as the schedule wants it" if bad else "")
        self.said.append({"offloading": OffloadOutput(rank=task.rank, acks=(word,))})

    def note(self, output: dict[str, Any]) -> None:
        """The model hears what the connectors are about to hear."""
        for child, word in output.items():
            if isinstance(word, HiSparseWorkerOutput):
                continue
            (ack,) = word.acks
            bad = ack.failure is not None if child == "pd" else bool(ack.reason)
            for due in self.due:
                if (child, ack.job_id) in due.jobs and (child, word.rank) in due.words:
                    due.words.discard((child, word.rank))
                    due.bad |= bad

    def check_events(self, events: LoadEvents) -> None:
        """Exactly those whose last word was heard, each with its own end."""
        over = [due for due in self.due if not due.words]
        self.due = [due for due in self.due if due.words]
        loaded = {due.request_id for due in over if not due.closed and not due.bad}
        failed = {due.request_id for due in over if not due.closed and due.bad}
        drained = sorted(due.request_id for due in over if due.closed)
        assert events.loaded == loaded, f"loaded are {sorted(events.loaded)}, heard was the end of {sorted(loaded)}"
        assert set(events.failed) == failed, f"failed are {sorted(events.failed)}, the model says {sorted(failed)}"
        assert sorted(events.drained) == drained, f"drained are {events.drained}, the model says {drained}"
        assert all(events.failed.values()), "a failure without a reason"
        self.met.update({"loaded": len(loaded), "failed": len(failed), "drained": len(drained)})

    def apply(self, events: LoadEvents) -> None:
        self.manager.unpin_indexer(events.released_device_blocks)
        for name in events.drained:
            self.manager.finish_load(name, failed=True)
        for name in (*events.loaded, *events.failed):
            req, valid = self.reqs[name], self.manager.finish_load(name, failed=name in events.failed)
            self.imports.pop(name, None)
            self.loads.pop(name, None)
            if req.state == "loading":
                req.computed, req.state = valid, "running"

    def restart(self) -> None:
        """Every rank is replaced; the old ones' words come late. Requests begin again, what they loaded has failed."""
        self.met["ranks restarted"] += 1
        incarnation, host_lost = self.worker.incarnation + 1_000_000, self.random.random() < 0.5
        self.manager.worker_lost(incarnation, host_pool_lost=host_lost)
        self.workers = self.new_workers(incarnation, None if host_lost else [self.worker.host])
        self.offload.workers_restarted()
        self.pd.workers_restarted(incarnation, self.near.endpoints)
        self.tasks, self.stored = [], [{} for _ in range(RANKS)]
        self.fills.clear()
        for req in self.reqs.values():
            req.state, req.seat, req.computed = "waiting", -1, 0
        for due in self.due:
            due.words.clear()
            due.bad = True
        events = self.multi.update([])
        self.check_events(events)
        self.apply(events)

    # ---- a life
    def live(self, steps: int = 60) -> None:
        rng = self.random
        for _ in range(steps):
            for _ in range(rng.randint(0, 2)):
                self.arrive()
            for _ in range(rng.randint(0, 4)):
                self.work()
            if self.reqs and rng.random() < 0.12:
                self.close(rng.choice(list(self.reqs.values())))
            if rng.random() < 0.02:
                self.restart()
            self.pass_()
        self.settle()

    def settle(self) -> None:
        """Nobody waits for ever, and nothing is left."""
        for _ in range(400):
            while self.tasks:
                self.work()
            self.pass_()
            if not (self.reqs or self.due or self.multi.has_pending_work() or self.far.has_pending_work()):
                break
        waiting = {req.request_id: req.state for req in self.reqs.values()}
        assert not waiting and not self.due, f"these wait for ever: {waiting}, {self.due}"
        assert not self.multi.has_pending_work() and not self.multi.loading(), "the connectors are never idle"
        assert not self.far.has_pending_work(), "prefill holds a lease for nobody"
        stats = self.manager.stats()
        assert stats.device_blocks_free == stats.device_blocks_total, "device blocks are lost"
        assert stats.host_blocks_free == stats.host_blocks_total, "host blocks are lost"

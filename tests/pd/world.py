"""Requests, prefill engines and a decode engine, every message under way between them, and the laws of it all."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np

from hisparse.engine.load_failures import LoadFailurePolicy
from hisparse.errors import ProtocolError
from hisparse.pd.endpoint import RETIRED_S
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.pd.protocol import decode_notice
from hisparse.types import ImportTarget, RequestPages
from tests.pd.decode import Decode
from tests.pd.disasters import MAX_LIVE, Disasters
from tests.pd.fallbacks import Fallbacks
from tests.pd.pools import LAYOUTS, MAX_TOKENS, Content
from tests.pd.prefill import Prefill
from tests.pd.requests import LIVE, Request, State
from tests.pd.rig import LAYOUT
from tests.pd.torn import Levers

ASK_TIMEOUT_S = 8.0
"""A decode engine waits this long for a prefill answer."""

FAULTS = {"hang": 0.15, "fail": 0.1, "refuse": 0.05, "stuck": 0.5, "drop": 0.3, "repeat": 0.3}
"""Probabilities of Levers; each is on in half of the schedules that are not calm."""


class World(Fallbacks, Disasters):
    """Two prefill engines, one decode engine, and everything under way between them.

    Attributes:
        calm: no faults: then every import succeeds and no lease runs out. prefixes: decode holds some pages already.
        met: events, for tests of what schedules reach.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.bytes = np.random.default_rng(seed)
        self.calm, self.prefixes = seed % 4 == 0, True
        self.levers, self.network = Levers(), LoopbackNetwork()
        if not self.calm:
            for lever, most in FAULTS.items():
                setattr(self.levers, lever, rng.choice((0.0, most)))
        self.levers.late = rng.choice((0.0, 0.5))
        lease = {"lease_s": 3.0 if self.calm else rng.choice((3.0, 9.0)), "transfer_deadline_s": 1e6 if self.calm else 2.0}
        layouts = [LAYOUT] * 3 if rng.random() < 0.5 else rng.choices(list(LAYOUTS.values()), k=3)
        net = self.network
        self.prefills = [Prefill(name, net, self.levers, rng, num_ranks=rng.choice((1, 2)), layout=layout, config=lease)
                         for name, layout in zip(("p0", "p1"), layouts)]
        policy = {"kv_load_failure_policy": rng.choice(("recompute", "recompute", "fail")),
                  "max_retries": rng.choice((0, 1, 2)),
                  "local_prefill_tokens": rng.choice((0, MAX_TOKENS, 2 * MAX_TOKENS, 1000))}
        self.decode = Decode("d", net, self.levers, rng, num_ranks=rng.choice((1, 2)), config=lease | policy, layout=layouts[2])
        self.failures = LoadFailurePolicy(self.decode.config)
        self.requests: dict[str, Request] = {}
        self.zombies: dict[str, RequestPages] = {}
        """Pages of closed requests, until drained."""
        self.answers: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[tuple[Request, dict[str, Any]]] = []
        """Answers that were taken."""
        self.lease_ids: set[str] = set()
        self.incarnations: dict[str, str] = {}
        """Of each prefill engine, in the last answer that decode took."""
        self.retired: dict[tuple[str, str], float] = {}
        self.unwanted: set[str] = set()
        """Prefill ids whose client left before the answer."""
        self.met: Counter[str] = Counter()
        self.asks = 0
        self.faulty = not self.calm

    # ---- requests
    def arrive(self, prefill: Prefill | None = None) -> Request:
        """A client asks for a new prompt, or for one that another request has asked for."""
        prefill = prefill or self.rng.choice(self.prefills)
        content = Content(f"c{len(self.requests)}", self.rng.randint(1, MAX_TOKENS), self.bytes)
        request = Request(f"d-{len(self.requests)}", content, prefill)
        twin = self.rng.choice(list(self.requests.values())) if self.requests and self.rng.random() < 0.25 else None
        self.requests[request.request_id] = request
        if twin is not None and twin.state is State.ASKED and prefill is twin.prefill:
            self.met["twins"] += 1
            request.content, request.prefill_id, request.attempts = twin.content, twin.prefill_id, 1
            request.asked_at_s = self.decode.clock()
        else:
            self.ask(request)
        return request

    def late_twin(self) -> bool:
        """Another request comes with an answer that was used already: its lease may be over, its engine may be gone."""
        if not self.sent or len(self.of(*LIVE)) >= MAX_LIVE:
            return False
        first, params = self.rng.choice(self.sent[-8:])
        self.met["late twin"] += 1
        twin = Request(f"d-{len(self.requests)}", first.content, first.prefill, attempts=1, asked_at_s=self.decode.clock(),
                       prefill_id=f"again-{len(self.requests)}")
        self.requests[twin.request_id] = twin
        self.answers.append((twin.prefill_id, params))
        return True

    def ask(self, request: Request) -> None:
        """Asks prefill; a dead one refuses the connection."""
        assert request.attempts <= self.decode.config.max_retries, f"{request.client} asks prefill once too often"
        request.state, request.attempts, self.asks = State.ASKED, request.attempts + 1, self.asks + 1
        request.asked_at_s, request.prefill_id = self.decode.clock(), f"p-{self.asks}"
        if request.prefill.alive:
            request.prefill.queue.append((request.prefill_id, request.content))
        else:
            self.fall_back(request, "prefill is down")

    def close(self, request: Request) -> None:
        """The client is gone, at whatever stage."""
        self.met[f"closed while {request.state.value}"] += 1
        shared = sum(other.prefill_id == request.prefill_id for other in self.requests.values()) > 1
        if request.state is State.ASKED and request.prefill.alive and not shared and self.rng.random() < 0.5:
            request.prefill.pd.release_request(request.prefill_id)
            self.unwanted.add(request.prefill_id)
        if request.pages is not None:
            if request.state is State.IMPORTING:
                self.zombies[request.request_id] = request.pages
            else:
                self.verify(request)
                self.decode.free(request.pages)
            request.pages = None
        self.failures.end(request.client)
        self.decode.pd.request_closed(request.request_id)
        request.state = State.CLOSED

    def finish(self, request: Request) -> None:
        """A request that decoded enough: what it read until now was its own."""
        self.verify(request)
        assert request.pages is not None
        self.decode.free(request.pages)
        self.decode.pd.request_closed(request.request_id)
        request.pages, request.state = None, State.DONE

    def verify(self, request: Request) -> None:
        assert request.pages is not None and request.landing is not None
        self.decode.check_bytes(request.content, request.pages, request.landing)

    def of(self, *states: State) -> list[Request]:
        return [request for request in self.requests.values() if request.state in states]

    # ---- messages
    def answer(self, prefill: Prefill) -> bool:
        """Prefill leases a written prompt; its answer is under way, perhaps twice."""
        answer = prefill.answer()
        if answer is None:
            return False
        self.lease_ids.add(answer[1]["lease_id"])
        prefill.collect()
        assert answer[0] not in self.unwanted or answer[0] not in prefill.leased, "a lease for a client that had left"
        self.answers.append(answer)
        if self.faulty and self.rng.random() < 0.1:
            self.answers.append(answer)
        return True

    def deliver(self) -> bool:
        """Any answer under way reaches decode, for every request that waits for it; others are told to let go."""
        if not self.answers:
            return False
        prefill_id, params = self.answers.pop(self.rng.randrange(len(self.answers)))
        waiting = [request for request in self.of(State.ASKED) if request.prefill_id == prefill_id]
        for request in waiting:
            try:
                self.decode.pd.add_remote(request.request_id, params, num_prompt_tokens=request.content.num_tokens,
                                          digest_of=lambda _, digest=request.content.digest: digest)
            except ProtocolError as error:
                self.met["answer refused"] += 1
                self.fall_back(request, str(error))
                continue
            request.state, request.lease_id = State.OFFERED, params["lease_id"]
            self.sent.append((request, params))
            self.note_incarnation(request.prefill.name, params["lease_id"].split("-")[0])
        if not waiting:
            self.met["answer for nobody"] += 1
            self.decode.pd.reject_remote(params, "nobody waits for it")
        return True

    def note_incarnation(self, peer: str, incarnation: str) -> None:
        """What was replaced stays replaced."""
        current, retired = self.incarnations.get(peer, ""), self.retired
        if current and incarnation != current:
            retired[peer, current] = self.decode.clock() + RETIRED_S
        self.incarnations[peer] = incarnation
        assert retired.get((peer, incarnation), 0.0) <= self.decode.clock(), f"an answer of {peer} before its restart counts"

    def admit(self) -> bool:
        """Some offered request gets its landing and its pages."""
        offered = self.of(State.OFFERED)
        if not offered:
            return False
        request, decode = self.rng.choice(offered), self.decode
        count = decode.layout.pages(request.content.num_tokens)
        landing = decode.pd.choose_landing(request.request_id, self.rng.random() < 0.5, decode.pools.fits_resident(count))
        if landing is None:
            return False
        here = self.rng.choice((0, 0, 0, 0, 0, self.rng.randrange(count), count)) if self.prefixes else 0
        pages = decode.allocate(request.content, landing, here)
        if pages is None:
            return False
        self.note_import(request.prefill, pages)
        self.met[f"landing {landing.value}"] += 1
        request.landing, request.pages, request.state = landing, pages, State.IMPORTING
        decode.pd.start_import(request.request_id, ImportTarget(landing=landing, pages=pages))
        return True

    def note_import(self, prefill: Prefill, pages: RequestPages) -> None:
        theirs, ours = prefill.layout, self.decode.layout
        if pages.num_pages == 0:
            self.met["nothing to read"] += 1
        elif theirs.block_size != ours.block_size:
            self.met["larger pages at prefill" if theirs.block_size > ours.block_size else "smaller pages at prefill"] += 1
            self.met["from the middle of a page of prefill"] += pages.first_page * ours.block_size % theirs.block_size != 0
        elif theirs.num_resident_groups != ours.num_resident_groups:
            self.met["other groups at prefill"] += 1
        self.met["shared host pool"] += self.decode.shared

    def step(self) -> bool:
        """One step of the decode engine. A lease is released when its last user let go, by the id that prefill gave."""
        command = self.decode.build()
        for notice in command.notices if command else ():
            word = decode_notice(notice.payload)
            users = [r.request_id for r in self.of(State.OFFERED, State.IMPORTING)
                     if r.lease_id == word.lease_id and (r.pages is None or r.pages.num_pages)]
            assert word.lease_id in self.lease_ids, f"a notice names {word.lease_id}, which prefill never gave"
            assert word.kind != "release" or not users, f"lease {word.lease_id} is released while {users} need it"
        return command is not None

    def hear(self, most: int) -> bool:
        """The decode scheduler takes reports of its ranks: late, in the order of each rank. False = there were none."""
        outputs = []
        for mail in self.rng.sample(self.decode.outputs, len(self.decode.outputs)):
            outputs += [mail.popleft() for _ in range(min(most, len(mail)))]
        events = self.decode.pd.update(outputs)
        for request_id in events.loaded:
            request = self.requests[request_id]
            request.state = State.LOADED
            self.met["loaded"] += 1
            self.verify(request)
        for request_id, why in events.failed.items():
            self.met[f"failed: {why.split(': ')[1] if why.startswith('rank') else why.split(':')[0]}"] += 1
            assert not self.calm, f"{request_id} failed without a fault: {why}"
            self.fall_back(self.requests[request_id], why)
        for request_id in set(events.overdue) - set(events.loaded) - set(events.failed):
            self.met["overdue"] += 1
            assert not self.calm
            self.start_over(self.requests[request_id], events.overdue[request_id])
        for request_id in events.drained:
            self.met["drained"] += 1
            self.decode.free(self.zombies.pop(request_id))
        return bool(outputs or events.loaded or events.failed or events.drained)

    def listen(self, prefill: Prefill) -> None:
        """The prefill engine hears its notices, and frees what is no longer leased."""
        if not prefill.alive:
            return
        for rank in range(prefill.num_ranks):
            prefill.pump(rank)
            while prefill.outputs[rank]:
                prefill.pd.update([prefill.outputs[rank].popleft()])
        prefill.collect()

    def tick(self, seconds: float) -> None:
        """Time passes. Where nothing fails, heartbeats arrive in time."""
        for engine in (*self.prefills, self.decode):
            engine.clock.advance(seconds)
        for request in self.of(State.ASKED):
            if not self.calm and self.decode.clock() > request.asked_at_s + ASK_TIMEOUT_S:
                self.met["no answer"] += 1
                self.fall_back(request, "prefill did not answer in time")
        if self.calm:
            while self.deliver():
                pass
            self.step()
            for rank in range(self.decode.num_ranks):
                while self.decode.obey(rank):
                    pass
            late, self.levers.late = self.levers.late, 0.0
            for prefill in self.prefills:
                self.listen(prefill)
            self.levers.late = late

    # ---- laws
    def check(self) -> None:
        """Everything that may be selected is right; nobody writes to free pages; each part agrees with itself."""
        for request in self.of(State.LOADED):
            self.verify(request)
        self.decode.check_free()
        self.check_policy()
        for engine in (*self.prefills, self.decode):
            if engine.alive:
                engine.pd.check()

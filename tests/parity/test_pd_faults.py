"""Concurrent requests through two prefill replicas and one decode engine, with a fault every few steps.

Oracle: unmodified transformers. A finished answer has exactly its tokens; every other request ends with a clear error, or
its client left; in the end every pool of every living engine is full and an import works at once.

HISPARSE_PD_FAULT_RUNS=30 plays that many seeds instead of the few of every run.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hisparse.config import HiSparseConfig
from hisparse.errors import RequestError
from hisparse.pd import worker as pd_worker
from hisparse.pd.loopback import DEFAULT_NETWORK, LoopbackFaults
from hisparse.testing.local_engine import LocalEngine
from hisparse.types import FinishReason
from tests.parity.rig import assert_full, check_tokens, engine_config, greedy, prompt_of

RUNS = range(int(os.environ.get("HISPARSE_PD_FAULT_RUNS", "3")))
REQUESTS, TOKENS, RETRIES = 30, 10, 3
STEPS_BETWEEN_FAULTS = 5
LEASE_S, DEADLINE_S = 5.0, 0.3
MODELS = ("glm52", "ds32", "glm5")
PROMPTS = [prompt_of(length, 400 + length) for length in (20, 33, 48, 64, 90, 130)]
_SERIAL = itertools.count()


class Clock:
    """Real time plus what a fault adds."""

    def __init__(self) -> None:
        self.extra_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.extra_s


@dataclass
class Request:
    prompt: tuple[int, ...]
    salt: str
    attempt: int = 0
    attempt_id: str = ""
    replica: int = -1
    in_decode: bool = False
    left: bool = False
    error: str = ""


@dataclass
class Service:
    """What a deployment does, in one thread: retries of prefill, the fallback, aborts on both sides."""

    path: Path
    decode: LocalEngine
    prefill_config: HiSparseConfig
    policy: str
    replicas: list[LocalEngine] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    """Attempt at prefill -> request."""
    gone: list[LocalEngine] = field(default_factory=list)

    @property
    def faults(self) -> LoopbackFaults:
        return DEFAULT_NETWORK.agents[self.decode.executor.handshakes[0].agent].faults

    def start_replica(self, number: int, name: str) -> None:
        clock = Clock()
        engine = LocalEngine(self.prefill_config, engine_id=name, clock=clock)
        if number == len(self.replicas):
            self.replicas.append(engine)
            self.clocks.append(clock)
        else:
            self.replicas[number], self.clocks[number] = engine, clock

    def put(self, name: str, prompt: tuple[int, ...]) -> None:
        self.requests[name] = Request(prompt, salt=name)
        self.try_prefill(name)

    def try_prefill(self, name: str) -> None:
        request = self.requests[name]
        request.attempt += 1
        if request.attempt > 1 + RETRIES:
            if self.policy == "fail":
                request.error = "prefill failed"
            else:
                self.to_decode(name, None)
            return
        request.replica = (request.replica + 1) % 2 if request.attempt > 1 else len(self.requests) % 2
        request.attempt_id = f"{name}-p{request.attempt}"
        self.waiting[request.attempt_id] = name
        self.replicas[request.replica].add(request.attempt_id, request.prompt, greedy(1), cache_salt=request.salt,
                                           do_remote_decode=True)

    def to_decode(self, name: str, params: Mapping[str, Any] | None) -> None:
        request = self.requests[name]
        request.in_decode = True
        try:
            self.decode.add(name, request.prompt, greedy(TOKENS), cache_salt=request.salt, kv_transfer_params=params)
        except RequestError as error:
            request.error = f"{error.status}: {error}"

    def step(self) -> None:
        for engine in self.replicas:
            for output in engine.step():
                if output.finish_reason is not None and output.request_id in self.waiting:
                    name = self.waiting.pop(output.request_id)
                    assert output.kv_transfer_params is not None
                    self.to_decode(name, output.kv_transfer_params)
        self.decode.step()
        for engine in (*self.replicas, self.decode):
            engine.core.check()

    def is_open(self, name: str) -> bool:
        request = self.requests[name]
        answer = self.decode.answers.get(name)
        return not (request.left or request.error or (answer is not None and answer.finish_reason is not None))

    # ---- faults
    def kill_prefill(self, draw: random.Random) -> None:
        """SIGKILL of a replica: READs from it break off; it comes back as a new incarnation, and its requests are retried."""
        number = draw.randrange(2)
        dead = self.replicas[number]
        DEFAULT_NETWORK.kill(dead.executor.handshakes[0].agent)
        self.gone.append(dead)
        self.start_replica(number, dead.core.engine_id)
        for attempt, name in list(self.waiting.items()):
            if self.requests[name].replica == number:
                del self.waiting[attempt]
                self.try_prefill(name)

    def hang(self, draw: random.Random) -> None:
        """One of the next READs never completes: only the deadline ends it."""
        agent = DEFAULT_NETWORK.agents[self.decode.executor.handshakes[0].agent]
        victim = len(agent.posted) + draw.randrange(3)
        before = self.faults.hang
        self.faults.hang = lambda number: number == victim or before(number)

    def break_off(self, draw: random.Random) -> None:
        agent = DEFAULT_NETWORK.agents[self.decode.executor.handshakes[0].agent]
        victim = len(agent.posted) + draw.randrange(3)
        before = self.faults.fail
        self.faults.fail = lambda number: number == victim or before(number)

    def expire_leases(self, draw: random.Random) -> None:
        """A replica's leases run out while READs from it are slow, and its pages are handed out again at once."""
        number = draw.randrange(2)
        self.faults.delay_polls = 3
        self.clocks[number].extra_s += LEASE_S + 1.0
        engine = self.replicas[number]
        engine.step()
        for i in range(3):
            engine.add(f"reuse-{next(_SERIAL)}", prompt_of(150, 7000 + i), greedy(1), do_remote_decode=True)
        for _ in range(4):
            engine.step()

    def client_leaves(self, draw: random.Random) -> None:
        names = [name for name in self.requests if self.is_open(name)]
        if not names:
            return
        name = draw.choice(names)
        request = self.requests[name]
        request.left = True
        self.waiting.pop(request.attempt_id, None)
        self.replicas[request.replica].core.abort(request.attempt_id)
        self.decode.core.abort(name)

    def lose_notices(self, draw: random.Random) -> None:
        self.faults.drop_notices = not self.faults.drop_notices


FAULTS: tuple[Callable[[Service, random.Random], None], ...] = (
    Service.kill_prefill, Service.hang, Service.break_off, Service.expire_leases, Service.client_leaves, Service.lose_notices)


def settle(service: Service) -> None:
    """Faults stop; everything ends, leases included."""
    service.faults.drop_notices, service.faults.delay_polls = False, 0
    service.faults.hang = service.faults.fail = lambda number: False
    deadline = time.monotonic() + 60.0
    while any(map(service.is_open, service.requests)):
        service.step()
        assert time.monotonic() < deadline, service.decode.core.stats()
    for clock in service.clocks:  # leases whose notice was lost
        clock.extra_s += 2 * LEASE_S
    while any(engine.core.has_work() for engine in (*service.replicas, service.decode)):
        service.step()
        assert time.monotonic() < deadline, [engine.core.stats() for engine in (*service.replicas, service.decode)]


def judge(service: Service) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for name, request in service.requests.items():
        answer = service.decode.answers.get(name)
        if answer is not None and answer.finish_reason is FinishReason.LENGTH:
            check_tokens(name, service.path, request.prompt, answer.token_ids, complete=TOKENS)
            outcomes["finished"] += 1
        elif request.left:
            if answer is not None:
                check_tokens(name, service.path, request.prompt, answer.token_ids, complete=None)
            outcomes["left"] += 1
        else:
            error = request.error or (answer.error if answer is not None else "")
            assert error and not error.startswith("4") and (answer is None or not answer.token_ids), (name, request, answer)
            assert service.policy == "fail", f"{name} could have been computed here: {error}"
            outcomes["error"] += 1
    return outcomes


@pytest.mark.parametrize("run", RUNS)
def test_every_finished_answer_is_right(run: int, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_worker, "DRAIN_S", 0.1)
    draw = random.Random(run)
    path, policy = tiny_checkpoints[MODELS[run % 3]], ("recompute", "fail")[run % 2]
    pd = {"lease_s": LEASE_S, "transfer_deadline_s": DEADLINE_S, "kv_load_failure_policy": policy}
    tight = draw.random() < 0.5
    decode = LocalEngine(engine_config(path, "decode", pd=pd, slack=draw.choice([20, 60]) if tight else None),
                         engine_id=f"decode-{next(_SERIAL)}")
    service = Service(path, decode, engine_config(path, "prefill", pd=pd, slack=60, host_pages=60), policy)
    names = [f"prefill-{next(_SERIAL)}" for _ in range(2)]
    try:
        for number, name in enumerate(names):
            service.start_replica(number, name)
        injected: Counter[str] = Counter()
        service.faults.reorder = random.Random(run)
        order = (i for _ in itertools.count() for i in draw.sample(range(len(FAULTS)), len(FAULTS)))
        todo, turn = [f"r{run}-{i}" for i in range(REQUESTS)], 0
        while todo or any(map(service.is_open, service.requests)):
            if todo and sum(map(service.is_open, service.requests)) < 8:
                service.put(todo.pop(), draw.choice(PROMPTS))
            service.step()
            turn += 1
            if turn % STEPS_BETWEEN_FAULTS == 0:
                fault = FAULTS[next(order)]
                injected[fault.__name__] += 1
                fault(service, draw)
            assert turn < 100_000, decode.core.stats()
        settle(service)
        outcomes = judge(service)
        stats = decode.core.stats()
        print(f"run {run}: {policy}, {dict(injected)} -> {dict(outcomes)}, imports {stats.pd['imports_ok']} ok, "
              f"{stats.pd['imports_failed']}")
        for engine in (*service.replicas, decode):
            assert_full(engine)
        assert stats.pd["staging_slots_free"] == stats.pd["staging_slots"] and not stats.pd["stuck"]
        assert outcomes["finished"] >= 5 and len(injected) == len(FAULTS)
        for number in range(2):  # as good as new
            service.requests.clear()
            service.put(f"last{number}", PROMPTS[-1])
            settle(service)
            assert judge(service)["finished"] == 1
            answer = decode.answers[f"last{number}"]
            assert answer.stats is not None and answer.stats.imported_tokens > 0 and answer.stats.import_failures == 0
    finally:
        for engine in (decode, *service.replicas, *service.gone):
            engine.close()

"""Imports that fail, requests that go away, answers that do not fit: right tokens or a clear error, and nothing leaks."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hisparse.actors.engine_loop import EngineLoop
from hisparse.connector.offloading_worker import OffloadingWorker
from hisparse.engine.request import RequestState
from hisparse.errors import RequestError
from hisparse.pd import incarnations as pd_incarnations
from hisparse.pd import peers as pd_peers
from hisparse.pd.loopback import DEFAULT_NETWORK
from hisparse.types import FinishReason, Landing
from tests.parity.cells import never_fits_resident
from tests.parity.rig import Rig, engine_config, greedy, prompt_of

TOKENS = 12
MakePair = Callable[..., Rig]


@pytest.fixture
def pair(make_rig: Callable[..., Rig], tiny_checkpoints: dict[str, Path]) -> MakePair:
    """(policy, landing, ...) -> Rig. The prefill pool is small, so that pages are reused soon."""
    def make(*, policy: str = "recompute", landing: Landing = Landing.RESIDENT, model: str = "glm52", lease_s: float = 30.0,
             deadline_s: float = 20.0, transport: str = "loopback", seats: int = 8, slack: int | None = None) -> Rig:
        path = tiny_checkpoints[model]
        pd = {"lease_s": lease_s, "transfer_deadline_s": deadline_s, "transport": transport,
              "kv_load_failure_policy": policy}
        rig = make_rig(engine_config(path, "decode", pd=pd, scheduler={"max_num_seqs": seats}, slack=slack),
                       engine_config(path, "prefill", pd=pd, slack=30, host_pages=30))
        if landing is Landing.HOST:
            never_fits_resident(rig.decode)
        return rig

    return make


def reuse_prefill_pages(rig: Rig, name: str) -> None:
    """Ends the lease of `name` and runs other prompts until its pages are handed out again."""
    assert rig.prefill is not None
    rig.prefill.core.abort(name)
    for i in range(6):
        rig.prefill.generate([prompt_of(250, 9000 + i)], greedy(1))


# ------------------------------------------------------------------------------------------- 1. imports that fail
def fail_reads(rig: Rig) -> None:
    rig.faults.fail = lambda number: number == 0


def hang_reads(rig: Rig) -> None:
    rig.faults.hang = lambda number: number == 0


def move_nothing(rig: Rig) -> None:
    rig.faults.silent = lambda number: True


def kill_prefill(rig: Rig) -> None:
    assert rig.prefill is not None
    DEFAULT_NETWORK.kill(rig.prefill.executor.handshakes[0].agent)


def reuse_before_reading(rig: Rig) -> None:
    def tamper(name: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        rig.tamper = None
        reuse_prefill_pages(rig, name)
        return params

    rig.tamper = tamper


def expire_before_reading(rig: Rig) -> None:
    def tamper(name: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        rig.tamper = None
        assert rig.prefill is not None
        rig.prefill.run_until(lambda: not rig.prefill.core.stats().held)
        assert rig.prefill.pd.stats().leases_expired == 1
        reuse_prefill_pages(rig, name)
        return params

    rig.tamper = tamper


def reuse_while_reading(rig: Rig) -> None:
    """The READs hang until the pages belong to somebody else; then they complete with the wrong bytes."""
    hang = [True]
    rig.faults.hang = lambda number: hang[0]

    def watch() -> None:
        request = rig.decode.core.requests.get("victim")
        if hang[0] and request is not None and request.state is RequestState.LOADING:
            reuse_prefill_pages(rig, "victim")
            hang[0] = False

    rig.watch = watch


FAILURES: dict[str, tuple[Callable[[Rig], None], str]] = {
    "transfer": (fail_reads, "transfer"), "hang": (hang_reads, "timeout"), "silent": (move_nothing, "generation"),
    "peer_gone": (kill_prefill, "refused"), "reused_before": (reuse_before_reading, "generation"),
    "expired_before": (expire_before_reading, "generation"), "reused_meanwhile": (reuse_while_reading, "generation"),
}


@pytest.mark.parametrize(("policy", "landing"), [
    ("recompute", Landing.RESIDENT), ("recompute", Landing.HOST), ("fail", Landing.HOST)])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_import(pair: MakePair, failure: str, landing: Landing, policy: str) -> None:
    cause, kind = FAILURES[failure]
    rig = pair(policy=policy, landing=landing, deadline_s=0.3 if failure == "hang" else 20.0,
               lease_s={"expired_before": 0.2, "peer_gone": 1.0}.get(failure, 30.0))
    cause(rig)
    rig.put("victim", prompt_of(150, 1), TOKENS)
    rig.until(lambda: rig.ended("victim"))
    answer = rig.answer("victim")
    assert answer.stats is not None and answer.stats.import_failures == 1
    assert rig.decode.core.stats().import_failures == 1
    assert rig.decode.pd.stats().imports_failed == {kind: 1}
    if policy == "fail":
        assert answer.finish_reason is FinishReason.ERROR and kind in str(answer.error)
        assert answer.token_ids == []
    else:
        rig.check("victim")
        assert rig.decode.core.stats().local_prefill_tokens == 150
    rig.faults.fail = rig.faults.hang = rig.faults.silent = lambda number: False
    if failure != "peer_gone":
        rig.put("after", prompt_of(90, 2), TOKENS)
        rig.put("again", prompt_of(150, 1), TOKENS)
        rig.run()
        rig.check("after", "again")
        assert rig.answer("after").stats.landing is landing
    rig.drain()


def test_one_failed_import_among_others(pair: MakePair) -> None:
    rig = pair(landing=Landing.HOST)
    rig.faults.fail = lambda number: number == 3
    for i in range(5):
        rig.put(f"r{i}", prompt_of(60 + 40 * i, i), TOKENS)
    rig.run()
    rig.check()
    assert rig.decode.core.stats().import_failures == 1


def test_a_lease_that_expired_is_found_over_nixl(pair: MakePair) -> None:
    pytest.importorskip("nixl")
    rig = pair(transport="nixl", landing=Landing.HOST, lease_s=0.3)
    expire_before_reading(rig)
    rig.put("victim", prompt_of(150, 1), TOKENS)
    rig.run()
    rig.check()
    assert rig.decode.pd.stats().imports_failed == {"generation": 1}
    rig.put("after", prompt_of(90, 2), TOKENS)
    rig.run()
    rig.check()
    assert rig.decode.pd.stats().imports_ok == 1


def test_policy_fail_is_about_the_import_only(make_rig: Callable[..., Rig], tiny_checkpoints: dict[str, Path],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """A load from the own indexer store that fails is computed again, also for a request that came from prefill."""
    pd = {"kv_load_failure_policy": "fail"}
    path = tiny_checkpoints["glm52"]
    rig = make_rig(engine_config(path, "decode", slack=10, pd=pd), engine_config(path, "prefill", pd=pd))
    evict_indexer_pages(rig)
    offload = rig.decode.core.offload
    assert offload is not None
    plan_load = offload.plan_load

    def lose_a_page(request_id: str, keys: Any, blocks: Any) -> None:
        monkeypatch.setattr(offload, "plan_load", plan_load)
        plan_load(request_id, [b"gone", *keys[1:]], blocks)

    monkeypatch.setattr(offload, "plan_load", lose_a_page)
    rig.put("again", rig.served["first"].prompt[:128], TOKENS)  # whole pages: nothing is left to import
    rig.run()
    rig.check()
    assert offload.stats().loads_failed == 1
    assert rig.answer("again").stats.import_failures == rig.decode.core.stats().import_failures == 0


def test_policy_fail_takes_an_import_that_failed_beside_a_load(make_rig: Callable[..., Rig],
                                                               tiny_checkpoints: dict[str, Path]) -> None:
    pd = {"kv_load_failure_policy": "fail"}
    path = tiny_checkpoints["glm52"]
    rig = make_rig(engine_config(path, "decode", slack=10, pd=pd), engine_config(path, "prefill", pd=pd))
    evict_indexer_pages(rig)
    rig.faults.fail = lambda number: True
    rig.put("again", (*rig.served["first"].prompt, *prompt_of(40, 77)), TOKENS)
    rig.run()
    answer = rig.answer("again")
    assert rig.decode.core.stats().indexer_loads == 1
    assert answer.finish_reason is FinishReason.ERROR and "transfer" in str(answer.error) and not answer.token_ids


# ------------------------------------------------------------------------------------------- 2. aborts
def evict_indexer_pages(rig: Rig) -> None:
    """Runs "first", then others until its indexer pages are only in the store and its KV pages only on the host."""
    rig.put("first", prompt_of(130, 50), 4)
    rig.run()
    for i in range(5):
        rig.put(f"filler{i}", prompt_of(260, 60 + i), 4)
        rig.run()
    core = rig.decode.core
    core.cache.open("probe", rig.served["first"].prompt, max_tokens=4)
    hit = core.cache.prefix("probe")
    core.cache.close("probe")
    assert hit.indexer_load_pages > 0, f"the indexer pages are still on the GPU: {hit}"


def state(rig: Rig, name: str, *, prefill: bool = False) -> RequestState | None:
    engine = rig.prefill if prefill else rig.decode
    assert engine is not None
    request = engine.core.requests.get(name)
    return request.state if request is not None else None


STAGES: dict[str, Callable[[Rig], bool]] = {
    "prefill waiting": lambda rig: state(rig, "victim", prefill=True) is RequestState.WAITING,
    "prefill running": lambda rig: rig.prefill.core.requests["victim"].computed > 0,
    "held": lambda rig: state(rig, "victim", prefill=True) is RequestState.HELD,
    "waiting": lambda rig: state(rig, "victim") is RequestState.WAITING,
    "importing": lambda rig: state(rig, "victim") is RequestState.LOADING,
    "first token": lambda rig: len(rig.answer("victim").token_ids) >= 1 if "victim" in rig.decode.answers else False,
    "decoding": lambda rig: len(rig.answer("victim").token_ids) >= 6 if "victim" in rig.decode.answers else False,
}


@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("stage", STAGES)
def test_abort(pair: MakePair, stage: str, landing: Landing) -> None:
    rig = pair(landing=landing, seats=1 if stage == "waiting" else 8)
    hang = [stage == "importing"]
    rig.faults.hang = lambda number: hang[0]
    if stage == "held":
        rig.tamper = lambda name, params: None if name == "victim" else params
    rig.put("early", prompt_of(70, 3), 40)
    rig.put("victim", prompt_of(150, 1), 40)
    rig.until(lambda: STAGES[stage](rig))
    rig.abort("victim")
    rig.abort("victim")
    rig.step()
    rig.abort("victim")
    if "victim" in rig.decode.answers:
        assert rig.answer("victim").finish_reason is FinishReason.ABORT
    hang[0] = False
    rig.put("twin", prompt_of(150, 1), 20)
    rig.run()
    rig.check("early", "twin")
    rig.check_aborted()


def test_abort_of_a_hanging_import_is_drained_by_the_deadline(pair: MakePair) -> None:
    rig = pair(deadline_s=0.3)
    rig.faults.hang = lambda number: number == 0
    rig.put("victim", prompt_of(150, 1), 20)
    rig.until(lambda: STAGES["importing"](rig))
    rig.abort("victim")
    rig.put("other", prompt_of(80, 2), 8)
    rig.run()
    rig.check("other")


def test_abort_at_random_steps(pair: MakePair) -> None:
    """The same id may come again while the first one's import still drains."""
    draw = random.Random(5)
    rig = pair(slack=20)
    rig.faults.delay_polls = 3
    for turn in range(12):
        name = f"r{turn % 3}"
        rig.put(name, prompt_of(60 + 10 * turn, turn), 6)
        for _ in range(draw.randrange(12)):
            rig.step()
        rig.abort(name)
        rig.until(lambda name=name: name not in rig.at_prefill and name not in rig.decode.core.requests
                  and name not in rig.prefill.core.requests)
    rig.put("last", prompt_of(140, 99), TOKENS)
    rig.run()
    rig.check("last")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Indexer loads wait for it."""
    event = threading.Event()
    run = OffloadingWorker._copy

    def copy_later(self: OffloadingWorker, job: Any, *, load: bool) -> Any:
        if load:
            assert event.wait(30)
        return run(self, job, load=load)

    monkeypatch.setattr(OffloadingWorker, "_copy", copy_later)
    yield event
    event.set()


@pytest.mark.parametrize("with_import", [False, True])
def test_abort_during_an_indexer_load(make_rig: Callable[..., Rig], tiny_checkpoints: dict[str, Path],
                                      gate: threading.Event, with_import: bool) -> None:
    path = tiny_checkpoints["glm52"]
    rig = make_rig(engine_config(path, "decode" if with_import else "colocated", slack=10),
                   engine_config(path, "prefill") if with_import else None)
    evict_indexer_pages(rig)
    if with_import:
        rig.faults.hang = lambda number: True
    prompt = (*rig.served["first"].prompt, *prompt_of(40, 77)) if with_import else rig.served["first"].prompt
    rig.put("victim", prompt, TOKENS)
    rig.until(lambda: state(rig, "victim") is RequestState.LOADING)
    assert rig.decode.core.stats().indexer_loads == 1
    rig.abort("victim")
    rig.abort("victim")
    rig.step()
    gate.set()
    rig.step()
    if with_import:
        rig.faults.hang = lambda number: False
    rig.put("twin", prompt, TOKENS)
    rig.run()
    rig.check("twin")


# ------------------------------------------------------------------------------------------- 3. answers that do not fit
Tamper = Callable[[Mapping[str, Any]], Any]


def changed(path: tuple[str, ...], change: Callable[[Any], Any]) -> Tamper:
    def tamper(params: Mapping[str, Any]) -> Any:
        out: Any = copy.deepcopy(dict(params))
        node = out
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = change(node[path[-1]])
        return out

    return tamper


BAD: dict[str, tuple[Tamper, bool]] = {
    "version": (changed(("version",), lambda v: v + 1), False),
    "fingerprint": (changed(("fingerprint",), lambda v: "0" * len(v)), False),
    "block size": (changed(("block_size",), lambda v: v * 2), False),
    "another prompt": (changed(("prompt",), lambda v: v[::-1]), True),
    "no pages": (changed(("num_tokens",), lambda v: 0), False),
    "short indexer list": (changed(("pages", "indexer"), lambda v: v[: len(v) // 2]), True),
    "short host list": (changed(("pages", "host"), lambda v: ""), True),
    "lost group": (changed(("pages", "resident"), lambda v: v[:-1]), True),
    "short generations": (changed(("generations", "indexer"), lambda v: v[: len(v) // 2]), True),
    "more tokens than pages": (changed(("num_tokens",), lambda v: v + 64), True),
    "wrong incarnation": (changed(("incarnation",), lambda v: f"{int(v, 16) ^ 1:016x}"), False),
    "no ranks": (changed(("ranks",), lambda v: []), False),
    "not a mapping": (lambda params: ["?"], False),
}
"""Name -> (tamper, whether the lease can still be read and must be released at once)."""


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_answers_that_do_not_fit(pair: MakePair, policy: str) -> None:
    rig = pair(policy=policy, lease_s=3.0)
    rig.tamper = lambda name, params: BAD[name][0](params) if name in BAD else params
    for i, name in enumerate(BAD):
        rig.put(name, prompt_of(20 + i, i), TOKENS)
    rig.put("other", prompt_of(60, 99), TOKENS)
    rig.run()
    rig.check("other")
    assert rig.decode.pd.stats().imports_failed == {"refused": len(BAD)} and rig.decode.pd.stats().imports_ok == 1
    assert len(rig.refused) == (len(BAD) if policy == "fail" else 0)
    for name in BAD:
        if policy == "fail":
            error = rig.refused[name]
            assert isinstance(error, RequestError) and error.status == 503, (name, error)
            assert name not in rig.decode.answers
        else:
            rig.check(name)
            assert rig.answer(name).stats.import_failures == 1 and rig.answer(name).stats.imported_tokens == 0
    leases, readable = rig.prefill.pd.stats(), sum(readable for _, readable in BAD.values())
    assert (leases.leases_released, leases.leases_expired) == (readable + 1, len(BAD) - readable)


def other_incarnation(params: Mapping[str, Any]) -> dict[str, Any]:
    """The same answer, as if an earlier or later process of the engine had given it."""
    out = copy.deepcopy(dict(params))
    out["incarnation"] = f"{int(out['incarnation'], 16) ^ 1:016x}"
    for rank in out["ranks"]:
        for key, value in rank.items():
            if isinstance(value, str):
                rank[key] = value.replace(params["incarnation"], out["incarnation"])
    return out


def test_an_answer_of_a_prefill_engine_that_restarted_since(pair: MakePair) -> None:
    rig = pair(lease_s=2.0)
    answers: dict[str, Any] = {}
    rig.tamper = lambda name, params: params if name == "first" else answers.setdefault(name, params) and None
    rig.put("first", prompt_of(70, 1), TOKENS)
    rig.put("other", prompt_of(50, 2), TOKENS)
    rig.until(lambda: "other" in answers and "first" in rig.decode.answers)
    for name, params in (("newer", other_incarnation(answers["other"])), ("late", answers["other"])):
        rig.served[name] = copy.copy(rig.served["other"])
        rig.decode.add(name, rig.served[name].prompt, greedy(TOKENS), kv_transfer_params=params)
    del rig.served["other"]
    rig.run()
    rig.check("first", "newer", "late")
    assert rig.answer("late").stats.import_failures == rig.answer("newer").stats.import_failures == 1


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
def test_a_stale_answer_does_not_ban_the_living_engine(pair: MakePair, monkeypatch: pytest.MonkeyPatch,
                                                       transport: str) -> None:
    """Incarnations have no order: an old one that is seen last looks newest. The living one is used again soon."""
    monkeypatch.setattr(pd_incarnations, "RETIRED_S", 0.6)
    monkeypatch.setattr(pd_peers, "RETIRED_HERE_S", 0.3)
    rig = pair(transport=transport, lease_s=2.0)
    rig.put("first", prompt_of(70, 1), TOKENS)
    rig.run()
    rig.tamper = lambda name, params: other_incarnation(params)
    rig.put("stale", prompt_of(60, 2), TOKENS)
    rig.run()
    rig.tamper = None
    time.sleep(0.7)
    rig.put("again", prompt_of(80, 3), TOKENS)
    rig.run()
    rig.check()
    assert [rig.answer(name).stats.import_failures for name in ("first", "stale", "again")] == [0, 1, 0]


def test_fewer_tokens_than_the_prompt_are_completed_here(pair: MakePair) -> None:
    """Prefill held a shorter prompt (a truncated answer that is whole in itself): the rest is computed here."""
    rig = pair()
    long, short = prompt_of(150, 1), 70
    answers: dict[str, Any] = {}
    rig.tamper = lambda name, params: answers.setdefault(name, params) and None
    rig.put("short", long[:short], 4)
    rig.until(lambda: "short" in answers)
    rig.served["long"] = rig.served.pop("short").__class__(long, TOKENS)
    rig.decode.add("long", long, greedy(TOKENS), kv_transfer_params=answers["short"])
    rig.run()
    rig.check("long")
    assert rig.answer("long").stats.imported_tokens == short


@pytest.mark.parametrize(("prompt", "max_tokens"), [(150, 300), (150, 0)])
def test_a_refused_request_gives_its_lease_back(pair: MakePair, prompt: int, max_tokens: int) -> None:
    rig = pair(lease_s=30.0)
    rig.put("victim", prompt_of(prompt, 1), TOKENS)
    rig.served["victim"].max_tokens = max_tokens
    began = time.monotonic()
    rig.run()
    assert isinstance(rig.refused["victim"], RequestError) and time.monotonic() - began < 10
    assert rig.prefill.pd.stats().leases_released == 1


# ------------------------------------------------------------------------------------------- leases without work
def test_a_held_lease_costs_no_cpu(pair: MakePair) -> None:
    rig = pair()
    rig.tamper = lambda name, params: None
    rig.put("victim", prompt_of(100, 1), TOKENS)
    rig.until(lambda: "victim" not in rig.at_prefill)
    core = rig.prefill.core
    assert core.stats().held == 1
    loop = EngineLoop(core, lambda outputs: None)
    loop.start()
    try:
        time.sleep(0.3)
        steps, cpu = core.stats().steps, time.process_time()
        time.sleep(1.0)
        steps, cpu = core.stats().steps - steps, time.process_time() - cpu
        assert loop.health().ok
    finally:
        assert loop.stop(10)
    assert 10 <= steps <= 60, f"{steps} steps in a second that had nothing to do"
    assert cpu < 0.3, f"{cpu:.2f} s of CPU in that second, transfer threads included"

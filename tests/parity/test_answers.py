"""Prefill's answers that do not fit, or that nobody comes to read: right tokens or a clear error."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import pytest

from hisparse.actors.engine_loop import EngineLoop
from hisparse.errors import RequestError
from hisparse.pd import incarnations as pd_incarnations
from hisparse.pd import peers as pd_peers
from tests.parity.failures import TOKENS, MakePair, Tamper, changed
from tests.parity.rig import greedy, prompt_of

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

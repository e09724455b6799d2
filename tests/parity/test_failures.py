"""Imports that fail: right tokens or a clear error, and nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hisparse.types import FinishReason, Landing
from tests.parity.failures import FAILURES, TOKENS, MakePair, evict_indexer_pages, expire_before_reading
from tests.parity.rig import Rig, engine_config, prompt_of


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

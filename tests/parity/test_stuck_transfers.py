"""A rank whose transfer thread hangs inside the transport: the policy decides, the pages stay in quarantine, others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hisparse.pd import worker as pd_worker
from hisparse.pd.loopback import DEFAULT_NETWORK, LoopbackTransport
from hisparse.types import FinishReason
from tests.parity.cells import never_fits_resident
from tests.parity.rig import Rig, engine_config, greedy, prompt_of

TOKENS = 8


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_blocked_transport_call_falls_under_the_policy(
        make_rig: Callable[..., Rig], tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr(pd_worker, "DRAIN_S", 0.1)
    monkeypatch.setattr(pd_worker, "CLOSE_S", 0.1)
    pd = {"transfer_deadline_s": 0.3, "kv_load_failure_policy": policy, "lease_s": 0.5}
    path = tiny_checkpoints["glm52"]
    rig = make_rig(engine_config(path, "decode", pd=pd), engine_config(path, "prefill", pd=pd))
    never_fits_resident(rig.decode)
    gate, read = threading.Event(), LoopbackTransport.read
    ours = DEFAULT_NETWORK.agents[rig.decode.executor.handshakes[0].agent]

    def block(self: LoopbackTransport, *args: object) -> object:
        if self is ours:
            assert gate.wait(60)
        return read(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(LoopbackTransport, "read", block)
    core = rig.decode.core
    try:
        rig.put("running", prompt_of(40, 1), TOKENS)
        rig.decode.add("local", prompt_of(50, 2), greedy(60))  # needs no import
        rig.until(lambda: rig.ended("running"))
        answer = rig.answer("running")
        assert answer.stats is not None and answer.stats.import_failures == core.stats().import_failures == 1
        if policy == "fail":
            assert answer.finish_reason is FinishReason.ERROR and not answer.token_ids
            assert "inside one transport call read" in str(answer.error) and "quarantine" in str(answer.error)
        else:
            rig.check("running")
            assert core.stats().local_prefill_tokens == 40
            assert core.load_failures.tokens == 0 and set(core.requests) <= {"local"}
        rig.until(core.problem)
        cache = core.stats().cache
        assert cache["loads_in_flight"] == 1 and core.has_work() and core.stats().pd["imports_overdue"] == 1
        rig.until(lambda: rig.answer("local").finish_reason is not None)
        core.check()
        cache = core.stats().cache
        held = cache["host_blocks_total"] - cache["host_blocks_free"]
        assert held == 3, "of 40 tokens in pages of 16: what the READ may still write belongs to nobody"
    finally:
        gate.set()
    rig.until(lambda: not core.problem())
    rig.put("after", prompt_of(90, 3), TOKENS)
    rig.run()
    rig.check("after")
    rig.served["local"] = rig.served["after"].__class__(prompt_of(50, 2), 60)
    rig.check("local")
    stats = core.stats().pd
    assert stats["staging_slots_free"] == stats["staging_slots"] and stats["imports_ok"] == 1
    (peer,) = stats["peers"].values()
    assert peer["reads"] > 0 and peer["num_bytes"] >= stats["import_bytes"] > 0

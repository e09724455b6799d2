"""Scenario B40 without Ray: a node is drained while it streams, imports, and new requests still come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hisparse.engine.request import RequestState
from hisparse.errors import RequestError
from hisparse.types import FinishReason
from tests.parity.rig import Rig, assert_full, engine_config, greedy, prompt_of

MakeRig = Callable[..., Rig]


@pytest.fixture
def rig(make_rig: MakeRig, tiny_checkpoints: dict[str, Path]) -> Rig:
    path, pd = tiny_checkpoints["glm52"], {"lease_s": 60.0, "transfer_deadline_s": 0.5}
    return make_rig(engine_config(path, "decode", pd=pd), engine_config(path, "prefill", pd=pd))


def test_b40_a_draining_decode_engine(rig: Rig) -> None:
    """Streams end with every token, imports are cancelled and prefill is told, later requests are refused and cost nothing."""
    assert rig.prefill is not None and rig.prefill.pd is not None
    core, prefill = rig.decode.core, rig.prefill
    for i in range(3):
        rig.put(f"stream{i}", prompt_of(50 + 40 * i, i), 40)
    rig.until(lambda: all(rig.answer(f"stream{i}").token_ids if f"stream{i}" in rig.decode.answers else False
                          for i in range(3)))
    rig.faults.hang = lambda number: True
    for i in range(2):
        rig.put(f"import{i}", prompt_of(90, 10 + i), 8)
    rig.until(lambda: [request.state for name, request in core.requests.items() if name.startswith("import")]
              == [RequestState.LOADING] * 2)
    before = prefill.pd.stats()

    assert core.drain() == 2 and core.stats().draining
    rig.step()
    for i in range(2):
        answer = rig.answer(f"import{i}")
        assert answer.finish_reason is FinishReason.ERROR and answer.token_ids == []
        assert answer.error is not None and answer.error.endswith("is being stopped; retry")
    with pytest.raises(RequestError, match="takes no new requests; retry") as refused:
        rig.decode.add("late", prompt_of(60, 20), greedy(4))
    assert refused.value.status == 503
    rig.put("late answer", prompt_of(60, 21), 4)  # its prefill began before the drain
    rig.until(lambda: "late answer" in rig.refused)
    assert "retry" in str(rig.refused["late answer"]) and core.drain() == 0
    assert set(core.requests) == {f"stream{i}" for i in range(3)}

    rig.until(lambda: not core.has_work() and not prefill.core.has_work())
    rig.check("stream0", "stream1", "stream2")
    after = prefill.pd.stats()
    assert after.leases_held == after.leases_expired == 0, "prefill was told, and did not wait for the leases to end"
    assert after.leases_released - before.leases_released == 3
    assert rig.decode.pd is not None and rig.decode.pd.stats().imports_failed == {"cancelled": 2}
    for engine in rig.engines:
        assert_full(engine)


def test_b40_the_order_of_an_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport lets go of the pool before it is unpinned and unmapped: memory that is registered cannot be freed."""
    from hisparse.pd.worker import PDConnectorWorker
    from hisparse.worker.host_pool import HostPool

    rig.put("r", prompt_of(60, 1), 4)
    rig.run()
    order: list[str] = []

    def note(owner: type, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def noted(self: object) -> None:
            inner(self)
            order.append(name)

        monkeypatch.setattr(owner, method, noted)

    note(PDConnectorWorker, "shutdown", "deregister")
    note(HostPool, "unpin", "unpin")
    note(HostPool, "close", "unmap")
    rig.decode.core.drain()
    rig.decode.close()
    assert order == ["deregister", "unpin", "unmap"]


def test_b40_a_draining_prefill_engine_keeps_its_leases(rig: Rig) -> None:
    """What it has computed can still be read; what waits is refused, so that decode asks another replica."""
    assert rig.prefill is not None
    core = rig.prefill.core
    rig.put("computed", prompt_of(120, 1), 12)
    rig.until(lambda: core.stats().held == 1)
    assert core.drain() == 0
    with pytest.raises(RequestError, match="takes no new requests; retry"):
        rig.prefill.add("late", prompt_of(60, 2), greedy(1), do_remote_decode=True)
    assert core.stats().held == 1 and core.has_work()
    rig.run()
    rig.check("computed")
    assert rig.answer("computed").stats.imported_tokens == 120  # type: ignore[union-attr]
    assert not core.has_work()

"""The prefill service over a fake engine: what it answers, and that failures leave nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from hisparse.errors import EngineDeadError, RequestError
from hisparse.serve.calls import PrefillAnswer, PrefillCall
from hisparse.serve.prefill import PrefillService
from hisparse.types import SamplingParams
from tests.serve.fake_engine import PARAMS, FakeEngine, run_and_settle


def prefill(engine: FakeEngine) -> PrefillAnswer:
    call = PrefillCall(request_id="p-1", prompt_token_ids=(1, 2, 3), cache_salt="s")
    return run_and_settle(lambda: PrefillService(engine).prefill(call))


def test_prefill_holds_and_names_its_engine() -> None:
    engine = FakeEngine()
    answer = prefill(engine)
    assert answer.kv_transfer_params == PARAMS and answer.engine == "front" and answer.error is None
    request = engine.requests[0]
    assert request.do_remote_decode and request.cache_salt == "s" and engine.aborted == []
    assert request.sampling == SamplingParams(max_tokens=1, ignore_eos=True)


@pytest.mark.parametrize(("error", "status"), [
    (RequestError("too long", status=413), 413), (EngineDeadError("dead"), 503), (TimeoutError("late"), 504),
])
def test_prefill_errors_are_values_and_free_everything(error: Exception, status: int) -> None:
    engine = FakeEngine()
    engine.error = error
    answer = prefill(engine)
    assert answer.error is not None and answer.error.status == status and engine.aborted == ["p-1"]


def test_an_answer_without_parameters_is_a_failure() -> None:
    engine = FakeEngine()
    engine.params = None
    answer = prefill(engine)
    assert answer.error is not None and answer.error.status == 503 and engine.aborted == ["p-1"]


def test_prefill_cancelled_by_its_caller_frees_everything() -> None:
    engine = FakeEngine()
    engine.hang_at = 0

    async def leave() -> None:
        task = asyncio.create_task(PrefillService(engine).prefill(PrefillCall(request_id="p-1", prompt_token_ids=(1,))))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.02)

    asyncio.run(leave())
    assert engine.aborted == ["p-1"]

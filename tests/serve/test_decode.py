"""Decode and prefill services over fake engines: the P/D flow, retries, policies, clean-up. No Ray, no model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from hisparse.actors.coordinator import EngineRequest
from hisparse.config import HiSparseConfig, load_config, model_path
from hisparse.engine.tokenizer import Tokenizer
from hisparse.errors import EngineDeadError, RequestError
from hisparse.metrics import MemorySink, RequestFeed
from hisparse.metrics.catalogue import FINISH, FINISHED, LONGEST_GAP, PREFILL_WAIT, PROMPT_TOKENS, QUEUE, TTFT
from hisparse.serve.calls import Chunk, GenerateCall, PrefillAnswer, PrefillCall
from hisparse.serve.decode import DecodeService
from hisparse.serve.errors import ApiError
from hisparse.serve.prefill import PrefillClient, PrefillService
from hisparse.types import FinishReason, Landing, RequestOutput, RequestStats, SampledToken, SamplingParams

PARAMS = {"lease": "l-1"}
WHO = {"model": "m", "role": "decode", "engine": "e"}


class FakeEngine:
    def __init__(self, words: tuple[str, ...] = ("a", "b")) -> None:
        self.words = words
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.error: Exception | None = None
        self.final = FinishReason.STOP
        self.hang_at: int | None = None
        self.front = "front"
        self.params: Any = PARAMS
        self.import_failures = 0
        self.resumed: list[tuple[Any, str, int]] = []
        self.answered = asyncio.Event()
        self.retry = False

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        for _ in range(self.import_failures):
            self.answered.clear()
            yield RequestOutput(request_id=request.request_id, retry_prefill="the READ broke off")
            await self.answered.wait()
        for at, word in enumerate(self.words):
            if at == self.hang_at:
                await asyncio.Event().wait()
            last = at == len(self.words) - 1
            error = "the engine failed: boom" if last and self.final is FinishReason.ERROR else None
            yield RequestOutput(request_id=request.request_id, new_token_ids=(at,), new_text=word, error=error,
                                retry=self.retry,
                                finish_reason=self.final if last else None,
                                logprobs=(SampledToken(token_id=40, logprob=-1.0, top_logprobs=((41, -2.0),)),),
                                stats=RequestStats(prompt_tokens=3, landing=Landing.HOST, queue_s=0.01) if last else None)

    async def resume(self, request_id: str, params: Any, failed: str, retries_left: int) -> None:
        self.resumed.append((params, failed, retries_left))
        self.answered.set()

    async def complete(self, request: EngineRequest, *, timeout_s: float) -> RequestOutput:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        if self.hang_at is not None:
            await asyncio.Event().wait()
        return RequestOutput(request_id=request.request_id, finish_reason=FinishReason.STOP, kv_transfer_params=self.params)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class FakeFront:
    """Stands for the prefill coordinator that an answer names."""

    def __init__(self) -> None:
        self.released: list[str] = []

    async def acall(self, method: str, request_id: str, timeout_s: float) -> None:
        assert method == "abort"
        self.released.append(request_id)


class Setup:
    """A decode service whose prefill attempts are answered by `script` (the last entry repeats)."""

    def __init__(self, *script: Any, config: dict[str, Any] | None = None, prefill: bool = True) -> None:
        self.config = make_config(**(config or {}))
        self.engine, self.front = FakeEngine(), FakeFront()
        self.script = list(script)
        self.attempts: list[PrefillCall] = []
        client = PrefillClient(self.send, self.config.pd, backoff_s=0.001) if prefill else None
        self.sink = MemorySink()
        self.service = DecodeService(self.config, self.engine, Tokenizer(model_path(self.config.model)), client,
                                     RequestFeed(self.sink, **WHO))

    def ended(self) -> dict[str, float]:
        """Requests by how they ended, as the metrics have it."""
        return {reason: count for reason in FINISH if (count := self.sink.value(FINISHED, **WHO, reason=reason) or 0)}

    async def send(self, call: PrefillCall) -> PrefillAnswer:
        self.attempts.append(call)
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if step == "hang":
            await asyncio.Event().wait()
        if isinstance(step, ApiError):
            return PrefillAnswer(request_id=call.request_id, error=step)
        if isinstance(step, Exception):
            raise step
        return PrefillAnswer(request_id=call.request_id, kv_transfer_params=PARAMS, engine=self.front)

    def run(self, **fields: Any) -> list[Chunk]:
        async def collect() -> list[Chunk]:
            call = GenerateCall(**({"request_id": "d-1", "text": "hello", "max_tokens": 4, "timeout_s": 5.0} | fields))
            chunks = [chunk async for chunk in self.service.generate(call)]
            await asyncio.sleep(0.01)
            return chunks

        return asyncio.run(collect())


def make_config(**pd: Any) -> HiSparseConfig:
    scheduler = pd.pop("scheduler", {})
    return load_config({"model": {"path": "recall", "max_model_len": 64}, "pd": pd, "scheduler": scheduler}, environ={})


def test_remote_prefill_then_decode() -> None:
    setup = Setup("ok")
    chunks = setup.run()
    assert [chunk.text for chunk in chunks] == ["a", "b"] and chunks[-1].finish_reason == "stop"
    assert chunks[-1].stats is not None
    assert {"landing": "host", "prefill": "remote", "prefill_attempts": 1}.items() <= dict(chunks[-1].stats).items()
    request = setup.engine.requests[0]
    assert request.kv_transfer_params == PARAMS and request.sampling.max_tokens == 4 and not request.do_remote_decode
    assert setup.attempts[0].prompt_token_ids == request.prompt_token_ids and setup.attempts[0].request_id != "d-1"
    assert setup.engine.aborted == setup.front.released == []
    assert setup.ended() == {"stop": 1} and setup.sink.value(PROMPT_TOKENS, **WHO) == 3
    assert [setup.sink.value(metric, **WHO) for metric in (PREFILL_WAIT, TTFT, QUEUE, LONGEST_GAP)] == [1] * 4


def test_the_log_has_ids_and_numbers_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="hisparse"):
        Setup("ok").run(text="the secret word is xylophone", request_id="cmpl-7-0")
        Setup(ApiError(503, "prefill is down"), config={"kv_load_failure_policy": "fail", "max_retries": 0}).run()
        Setup("ok").run(text="")
    done, failed, refused = [record.fields for record in caplog.records if record.message == "request ended"]  # type: ignore[attr-defined]
    assert {"request_id": "cmpl-7-0", "reason": "stop", "prompt_tokens": 3, "output_tokens": 2, "landing": "host",
            "prefill": "remote"}.items() <= done.items()
    assert 0 <= done["first_token_s"] <= done["seconds"] < 5
    assert (failed["reason"], failed["status"], failed["first_token_s"]) == ("error", 503, None)
    assert "prefill is down" in failed["error"]
    assert (refused["reason"], refused["status"]) == ("refused", 400) and "error" not in refused
    assert "xylophone" not in caplog.text and "xylophone" not in str([vars(record) for record in caplog.records])


def test_colocated_has_no_prefill() -> None:
    setup = Setup("ok", prefill=False)
    assert setup.run()[-1].stats == setup.run()[-1].stats
    assert setup.attempts == [] and setup.engine.requests[0].kv_transfer_params is None


def test_text_tokens_and_messages() -> None:
    setup = Setup("ok", prefill=False)
    setup.run(text=None, token_ids=(5, 6))
    setup.run(text=None, messages=(("user", "Why?"),))
    setup.run(text="Question: Why?\nAnswer:")
    first, second, third = (request.prompt_token_ids for request in setup.engine.requests)
    assert first == (5, 6) and second == third


def test_max_tokens_defaults_to_what_fits_and_too_long_is_413() -> None:
    setup = Setup("ok")
    setup.run(text=None, token_ids=(5,) * 60, max_tokens=None)
    assert setup.engine.requests[0].sampling.max_tokens == 4
    setup.run(text=None, token_ids=(5,) * 60, max_tokens=None, default_tokens=16)
    setup.run(text=None, token_ids=(5,) * 20, max_tokens=None, default_tokens=16)
    assert [request.sampling.max_tokens for request in setup.engine.requests[1:]] == [4, 16], "a default never is too much"
    cases: list[tuple[dict[str, Any], str]] = [({"token_ids": (5,) * 64}, "shorten"),
                                               ({"token_ids": (5,) * 60, "max_tokens": 5}, "lower max_tokens to 4")]
    for fields, fix in cases:
        chunk = setup.run(text=None, **fields)[-1]
        assert chunk.error is not None and chunk.error.status == 413 and "64" in chunk.error.message
        assert fix in chunk.error.message and chunk.error.param == "prompt"
    assert len(setup.attempts) == 3, "a request that can never run must not cost a prefill"


def test_logprobs_carry_text() -> None:
    item = Setup("ok").run()[0].logprobs[0]
    tokenizer = Tokenizer(model_path(make_config().model))
    assert item.token == tokenizer.decode([40]).encode() and item.top == ((tokenizer.decode([41]).encode(), -2.0),)


def test_retries_then_success() -> None:
    setup = Setup(ApiError(503, "down"), ConnectionError("gone"), "ok")
    chunk = setup.run()[-1]
    assert chunk.stats is not None and chunk.stats["prefill_attempts"] == 3 and chunk.stats["prefill"] == "remote"
    assert len({call.request_id for call in setup.attempts}) == 3


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_b34_prefill_down_is_bounded(policy: str) -> None:
    setup = Setup(ApiError(503, "down"), config={"kv_load_failure_policy": policy, "max_retries": 3})
    chunk = setup.run()[-1]
    assert len(setup.attempts) == 4
    if policy == "fail":
        assert chunk.error is not None and chunk.error.status == 503 and "down" in chunk.error.message
        assert setup.engine.requests == []
    else:
        assert chunk.stats is not None and chunk.stats["prefill"] == "local"
        assert setup.engine.requests[0].kv_transfer_params is None


def test_b34_500_requests_without_prefill_ask_2000_times_and_compute_nothing() -> None:
    setup = Setup(ApiError(503, "down"), config={"kv_load_failure_policy": "fail", "max_retries": 3,
                                                 "scheduler": {"max_waiting": 500}})

    async def storm() -> list[Chunk]:
        async def last(i: int) -> Chunk:
            call = GenerateCall(request_id=f"d-{i}", token_ids=(5,) * 20, max_tokens=4, timeout_s=60.0)
            return [chunk async for chunk in setup.service.generate(call)][-1]

        return list(await asyncio.gather(*(last(i) for i in range(500))))

    errors = [chunk.error for chunk in asyncio.run(storm())]
    assert [error.status for error in errors if error is not None] == [503] * 500
    assert len(setup.attempts) == 2000 and setup.engine.requests == []


def test_b34_no_retry_once_a_token_was_streamed() -> None:
    setup = Setup("ok", config={"max_retries": 3})
    setup.engine.final = FinishReason.ERROR
    chunks = setup.run()
    assert chunks[0].text == "a" and chunks[-1].error is not None
    assert len(setup.attempts) == len(setup.engine.requests) == 1 and setup.engine.resumed == []


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_import_is_tried_again_from_the_next_answer(failures: int) -> None:
    setup = Setup("ok", config={"max_retries": 2})
    setup.engine.import_failures = failures
    chunks = setup.run()
    assert [chunk.text for chunk in chunks] == ["a", "b"] and chunks[-1].stats is not None
    assert {"prefill": "remote", "prefill_attempts": 1 + failures}.items() <= dict(chunks[-1].stats).items()
    assert len({call.request_id for call in setup.attempts}) == 1 + failures
    assert setup.engine.requests[0].prefill_retries == 2
    assert setup.engine.resumed == [(PARAMS, "", 1), (PARAMS, "", 0)][:failures]
    assert setup.engine.aborted == setup.front.released == []


def test_retries_of_prefill_and_of_imports_are_the_same_ones() -> None:
    """Two attempts had no answer, so one import may fail; then the engine is told that there is none."""
    setup = Setup(ApiError(503, "down"), ConnectionError("gone"), "ok", ApiError(503, "down again"), config={"max_retries": 3})
    setup.engine.import_failures = 1
    chunk = setup.run()[-1]
    assert len(setup.attempts) == 4 and setup.engine.requests[0].prefill_retries == 1
    assert setup.engine.resumed == [(None, "prefill failed after 4 attempts: down again", 0)]
    assert chunk.stats is not None and chunk.stats["prefill"] == "local" and chunk.stats["prefill_attempts"] == 4


def test_policy_fail_ends_a_request_whose_retries_found_no_prefill() -> None:
    setup = Setup("ok", ApiError(503, "down"), config={"max_retries": 1, "kv_load_failure_policy": "fail"})
    setup.engine.import_failures = 1
    (chunk,) = setup.run()
    assert chunk.error is not None and chunk.error.status == 503 and "down" in chunk.error.message
    assert setup.engine.resumed == [] and setup.engine.aborted == ["d-1"], "the engine must not wait for an answer"


def test_a_retry_gives_up_before_the_deadline() -> None:
    setup = Setup("ok", "hang", config={"max_retries": 3})
    setup.engine.import_failures = 1
    chunk = setup.run(timeout_s=0.2)[-1]
    assert chunk.error is not None and chunk.error.status == 504
    assert setup.engine.aborted == ["d-1"] and len(setup.attempts) == 2


def test_an_engine_that_recomputes_no_more_is_503() -> None:
    """The budget is the engine's: it counts failed imports, too."""
    setup = Setup(ApiError(503, "down"), config={"max_retries": 0})
    setup.engine.error = RequestError("prefill failed; 50 prompt tokens are being recomputed here; retry later", status=503)
    chunk = setup.run()[-1]
    assert setup.engine.requests[0].prefill_failed == "prefill failed after 1 attempts: down"
    assert chunk.error is not None and chunk.error.status == 503 and "retry later" in chunk.error.message


def test_a_prompt_that_prefill_refuses_is_not_retried() -> None:
    setup = Setup(ApiError(413, "never fits", "prompt"))
    chunk = setup.run()[-1]
    assert chunk.error is not None and chunk.error.status == 413 and len(setup.attempts) == 1 and setup.engine.requests == []


def test_b28_a_refusal_after_prefill_releases_the_lease() -> None:
    setup = Setup("ok")
    setup.engine.error = RequestError("queue is full", status=429)
    chunk = setup.run()[-1]
    assert chunk.error is not None and chunk.error.status == 429
    assert setup.front.released == ["d-1-p1"]


def test_engine_failures_are_503() -> None:
    setup = Setup("ok")
    setup.engine.final = FinishReason.ERROR
    chunk = setup.run()[-1]
    assert chunk.error is not None and chunk.error.status == 503 and "boom" in chunk.error.message
    setup.engine.error = EngineDeadError("rank 0 is dead")
    chunk = setup.run()[-1]
    assert chunk.error is not None and chunk.error.status == 503 and "rank 0" in chunk.error.message


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_deadline_is_504_and_cleans_up(where: str) -> None:
    setup = Setup("hang" if where == "prefill" else "ok")
    setup.engine.hang_at = 1
    began = time.monotonic()
    chunk = setup.run(timeout_s=0.2)[-1]
    assert chunk.error is not None and chunk.error.status == 504
    if where == "prefill":
        assert setup.engine.requests == [], "no time is left for a recompute"
    else:
        assert setup.engine.aborted == ["d-1"] and setup.front.released == ["d-1-p1"]
    assert time.monotonic() - began < 3


def test_cancel_aborts_on_both_sides() -> None:
    setup = Setup("ok")
    setup.engine.hang_at = 1

    async def leave() -> None:
        async def listen() -> None:
            async for _ in setup.service.generate(GenerateCall(request_id="d-1", text="hello", max_tokens=4)):
                pass

        task = asyncio.create_task(listen())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.05)

    asyncio.run(leave())
    assert setup.engine.aborted == ["d-1"] and setup.front.released == ["d-1-p1"]
    assert setup.service._open == 0 and setup.ended() == {"abandoned": 1}


def test_full_replica_answers_429_before_any_prefill() -> None:
    setup = Setup("ok", config={"scheduler": {"max_num_seqs": 1, "max_waiting": 1}})
    setup.engine.hang_at = 1

    async def three() -> list[Chunk]:
        async def last(i: int) -> Chunk:
            call = GenerateCall(request_id=f"d-{i}", text="hello", max_tokens=4, timeout_s=0.2)
            return [chunk async for chunk in setup.service.generate(call)][-1]

        return list(await asyncio.gather(*(last(i) for i in range(3))))

    statuses = [chunk.error.status for chunk in asyncio.run(three()) if chunk.error is not None]
    assert statuses == [504, 504, 429] and len(setup.attempts) == 2
    assert setup.ended() == {"error": 2, "refused": 1}


# ------------------------------------------------------------------------------------------- the prefill replica


def prefill(engine: FakeEngine) -> PrefillAnswer:
    call = PrefillCall(request_id="p-1", prompt_token_ids=(1, 2, 3), cache_salt="s")
    return run_and_settle(lambda: PrefillService(engine).prefill(call))


def run_and_settle(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        result = await work()
        await asyncio.sleep(0.01)
        return result

    return asyncio.run(run())


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

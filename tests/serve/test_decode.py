"""The decode service over a fake engine: the P/D flow, retries, policies, clean-up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from hisparse.config import model_path
from hisparse.engine.tokenizer import Tokenizer
from hisparse.errors import EngineDeadError, RequestError
from hisparse.metrics.catalogue import LONGEST_GAP, PREFILL_WAIT, PROMPT_TOKENS, QUEUE, TTFT
from hisparse.serve.calls import Chunk, GenerateCall
from hisparse.serve.errors import ApiError
from hisparse.types import FinishReason
from tests.serve.fake_engine import PARAMS, WHO, Setup, make_config


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

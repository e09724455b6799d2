"""Which failures send a request to another replica, how often, and what the client sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from hisparse.errors import EngineDeadError
from hisparse.serve.calls import Chunk, GenerateCall
from hisparse.serve.errors import ENGINE_UNAVAILABLE, ApiError
from hisparse.serve.failover import MAX_ATTEMPTS, with_failover
from hisparse.types import FinishReason
from tests.serve.fake_engine import Setup

DEAD = ApiError(503, "rank 0 is dead", code=ENGINE_UNAVAILABLE)


class Replicas:
    """Attempt `i` does what `scripts[i]` says (the last one repeats): texts, an error as a value, or one to raise."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.calls, self.closed = list(scripts), list[GenerateCall](), 0

    async def attempt(self, call: GenerateCall) -> AsyncGenerator[Chunk]:
        self.calls.append(call)
        try:
            for item in self.scripts[min(len(self.calls), len(self.scripts)) - 1]:
                if isinstance(item, ApiError):
                    yield Chunk(error=item)
                elif isinstance(item, Exception):
                    raise item
                elif item == "hang":
                    await asyncio.Event().wait()
                else:
                    yield Chunk(text=item, finish_reason="stop" if item == "end" else None)
        finally:
            self.closed += 1

    def run(self, timeout_s: float = 5.0) -> list[Chunk]:
        async def collect() -> list[Chunk]:
            call = GenerateCall(request_id="c-0", text="x", timeout_s=timeout_s, cache_salt="s")
            return [chunk async for chunk in with_failover(self.attempt, call, backoff_s=0.01)]

        return asyncio.run(collect())


@pytest.mark.parametrize("failure", [DEAD, EngineDeadError("the replica is dead")])
def test_before_the_first_token_another_replica_answers(failure: Exception) -> None:
    replicas = Replicas([failure], [failure], ["a", "end"])
    assert [chunk.text for chunk in replicas.run()] == ["a", "end"]
    assert [call.request_id for call in replicas.calls] == ["c-0", "c-0-r2", "c-0-r3"], "prefill may hold the first one's pages"
    assert [call.retry_of for call in replicas.calls] == [None, "c-0", "c-0"]
    assert all(call.text == "x" and call.cache_salt == "s" and call.timeout_s <= 5 for call in replicas.calls)
    assert replicas.closed == 3


def test_an_empty_increment_is_no_token() -> None:
    assert [chunk.text for chunk in Replicas(["", DEAD], ["end"]).run()] == ["", "end"]


def test_after_a_token_nothing_is_repeated() -> None:
    replicas = Replicas(["a", DEAD], ["end"])
    assert replicas.run()[-1].error is DEAD and len(replicas.calls) == 1
    replicas = Replicas(["a", EngineDeadError("gone")], ["end"])
    with pytest.raises(EngineDeadError, match="gone"):
        replicas.run()
    assert len(replicas.calls) == 1


@pytest.mark.parametrize("error", [ApiError(400, "bad"), ApiError(429, "full"), ApiError(504, "late"),
                                   ApiError(503, "prefill failed after 4 attempts")])
def test_other_errors_are_the_answer(error: ApiError) -> None:
    replicas = Replicas([error], ["end"])
    assert replicas.run()[-1].error is error and len(replicas.calls) == 1


def test_attempts_are_bounded_in_number_and_time() -> None:
    replicas = Replicas([DEAD])
    with pytest.raises(ApiError, match="rank 0 is dead"):
        replicas.run()
    assert len(replicas.calls) == MAX_ATTEMPTS
    replicas, began = Replicas([DEAD]), time.monotonic()
    with pytest.raises(ApiError, match="rank 0 is dead"):
        replicas.run(timeout_s=0.025)
    assert len(replicas.calls) == 2 and time.monotonic() - began < 2


def test_a_caller_that_leaves_ends_the_attempt() -> None:
    replicas = Replicas(["a", "hang"])

    async def leave() -> None:
        chunks = with_failover(replicas.attempt, GenerateCall(request_id="c-0", text="x"))
        assert (await anext(chunks)).text == "a"
        await chunks.aclose()
        assert replicas.closed == 1
        task = asyncio.ensure_future(anext(with_failover(Replicas(["hang"]).attempt, GenerateCall(request_id="c", text="x"))))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())


def test_which_answers_of_a_decode_replica_say_so() -> None:
    """The engine's own word counts, not the status: a prompt whose KV could not be loaded would fail elsewhere, too."""
    def code(**engine: Any) -> str:
        setup = Setup("ok")
        for name, value in engine.items():
            setattr(setup.engine, name, value)
        chunk = setup.run()[-1]
        assert chunk.error is not None and chunk.error.status == 503
        return str(chunk.error.code)

    assert code(error=EngineDeadError("rank 0 is dead")) == ENGINE_UNAVAILABLE
    assert code(final=FinishReason.ERROR) == ""
    assert code(final=FinishReason.ERROR, retry=True) == ENGINE_UNAVAILABLE

"""A decode or prefill service over a fake engine, with answers of prefill as a test wants them. No Ray, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from hisparse.actors.coordinator import EngineRequest
from hisparse.config import HiSparseConfig, load_config, model_path
from hisparse.engine.tokenizer import Tokenizer
from hisparse.metrics import MemorySink, RequestFeed
from hisparse.metrics.catalogue import FINISH, FINISHED
from hisparse.serve.calls import Chunk, GenerateCall, PrefillAnswer, PrefillCall
from hisparse.serve.decode import DecodeService
from hisparse.serve.errors import ApiError
from hisparse.serve.prefill import PrefillClient
from hisparse.types import FinishReason, Landing, RequestOutput, RequestStats, SampledToken

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


def run_and_settle(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        result = await work()
        await asyncio.sleep(0.01)
        return result

    return asyncio.run(run())

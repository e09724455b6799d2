"""Decode replicas own a request: tokens, prefill, the engine's stream, and the clean-up whatever happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

from hisparse.actors.coordinator import EngineRequest
from hisparse.config import HiSparseConfig
from hisparse.engine.tokenizer import Tokenizer
from hisparse.metrics import NullSink, RequestFeed
from hisparse.metrics.request_feed import RequestTimer
from hisparse.serve.background import spawn
from hisparse.serve.calls import Chunk, GenerateCall, PrefillAnswer, TokenLogprob
from hisparse.serve.chat import ChatTemplate
from hisparse.serve.errors import ENGINE_UNAVAILABLE, ApiError
from hisparse.serve.prefill import PrefillClient
from hisparse.telemetry import NullTracer, RequestSpans, Tracer
from hisparse.types import FinishReason, RequestOutput, RequestStats

logger = logging.getLogger(__name__)

LONG_TEXT_CHARS = 20_000
T = TypeVar("T")


class DecodeEngine(Protocol):
    """What the replica uses of `EngineActors`."""

    def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]: ...
    async def resume(self, request_id: str, kv_transfer_params: Mapping[str, Any] | None, prefill_failed: str,
                     retries_left: int) -> None: ...
    async def abort(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _Asked:
    """What prefill said to one request until now. `failed`: why there is no answer to read."""

    answer: PrefillAnswer | None = None
    attempts: int = 0
    failed: str | None = None
    retries_left: int = 0

    @property
    def params(self) -> Mapping[str, Any] | None:
        return self.answer.kv_transfer_params if self.answer is not None and self.failed is None else None


class DecodeService:
    """One decode (or colocated) replica's work, over its engine.

    Args:
        prefill: None = this engine computes its prompts itself.
        feed: metrics of requests; default nowhere. tracer: of spans; default none.
    """

    def __init__(self, config: HiSparseConfig, engine: DecodeEngine, tokenizer: Tokenizer,
                 prefill: PrefillClient | None, feed: RequestFeed | None = None, tracer: Tracer | None = None) -> None:
        self._config, self._engine, self._tokenizer, self._prefill = config, engine, tokenizer, prefill
        self._chat = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        self._capacity = config.scheduler.max_num_seqs + config.scheduler.max_waiting
        self._feed = feed or RequestFeed(NullSink(), model="", role="", engine="")
        self._tracer = tracer or NullTracer()
        self._open = 0

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Chunk]:
        """Increments of the answer; an error comes as the last one. A caller that goes away aborts everywhere."""
        timer, ended = self._feed.begin(), "abandoned"
        facts: dict[str, Any] = {"request_id": call.request_id}
        spans = RequestSpans(self._tracer, "hisparse.request", call.trace, request_id=call.request_id)
        try:
            deadline = time.monotonic() + call.timeout_s
            with self._admitted():
                prompt = await self._encode(call)
                sampling = replace(call.sampling, max_tokens=self._max_tokens(call, len(prompt)))
                request = EngineRequest(request_id=call.request_id, prompt_token_ids=prompt, sampling=sampling,
                                        cache_salt=call.cache_salt, tenant=call.tenant)
                async for chunk in self._run(request, deadline, timer, spans):
                    ended = "error" if chunk.error is not None else chunk.finish_reason or ended
                    facts |= _facts(chunk)
                    yield chunk
        except Exception as error:
            answer = ApiError.of(error)
            ended = "refused" if answer.status < 500 else "error"
            if not isinstance(error, ApiError) and answer.status == 500:
                logger.exception("request %s", call.request_id)
            facts |= _facts(Chunk(error=answer))
            yield Chunk(error=answer)
        finally:
            facts |= timer.end(ended)
            logger.info("request ended", extra={"fields": facts})
            spans.end(_attributes(facts), error=facts.get("error") or (ended if ended in ("error", "refused") else None),
                      is_cut=ended == "abandoned")

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Refuses before prefill has worked for nothing."""
        if self._open >= self._capacity:
            raise ApiError(429, f"{self._open} requests are open on this replica (scheduler.max_num_seqs + "
                                f"max_waiting = {self._capacity}); retry later")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def _encode(self, call: GenerateCall) -> tuple[int, ...]:
        if call.token_ids is not None:
            return call.token_ids
        text = call.text if call.messages is None else self._chat.render(call.messages)
        if not text:
            raise ApiError(400, "the prompt is empty", "prompt")
        if len(text) > LONG_TEXT_CHARS:
            return tuple(await asyncio.to_thread(self._tokenizer.encode, text))
        return tuple(self._tokenizer.encode(text))

    def _max_tokens(self, call: GenerateCall, num_prompt_tokens: int) -> int:
        limit = self._config.model.max_model_len
        field = "messages" if call.messages is not None else "prompt"
        if num_prompt_tokens == 0:
            raise ApiError(400, "the prompt has no tokens", field)
        if num_prompt_tokens >= limit:
            raise ApiError(413, f"the prompt has {num_prompt_tokens} tokens, max_model_len is {limit} for prompt and "
                                "output together; shorten the prompt", field, "context_length_exceeded")
        room = limit - num_prompt_tokens
        wanted = min(call.default_tokens or room, room) if call.max_tokens is None else call.max_tokens
        if num_prompt_tokens + wanted > limit:
            raise ApiError(413, f"prompt of {num_prompt_tokens} tokens + max_tokens {wanted} exceeds max_model_len "
                                f"{limit}; lower max_tokens to {room} or shorten the prompt",
                           field, "context_length_exceeded")
        return wanted

    async def _run(self, request: EngineRequest, deadline: float, timer: RequestTimer,
                   spans: RequestSpans) -> AsyncIterator[Chunk]:
        asked = _Asked()
        finished = False
        facts: dict[str, Any] = {"prefill": "local", "prefill_attempts": 0}
        try:
            if self._prefill is not None:
                await self._ask(asked, request, deadline, spans)
                timer.prefilled()
                request = replace(request, kv_transfer_params=asked.params, prefill_failed=asked.failed,
                                  prefill_retries=asked.retries_left)
            outputs = self._engine.generate(request)
            while not finished:
                output = await _before(anext(outputs), deadline)
                if output.retry_prefill is not None:
                    logger.info("import of %s, attempt %d: %s", request.request_id, asked.attempts, output.retry_prefill)
                    await self._ask(asked, request, deadline, spans)
                    await self._engine.resume(request.request_id, asked.params, asked.failed or "", asked.retries_left)
                    continue
                timer.tokens(len(output.new_token_ids))
                spans.moments(output.timeline)
                if output.stats is not None:
                    timer.stats(output.stats)
                finished = output.finish_reason is not None
                facts |= {"prefill": "local" if asked.params is None else "remote", "prefill_attempts": asked.attempts}
                yield self._chunk(output, facts)
        except StopAsyncIteration:
            raise ApiError(503, "the engine ended the request early") from None
        finally:
            if not finished:
                spawn(self._engine.abort(request.request_id))
                if asked.answer is not None and self._prefill is not None:
                    self._prefill.release(asked.answer)

    async def _ask(self, asked: _Asked, request: EngineRequest, deadline: float, spans: RequestSpans) -> None:
        """Asks prefill, for the first time or because the import of its last answer failed. Raises ApiError where that is the
        end of the request; whether a prompt without an answer is computed here is the engine's decision."""
        assert self._prefill is not None
        asked.answer, asked.attempts = await self._prefill.prefill(
            request.request_id, request.prompt_token_ids, cache_salt=request.cache_salt, deadline=deadline,
            attempts=asked.attempts, tenant=request.tenant, trace=spans.prefill_begins())
        asked.retries_left = self._prefill.retries_left(asked.attempts)
        error = asked.answer.error
        spans.prefill_ends(asked.attempts, None if error is None else error.message)
        if error is None:
            asked.failed = None
            return
        asked.failed, asked.retries_left = f"prefill failed after {asked.attempts} attempts: {error.message}", 0
        if time.monotonic() >= deadline or (not error.retryable and error.status != 500):
            raise error
        if self._config.pd.kv_load_failure_policy == "fail":
            raise ApiError(503, asked.failed)

    def _chunk(self, output: RequestOutput, facts: dict[str, Any]) -> Chunk:
        logprobs = tuple(
            TokenLogprob(
                token=self._tokenizer.piece(item.token_id), logprob=item.logprob or 0.0,
                top=tuple((self._tokenizer.piece(token), value) for token, value in item.top_logprobs),
            )
            for item in output.logprobs
        )
        error = None
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            error = ApiError(503, output.error or "the request was aborted", code=ENGINE_UNAVAILABLE if output.retry else "")
        return Chunk(
            text=output.new_text, token_ids=output.new_token_ids, logprobs=logprobs, error=error,
            finish_reason=output.finish_reason.value if output.finish_reason is not None and error is None else None,
            stats=None if output.stats is None else {**_stats(output.stats), **facts, "request_id": output.request_id},
        )


def _facts(chunk: Chunk) -> dict[str, Any]:
    """What a log line says of a request: numbers and names. A message only where it is ours to explain, not the client's."""
    known = ("prompt_tokens", "cached_tokens", "queue_s", "landing", "preemptions", "prefill", "prefill_attempts")
    facts = {key: chunk.stats[key] for key in known if key in chunk.stats} if chunk.stats is not None else {}
    if chunk.error is not None:
        facts["status"] = chunk.error.status
        if chunk.error.status >= 500:
            facts["error"] = chunk.error.message
    return facts


def _attributes(facts: dict[str, Any]) -> dict[str, Any]:
    """Of a request's span: OpenTelemetry's names where it has some."""
    names = {"prompt_tokens": "gen_ai.usage.input_tokens", "output_tokens": "gen_ai.usage.output_tokens",
             "reason": "hisparse.finish_reason", "status": "http.response.status_code"}
    return {names.get(key, f"hisparse.{key}"): value for key, value in facts.items() if key not in ("request_id", "error")}


def _stats(stats: RequestStats) -> dict[str, Any]:
    landing = None if stats.landing is None else stats.landing.value
    return {**asdict(stats), "resolve": stats.resolve._asdict(), "landing": landing}


async def _before(work: Awaitable[T], deadline: float) -> T:
    try:
        return await asyncio.wait_for(work, max(deadline - time.monotonic(), 0.001))
    except TimeoutError:
        raise ApiError(504, "the request did not finish before its deadline") from None

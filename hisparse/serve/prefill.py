"""Prefill replicas: compute a prompt's KV, hold it under a lease, say where it is. And decode's way to reach them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from hisparse.actors.coordinator import EngineRequest
from hisparse.config import PDConfig
from hisparse.metrics import NullSink, RequestFeed
from hisparse.serve.background import spawn
from hisparse.serve.calls import PrefillAnswer, PrefillCall
from hisparse.serve.errors import ENGINE_UNAVAILABLE, ApiError
from hisparse.telemetry import NullTracer, RequestSpans, Tracer
from hisparse.telemetry.spans import Carrier
from hisparse.types import RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

BACKOFF_S = 0.05
BACKOFF_MAX_S = 2.0


class PrefillEngine(Protocol):
    """What the replica uses of `EngineActors`."""

    @property
    def front(self) -> Any: ...
    async def complete(self, request: EngineRequest, *, timeout_s: float) -> RequestOutput: ...
    async def abort(self, request_id: str) -> None: ...


class PrefillService:
    """One prefill replica's work, over its engine.

    Args:
        feed: metrics; default nowhere. tracer: of spans; default none.
    """

    def __init__(self, engine: PrefillEngine, feed: RequestFeed | None = None, tracer: Tracer | None = None) -> None:
        self._engine, self._tracer = engine, tracer or NullTracer()
        self._feed = feed or RequestFeed(NullSink(), model="", role="prefill", engine="")

    async def prefill(self, call: PrefillCall) -> PrefillAnswer:
        """The prompt's KV, leased; errors come as values. A caller that goes away frees everything."""
        request = EngineRequest(
            request_id=call.request_id, prompt_token_ids=call.prompt_token_ids, cache_salt=call.cache_salt, tenant=call.tenant,
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), do_remote_decode=True,
        )
        done, failure = False, "cancelled"
        spans = RequestSpans(self._tracer, "hisparse.prefill.engine", call.trace, request_id=call.request_id,
                             first_step="hisparse.compute", decode="")
        try:
            output = await self._engine.complete(request, timeout_s=call.timeout_s)
            spans.moments(output.timeline)
            if output.stats is not None:
                self._feed.queued(output.stats)
            if output.error is not None or output.kv_transfer_params is None:
                failure = reason = output.error or "the engine gave no transfer parameters"
                return PrefillAnswer(request_id=call.request_id, error=ApiError(
                    503, f"prefill failed: {reason}", code=ENGINE_UNAVAILABLE if output.retry else ""))
            done = True
            return PrefillAnswer(request_id=call.request_id, kv_transfer_params=output.kv_transfer_params,
                                 engine=self._engine.front)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            answer = ApiError.of(error)
            failure = f"status {answer.status}" if answer.status < 500 else answer.message
            return PrefillAnswer(request_id=call.request_id, error=answer)
        finally:
            spans.end({"hisparse.prompt_tokens": len(call.prompt_token_ids)}, error=None if done else failure)
            if not done:
                spawn(self._engine.abort(call.request_id))


class PrefillClient:
    """Asks prefill replicas, with bounded retries and backoff; a lease that nobody will read is released.

    Args:
        send: one attempt at some replica, e.g. over a Serve handle; cancelling it cancels the attempt there.
    """

    def __init__(self, send: Callable[[PrefillCall], Awaitable[PrefillAnswer]], config: PDConfig, *,
                 backoff_s: float = BACKOFF_S) -> None:
        self._send, self._max_retries, self._backoff_s = send, config.max_retries, backoff_s

    async def prefill(self, request_id: str, prompt: tuple[int, ...], *, cache_salt: str | None,
                      deadline: float, attempts: int = 0, tenant: str = "",
                      trace: Carrier | None = None) -> tuple[PrefillAnswer, int]:
        """The answer of the first attempt that worked, or of the last one; and the number of attempts for this request so far.

        Args:
            deadline: on the monotonic clock. attempts: made before; the last one's answer could not be read.
            tenant: who asks, for reports. trace: of the span that waits for it.
        """
        attempt = attempts
        if attempts and not await self._back_off(attempts, deadline):
            return PrefillAnswer(request_id=request_id, error=ApiError(504, "no time is left to ask prefill again")), attempts
        while True:
            attempt += 1
            answer = await self._attempt(PrefillCall(
                request_id=f"{request_id}-p{attempt}", prompt_token_ids=prompt, cache_salt=cache_salt,
                timeout_s=max(deadline - time.monotonic(), 0.001), tenant=tenant, trace=trace,
                retry_of=f"{request_id}-p1" if attempt > 1 else None,
            ))
            if answer.error is None or not answer.error.retryable or not self.retries_left(attempt):
                return answer, attempt
            logger.info("prefill of %s, attempt %d: %s", request_id, attempt, answer.error.message)
            if not await self._back_off(attempt, deadline):
                return answer, attempt

    def retries_left(self, attempts: int) -> int:
        """Args: attempts: made so far for one request."""
        return max(0, 1 + self._max_retries - attempts)

    async def _back_off(self, attempts: int, deadline: float) -> bool:
        """Waits before the next attempt. False = the deadline is nearer."""
        wait_s = min(self._backoff_s * 2 ** (attempts - 1), BACKOFF_MAX_S) * random.uniform(0.75, 1.25)
        if time.monotonic() + wait_s >= deadline:
            return False
        await asyncio.sleep(wait_s)
        return True

    async def _attempt(self, call: PrefillCall) -> PrefillAnswer:
        try:
            return await asyncio.wait_for(self._send(call), call.timeout_s)
        except TimeoutError:
            error = ApiError(504, "prefill did not answer before the deadline")
        except Exception as problem:
            logger.warning("prefill of %s: %s: %s", call.request_id, type(problem).__name__, problem)
            error = ApiError(503, f"no prefill replica answered ({type(problem).__name__})")
        return PrefillAnswer(request_id=call.request_id, error=error)

    def release(self, answer: PrefillAnswer) -> None:
        """Ends the lease of an answer that will not be read (or not to its end). Returns at once; safe to repeat."""
        if answer.engine is not None:
            spawn(answer.engine.acall("abort", answer.request_id, timeout_s=10.0))

"""Another replica for a request whose engine failed, or is being stopped, before it gave a token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from hisparse.serve.calls import Chunk, GenerateCall
from hisparse.serve.errors import ENGINE_UNAVAILABLE, ApiError

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
BACKOFF_S = 0.25
"""Doubles: about as long as Serve's routers need to forget a replica that has ended."""


async def with_failover(attempt: Callable[[GenerateCall], AsyncGenerator[Chunk]], call: GenerateCall, *,
                        backoff_s: float = BACKOFF_S) -> AsyncGenerator[Chunk]:
    """Increments of the answer. Nothing is repeated once the caller has seen a token, and no error but that of an engine.

    Args:
        attempt: one attempt at some replica. Later ones have ids of their own: prefill may still hold the earlier one's pages.
    """
    deadline, number = time.monotonic() + call.timeout_s, 1
    current = call
    while True:
        failure: ApiError | None = None
        begun = False
        try:
            async with aclosing(attempt(current)) as chunks:
                async for chunk in chunks:
                    if chunk.error is not None and not begun and chunk.error.code == ENGINE_UNAVAILABLE:
                        failure = chunk.error
                        break
                    begun = begun or bool(chunk.token_ids or chunk.text)
                    yield chunk
        except Exception as error:
            answer = ApiError.of(error)
            if begun or answer.code != ENGINE_UNAVAILABLE:
                raise
            failure = answer
        if failure is None:
            return
        wait_s = backoff_s * 2 ** (number - 1)
        if number == MAX_ATTEMPTS or time.monotonic() + wait_s >= deadline:
            raise failure
        logger.info("request %s, attempt %d: %s", call.request_id, number, failure.message)
        await asyncio.sleep(wait_s)
        number += 1
        current = replace(call, request_id=f"{call.request_id}-r{number}", retry_of=call.request_id,
                          timeout_s=max(deadline - time.monotonic(), 0.001))

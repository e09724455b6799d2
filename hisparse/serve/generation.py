"""The calls of one API request (n choices, several prompts), run together under one deadline."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from hisparse.serve.background import spawn
from hisparse.serve.calls import Backend, Chunk, GenerateCall
from hisparse.serve.errors import ApiError

logger = logging.getLogger(__name__)

Chunks = AsyncGenerator[tuple[int, Chunk], None]
"""(choice, increment)."""
_Queue = asyncio.Queue[tuple[int, Chunk | BaseException]]


class Generation:
    """Increments of every choice as they come, each with the index of its choice.

    Whatever ends it early (an error of one choice, the deadline, a caller that goes away) aborts every open call.

    Args:
        timeout_s: deadline of the whole request from now on.
    """

    def __init__(self, backend: Backend, calls: Sequence[GenerateCall], timeout_s: float) -> None:
        self._backend, self._calls = backend, calls
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    async def chunks(self) -> Chunks:
        """Yields (choice, increment).

        Raises:
            ApiError: a choice failed, or 504 at the deadline.
        """
        queue: _Queue = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(index, call, queue)) for index, call in enumerate(self._calls)]
        open_choices = set(range(len(self._calls)))
        try:
            while open_choices:
                try:
                    index, item = await asyncio.wait_for(queue.get(), max(self._deadline - time.monotonic(), 0.001))
                except TimeoutError:
                    raise ApiError(504, f"the request did not finish within {self._timeout_s:g} s") from None
                if isinstance(item, BaseException):
                    raise ApiError.of(item) from item
                if item.error is not None:
                    open_choices.discard(index)
                    raise item.error
                if item.finish_reason is not None:
                    open_choices.discard(index)
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            for index in open_choices:
                spawn(self._backend.abort(self._calls[index].request_id))

    async def _pump(self, index: int, call: GenerateCall, queue: _Queue) -> None:
        left = max(self._deadline - time.monotonic(), 0.001)
        try:
            async for chunk in self._backend.generate(replace(call, timeout_s=left)):
                queue.put_nowait((index, chunk))
                if chunk.finish_reason is not None or chunk.error is not None:
                    return
            queue.put_nowait((index, ApiError(503, "the engine ended the answer early")))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            logger.warning("request %s: %s: %s", call.request_id, type(error).__name__, error)
            queue.put_nowait((index, error))

"""One client's connection: its body, bounded in bytes and time; its leaving; and the stream of events to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from hisparse.serve.calls import Chunk
from hisparse.serve.errors import ApiError
from hisparse.serve.generation import Chunks
from hisparse.serve.writers import Writer, error_event


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The body, never more than `limit` bytes of it.

    Raises:
        ApiError: 413 when it is longer, 408 when it does not come in time, 400 for a length that is no number, 499 (which
            nobody will read) when the client leaves before it has sent it.
    """
    try:
        announced = int(request.headers.get("content-length", "0"))
    except ValueError:
        raise ApiError(400, "Content-Length is not a number", "Content-Length") from None
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            if announced <= limit:
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        break
    except ClientDisconnect:
        raise ApiError(499, "the client closed the connection", code="client_closed_request") from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s (serve.request_timeout_s)") from None
    if max(announced, len(body)) > limit:
        raise ApiError(413, f"the body exceeds {limit} bytes (serve.max_body_bytes); shorten the prompt")
    return bytes(body)


async def unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Awaits `work`, or cancels it when the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection", code="client_closed_request")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events of one answer. However it ends, even before its first event, `chunks` is closed.

    Args:
        first: the increment that decided that the status is 200.
    """

    def __init__(self, writer: Writer, first: tuple[int, Chunk], chunks: Chunks) -> None:
        super().__init__(_events(writer, first, chunks), media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._chunks = chunks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass  # how a server may say that the client left
        finally:
            await self._chunks.aclose()


async def _events(writer: Writer, first: tuple[int, Chunk], chunks: Chunks) -> AsyncIterator[str]:
    try:
        for line in writer.events(*first):
            yield line
        async for index, chunk in chunks:
            for line in writer.events(index, chunk):
                yield line
    except ApiError as error:
        yield error_event(error)

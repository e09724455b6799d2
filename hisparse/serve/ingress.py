"""The HTTP API: OpenAI's endpoints, health and statistics, as a FastAPI app over any `Backend`.

It validates, frames and bounds; it knows neither engines nor tokens. Every request has a deadline, and a client that
goes away aborts what it asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from hisparse.config import HiSparseConfig, served_name
from hisparse.metrics import HttpFeed, NullSink, Sink
from hisparse.serve.api import ChatRequest, CompletionRequest, parse_body
from hisparse.serve.calls import Backend, Chunk, GenerateCall
from hisparse.serve.errors import ApiError
from hisparse.serve.generation import Chunks, Generation
from hisparse.serve.guard import REQUEST_ID, TENANT, Guard, Measured
from hisparse.serve.keys import KeyRing, tenant_salt
from hisparse.serve.tracing import Traced, with_trace
from hisparse.serve.writers import ChatWriter, CompletionWriter, Writer, error_event
from hisparse.telemetry import Tracer

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 10.0


def create_api(config: HiSparseConfig, backend: Callable[[], Backend], sink: Sink | None = None,
               tracer: Tracer | None = None) -> FastAPI:
    """The app. `backend()` is asked at each request: the service behind it starts later than the app is built.

    Args:
        sink: of metrics; default none. tracer: of spans; default none.
    Raises:
        ConfigError: the file of API keys cannot be used.
    """
    api = FastAPI(title="hisparse", docs_url=None, redoc_url=None, openapi_url=None)
    served, keys = served_name(config.model), KeyRing(config.serve)
    api.add_middleware(Guard, keys=keys, allow_no_keys=config.serve.allow_no_keys)
    if tracer is not None and tracer.is_on:
        api.add_middleware(Traced, tracer=tracer)
    api.add_middleware(Measured, feed=HttpFeed(sink or NullSink(), model=served))  # the last one is the outermost
    timeout_s = config.serve.request_timeout_s

    def check_model(name: str) -> None:
        if name != served:
            raise ApiError(404, f"model {name!r} does not exist here; this server has {served!r}", "model",
                           "model_not_found")

    def salt(request: Request, given: str | None) -> str | None:
        return tenant_salt(None if config.serve.share_prefixes else request.scope.get(TENANT), given)

    async def answer(request: Request, calls: Sequence[GenerateCall], writer: Writer, stream: bool) -> Response:
        chunks = Generation(backend(), with_trace(request.scope, calls), timeout_s).chunks()
        if stream:
            try:
                first = await _unless_gone(request, anext(chunks))
            except BaseException:
                await chunks.aclose()
                raise
            return StreamingResponse(_events(writer, first, chunks), media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        await _unless_gone(request, _collect(writer, chunks))
        return Response(writer.whole().model_dump_json(exclude_unset=True), media_type="application/json")

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse_body(await _read(request, config.serve.max_body_bytes), CompletionRequest)
        check_model(body.model)
        prompts, n = body.prompts, body.num_choices
        writer = CompletionWriter(served, request.scope[REQUEST_ID], num_choices=len(prompts) * n, num_prompts=len(prompts),
                                  include_usage=body.include_usage, logprobs=body.num_logprobs is not None,
                                  token_ids=body.return_token_ids)
        calls = [
            GenerateCall(
                request_id=f"{writer.id}-{p * n + i}", max_tokens=16 if body.max_tokens is None else body.max_tokens,
                text=prompt if isinstance(prompt, str) else None,
                token_ids=None if isinstance(prompt, str) else tuple(prompt),
                sampling=body.sampling(i), cache_salt=salt(request, body.cache_salt),
            )
            for p, prompt in enumerate(prompts) for i in range(n)
        ]
        return await answer(request, calls, writer, body.stream)

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse_body(await _read(request, config.serve.max_body_bytes), ChatRequest)
        check_model(body.model)
        messages = tuple((message.role, message.text) for message in body.messages)
        writer = ChatWriter(served, request.scope[REQUEST_ID], num_choices=body.num_choices, include_usage=body.include_usage,
                            logprobs=body.num_logprobs is not None, token_ids=body.return_token_ids)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        calls = [
            GenerateCall(request_id=f"{writer.id}-{i}", messages=messages, max_tokens=limit, sampling=body.sampling(i),
                         cache_salt=salt(request, body.cache_salt))
            for i in range(body.num_choices)
        ]
        return await answer(request, calls, writer, body.stream)

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": served, "object": "model", "created": 0, "owned_by": "hisparse",
                "max_model_len": config.model.max_model_len}
        return {"object": "list", "data": [card]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return dict((await models())["data"][0])

    @api.get("/health")
    async def health(request: Request) -> Response:
        state = await _engine_state(config, backend())
        if keys and TENANT not in request.scope:
            state = {"status": state["status"]}
        return JSONResponse(state, status_code=200 if state["status"] == "ok" else 503)

    @api.get("/stats")
    async def stats(check: bool = False) -> dict[str, Any]:
        engines, endpoints = await asyncio.wait_for(
            asyncio.gather(backend().engines(check), backend().metrics_endpoints()), STATS_TIMEOUT_S)
        return {"model": served, "metrics": endpoints, "engines": engines}

    @api.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers())

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await on_api_error(request, ApiError(error.status_code, message))

    @api.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error,
                     extra={"fields": {"request_id": request.scope.get(REQUEST_ID)}})
        response = await on_api_error(request, ApiError.of(error))
        response.headers["X-Request-Id"] = str(request.scope.get(REQUEST_ID, ""))  # this answer passes no layer of ours
        return response

    return api


async def _engine_state(config: HiSparseConfig, backend: Backend) -> dict[str, Any]:
    """What `/health` answers: ok only when there are enough engines, and the loop of each turns. One that is being added on
    top of those says `starting`, and is no reason to send nobody here.
    """
    expected = config.serve.least_engines
    try:
        engines = await asyncio.wait_for(backend.engines(False), STATS_TIMEOUT_S)
    except Exception as error:
        return {"status": "unhealthy", "reason": ApiError.of(error).message, "engines": []}
    state = [{"engine": item.get("engine"), **item.get("health", {})} for item in engines]
    starting = [item for item in state if item.get("starting")]
    sick = [item for item in state if not item.get("ok") and item not in starting]
    if sick:
        return {"status": "unhealthy", "reason": f"{sick[0]['engine']}: {sick[0].get('reason')}", "engines": state}
    ready = len(state) - len(starting)
    if ready < expected:
        steps = "".join(f"; {item['engine']}: {item['reason']}" for item in starting)
        return {"status": "starting", "reason": f"{ready} of {expected} engines are ready{steps}", "engines": state}
    return {"status": "ok", "engines": state}


async def _read(request: Request, limit: int) -> bytes:
    """The body, never more than `limit` bytes of it."""
    try:
        announced = int(request.headers.get("content-length", "0"))
    except ValueError:
        raise ApiError(400, "Content-Length is not a number", "Content-Length") from None
    body = bytearray()
    if announced <= limit:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                break
    if max(announced, len(body)) > limit:
        raise ApiError(413, f"the body exceeds {limit} bytes (serve.max_body_bytes); shorten the prompt")
    return bytes(body)


async def _collect(writer: Writer, chunks: Chunks) -> None:
    try:
        async for index, chunk in chunks:
            writer.add(index, chunk)
    finally:
        await chunks.aclose()


async def _events(writer: Writer, first: tuple[int, Chunk], chunks: Chunks) -> AsyncIterator[str]:
    try:
        for line in writer.events(*first):
            yield line
        async for index, chunk in chunks:
            for line in writer.events(index, chunk):
                yield line
    except ApiError as error:
        yield error_event(error)
    finally:
        await chunks.aclose()


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
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

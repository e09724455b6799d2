"""The HTTP API: OpenAI's endpoints, health and statistics, as a FastAPI app over any `Backend`.

It validates, frames and bounds; it knows neither engines nor tokens. Every request has a deadline, and a client that
goes away aborts what it asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from hisparse.config import HiSparseConfig
from hisparse.metrics import HttpFeed, NullSink, Sink
from hisparse.serve.body import check_media_type, parse_body
from hisparse.serve.calls import Backend, GenerateCall
from hisparse.serve.connection import EventStream, read_body, unless_gone
from hisparse.serve.errors import ApiError
from hisparse.serve.facts import ServerFacts
from hisparse.serve.generation import Chunks, Generation
from hisparse.serve.guard import REQUEST_ID, TENANT, Guard, Measured, head_of
from hisparse.serve.keys import KeyRing, tenant_salt
from hisparse.serve.openapi import GENERATION_ERRORS, answers, body_of, describe
from hisparse.serve.requests import COMPLETION_TOKENS, ChatRequest, CompletionRequest
from hisparse.serve.residency import add_residency
from hisparse.serve.residency.hub import INTERVAL_S, ResidencyHub
from hisparse.serve.residency.view import Viewer
from hisparse.serve.responses import ChatChunk, ChatResponse, CompletionResponse, Health, ModelCard, ModelList, Stats
from hisparse.serve.tracing import Traced, with_trace
from hisparse.serve.writers import ChatWriter, CompletionWriter, Writer
from hisparse.telemetry import Tracer

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 10.0
LONG_BODY_BYTES = 64 << 10
"""Parsed beside the event loop, which other requests need."""
R = TypeVar("R", CompletionRequest, ChatRequest)


def create_api(config: HiSparseConfig, backend: Callable[[], Backend], sink: Sink | None = None,
               tracer: Tracer | None = None, *, proxied: bool = False) -> FastAPI:
    """The app. `backend()` is asked at each request: the service behind it starts later than the app is built.

    Args:
        sink: of metrics; default none. tracer: of spans; default none.
        proxied: behind Ray Serve's proxy; see `Measured`.
    Raises:
        ConfigError: the file of API keys cannot be used.
    """
    api = FastAPI(title="hisparse", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    facts, keys = ServerFacts.of(config), KeyRing(config.serve)
    describe(api, facts, keys=bool(keys), strangers=config.serve.allow_no_keys)
    api.add_middleware(Guard, keys=keys, allow_no_keys=config.serve.allow_no_keys)
    if tracer is not None and tracer.is_on:
        api.add_middleware(Traced, tracer=tracer)
    api.add_middleware(Measured, proxied=proxied,
                       feed=HttpFeed(sink or NullSink(), model=facts.model))  # the last one is the outermost
    timeout_s = config.serve.request_timeout_s

    def check_model(name: str) -> None:
        if name != facts.model:
            raise ApiError(404, f"model {name[:200]!a} does not exist here; this server has {facts.model!r}", "model",
                           "model_not_found")

    def salt(request: Request, given: str | None) -> str | None:
        return tenant_salt(None if config.serve.share_prefixes else request.scope.get(TENANT), given)

    async def read(request: Request, kind: type[R]) -> R:
        check_media_type(request.headers.get("content-type", ""))
        body = await read_body(request, config.serve.max_body_bytes, timeout_s)
        found = await asyncio.to_thread(parse_body, body, kind) if len(body) > LONG_BODY_BYTES else parse_body(body, kind)
        check_model(found.model)
        return found

    async def answer(request: Request, calls: Sequence[GenerateCall], writer: Writer, stream: bool | None) -> Response:
        chunks = Generation(backend(), with_trace(request.scope, calls), timeout_s).chunks()
        if stream:
            try:
                first = await unless_gone(request, anext(chunks))
            except BaseException:
                await chunks.aclose()
                raise
            return EventStream(writer, first, chunks)
        await unless_gone(request, _collect(writer, chunks))
        return Response(writer.whole().model_dump_json(exclude_unset=True), media_type="application/json")

    @api.post("/v1/completions", openapi_extra=body_of(CompletionRequest),
              responses=answers(CompletionResponse, *GENERATION_ERRORS, chunk=CompletionResponse))
    async def completions(request: Request) -> Response:
        """Continues each prompt."""
        body = await read(request, CompletionRequest)
        prompts, n = body.prompts, body.num_choices
        writer = CompletionWriter(
            facts.model, request.scope[REQUEST_ID], fingerprint=facts.fingerprint, num_choices=len(prompts) * n,
            num_prompts=len(prompts), include_usage=body.include_usage, logprobs=body.num_logprobs is not None,
            token_ids=bool(body.return_token_ids), warnings=body.warnings)
        calls = [
            GenerateCall(
                request_id=f"{writer.id}-{p * n + i}", max_tokens=body.max_tokens, default_tokens=COMPLETION_TOKENS,
                text=prompt if isinstance(prompt, str) else None,
                token_ids=None if isinstance(prompt, str) else tuple(prompt),
                sampling=body.sampling(i), cache_salt=salt(request, body.cache_salt), tenant=request.scope.get(TENANT, ""),
            )
            for p, prompt in enumerate(prompts) for i in range(n)
        ]
        return await answer(request, calls, writer, body.stream)

    @api.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest),
              responses=answers(ChatResponse, *GENERATION_ERRORS, chunk=ChatChunk))
    async def chat_completions(request: Request) -> Response:
        """Answers the last message of a conversation."""
        body = await read(request, ChatRequest)
        messages = tuple((message.role, message.text) for message in body.messages)
        writer = ChatWriter(
            facts.model, request.scope[REQUEST_ID], fingerprint=facts.fingerprint, num_choices=body.num_choices,
            include_usage=body.include_usage, logprobs=body.num_logprobs is not None, token_ids=bool(body.return_token_ids),
            warnings=body.warnings)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        calls = [
            GenerateCall(request_id=f"{writer.id}-{i}", messages=messages, max_tokens=limit, sampling=body.sampling(i),
                         cache_salt=salt(request, body.cache_salt), tenant=request.scope.get(TENANT, ""))
            for i in range(body.num_choices)
        ]
        return await answer(request, calls, writer, body.stream)

    @api.get("/v1/models", responses=answers(ModelList))
    async def models() -> ModelList:
        """The one model of this server."""
        return ModelList(object="list", data=[facts.card])

    @api.get("/v1/models/{name:path}", responses=answers(ModelCard, 404))
    async def model(name: str) -> ModelCard:
        """A model by its name."""
        check_model(name)
        return facts.card

    @api.get("/health", responses=answers(Health) | {503: {"model": Health, "description": "Not ready, or unhealthy."}})
    async def health(request: Request) -> Response:
        """Whether every engine's loop turns. Needs no key."""
        state = await _engine_state(config, backend())
        if keys and TENANT not in request.scope:
            state = {"status": state["status"]}
        return JSONResponse(state, status_code=200 if state["status"] == "ok" else 503)

    @api.get("/stats", responses=answers(Stats, 400, 504))
    async def stats(check: bool = False) -> Stats:
        """Gauges and counters of every engine; with `check`, also whether its accounts add up."""
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                engines, endpoints = await asyncio.gather(backend().engines(check), backend().metrics_endpoints())
        except TimeoutError:
            raise ApiError(504, f"the engines did not answer within {STATS_TIMEOUT_S:g} s") from None
        return Stats(model=facts.model, metrics=endpoints, engines=engines)

    def viewer(tenant: str | None) -> Viewer:
        return Viewer(tenant=tenant or "", sees_all=not keys or tenant in config.serve.operators)

    hub = ResidencyHub(lambda: backend().residency(), interval_s=INTERVAL_S)
    add_residency(api, hub, model=facts.model, interval_s=INTERVAL_S, viewer_of=viewer)

    @api.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers())

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]!a}: {error.detail}; GET /openapi.json lists what there is"
        response = await on_api_error(request, ApiError(error.status_code, message))
        response.headers.update(error.headers or {})  # 405 must say what is allowed
        return response

    @api.exception_handler(RequestValidationError)
    async def on_bad_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return await on_api_error(request, ApiError(400, f"{first['loc'][-1]}: {first['msg']}", str(first["loc"][-1])))

    @api.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error,
                     extra={"fields": {"request_id": request.scope.get(REQUEST_ID)}})
        response = await on_api_error(request, ApiError.of(error))
        response.headers.update(head_of(request.scope))  # this answer passes no layer of ours
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


async def _collect(writer: Writer, chunks: Chunks) -> None:
    try:
        async for index, chunk in chunks:
            writer.add(index, chunk)
    finally:
        await chunks.aclose()

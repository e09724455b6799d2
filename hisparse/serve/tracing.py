"""The span of an HTTP request, under the caller's W3C trace context; streams count to their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hisparse.serve.calls import GenerateCall
from hisparse.serve.guard import REQUEST_ID
from hisparse.telemetry import Tracer
from hisparse.telemetry.spans import Carrier

TRACE = "hisparse.trace"
"""Where a request's scope has the context for its children; absent = nobody records it."""
PATHS = ("/v1/completions", "/v1/chat/completions")
"""Others are not worth a trace."""
HEADERS = (b"traceparent", b"tracestate")


class Traced:
    """An ASGI layer; install it only with a tracer that is on."""

    def __init__(self, app: Any, *, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = next((known for known in PATHS if scope["type"] == "http" and scope["path"].endswith(known)), None)
        if path is None:
            await self._app(scope, receive, send)
            return
        parent = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in HEADERS}
        span = self._tracer.start(f"{scope['method']} {path}", parent, is_server=True)
        span.set("http.route", path)
        span.set("hisparse.request_id", str(scope.get(REQUEST_ID, "")))
        scope[TRACE] = span.carrier
        status, ended, left = 0, False, False

        async def receiving() -> Any:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not ended)
            return message

        async def sending(message: Any) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body"))
            await send(message)

        error: str | None = None
        try:
            await self._app(scope, receiving, sending)
        except Exception as problem:
            status, ended, error = 500, True, type(problem).__name__
            raise
        finally:
            if status:
                span.set("http.response.status_code", status)
            if left or not ended:  # who answers a client that left may still send the end
                span.set("hisparse.client_left", True)
            span.end(error=error or (f"HTTP {status}" if status >= 500 else None))


def with_trace(scope: Any, calls: Sequence[GenerateCall]) -> Sequence[GenerateCall]:
    """The calls of one HTTP request, under its span."""
    carrier: Carrier | None = scope.get(TRACE)
    return calls if carrier is None else [replace(call, trace=carrier) for call in calls]

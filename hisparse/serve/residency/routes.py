"""`/residency`, the page, and `/residency/events`, what it shows."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from hisparse.serve.guard import TENANT
from hisparse.serve.residency.hub import ResidencyHub, Sample
from hisparse.serve.residency.view import Viewer, frame, sse

PAGE = Path(__file__).parent / "page.html"
MAX_STREAM_S = 300.0
"""Then the page connects again: a key that was taken back does not see on, and no stream outlives its proxy's patience."""


def add_residency(api: FastAPI, hub: ResidencyHub, *, model: str, interval_s: float, viewer_of: Callable[[str | None], Viewer],
                  max_stream_s: float = MAX_STREAM_S) -> None:
    """Adds the page and its events.

    Args:
        hub: samples every `interval_s`. viewer_of: what the caller of a tenant may see; None = came without a key.
    """
    html, policy = page()

    @api.get("/residency", include_in_schema=False)  # not for programs: see docs/residency.md
    async def residency() -> Response:
        return Response(html, media_type="text/html; charset=utf-8", headers={
            "Content-Security-Policy": policy, "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache"})

    @api.get("/residency/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        viewer = viewer_of(request.scope.get(TENANT))
        samples = hub.watch()
        first = await anext(samples)  # a refusal is an answer of its own, not an event
        return StreamingResponse(
            stream(samples, first, lambda sample: frame(sample, viewer, model=model, interval_s=interval_s), max_stream_s),
            media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def stream(samples: AsyncGenerator[Sample, None], first: Sample, framed: Callable[[Sample], dict[str, object]],
                 max_stream_s: float, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[str]:
    """Events `residency`, one a sample, and at last `end` with a reason, unless the client leaves first.

    A stream ends when no engine is left: it must not hold up a service that stops.
    """
    began_s, sample = clock(), first
    async with aclosing(samples):
        while True:
            yield sse("residency", framed(sample), sample.number)
            if not sample.engines and not sample.problem:
                yield sse("end", {"reason": "no engine runs"})
                return
            if clock() - began_s >= max_stream_s:
                yield sse("end", {"reason": "time"})
                return
            sample = await anext(samples)


@functools.cache
def page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy: its own script and style by their digests, its own server, nothing else."""
    text = PAGE.read_text()
    style, script = (_digests(text, tag) for tag in ("style", "script"))
    return text.encode(), (f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
                           "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def _digests(text: str, tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'" for block in blocks)

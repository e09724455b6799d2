"""A service without engines: scripted answers, and a record of what was asked and aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hisparse.serve.calls import Chunk, GenerateCall, TokenLogprob
from hisparse.serve.errors import ApiError

STATS = {"prompt_tokens": 7, "cached_tokens": 3, "landing": "host", "prefill": "remote"}


class FakeBackend:
    """Answers every call with `words`, one chunk per word; fails with `error` at chunk `error_at`; waits if `hang`."""

    def __init__(self, words: list[str] | None = None) -> None:
        self.words = words if words is not None else ["Hello", " big", " world"]
        self.error: ApiError | Exception | None = None
        self.error_at = 0
        self.hang_at: int | None = None
        self.calls: list[GenerateCall] = []
        self.aborted: list[str] = []
        self.cancelled: list[str] = []
        self.residency_reports: Any = []
        """A list, a function that makes one, or an exception."""
        self.samplings = 0
        self.state: list[dict[str, Any]] = [
            {"engine": "prefill-1", "health": {"ok": True, "reason": ""}},
            {"engine": "decode-1", "health": {"ok": True, "reason": ""}},
        ]

    async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        self.calls.append(call)
        try:
            for at, word in enumerate(self.words):
                if self.error is not None and at == self.error_at:
                    if isinstance(self.error, ApiError):
                        yield Chunk(error=self.error)
                        return
                    raise self.error
                if at == self.hang_at:
                    await asyncio.Event().wait()
                last = at == len(self.words) - 1
                logprobs = ()
                if call.sampling.logprobs is not None:
                    logprobs = (TokenLogprob(token=word.encode(), logprob=-0.5, top=((word.encode(), -0.5), (b"x", -1.5))),)
                yield Chunk(text=word, token_ids=(at,), logprobs=logprobs, finish_reason="stop" if last else None,
                            stats=STATS if last else None)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(call.request_id)
            raise

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def engines(self, check: bool) -> list[dict[str, Any]]:
        return [{**item, "check": "ok"} if check else item for item in self.state]

    async def residency(self) -> list[dict[str, Any]]:
        self.samplings += 1
        if isinstance(self.residency_reports, Exception):
            raise self.residency_reports
        return self.residency_reports() if callable(self.residency_reports) else self.residency_reports

    async def metrics_endpoints(self) -> list[str]:
        return ["http://10.0.0.1:8080/metrics"]

"""Latencies and ends of requests into metrics: a replica's requests, and the API's HTTP requests.

One value per request, not per token: what is measured between tokens is kept in two numbers until the request ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hisparse.metrics.catalogue import (
    CACHED_TOKENS,
    DURATION,
    FINISH,
    FINISHED,
    HTTP_REQUESTS,
    HTTP_SECONDS,
    LONGEST_GAP,
    MEAN_GAP,
    PREFILL_WAIT,
    PROMPT_TOKENS,
    QUEUE,
    TTFT,
)
from hisparse.metrics.sinks import Sink
from hisparse.types import RequestStats

Clock = Callable[[], float]
ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/stats", "/residency/events", "/residency")
CLIENT_LEFT = 499


class RequestFeed:
    """Of one replica: requests of decode and colocated ones, and how long any of them queued."""

    def __init__(self, sink: Sink, clock: Clock = time.monotonic, *, model: str, role: str, engine: str) -> None:
        self._sink, self._clock = sink, clock
        self._labels = {"model": model, "role": role, "engine": engine}
        for reason in FINISH if role != "prefill" else ():
            sink.add(FINISHED, 0, self._labels | {"reason": reason})

    def queued(self, stats: RequestStats) -> None:
        """A request of a prefill replica is done."""
        _queue(self._sink, stats, self._labels)

    def begin(self) -> RequestTimer:
        return RequestTimer(self._sink, self._labels, self._clock)


class RequestTimer:
    """One request. `end` must be called once, whatever happens."""

    def __init__(self, sink: Sink, labels: dict[str, str], clock: Clock) -> None:
        self._sink, self._labels, self._clock = sink, labels, clock
        self._began_s = clock()
        self._first_s = self._last_s = 0.0
        self._tokens = 0
        self._longest_s = 0.0

    def prefilled(self) -> None:
        """A prefill replica answered, or the last attempt at one failed."""
        self._sink.observe(PREFILL_WAIT, self._clock() - self._began_s, self._labels)

    def tokens(self, count: int) -> None:
        """An increment with so many tokens came."""
        if not count:
            return
        now = self._clock()
        if self._tokens == 0:
            self._first_s = now
            self._sink.observe(TTFT, now - self._began_s, self._labels)
        else:
            self._longest_s = max(self._longest_s, now - self._last_s)
        self._last_s = now
        self._tokens += count

    def stats(self, stats: RequestStats) -> None:
        """From the request's last increment."""
        _queue(self._sink, stats, self._labels)
        self._sink.add(PROMPT_TOKENS, stats.prompt_tokens, self._labels)
        self._sink.add(CACHED_TOKENS, stats.cached_tokens, self._labels)

    def end(self, reason: str) -> dict[str, Any]:
        """Returns what a log line says of it. `reason`: one of `FINISH`."""
        seconds = self._clock() - self._began_s
        self._sink.add(FINISHED, 1, self._labels | {"reason": reason})
        self._sink.observe(DURATION, seconds, self._labels)
        if self._tokens > 1:
            self._sink.observe(MEAN_GAP, (self._last_s - self._first_s) / (self._tokens - 1), self._labels)
            self._sink.observe(LONGEST_GAP, self._longest_s, self._labels)
        first_s = self._first_s - self._began_s if self._tokens else None
        return {"reason": reason, "output_tokens": self._tokens, "seconds": round(seconds, 4),
                "first_token_s": None if first_s is None else round(first_s, 4)}


def _queue(sink: Sink, stats: RequestStats, labels: dict[str, str]) -> None:
    if stats.queue_s is not None:
        sink.observe(QUEUE, stats.queue_s, labels)


class HttpFeed:
    """Of the API. Paths that it does not have are one endpoint, "other": clients cannot make series."""

    def __init__(self, sink: Sink, *, model: str) -> None:
        self._sink, self._model = sink, model

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Args: status: as sent; 499 when the client left before the end."""
        endpoint = next((known for known in ENDPOINTS if path == known or path.startswith(f"{known}/")), "other")
        labels = {"model": self._model, "endpoint": endpoint}
        self._sink.add(HTTP_REQUESTS, 1, labels | {"status": str(status)})
        self._sink.observe(HTTP_SECONDS, seconds, labels)

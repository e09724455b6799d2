"""The spans of one request on one replica: prefill, then what its engine says it did, under one span for the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from hisparse.telemetry.spans import NO_SPAN, Carrier, Span, Tracer, Value

Clock = Callable[[], float]


class Moments(Protocol):
    """When an engine did what; see `hisparse.types.RequestTimeline`. Seconds since the arrival."""

    @property
    def arrived_unix_s(self) -> float: ...
    @property
    def admitted_s(self) -> float | None: ...
    @property
    def loaded_s(self) -> float | None: ...
    @property
    def first_token_s(self) -> float | None: ...


class RequestSpans:
    """Begin one per request; `end` must be called once, whatever happens. With a tracer that is off every call returns at once.

    Args:
        name: of the span for the whole. parent: of the caller.
        first_step, decode: names of the phases before and behind the first token; decode "" = there is none.
        clock: seconds since the epoch.
    """

    def __init__(self, tracer: Tracer, name: str, parent: Carrier | None, *, request_id: str,
                 first_step: str = "hisparse.first_step", decode: str = "hisparse.decode", clock: Clock = time.time) -> None:
        self._tracer, self._clock, self._names = tracer, clock, (first_step, decode)
        self._whole = self._prefill = NO_SPAN
        self._moments: Moments | None = None
        if tracer.is_on:
            self._whole = tracer.start(name, parent)
            self._whole.set("hisparse.request_id", request_id)

    def prefill_begins(self) -> Carrier | None:
        """Returns the context for the prefill replica."""
        if self._tracer.is_on:
            self._prefill = self._tracer.start("hisparse.prefill", self._whole)
        return self._prefill.carrier

    def prefill_ends(self, attempts: int, error: str | None) -> None:
        self._prefill.set("hisparse.prefill_attempts", attempts)
        self._prefill.end(error=error)
        self._prefill = NO_SPAN

    def moments(self, moments: Moments | None) -> None:
        """From an output of the engine; the latest counts."""
        self._moments = moments or self._moments

    def end(self, facts: Mapping[str, Value | None], *, error: str | None = None, is_cut: bool = False) -> None:
        """Args:
            facts: attributes of the whole; None values are left out. error: why it failed.
            is_cut: somebody stopped it; no failure of ours.
        """
        if not self._tracer.is_on:
            return
        now_s = self._clock()
        if self._prefill is not NO_SPAN:
            self._end_open(self._prefill, now_s, error, is_cut)
        if self._moments is not None:
            self._phases(self._moments, now_s, error, is_cut)
        for name, value in facts.items():
            if value is not None:
                self._whole.set(name, value)
        self._end_open(self._whole, now_s, error, is_cut)

    @staticmethod
    def _end_open(span: Span, now_s: float, error: str | None, is_cut: bool) -> None:
        if is_cut:
            span.set("hisparse.cut_off", True)
        span.end(at_s=now_s, error=error)

    def _phases(self, moments: Moments, now_s: float, error: str | None, is_cut: bool) -> None:
        """One span for each phase that has begun; the one under way ends now, and failed if the request did."""
        first_step, decode = self._names
        ends = [("hisparse.queue", moments.admitted_s)]
        if moments.loaded_s is not None:
            ends.append(("hisparse.transfer", moments.loaded_s))
        ends.append((first_step, moments.first_token_s))
        if decode:
            ends.append((decode, None))
        began_s = moments.arrived_unix_s
        for name, end_s in ends:
            span = self._tracer.start(name, self._whole, at_s=began_s)
            if end_s is None:
                self._end_open(span, max(now_s, began_s), error, is_cut)
                return
            began_s = max(moments.arrived_unix_s + end_s, began_s)
            span.end(at_s=began_s)

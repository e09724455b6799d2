"""What the service needs of a tracer, and the one that does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Carrier = Mapping[str, str]
"""W3C trace context as headers: `traceparent` and, where there is one, `tracestate`."""
Value = str | int | float | bool


class Span(Protocol):
    """One span under way. Attributes and errors never hold a prompt or an answer."""

    @property
    def carrier(self) -> Carrier | None:
        """For its children in other processes; None = nobody records it."""

    def set(self, name: str, value: Value) -> None:
        """An attribute."""

    def end(self, *, at_s: float | None = None, error: str | None = None) -> None:
        """Args: at_s: seconds since the epoch; default now. error: why it failed."""


class Tracer(Protocol):
    """Makes spans. Thread-safe; never blocks, and loses spans rather than wait for whoever takes them."""

    @property
    def is_on(self) -> bool:
        """False = every span is `NO_SPAN`."""

    def start(self, name: str, parent: Span | Carrier | None, *, at_s: float | None = None, is_server: bool = False) -> Span:
        """A new span; without a parent (or with one that cannot be read) it begins a trace.

        Args:
            at_s: seconds since the epoch; default now. is_server: it answers a request from outside.
        """

    def shutdown(self) -> None:
        """Sends what waits, within a few seconds."""


class _NoSpan:
    @property
    def carrier(self) -> Carrier | None:
        return None

    def set(self, name: str, value: Value) -> None: ...
    def end(self, *, at_s: float | None = None, error: str | None = None) -> None: ...


NO_SPAN: Span = _NoSpan()


class NullTracer:
    """Records nothing."""

    is_on = False

    def start(self, name: str, parent: Span | Carrier | None, *, at_s: float | None = None, is_server: bool = False) -> Span:
        return NO_SPAN

    def shutdown(self) -> None: ...

"""Spans of requests: where each one's time went. Off unless configured; then through OpenTelemetry (`otel`)."""

from hisparse.telemetry.request_spans import Moments, RequestSpans
from hisparse.telemetry.spans import NO_SPAN, NullTracer, Span, Tracer

__all__ = ["NO_SPAN", "Moments", "NullTracer", "RequestSpans", "Span", "Tracer"]

"""Spans through OpenTelemetry's SDK: the only door to it. Whoever does not configure spans never imports it.

The provider is our own, not the process's global one, which belongs to whoever embeds us.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hisparse.config import TelemetryConfig
from hisparse.errors import ConfigError
from hisparse.telemetry.spans import Carrier, Span, Value

_W3C = TraceContextTextMapPropagator()
BATCH_DELAY_MS = 500
"""A replica that is killed loses the spans of so long."""
NS = 1_000_000_000


class OtelTracer:
    """A `Tracer` over an exporter of finished spans.

    Args:
        attributes: of the process, e.g. its engine.
    """

    is_on = True

    def __init__(self, config: TelemetryConfig, exporter: SpanExporter, attributes: Mapping[str, str]) -> None:
        resource = Resource.create({"service.name": config.service_name, **attributes})
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)))
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=BATCH_DELAY_MS))
        self._tracer = self._provider.get_tracer("hisparse")

    def start(self, name: str, parent: Span | Carrier | None, *, at_s: float | None = None, is_server: bool = False) -> Span:
        if isinstance(parent, _OtelSpan):
            context = trace.set_span_in_context(parent.inner)
        else:  # an own, empty context: nothing of the process's current one
            carrier = parent if isinstance(parent, Mapping) else {}
            context = _W3C.extract(carrier, context=Context())
        kind = trace.SpanKind.SERVER if is_server else trace.SpanKind.INTERNAL
        return _OtelSpan(self._tracer.start_span(name, context, kind, start_time=_ns(at_s)))

    def shutdown(self) -> None:
        self._provider.force_flush(3000)
        self._provider.shutdown()


class _OtelSpan:
    def __init__(self, inner: trace.Span) -> None:
        self.inner = inner

    @property
    def carrier(self) -> Carrier | None:
        headers: dict[str, str] = {}
        _W3C.inject(headers, trace.set_span_in_context(self.inner))
        return headers or None

    def set(self, name: str, value: Value) -> None:
        self.inner.set_attribute(name, value)

    def end(self, *, at_s: float | None = None, error: str | None = None) -> None:
        if error is not None:
            self.inner.set_status(trace.Status(trace.StatusCode.ERROR, error))
        self.inner.end(_ns(at_s))


def _ns(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s * NS)


class FileExporter(SpanExporter):
    """Appends one JSON object a span to a file: for a machine without a collector, and for tests."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(f"{json.dumps(_as_dict(span))}\n" for span in spans)
        try:
            with self._path.open("a") as file:
                file.write(lines)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS


def _as_dict(span: ReadableSpan) -> dict[str, Any]:
    context, parent = span.get_span_context(), span.parent
    assert context is not None and span.start_time is not None and span.end_time is not None
    return {
        "name": span.name, "trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}",
        "parent_id": f"{parent.span_id:016x}" if parent is not None else None, "kind": span.kind.name.lower(),
        "start_s": span.start_time / NS, "end_s": span.end_time / NS, "status": span.status.status_code.name.lower(),
        "error": span.status.description, "attributes": dict(span.attributes or {}),
        "resource": dict(span.resource.attributes),
    }


def make_exporter(config: TelemetryConfig, who: str) -> SpanExporter:
    """Raises ConfigError: the exporter's package is not installed, or the directory does not exist."""
    if config.exporter == "file":
        directory = Path(str(config.directory))
        if not directory.is_dir():
            raise ConfigError(f"telemetry.directory = {directory} is no directory on this machine; make it")
        return FileExporter(directory / f"spans-{who}-{os.getpid()}-{time.time_ns():x}.jsonl")
    try:
        if config.protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Exporter
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Exporter
    except ImportError as error:
        kind = "grpc" if config.protocol == "grpc" else "http"
        raise ConfigError(
            f"telemetry.exporter = otlp (or an OTEL_* variable) needs the package opentelemetry-exporter-otlp-proto-{kind}, "
            "which is not installed here; pip install 'hisparse[otel]' on every node, or set telemetry.exporter to none"
        ) from error
    options: dict[str, Any] = {}
    if config.endpoint:
        options["endpoint"] = config.endpoint if config.protocol == "grpc" else traces_url(config.endpoint)
    exporter: SpanExporter = Exporter(**options)
    return exporter


def traces_url(endpoint: str) -> str:
    """Of OTLP over HTTP; `endpoint` may already have the path."""
    return endpoint if endpoint.rstrip("/").endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"

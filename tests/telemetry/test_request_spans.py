"""Spans of one request, read back from OpenTelemetry's own SDK: names, parents, times, what failed, and no text."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hisparse.config import TelemetryConfig, load_config
from hisparse.errors import ConfigError
from hisparse.telemetry import NO_SPAN, NullTracer, RequestSpans
from hisparse.telemetry.make import make_tracer
from hisparse.telemetry.otel import OtelTracer, traces_url
from hisparse.types import RequestTimeline

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}


class Recorded:
    """A tracer, and what it exported."""

    def __init__(self, **config: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = OtelTracer(TelemetryConfig(exporter="otlp", **config), self.exporter, {"service.instance.id": "e"})

    def spans(self) -> dict[str, ReadableSpan]:
        self.tracer._provider.force_flush()
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def tree(self) -> dict[str, str | None]:
        """Name -> the parent's name; the id of one that is elsewhere."""
        spans = self.spans()
        names = {span.context.span_id: name for name, span in spans.items()}
        return {name: None if span.parent is None else names.get(span.parent.span_id, f"{span.parent.span_id:016x}")
                for name, span in spans.items()}


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded()
    yield recorded
    recorded.tracer.shutdown()


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def failed(span: ReadableSpan) -> str | None:
    return None if span.status.is_unset else span.status.description


PHASES: list[tuple[RequestTimeline, dict[str, tuple[float, float]]]] = [
    (RequestTimeline(arrived_unix_s=1000.0), {"queue": (1000.0, 1009.0)}),
    (RequestTimeline(arrived_unix_s=1000.0, admitted_s=1.0), {"queue": (1000.0, 1001.0), "first_step": (1001.0, 1009.0)}),
    (RequestTimeline(arrived_unix_s=1000.0, admitted_s=1.0, loaded_s=3.0),
     {"queue": (1000.0, 1001.0), "transfer": (1001.0, 1003.0), "first_step": (1003.0, 1009.0)}),
    (RequestTimeline(arrived_unix_s=1000.0, admitted_s=1.0, loaded_s=3.0, first_token_s=4.5),
     {"queue": (1000.0, 1001.0), "transfer": (1001.0, 1003.0), "first_step": (1003.0, 1004.5), "decode": (1004.5, 1009.0)}),
]


@pytest.mark.parametrize("ending", ["stop", "error", "abandoned"])
@pytest.mark.parametrize(("timeline", "expected"), PHASES)
def test_phases_are_those_that_began(recorded: Recorded, timeline: RequestTimeline, expected: dict[str, tuple[float, float]],
                                     ending: str) -> None:
    """The phases cover the time without a gap, and the one under way shares the request's fate."""
    spans = RequestSpans(recorded.tracer, "hisparse.request", PARENT, request_id="r1", clock=lambda: 1009.0)
    spans.moments(timeline)
    spans.moments(None)
    spans.end({"hisparse.finish_reason": ending, "left_out": None}, error="boom" if ending == "error" else None,
              is_cut=ending == "abandoned")
    got = recorded.spans()
    whole = got.pop("hisparse.request")
    assert {name.removeprefix("hisparse."): seconds(span) for name, span in got.items()} == expected
    assert all(span.parent == whole.context and f"{span.context.trace_id:032x}" == TRACE for span in got.values())
    assert whole.parent is not None and f"{whole.parent.span_id:016x}" == CALLER and seconds(whole)[1] == 1009.0
    assert whole.context.trace_state.get("vendor") == "1"
    assert dict(whole.attributes or {}) == {"hisparse.request_id": "r1", "hisparse.finish_reason": ending} | (
        {"hisparse.cut_off": True} if ending == "abandoned" else {})
    *done, last = got.values()
    for span in (whole, last):
        assert failed(span) == ("boom" if ending == "error" else None)
        assert (span.attributes or {}).get("hisparse.cut_off") == (True if ending == "abandoned" else None)
    assert all(span.status.is_unset and not span.attributes for span in done)


def test_prefill_is_a_span_whose_context_travels(recorded: Recorded) -> None:
    spans = RequestSpans(recorded.tracer, "hisparse.request", None, request_id="r1")
    carrier = spans.prefill_begins()
    there = RequestSpans(recorded.tracer, "hisparse.prefill.engine", carrier, request_id="r1-p1", decode="",
                         first_step="hisparse.compute")
    there.moments(RequestTimeline(arrived_unix_s=5.0, admitted_s=0.5, first_token_s=2.0))
    there.end({})
    spans.prefill_ends(2, None)
    spans.end({})
    assert recorded.tree() == {
        "hisparse.request": None, "hisparse.prefill": "hisparse.request", "hisparse.prefill.engine": "hisparse.prefill",
        "hisparse.queue": "hisparse.prefill.engine", "hisparse.compute": "hisparse.prefill.engine"}
    got = recorded.spans()
    assert len({span.context.trace_id for span in got.values()}) == 1
    assert (got["hisparse.prefill"].attributes or {})["hisparse.prefill_attempts"] == 2


@pytest.mark.parametrize("parent", [{"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-{CALLER}-01"}, {}, None])
def test_a_parent_that_cannot_be_read_begins_a_trace(recorded: Recorded, parent: dict[str, str] | None) -> None:
    recorded.tracer.start("a", parent).end()
    assert recorded.tree() == {"a": None}


def test_the_callers_decision_counts_then_the_ratio() -> None:
    recorded = Recorded(sample_ratio=0.0)
    for flags in ("00", "01"):
        span = recorded.tracer.start(flags, {"traceparent": f"00-{TRACE}-{CALLER}-{flags}"})
        assert span.carrier is not None and span.carrier["traceparent"].endswith(flags), "children follow"
        span.end()
    recorded.tracer.start("mine", None).end()
    assert set(recorded.spans()) == {"01"}
    recorded.tracer.shutdown()


def test_off_records_nothing_and_asks_no_clock() -> None:
    def no_clock() -> float:
        raise AssertionError("asked for the time")

    spans = RequestSpans(NullTracer(), "a", PARENT, request_id="r", clock=no_clock)
    assert spans.prefill_begins() is None
    spans.prefill_ends(1, None)
    spans.moments(RequestTimeline(arrived_unix_s=1.0, admitted_s=1.0))
    spans.end({"a": 1}, error="x")
    assert NO_SPAN.carrier is None


def test_off_does_not_load_the_door_to_the_sdk() -> None:
    """Ray imports parts of the SDK by itself, where it is installed."""
    code = ("import sys; from hisparse.serve.app import build_app; import hisparse.serve.tracing; "
            "build_app({'model': {'path': 'recall'}}); "
            "sys.exit('hisparse.telemetry.otel' in sys.modules)")
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------- configuration
@pytest.mark.parametrize(("environ", "expected"), [
    ({}, {"exporter": "none"}),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, {"exporter": "otlp", "endpoint": "http://c:4318"}),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:1/v1/traces"},
     {"exporter": "otlp", "endpoint": "http://t:1/v1/traces"}),
    ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_SERVICE_NAME": "chat",
      "OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
     {"exporter": "otlp", "protocol": "grpc", "service_name": "chat", "sample_ratio": 0.25}),
    ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, {"exporter": "none"}),
    ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, {"exporter": "none"}),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "HISPARSE_TELEMETRY__EXPORTER": "none"}, {"exporter": "none"}),
])
def test_standard_variables(environ: dict[str, str], expected: dict[str, Any]) -> None:
    config = load_config({"model": {"path": "recall"}}, environ=environ).telemetry
    assert config.model_dump(exclude_defaults=True) | {"exporter": config.exporter} == expected
    written = load_config({"model": {"path": "recall"}, "telemetry": {"exporter": "none"}}, environ=environ)
    assert written.telemetry.exporter == "none", "what the file says counts"
    assert load_config(config_of(config), environ={}).for_role("prefill").telemetry == config, "replicas get the same"


def config_of(telemetry: TelemetryConfig) -> dict[str, Any]:
    return {"model": {"path": "recall"}, "telemetry": telemetry.model_dump()}


@pytest.mark.parametrize(("section", "text"), [
    ({"exporter": "file"}, "set both or neither"), ({"directory": "/tmp"}, "set both or neither"),
    ({"endpoint": "http://c"}, "no effect with exporter = none"), ({"exporter": "console"}, "telemetry.exporter"),
    ({"exporter": "otlp", "sample_ratio": 1.5}, "less than or equal to 1"),
])
def test_settings_that_contradict_are_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config({"model": {"path": "recall"}, "telemetry": section}, environ={})


def test_what_is_missing_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"telemetry.directory = /no/such .* make it"):
        make_tracer(TelemetryConfig(exporter="file", directory="/no/such"), "x")
    for module, package in (("http", "http"), ("grpc", "grpc")):
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{module}.trace_exporter", None)
        protocol = "grpc" if module == "grpc" else "http/protobuf"
        with pytest.raises(ConfigError, match=rf"otlp-proto-{package}, which is not installed.*pip install 'hisparse\[otel\]'"):
            make_tracer(TelemetryConfig(exporter="otlp", protocol=protocol), "x")  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "hisparse.telemetry.otel")
    monkeypatch.delattr("hisparse.telemetry.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"needs opentelemetry-sdk.*or set telemetry.exporter to none"):
        make_tracer(TelemetryConfig(exporter="otlp"), "x")


@pytest.mark.parametrize(("config", "options"), [
    ({}, {}), ({"endpoint": "http://c:4318"}, {"endpoint": "http://c:4318/v1/traces"}),
    ({"endpoint": "http://c:4317", "protocol": "grpc"}, {"endpoint": "http://c:4317"})])
def test_what_the_exporters_package_is_given(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any],
                                             options: dict[str, Any]) -> None:
    """Nothing that is not configured: the exporter reads OTEL_* variables of its own, such as headers."""
    given: list[dict[str, Any]] = []

    class Exporter(InMemorySpanExporter):
        def __init__(self, **kwargs: Any) -> None:
            given.append(kwargs)
            super().__init__()

    kind = "grpc" if config.get("protocol") == "grpc" else "http"
    names = ["opentelemetry", "exporter", "otlp", "proto"]
    for i in range(3, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:i]), types.ModuleType(names[i - 1]))
    module = types.ModuleType("trace_exporter")
    module.OTLPSpanExporter = Exporter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{kind}", types.ModuleType(kind))
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter", module)
    tracer = make_tracer(TelemetryConfig(exporter="otlp", **config), "x")
    assert tracer.is_on and given == [options]
    tracer.shutdown()


def test_collectors_url() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("http://c/v1/traces") == "http://c/v1/traces"

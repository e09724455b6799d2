"""The standard variables of OpenTelemetry, where the section `telemetry` is silent."""

from __future__ import annotations

from typing import Any


def with_otel(data: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    """`data`, with OpenTelemetry's own variables where its section `telemetry` says nothing about the exporter."""
    given = data.get("telemetry") or {}
    if not isinstance(given, dict) or "exporter" in given:
        return data

    def read(*names: str) -> str:
        return next((environ[name].strip() for name in names if environ.get(name, "").strip()), "")

    endpoint = read("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    exporter = read("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "none")
    if read("OTEL_SDK_DISABLED").lower() == "true" or exporter == "none":
        return data
    found: dict[str, Any] = {"exporter": exporter}
    if endpoint:
        found["endpoint"] = endpoint
    if protocol := read("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        found["protocol"] = protocol
    if name := read("OTEL_SERVICE_NAME"):
        found["service_name"] = name
    sampler, ratio = read("OTEL_TRACES_SAMPLER"), read("OTEL_TRACES_SAMPLER_ARG")
    if sampler.endswith("always_off"):
        found["sample_ratio"] = 0.0
    elif sampler.endswith("traceidratio") and ratio:
        found["sample_ratio"] = ratio
    return data | {"telemetry": found | given}

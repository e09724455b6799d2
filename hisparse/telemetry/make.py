"""The tracer that a configuration asks for."""

from __future__ import annotations

from hisparse.config import TelemetryConfig
from hisparse.errors import ConfigError
from hisparse.telemetry.spans import NullTracer, Tracer


def make_tracer(config: TelemetryConfig, who: str, **attributes: str) -> Tracer:
    """Args:
        who: name of the process in file names. attributes: of the process, in every span.
    Raises:
        ConfigError: a package is not installed, or the directory does not exist; with the fix.
    """
    if config.exporter == "none":
        return NullTracer()
    try:
        from hisparse.telemetry import otel
    except ImportError as error:
        raise ConfigError(
            f"telemetry.exporter = {config.exporter} (or an OTEL_* variable) needs opentelemetry-sdk, which is not installed "
            f"here ({error}); pip install 'hisparse[otel]' on every node, or set telemetry.exporter to none") from error
    return otel.OtelTracer(config, otel.make_exporter(config, who), attributes)

"""Log lines of the service's processes: one JSON object each (or plain text), with ids, never with a prompt or an answer."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from hisparse.config import ServeConfig

ROOT = "hisparse"


class JsonFormatter(logging.Formatter):
    """Keys `time` (UTC), `level`, `logger`, `message`, the process's own fields, and those of `extra={"fields": {...}}`.

    Args:
        fields: of the process, e.g. its engine.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname, "logger": record.name, "message": record.getMessage(),
                **self._fields, **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(JsonFormatter):
    """The same for people: `time level logger message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = self._fields | getattr(record, "fields", {})
        line = f"{_time(record)} {record.levelname} {record.name} {record.getMessage()}"
        line += "".join(f" {key}={value}" for key, value in fields.items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def configure(config: ServeConfig, **fields: Any) -> None:
    """Sends everything below the logger "hisparse" to this process's stderr, which Ray keeps in its session's logs.

    Args:
        fields: in every line. Calling it again replaces them.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if config.log_format == "json" else TextFormatter)(fields))
    root = logging.getLogger(ROOT)
    root.handlers[:] = [handler]
    root.setLevel(config.log_level)
    root.propagate = False

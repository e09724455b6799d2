from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from hisparse.actors import logs
from hisparse.config import ServeConfig


@pytest.fixture(autouse=True)
def unconfigured_afterwards() -> Iterator[None]:
    root = logging.getLogger(logs.ROOT)
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.level, root.propagate = before


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(ServeConfig(), engine="old")
    logs.configure(ServeConfig(), engine="e-1", rank=3)
    log = logging.getLogger("hisparse.serve.decode")
    log.info("it is %s", 'a "quoted"\nline', extra={"fields": {"request_id": "r", "odd": {1}}})
    log.debug("not at this level")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    logging.getLogger("other.library").warning("not ours")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first == {"time": first["time"], "level": "INFO", "logger": "hisparse.serve.decode", "engine": "e-1", "rank": 3,
                     "message": 'it is a "quoted"\nline', "request_id": "r", "odd": "{1}"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert second["level"] == "ERROR" and second["exception"].endswith("ValueError: why")


def test_text_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(ServeConfig(log_format="text", log_level="WARNING"), engine="e-1")
    log = logging.getLogger("hisparse.pd")
    log.info("quiet")
    log.warning("loud", extra={"fields": {"request_id": "r"}})
    assert re.fullmatch(r"\S+Z WARNING hisparse\.pd loud engine=e-1 request_id=r\n", capsys.readouterr().err)

"""A real service for the integration tests: Ray Serve, engines and the bundled checkpoint, with small pools."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from hisparse.cli import free_port
from hisparse.config import load_config
from hisparse.serve.instance import serving

SMALL: dict[str, Any] = {
    "model": {"path": "recall", "max_model_len": 2048},
    "cache": {"device_blocks": 160, "host_pool_gib": 0.06},
    "scheduler": {"max_num_seqs": 4, "max_waiting": 16, "prefill_chunk_tokens": 256},
    "serve": {"request_timeout_s": 60.0},
}


@dataclass(frozen=True)
class Service:
    url: str
    client: openai.OpenAI

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return dict(json.load(response))

    def pools(self) -> list[Path]:
        """Files of the engines' shared host pools."""
        return [Path(item["host_pool"]) for item in self.get("/stats")["engines"]]

    def engines(self) -> dict[str, dict[str, Any]]:
        """Statistics by role, with the outcome of the conservation laws."""
        return {item["role"]: item for item in self.get("/stats?check=1")["engines"]}

    def settled(self, timeout_s: float = 20.0) -> dict[str, dict[str, Any]]:
        """Statistics once nothing runs, waits, loads or is held any more."""
        deadline = time.monotonic() + timeout_s
        while True:
            engines = self.engines()
            busy = {role: {key: item[key] for key in ("running", "waiting", "loading", "held") if item[key]}
                    for role, item in engines.items()}
            if not any(busy.values()):
                return engines
            assert time.monotonic() < deadline, f"still busy: {busy}"
            time.sleep(0.1)


@contextmanager
def run_service(**changes: dict[str, Any]) -> Iterator[Service]:
    """Starts the app on a free port. `changes`: keys of sections, over `SMALL`."""
    config = load_config(SMALL, changes, environ={})
    port = free_port("127.0.0.1")
    with serving(config, port=port):
        url = f"http://127.0.0.1:{port}"
        yield Service(url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=90))

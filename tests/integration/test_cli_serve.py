"""`hisparse serve deploy/ray/local.yaml` as a user runs it, on the session's cluster: start, ask, status, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from hisparse.testing.recall_documents import build_recall_document
from tests.integration.service import pool_files

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("cluster")
def test_serve_until_ctrl_c() -> None:
    command = [sys.executable, "-m", "hisparse.cli"]
    environment = os.environ | {"RAY_ADDRESS": "auto"}
    with subprocess.Popen(
        [*command, "serve", "deploy/ray/local.yaml", "--json", "--set", "serve.port=0", "--set", "cache.device_blocks=320"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            line = server.stdout.readline()
            assert line, server.stderr.read()
            url = json.loads(line)["url"]
            asked = build_recall_document(11, budget=1500)
            with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=90) as client:
                answer = client.completions.create(model="recall", prompt=asked.prompt, max_tokens=8, temperature=0)
            assert asked.is_answer(answer.choices[0].text)
            status = subprocess.run([*command, "status", "--url", url.removesuffix("/v1"), "--check", "--json"], cwd=ROOT,
                                    capture_output=True, text=True)
            assert status.returncode == 0, status.stderr
            assert {engine["check"] for engine in json.loads(status.stdout)["engines"]} == {"ok"}
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=90)
        finally:
            server.kill()
    assert server.returncode == 0, errors
    assert errors.splitlines()[-1] == "stopped" and "Traceback" not in errors
    assert pool_files() == []

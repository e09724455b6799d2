"""`hisparse serve deploy/ray/local.yaml` as a user runs it, on the session's cluster: start, ask, status, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import openai

from hisparse.cli import free_port
from hisparse.testing.recall_documents import build_recall_document

ROOT = Path(__file__).parents[2]


def watch(url: str, opened: threading.Event) -> None:
    """Follows a stream of events to its end, whoever ends it."""
    with suppress(httpx.TransportError), httpx.stream("GET", url, timeout=60) as response:
        for _ in response.iter_lines():
            opened.set()


def test_serve_until_ctrl_c(cluster: str) -> None:
    command = [sys.executable, "-m", "hisparse.cli"]
    environment = os.environ | {"RAY_ADDRESS": cluster}
    with subprocess.Popen(
        [*command, "serve", "deploy/ray/local.yaml", "--json", "--set", "serve.port=0", "--set", "cache.device_blocks=320",
         "--set", "serve.drain_timeout_s=120"],
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
            engines = json.loads(status.stdout)["engines"]
            assert [engine["check"] for engine in engines] == ["ok", "ok"]
            assert all(Path(engine["host_pool"]).exists() for engine in engines)
            asked_for = ["-c", "2", "-n", "4", "--alone", "1", "--prompt-tokens", "300", "--output-tokens", "4"]
            load = subprocess.run([*command, "bench", "serve", "--url", url, *asked_for, "--shared-prefix", "0.7", "--json"],
                                  cwd=ROOT, capture_output=True, text=True, timeout=120)
            assert load.returncode == 0, load.stderr
            rows = {row["case"]: row for row in json.loads(load.stdout)["rows"]}
            loaded = rows["2 clients: output"]
            assert (loaded["answered"], loaded["failures"]) == (4, {}) and loaded["ratio_to_ceiling"] > 0
            assert 4 * 250 < loaded["prompt_tokens"] < 4 * 350
            assert loaded["cached_tokens"] >= 4 * 64, "what the prompts share is cached from the second one on"
            assert rows["2 clients: time to first token"]["value"] > 0
            with ThreadPoolExecutor(1) as pool:  # somebody looks at the residency page meanwhile
                opened = threading.Event()
                watched = pool.submit(watch, url.removesuffix("/v1") + "/residency/events", opened)
                assert opened.wait(30)
                stream_through_the_end(url, asked.prompt, lambda: server.send_signal(signal.SIGINT))
                output, errors = server.communicate(timeout=90)
                watched.result(timeout=30)
        finally:
            server.kill()
    assert server.returncode == 0, errors
    assert output == "", "nothing of Ray's on stdout"
    said = [line for line in errors.splitlines() if line.startswith(("starting", "stopping", "stopped"))]
    assert said == [f"starting the service on the Ray cluster at {cluster} ...", "stopping: open streams end first ...",
                    "stopped"]
    assert not any(word in errors for word in ("Traceback", "graceful_shutdown", "INFO", "ERROR")), errors
    assert not any(Path(engine["host_pool"]).exists() for engine in engines)


def stream_through_the_end(url: str, prompt: str, stop: Callable[[], None]) -> None:
    """B40: a stream that is open when the service is told to stop ends with all of its tokens; a later request is refused
    with an error that says to retry, while the stream still runs."""
    late = {"model": "recall", "prompt": "late", "max_tokens": 1}
    tokens = 600  # many seconds, on any machine
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=90) as client:
        stream = client.completions.create(model="recall", prompt=prompt, temperature=0, max_tokens=tokens, stream=True,
                                           stream_options={"include_usage": True}, extra_body={"ignore_eos": True})
        first = next(iter(stream))
        stop()
        deadline = time.monotonic() + 30
        while (refused := httpx.post(f"{url}/completions", json=late, timeout=30)).status_code == 200:
            assert time.monotonic() < deadline, "requests are still taken"
        assert refused.status_code == 503 and "retry" in refused.json()["error"]["message"] and refused.headers["retry-after"]
        chunks = [first, *stream]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == tokens
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"


def test_a_serve_instance_that_runs_already_is_left_alone(cluster: str) -> None:
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Other:
        def __call__(self) -> str:
            return "other"

    serve.start(http_options={"host": "127.0.0.1", "port": free_port("127.0.0.1")})
    try:
        handle = serve.run(Other.bind(), name="other", route_prefix="/other")
        done = subprocess.run([sys.executable, "-m", "hisparse.cli", "serve", "--model", "recall"], cwd=ROOT,
                              env=os.environ | {"RAY_ADDRESS": cluster}, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and "already runs on this cluster (other)" in done.stderr
        assert handle.remote().result() == "other"
    finally:
        serve.shutdown()


def test_a_service_that_cannot_start_says_why_and_stops(cluster: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hisparse.cli", "serve", "--model", "recall", "--set", "trace.directory=/no/where",
         "--set", "serve.prefill_replicas=0"],
        cwd=ROOT, env=os.environ | {"RAY_ADDRESS": cluster}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "trace.directory = /no/where is no directory" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_while_starting(cluster: str) -> None:
    with subprocess.Popen([sys.executable, "-m", "hisparse.cli", "serve", "--model", "recall"], cwd=ROOT,
                          env=os.environ | {"RAY_ADDRESS": cluster}, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            for line in server.stderr:
                if line.startswith("starting"):
                    break
            time.sleep(5.0)
            server.send_signal(signal.SIGTERM)
            _, errors = server.communicate(timeout=120)
        finally:
            server.kill()
    assert server.returncode == 0 and errors.splitlines()[-2:] == ["interrupted while starting", "stopped"], errors

"""Metrics at Ray's own Prometheus endpoint, tenants, and what the logs of a real service hold."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hisparse.metrics import CATALOGUE, Kind
from hisparse.metrics.catalogue import ENGINE_UP, HTTP_REQUESTS
from hisparse.testing.recall_documents import build_recall_document
from tests.integration.service import run_service

pytestmark = pytest.mark.usefixtures("cluster")

KEYS = {"red": "sk-red-5f0c2b9a7d1e", "blue": "sk-blue-91ab33c0d4ef"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
MARKER = "xylophone-4417"
"""Stands in every prompt, and must stand in no log."""


@dataclass(frozen=True)
class Guarded:
    url: str
    asked: list[str] = field(default_factory=list)
    """The tenants of all completions so far."""
    before: Samples = field(default_factory=dict)
    """Other services of the same cluster have counted, too: what the endpoint said before the first completion."""

    def stats(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEYS['red']}"}
        return dict(httpx.get(f"{self.url}/stats", params={"check": 1}, headers=headers, timeout=30).json())

    def ask(self, tenant: str, prompt: str, **options: Any) -> openai.types.Completion:
        self.asked.append(tenant)
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEYS[tenant], max_retries=0, timeout=90) as client:
            return client.completions.create(model="recall", prompt=prompt, max_tokens=8, temperature=0, **options)

    def samples(self) -> Samples:
        """What Prometheus would read now, of ours: (name, our labels) -> value."""
        (endpoint,) = self.stats()["metrics"]
        with urllib.request.urlopen(endpoint, timeout=10) as response:
            text = response.read().decode()
        ours = {"model", "role", "engine", "le", *(name for metric in CATALOGUE for name in metric.own)}
        found: Samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples if family.name.startswith("ray_hisparse_") else ():
                key = sample.name, frozenset((key, value) for key, value in sample.labels.items() if key in ours)
                found[key] = found.get(key, 0.0) + sample.value
        return found


@pytest.fixture(scope="module")
def service(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text("# who may ask\n" + "".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()))
    with run_service(serve={"api_keys_file": str(keys)}) as running:
        guarded = Guarded(running.url)
        guarded.before.update(guarded.samples())
        yield guarded


def document(seed: int) -> str:
    return f"{MARKER} {build_recall_document(seed, budget=900).prompt}"


def test_tenants_are_told_apart_and_share_no_prefix(service: Guarded) -> None:
    assert httpx.post(f"{service.url}/v1/completions", json={"model": "recall", "prompt": "x"}).status_code == 401
    assert httpx.get(f"{service.url}/stats").status_code == 401
    assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}
    prompt = document(1)

    def cached(tenant: str, **options: Any) -> int:
        usage = service.ask(tenant, prompt, **options).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached("red") == 0
    assert cached("red") > 0, "the tenant's own prefix is found"
    assert cached("blue") == 0, "another tenant's is not"
    assert cached("blue", extra_body={"cache_salt": "red"}) == 0
    assert cached("red", extra_body={"cache_salt": "of one user"}) == 0, "a salt separates within a tenant"


def test_every_engine_metric_at_rays_endpoint_is_what_stats_says(service: Guarded) -> None:
    for seed in (2, 3):
        service.ask("red", document(seed))
    deadline = time.monotonic() + 40
    while True:
        stats = service.stats()
        wrong = differences(stats, service.samples())
        if not wrong:
            break
        assert time.monotonic() < deadline, f"after 40 s: {wrong}"
        time.sleep(1.0)
    assert [engine["check"] for engine in stats["engines"]] == ["ok", "ok"]
    decode = next(engine for engine in stats["engines"] if engine["role"] == "decode")
    assert decode["pd"]["imports_ok"] >= 2 and decode["generated_tokens"] > 0, "the comparison was not one of zeros"


def differences(stats: dict[str, Any], samples: Samples) -> list[str]:
    """Where an engine's statistics and the endpoint disagree; a series that lacks is a disagreement."""
    wrong = []
    for engine in stats["engines"]:
        common = {"model": "recall", "role": engine["role"], "engine": engine["engine_id"]}
        for metric in CATALOGUE:
            for reading in metric.readings:
                for own, value in reading.values(engine):
                    labels = frozenset((common | dict(zip(metric.own, own, strict=True))).items())
                    seen = samples.get((metric.exported, labels))
                    if seen is None or abs(seen - value) > 1e-6 + 1e-9 * abs(value):
                        wrong.append(f"{metric.exported}{dict(labels)}: {seen}, /stats has {value}")
        if samples.get((ENGINE_UP.exported, frozenset(common.items()))) != 1.0:
            wrong.append(f"{common['engine']} is not up")
    return wrong


def test_requests_and_http_are_counted_once(service: Guarded) -> None:
    def counts() -> tuple[float, ...]:
        samples = service.samples()

        def new(name: str, **labels: str) -> float:
            return total(samples, name, **labels) - total(service.before, name, **labels)

        return (new("ray_hisparse_requests_finished_total"),
                *(new("ray_hisparse_queue_seconds_count", role=role) for role in ("prefill", "decode")),
                new(HTTP_REQUESTS.exported, endpoint="/v1/completions", status="200"))

    for seed in (4, 5):
        service.ask("blue", document(seed))
    assert httpx.get(f"{service.url}/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    expected = (len(service.asked),) * 4
    deadline = time.monotonic() + 40
    while (now := counts()) != expected:
        assert time.monotonic() < deadline, f"{now} is not {expected}"
        time.sleep(0.5)
    samples = service.samples()
    assert total(samples, HTTP_REQUESTS.exported, endpoint="/v1/models", status="401") >= 1
    failed = [total(seen, "ray_hisparse_requests_finished_total", reason="error") for seen in (samples, service.before)]
    assert failed[0] == failed[1]
    present = {name for name, _ in samples}
    for metric in CATALOGUE:
        name = f"{metric.exported}_bucket" if metric.kind is Kind.HISTOGRAM else metric.exported
        assert name in present, f"{metric.name} never appeared"


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for (found, have), value in samples.items() if found == name and labels.items() <= dict(have).items())


def test_a_request_is_found_in_the_logs_by_the_id_of_its_answer(service: Guarded) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEYS["red"], max_retries=0, timeout=90) as client:
        raw = client.completions.with_raw_response.create(model="recall", prompt=document(6), max_tokens=8)
    service.asked.append("red")
    answer, (name,) = raw.parse(), raw.headers.get_list("x-request-id")
    assert answer.id.startswith(f"cmpl-{name}-"), "Serve's own log lines have the same id"
    deadline = time.monotonic() + 10
    while not (lines := [json.loads(line) for path in log_files() for line in path.read_text(errors="replace").splitlines()
                         if line.startswith("{") and f"{answer.id}-0" in line]):
        assert time.monotonic() < deadline, "no line in any log"
        time.sleep(0.2)
    (line,) = (line for line in lines if line["message"] == "request ended")
    assert answer.usage is not None
    assert (line["reason"], line["prompt_tokens"]) == (answer.choices[0].finish_reason, answer.usage.prompt_tokens)
    assert line["output_tokens"] == answer.usage.completion_tokens and line["replica"].startswith("decode-")


def log_files() -> list[Path]:
    from ray._private.worker import _global_node

    return [path for path in Path(_global_node.get_logs_dir_path()).rglob("*") if path.is_file()]


def bad_requests(service: Guarded) -> None:
    """Refused at every stage, and asked with a key that is almost right."""
    for path, body, status in (
        ("/v1/completions", {"prompt": [MARKER, 1]}, 400), ("/v1/completions", {"prompt": MARKER, "suffix": MARKER}, 400),
        ("/v1/completions", {"prompt": f"{MARKER} " * 2000}, 413),
        ("/v1/chat/completions", {"messages": [{"role": MARKER, "content": MARKER}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": MARKER}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARKER}], "max_tokens": 2, "stream": True}, 200),
    ):
        for suffix, expected in (("", status), ("x", 401)):
            answer = httpx.post(f"{service.url}{path}", json={"model": "recall"} | body, timeout=60,
                                headers={"Authorization": f"Bearer {KEYS['red']}{suffix}"})
            assert answer.status_code == expected, answer.text
            assert expected == 200 or MARKER not in answer.text
            assert not any(key in answer.text for key in KEYS.values())


def test_neither_keys_nor_prompts_are_in_the_logs(service: Guarded) -> None:
    bad_requests(service)
    read = 0
    for path in log_files():
        text = path.read_bytes()
        read += len(text)
        for secret in (*KEYS.values(), MARKER):
            assert secret.encode() not in text, f"{secret} is in {path}"
    assert read > 10_000, "there were logs to read"
    assert not any(key in str(service.stats()) for key in KEYS.values())

"""The service as its users see it: Ray Serve, prefill and decode engines, NIXL, the bundled checkpoint, openai client."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import random
import re
import signal
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import schemathesis
from hypothesis import given
from schemathesis.generation import GenerationMode

from hisparse.checkpoints import recall_checkpoint
from hisparse.engine.tokenizer import Tokenizer
from hisparse.testing.recall_documents import RecallDocument, build_recall_document
from hisparse.testing.reference_decode import ReferenceModel
from tests.integration.browser import check_layout, listen, open_browser
from tests.integration.service import Service, run_service
from tests.serve.openapi_cases import bounded, checks, meant
from tests.serve.test_security import PICKLED_TYPES, Bomb

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Spans:
    return Spans(tmp_path_factory.mktemp("spans"))


@pytest.fixture(scope="module")
def service(cluster: None, spans: Spans) -> Iterator[Service]:
    with run_service(telemetry={"exporter": "file", "directory": str(spans.directory)}) as running:
        yield running
        pools = running.pools()
        assert len(pools) == 2 and all(pool.exists() for pool in pools)
    assert not any(pool.exists() for pool in pools), "a clean shutdown leaves nothing in /dev/shm"


class Spans:
    """What the service's processes wrote about the traces that tests began."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._names = random.Random(7)

    def begin(self) -> tuple[str, dict[str, str]]:
        """(trace id, head of a request)."""
        trace = f"{self._names.getrandbits(128):032x}"
        return trace, {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}

    def of(self, trace: str, *expected: str, timeout_s: float = 20.0) -> dict[str, dict[str, Any]]:
        """Spans of the trace by name, once all expected ones (and the ingress's) are there; other names are an error."""
        deadline = time.monotonic() + timeout_s
        names = {"POST /v1/completions", "hisparse.request", *expected}
        while True:
            lines = [line for path in self.directory.iterdir() for line in path.read_text().splitlines() if trace in line]
            found = [json.loads(line) for line in lines]
            if {span["name"] for span in found} == names:
                break
            assert time.monotonic() < deadline, f"{sorted(span['name'] for span in found)} is not {sorted(names)}"
            time.sleep(0.1)
        return {span["name"]: span for span in found}


def document(seed: int, tokens: int = 700) -> RecallDocument:
    tokenizer = Tokenizer(recall_checkpoint())
    return build_recall_document(seed, budget=tokens, measure=lambda text: len(tokenizer.encode(text)))


def ask(service: Service, prompt: str, **options: object) -> openai.types.Completion:
    settings: dict[str, object] = {"max_tokens": 8, "temperature": 0} | options
    return service.client.completions.create(model="recall", prompt=prompt, **settings)  # type: ignore[call-overload,no-any-return]


def details(answer: openai.types.Completion, choice: int = 0) -> dict[str, object]:
    return dict((answer.model_extra or {})["hisparse"]["choices"][choice])


def assert_nothing_is_held(service: Service) -> None:
    for role, engine in service.settled().items():
        cache = engine["cache"]
        assert engine["check"] == "ok", f"{role}: {engine['check']}"
        assert cache["device_blocks_free"] == cache["device_blocks_total"], role
        assert cache["host_blocks_free"] == cache["host_blocks_total"], role


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards(service: Service) -> Iterator[None]:
    """After each test every account adds up, both pools of both engines are full, and nothing is leased."""
    yield
    assert_nothing_is_held(service)


def test_prefill_and_decode_answer_right(service: Service) -> None:
    assert [model.id for model in service.client.models.list()] == ["recall"]
    health = service.get("/health")
    assert health["status"] == "ok" and len(health["engines"]) == 2
    asked = document(0)
    answer = ask(service, asked.prompt)
    assert asked.is_answer(answer.choices[0].text) and answer.choices[0].finish_reason == "stop"
    facts = details(answer)
    assert facts["prefill"] == "remote" and facts["landing"] in ("resident", "host")
    assert facts["imported_tokens"] == facts["prompt_tokens"] == answer.usage.prompt_tokens  # type: ignore[union-attr]
    again = ask(service, asked.prompt)
    assert again.choices[0].text == answer.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens > 0, "the second time the prefix is there"  # type: ignore[union-attr]
    salted = ask(service, asked.prompt, extra_body={"cache_salt": "another tenant"})
    assert salted.choices[0].text == answer.choices[0].text
    assert salted.usage.prompt_tokens_details.cached_tokens == 0, "no reuse across salts"  # type: ignore[union-attr]


def test_coordinators_load_no_torch(service: Service) -> None:
    """A process per replica that would hold 200 MB more, and a heap for its garbage collector to walk."""
    for engine in service.get("/stats")["engines"]:
        assert "libtorch" not in Path(f"/proc/{engine['pid']}/maps").read_text(), engine["engine"]
        assert "libtorch" in Path(f"/proc/{engine['rank_pids'][0]}/maps").read_text()


def test_a_trace_goes_through_every_process(service: Service, spans: Spans) -> None:
    """One tree from the client's span to the prefill engine; phases follow each other inside their parents; no prompt."""
    asked, (trace, head) = document(20), spans.begin()
    answer = ask(service, asked.prompt, extra_headers=head)
    got = spans.of(trace, "hisparse.prefill", "hisparse.prefill.engine", "hisparse.compute", "hisparse.queue",
                   "hisparse.transfer", "hisparse.first_step", "hisparse.decode")
    parents = {name: next((other for other, s in got.items() if s["span_id"] == span["parent_id"]), span["parent_id"])
               for name, span in got.items() if name != "hisparse.queue"}  # both engines have a queue
    assert parents == {
        "POST /v1/completions": "00f067aa0ba902b7", "hisparse.request": "POST /v1/completions",
        "hisparse.prefill": "hisparse.request", "hisparse.prefill.engine": "hisparse.prefill",
        "hisparse.compute": "hisparse.prefill.engine", "hisparse.transfer": "hisparse.request",
        "hisparse.first_step": "hisparse.request", "hisparse.decode": "hisparse.request"}
    times = [got[f"hisparse.{name}"] for name in ("prefill", "transfer", "first_step", "decode")]
    assert all(before["end_s"] <= after["start_s"] + 0.05 for before, after in itertools.pairwise(times))
    for name, span in got.items():
        assert span["status"] == "unset" and span["start_s"] <= span["end_s"], name
        parent = got.get(parents.get(name, ""))
        assert parent is None or (parent["start_s"] - 0.05 <= span["start_s"] and span["end_s"] <= parent["end_s"] + 0.05), name
    whole, prefill = got["hisparse.request"], got["hisparse.prefill.engine"]
    assert whole["attributes"]["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens  # type: ignore[union-attr]
    assert whole["attributes"]["hisparse.request_id"] == f"{answer.id}-0"
    assert whole["resource"]["service.instance.id"].startswith("decode-")
    assert prefill["resource"]["service.instance.id"].startswith("prefill-")
    texts = [value for span in got.values() for name, value in span["attributes"].items()
             if isinstance(value, str) and name != "hisparse.request_id"]  # an id may hold the answer's four digits
    assert texts and not any(asked.prompt[:40] in text or asked.answer in text for text in texts)


def test_tokens_equal_unmodified_transformers(service: Service) -> None:
    asked = document(7, 500)
    tokenizer = Tokenizer(recall_checkpoint())
    run = ReferenceModel(recall_checkpoint()).decode(tokenizer.encode(asked.prompt), 24, prefill_chunks=256)
    sure = run.first_excusable()
    assert sure >= 6
    answer = ask(service, asked.prompt, max_tokens=24, extra_body={"ignore_eos": True})
    expected = tokenizer.decode(run.token_ids[:sure])
    assert answer.choices[0].text.startswith(expected) and answer.choices[0].finish_reason == "length"


def test_streams(service: Service) -> None:
    asked = document(1)
    whole = ask(service, asked.prompt, max_tokens=30, extra_body={"ignore_eos": True})
    times, text, last = [], "", None
    for chunk in service.client.completions.create(
        model="recall", prompt=asked.prompt, max_tokens=30, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    ):
        times.append(time.monotonic())
        text += "".join(choice.text for choice in chunk.choices)
        last = chunk
    assert text == whole.choices[0].text
    assert last is not None and last.usage is not None and last.usage.completion_tokens == 30
    assert len(times) > 10 and times[-1] - times[0] > 0.05, "tokens arrive one after the other"
    chat = service.client.chat.completions.create(
        model="recall", messages=[{"role": "user", "content": asked.prompt}], max_completion_tokens=8, temperature=0)
    assert asked.is_answer(chat.choices[0].message.content or "")


def test_the_quick_start_asks_and_watches(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    from tests import quickstart

    answers = {command: quickstart.run_client(command, service.url) for command in quickstart.commands("client")}
    chat = next(answer for command, answer in answers.items() if "chat/completions" in command)
    assert "4921" in chat, chat  # an answer does not repeat its prompt
    assert all("ok" in answer for answer in answers.values() if answer is not chat), answers
    (snippet,) = quickstart.blocks("python")
    exec(compile(snippet.replace(quickstart.URL, service.url), "quickstart.md", "exec"), {})
    assert capsys.readouterr().out.strip() == "7305"


def test_choices_stop_and_logprobs(service: Service) -> None:
    asked = document(2, 300)
    several = ask(service, asked.prompt, n=3)
    assert [asked.is_answer(choice.text) for choice in several.choices] == [True] * 3
    assert {details(several, i)["prefill"] for i in range(3)} == {"remote"}
    cut = ask(service, asked.prompt, stop=[asked.answer[2:]])
    assert cut.choices[0].text.strip() == asked.answer[:2] and cut.choices[0].finish_reason == "stop"
    seeded = [ask(service, asked.prompt, temperature=1.5, seed=seed, max_tokens=12, extra_body={"ignore_eos": True})
              for seed in (5, 5, 6)]
    texts = [answer.choices[0].text for answer in seeded]
    assert texts[0] == texts[1] != texts[2]
    logprobs = ask(service, asked.prompt, logprobs=2).choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)


def test_more_requests_than_seats_at_once(service: Service) -> None:
    asked = [document(100 + i, 400 + 60 * i) for i in range(10)]

    async def all_at_once() -> list[openai.types.Completion]:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0, timeout=120) as client:
            return list(await asyncio.gather(*(
                client.completions.create(model="recall", prompt=item.prompt, max_tokens=8, temperature=0) for item in asked
            )))

    answers = asyncio.run(all_at_once())
    wrong = [item.seed for item, answer in zip(asked, answers) if not item.is_answer(answer.choices[0].text)]
    assert wrong == []


def test_the_snippet_of_the_readme_runs(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    prompt = document(4)
    code = snippet.replace("http://127.0.0.1:8000", service.url).replace('"..."', repr(prompt.prompt))
    exec(compile(code, "README.md", "exec"), {})
    assert prompt.is_answer(capsys.readouterr().out)


def test_the_residency_page_shows_a_request_while_it_runs(service: Service) -> None:
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(30_000)
        complaints = listen(page)
        page.goto(f"{service.url}/residency")
        page.locator('#status[data-state="live"]').wait_for()
        assert page.locator(".engines .card", has_text="healthy").count() == 2
        asked = document(9, 900)
        with service.client.completions.create(model="recall", prompt=asked.prompt, max_tokens=1000, temperature=0, stream=True,
                                               extra_body={"ignore_eos": True}) as stream:
            request_id = f"{next(iter(stream)).id}-0"
            row = page.locator("#requests tbody tr", has_text=re.compile(rf"{request_id}\s*decode-"))
            row.locator("td.rate", has_text="%").wait_for()  # a second figure has come
            text = row.inner_text()
            assert "running" in text and re.search(r"\d+ on device", text), text
            landing = page.locator("#landings tbody tr", has_text=request_id).inner_text()
            assert "landed" in landing and "from prefill-" in landing
            check_layout(page)
        page.locator("#ended tbody tr", has_text=re.compile(rf"{request_id}\s*decode-.* abort")).wait_for()
        row.wait_for(state="detached")
        assert complaints == [] and asked.answer not in page.content() and asked.prompt[:40] not in page.content()


def test_bad_input_costs_nothing(service: Service) -> None:
    service.settled()
    before = {role: engine["admissions"] for role, engine in service.engines().items()}
    for body, status in (
        ({"prompt": ""}, 400), ({"prompt": "x", "max_tokens": 0}, 400), ({"prompt": "x", "temperature": 9}, 400),
        ({"prompt": [5000]}, 400), ({"prompt": [1] * 2100}, 413), ({"prompt": "x", "max_tokens": 5000}, 413),
        ({"prompt": "x", "wat": 1}, 400), ({"prompt": "x", "model": "gpt-9"}, 404),
    ):
        response = httpx.post(f"{service.url}/v1/completions", json={"model": "recall"} | body, timeout=30)
        assert response.status_code == status, response.text
        assert response.json()["error"]["message"]
    assert httpx.post(f"{service.url}/v1/completions", content=b"{", timeout=30).status_code == 415
    assert {role: engine["admissions"] for role, engine in service.engines().items()} == before


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_everywhere(service: Service, spans: Spans, stream: bool) -> None:
    trace, head = spans.begin()
    body = {"model": "recall", "prompt": document(3).prompt, "max_tokens": 1000, "temperature": 0, "ignore_eos": True,
            "stream": stream, "n": 3}
    before = service.engines()["decode"]["generated_tokens"]
    with httpx.Client(timeout=60) as client:
        if stream:
            with client.stream("POST", f"{service.url}/v1/completions", json=body, headers=head) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{service.url}/v1/completions", json=body, timeout=3.0, headers=head)
    engines = service.settled(timeout_s=10.0)
    assert engines["decode"]["generated_tokens"] - before < 2700, "no choice ran to its end"
    got = spans.of(trace, "hisparse.prefill", "hisparse.prefill.engine", "hisparse.compute", "hisparse.queue",
                   "hisparse.transfer", "hisparse.first_step", "hisparse.decode")
    cut_off = {name for name, span in got.items() if span["attributes"].get("hisparse.cut_off")}
    assert {"hisparse.request", "hisparse.decode"} <= cut_off


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/stats"])
def test_the_running_service_is_as_its_openapi_document_says(service: Service, path: str) -> None:
    """A few cases only: tests/serve/test_openapi.py has the many. This one has Ray Serve's proxy between."""
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json", config=checks())
    operation = schema[path]["POST" if "completions" in path else "GET"]
    statuses = set()

    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE:
            case.body = meant(case.body)
        excluded = [] if "completions" in path else [schemathesis.checks.negative_data_rejection]
        statuses.add(case.call_and_validate(excluded_checks=excluded).status_code)

    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if "completions" in path else (GenerationMode.POSITIVE,):
        @bounded(4)
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: schemathesis.Case) -> None:
            check(case)

        run()
    assert 200 in statuses and ("completions" not in path or 400 in statuses)


def test_choices_and_stop_strings_in_a_stream(service: Service) -> None:
    asked = document(9, 300)
    texts, ends = ["", ""], []
    for chunk in service.client.completions.create(model="recall", prompt=asked.prompt, max_tokens=8, temperature=0, n=2,
                                                   stop=[asked.answer[2:]], stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert asked.answer[2:] not in texts[choice.index]
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert [text.strip() for text in texts] == [asked.answer[:2]] * 2 and ends == ["stop", "stop"]


def test_what_a_client_sends_is_not_unpickled(service: Service, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    for path in ("/v1/completions", "/v1/models", "/health", "/stats", "/-/routes", "/-/healthz", "/"):
        for kind in PICKLED_TYPES:
            answer = httpx.post(f"{service.url}{path}", content=bomb, headers={"Content-Type": kind}, timeout=30)
            assert answer.status_code in (400, 404, 405, 415) or path.startswith("/-/")
    assert not (tmp_path / "exploded").exists()


def test_a_dead_prefill_engine_is_replaced_and_decode_recomputes(service: Service) -> None:
    asked = document(4)
    os.kill(service.get("/stats")["engines"][-1]["pid"], signal.SIGKILL)  # "prefill-..." sorts last: its coordinator
    answer = ask(service, asked.prompt)
    assert asked.is_answer(answer.choices[0].text), "bounded retries, then a local prefill"
    wait_until_healthy(service)
    assert details(ask(service, document(5).prompt))["prefill"] == "remote"


def test_a_dead_decode_rank_ends_its_streams_with_an_error_and_the_replica_is_replaced(service: Service,
                                                                                       spans: Spans) -> None:
    before, (trace, head) = service.pools(), spans.begin()
    stream = service.client.completions.create(
        model="recall", prompt=document(6).prompt, max_tokens=1000, temperature=0, stream=True,
        extra_body={"ignore_eos": True}, extra_headers=head)
    next(iter(stream))
    os.kill(service.engines()["decode"]["rank_pids"][0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(openai.APIError, match="rank 0 of decode-.* is dead"):
        list(stream)
    assert time.monotonic() - began < 20
    got = spans.of(trace, "hisparse.prefill", "hisparse.prefill.engine", "hisparse.compute", "hisparse.queue",
                   "hisparse.transfer", "hisparse.first_step", "hisparse.decode")
    assert {name for name, span in got.items() if span["status"] == "error"} == {"hisparse.request", "hisparse.decode"}
    assert "rank 0 of decode-" in got["hisparse.request"]["error"]
    wait_until_healthy(service)
    asked = document(8)
    assert asked.is_answer(ask(service, asked.prompt).choices[0].text)
    assert not any(pool.exists() for pool in set(before) - set(service.pools())), "the dead engine's pool is gone"


def wait_until_healthy(service: Service, timeout_s: float = 180.0) -> None:
    """Serve notices at its next health check and starts a new replica."""
    deadline = time.monotonic() + timeout_s
    reason = ""
    while time.monotonic() < deadline:
        try:
            if service.get("/health")["status"] == "ok":
                return
        except urllib.error.HTTPError as error:
            reason = error.read().decode()
        time.sleep(0.5)
    raise AssertionError(f"not healthy again after {timeout_s} s: {reason}")

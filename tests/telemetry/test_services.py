"""Spans of the ingress, decode and prefill services over fakes: one tree per request, whatever becomes of it, and no text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hisparse.errors import EngineDeadError
from hisparse.serve.calls import GenerateCall, PrefillAnswer, PrefillCall
from hisparse.serve.errors import ApiError
from hisparse.serve.ingress import create_api
from hisparse.serve.prefill import PrefillService
from hisparse.serve.tracing import Traced
from hisparse.types import FinishReason, RequestOutput, RequestTimeline
from tests.serve.conftest import small_config
from tests.serve.fake_engine import FakeEngine, Setup
from tests.serve.fakes import FakeBackend
from tests.telemetry.test_request_spans import CALLER, PARENT, TRACE, Recorded, failed

SECRET = "xylophone"


class TimedEngine(FakeEngine):
    """Tells when it did what, as an engine does: with the first token and at the end."""

    timeline = RequestTimeline(arrived_unix_s=1.0, admitted_s=0.1, loaded_s=0.2, first_token_s=0.3)

    async def generate(self, request: Any) -> Any:
        at = 0
        async for output in super().generate(request):
            timed = at == 0 or output.finish_reason is not None
            yield replace(output, timeline=self.timeline) if timed else output
            at += 1

    async def complete(self, request: Any, *, timeout_s: float) -> RequestOutput:
        return replace(await super().complete(request, timeout_s=timeout_s), timeline=replace(self.timeline, loaded_s=None))


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded()
    yield recorded
    text = str([(span.name, span.attributes, span.status.description, span.events) for span in recorded.spans().values()])
    assert SECRET not in text, "no span has a prompt"
    recorded.tracer.shutdown()


@pytest.fixture
def setup(recorded: Recorded) -> Setup:
    setup = Setup("ok", config={"max_retries": 0})
    setup.engine = setup.service._engine = TimedEngine()  # type: ignore[assignment]
    setup.service._tracer = recorded.tracer
    return setup


PHASES = {"hisparse.queue", "hisparse.transfer", "hisparse.first_step", "hisparse.decode"}


def run(setup: Setup, **fields: Any) -> None:
    setup.run(text=f"{SECRET} hello", trace=PARENT, **fields)


def test_a_request_is_one_tree_under_its_caller(recorded: Recorded, setup: Setup) -> None:
    run(setup)
    whole = recorded.spans()["hisparse.request"]
    assert recorded.tree() == {"hisparse.request": CALLER} | dict.fromkeys(
        {"hisparse.prefill", *PHASES}, "hisparse.request")
    assert {"hisparse.request_id": "d-1", "hisparse.finish_reason": "stop", "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 2, "hisparse.landing": "host", "hisparse.prefill": "remote"}.items() <= dict(
        whole.attributes or {}).items()
    assert all(failed(span) is None for span in recorded.spans().values())
    carrier = setup.attempts[0].trace
    assert carrier is not None and carrier["traceparent"] == (
        f"00-{TRACE}-{recorded.spans()['hisparse.prefill'].context.span_id:016x}-01")


def test_a_failed_engine_fails_the_phase_under_way(recorded: Recorded, setup: Setup) -> None:
    setup.engine.final = FinishReason.ERROR
    run(setup)
    spans = recorded.spans()
    assert {name for name, span in spans.items() if failed(span)} == {"hisparse.request", "hisparse.decode"}
    assert failed(spans["hisparse.request"]) == "the engine failed: boom"
    assert (spans["hisparse.request"].attributes or {})["http.response.status_code"] == 503


def test_an_engine_that_is_dead_before_it_begins(recorded: Recorded, setup: Setup) -> None:
    setup.engine.error = EngineDeadError("rank 0 is dead")
    run(setup)
    assert set(recorded.spans()) == {"hisparse.request", "hisparse.prefill"}
    assert failed(recorded.spans()["hisparse.request"]) == "rank 0 is dead"


def test_prefill_that_fails(recorded: Recorded, setup: Setup) -> None:
    setup.script = [ApiError(503, "prefill is down")]
    run(setup)
    spans = recorded.spans()
    assert failed(spans["hisparse.prefill"]) == "prefill is down" and failed(spans["hisparse.request"]) is None
    assert (spans["hisparse.request"].attributes or {})["hisparse.prefill"] == "local", "decode recomputed it"


def test_a_refusal_does_not_say_what_the_client_wrote(recorded: Recorded, setup: Setup) -> None:
    run(setup, max_tokens=10_000)
    assert failed(recorded.spans()["hisparse.request"]) == "refused"
    assert set(recorded.spans()) == {"hisparse.request"}


def test_a_client_that_leaves_cuts_the_phase_under_way(recorded: Recorded, setup: Setup) -> None:
    async def leave(at: int) -> None:
        setup.engine.hang_at = at

        async def listen() -> None:
            call = GenerateCall(request_id="d-1", text=SECRET, max_tokens=4, trace=PARENT)
            async for _ in setup.service.generate(call):
                pass

        task = asyncio.create_task(listen())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def cut() -> set[str]:
        return {name for name, span in recorded.spans().items() if (span.attributes or {}).get("hisparse.cut_off")}

    asyncio.run(leave(1))
    assert set(recorded.spans()) == {"hisparse.request", "hisparse.prefill", *PHASES}
    assert cut() == {"hisparse.request", "hisparse.decode"}
    assert (recorded.spans()["hisparse.request"].attributes or {})["hisparse.finish_reason"] == "abandoned"
    recorded.exporter.clear()
    asyncio.run(leave(0))
    assert set(recorded.spans()) == {"hisparse.request", "hisparse.prefill"} and cut() == {"hisparse.request"}
    recorded.exporter.clear()
    setup.script = ["hang"]
    asyncio.run(leave(0))
    assert cut() == {"hisparse.request", "hisparse.prefill"}


@pytest.mark.parametrize("error", [None, EngineDeadError("rank 0 is dead")])
def test_a_prefill_replica_continues_the_trace(recorded: Recorded, error: Exception | None) -> None:
    engine = TimedEngine()
    engine.error = error
    call = PrefillCall(request_id="p-1", prompt_token_ids=(1, 2, 3), cache_salt=SECRET, trace=PARENT)

    async def ask() -> PrefillAnswer:
        answer = await PrefillService(engine, tracer=recorded.tracer).prefill(call)
        await asyncio.sleep(0.01)
        return answer

    asyncio.run(ask())
    whole = recorded.spans()["hisparse.prefill.engine"]
    phases = set() if error else {"hisparse.queue", "hisparse.compute"}
    assert recorded.tree() == {"hisparse.prefill.engine": CALLER} | dict.fromkeys(phases, "hisparse.prefill.engine")
    assert failed(whole) == (str(error) if error else None) and f"{whole.context.trace_id:032x}" == TRACE


# ------------------------------------------------------------------------------------------- the API
def client_of(backend: FakeBackend, recorded: Recorded | None) -> TestClient:
    api = create_api(small_config(), lambda: backend, tracer=None if recorded is None else recorded.tracer)
    return TestClient(api, client=("127.0.0.1", 4000), raise_server_exceptions=False)


@pytest.mark.parametrize("stream", [False, True])
def test_the_ingress_hands_its_span_on(recorded: Recorded, stream: bool) -> None:
    backend = FakeBackend()
    with client_of(backend, recorded) as client:
        body = {"model": "recall", "prompt": SECRET, "n": 2, "stream": stream}
        answer = client.post("/v1/completions", json=body, headers=PARENT)
        client.get("/health")
    assert answer.status_code == 200
    (span,) = recorded.spans().values()
    assert span.name == "POST /v1/completions" and span.kind.name == "SERVER" and recorded.tree() == {span.name: CALLER}
    assert [call.trace for call in backend.calls] == [
        {"traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01", "tracestate": "vendor=1"}] * 2
    assert {"http.response.status_code": 200, "hisparse.request_id": answer.headers["x-request-id"]}.items() <= dict(
        span.attributes or {}).items()


@pytest.mark.parametrize(("error", "status", "message"), [
    (ApiError(503, "no engine"), 503, "HTTP 503"), (ApiError(400, f"bad {SECRET}"), 400, None), (None, 404, None)])
def test_only_failures_of_the_service_are_errors(recorded: Recorded, error: ApiError | None, status: int,
                                                 message: str | None) -> None:
    backend = FakeBackend()
    backend.error = error
    with client_of(backend, recorded) as client:
        answer = client.post("/v1/chat/completions", json={
            "model": "recall" if error else "gpt-9", "messages": [{"role": "user", "content": SECRET}]})
    (span,) = recorded.spans().values()
    assert answer.status_code == status == (span.attributes or {})["http.response.status_code"] and failed(span) == message


@pytest.mark.parametrize(("leaves", "left"), [("after", None), ("before", True), ("cancelled", True)])
def test_a_client_that_left_is_told_from_one_that_has_its_answer(recorded: Recorded, leaves: str, left: bool | None) -> None:
    """A stream that is cut may still send its end; a disconnect behind the end says nothing."""
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if leaves == "cancelled":
            await asyncio.Event().wait()
        if leaves == "before":
            await receive()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        await receive()

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None: ...

    async def talk() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        task = asyncio.create_task(Traced(app, tracer=recorded.tracer)(scope, receive, send))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(talk())
    (span,) = recorded.spans().values()
    assert (span.attributes or {}).get("hisparse.client_left") == left and failed(span) is None


def test_without_a_tracer_a_callers_context_goes_nowhere() -> None:
    backend = FakeBackend()
    with client_of(backend, None) as client:
        assert client.post("/v1/completions", json={"model": "recall", "prompt": "x"}, headers=PARENT).status_code == 200
    assert backend.calls[0].trace is None

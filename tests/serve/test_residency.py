"""The residency page's server side: one sampling, bounded frames, who may see what, framing, and the page's own policy."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hisparse.serve.errors import ApiError
from hisparse.serve.ingress import create_api
from hisparse.serve.residency.hub import ResidencyHub, Sample
from hisparse.serve.residency.routes import stream
from hisparse.serve.residency.view import COLUMNS, MAX_ROWS, Viewer, frame, sse
from tests.serve.conftest import small_config
from tests.serve.fakes import FakeBackend
from tests.serve.residency_world import ScriptedEngine, service

EVERYTHING = Viewer(sees_all=True)


def run(body: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body, 20)

    asyncio.run(bounded())


def frame_of(engines: list[dict[str, Any]], viewer: Viewer = EVERYTHING) -> dict[str, Any]:
    return frame(Sample(number=1, at_s=1.5, engines=engines), viewer, model="recall", interval_s=1.0)


class Asked:
    """Engines' answers, and how often they were asked."""

    def __init__(self) -> None:
        self.times, self.error, self.gate = 0, None, None

    error: Exception | None
    gate: asyncio.Event | None

    async def __call__(self) -> list[dict[str, Any]]:
        self.times += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [{"engine": "e", "times": self.times}]


# ------------------------------------------------------------------------------------------- the hub


def test_many_viewers_are_one_sampling_and_none_is_none() -> None:
    async def body() -> None:
        asked = Asked()
        hub = ResidencyHub(asked, interval_s=0.02)
        await asyncio.sleep(0.1)
        assert asked.times == 0, "nobody looks"

        async def look(count: int) -> list[int]:
            async with aclosing(hub.watch()) as samples:
                return [(await anext(samples)).number for _ in range(count)]

        seen = await asyncio.gather(*(look(10) for _ in range(20)))
        assert all(numbers == sorted(set(numbers)) for numbers in seen), "each sample at most once, in order"
        assert asked.times <= 15 and hub.num_viewers == 0
        before = asked.times
        await asyncio.sleep(0.1)
        assert asked.times == before, "nobody looks any more"
        assert (await look(1))[0] > seen[0][-1], "the next viewer gets a new sample"

    run(body())


def test_a_slow_viewer_skips_and_holds_up_nobody() -> None:
    async def body() -> None:
        hub = ResidencyHub(Asked(), interval_s=0.01)
        async with aclosing(hub.watch()) as slow, aclosing(hub.watch()) as fast:
            first = (await anext(slow)).number
            for _ in range(10):
                latest = await anext(fast)
            second = (await anext(slow)).number
            assert second >= latest.number > first + 5, "the newest, not the next"

    run(body())


def test_a_sampling_that_fails_is_told_and_goes_on() -> None:
    async def body() -> None:
        asked = Asked()
        asked.error = TimeoutError("the cluster does not answer")
        hub = ResidencyHub(asked, interval_s=0.01)
        async with aclosing(hub.watch()) as samples:
            sample = await anext(samples)
            assert sample.problem == "the cluster does not answer" and sample.engines == []
            asked.error = None
            while (sample := await anext(samples)).problem:
                pass
            assert sample.engines

    run(body())


def test_an_engine_in_a_long_step_keeps_its_last_report() -> None:
    async def body() -> None:
        well, sick = {"ok": True, "reason": ""}, {"ok": False, "reason": "a step is stuck"}
        whole, silent = {"role": "decode", "requests": [1]}, {}
        answers = [[{"engine": "a", "health": health, **report}] for health, report in (
            (well, silent), (well, whole), (well, silent), (well, silent), (sick, silent), (well, silent), (well, whole))]
        left = iter(answers)

        async def ask() -> list[dict[str, Any]]:
            return next(left, [])

        hub = ResidencyHub(ask, interval_s=0.01)
        async with aclosing(hub.watch()) as samples:
            seen = [(await anext(samples)).engines[0] for _ in answers]
        assert [item.get("requests") for item in seen] == [None, [1], [1], [1], None, None, [1]]
        assert [item.get("late", False) for item in seen] == [False, False, True, True, False, False, False]

    run(body())


def test_viewers_are_bounded_and_a_cancelled_one_frees_its_place() -> None:
    async def body() -> None:
        asked = Asked()
        hub = ResidencyHub(asked, interval_s=0.01, max_viewers=2)

        async def look() -> None:
            async for _ in hub.watch():
                pass

        tasks = [asyncio.create_task(look()) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="2 viewers"):
            await anext(hub.watch())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert hub.num_viewers == 0
        async with aclosing(hub.watch()) as samples:
            await anext(samples)

    run(body())


# ------------------------------------------------------------------------------------------- frames


def decoded(built: dict[str, Any]) -> list[dict[str, Any]]:
    assert tuple(built["columns"]) == COLUMNS
    return [dict(zip(built["columns"], row, strict=True)) for row in built["requests"]]


def test_a_frame_has_every_engine_and_its_requests() -> None:
    engines = [ScriptedEngine(f"decode-{i}", requests=3, seed=i) for i in range(3)] + [ScriptedEngine("prefill-0", requests=0,
                                                                                                     role="prefill")]
    reports = [engine.report() for engine in engines]
    built = frame_of([*reports, {"engine": "decode-9", "health": {"ok": False, "reason": "rank 0 is dead"}}])
    assert [item["name"] for item in built["engines"]] == ["decode-0", "decode-1", "decode-2", "prefill-0", "decode-9"]
    assert [item["reported"] for item in built["engines"]] == [True] * 4 + [False]
    assert built["engines"][4]["reason"] == "rank 0 is dead" and not built["engines"][4]["ok"]
    rows = {row["id"]: row for row in decoded(built)}
    assert len(rows) == 9
    for index, report in enumerate(reports):
        for asked in report["requests"]:
            row = rows[asked["id"]]
            assert row["engine"] == index and (row["resident"], row["hot"], row["miss"]) == asked["rows"]
            assert all(row[name] == asked[name] for name in ("state", "pages", "device", "both", "host", "strip", "hot_rows"))
    assert json.loads(json.dumps(built))["requests"] == [list(row) for row in built["requests"]]
    assert not built["masked"] and built["requests_hidden"] == 0


@pytest.mark.parametrize(("replicas", "requests", "pages", "most_kib"), [(1, 256, 2048, 48), (64, 300, 64, 160)])
def test_a_frame_is_small(replicas: int, requests: int, pages: int, most_kib: int) -> None:
    reports = [ScriptedEngine(f"decode-{i}", requests=requests, longest_pages=pages, tenants=("red",)).report()
               for i in range(replicas)]
    text = sse("residency", frame_of(reports), 1)
    assert len(text) <= most_kib << 10
    built = json.loads(text.split("data: ")[1])
    listed = len(built["requests"])
    assert listed == min(replicas * 256, MAX_ROWS) and built["requests_hidden"] == replicas * requests - listed
    assert [row[6] for row in built["requests"]] == sorted((row[6] for row in built["requests"]), reverse=True)


def test_other_tenants_have_sizes_but_no_names() -> None:
    engine = ScriptedEngine(requests=8, tenants=("red", "blue"))
    engine.landings[2] |= {"failure": "refused", "reason": f"prompt of {engine.names[2]}"}
    engine.landings[3] |= {"failure": "refused", "reason": "of blue"}
    report = engine.report()
    red = frame_of([report], Viewer(tenant="red"))
    text = json.dumps(red)
    mine = [name for i, name in enumerate(engine.names) if i % 2 == 0]
    others = [name for i, name in enumerate(engine.names) if i % 2]
    assert all(name in text for name in mine) and not any(name in text for name in others)
    assert "blue" not in text and red["masked"]
    hidden = [row for row in decoded(red) if row["id"].startswith("other-")]
    assert len(hidden) == 4 and all(row["tenant"] == "" and row["pages"] for row in hidden)
    again = frame_of([report], Viewer(tenant="red"))
    assert [row["id"] for row in decoded(again)] == [row["id"] for row in decoded(red)], "rows keep their identity"
    reasons = {item["request_id"]: item["reason"] for item in red["landings"] if item["failure"]}
    assert engine.names[2] in reasons[engine.names[2]] and "" in reasons.values()
    assert "blue" in json.dumps(frame_of([report])) and not frame_of([report])["masked"]
    nobody = json.dumps(frame_of([ScriptedEngine(requests=3).report()], Viewer(tenant="red")))
    assert not any(name in nobody for name in ScriptedEngine(requests=3).names), "no tenant known: nobody's, so hidden"


def test_one_event_is_one_event_whatever_is_in_it() -> None:
    evil = "x\n\nevent: end\r\ndata: {}\u2028\x00</script>"
    text = sse("residency", {"name": evil}, 7)
    head, data, *rest = text.split("\n")[0:2] + text.split("\n")[2:]
    assert head == "event: residency" and data == "id: 7" and rest[0].startswith("data: ") and rest[1:] == ["", ""]
    assert text.isascii() and text.count("\n\n") == 1 and "\r" not in text
    assert json.loads(rest[0].removeprefix("data: "))["name"] == evil
    assert sse("end", {"reason": "time"}) == 'event: end\ndata: {"reason":"time"}\n\n'
    long = frame_of([ScriptedEngine("e" * 5000, requests=1, names=["r" * 5000]).report()])
    assert len(decoded(long)[0]["id"]) == len(long["engines"][0]["name"]) == 96


# ------------------------------------------------------------------------------------------- the stream


def collected(reports: Any, *, max_stream_s: float = 60.0, times: list[float] | None = None) -> list[str]:
    out: list[str] = []

    async def body() -> None:
        backend = FakeBackend()
        backend.residency_reports = reports
        hub = ResidencyHub(backend.residency, interval_s=0.005)
        samples = hub.watch()
        clock = iter(times or [0.0] * 1000)
        async for event in stream(samples, await anext(samples), lambda sample: {"engines": len(sample.engines)}, max_stream_s,
                                  lambda: next(clock)):
            out.append(event)
        assert hub.num_viewers == 0

    run(body())
    return out


def test_a_stream_ends_when_no_engine_is_left() -> None:
    """A service that stops must not wait for its viewers."""
    answers = iter([[{"engine": "e"}], [{"engine": "e"}], []])
    events = collected(lambda: next(answers))
    assert [event.split("\n")[0] for event in events] == ["event: residency"] * 3 + ["event: end"]
    assert "no engine runs" in events[-1]


def test_a_stream_ends_by_its_time() -> None:
    events = collected([{"engine": "e"}], max_stream_s=10.0, times=[0.0, 1.0, 9.9, 10.0])
    assert len(events) == 4 and '"time"' in events[-1]


# ------------------------------------------------------------------------------------------- over HTTP


def client_of(backend: FakeBackend, **serve: Any) -> TestClient:
    return TestClient(create_api(small_config(**serve), lambda: backend), client=("127.0.0.1", 4000))


def frames(client: TestClient, key: str = "") -> list[dict[str, Any]]:
    """Until the stream ends by itself: TestClient gives an answer when it is whole."""
    answer = client.get("/residency/events", headers={"Authorization": f"Bearer {key}"} if key else {})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    events = [event.split("\n") for event in answer.text.split("\n\n") if event]
    assert events[-1][0] == "event: end"
    return [json.loads(lines[-1].removeprefix("data: ")) for lines in events[:-1]]


def script(*answers: Any) -> Callable[[], Any]:
    left = iter([*answers, []])
    return lambda: next(left)


def test_events_need_a_key_and_know_the_tenant(backend: FakeBackend, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse.serve.ingress.INTERVAL_S", 0.01)
    keys = tmp_path / "keys"
    keys.write_text("red r-key\nblue b-key\nops o-key\n")
    engine = ScriptedEngine(requests=4, tenants=("red", "blue"))
    report = engine.report()
    client = client_of(backend, api_keys_file=str(keys), operators=["ops"])
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        refused = client.get("/residency/events", headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert backend.samplings == 0
    assert client.get("/residency").status_code == 200, "the page that asks for the key is open"
    shown = {}
    for key in ("r-key", "b-key", "o-key"):
        backend.residency_reports = script([report])
        shown[key] = {row["id"] for row in decoded(frames(client, key)[0])} & set(engine.names)
    assert shown == {"r-key": set(engine.names[::2]), "b-key": set(engine.names[1::2]), "o-key": set(engine.names)}


def test_without_keys_everything_is_shown_to_this_machine_only(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse.serve.ingress.INTERVAL_S", 0.01)
    backend.residency_reports = script(service(3)(), service(3)())
    got = frames(client_of(backend))
    assert len(got) == 3 and len(got[0]["requests"]) == 3 and got[-1]["engines"] == [] and got[0]["model"] == "recall"
    far = TestClient(create_api(small_config(), lambda: backend), client=("203.0.113.9", 4000))
    assert far.get("/residency/events").status_code == 403


def test_calls_carry_the_tenant(backend: FakeBackend, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("red r-key\n")
    body = {"model": "recall", "prompt": "hi"}
    for share in (False, True):
        client = client_of(backend, api_keys_file=str(keys), share_prefixes=share)
        client.post("/v1/completions", json=body, headers={"Authorization": "Bearer r-key"})
        client.post("/v1/chat/completions", json={"model": "recall", "messages": [{"role": "user", "content": "hi"}]},
                    headers={"Authorization": "Bearer r-key"})
    client_of(backend).post("/v1/completions", json=body)
    assert [call.tenant for call in backend.calls] == ["red"] * 4 + [""]


def test_the_page_loads_nothing_from_elsewhere_and_its_policy_forbids_it(client: TestClient) -> None:
    answer = client.get("/residency")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.S)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'", "this very block and nothing else"
    addresses = set(re.findall(r"""(?:https?:)?//[^\s"'`<>]+""", re.sub(r"(?m)^\s*//.*$", "", answer.text)))
    assert addresses == {"http://www.w3.org/2000/svg"}, addresses
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\bstyle=|\bon\w+=\"",
                         answer.text), "text from the server becomes text"
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"

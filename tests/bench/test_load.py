"""`hisparse bench serve` against our own API over scripted answers, in this process: what it counts, refuses and warns of."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from hisparse.bench.load.client import Answer
from hisparse.bench.load.phase import Phase, Spread
from hisparse.bench.load.prompts import PROBE_WORDS, Prompts, probe
from hisparse.bench.serve import rows, warnings
from hisparse.serve.calls import Chunk, GenerateCall
from hisparse.serve.errors import ApiError
from hisparse.serve.ingress import create_api
from tests.serve.conftest import small_config
from tests.serve.fakes import FakeBackend
from tests.test_cli import run

GAP_S = 0.002


def words_of(call: GenerateCall) -> str:
    return call.text if call.text is not None else (call.messages or ())[0][1]


class Engine(FakeBackend):
    """Two tokens a word of prompt; answers of the wanted length, a token each `GAP_S`; prompts' common half is cached."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = self.most_at_once = 0
        self.fails: dict[int, ApiError] = {}
        self.short = False

    async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        self.calls.append(call)
        number = len(self.calls) - 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if number in self.fails:
                yield Chunk(error=self.fails[number])
                return
            count = call.max_tokens - (self.short and call.max_tokens > 1)
            prompt_tokens = 2 * len(words_of(call).split())
            for i in range(count):
                await asyncio.sleep(GAP_S)
                last = i == count - 1
                stats = {"prompt_tokens": prompt_tokens, "cached_tokens": prompt_tokens // 2, "landing": "host"}
                yield Chunk(text=" word", token_ids=(i,), finish_reason="length" if last else None,
                            stats=stats if last else None)
        finally:
            self.at_once -= 1


@contextmanager
def serving(backend: Engine, **options: Any) -> Iterator[str]:
    app = create_api(small_config(**options), lambda: backend)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as found:
        yield found


SMALL = ("--prompt-tokens", "60", "--output-tokens", "4", "-n", "6", "--alone", "2")


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return run(monkeypatch, "bench", "serve", *arguments)


def test_levels_of_clients(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: Engine, url: str,
                           tmp_path: Path) -> None:
    kept = tmp_path / "load.jsonl"
    assert bench(monkeypatch, "--url", url, *SMALL, "-c", "1", "-c", "3", "--shared-prefix", "0.5", "--out", str(kept),
                 "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["facts"]["model"] == "recall" and data["facts"]["hardware"] and data["facts"]["command"]
    found = {row["case"]: row for row in data["rows"]}
    assert [json.loads(line)["case"] for line in kept.read_text().splitlines()] == list(found)
    assert len(found) == 3 * 6 and engine.most_at_once == 3
    # a probe, a warm-up, two alone, six of each level; thirty words of two tokens each make sixty
    assert len(engine.calls) == 2 + 2 + 6 + 6
    prompts = [words_of(call).split() for call in engine.calls[1:]]
    assert all(len(words) == 30 and words[:15] == prompts[0][:15] for words in prompts)
    assert len({tuple(words[15:]) for words in prompts}) == len(prompts), "behind what they share no two are alike"
    assert all(call.sampling.ignore_eos and call.max_tokens == 4 for call in engine.calls[1:])
    for level in ("alone", "1 client", "3 clients"):
        assert found[f"{level}: time to first token"]["value"] >= GAP_S * 1e3
        assert found[f"{level}: time between tokens"]["value"] > 0
        assert found[f"{level}: whole answer"]["value"] >= 4 * GAP_S * 1e3
        output = found[f"{level}: output"]
        assert 0 < output["value"] <= (3 if level == "3 clients" else 1) / GAP_S
        assert output["prompt_tokens"] == 60 * output["requests"] == 2 * output["cached_tokens"]
        assert (output["ceiling_name"] == "x alone") is (level != "alone")
    assert found["3 clients: output"]["ratio_to_ceiling"] == pytest.approx(
        found["3 clients: output"]["value"] / found["alone: output"]["value"])


def test_a_rate_and_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: Engine,
                            url: str) -> None:
    for columns in ("80", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        assert bench(monkeypatch, "--url", f"{url}/v1/", *SMALL, "--rate", "200", "--chat") == 0
        shown = capsys.readouterr()
        table = shown.out[shown.out.index("times in ms"):].splitlines()
        assert len(table) > 5 and max(map(len, table)) <= int(columns)
        text = " ".join(shown.out.replace("│", " ").split())
        assert "alone 2 of 2" in text and "50%" in text and "200" in text and "endpoint: chat completions" in text
    assert shown.err.count("first token after") == 8, "a pipe gets a line for each answer"


def test_the_same_seed_asks_the_same(monkeypatch: pytest.MonkeyPatch, engine: Engine, url: str) -> None:
    for seed in ("1", "1", "2"):
        assert bench(monkeypatch, "--url", url, *SMALL, "-c", "1", "--seed", seed, "--json") == 0
    asked = [words_of(call) for call in engine.calls]
    assert asked[:10] == asked[10:20] and not set(asked[:10]) & set(asked[20:])


def test_refusals_are_counted_and_failures_end_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                      engine: Engine, url: str) -> None:
    engine.fails = {5: ApiError(429, "queues are full"), 6: ApiError(503, "peer failed")}
    assert bench(monkeypatch, "--url", url, *SMALL, "-c", "2") == 0
    shown = capsys.readouterr()
    assert "4 of 6" in shown.out and "- 1 x 429: queues are full" in shown.out and "- 1 x 503: peer failed" in shown.out
    engine.fails = {len(engine.calls) + 5: ApiError(400, "no such thing")}
    assert bench(monkeypatch, "--url", url, *SMALL, "-c", "2") == 1
    assert "1 requests failed: 400: no such thing" in capsys.readouterr().err
    engine.fails = {len(engine.calls) + 2: ApiError(500, "broken")}
    assert bench(monkeypatch, "--url", url, *SMALL) == 1
    assert "a client alone was not served: 500: broken" in capsys.readouterr().err


def test_an_answer_of_another_length_is_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                  engine: Engine, url: str) -> None:
    engine.short = True
    assert bench(monkeypatch, "--url", url, *SMALL) == 1
    assert "--no-ignore-eos" in capsys.readouterr().err
    assert bench(monkeypatch, "--url", url, *SMALL, "--no-ignore-eos") == 0


def test_keys_and_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine(), api_keys=["secret-1"]) as url:
        assert bench(monkeypatch, "--url", url, *SMALL) == 1
        assert "answered 401" in (error := capsys.readouterr().err) and "OPENAI_API_KEY" in error
        monkeypatch.setenv("OPENAI_API_KEY", "secret-1")
        assert bench(monkeypatch, "--url", url, *SMALL, "--json") == 0
        assert "secret-1" not in capsys.readouterr().out
        assert bench(monkeypatch, "--url", url, *SMALL, "--model", "gpt-7") == 1
        assert "404" in (error := capsys.readouterr().err) and "gpt-7" in error


@pytest.mark.parametrize(("arguments", "code", "text"), [
    (("--url", "http://127.0.0.1:9"), 1, "start one with 'hisparse serve'"),
    (("--url", "localhost:8000"), 2, "must begin with http"),
    (("--shared-prefix", "1.5"), 2, "must be in 0..1"),
    (("--rate", "0"), 2, "above 0"),
    (("--rate", "2", "-c", "3"), 2, "give one of them"),
    (("--out", "/no/where/x.jsonl"), 2, "a directory that exists"),
    (("-c", "0"), 2, "greater than or equal to 1"),
])
def test_mistakes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int,
                  text: str) -> None:
    assert bench(monkeypatch, *arguments) == code
    assert text in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_lengths_and_shares_of_prompts() -> None:
    assert len(probe(0).split()) == PROBE_WORDS and probe(0) == probe(0) != probe(1)
    for shared, common in ((0.0, 0), (0.25, 100), (1.0, 399)):
        prompts = Prompts(num_tokens=1000, shared=shared, tokens_per_word=2.5, seed=3)
        first, second = (prompts.text(i).split() for i in (0, 1))
        assert len(first) == len(second) == 400 and first[:common] == second[:common]
        assert sum(a == b for a, b in zip(first[common:], second[common:], strict=True)) <= max(1, (400 - common) // 10)


def test_numbers_of_a_phase_by_hand() -> None:
    assert Spread.of([float(i) for i in range(1, 101)]) == Spread(p50=50.5, p90=90, p99=99, best=1, max=100)
    assert Spread.of([]) == Spread(p50=0, p90=0, p99=0, best=0, max=0)
    good = Answer(first_token_s=0.5, gaps_s=[0.1, 0.3], total_s=1.0, prompt_tokens=100, output_tokens=5, cached_tokens=25)
    single = Answer(first_token_s=0.2, total_s=0.2, prompt_tokens=100, output_tokens=1)
    late = Answer(failure="429: full", total_s=9.0)
    phase = Phase(name="x", answers=(good, single, late), wall_s=2.0, late_s=0.1, cpu_share=0.9)
    # two chunks behind the first brought four tokens
    assert good.token_gap_s == pytest.approx(0.1) and single.token_gap_s is None and late.refused
    assert phase.output_tokens_per_s == 3.0 and phase.requests_per_s == 1.0 and phase.cached_share == 0.125
    assert phase.token_gap.p50 == pytest.approx(0.1) and phase.longest_gap.max == 0.3 and phase.latency.max == 1.0
    told = warnings([phase])
    assert len(told) == 2 and "90% of a core" in told[0] and "100 ms late" in told[1]
    assert {row.case for row in rows([phase])} == {
        f"alone: {what}" for what in ("time to first token", "time between tokens", "longest wait for a token", "whole answer",
                                      "output", "answers")}



"""The real `openai` client, sync, async and streaming, against the API over a real engine."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from hisparse.checkpoints import recall_checkpoint
from hisparse.testing.recall_documents import RecallDocument, build_recall_document
from hisparse.testing.reference_decode import ReferenceModel
from tests.serve.real_service import Served, real_config, serving_here, wait_for

LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving_here(real_config()) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def document(served: Served, seed: int = 3, tokens: int = 200) -> RecallDocument:
    return build_recall_document(seed, budget=tokens, measure=lambda text: len(served.backend.tokenizer.encode(text)))


@pytest.fixture(scope="module")
def prompt(served: Served) -> str:
    return document(served).prompt


def test_chat_then_answer_the_answer(served: Served, client: openai.OpenAI) -> None:
    """The client's own answer object is sent back as history, with all its nulls."""
    asked = document(served)
    messages: list[Any] = [{"role": "user", "content": asked.prompt}]
    first = client.chat.completions.create(model="recall", messages=messages, temperature=0, max_completion_tokens=8)
    message = first.choices[0].message
    assert asked.is_answer(message.content or "") and first.choices[0].finish_reason == "stop"
    assert first.system_fingerprint is not None and first.system_fingerprint.startswith("fp_") and first.created > 1.7e9
    again = [*messages, message, {"role": "user", "content": asked.question}]
    second = client.chat.completions.create(model="recall", messages=again, temperature=0, max_completion_tokens=8,
                                            user="somebody", metadata={"a": "b"})
    assert (second.model_extra or {})["hisparse"]["warnings"] == [
        "metadata has no effect on this server", "user has no effect on this server"]


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "recall" and card.created > 1.7e9 and client.models.retrieve("recall") == card
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found" and "recall" in caught.value.message


def test_an_async_client_streams_while_others_are_answered(served: Served, prompt: str) -> None:
    async def talk() -> list[str]:
        async with served.async_client() as client:
            async def stream(limit: int) -> str:
                text, usage = "", None
                async for chunk in await client.chat.completions.create(
                        model="recall", messages=[{"role": "user", "content": prompt}], stream=True, temperature=0,
                        stream_options={"include_usage": True}, max_completion_tokens=limit, extra_body={"ignore_eos": True}):
                    text += "".join(choice.delta.content or "" for choice in chunk.choices)
                    usage = chunk.usage
                assert usage is not None and usage.completion_tokens == limit
                return text

            async def whole(limit: int) -> str:
                answer = await client.chat.completions.create(
                    model="recall", messages=[{"role": "user", "content": prompt}], temperature=0,
                    max_completion_tokens=limit, extra_body={"ignore_eos": True})
                return answer.choices[0].message.content or ""

            return list(await asyncio.gather(stream(20), whole(20), stream(12), whole(12)))

    texts = asyncio.run(talk())
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0].startswith(texts[2])


def test_usage_says_what_the_cache_had(client: openai.OpenAI, prompt: str) -> None:
    salted: Any = {"extra_body": {"cache_salt": "usage"}}
    cold, warm = (client.completions.create(model="recall", prompt=prompt, max_tokens=2, **salted) for _ in range(2))
    stream = client.completions.create(model="recall", prompt=prompt, max_tokens=2, stream=True,
                                       stream_options={"include_usage": True}, **salted)
    *parts, last = stream
    assert all(part.usage is None for part in parts) and last.choices == []
    cached = [usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
              for usage in (cold.usage, warm.usage, last.usage)]
    assert cached[0] == 0 < cached[1] == cached[2] and cached[1] % 64 == 0
    assert warm.usage is not None and warm.usage.total_tokens == warm.usage.prompt_tokens + 2


# ------------------------------------------------------------------------------------------- choices and seeds


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_has_its_index_and_the_text_of_its_seed(client: openai.OpenAI, prompt: str, stream: bool) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "max_tokens": 10, "extra_body": {"ignore_eos": True}}
    alone = [client.completions.create(model="recall", prompt=prompt, seed=70 + i, **options).choices[0].text for i in range(3)]
    assert len(set(alone)) == 3
    several = client.completions.create(model="recall", prompt=prompt, seed=70, n=3, stream=stream, **options)
    texts, ends = ["", "", ""], [0, 0, 0]
    for part in several if stream else [several]:  # type: ignore[list-item, union-attr]
        for choice in part.choices:
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason == "length"
    assert texts == alone and ends == [1, 1, 1]


def test_prompts_and_choices_are_numbered_prompt_by_prompt(served: Served, client: openai.OpenAI) -> None:
    asked = [document(served, seed, 120) for seed in (5, 6)]
    answer = client.completions.create(model="recall", prompt=[item.prompt for item in asked], n=2, max_tokens=8, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [asked[i // 2].is_answer(choice.text) for i, choice in enumerate(answer.choices)] == [True] * 4
    ids = [served.backend.tokenizer.encode(item.prompt) for item in asked]
    by_ids = client.completions.create(model="recall", prompt=ids, max_tokens=8, temperature=0)
    assert [choice.text for choice in by_ids.choices] == [answer.choices[0].text, answer.choices[2].text]
    one = client.completions.create(model="recall", prompt=ids[0], max_tokens=8, temperature=0)
    assert one.choices[0].text == answer.choices[0].text


# ------------------------------------------------------------------------------------------- stop strings


def stops_of(text: str) -> list[tuple[list[str], str]]:
    """Stop strings of a text with what is left of it: inside, over several tokens, several at once, never found."""
    cases: list[tuple[list[str], str]] = [([f"{text}?"], text), ([text[3:], "\x00never"], text[:3])]
    for at, size in ((2, 1), (5, 4), (9, 9)):
        stop = text[at : at + size]
        cases.append(([stop], text[: text.index(stop)]))
    first, second = text[12:15], text[6:9]
    cases.append(([first, second], text[: min(text.index(first), text.index(second))]))
    return cases


@pytest.fixture(scope="module")
def unstopped(served: Served) -> str:
    with served.client() as client:
        text = client.completions.create(model="recall", prompt=document(served, 8).prompt, **LONG).choices[0].text
    assert len(text) > 25
    return text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", range(6))
def test_stop_strings_end_the_text_and_are_never_seen(served: Served, client: openai.OpenAI, stream: bool, case: int,
                                                      unstopped: str) -> None:
    prompt = document(served, 8).prompt
    stop, expected = stops_of(unstopped)[case]
    seen, reasons = "", []
    tokens: list[str] = []
    answer = client.completions.create(model="recall", prompt=prompt, stop=stop, stream=stream, logprobs=1, **LONG)
    for part in answer if stream else [answer]:  # type: ignore[list-item, union-attr]
        for choice in part.choices:
            seen += choice.text
            assert expected.startswith(seen), "nothing has to be taken back"
            reasons.append(choice.finish_reason)
            tokens += choice.logprobs.tokens if choice.logprobs else []  # type: ignore[arg-type]
            shown = "".join(token for token in tokens if token != "<eos>")
            assert expected.startswith(shown), "log probabilities tell no more than the text"
    assert seen == expected and reasons[-1] == ("length" if expected == unstopped else "stop")
    assert len(shown) > len(expected) - 12, "all tokens but the one that runs into the stop string"


# ------------------------------------------------------------------------------------------- log probabilities


@pytest.fixture(scope="module")
def oracle(served: Served) -> tuple[list[int], torch.Tensor]:
    """Prompt ids, and [24, vocab] log probabilities of a greedy answer, by unmodified transformers."""
    ids = served.backend.tokenizer.encode(document(served, 8).prompt)
    run = ReferenceModel(recall_checkpoint()).decode(ids, 24, keep_logits=True)
    assert run.first_excusable() == 24 and run.logits is not None
    return ids, run.logits.log_softmax(dim=1)


def name(served: Served, token_id: int) -> str:
    """A token as the API shows it."""
    text = served.backend.tokenizer.decode([token_id], skip_special_tokens=False)
    return text if "\ufffd" not in text else f"bytes:\\x{served.backend.tokenizer.piece(token_id).hex()}"  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions_are_those_of_transformers(served: Served, client: openai.OpenAI, stream: bool,
                                                           oracle: tuple[list[int], torch.Tensor]) -> None:
    ids, expected = oracle
    answer = client.completions.create(model="recall", prompt=ids, logprobs=5, stream=stream, **LONG)
    text, tokens, values, top, offsets = "", [], [], [], []
    for part in answer if stream else [answer]:  # type: ignore[list-item, union-attr]
        for choice in part.choices:
            text += choice.text
            found: Any = choice.logprobs
            tokens, values = tokens + found.tokens, values + found.token_logprobs
            top, offsets = top + found.top_logprobs, offsets + found.text_offset
    shown = ["" if token == "<eos>" else token for token in tokens]  # which has no text
    assert len(tokens) == 24 and "".join(shown) == text
    assert offsets == [0, *itertools.accumulate(len(token) for token in shown)][:-1]
    assert torch.allclose(torch.tensor(values), expected.max(dim=1).values, atol=1e-4)
    for row, found in zip(expected, top):
        best = row.topk(5)
        assert [name(served, int(i)) for i in best.indices] == sorted(found, key=lambda token: -found[token])
        assert sorted(found.values(), reverse=True) == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats_are_those_of_transformers(served: Served, client: openai.OpenAI, stream: bool,
                                                     oracle: tuple[list[int], torch.Tensor]) -> None:
    _, expected = oracle
    answer: Any = client.chat.completions.create(
        model="recall", messages=[{"role": "user", "content": document(served, 8).prompt}], temperature=0, logprobs=True,
        top_logprobs=3, max_completion_tokens=24, stream=stream, extra_body={"ignore_eos": True})
    found = [item for part in (answer if stream else [answer]) for choice in part.choices
             if choice.logprobs for item in choice.logprobs.content]
    assert torch.allclose(torch.tensor([item.logprob for item in found]), expected.max(dim=1).values, atol=1e-4)
    for row, item in zip(expected, found):
        assert item.bytes == (None if item.token == "<eos>" else list(item.token.encode()))
        assert [other.logprob for other in item.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert item.top_logprobs[0].token == item.token


def test_a_drawn_token_that_is_not_among_the_likeliest_is_reported_with_them(client: openai.OpenAI, prompt: str) -> None:
    answer = client.completions.create(model="recall", prompt=prompt, logprobs=1, temperature=2, seed=1, max_tokens=40,
                                       extra_body={"ignore_eos": True})
    found: Any = answer.choices[0].logprobs
    assert any(len(top) == 2 for top in found.top_logprobs), "at this temperature unlikely tokens come"
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs):
        assert top[token] == value and 1 <= len(top) <= 2
    only = client.completions.create(model="recall", prompt=prompt, logprobs=0, max_tokens=2).choices[0].logprobs
    assert only is not None and only.top_logprobs is not None and only.tokens is not None
    assert [list(top) for top in only.top_logprobs] == [[token] for token in only.tokens]


# ------------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_every_choice(served: Served, prompt: str, stream: bool) -> None:
    body = {"model": "recall", "prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": stream, "n": 3}
    before = served.backend.settled()["generated_tokens"]
    served.backend.aborted.clear()
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_for(lambda: served.backend.stats()["running"] == 3)
    if stream:
        indices, answer = set(), connection.getresponse()
        while len(indices) < 3:
            line = answer.readline().removeprefix(b"data: ").strip()
            indices |= {choice["index"] for choice in json.loads(line)["choices"]} if line else set()
    connection.close()
    wait_for(lambda: len(served.backend.aborted) == 3)
    assert served.backend.settled()["generated_tokens"] - before < 900, "none ran to its end"


# ------------------------------------------------------------------------------------------- full


def test_a_full_server_says_when_to_come_back_and_the_client_does(served: Served, prompt: str) -> None:
    """Twenty requests fit (four seats, sixteen wait): 16 choices stream, 5 more are refused, and succeed on a retry."""
    served.backend.settled()
    with served.client() as client:
        crowd = client.completions.create(model="recall", prompt=prompt, n=16, max_tokens=250, stream=True,
                                          extra_body={"ignore_eos": True})
        next(iter(crowd))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="recall", prompt=prompt, n=5, max_tokens=2)
        assert int(caught.value.response.headers["retry-after"]) >= 1 and "scheduler.max_num_seqs" in caught.value.message
        crowd.close()
        patient = client.with_options(max_retries=8)
        assert len(patient.completions.create(model="recall", prompt=prompt, n=5, max_tokens=2).choices) == 5
    served.backend.settled()


def test_a_request_that_takes_too_long_ends_everywhere() -> None:
    with serving_here(real_config(request_timeout_s=0.5)) as served, served.client() as client:
        options: dict[str, Any] = {"model": "recall", "prompt": [300, 301], "n": 3, "max_tokens": 500}
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**options, extra_body={"ignore_eos": True})
        assert caught.value.status_code == 504 and caught.value.code == "deadline_exceeded"
        with pytest.raises(openai.APIError, match="did not finish"):
            list(client.completions.create(**options, stream=True, extra_body={"ignore_eos": True}))
        assert served.backend.settled()["generated_tokens"] < 3000
